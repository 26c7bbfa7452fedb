"""Lists that devices of the data axis send each other: of what each wants from each other one, of any length.

Each device groups what it has by the device that it is for, and all send each other lists of one length, the shortest
of a few (`capacities`) in which the longest of all finds room: nothing is left out, however the ids lie. Devices agree
on it by the maximum of a number.

All tensors here differ from device to device, and so do their sizes ("parted" layouts, devices/replicas.py). DTensor
looks at the types, though: it refuses reshapes and slices of tensors whose shape is not known.

A collective keeps the shapes of its first run, by its instance key. So one with each capacity has a key of its own.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import expansions, replicas
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.embedding_tables import capacities


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lists:
    """Where each of a device's items goes: to which device, and to which place in the list for it.

    Attributes:
        mesh: The mesh.
        places: `(items, 2)`, int32: the device, and the place.
        capacity: A number, int32: for how many items the lists have room. The same on all devices.
        choice: A number, int32: which of the capacities that is.
        choices: How many there are.
    """

    mesh: dtensor.Mesh
    places: tf.Tensor
    capacity: tf.Tensor
    choice: tf.Tensor
    choices: int

    @staticmethod
    def to(owners: tf.Tensor, most: int, mesh: dtensor.Mesh) -> "Lists":
        """Lists of items, in their order.

        Args:
            owners: `(items,)`, int32: the number on the data axis of the device that each item is for.
            most: The most items that a device can have.
            mesh: The mesh.
        """
        expansions.allow_local("ScatterNd", "GatherNd")
        devices = axis_sizes(mesh).data_size
        is_for = tf.cast(tf.equal(tf.expand_dims(owners, 1), tf.range(devices)), tf.int32)
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
        sizes = tf.constant(capacities(most), tf.int32)
        choice = tf.reduce_sum(tf.cast(sizes < longest, tf.int32))
        return Lists(
            mesh=mesh,
            places=tf.stack([owners, place], axis=1),
            capacity=tf.gather(sizes, choice),
            choice=choice,
            choices=len(capacities(most)),
        )

    def sent(self, items: tf.Tensor) -> tf.Tensor:
        """What each device is sent: `(devices, capacity, ...)` of `(items, ...)`, with zeros where a list ends."""
        shape = tf.stack([axis_sizes(self.mesh).data_size, self.capacity, *items.shape[1:]])
        return self._exchanged(tf.scatter_nd(self.places, items, shape))

    def answered(self, answers: tf.Tensor) -> tf.Tensor:
        """The way back: `(items, ...)` of the answers `(devices, capacity, ...)` to what was sent."""
        return tf.gather_nd(self._exchanged(answers), self.places)

    def _exchanged(self, lists: tf.Tensor) -> tf.Tensor:
        devices = axis_sizes(self.mesh).data_size
        if devices == 1:
            return lists
        return tf.raw_ops.CollectiveAllToAllV2(
            input=lists,
            group_size=devices,
            group_key=replicas.group_key(self.mesh),
            instance_key=replicas.new_instances(self.choices) + self.choice,
            ordering_token=[],
            is_stateless=False,
        )


def flattened(lists: tf.Tensor, others: Sequence[tf.Tensor], keep: tf.Tensor) -> list[tf.Tensor]:
    """Items of lists that came, one behind the other.

    Args:
        lists: `(devices, capacity)`, of which `keep` says which are taken.
        others: `(devices, capacity, ...)`, of which the same are taken.
        keep: `(devices, capacity)`, bool.

    Returns:
        `(items, ...)` of each.
    """
    expansions.allow_local("Size")
    numbers, capacity = tf.range(tf.size(lists)), tf.gather(tf.shape(lists), 1)
    places = tf.stack([numbers // capacity, numbers % capacity], axis=1)
    kept = tf.gather_nd(places, tf.where(tf.gather_nd(keep, places)))
    return [tf.gather_nd(each, kept) for each in (lists, *others)]


def distinct(items: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Each different one of a device's items once, and for each item where its like is among them: int32."""
    expansions.allow_local("Unique")
    found, where = tf.unique(items)
    return found, where
