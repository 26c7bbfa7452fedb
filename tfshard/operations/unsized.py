"""What is done in a compiled step with tensors whose shape depends on values, such as what `tf.boolean_mask` gives.

DTensor expands an operation with the shapes that are known while it compiles, and refuses a reshape, a slice or a
broadcast of a tensor of which one is not. Such a tensor is whole (scatters.py, expansions.py), so the operations can be
exchanged for others that every device computes by itself. Each function takes a `_private.Call` and gives the tensor
that stands for its output, or None to leave the operation as it is: where all shapes are known, or where DTensor has to
refuse it. In eager code every shape is known.
"""

import math

import numpy as np
import tensorflow as tf

from tfshard import _private


def is_known(tensor: tf.Tensor) -> bool:
    """Whether a value follows from constants and static shapes, so that DTensor finds it while it compiles."""
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


# Operations whose results have a shape that depends on values.
_SIZED_BY_VALUES = frozenset(
    ("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "ListDiff", "DynamicPartition",
     "DynamicStitch", "ParallelDynamicStitch", "NonMaxSuppressionV3", "NonMaxSuppressionV4", "NonMaxSuppressionV5",
     "NonMaxSuppressionV2", "CombinedNonMaxSuppression", "Bincount", "DenseBincount",
     "SegmentSum", "SegmentMean", "SegmentProd", "SegmentMax", "SegmentMin", "ComputeAccidentalHits")
)  # fmt: skip


def depends_on_values(*tensors: tf.Tensor) -> bool:
    """Whether the shape of a tensor, or a shape that it holds, depends on values.

    Others that are not known while a step is traced, such as a batch size that changes, DTensor knows when it compiles.
    """
    seen: set[tf.Operation] = set()
    waiting = [tensor for tensor in tensors if _may_depend(tensor)]
    while waiting:
        operation = waiting.pop().op
        if operation.type in _SIZED_BY_VALUES:
            return True
        if operation not in seen:
            seen.add(operation)
            # What a branch of a tf.cond takes from outside.
            outside = _private.captured(operation.outputs[0]) if operation.type == "Placeholder" else None
            sources = operation.inputs if outside is None else [outside]
            waiting += [tensor for tensor in sources if _may_depend(tensor)]
    return False


def _may_depend(tensor: tf.Tensor) -> bool:
    holds_sizes = tensor.dtype.is_integer and tensor.shape.rank in (0, 1)
    return holds_sizes or not tensor.shape.is_fully_defined()


def reshape(call: _private.Call) -> tf.Tensor | None:
    """Reshape: through a vector, and by index."""
    tensor, shape = call.inputs
    assert call.outputs is not None
    (output,) = call.outputs
    if tensor.shape.rank is None or output.shape.rank is None:
        return None
    if tensor.shape.is_fully_defined() and is_known(shape):
        return None
    open_dims = [dim for dim, size in enumerate(output.shape) if size is None]
    if list(tensor.shape) == list(output.shape) and len(open_dims) == 1:
        return tf.identity(tensor)  # One dim is not known: it is the same.
    if tensor.shape.rank == output.shape.rank and output.shape.is_fully_defined():
        if all(a in (None, b) for a, b in zip(tensor.shape, output.shape, strict=True)):
            return tf.raw_ops.EnsureShape(input=tensor, shape=output.shape)
    vector = tensor
    if tensor.shape.rank != 1:
        nowhere = tf.zeros_like(tensor, tf.int32)
        (vector,) = tf.raw_ops.DynamicPartition(data=tensor, partitions=nowhere, num_partitions=1)
    if output.shape.rank == 1:
        return vector
    sizes: list[int | tf.Tensor | None] = list(output.shape)
    if len(open_dims) == 1:
        known = math.prod(size for size in sizes if size is not None)
        sizes[open_dims[0]] = tf.raw_ops.Size(input=vector) // known
    else:
        total, product = tf.raw_ops.Size(input=vector), tf.cast(tf.reduce_prod(shape), tf.int32)
        for dim in open_dims:
            given = tf.cast(tf.gather(shape, dim), tf.int32)
            # One may be -1: what is left for it.
            sizes[dim] = tf.where(given < 0, total // tf.maximum(-product, 1), given)
    index, stride = tf.constant(0), tf.constant(1)
    for dim in reversed(range(len(sizes))):
        index = index + _count_up(sizes[dim], dim, len(sizes)) * stride
        stride = stride * sizes[dim]
    return tf.gather(vector, index)


def tile(call: _private.Call) -> tf.Tensor | None:
    """Tile: of a tensor of ones and open dims, or, where a dim is open, by numbers that are known."""
    tensor, multiples = call.inputs
    if not is_known(multiples):
        return _broadcast(tensor, multiples) if all(size == 1 for size in tensor.shape) else None
    assert call.outputs is not None
    result = call.outputs[0].shape
    if tensor.shape.rank is None or result.rank is None or tensor.shape.is_fully_defined():
        return None
    for dim, (size, after) in enumerate(zip(tensor.shape, result, strict=True)):
        if size is None:
            count = tf.get_static_value(multiples, partial=True)[dim]
            if count is None:
                return None
            tensor = tf.concat([tensor] * int(count), axis=dim) if count != 1 else tensor
        elif after != size:
            tensor = tf.gather(tensor, np.arange(after, dtype="int32") % size, axis=dim)
    return tf.identity(tensor)


def broadcast(call: _private.Call) -> tf.Tensor | None:
    """BroadcastTo."""
    tensor, shape = call.inputs
    return None if is_known(shape) else _broadcast(tensor, shape)


def fill(call: _private.Call) -> tf.Tensor | None:
    """Fill."""
    shape, value = call.inputs
    return None if is_known(shape) else _broadcast(value, shape)


def summed(call: _private.Call) -> tf.Tensor | None:
    """Sum over the dims in which an operand was broadcast, as gradients of arithmetic have it.

    What comes next reshapes the sum to the operand's shape, so dims may stay, of size 1.
    """
    gradient, axes = call.inputs
    if axes.op.type != "BroadcastGradientArgs" or is_known(axes):
        return None
    which = axes.value_index
    shapes = [shape.op.inputs[0].shape if shape.op.type == "Shape" else None for shape in axes.op.inputs]
    ours, theirs = shapes[which], shapes[1 - which]
    if ours is None or theirs is None or None in (ours.rank, theirs.rank, gradient.shape.rank):
        return None
    in_front = gradient.shape.rank - ours.rank
    if in_front:
        gradient = tf.reduce_sum(gradient, list(range(in_front)))
    for dim, size in enumerate(ours):
        other_dim = dim + theirs.rank - ours.rank
        other = theirs[other_dim] if other_dim >= 0 else 1
        if size == 1 and other != 1:
            gradient = tf.reduce_sum(gradient, dim, keepdims=True)
        elif size is None and other != 1:
            # It was broadcast if its size, which only the step knows, is 1 and that of the result is not: then the sum
            # is taken, from behind. (A tf.where with a scalar condition crashed the compiler here.)
            number = tf.gather(tf.cast(axes.op.inputs[which], tf.int32), dim)
            size_now = tf.gather(tf.shape(gradient), dim)
            skipped = tf.cast(tf.not_equal(number, size_now), tf.int32) * size_now
            both = tf.concat([gradient, tf.reduce_sum(gradient, dim, keepdims=True)], axis=dim)
            gradient = tf.gather(both, _count_up(number, 0, 1) + skipped, axis=dim)
    return tf.identity(gradient)


def slice_of(call: _private.Call) -> tf.Tensor | None:
    """StridedSlice that takes all of the dims that are not known."""
    tensor, *vectors = call.inputs
    if tensor.shape.rank is None or tensor.shape.is_fully_defined():
        return None
    given = [tf.get_static_value(vector) for vector in vectors]
    if any(each is None for each in given):
        return None
    begin, end, strides = given
    has = {name: call.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    count = len(begin)
    taken = sum(not (has["ellipsis"] | has["new_axis"]) >> i & 1 for i in range(count))
    result, dim, rest = tensor, 0, tensor.shape.rank - taken
    for i in range(count):
        bit = 1 << i
        if has["ellipsis"] & bit:
            dim, rest = dim + rest, 0
        elif has["new_axis"] & bit:
            result, dim = tf.expand_dims(result, dim), dim + 1
        elif has["shrink_axis"] & bit:
            size, place = result.shape[dim], int(begin[i])
            if place < 0:
                place += tf.gather(tf.shape(result), dim) if size is None else size
            result = tf.gather(result, place, axis=dim)
        elif has["begin"] & has["end"] & bit and strides[i] == 1:
            dim += 1
        elif result.shape[dim] is None:
            return None
        else:
            bounds = [None if has[name] & bit else int(v[i]) for name, v in (("begin", begin), ("end", end))]
            places = np.arange(result.shape[dim])[bounds[0] : bounds[1] : int(strides[i])]
            result, dim = tf.gather(result, places, axis=dim), dim + 1
    return tf.identity(result)


def part(call: _private.Call) -> tf.Tensor | None:
    """Slice: what the gradient of a concatenation takes."""
    tensor, begin, size = call.inputs
    if tensor.shape.rank is None or tensor.shape.is_fully_defined() and is_known(begin) and is_known(size):
        return None
    starts, counts = tf.get_static_value(begin, partial=True), tf.get_static_value(size, partial=True)
    for dim in range(tensor.shape.rank):
        start = None if starts is None else starts[dim]
        count = None if counts is None else counts[dim]
        if start == 0 and count is not None and count in (-1, tensor.shape[dim]):
            continue
        if count == -1:
            return None
        number = tf.cast(tf.gather(size, dim), tf.int32) if count is None else int(count)
        tensor = tf.gather(tensor, tf.cast(tf.gather(begin, dim), tf.int32) + _count_up(number, 0, 1), axis=dim)
    return tf.identity(tensor)


def gradient_of_slice(call: _private.Call) -> tf.Tensor | None:
    """StridedSliceGrad: zeros, with the gradient where the slice was taken."""
    shape, *vectors, upstream = call.inputs
    given = [tf.get_static_value(vector) for vector in vectors]
    if shape.shape[0] is None or any(each is None for each in given):
        return None
    begin, end, strides = given
    has = {name: call.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    taken = sum(not (has["ellipsis"] | has["new_axis"]) >> i & 1 for i in range(len(begin)))
    dim = 0
    for i in range(len(begin)):
        bit = 1 << i
        if has["ellipsis"] & bit:
            dim += shape.shape[0] - taken
            continue
        if has["new_axis"] & bit:
            upstream = tf.squeeze(upstream, dim)
            continue
        shrunk = has["shrink_axis"] & bit
        if shrunk:
            upstream = tf.expand_dims(upstream, dim)
        elif strides[i] < 0 or (not has["begin"] & bit and begin[i] < 0):
            return None
        if not shrunk and has["end"] & bit and strides[i] == 1 and (has["begin"] & bit or begin[i] == 0):
            dim += 1
            continue
        size = tf.cast(tf.gather(shape, dim), tf.int32)
        start = 0 if has["begin"] & bit and not shrunk else int(begin[i])
        from_start = _count_up(size, 0, 1) - (start if start >= 0 else size + start)
        count = upstream.shape[dim] or tf.gather(tf.shape(upstream), dim)
        index = from_start // int(strides[i])
        inside = (from_start >= 0) & (from_start % int(strides[i]) == 0) & (index < count)
        taken_up = tf.gather(upstream, tf.clip_by_value(index, 0, count - 1), axis=dim)
        for other in range(upstream.shape.rank):
            if other != dim:
                inside = tf.expand_dims(inside, other)
        upstream = tf.where(inside, taken_up, tf.zeros_like(taken_up))
        dim += 1
    return tf.identity(upstream)


def _broadcast(value: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    zeros = tf.raw_ops.Empty(shape=shape, dtype=value.dtype, init=True)
    return tf.logical_or(zeros, value) if value.dtype == tf.bool else zeros + value


def _count_up(size: int | tf.Tensor, dim: int, rank: int) -> tf.Tensor:
    """0, 1, 2, ... along one dim of `rank`."""
    if isinstance(size, int):
        return tf.constant(np.arange(size, dtype="int32").reshape([size if d == dim else 1 for d in range(rank)]))
    ones = tf.raw_ops.Empty(shape=tf.stack([size]), dtype=tf.int32, init=True) + 1
    counted = tf.cumsum(ones, exclusive=True)
    for other in range(rank):
        if other != dim:
            counted = tf.expand_dims(counted, other)
    return counted
