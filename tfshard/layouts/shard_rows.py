"""ShardRows: an array with a row for each of its shards, in which each shard is contiguous."""

import dataclasses
import math

import numpy as np

from tfshard.layouts.axes import MeshAxes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardRows:
    """The form `(axis sizes..., elements)` of a sharded array: a row for each shard, in row-major order.

    Attributes:
        shape: The shape of the array.
        axes: The layout of the array: the mesh axis, or None, of each dim.
        mesh_shape: Axis name to size.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    mesh_shape: MeshAxes = dataclasses.field(hash=False)

    @property
    def front(self) -> tuple[str, ...]:
        """The axes that shard the array, in mesh order."""
        used = set(self.axes)
        return tuple(axis for axis in self.mesh_shape if axis in used)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes in `front`."""
        return tuple(self.mesh_shape[axis] for axis in self.front)

    @property
    def elements(self) -> int:
        """The number of elements of a shard."""
        return math.prod(self.shape) // math.prod(self.sizes)

    @property
    def split_shape(self) -> tuple[int, ...]:
        """`shape` with each sharded dim split into (axis size, shard size)."""
        split: list[int] = []
        for size, axis in zip(self.shape, self.axes, strict=True):
            split += [size] if axis is None else [self.mesh_shape[axis], size // self.mesh_shape[axis]]
        return tuple(split)

    @property
    def split_axes(self) -> tuple[str | None, ...]:
        """The layout of `split_shape`: each axis shards the dim of its size."""
        axes: list[str | None] = []
        for axis in self.axes:
            axes += [None] if axis is None else [axis, None]
        return tuple(axes)

    @property
    def to_front(self) -> tuple[int, ...]:
        """The permutation of `split_shape` that moves the axes to the front, in mesh order."""
        split = self.split_axes
        front = [split.index(axis) for axis in self.front]
        return (*front, *(dim for dim in range(len(split)) if dim not in front))

    @property
    def moved_shape(self) -> tuple[int, ...]:
        """`split_shape` with the axes in front."""
        return tuple(self.split_shape[dim] for dim in self.to_front)

    @property
    def moved_axes(self) -> tuple[str | None, ...]:
        """The layout of `moved_shape`."""
        return (*self.front, *(None,) * (len(self.to_front) - len(self.front)))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of a local shard."""
        return tuple(
            size if axis is None else size // self.mesh_shape[axis]
            for size, axis in zip(self.shape, self.axes, strict=True)
        )

    @property
    def row_shape(self) -> tuple[int, ...]:
        """`(axis sizes..., elements)`."""
        return (*self.sizes, self.elements)

    @property
    def row_axes(self) -> tuple[str | None, ...]:
        """The layout of `row_shape`."""
        return (*self.front, None)

    def flatten(self, value: np.ndarray) -> np.ndarray:
        """Return the rows of an array, on the host."""
        return np.reshape(value.reshape(self.split_shape).transpose(self.to_front), self.row_shape)

    def restore(self, rows: np.ndarray) -> np.ndarray:
        """Return the array from its rows, on the host."""
        return np.reshape(rows.reshape(self.moved_shape).transpose(np.argsort(self.to_front)), self.shape)
