"""TableRows: how devices store an embedding table, and each of its slots."""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.layouts import boxes
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.boxes import Shard
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.storage.formats import Member, StorageFormat
from tfshard.storage.initial_values import HostValue, drawn


class TableRows(StorageFormat):
    """Each device stores equally many rows. Zeros pad the rows of the last device.

    A step reads and writes rows of the local shard (`SparseRows`), and never the full table.
    """

    direct = False
    packed = False
    is_repeated = False

    def __init__(self, layout: VariableLayout, mesh: dtensor.Mesh):
        super().__init__(layout, mesh, (Member(shape=layout.spec.shape, compute=layout.compute, update=layout.update),))
        self._rows = layout.spec.shape[0]

    @property
    def devices(self) -> int:
        """The number of devices that share the rows."""
        return axis_sizes(self.mesh).data_size

    @property
    def rows_of_a_device(self) -> int:
        """The number of rows of a device, with padding."""
        return self.shape[0] // self.devices

    @property
    def is_gathered(self) -> bool:
        return False

    def pack_host(self, values: Mapping[int, HostValue]) -> np.ndarray:
        value, padding = drawn(values[0]), self.shape[0] - self._rows
        if not padding:
            return value
        if not any(value.strides):  # All elements are the same number, stored once.
            return np.broadcast_to(value[:1, :1], self.shape)
        return np.concatenate([value, np.zeros((padding, value.shape[1]), value.dtype)])

    def unpack_host(self, stored: np.ndarray, member: int) -> np.ndarray:
        return stored[: self._rows]

    def pack(self, written: Mapping[int, tf.Tensor], read: Callable[[int], tf.Tensor]) -> tf.Tensor:
        raise AssertionError("A step writes rows.")

    def gather(self, stored: tf.Tensor, codes: str | None = None) -> tf.Tensor:
        raise AssertionError("A step reads rows.")

    def read(self, gathered: tf.Tensor, member: int) -> tf.Tensor:
        raise AssertionError("A step reads rows.")

    def extract(self, stored: tf.Tensor, member: int) -> tf.Tensor:
        return stored[: self._rows]

    def insert(self, stored: Callable[[], tf.Tensor], member: int, value: tf.Tensor) -> tf.Tensor:
        return tf.pad(value, [[0, self.shape[0] - self._rows], [0, 0]])

    def shards_at(self, location: Mapping[str, int]) -> list[Shard]:
        box = boxes.shard_box(self.shape, self.storage, axis_sizes(self.mesh), location)
        rows = max(0, min(box.shape[0], self._rows - box.offset[0]))
        offset = min(box.offset[0], self._rows)
        return [Shard(member=0, box=boxes.Box(offset=(offset, 0), shape=(rows, box.shape[1])))]

    def share(self, shard_bytes: int, member: int) -> int:
        return shard_bytes
