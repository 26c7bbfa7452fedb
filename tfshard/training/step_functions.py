"""The step functions of a model, by the shapes of its batches.

A step is traced with all shapes known, because DTensor shards no dim of unknown size. Each traced function takes about
a second to compile and some megabytes to keep. That is too much for each batch size or sequence length:

- The first shapes, and a shape that comes many times in a row, have separate functions.
- Other shapes share an open function. The host pads each batch to a capacity. The function cuts the padding off before
  the model sees the batch. Batch statistics, losses over pairs of samples and custom `train_step`s therefore match
  single-device Keras. Each capacity, a power of two, has a separate function. The dims that were
  cut have unknown sizes, which DTensor cannot shard: every device computes the full batch. An open function takes
  batches that every device computes in full anyway, and batches that cost little.
- A model keeps at most `MOST` functions of a kind, and drops the least recently used one.

An open function may contain operations that were tested on tensors of unknown size (`_TRIED`). If it contains another
operation, or DTensor refuses it, every shape gets a separate function.
"""

import collections
import dataclasses
import gc
import math
from collections.abc import Callable, Hashable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.devices import batching, clients, transfer
from tfshard.errors import warn
from tfshard.graph import inventory
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import unsized
from tfshard.training import output_losses
from tfshard.training.strategy import ShardedStrategy

# Keras calls this for one execution, with an iterator over batches.
StepFunction = Callable[[Any], Any]

MOST = 32

# Shapes that have separate functions at once: full batches and remainders, for each structure of a batch.
FIRST = 3

# A shape that comes this many times in a row gets a separate function.
IN_A_ROW = 64

# A model that has compiled this many functions of a kind warns.
MANY = 16

# The limit of parameters times positions (samples, tokens, pixels) for a batch that every device computes in full.
CHEAP = 1 << 25

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


class _UntriedOperation(Exception):
    """An open function contains an operation that was not tested on tensors of unknown size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch for a step.

    Attributes:
        batch: The batch, with arrays for tensors that are on the host.
        key: The key of the function that runs on the batch.
        argument: The argument of the function, on the mesh.
        is_open: True for an open function.
        counts_once: True if the batch counts once in the metrics of outputs' losses (`output_losses`).
    """

    batch: Any
    key: Hashable
    argument: Any
    is_open: bool
    counts_once: bool


class StepFunctions:
    """The functions of one kind of step of a model.

    Attributes:
        functions: The kept functions by key, the least recently used one first.
        compiled: How many functions were compiled.
        takes_open: False once the model's step is known not to work as an open function.

    Args:
        model: The model.
        strategy: Its strategy.
        kind: The kind of step, such as `"training step"`, for messages.
        function: The function that Keras made.
        again: Makes another function like `function`.
        step: The name of the model's method that the function calls, such as `"train_step"`.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: ShardedStrategy,
        *,
        kind: str,
        function: StepFunction,
        again: Callable[[], StepFunction],
        step: str,
    ):
        self._model, self._strategy, self._kind, self._step = model, strategy, kind, step
        self._again = again
        self._waiting = [function]
        self.functions: collections.OrderedDict[Hashable, StepFunction] = collections.OrderedDict()
        self._families: dict[str, _Family] = {}
        self.takes_open = True
        self._last: Hashable = None
        self._in_a_row = 0
        self.compiled = 0
        # True if the latest open function was traced to the end.
        self._is_traced = False
        # How many batches in a row every device computed in full. None after the warning.
        self._full_in_a_row: int | None = 0

    def prepare(self, batch: Any, *, counts_once: bool = False, may_share: bool = True) -> Prepared:
        """Choose the function for a batch, and move the batch to the mesh.

        Args:
            batch: The batch.
            counts_once: As in `Prepared`.
            may_share: True if the batch may go through an open function, in which every batch counts once.
        """
        strategy = self._strategy
        if strategy.config.already_sharded or self._model.run_eagerly:
            return self._separate(batch, counts_once)
        batch = tf.nest.map_structure(batching.on_host, batch)
        self._note_full(batch)
        key = self._shape_key(batch, counts_once)
        self._in_a_row = self._in_a_row + 1 if key == self._last else 1
        self._last = key
        family = self._family(batch)
        if may_share and key not in self.functions and self._shares(batch, family):
            argument, capacities = family.padded(batch, strategy)
            return Prepared(batch=batch, key=capacities, argument=argument, is_open=True, counts_once=counts_once)
        family.separate += key not in self.functions
        return self._separate(batch, counts_once)

    def run(self, prepared: Prepared) -> Any:
        """Run the step on one batch."""
        function = self.functions.get(prepared.key)
        if function is not None:
            self.functions.move_to_end(prepared.key)
            return self._call(function, prepared)
        if not prepared.is_open:
            function = self._waiting.pop() if self._waiting else self._again()
            return self._first_run(prepared, function)
        self._is_traced = False
        try:
            return self._first_run(prepared, _private.make_step_function(self._model, self._open_step))
        except Exception as error:
            if self._is_traced and not _is_refusal(error):
                raise  # The step ran, and failed as on one device.
            self.takes_open = False
            del self.functions[prepared.key]
        return self.run(self._separate(prepared.batch, prepared.counts_once))

    def _call(self, function: StepFunction, prepared: Prepared) -> Any:
        # Keras counts a batch of unknown size once.
        rows = _rows(prepared.argument) if prepared.counts_once and not prepared.is_open else None
        with output_losses.counted_once(rows):
            return function([prepared.argument])

    def _separate(self, batch: Any, counts_once: bool) -> Prepared:
        strategy = self._strategy
        argument = batching.batch_to_mesh(batch, strategy.mesh, strategy.config.already_sharded)
        key = self._shape_key(argument, counts_once)
        return Prepared(batch=batch, key=key, argument=argument, is_open=False, counts_once=counts_once)

    def _shape_key(self, batch: Any, counts_once: bool) -> Hashable:
        if self._model.run_eagerly:
            return "eager"
        shapes = tuple(tuple(leaf.shape) for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape"))
        return shapes, self._strategy.microbatches, counts_once

    def _first_run(self, prepared: Prepared, function: StepFunction) -> Any:
        self.compiled += 1
        self.functions[prepared.key] = function
        try:
            return self._call(function, prepared)
        finally:
            _private.keep_gradients_with_graphs()
            if len(self.functions) > MOST:
                self.functions.popitem(last=False)
                gc.collect()  # Frees the graph, which is a cycle, and the function in TensorFlow and DTensor.
            if self.compiled == MANY:
                self._warn()

    # --- open functions -------------------------------------------------------------------------------

    def _family(self, batch: Any) -> "_Family":
        structure = str(tf.nest.map_structure(_dtype_and_rank, batch))
        family = self._families.setdefault(structure, _Family())
        family.note(batch)
        return family

    def _shares(self, batch: Any, family: "_Family") -> bool:
        """Return whether a batch goes through the open function."""
        strategy = self._strategy
        axes = axis_sizes(strategy.mesh)
        leaves = [leaf for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape")]
        if (
            not self.takes_open
            or family.separate < FIRST
            or self._in_a_row >= IN_A_ROW
            or clients.here().is_launched
            or strategy.microbatches > 1
            or strategy.config.compression is not None
            or strategy.config.tables is not None
            or any(axes[axis] > 1 for axis in axes.tensor)
            or not all(_can_be_padded(leaf) for leaf in leaves)
        ):
            return False
        return self._is_full(leaves) or self._is_cheap(leaves)

    def _is_full(self, leaves: list[Any]) -> bool:
        """Return whether every device computes a batch in full, because the batch axis divides none of its tensors."""
        return not any(any(batching.batch_axes(tuple(leaf.shape), self._strategy.mesh)) for leaf in leaves)

    def _is_cheap(self, leaves: list[Any]) -> bool:
        """Return whether a batch is so small that every device may compute it in full."""
        positions = max(_positions(leaf) for leaf in leaves)
        parameters = sum(math.prod(variable.shape) for variable, _ in inventory.owned_variables(self._model))
        return bool(positions * parameters <= CHEAP)

    def _note_full(self, batch: Any) -> None:
        """Warn once about training batches that the batch axis does not divide.

        A single such batch is the last batch of an epoch, and does not count.
        """
        if self._full_in_a_row is None or self._kind != "training step":
            return
        leaves = [leaf for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape")]
        axes = axis_sizes(self._strategy.mesh)
        if axes.data_size == 1 or not leaves or not self._is_full(leaves):
            self._full_in_a_row = 0
            return
        self._full_in_a_row += 1
        if self._full_in_a_row < 2 or self._is_cheap(leaves):
            return
        self._full_in_a_row = None
        shapes = [tuple(leaf.shape) for leaf in leaves]
        samples = max((shape[0] for shape in shapes if shape), default=1)
        divided = -(-samples // axes.data_size) * axes.data_size
        warn(
            f"Model '{self._model.name}' trains on batches that mesh axis '{axes.data}' of {axes.data_size} devices "
            "does not divide, so every device computes each batch in full: the numbers are right, and the step is "
            f"not shared out. Use a batch_size that {axes.data_size} divides, such as {divided}. "
            f"Received: a batch of shapes {shapes}"
        )

    def _open_step(self, padded: tuple[Any, Any]) -> Any:
        """Run the model's step on a padded batch."""
        batch, masks = padded
        leaves = [_cut(leaf, kept) for leaf, kept in zip(tf.nest.flatten(batch), masks, strict=True)]
        result = getattr(self._model, self._step)(tf.nest.pack_sequence_as(batch, leaves))
        for operation in tf.compat.v1.get_default_graph().get_operations():
            if operation.type not in _TRIED and any(map(unsized.is_open, (*operation.inputs, *operation.outputs))):
                raise _UntriedOperation(operation.type)
        self._is_traced = True
        return result

    def _warn(self) -> None:
        warn(
            f"Model '{self._model.name}' has compiled its {self._kind} for {MANY} shapes of batches. Each new shape is "
            f"compiled, which takes seconds, and tfshard keeps the {MOST} functions that were used last. Pad batches "
            "to a few sizes and sequences to a few lengths (tf.data's bucket_by_sequence_length, padded_batch), or "
            "leave the last batch out (drop_remainder=True)."
        )


def _is_refusal(error: Exception) -> bool:
    """Return whether an error says that DTensor could not expand a function."""
    is_memory = isinstance(error, tf.errors.ResourceExhaustedError)
    return isinstance(error, tf.errors.OpError) and not is_memory and "dtensor" in str(error).lower()


class _Family:
    """The batches of one structure.

    Attributes:
        separate: How many shapes have separate functions.
    """

    def __init__(self) -> None:
        self.separate = 0
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
        structure = str(tf.nest.map_structure(_dtype_and_rank, batch))
        return (tf.nest.pack_sequence_as(batch, leaves), tuple(masks)), ("open", structure, tuple(capacities))


def _full(value: np.ndarray, strategy: ShardedStrategy) -> tf.Tensor:
    tensor: tf.Tensor = transfer.host_to_mesh(value, (None,) * value.ndim, strategy.mesh)
    return tensor


def _rows(batch: Any) -> int:
    """Return the rows of the first tensor of a batch."""
    return int(next(leaf.shape[0] for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf)))


def _dtype_and_rank(leaf: Any) -> Any:
    if leaf is None or not hasattr(leaf, "shape"):
        return type(leaf).__name__
    return f"{tf.as_dtype(leaf.dtype).name} {len(leaf.shape)}"


def _can_be_padded(leaf: Any) -> bool:
    """Return whether the host can pad a leaf."""
    if isinstance(leaf, tf.RaggedTensor) or 0 in leaf.shape:
        return False
    dtype = tf.as_dtype(leaf.dtype)
    return bool(dtype.is_floating or dtype.is_integer or dtype.is_bool)


def _positions(leaf: Any) -> int:
    """Count samples, tokens or pixels. The last dim of a float tensor is the features."""
    shape = tuple(leaf.shape)
    return math.prod(shape[:-1] if tf.as_dtype(leaf.dtype).is_floating and len(shape) > 1 else shape)


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


def _cut(leaf: Any, masks: tuple[tf.Tensor | None, ...]) -> Any:
    """Cut the padding off. The `Where` operation tells `operations.unsized` that the size depends on values."""
    for dim, mask in enumerate(masks):
        if mask is not None:
            leaf = tf.gather(leaf, tf.cast(tf.where(mask)[:, 0], tf.int32), axis=dim)
    return leaf
