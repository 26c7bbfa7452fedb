"""Slices and slice updates as DTensor expands them right, for those that it expands to wrong numbers or not at all.

Each function takes a `_private.Call` and gives the tensor that stands for its output, or None to leave it.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.errors import UnsupportedOperationError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FullSlice:
    """The arguments of a StridedSlice with an entry for each dim of the tensor, and what it does to the shape.

    DTensor's expansion matches entries and dims by their numbers. With an ellipsis, a new axis, or fewer entries than
    dims, what it says of the dims after them is wrong if one before them is taken away: the numbers are wrong, without
    an error, where one of them is sharded (tests/test_rewrites.py).

    Attributes:
        arguments: Those of `tf.raw_ops.StridedSlice`, without the tensor.
        new_axes: Where the result has new axes.
    """

    arguments: dict[str, Any]
    new_axes: tuple[int, ...]

    @classmethod
    def of(cls, call: _private.Call, vectors: list, rank: int) -> "_FullSlice | None":
        """What a StridedSlice or its gradient does; None if it has an entry for each dim already."""
        names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
        masks = {name: call.get_attr(f"{name}_mask") for name in names}
        given = vectors[0].shape[0]
        if given is None:
            return None
        _check_ranges(vectors, masks, given)
        if given == rank and not masks["ellipsis"] and not masks["new_axis"]:
            return None

        def has(name: str, i: int) -> bool:
            return bool(masks[name] >> i & 1)

        taken = sum(not has("ellipsis", i) and not has("new_axis", i) for i in range(given))
        entries: list[int | None] = []
        new_axes, result = [], 0
        ellipsis = next((i for i in range(given) if has("ellipsis", i)), given)
        for i in range(given + (ellipsis == given)):
            if i == ellipsis:
                entries += [None] * (rank - taken)
                result += rank - taken
            elif has("new_axis", i):
                new_axes.append(result)
                result += 1
            else:
                entries.append(i)
                result += not has("shrink_axis", i)
        bits = {
            name: sum(
                1 << dim for dim, i in enumerate(entries) if (name in ("begin", "end") if i is None else has(name, i))
            )
            for name in ("begin", "end", "shrink_axis")
        }
        full = [_entries(vector, entries, other) for vector, other in zip(vectors, (0, 0, 1), strict=True)]
        arguments = dict(zip(("begin", "end", "strides"), full, strict=True))
        arguments |= {f"{name}_mask": value for name, value in bits.items()}
        return cls(arguments=arguments, new_axes=tuple(new_axes))


def _check_ranges(vectors: list, masks: dict[str, int], given: int) -> None:
    """Raises `UnsupportedOperationError` for a range in a slice one of whose indices is not known before the step runs.

    DTensor gives a tensor without elements for it. An index by itself is right.
    """
    if all(_is_known(vector) for vector in vectors):
        return
    for i in range(given):
        whole = masks["begin"] >> i & 1 and masks["end"] >> i & 1
        if not whole and not any(masks[name] >> i & 1 for name in ("ellipsis", "new_axis", "shrink_axis")):
            raise UnsupportedOperationError(
                "A slice cannot have a range, such as 1:3, together with an index that is a tensor: DTensor gives an "
                "empty result for it. Use two slices one after the other, or keras.ops.slice for a range that begins "
                f"at a tensor. Received: a slice of {given} entries, of which number {i} is a range"
            )


def _is_known(tensor: tf.Tensor) -> bool:
    """Whether a value follows from constants and static shapes."""
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


def _entries(vector: tf.Tensor, entries: list[int | None], other: int) -> Any:
    """The elements of `vector` with these numbers; `other` for None."""
    known = tf.get_static_value(vector)
    if known is not None:
        return np.array([other if i is None else known[i] for i in entries], known.dtype)
    parts = tf.unstack(vector)
    return tf.stack([tf.constant(other, vector.dtype) if i is None else parts[i] for i in entries])


def full_slice(call: _private.Call) -> tf.Tensor | None:
    """A StridedSlice with an entry for each dim."""
    tensor, *vectors = call.inputs
    full = None if tensor.shape.rank is None else _FullSlice.of(call, vectors, tensor.shape.rank)
    if full is None:
        return None
    result = tf.raw_ops.StridedSlice(input=tensor, **full.arguments)
    for axis in full.new_axes:
        result = tf.expand_dims(result, axis)
    return result


def full_slice_gradient(call: _private.Call) -> tf.Tensor | None:
    """The gradient of a StridedSlice, with an entry for each dim."""
    shape, *vectors, upstream = call.inputs
    rank = shape.shape[0]
    full = None if rank is None else _FullSlice.of(call, vectors, rank)
    if full is None:
        return None
    if full.new_axes:
        upstream = tf.squeeze(upstream, full.new_axes)
    return tf.raw_ops.StridedSliceGrad(shape=shape, dy=upstream, **full.arguments)


def slice_update(call: _private.Call) -> tf.Tensor:
    """What XlaDynamicUpdateSlice computes: a tensor with `updates` in it from `start` on, moved so that they fit in."""
    tensor, updates, start = call.inputs
    inside: Any = True
    for dim, (size, count) in enumerate(zip(tensor.shape, updates.shape, strict=True)):
        if size == count:
            continue
        offset = tf.range(size) - tf.clip_by_value(tf.cast(start[dim], tf.int32), 0, size - count)
        shape = [size if i == dim else 1 for i in range(tensor.shape.rank)]
        inside = tf.logical_and(inside, tf.reshape((offset >= 0) & (offset < count), shape))
        if count > 1:
            updates = tf.gather(updates, tf.clip_by_value(offset, 0, count - 1), axis=dim)
    return tf.identity(updates) if inside is True else tf.where(inside, updates, tensor)
