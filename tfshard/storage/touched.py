"""Touched: the rows of an embedding table, and of its slots, that one device updates in a step.

Each device has other rows, and another number of them. They are read and written by operations on the resource of the
device's own piece ("parted" layouts, devices/replicas.py), so that neither time nor memory depends on how many rows the
table has.

A step stays a pure function of what it reads: what is written is only recorded, and the write is the last that happens
to the table. It waits for all that was read of it, since the indices that it takes are made of that: DTensor, which
orders what a step does by operands, could put it before a read else.

The operations are those with index tuples. Of ResourceGather and ResourceScatterUpdate TensorFlow's compiler makes a
read, an operation on tensors and an assignment (decompose_resource_ops.td), which copy all rows.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import expansions, transfer
from tfshard.storage.storage import Storage


class Touched:
    """Rows of a storage of `TableRows` and of those of its slots.

    Attributes:
        rows: `(count,)`, int32: which of the device's own rows, each once.
    """

    def __init__(self, rows: tf.Tensor):
        self.rows = rows
        self._values: dict[Storage, tf.Tensor] = {}
        self._written: dict[Storage, None] = {}

    @property
    def count(self) -> tf.Tensor:
        """How many there are: a number, int32."""
        return tf.size(self.rows)

    def value(self, storage: Storage) -> tf.Tensor:
        """`(count, width)`: what the rows of a storage have, with what was written."""
        if storage not in self._values:
            self._values[storage] = read(storage, self.rows)
        return self._values[storage]

    def record(self, storage: Storage, value: tf.Tensor) -> None:
        """Takes note of new rows."""
        self._values[storage] = value
        self._written[storage] = None

    def known(self) -> tf.Tensor:
        """Zero, a float32 on the mesh, once the new rows are known."""
        mesh = next(iter(self._values)).mesh
        zero = _after(tf.minimum(self.count, 0), [self._values[each] for each in self._written])
        return transfer.relayout(tf.cast(zero, tf.float32), (), mesh)

    def write(self, reads: Sequence[tf.Tensor]) -> None:
        """Writes what was recorded. Last in the step.

        Args:
            reads: What else was read of the table.
        """
        _allow()
        rows = tf.expand_dims(_after(self.rows, reads), -1)
        for storage in self._written:
            tf.raw_ops.ResourceScatterNdUpdate(ref=storage.buffer.handle, indices=rows, updates=self._values[storage])


def read(storage: Storage, rows: tf.Tensor) -> tf.Tensor:
    """`(..., width)`: rows of a device's own piece.

    Args:
        storage: Of `TableRows`.
        rows: `(...)`, int32. One that a device does not have is an error of TensorFlow's on CPU, and zeros on GPU.
    """
    _allow()
    places, dtype = tf.expand_dims(rows, -1), storage.buffer.dtype
    return tf.raw_ops.ResourceGatherNd(resource=storage.buffer.handle, indices=places, dtype=dtype)


@functools.cache
def _allow() -> None:
    expansions.allow_local("ResourceGatherNd", "ResourceScatterNdUpdate")


def _after(rows: tf.Tensor, reads: Sequence[tf.Tensor]) -> tf.Tensor:
    """The same rows, once all is read: nothing is added to them that TensorFlow could know not to be."""
    for each in reads:
        rows += tf.minimum(tf.reduce_sum(tf.cast(tf.math.is_nan(each), rows.dtype)), 0)
    return rows


def as_parted(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """A tensor of which each device has its own, where DTensor believes it to be the same on all."""
    return dtensor.relayout(tensor, transfer.layout((None,) * tensor.shape.rank, mesh).to_parted())
