"""Collectives between the devices of the data axis for lists whose lengths only the running step knows.

All lists of an all-to-all have one length: the shortest of a few possible lengths (`capacities`) that holds the longest
list. TensorFlow keeps the shapes of a collective under its instance key, so each possible length has a separate key.

All tensors in this module differ between devices, also in size ("parted" layouts, local_shards.py). DTensor still
checks their types: it refuses reshapes and slices of tensors with an unknown shape. Numbers are int64: GPUs have int32
in the memory of the host.
"""

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import local_shards, replicas, transfer
from tfshard.layouts.axes import axis_sizes


def capacities(items: int) -> tuple[int, ...]:
    """Return the possible lengths of the lists that devices exchange, from the shortest to the longest.

    A step takes the shortest length that holds the longest list of all devices, so no item is dropped. Each length is
    about an eighth longer than the previous length: TensorFlow keeps a plan for each length, so the lengths must be
    few.

    Args:
        items: The length of the longest possible list.

    >>> capacities(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20)
    """
    found = [1]
    while found[-1] < items:
        found.append(min(items, max(found[-1] + 1, found[-1] * 9 // 8)))
    return tuple(found)


def chosen(longest: tf.Tensor, most: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the length of the lists of an exchange, and the index of the length in `capacities`: int32 scalars.

    Args:
        longest: An int64 scalar, equal on all devices: the length of the longest list.
        most: The length of the longest possible list.
    """
    sizes = capacities(most)
    choice = tf.cast(tf.reduce_sum(tf.cast(tf.constant(sizes, tf.int64) < longest, tf.int64)), tf.int32)
    length = tf.slice(tf.constant(sizes, tf.int32), tf.reshape(choice, (1,)), (1,))
    return tf.reshape(length, ()), choice


def all_to_all(lists: tf.Tensor, choice: tf.Tensor, choices: int, mesh: dtensor.Mesh) -> tf.Tensor:
    """Send a list to each device of the data axis.

    Args:
        lists: `(devices, length, ...)` on each device: a list for each device.
        choice: An int32 scalar, equal on all devices: the index of the length in `capacities`.
        choices: The number of possible lengths.
        mesh: A mesh without replicas.

    Returns:
        A tensor with the shape of `lists`: the list from each device.
    """
    devices = axis_sizes(mesh).data_size
    if devices == 1:
        return lists
    # Collectives take no bfloat16. They copy float16 bit by bit.
    is_brain = lists.dtype == tf.bfloat16
    exchanged = tf.raw_ops.CollectiveAllToAllV2(
        input=tf.bitcast(lists, tf.float16) if is_brain else lists,
        group_size=devices,
        group_key=replicas.group_key(mesh),
        instance_key=replicas.new_instances(choices) + choice,
        ordering_token=[],
        is_stateless=False,
    )
    return tf.bitcast(exchanged, tf.bfloat16) if is_brain else exchanged


def all_gather(row: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Gather `(1, ...)`, of a known shape, from each device of the data axis. Returns `(devices, ...)`."""
    devices = axis_sizes(mesh).data_size
    if devices == 1:
        return row
    rows = tf.raw_ops.CollectiveGatherV2(
        input=row,
        group_size=devices,
        group_key=replicas.group_key(mesh),
        instance_key=replicas.new_instance(),
        ordering_token=[],
        is_stateless=False,
    )
    return tf.ensure_shape(rows, (devices, *row.shape[1:]))


def device_number(mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the number of this device on the data axis, int64, `(1,)`."""
    sizes = axis_sizes(mesh)
    numbers = transfer.relayout(tf.range(sizes.data_size, dtype=tf.int64), (sizes.data,), mesh)
    return local_shards.local_rows(numbers, mesh)
