"""Ranges of bytes that contain a box of a stored box.

A box of a larger stored box consists of many short runs. One request costs as much time as reading about `_GAP_BYTES`,
so one request reads runs that are near each other, together with the bytes between them.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from tfshard.checkpoints.bundle_index import StoredPlace
from tfshard.layouts.boxes import Box

_GAP_BYTES = 1 << 20
_RANGE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Range:
    """A range of bytes in a data file, and the elements that it fills.

    Attributes:
        begin: The first byte.
        end: The byte after the last.
        to: The part of the array that its elements fill.
        strides: The distance of neighbouring elements in the range, in bytes, in each dim.
    """

    begin: int
    end: int
    to: np.ndarray
    strides: tuple[int, ...]

    def copy(self, content: bytes) -> None:
        """Copy the elements out of the bytes of the range."""
        self.to[...] = np.ndarray(self.to.shape, self.to.dtype, buffer=content, strides=self.strides)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes, or None.

    >>> intersection(Box(offset=(0, 2), shape=(4, 4)), Box(offset=(2, 0), shape=(4, 3)))
    Box(offset=(2, 2), shape=(2, 1))
    """
    offset = tuple(map(max, a.offset, b.offset))
    ends = (min(i + m, j + n) for i, m, j, n in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    shape = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
    return Box(offset=offset, shape=shape) if all(size > 0 for size in shape) else None


def ranges(place: StoredPlace, box: Box, array: np.ndarray) -> Iterator[Range]:
    """Yield the ranges with the elements that a box takes from a stored box.

    Args:
        place: The stored box.
        box: The box to read.
        array: The array of the box, which the ranges fill.
    """
    common = intersection(place.box, box)
    if common is None:
        return
    strides = [array.itemsize] * len(box.shape)
    for dim in reversed(range(len(strides) - 1)):
        strides[dim] = strides[dim + 1] * place.box.shape[dim + 1]
    waiting = [common]
    while waiting:
        part = waiting.pop()
        begin = place.begin + sum(
            (o - p) * stride for o, p, stride in zip(part.offset, place.box.offset, strides, strict=True)
        )
        # From the last dim to the first: the length up to there, and the largest gap in it.
        length, gap = array.itemsize, 0
        for size, stride in zip(reversed(part.shape), reversed(strides), strict=True):
            gap = max(gap, stride - length) if size > 1 else gap
            length += (size - 1) * stride
        if (gap <= _GAP_BYTES and length <= _RANGE_BYTES) or part.elements == 1:
            at = tuple(slice(o - b, o - b + n) for o, b, n in zip(part.offset, box.offset, part.shape, strict=True))
            to = array[at] if at else array
            yield Range(begin=begin, end=begin + length, to=to, strides=tuple(strides))
            continue
        dim = next(dim for dim, size in enumerate(part.shape) if size > 1)
        half = part.shape[dim] // 2
        for first, size in ((half, part.shape[dim] - half), (0, half)):
            offset = part.offset[:dim] + (part.offset[dim] + first,) + part.offset[dim + 1 :]
            waiting.append(Box(offset=offset, shape=part.shape[:dim] + (size,) + part.shape[dim + 1 :]))
