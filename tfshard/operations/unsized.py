"""Tensors with a shape that depends on values, such as the results of `tf.boolean_mask`, in a compiled step.

DTensor expands an operation with the shapes that it knows when it compiles. It cannot shard a dim of unknown size, and
refuses a reshape, a slice or a broadcast of such a tensor. Therefore every device computes these tensors in full:
`rewrite` pins operands and results of each operation as replicated. DTensor refuses some operations even so: the rules
for unknown sizes rewrite these. In eager code every shape is known.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.errors import UnsupportedOperationError
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import registry
from tfshard.operations.registry import rewrite_rule
from tfshard.storage import steps

# A size that only the step knows is a tensor, int32.
Size: TypeAlias = int | tf.Tensor


def is_known(tensor: tf.Tensor) -> bool:
    """Return whether a value follows from constants and static shapes: DTensor finds it when it compiles."""
    if tf.executing_eagerly():
        return True
    seen, waiting = set(), [tensor.op]
    while waiting:
        operation = waiting.pop()
        known_shape = operation.type in ("Shape", "Size", "Rank") and operation.inputs[0].shape.is_fully_defined()
        if operation in seen or operation.type == "Const" or known_shape:
            continue
        if not operation.inputs:
            return False
        seen.add(operation)
        waiting += [each.op for each in operation.inputs]
    return True


# Operations that return as many elements as they find.
AS_MANY_AS_FOUND = frozenset(
    ("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "ListDiff", "DynamicPartition")
)
# Operations with results of a shape that depends on values, for operands of known and of unknown shapes.
_SIZED_BY_VALUES = AS_MANY_AS_FOUND | frozenset(
    ("DynamicStitch", "ParallelDynamicStitch", "NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5",
     "NonMaxSuppressionV2", "CombinedNonMaxSuppression", "Bincount", "DenseBincount",
     "SegmentSum", "SegmentMean", "SegmentProd", "SegmentMax", "SegmentMin", "TensorListStack", "TensorListConcatV2",
     "ComputeAccidentalHits")
)  # fmt: skip


def depends_on_values(*tensors: tf.Tensor) -> bool:
    """Return whether the shape of a tensor, or a shape that it holds, depends on values.

    DTensor knows other open shapes when it compiles, such as a batch size that changes.
    """
    seen: set[tf.Operation] = set()
    waiting = [tensor for tensor in tensors if _may_depend(tensor)]
    while waiting:
        tensor = waiting.pop()
        operation = tensor.op
        if operation in seen or local_shards.is_named(operation):
            continue  # Local tensors may have any length.
        seen.add(operation)
        if operation.type == "Placeholder":
            # A capture of a loop or a branch, or an argument of a function in the step.
            outside = _private.captured(operation.outputs[0])
            if outside is None and is_open(tensor) and is_nested(operation.graph):
                return True
            sources = [] if outside is None else [outside]
        elif _sizes_by_values(operation):
            return True
        elif operation.type in ("TensorListPopBack", "TensorListGetItem") and is_open(tensor):
            return True  # A list that a loop keeps for its gradient: DTensor knows one shape for all elements.
        else:
            sources = list(operation.inputs)
        waiting += [source for source in sources if _may_depend(source)]
    return False


def _sizes_by_values(operation: tf.Operation) -> bool:
    """Return whether an operation makes a shape of values."""
    if all(is_known(each) for each in operation.inputs):
        return False
    if operation.type in _SIZED_BY_VALUES:
        return True
    if any(map(is_open, operation.inputs)) or not any(map(is_open, operation.outputs)):
        return False
    sizes = [each for each in operation.inputs if _holds_sizes(each)]
    if sizes and operation.type not in _LEFT and all(map(is_known, sizes)):
        return False  # DTensor finds the shape.
    return not _hold_open_sizes(sizes)


def _hold_open_sizes(tensors: Iterable[tf.Tensor]) -> bool:
    """Return whether tensors hold sizes that are not known while a step is traced."""
    seen: set[tf.Operation] = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation not in seen:
            seen.add(operation)
            if operation.type in ("Shape", "ShapeN", "Size") and any(map(is_open, operation.inputs)):
                return True
            waiting += [each.op for each in operation.inputs if _holds_sizes(each)]
    return False


def is_open(tensor: tf.Tensor) -> bool:
    """Return whether a tensor with a value has a size that is not known."""
    is_value = tensor.dtype not in (tf.resource, tf.variant)
    return is_value and not tensor.shape.is_fully_defined()


def _holds_sizes(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_integer and tensor.shape.rank in (0, 1))


def _holds_known_number_of_sizes(tensor: tf.Tensor) -> bool:
    return _holds_sizes(tensor) and tensor.shape.is_fully_defined()


def _may_depend(tensor: tf.Tensor) -> bool:
    return _holds_sizes(tensor) or is_open(tensor)


_rule = functools.partial(
    rewrite_rule, graph=True, eager=False, gradient="registered", sizes="unknown", cases=("tensor of unknown size",),
    fault="refuses it if a shape depends on values, also with replicated operands",
)  # fmt: skip
# Operations that hold functions, and operations that make layouts.
_LEFT = frozenset(
    ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall",
     "StatefulPartitionedCall", "Placeholder", "Const", "IdentityN", "Relayout", "RelayoutLike", "CopyToMesh",
     "BroadcastGradientArgs")
)  # fmt: skip


# Operations on the lists of loops that keep their operands as they are (loops.py).
_ON_LISTS = frozenset(("TensorListGetItem", "TensorListPushBack", "TensorListElementShape"))


def is_unsized(call: _private.Call) -> bool:
    """Return whether an operation takes or gives a tensor with a shape that depends on values, or holds such a
    shape."""
    if not call.outputs or call.type in _LEFT or call.type in _ON_LISTS:
        return False
    return depends_on_values(*call.inputs, *call.outputs)


def rewrite(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Return the results of an operation that every device computes in full, or None to leave the operation."""
    assert call.outputs is not None
    if not call.outputs or _private.is_stateful(call.outputs[0].op):
        return None
    if is_nested(call.outputs[0].graph):
        # Nothing is pinned in a loop: DTensor ends the process at a relayout if its compiler finds that the operand is
        # an input of a loop (EraseCopyToMeshWithinCluster in TensorFlow 2.21's handle_cross_cluster_dependencies.cc).
        return _rewrite_by_rule(call, mesh)
    if any(each.dtype == tf.variant for each in (*call.inputs, *call.outputs)):
        # TensorFlow looks for operations on lists of tensors as it makes gradients of loops: they stay.
        return [_replicated(each, mesh) for each in call.outputs]
    if call.type == "Shape" or all(map(_holds_known_number_of_sizes, (*call.inputs, *call.outputs))):
        return None  # TensorFlow infers which sizes of a shape are known, but not through a pin.
    inputs = tuple(each if is_known(each) else _replicated(each, mesh) for each in call.inputs)
    results = _rewrite_by_rule(dataclasses.replace(call, inputs=inputs), mesh)
    if results is None:
        results = _private.copied(call.outputs[0].op, inputs)
    known = zip(results, call.outputs, strict=True)
    return [_replicated(_with_known_sizes(each, output.shape), mesh) for each, output in known]


def _rewrite_by_rule(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    rules = [rule for rule in registry.rules_of(call.type, eager=False) if rule.sizes == "unknown"]
    return registry.first_rewrite(rules, call, mesh)


def _with_known_sizes(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Return a tensor with the known sizes of `shape`, which TensorFlow loses at a pin."""
    known = tensor.shape.merge_with(shape)
    if tensor.dtype in (tf.variant, tf.string) or known == tensor.shape:
        return tensor
    return tf.raw_ops.EnsureShape(input=tensor, shape=known)


def _replicated(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a replicated tensor. Tensors that are pinned already, or cannot be pinned, stay as they are."""
    if tensor.shape.rank is None or tensor.dtype in (tf.variant, tf.string):
        return tensor
    layout = transfer.layout((None,) * tensor.shape.rank, mesh)
    is_pinned = tensor.op.type == "Relayout" and tensor.op.get_attr("layout").decode() == layout.to_string()
    return tensor if is_pinned or tensor.op.type == "BroadcastGradientArgs" else transfer.replicate(tensor, mesh)


def is_nested(graph: tf.Graph) -> bool:
    """Return whether a graph belongs to a loop, a branch or a function in the step."""
    step = steps.current()
    return step is not None and graph is not step.graph


# Products in a loop.
_PRODUCTS = frozenset(("BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "Einsum", "MatMul"))


def _mesh_has_several_axes(call: _private.Call, mesh: dtensor.Mesh) -> bool:
    """The mesh has several axes with more than one device."""
    del call
    return axis_sizes(mesh).shards_by_several


# `rewrite` pins nothing in branches and loops, so a model axis may shard their results. DTensor makes zeros of a size
# below zero as it gathers one.
@rewrite_rule(
    "If", "StatelessIf", "While", "StatelessWhile", graph=True, eager=False, gradient="registered",
    when=_mesh_has_several_axes, sizes="any", local="also",
    fault="**ends the process** if a branch returns a tensor whose size depends on values, or a loop multiplies "
          "one",
    cases=("branch of unknown size",),
)  # fmt: skip
def refuse_function(call: _private.Call) -> None:
    """Refuse such a branch or loop."""
    if not call.outputs or "gradient" in call.outputs[0].op.name:
        return  # The gradient of a branch that gives a number is a branch that gives such a tensor: that works.
    is_branch = call.type in ("If", "StatelessIf")
    if not any(is_open(each) and depends_on_values(each) for each in (call.outputs if is_branch else call.inputs)):
        return
    body = None if is_branch else _private.function_graph(call.outputs[0].op, "body")
    if not is_branch and (body is None or not _private.operation_types(body) & _PRODUCTS):
        return
    kind = "branch (tf.cond) that returns" if is_branch else "loop (tf.while_loop, LSTM, GRU) that multiplies"
    raise UnsupportedOperationError(
        f"A compiled step on a mesh of several axes cannot have a {kind} tensors whose size depends on values, such "
        "as the result of tf.boolean_mask: DTensor ends the process. Keep the rows and multiply them by a mask, or "
        "let a branch return scalars or tensors of a known size."
    )


def _unpinned(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Relayout":
        tensor = tensor.op.inputs[0]
    return tensor


@_rule("Reshape")
def reshape(call: _private.Call) -> tf.Tensor | None:
    """Flatten the tensor, and gather its elements by index."""
    tensor, shape = call.inputs
    assert call.outputs is not None
    (output,) = call.outputs
    if tensor.shape.rank is None or output.shape.rank is None:
        return None
    if tensor.shape.is_fully_defined() and is_known(shape):
        return None
    open_dims = [dim for dim, size in enumerate(output.shape) if size is None]
    if list(tensor.shape) == list(output.shape) and len(open_dims) == 1:
        return tf.identity(tensor)  # With a single unknown dim, the sizes are equal.
    if tensor.shape.rank == output.shape.rank and output.shape.is_fully_defined():
        if all(a in (None, b) for a, b in zip(tensor.shape, output.shape, strict=True)):
            return tf.raw_ops.EnsureShape(input=tensor, shape=output.shape)
    elements = vector(tensor)
    if output.shape.rank == 1:
        # A gradient of a variable comes here, and later operations need its size.
        is_known_size = output.shape[0] is not None and elements.shape[0] is None
        return tf.raw_ops.EnsureShape(input=elements, shape=output.shape) if is_known_size else elements
    sizes: list[int | tf.Tensor | None] = list(output.shape)
    if len(open_dims) == 1:
        known = math.prod(size for size in sizes if size is not None)
        sizes[open_dims[0]] = tf.raw_ops.Size(input=elements) // known
    else:
        total, product = tf.raw_ops.Size(input=elements), tf.cast(tf.reduce_prod(shape), tf.int32)
        for dim in open_dims:
            given = tf.cast(tf.gather(shape, dim), tf.int32)
            # A size of -1 is the remaining size.
            sizes[dim] = tf.where(given < 0, total // tf.maximum(-product, 1), given)
    index, stride = tf.constant(0), tf.constant(1)
    for dim in reversed(range(len(sizes))):
        index = index + _count_up(sizes[dim], dim, len(sizes)) * stride
        stride = stride * sizes[dim]
    return tf.gather(elements, index)


def vector(tensor: tf.Tensor) -> tf.Tensor:
    """Return the elements of a replicated tensor in their order."""
    if tensor.shape.is_fully_defined():
        return tf.reshape(tensor, [tensor.shape.num_elements()])
    if tensor.shape.rank == 1:
        return tensor
    nowhere = tf.zeros_like(tensor, tf.int32)
    (elements,) = tf.raw_ops.DynamicPartition(data=tensor, partitions=nowhere, num_partitions=1)
    return elements


@_rule("Tile")
def tile(call: _private.Call) -> tf.Tensor | None:
    """Gather the elements by index."""
    tensor, multiples = call.inputs
    if tensor.shape.is_fully_defined() and is_known(multiples):
        return None
    for dim, times in enumerate(_elements(multiples)):
        size = _size(tensor, dim)
        if not (isinstance(times, int) and times == 1):
            tensor = tf.gather(tensor, _count_up(size * times, 0, 1) % size, axis=dim)
    return tf.identity(tensor)


@_rule("BroadcastTo")
def broadcast(call: _private.Call) -> tf.Tensor | None:
    """Add the tensor to zeros."""
    tensor, shape = call.inputs
    return None if is_known(shape) else _broadcast(tensor, shape)


@_rule("Fill")
def fill(call: _private.Call) -> tf.Tensor | None:
    """Add the value to zeros."""
    shape, value = call.inputs
    return None if is_known(shape) else _broadcast(value, shape)


@_rule("Sum")
def sum_broadcast(call: _private.Call) -> tf.Tensor | None:
    """Sum over the dims in which an operand was broadcast, as gradients of arithmetic do.

    The next operation reshapes the sum to the shape of the operand, so dims may stay, with size 1.
    """
    gradient, axes = call.inputs
    if is_known(axes):
        return None
    if axes.op.type != "BroadcastGradientArgs":
        # Without keepdims only the step knows which dims remain, which matters in a user's sum.
        if not call.get_attr("keep_dims") and not _is_of_broadcast(axes):
            return None
        return _summed_over(gradient, tf.math.floormod(axes, tf.constant(gradient.shape.rank, axes.dtype)))
    which = axes.value_index
    made = [_unpinned(shape).op for shape in axes.op.inputs]
    shapes = [operation.inputs[0].shape if operation.type == "Shape" else None for operation in made]
    ours, theirs = shapes[which], shapes[1 - which]
    if ours is None or theirs is None or None in (ours.rank, theirs.rank, gradient.shape.rank):
        return _summed_over(gradient, axes)
    in_front = gradient.shape.rank - ours.rank
    if in_front:
        gradient = tf.reduce_sum(gradient, list(range(in_front)))
    for dim, size in enumerate(ours):
        other_dim = dim + theirs.rank - ours.rank
        other = theirs[other_dim] if other_dim >= 0 else 1
        if size == 1 and other != 1:
            gradient = tf.reduce_sum(gradient, dim, keepdims=True)
        elif size is None and other != 1:
            # The dim was broadcast if its size, which only the step knows, is 1 and the size of the result is not.
            number = tf.gather(tf.cast(axes.op.inputs[which], tf.int32), dim)
            is_summed = tf.cast(tf.not_equal(number, tf.gather(tf.shape(gradient), dim)), tf.int32)
            gradient = _summed_if(is_summed, gradient, dim)
    return tf.identity(gradient)


def _is_of_broadcast(axes: tf.Tensor) -> bool:
    """Return whether a tensor holds the broadcast dims of an operand. An Einsum counts them from its ellipsis."""
    operation = _unpinned(axes).op
    if operation.type in ("AddV2", "Add", "Cast", "Identity"):
        return any(_is_of_broadcast(each) for each in operation.inputs)
    return bool(operation.type == "BroadcastGradientArgs")


def _summed_over(tensor: tf.Tensor, axes: tf.Tensor) -> tf.Tensor:
    """Return the sum over dims that only the step knows. The dims stay, with size 1."""
    for dim in range(tensor.shape.rank):
        if tensor.shape[dim] != 1:
            is_summed = tf.reduce_sum(tf.cast(tf.equal(axes, dim), tf.int32))
            tensor = _summed_if(is_summed, tensor, dim)
    return tf.identity(tensor)


def _summed_if(is_summed: tf.Tensor, tensor: tf.Tensor, dim: int) -> tf.Tensor:
    """Return the sum of a tensor over a dim, which stays, if a number is 1, and the tensor if it is 0.

    A gather selects one of the two: a tf.where with a scalar condition crashed the compiler here.
    """
    size = tf.gather(tf.shape(tensor), dim)
    both = tf.concat([tensor, tf.reduce_sum(tensor, dim, keepdims=True)], axis=dim)
    places = _count_up(is_summed + (1 - is_summed) * size, 0, 1) + is_summed * size
    return tf.gather(both, places, axis=dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """The entry of a slice for a dim.

    Attributes:
        dim: The number of the dim before the slice removes dims.
        kind: `"new"`, `"all"`, `"one"` or `"range"`.
        start: The first place.
        stride: The distance to the next place.
        count: The number of places.
    """

    dim: int
    kind: str
    start: int | tf.Tensor = 0
    stride: int = 1
    count: int | tf.Tensor = 1


def _slice_entries(call: _private.Call, vectors: Sequence[tf.Tensor], sizes: Sequence[Size]) -> list[_Entry] | None:
    """Return the entries of a StridedSlice, or of its gradient; None if its strides are not known."""
    strides = tf.get_static_value(vectors[2])
    if strides is None:
        return None
    begins, ends = (_elements(vector) for vector in vectors[:2])
    has = {name: call.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    taken = sum(not (has["ellipsis"] | has["new_axis"]) >> i & 1 for i in range(len(begins)))
    entries: list[_Entry] = []
    dim = 0
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        bit, stride = 1 << i, int(strides[i])
        if has["ellipsis"] & bit:
            dim += len(sizes) - taken
        elif has["new_axis"] & bit:
            entries.append(_Entry(dim=dim, kind="new"))
        elif has["shrink_axis"] & bit:
            entries.append(_Entry(dim=dim, kind="one", start=_from_front(begin, sizes[dim])))
            dim += 1
        elif has["begin"] & has["end"] & bit and stride == 1:
            entries.append(_Entry(dim=dim, kind="all"))
            dim += 1
        else:
            bounds = (None if has["begin"] & bit else begin, None if has["end"] & bit else end)
            start, count = _range(sizes[dim], *bounds, stride)
            entries.append(_Entry(dim=dim, kind="range", start=start, stride=stride, count=count))
            dim += 1
    return entries


def _from_front(place: Size, size: Size) -> Size:
    """Return a place counted from the front. A place below zero counts from the end."""
    if isinstance(place, int):
        return place if place >= 0 else place + size
    return place + tf.cast(place < 0, tf.int32) * size


def _range(size: Size, begin: Size | None, end: Size | None, stride: int) -> tuple[Size, Size]:
    """Return the first place that `[begin:end:stride]` takes of a dim, and the number of places."""
    if all(each is None or isinstance(each, int) for each in (size, begin, end)):
        places = range(size)[begin:end:stride]
        return places.start, len(places)
    lowest, highest = (0, size) if stride > 0 else (-1, size - 1)

    def bound(place: Size | None, otherwise: Size) -> Size:
        return otherwise if place is None else tf.clip_by_value(_from_front(place, size), lowest, highest)

    first, last = (lowest, highest) if stride > 0 else (highest, lowest)
    start = bound(begin, first)
    steps = bound(end, last) - start + stride - (1 if stride > 0 else -1)
    return start, tf.maximum(steps // stride, 0)


@_rule("StridedSlice")
def strided_slice(call: _private.Call) -> tf.Tensor | None:
    """Gather the elements by index."""
    tensor, *vectors = call.inputs
    if tensor.shape.is_fully_defined() and all(is_known(vector) for vector in vectors):
        return None
    entries = _slice_entries(call, vectors, sizes(tensor))
    if entries is None:
        return None
    for entry in reversed(entries):
        if entry.kind == "new":
            tensor = tf.expand_dims(tensor, entry.dim)
        elif entry.kind == "one":
            tensor = tf.gather(tensor, entry.start, axis=entry.dim)
        elif entry.kind == "range":
            places = entry.start + _count_up(entry.count, 0, 1) * entry.stride
            tensor = tf.gather(tensor, places, axis=entry.dim)
    return tf.identity(tensor)


@_rule("Slice")
def slice_part(call: _private.Call) -> tf.Tensor | None:
    """Gather the elements by index, as the gradient of a concat needs them."""
    tensor, begin, size = call.inputs
    if tensor.shape.is_fully_defined() and is_known(begin) and is_known(size):
        return None
    for dim, (start, count) in enumerate(zip(_elements(begin), _elements(size), strict=True)):
        is_full = isinstance(start, int) and start == 0 and isinstance(count, int) and count in (-1, tensor.shape[dim])
        if not is_full:
            left = _size(tensor, dim) - start
            if isinstance(count, int):
                number = left if count == -1 else count
            else:
                number = count + tf.cast(count < 0, tf.int32) * (left - count)
            tensor = tf.gather(tensor, start + _count_up(number, 0, 1), axis=dim)
    return tf.identity(tensor)


@_rule("StridedSliceGrad")
def strided_slice_gradient(call: _private.Call) -> tf.Tensor | None:
    """Gather the gradient by index, and zeros elsewhere."""
    shape, *vectors, upstream = call.inputs
    if shape.shape[0] is None:
        return None
    sizes = _elements(shape)
    entries = _slice_entries(call, vectors, sizes)
    if entries is None:
        return None
    for entry in entries:
        # The dims behind have the numbers that they have in the result.
        if entry.kind == "new":
            upstream = tf.squeeze(upstream, entry.dim)
        elif entry.kind == "one":
            upstream = tf.expand_dims(upstream, entry.dim)
        if entry.kind in ("one", "range"):
            apart = _count_up(sizes[entry.dim], 0, 1) - entry.start
            index, count = apart // entry.stride, _size(upstream, entry.dim)
            inside = tf.cast((apart % entry.stride == 0) & (index >= 0) & (index < count), tf.int32)
            # A zero behind them is for all other places.
            paddings = [[0, int(dim == entry.dim)] for dim in range(upstream.shape.rank)]
            places = index * inside + (1 - inside) * count
            upstream = tf.gather(tf.pad(upstream, paddings), places, axis=entry.dim)
    return tf.identity(upstream)


def _broadcast(value: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    zeros = tf.raw_ops.Empty(shape=shape, dtype=value.dtype, init=True)
    return tf.logical_or(zeros, value) if value.dtype == tf.bool else zeros + value


def sizes(tensor: tf.Tensor) -> list[Size]:
    """Return the size of each dim."""
    return [_size(tensor, dim) for dim in range(tensor.shape.rank)]


def _size(tensor: tf.Tensor, dim: int) -> Size:
    size: int | None = tensor.shape[dim]
    return tf.gather(tf.shape(tensor), dim) if size is None else size


def _elements(vector: tf.Tensor) -> list[Size]:
    """Return the elements of a vector of integers: numbers if they are known, else tensors."""
    known = tf.get_static_value(_unpinned(vector), partial=True)
    numbers = [None] * vector.shape[0] if known is None else list(known)
    return [
        tf.cast(tf.gather(vector, i), tf.int32) if number is None else int(number) for i, number in enumerate(numbers)
    ]


def _count_up(size: Size, dim: int, rank: int) -> tf.Tensor:
    """0, 1, 2, ... along one dim of `rank`."""
    if isinstance(size, int):
        return tf.constant(np.arange(size, dtype="int32").reshape([size if d == dim else 1 for d in range(rank)]))
    ones = tf.raw_ops.Empty(shape=tf.stack([size]), dtype=tf.int32, init=True) + 1
    counted = tf.cumsum(ones, exclusive=True)
    for other in range(rank):
        if other != dim:
            counted = tf.expand_dims(counted, other)
    return counted
