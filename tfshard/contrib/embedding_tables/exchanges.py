"""All-to-all of variable-length lists between the devices of the data axis.

Each device groups its items by their target device. All lists of an exchange have one length
(devices/uneven_exchanges.py): no item is dropped, whatever the distribution of the ids. The devices agree on the length
by an all-reduce (maximum) of a number.

All tensors in this module differ between devices, also in size ("parted" layouts, devices/local_shards.py). DTensor
still checks their types: it refuses reshapes and slices of tensors with an unknown shape.

Numbers of devices and rows are int64: GPUs have int32 in the memory of the host, where a few numbers are needed as
shapes and keys.
"""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import expansions, replicas, uneven_exchanges
from tfshard.layouts.axes import axis_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lists:
    """The target of each of a device's items: the device, and the position in the list for that device.

    Attributes:
        mesh: The mesh.
        places: `(items, 2)`, int32: the device and the position.
        capacity: An int32 scalar, equal on all devices: the length of the lists.
        choice: An int32 scalar: the index of the capacity.
        choices: The number of capacities.
    """

    mesh: dtensor.Mesh
    places: tf.Tensor
    capacity: tf.Tensor
    choice: tf.Tensor
    choices: int

    @staticmethod
    def to(owners: tf.Tensor, most: int, mesh: dtensor.Mesh) -> "Lists":
        """Assign items to lists, in their order.

        Args:
            owners: `(items,)`, int64: the number on the data axis of each item's target device.
            most: The maximum number of items on a device.
            mesh: The mesh.
        """
        expansions.allow_local("ScatterNd", "GatherNd")
        devices = axis_sizes(mesh).data_size
        numbers = tf.range(devices, dtype=tf.int64)
        is_for = tf.cast(tf.equal(tf.expand_dims(owners, 1), numbers), tf.int64)
        place = tf.reduce_sum((tf.cumsum(is_for, axis=0) - 1) * is_for, axis=1)
        longest = tf.reduce_max(tf.reduce_sum(is_for, axis=0))
        if devices > 1:
            longest = tf.raw_ops.CollectiveReduceV2(
                input=longest,
                group_size=devices,
                group_key=replicas.group_key(mesh),
                instance_key=replicas.new_instance(),
                ordering_token=[],
                merge_op="Max",
                final_op="Id",
                is_stateless=False,
            )
        capacity, choice = uneven_exchanges.chosen(longest, most)
        return Lists(
            mesh=mesh,
            places=tf.cast(tf.stack([owners, place], axis=1), tf.int32),
            capacity=capacity,
            choice=choice,
            choices=len(uneven_exchanges.capacities(most)),
        )

    def sent(self, items: tf.Tensor) -> tf.Tensor:
        """Send `(items, ...)`. Returns `(devices, capacity, ...)` received by each device, zero-padded."""
        return self._exchanged(self._listed(items))

    def sent_numbers(self, numbers: tf.Tensor) -> tf.Tensor:
        """Send `(items,)` int64 numbers below 2 ** 31, as 32 bits each. Returns `(devices, capacity)`, int64."""
        words = tf.bitcast(tf.cast(self._listed(numbers), tf.int32), tf.float32)
        return tf.cast(tf.bitcast(self._exchanged(words), tf.int32), tf.int64)

    def answered(self, answers: tf.Tensor) -> tf.Tensor:
        """Send the answers `(devices, capacity, ...)` back. Returns `(items, ...)`, in the order of the sent items."""
        return tf.gather_nd(self._exchanged(answers), self.places)

    def _listed(self, items: tf.Tensor) -> tf.Tensor:
        """Return `(devices, capacity, ...)`: the items for each device, zero-padded."""
        shape = tf.stack([axis_sizes(self.mesh).data_size, self.capacity, *items.shape[1:]])
        return tf.scatter_nd(self.places, items, shape)

    def _exchanged(self, lists: tf.Tensor) -> tf.Tensor:
        return uneven_exchanges.all_to_all(lists, self.choice, self.choices, self.mesh)


def flattened(lists: tf.Tensor, others: Sequence[tf.Tensor], keep: tf.Tensor) -> list[tf.Tensor]:
    """Concatenate the kept items of received lists.

    Args:
        lists: `(devices, capacity)`.
        others: `(devices, capacity, ...)`, filtered in the same way.
        keep: `(devices, capacity)`, bool: the items to keep.

    Returns:
        `(items, ...)` for `lists` and each of `others`.
    """
    expansions.allow_local("Size")
    numbers = tf.range(tf.size(lists, out_type=tf.int64), dtype=tf.int64)
    capacity = tf.gather(tf.shape(lists, out_type=tf.int64), 1)
    places = tf.stack([numbers // capacity, numbers % capacity], axis=1)
    # GPUs look up no bool.
    kept = tf.gather_nd(places, tf.where(tf.gather_nd(tf.cast(keep, tf.float32), places) > 0))
    return [tf.gather_nd(each, kept) for each in (lists, *others)]


def distinct(items: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a device's unique items, and for each item its int32 index among them."""
    expansions.allow_local("Unique")
    found, where = tf.unique(items)
    return found, where


def ids_of_a_device(shape: Sequence[int], devices: int) -> int:
    """Return how many ids of a lookup each device has, with padding.

    Args:
        shape: The shape of the ids of the full batch.
        devices: The size of the batch axis.
    """
    return -(-math.prod(shape) // devices)
