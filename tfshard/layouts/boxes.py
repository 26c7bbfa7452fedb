"""The local shards of a device as boxes of the variables' shapes.

Pure Python. A checkpoint stores boxes, so a checkpoint does not depend on layouts, padding or groups.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import Axes, FlatForm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangular part of an array: its offset in each dim, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the box from the array."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))

    def moved(self, by: Sequence[int]) -> "Box":
        """Return the box with its offset moved by `by`."""
        return Box(offset=tuple(a + b for a, b in zip(self.offset, by, strict=True)), shape=self.shape)

    def is_in(self, shape: Sequence[int]) -> bool:
        """Return True if the box lies inside an array of `shape`."""
        if not len(self.offset) == len(self.shape) == len(shape):
            return False
        return all(
            a >= 0 and n >= 0 and a + n <= size for a, n, size in zip(self.offset, self.shape, shape, strict=True)
        )


def full_box(shape: Sequence[int]) -> Box:
    """Return the box that covers an array of `shape`."""
    return Box(offset=(0,) * len(shape), shape=tuple(shape))


def run(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Return the boxes, in order, that make up elements `begin` to `end` of an array in row-major order.

    >>> [(box.offset, box.shape) for box in run((4, 3), 2, 8)]
    [((0, 2), (1, 1)), ((1, 0), (1, 3)), ((2, 0), (1, 2))]
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield Box(offset=(begin,) * len(shape), shape=(end - begin,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row

    def within(index: int, begin: int, end: int) -> Iterator[Box]:
        for box in run(shape[1:], begin, end):
            yield Box(offset=(index, *box.offset), shape=(1, *box.shape))

    if first == last and end - begin < row:
        yield from within(first, begin - first * row, end - first * row)
        return
    if begin % row:
        yield from within(first, begin % row, row)
        first += 1
    full = end // row - first
    if full > 0:
        yield Box(offset=(first, *(0,) * (len(shape) - 1)), shape=(full, *shape[1:]))
    if end % row:
        yield from within(last, 0, end % row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A box that a device holds.

    Attributes:
        member: The index of the variable among the members of the storage.
        box: The box in the variable.
        begin: The first element of the box in the device's local tensor. The elements of a box are contiguous.
    """

    member: int
    box: Box
    begin: int = 0

    @property
    def end(self) -> int:
        return self.begin + self.box.elements


def shard_box(shape: Sequence[int], axes: Axes, mesh_shape: Mapping[str, int], location: Mapping[str, int]) -> Box:
    """Return the box of an array with layout `axes` that the device at `location` (axis name to index) holds."""
    sizes = [size if axis is None else size // mesh_shape[axis] for size, axis in zip(shape, axes, strict=True)]
    offset = [0 if axis is None else location[axis] * size for size, axis in zip(sizes, axes, strict=True)]
    return Box(offset=tuple(offset), shape=tuple(sizes))


def flat_shards(form: FlatForm, storage: Axes, location: Mapping[str, int]) -> list[Shard]:
    """Return the boxes of the members of a flat form that the device at `location` holds, without padding.

    Args:
        form: The flat form.
        storage: The storage layout of the buffer.
        location: Axis name to index.
    """
    first, last = 0, form.rows * form.columns
    data = storage[-2]
    if data is not None:
        first = location[data] % form.rows * form.columns
        last = first + form.columns
    found = []
    for index, member in enumerate(form.members):
        shard = shard_box(member.shape, member.compute, form.mesh_shape, location)
        begin, end = max(first, member.offset), min(last, member.end)
        # In one model shard, the elements of a member are in row-major order.
        at = begin - first
        for box in run(shard.shape, begin - member.offset, end - member.offset):
            found.append(Shard(member=index, box=box.moved(shard.offset), begin=at))
            at += box.elements
    return found


def part(axes: Sequence[str | None], location: Mapping[str, int]) -> tuple[int, ...]:
    """Return the index of the shard that the device at `location` holds. Devices with equal indices hold equal shards.

    Args:
        axes: The layout of the array, or the axes that shard the array.
        location: Axis name to index.

    Returns:
        The index of the device along each axis that shards the array.

    >>> part(("model", None), {"batch": 1, "model": 3})
    (3,)
    """
    return tuple(location[axis] for axis in axes if axis is not None)


def in_replica(location: Mapping[str, int], mesh_axes: MeshAxes) -> dict[str, int]:
    """Return the location in the first replica that stores the same shards.

    >>> in_replica({"batch": 5, "model": 1}, MeshAxes.of({"replica": 2, "batch": 4, "model": 2}))
    {'batch': 1, 'model': 1}
    """
    data = mesh_axes.data
    return dict(location) if data is None else {**location, data: location[data] % mesh_axes.shards}


def owner(storage: Axes, mesh_shape: MeshAxes, location: Mapping[str, int], number: int) -> dict[str, int]:
    """Return the location of the device that writes the shard held at `location`.

    Several devices may hold the shard; exactly one of them writes the shard.

    Args:
        storage: The storage layout.
        mesh_shape: Axis name to size.
        location: Axis name to index.
        number: The number of the storage. Consecutive numbers spread the writing over the devices.
    """
    free = {axis: range(mesh_shape[axis]) for axis in mesh_shape if axis not in storage}
    data = mesh_shape.data
    if data is not None and data in storage:
        free[data] = range(location[data] % mesh_shape.shards, mesh_shape.data_size, mesh_shape.shards)
    same = list(itertools.product(*free.values()))
    return {**location, **dict(zip(free, same[number % len(same)], strict=True))}


def axes_before_reshape(
    shape: Sequence[int], axes: Axes, before: Sequence[int], sizes: Mapping[str, int]
) -> Axes | None:
    """Return the layout before a reshape with which every device can reshape its local shard; None if none exists.

    When a reshape merges or splits dims, only the first of the dims can be sharded.

    >>> axes_before_reshape((16, 2, 8), (None, "model", None), (16, 16), {"model": 2})
    (None, 'model')
    >>> axes_before_reshape((16, 2, 8), (None, None, "model"), (16, 16), {"model": 2}) is None
    True

    Args:
        shape: The shape after the reshape.
        axes: The layout after the reshape.
        before: The shape before the reshape.
        sizes: Axis name to size.
    """
    found: list[str | None] = [None] * len(before)
    for dim, axis in enumerate(axes):
        if axis is None:
            continue
        ahead = math.prod(shape[:dim])
        same = [
            number
            for number, size in enumerate(before)
            if size > 1 and math.prod(before[:number]) == ahead and size % sizes[axis] == 0
        ]
        if not same:
            return None
        found[same[0]] = axis
    return tuple(found)
