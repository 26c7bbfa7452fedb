"""Rewrite rules of slices and slice updates, which DTensor expands to wrong numbers or not at all."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import unsized
from tfshard.operations.registry import rewrite_rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FullSlice:
    """The arguments of a StridedSlice with an entry for each dim of the tensor, and the new axes of the result.

    DTensor's expansion matches entries and dims by their numbers. If a slice removes a dim and has an ellipsis, a new
    axis, or fewer entries than dims, it takes the axes of later dims for those of other dims, and moves them: devices
    gather and slice. With DTensor's all-to-all, which `startup` turns off, the numbers were wrong.

    Attributes:
        arguments: The arguments of `tf.raw_ops.StridedSlice`, without the tensor.
        new_axes: The numbers of the new axes in the result.
    """

    arguments: dict[str, Any]
    new_axes: tuple[int, ...]

    @classmethod
    def of(cls, call: _private.Call, vectors: list[tf.Tensor], rank: int) -> "_FullSlice | None":
        """Return the arguments of a StridedSlice or its gradient; None if it has an entry for each dim already."""
        names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
        masks = {name: call.get_attr(f"{name}_mask") for name in names}
        given = vectors[0].shape[0]
        if given is None:
            return None
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


def _entries(vector: tf.Tensor, entries: list[int | None], other: int) -> tf.Tensor | np.ndarray:
    """Return the elements of `vector` with these numbers, and `other` for None."""
    known = tf.get_static_value(vector)
    if known is not None:
        return np.array([other if i is None else known[i] for i in entries], known.dtype)
    parts = tf.unstack(vector)
    return tf.stack([tf.constant(other, vector.dtype) if i is None else parts[i] for i in entries])


def _forwards(call: _private.Call, sizes: list[int | None]) -> tuple[_private.Call, list[int]]:
    """Return a slice or its gradient without strides below zero, and the dims of the result to reverse.

    DTensor reverses each local shard, and leaves the order of the shards.

    Args:
        call: The operation.
        sizes: The sizes of the sliced tensor.
    """
    strides = tf.get_static_value(call.inputs[3])
    if strides is None or min(strides, default=1) > 0:
        return call, []
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {name: call.get_attr(f"{name}_mask") for name in names}
    begin, end = (tf.get_static_value(vector) for vector in call.inputs[1:3])
    taken = sum(not (masks["ellipsis"] | masks["new_axis"]) >> i & 1 for i in range(len(strides)))
    new: list[np.ndarray | None] = [None if each is None else each.copy() for each in (begin, end, strides)]
    dim = result = 0
    reversed_dims = []
    for i, stride in enumerate(strides):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            dim, result = dim + len(sizes) - taken, result + len(sizes) - taken
            continue
        if masks["new_axis"] & bit:
            result += 1
            continue
        if stride < 0 and not masks["shrink_axis"] & bit:
            size = sizes[dim]
            if begin is None or end is None or size is None:
                raise UnsupportedOperationError(
                    "A slice with a stride below zero needs constants for its begin and end, and a dim whose size "
                    f"is known before the step runs. Use tf.gather. Received: entry {i} of a slice of a tensor of "
                    f"{sizes}"
                )
            bounds = [None if masks[name] & bit else int(v[i]) for name, v in (("begin", begin), ("end", end))]
            places = range(size)[bounds[0] : bounds[1] : int(stride)]
            ends = (places[-1], places[0] + 1) if places else (0, 0)
            for vector, number in zip(new, (*ends, -stride), strict=True):
                assert vector is not None
                vector[i] = number
            masks["begin"], masks["end"] = masks["begin"] & ~bit, masks["end"] & ~bit
            reversed_dims.append(result)
        dim, result = dim + 1, result + (not masks["shrink_axis"] & bit)
    vectors = [old if each is None else tf.constant(each) for old, each in zip(call.inputs[1:4], new, strict=True)]
    changed = dataclasses.replace(
        call,
        inputs=(call.inputs[0], *vectors, *call.inputs[4:]),
        get_attr=lambda name: masks[name.removesuffix("_mask")],
    )
    return changed, reversed_dims


def _reversed(tensor: tf.Tensor, dims: list[int]) -> tf.Tensor:
    for dim in dims:
        tensor = tf.gather(tensor, np.arange(tensor.shape[dim])[::-1], axis=dim)
    return tensor


def _as_it_is(call: _private.Call) -> dict[str, Any]:
    masks = {f"{name}_mask" for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    vectors = dict(zip(("begin", "end", "strides"), call.inputs[1:4], strict=True))
    return {**vectors, **{mask: call.get_attr(mask) for mask in masks}}


def _elements(vector: tf.Tensor) -> list[int | None]:
    """Return the numbers in a vector, and None for elements that are tensors."""
    known = tf.get_static_value(vector)
    if known is not None:
        return [int(each) for each in known]
    parts = vector.op.inputs if vector.op.type == "Pack" else [None] * vector.shape[0]
    values = [None if part is None else tf.get_static_value(part) for part in parts]
    return [None if value is None else int(value) for value in values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """An entry of a slice that takes one element at a tensor, or a range of known size that begins at a tensor.

    Attributes:
        dim: The dim of the tensor.
        result: The dim of the slice without this entry.
        index: The first element, counted from the front or from the end.
        size: The size of the range; None for an element, which leaves no dim.
    """

    dim: int
    result: int
    index: tf.Tensor
    size: int | None = None

    def take(self, tensor: tf.Tensor) -> tf.Tensor:
        """Apply the entry to the slice without it."""
        first = _from_the_front(self.index, tensor.shape[self.result])
        if self.size is not None:
            first += tf.range(self.size, dtype=first.dtype)
        return tf.gather(tensor, first, axis=self.result)

    def put(self, upstream: tf.Tensor, size: int) -> tf.Tensor:
        """Return the gradient of the slice without this entry: zeros elsewhere in a dim of this size."""
        if self.size is None:
            upstream = tf.expand_dims(upstream, self.result)
        count = self.size or 1
        offset = tf.range(size, dtype=self.index.dtype) - _from_the_front(self.index, size)
        if count > 1:
            upstream = tf.gather(upstream, tf.clip_by_value(offset, 0, count - 1), axis=self.result)
        shape = [size if i == self.result else 1 for i in range(upstream.shape.rank)]
        here = tf.reshape((offset >= 0) & (offset < count), shape)
        return tf.where(here, upstream, tf.zeros([], upstream.dtype))


def _from_the_front(index: tf.Tensor, size: int) -> tf.Tensor:
    return tf.where(index < 0, index + size, index)


def _range_size(begin: tf.Tensor, end: tf.Tensor) -> int | None:
    """Return the size of a range with an end that is its begin plus a number, as in `x[i : i + 8]`, else None."""
    if end.op.type not in ("Add", "AddV2"):
        return None
    first, second = end.op.inputs
    size = tf.get_static_value(second if first is begin else first) if begin is first or begin is second else None
    return None if size is None or size < 1 else int(size)


class _SizeDependsOnValues(Exception):
    """The rules for unknown sizes rewrite the slice (unsized.py)."""


def _places_apart(call: _private.Call, rank: int) -> tuple[_private.Call, list[_Place]] | None:
    """Split a slice with ranges next to indices that are tensors, for which DTensor returns a tensor without elements.

    Returns:
        The slice without these indices, and their places. None for other slices.

    Raises:
        _SizeDependsOnValues: A range begins or ends at a tensor, and its size is not known.
    """
    tensor, *vectors = call.inputs[:4]
    count = vectors[0].shape[0]
    if call.is_eager or count is None or all(unsized.is_known(vector) for vector in vectors):
        return None
    masks = {name: call.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}

    def has(name: str, i: int) -> bool:
        return bool(masks[name] >> i & 1)

    elements = [_elements(vector) for vector in vectors]
    taken = sum(not has("ellipsis", i) and not has("new_axis", i) for i in range(count))
    entries: list[tuple[int | None, ...]] = []
    places: list[_Place] = []
    dim, result, ranges = 0, 0, False

    def take_all_of(i: int) -> None:
        masks["begin"], masks["end"] = masks["begin"] | 1 << i, masks["end"] | 1 << i

    for i in range(count):
        entry = tuple(element[i] for element in elements)
        if has("ellipsis", i):
            entry, dim, result = (0, 0, 1), dim + rank - taken, result + rank - taken
        elif has("new_axis", i):
            entry, result = (0, 0, 1), result + 1
        elif not has("shrink_axis", i):
            is_open = (has("begin", i), has("end", i), False)
            entry = tuple(0 if o else each for o, each in zip(is_open, entry, strict=True))
            if None in entry:
                bounds = [vector.op.inputs[i] for vector in vectors[:2] if vector.op.type == "Pack"]
                size = _range_size(*bounds) if len(bounds) == 2 and entry == (None, None, 1) else None
                if size is None:
                    raise _SizeDependsOnValues
                places.append(_Place(dim=dim, result=result, index=bounds[0], size=size))
                entry, ranges = (0, 0, 1), True
                take_all_of(i)
            ranges = ranges or not all(is_open[:2]) or entry[2] != 1
            dim, result = dim + 1, result + 1
        elif entry[0] is None:
            places.append(_Place(dim=dim, result=result, index=tf.unstack(vectors[0])[i]))
            entry, dim, result = (0, 0, 1), dim + 1, result + 1
            masks["shrink_axis"] &= ~(1 << i)
            take_all_of(i)
        else:
            entry, dim = (entry[0], 0, 1), dim + 1
        entries.append(entry)
    if not ranges:
        return None
    constants = [tf.constant(each, vectors[0].dtype) for each in zip(*entries, strict=True)]
    without = dataclasses.replace(
        call, inputs=(tensor, *constants, *call.inputs[4:]), get_attr=lambda name: masks[name.removesuffix("_mask")]
    )
    return without, places


def _has_known_shapes(call: _private.Call) -> bool:
    """The operand is a local shard, and its shape does not depend on values."""
    return not unsized.is_unsized(call)


_SLICE_FAULT = (
    "matches entries and dims by number, so the numbers are wrong where entries are missing (an ellipsis, a new "
    "axis) and a later dim is sharded; reverses each shard separately for a stride below zero; gives no elements "
    "for a range that begins at a tensor"
)


# DTensor reads past the end of the layout of a slice with a new axis, also where nothing is sharded.
@rewrite_rule(
    "StridedSlice", graph=True, eager=False, gradient="registered", local="only", when=_has_known_shapes,
    fault="reads past the end of the layout for a new axis", cases=("slice of a local shard",),
)  # fmt: skip
@rewrite_rule(
    "StridedSlice", graph=True, eager=True, gradient="registered", order=1, sizes="any",
    fault=_SLICE_FAULT, cases=("slice", "slice in an eager step"),
)  # fmt: skip
def full_slice(call: _private.Call) -> tf.Tensor | None:
    """Slice with an entry for each dim, forwards, and gather reversed dims and ranges that begin at a tensor."""
    if not call.inputs[0].shape.is_fully_defined():
        if call.inputs[0].shape.rank is None or unsized.depends_on_values(call.inputs[0]):
            return None
    try:
        apart = _places_apart(call, call.inputs[0].shape.rank)
    except _SizeDependsOnValues:
        return None
    if apart is None:
        return _one_slice(call)
    without, places = apart
    result = _one_slice(without)
    result = tf.raw_ops.StridedSlice(input=call.inputs[0], **_as_it_is(without)) if result is None else result
    for place in reversed(places):
        result = place.take(result)
    return result


def _one_slice(call: _private.Call) -> tf.Tensor | None:
    forwards, backwards = _forwards(call, list(call.inputs[0].shape))
    tensor, *vectors = forwards.inputs
    full = _FullSlice.of(forwards, vectors, tensor.shape.rank)
    if full is None and forwards is call:
        return None
    result = tf.raw_ops.StridedSlice(input=tensor, **(_as_it_is(forwards) if full is None else full.arguments))
    for axis in full.new_axes if full else ():
        result = tf.expand_dims(result, axis)
    return _reversed(result, backwards)


@rewrite_rule(
    "StridedSliceGrad", graph=True, eager=True, gradient="registered", order=1, sizes="any",
    fault=_SLICE_FAULT, cases=("slice", "slice in an eager step"),
)  # fmt: skip
def full_slice_gradient(call: _private.Call) -> tf.Tensor | None:
    """Write the gradient of a slice with an entry for each dim."""
    if not call.is_eager and not unsized.is_known(call.inputs[0]) and unsized.depends_on_values(*call.inputs):
        return None
    sizes = tf.get_static_value(call.inputs[0])
    try:
        apart = None if sizes is None else _places_apart(call, len(sizes))
    except _SizeDependsOnValues:
        return None
    if apart is not None:
        call, places = apart
        upstream = call.inputs[4]
        for place in places:
            upstream = place.put(upstream, sizes[place.dim])
        call = dataclasses.replace(call, inputs=(*call.inputs[:4], upstream))
        result = _one_gradient(call, sizes)
        return (
            tf.raw_ops.StridedSliceGrad(shape=call.inputs[0], dy=upstream, **_as_it_is(call))
            if result is None
            else result
        )
    return _one_gradient(call, sizes)


def _one_gradient(call: _private.Call, sizes: np.ndarray | None) -> tf.Tensor | None:
    forwards, backwards = _forwards(call, [None] * call.inputs[0].shape[0] if sizes is None else sizes.tolist())
    shape, *vectors, upstream = forwards.inputs
    full = _FullSlice.of(forwards, vectors, shape.shape[0])
    if full is None and forwards is call:
        return None
    upstream = _reversed(upstream, backwards)
    if full and full.new_axes:
        upstream = tf.squeeze(upstream, full.new_axes)
    arguments = _as_it_is(forwards) if full is None else full.arguments
    return tf.raw_ops.StridedSliceGrad(shape=shape, dy=upstream, **arguments)


@rewrite_rule(
    "XlaDynamicUpdateSlice", graph=True, eager=True, gradient="none", sizes="any",
    fault="does not expand it (`keras.ops.slice_update`)", cases=("slice update", "slice update in an eager step"),
)  # fmt: skip
def slice_update(call: _private.Call) -> tf.Tensor:
    """Select the updates or the tensor by index. XLA moves updates that would not fit, so the rule does, too."""
    tensor, updates, start = call.inputs
    inside: tf.Tensor | bool = True
    for dim, (size, count) in enumerate(zip(tensor.shape, updates.shape, strict=True)):
        if size == count:
            continue
        offset = tf.range(size) - tf.clip_by_value(tf.cast(start[dim], tf.int32), 0, size - count)
        shape = [size if i == dim else 1 for i in range(tensor.shape.rank)]
        inside = tf.logical_and(inside, tf.reshape((offset >= 0) & (offset < count), shape))
        if count > 1:
            updates = tf.gather(updates, tf.clip_by_value(offset, 0, count - 1), axis=dim)
    return tf.identity(updates) if inside is True else tf.where(inside, updates, tensor)
