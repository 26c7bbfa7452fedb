"""SparseRows: the rows of an embedding table, and of its slots, that one device updates in a step.

The rows, and their number, differ between devices. Operations on the resource of the device's local shard read
and write the rows ("parted" layouts, devices/local_shards.py). Their time and memory therefore do not depend on the
size of the table.

A step stays a pure function of its reads: a write is only recorded, and carried out as the last operation on the table.
The write waits for all reads of the table, since its indices are computed from the reads. Otherwise DTensor, which
orders a step by operands, could move the write in front of a read.

The operations take index tuples. TensorFlow's compiler replaces ResourceGather and ResourceScatterUpdate by a read, an
operation on tensors and an assignment (decompose_resource_ops.td), which copy all rows.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfshard.devices import expansions, transfer
from tfshard.storage.storage import Storage


class SparseRows:
    """Rows of a table's storage (`TableRows`), and of the storages of its slots.

    Attributes:
        rows: `(count,)`, int64: different rows of the local shard.
    """

    def __init__(self, rows: tf.Tensor):
        self.rows = rows
        self._values: dict[Storage, tf.Tensor] = {}
        self._written: dict[Storage, None] = {}

    @property
    def count(self) -> tf.Tensor:
        """The number of rows, an int32 scalar."""
        return tf.size(self.rows)

    def value(self, storage: Storage) -> tf.Tensor:
        """Return `(count, width)`: the rows of a storage, with recorded writes."""
        if storage not in self._values:
            self._values[storage] = read(storage, self.rows)
        return self._values[storage]

    def record(self, storage: Storage, value: tf.Tensor) -> None:
        """Record new rows."""
        self._values[storage] = value
        self._written[storage] = None

    def dense(self, storage: Storage, sparse: tf.IndexedSlices) -> tf.Tensor:
        """Convert slices of the rows to a tensor with all rows. Slices of the same row are summed."""
        count = tf.gather(tf.shape(self.value(storage)), 0)
        return tf.math.unsorted_segment_sum(sparse.values, sparse.indices, count)

    def known(self) -> tf.Tensor:
        """Return zero, a float32 on the mesh, that exists once the new rows do."""
        mesh = next(iter(self._values)).mesh
        zero = _after(tf.minimum(tf.cast(self.count, tf.int64), 0), [self._values[each] for each in self._written])
        return transfer.relayout(tf.cast(zero, tf.float32), (), mesh)

    def write(self, reads: Sequence[tf.Tensor]) -> None:
        """Write the recorded rows. Last in the step.

        Args:
            reads: Other reads of the table.
        """
        _allow()
        rows = tf.expand_dims(_after(self.rows, reads), -1)
        for storage in self._written:
            tf.raw_ops.ResourceScatterNdUpdate(ref=storage.buffer.handle, indices=rows, updates=self._values[storage])


def read(storage: Storage, rows: tf.Tensor) -> tf.Tensor:
    """Return `(..., width)`: rows of the local shard of a table.

    Args:
        storage: The table's storage (`TableRows`).
        rows: `(...)`, int64. A row outside of the shard is an error of TensorFlow's on CPU, and zeros on GPU.
    """
    _allow()
    places, dtype = tf.expand_dims(rows, -1), storage.buffer.dtype
    return tf.raw_ops.ResourceGatherNd(resource=storage.buffer.handle, indices=places, dtype=dtype)


@functools.cache
def _allow() -> None:
    expansions.allow_local("ResourceGatherNd", "ResourceScatterNdUpdate")


def _after(rows: tf.Tensor, reads: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return equal row numbers, computed from the reads by adding zeros that TensorFlow cannot know to be zero."""
    for each in reads:
        rows += tf.minimum(tf.reduce_sum(tf.cast(tf.math.is_nan(each), rows.dtype)), 0)
    return rows
