"""Rules for how a sharded dim passes through the operations of a model: which dims of the results are sharded with it.

Each type of TensorFlow operation has one rule. A rule says what an operation does with local shards without
communication. An operation that would need a gather is `Blocked`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """The dim passes through the operation.

    Attributes:
        outputs: (Number of the output, dim).
        aligned: (Number of the input, dim) of other inputs that are sharded together with the dim.
        repeated: The numbers of other inputs that all shards use: their gradients are partial sums.
        statistics: The number of all-reduces of the result's size without this dim (softmax, quantization).
    """

    outputs: tuple[tuple[int, int], ...]
    aligned: tuple[tuple[int, int], ...] = ()
    repeated: tuple[int, ...] = ()
    statistics: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contracted:
    """The operation contracts the dim with dim `dim` of input number `other`: each device has a partial sum."""

    other: int
    dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """The operation looks up rows along the dim: devices look up in their local rows, and sum the results."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summed:
    """The operation sums over the dim alone, as a layer sums over experts: each device has a partial sum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocked:
    """The operation needs the full dim, because of `reason`."""

    reason: str


Outcome = Flow | Contracted | Lookup | Summed | Blocked


def advance(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    """Return how an operation treats dim `dim` of input `number`, sharded over `devices`."""
    rule = _RULES.get(operation.type)
    if rule is None:
        return Blocked(reason=f"tfshard has no rule for TensorFlow operation {operation.type}")
    shapes = [tensor.shape for tensor in (*operation.inputs, *operation.outputs)]
    if any(shape.rank is None or None in shape for shape in shapes):
        return Blocked(reason=f"the shapes of operation '{operation.name}' ({operation.type}) are not fixed")
    try:
        return rule(operation, number, dim, devices)
    except _NotKnownError:
        return Blocked(reason=f"the axis of operation '{operation.name}' ({operation.type}) depends on a value")


def rearranged(operation: tf.Operation, number: int, dim: int) -> tuple[tuple[str, int], ...]:
    """Return (tensor name, dim) of the same dim after an operation that only rearranges or casts one tensor."""
    if operation.type not in _REARRANGING or number != 0:
        return ()
    outcome = advance(operation, number, dim, 1)
    if not isinstance(outcome, Flow):
        return ()
    return tuple((operation.outputs[output].name, to) for output, to in outcome.outputs)


def has_rule(operation: tf.Operation) -> bool:
    """Return whether `advance` and `sources` know an operation."""
    return operation.type in _RULES


def is_elementwise(operation: tf.Operation) -> bool:
    """Return whether each element of the result depends on the elements at the same place of the inputs only."""
    return _RULES.get(operation.type) is _elementwise


def elementwise_sources(operation: tf.Operation, dim: int) -> tuple[tuple[int, int], ...] | None:
    """Return (number of the input, dim) of the dims from which dim `dim` of the result comes, element by element.

    Returns None for operations that are not elementwise.
    """
    if _RULES.get(operation.type) is not _elementwise or operation.outputs[0].shape.rank is None:
        return None
    rank = operation.outputs[0].shape.rank
    found = []
    for number, tensor in enumerate(operation.inputs):
        place = dim - (rank - (tensor.shape.rank or 0))
        if place >= 0 and tensor.shape[place] == operation.outputs[0].shape[dim]:
            found.append((number, place))
    return tuple(found)


def sources(operation: tf.Operation, output: int, dim: int) -> tuple[tuple[int, int], ...]:
    """Return (number of the input, dim) of the dims that are sharded if dim `dim` of a result is.

    This is the way back through `advance`. The size of the dim must be known; the size of the batch need not be.
    """
    elementwise = elementwise_sources(operation, dim)
    if elementwise is not None:
        return elementwise
    if not all(tensor.shape.is_fully_defined() for tensor in (*operation.inputs, *operation.outputs)):
        return _sources_of_batches(operation, dim)
    found = []
    for number, tensor in enumerate(operation.inputs):
        for place in range(tensor.shape.rank):
            outcome = advance(operation, number, place, 1)
            if isinstance(outcome, Flow) and (output, dim) in outcome.outputs:
                found.append((number, place))
    return tuple(found)


def way_back(tensor: tf.Tensor, dim: int, known: Collection[tuple[str, int]] = ()) -> Iterator[tuple[tf.Tensor, int]]:
    """Yield (tensor, dim) of all dims that are sharded with `dim`, back through the operations.

    The way back ends at operations without a rule, such as the `Relayout` of a read variable. It skips the dims in
    `known`, by tensor name and dim, and the dims behind them.
    """
    waiting, seen = [(tensor, dim)], set()
    while waiting:
        tensor, dim = waiting.pop()
        place = tensor.name, dim
        if place in seen or place in known:
            continue
        seen.add(place)
        yield tensor, dim
        waiting += [(tensor.op.inputs[n], at) for n, at in sources(tensor.op, tensor.value_index, dim)]


def _sources_of_batches(operation: tf.Operation, dim: int) -> tuple[tuple[int, int], ...]:
    """Return `sources` for unknown sizes: the last dim of operations that keep it, and of products with a kernel."""
    shape = operation.outputs[0].shape
    if shape.rank is None or dim != shape.rank - 1:
        return ()
    first = operation.inputs[0].shape
    if operation.type in ("Reshape", "Softmax", "LogSoftmax", "BiasAdd", "IdentityN") and first.rank:
        return ((0, first.rank - 1),) if first[-1] == shape[-1] else ()
    if operation.type in ("MatMul", "BatchMatMulV2", "BatchMatMulV3"):
        transposed = operation.get_attr("transpose_b" if operation.type == "MatMul" else "adj_y")
        return ((1, operation.inputs[1].shape.rank - (2 if transposed else 1)),)
    if operation.type == "Einsum":
        labels = re.split(",|->", operation.get_attr("equation").decode())
        return tuple((i, part.index(labels[-1][-1])) for i, part in enumerate(labels[:-1]) if labels[-1][-1] in part)
    return ()


# --- The rules ---------------------------------------------------------------------------------------


def _shape(tensor: tf.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _constant(operation: tf.Operation, number: int) -> np.ndarray | None:
    value: np.ndarray | None = tf.get_static_value(operation.inputs[number])
    return value


class _NotKnownError(Exception):
    """An axis is not a constant."""


def _axis(operation: tf.Operation, number: int, rank: int) -> int:
    """Return a constant axis input, counted from the front."""
    axis = _constant(operation, number)
    if axis is None:
        raise _NotKnownError
    return int(axis) % rank


def needs_all(operation: tf.Operation) -> str:
    """Return the reason why a dim cannot be sharded through an operation that needs the full dim."""
    return f"operation '{operation.name}' ({operation.type}) needs all of the sharded dim"


def _reduced(operation: tf.Operation) -> Blocked:
    return Blocked(reason=needs_all(operation))


def _elementwise(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    rank = len(operation.outputs[0].shape)
    to = dim + rank - len(operation.inputs[number].shape)
    if operation.outputs[0].shape[to] != operation.inputs[number].shape[dim]:
        return _reduced(operation)
    aligned, repeated = [], []
    for other, tensor in enumerate(operation.inputs):
        place = to - (rank - len(tensor.shape))
        if other != number and place >= 0 and tensor.shape[place] > 1:
            aligned.append((other, place))
        elif other != number:
            repeated.append(other)
    return Flow(outputs=((0, to),), aligned=tuple(aligned), repeated=tuple(repeated))


def _bitcast(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    """Apply the elementwise rule if both dtypes have the same size."""
    if operation.inputs[0].dtype.size != operation.outputs[0].dtype.size:
        return Blocked(reason=f"operation '{operation.name}' (Bitcast) changes the size of elements")
    return _elementwise(operation, number, dim, devices)


def _each(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    """Pass each input of an IdentityN to its output."""
    return Flow(outputs=((number, dim),))


def _nothing(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    """Return a flow without outputs: shapes and the like do not depend on the shards."""
    return Flow(outputs=())


def _reshape(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    if number:
        return _nothing(operation, number, dim, devices)
    before, after = _shape(operation.inputs[0]), _shape(operation.outputs[0])
    if math.prod(before) == 0:
        return _reduced(operation)
    # The dims before and behind the dim must hold the same elements before and after the reshape.
    front = math.prod(before[:dim])
    for to, size in enumerate(after):
        if size == 1 and before[dim] != 1:
            continue
        if math.prod(after[:to]) == front and (size % devices == 0 or size == before[dim]):
            is_multiple = size % before[dim] == 0 or before[dim] % size == 0
            return Flow(outputs=((0, to),)) if is_multiple else _reduced(operation)
    return _reduced(operation)


def _transpose(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    order = _constant(operation, 1)
    return _reduced(operation) if order is None else Flow(outputs=((0, list(order).index(dim)),))


def _expand_dims(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    at = _axis(operation, 1, len(operation.outputs[0].shape))
    return Flow(outputs=((0, dim + (at <= dim)),))


def _squeeze(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    before = _shape(operation.inputs[0])
    dims = [d % len(before) for d in operation.get_attr("squeeze_dims")] or [i for i, n in enumerate(before) if n == 1]
    return Flow(outputs=((0, dim - sum(d < dim for d in dims)),))


def _pack(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    at = operation.get_attr("axis") % len(operation.outputs[0].shape)
    aligned = tuple((other, dim) for other in range(len(operation.inputs)) if other != number)
    return Flow(outputs=((0, dim + (at <= dim)),), aligned=aligned)


def _unpack(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    at = operation.get_attr("axis") % len(operation.inputs[0].shape)
    if at == dim:
        return _reduced(operation)
    return Flow(outputs=tuple((i, dim - (at < dim)) for i in range(len(operation.outputs))))


def _concat(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    at = _axis(operation, len(operation.inputs) - 1, len(operation.outputs[0].shape))
    if at == dim:
        return _reduced(operation)
    aligned = tuple((other, dim) for other in range(len(operation.inputs) - 1) if other != number)
    return Flow(outputs=((0, dim),), aligned=aligned)


def _split(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    axis = 0 if operation.type == "Split" else 2
    value = operation.inputs[1 if operation.type == "Split" else 0]
    if _axis(operation, axis, len(value.shape)) == dim:
        return _reduced(operation)
    return Flow(outputs=tuple((i, dim) for i in range(len(operation.outputs))))


def _same_size(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    """Pass the dim if the operation keeps its position and size."""
    if number or operation.inputs[0].shape[dim] != operation.outputs[0].shape[dim]:
        return _reduced(operation)
    return Flow(outputs=((0, dim),))


def _cumsum(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    return (
        _reduced(operation)
        if number or _axis(operation, 1, len(operation.inputs[0].shape)) == dim
        else Flow(outputs=((0, dim),))
    )


def _batch_only(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    """Pass only the batch dim: DTensor expands these operations over no other dim (dataparallel_spmd_expander.cc)."""
    if number == 0 and dim == 0:
        return Flow(outputs=((0, 0),))
    return Blocked(reason=f"DTensor expands operation '{operation.name}' ({operation.type}) over the batch dim only")


def _broadcast_to(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    if number:
        return _nothing(operation, number, dim, devices)
    to = dim + len(operation.outputs[0].shape) - len(operation.inputs[0].shape)
    same = operation.inputs[0].shape[dim] == operation.outputs[0].shape[to]
    return Flow(outputs=((0, to),)) if same else _reduced(operation)


def _strided_slice(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    begin, end, strides = (_constant(operation, i) for i in (1, 2, 3))
    if number or strides is None:
        return _reduced(operation)
    masks = {
        name: operation.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    shape, source, to = _shape(operation.inputs[0]), 0, 0
    for i in range(len(strides)):
        if masks["ellipsis"] >> i & 1:
            rest = len(strides) - i - 1 - sum(masks["new_axis"] >> j & 1 for j in range(i + 1, len(strides)))
            skipped = len(shape) - source - rest
            if source <= dim < source + skipped:
                return Flow(outputs=((0, to + dim - source),))
            source, to = source + skipped, to + skipped
        elif masks["new_axis"] >> i & 1:
            to += 1
        else:
            if source == dim:
                open_begin = masks["begin"] >> i & 1 or (begin is not None and begin[i] == 0)
                open_end = masks["end"] >> i & 1 or (end is not None and end[i] >= shape[dim])
                shrinks = masks["shrink_axis"] >> i & 1
                full = open_begin and open_end and strides[i] == 1 and not shrinks
                return Flow(outputs=((0, to),)) if full else _reduced(operation)
            to += not masks["shrink_axis"] >> i & 1
            source += 1
    return Flow(outputs=((0, to + dim - source),))


def _gather(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    axis, batch = _axis(operation, 2, len(operation.inputs[0].shape)), operation.get_attr("batch_dims")
    indices = len(operation.inputs[1].shape)
    if number == 1:
        return Flow(outputs=((0, dim if dim < batch else axis + dim - batch),))
    if dim == axis:
        return Lookup() if axis == 0 else _reduced(operation)
    return Flow(outputs=((0, dim if dim < axis else dim - 1 + indices - batch),))


def _reduce(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    axes = _constant(operation, 1)
    if number or axes is None:
        return _reduced(operation)
    dims = {int(axis) % len(operation.inputs[0].shape) for axis in np.atleast_1d(axes)}
    if dim in dims and operation.type == "Max" and operation.inputs[0].op.type == "Abs":
        # The scale of a quantized tensor: one number for each row, by which devices divide the shards.
        return Flow(outputs=(), statistics=1)
    if dim in dims:
        return Summed() if operation.type == "Sum" else _reduced(operation)
    kept = operation.get_attr("keep_dims") if operation.type not in ("ArgMax", "ArgMin") else False
    return Flow(outputs=((0, dim if kept else dim - sum(d < dim for d in dims)),))


def _softmax(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    last = dim == len(operation.inputs[0].shape) - 1
    return Flow(outputs=((0, dim),), statistics=2 if last else 0)


def _bias_add(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    channel = len(operation.inputs[0].shape) - 1
    if operation.get_attr("data_format") == b"NCHW":
        channel = 1
    if number == 1:
        return Flow(outputs=((0, channel),), aligned=((0, channel),))
    return Flow(outputs=((0, dim),), aligned=((1, 0),) if dim == channel else ())


def _contract(operation: tf.Operation, number: int, dim: int, labels: tuple[str, str, str]) -> Outcome:
    """Apply the rule of a product that has one letter for each dim of its inputs and output."""
    other = 1 - number
    label = labels[number][dim]
    if labels[number].count(label) > 1:
        return _reduced(operation)
    if label in labels[2]:
        to = labels[2].index(label)
        if label in labels[other]:
            place = labels[other].index(label)
            if operation.inputs[other].shape[place] > 1:
                return Flow(outputs=((0, to),), aligned=((other, place),))
        return Flow(outputs=((0, to),), repeated=(other,))
    if label in labels[other]:
        return Contracted(other=other, dim=labels[other].index(label))
    return _reduced(operation)


def _matmul(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    left = "ka" if operation.get_attr("transpose_a") else "ak"
    right = "bk" if operation.get_attr("transpose_b") else "kb"
    return _contract(operation, number, dim, (left, right, "ab"))


def _batch_matmul(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    rank = len(operation.outputs[0].shape)
    batch = "ABCDEFGHIJ"[: rank - 2]
    left = "ka" if operation.get_attr("adj_x") else "ak"
    right = "bk" if operation.get_attr("adj_y") else "kb"
    fronts = [batch[rank - len(tensor.shape) :] for tensor in operation.inputs]
    return _contract(operation, number, dim, (fronts[0] + left, fronts[1] + right, batch + "ab"))


def _einsum(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    labels = re.split(",|->", operation.get_attr("equation").decode())
    if len(operation.inputs) != 2 or any("." in part for part in labels):
        return _reduced(operation)
    return _contract(operation, number, dim, (labels[0], labels[1], labels[2]))


def _conv(operation: tf.Operation, number: int, dim: int, devices: int) -> Outcome:
    if b"NC" in operation.get_attr("data_format"):
        return Blocked(reason=f"convolution '{operation.name}' has its channels first")
    last = len(operation.outputs[0].shape) - 1
    if number == 0 and dim == 0:
        return Flow(outputs=((0, 0),))
    if operation.inputs[0].shape[last] != operation.inputs[1].shape[last - 1]:
        return Blocked(reason=f"convolution '{operation.name}' has groups")
    if number == 0:
        return Contracted(other=1, dim=last - 1) if dim == last else _reduced(operation)
    if dim == last:
        return Flow(outputs=((0, last),))
    return Contracted(other=0, dim=last) if dim == last - 1 else _reduced(operation)


Rule = Callable[[tf.Operation, int, int, int], Outcome]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        "Abs Add AddN AddV2 BitwiseAnd BitwiseOr BitwiseXor Cast Ceil CheckNumerics Cos Cosh Div DivNoNan Elu Equal "
        "Erf Erfc Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Identity Inv Invert IsFinite IsInf IsNan "
        "LeakyRelu LeftShift Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan "
        "Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 RightShift Rint Round Rsqrt Select "
        "SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference StopGradient "
        "Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlogy ZerosLike".split(),
        _elementwise,
    ),
    **dict.fromkeys(("Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"), _nothing),
    "Bitcast": _bitcast,
    "IdentityN": _each,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "ExpandDims": _expand_dims,
    "Squeeze": _squeeze,
    "Pack": _pack,
    "Unpack": _unpack,
    "ConcatV2": _concat,
    "Split": _split,
    "SplitV": _split,
    **dict.fromkeys(("Tile", "Slice", "Pad", "PadV2"), _same_size),
    "Cumsum": _cumsum,
    **dict.fromkeys(("MaxPool", "AvgPool", "ResizeBilinear", "ResizeNearestNeighbor", "FusedBatchNormV3"), _batch_only),
    "BroadcastTo": _broadcast_to,
    "StridedSlice": _strided_slice,
    "GatherV2": _gather,
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin"), _reduce),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _softmax),
    "BiasAdd": _bias_add,
    "MatMul": _matmul,
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _batch_matmul),
    "Einsum": _einsum,
    **dict.fromkeys(("Conv2D", "Conv3D"), _conv),
}
# Products of an activation and a kernel.
PRODUCTS = frozenset(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "Conv3D"))
_REARRANGING = frozenset(
    ("Cast", "ExpandDims", "Identity", "IdentityN", "Reshape", "Squeeze", "StopGradient", "Transpose")
)
