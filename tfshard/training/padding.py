"""Pad batches to a capacity, so that batches of different shapes share an open function (step_functions.py).

The host pads a batch. The function cuts the padding off before the model sees the batch, so the dims that were cut have
unknown sizes.
"""

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import tensorflow as tf

from tfshard.devices import transfer
from tfshard.operations import unsized
from tfshard.training.strategy import ShardedStrategy

# Small tensors are padded up to this many bytes, and their dims up to this size, so that small sizes share a capacity.
_SMALL_BYTES = 1 << 18
_SMALL_DIM = 256

# tests/training/test_new_shapes.py tests each operation.
_TRIED = frozenset(
    ("Abs", "AddN", "AddV2", "Any", "ArgMax", "AvgPool", "AvgPoolGrad", "BiasAdd", "BiasAddGrad", "Bitcast",
     "BitwiseAnd", "BroadcastGradientArgs", "BroadcastTo", "Cast", "ConcatV2", "Conv2D", "Conv2DBackpropFilter",
     "Conv2DBackpropInput", "Cos", "Cumprod", "Cumsum", "DepthwiseConv2dNative",
     "DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput", "DynamicPartition", "Einsum",
     "Elu", "EluGrad", "Empty", "Equal", "Erf", "Erfc", "Exp", "ExpandDims", "Expm1", "Fill", "Floor", "FloorDiv",
     "FloorMod", "GatherV2", "Greater", "GreaterEqual", "Identity", "IdentityN", "InvertPermutation", "LeakyRelu",
     "LeakyReluGrad", "Less", "LessEqual", "ListDiff", "Log", "Log1p", "LogSoftmax", "LogicalAnd", "LogicalNot",
     "LogicalOr", "MatMul", "MatrixDiagPartV3", "MatrixSetDiagV3", "Max", "MaxPool", "MaxPoolGrad", "Maximum",
     "Mean", "Min", "Minimum", "Mul", "Neg", "NotEqual", "OneHot", "Pack", "Pad", "Pow", "Prod", "RealDiv",
     "Reciprocal", "ReciprocalGrad", "Relayout", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Reshape", "ReverseV2",
     "Roll", "Rsqrt", "RsqrtGrad", "Select", "SelectV2", "Selu", "SeluGrad", "Shape", "ShapeN", "Sigmoid",
     "SigmoidGrad", "Sign", "Sin", "Size", "Slice", "Softmax", "SoftmaxCrossEntropyWithLogits", "Softplus",
     "Softsign", "SoftsignGrad", "SparseSoftmaxCrossEntropyWithLogits", "Split", "Sqrt", "SqrtGrad", "Square",
     "SquaredDifference", "Squeeze", "StatelessRandomNormalV2", "StatelessRandomUniformV2", "StopGradient",
     "StridedSlice", "StridedSliceGrad", "Sub", "Sum", "Tanh", "TanhGrad", "Tile", "Transpose", "Unpack",
     "UnsortedSegmentSum", "Where", "ZerosLike",
     # For local shards of variables on replicas of a mesh: TensorFlow does not infer the size of the result.
     "CollectiveAllToAllV2", "CollectiveGatherV2", "CollectiveReduceV2", "EnsureShape")
)  # fmt: skip


class UntriedOperationError(Exception):
    """An open function contains an operation that was not tested on tensors of unknown size."""


def check_operations(graph: tf.Graph) -> None:
    """Raise `UntriedOperationError` if an operation of a graph was not tested on tensors of unknown size."""
    for operation in graph.get_operations():
        if operation.type not in _TRIED and any(map(unsized.is_open, (*operation.inputs, *operation.outputs))):
            raise UntriedOperationError(operation.type)


class BatchFamily:
    """The batches of one structure.

    Args:
        structure: The structure (`structure_of`).

    Attributes:
        separate: How many shapes have separate functions.
    """

    def __init__(self, structure: str):
        self.separate = 0
        self._structure = structure
        self._first: list[tuple[int, ...]] | None = None
        self._open: set[tuple[int, int]] = set()

    def note(self, batch: Any) -> None:
        """Open the dims that differ in size between batches."""
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in tf.nest.flatten(batch)]
        if self._first is None:
            self._first = shapes
        for number, (first, shape) in enumerate(zip(self._first, shapes, strict=True)):
            self._open.update((number, dim) for dim, size in enumerate(shape) if size != first[dim])

    def padded(self, batch: Any, strategy: ShardedStrategy) -> tuple[Any, Hashable]:
        """Return a batch padded to its capacities, with masks of the samples to keep, and the key of its function."""
        leaves, capacities = [], []
        masks: list[tuple[tf.Tensor | None, ...]] = []
        for number, leaf in enumerate(tf.nest.flatten(batch)):
            if not hasattr(leaf, "shape"):
                leaves.append(leaf)
                masks.append(())
                continue
            host = transfer.to_host(leaf)
            opened = [(number, dim) in self._open for dim in range(host.ndim)]
            shape = _capacity(host.shape, opened, host.itemsize)
            full = np.zeros(shape, host.dtype)
            full[tuple(slice(size) for size in host.shape)] = host
            leaves.append(_full(full, strategy))
            masks.append(
                tuple(
                    _full(np.arange(most) < size, strategy) if is_open else None
                    for most, size, is_open in zip(shape, host.shape, opened, strict=True)
                )
            )
            capacities.append((number, shape, tuple(opened), host.dtype.name))
        return (tf.nest.pack_sequence_as(batch, leaves), tuple(masks)), ("open", self._structure, tuple(capacities))


def _full(value: np.ndarray, strategy: ShardedStrategy) -> tf.Tensor:
    tensor: tf.Tensor = transfer.host_to_mesh(value, (None,) * value.ndim, strategy.mesh)
    return tensor


def can_be_padded(leaf: Any) -> bool:
    """Return whether the host can pad a leaf."""
    if isinstance(leaf, tf.RaggedTensor) or 0 in leaf.shape:
        return False
    dtype = tf.as_dtype(leaf.dtype)
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def _capacity(shape: tuple[int, ...], opened: list[bool], itemsize: int) -> tuple[int, ...]:
    """Return the padded shape of a tensor: open dims grow to powers of two, and in small tensors even further."""
    sizes = [1 << (size - 1).bit_length() if is_open else size for size, is_open in zip(shape, opened, strict=True)]
    dims = [dim for dim, is_open in enumerate(opened) if is_open]
    while dims and math.prod(sizes) * itemsize * 2 <= _SMALL_BYTES:
        smallest = min(dims, key=lambda dim: sizes[dim])
        if sizes[smallest] >= _SMALL_DIM:
            break
        sizes[smallest] *= 2
    return tuple(sizes)


def cut(leaf: Any, masks: tuple[tf.Tensor | None, ...]) -> Any:
    """Cut the padding off. The `Where` operation tells `operations.unsized` that the size depends on values."""
    for dim, mask in enumerate(masks):
        if mask is not None:
            leaf = tf.gather(leaf, tf.cast(tf.where(mask)[:, 0], tf.int32), axis=dim)
    return leaf


def structure_of(batch: Any) -> str:
    """Return the structure of a batch with dtypes and ranks."""
    return str(tf.nest.map_structure(_dtype_and_rank, batch))


def _dtype_and_rank(leaf: Any) -> Any:
    if leaf is None or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{tf.as_dtype(leaf.dtype).name} {len(leaf.shape)}"
