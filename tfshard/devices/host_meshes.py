"""The host mesh of a GPU mesh, and copies between the two.

A GPU mesh has a host mesh with a CPU device for each of its devices. If a tensor has the same sharding on both meshes,
each device copies its shard to its CPU device and back without a collective.

# Note: tested on partitions of one GPU

Tests use two meshes of CPU devices (`replaced`). Between CPU meshes, DTensor copies only full tensors, so `copied`
gathers before the copy and slices after it in this case only. Steps on partitions of a GPU matched a single device
(docs/measurements.md). The following was read in TensorFlow's source (tensorflow/dtensor/mlir; docs/planning.md, "Slots
on the host"):

- Between a GPU mesh and a CPU mesh, each pair of devices sends and receives a tensor (dtensor_send_recv.cc). The tensor
  must have equal shards on both meshes and must not be fully replicated. TensorFlow tests this on GPUs in both
  directions (multi_mesh_test.py).
- A fully replicated tensor goes through the first device and an all-reduce. DTensor's pass that merges all-reduces does
  not see that one all-reduce waits, through the host, for another. Once merged, they deadlock. Therefore this module
  copies no replicated tensor, not even the numbers that copies wait for.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.shard_rows import ShardRows
from tfshard.layouts.variable_layout import Axes

_replaced: dict[str, dtensor.Mesh] = {}


def of(mesh: dtensor.Mesh) -> dtensor.Mesh | None:
    """Return the host mesh of a GPU mesh, or None for other devices."""
    if mesh.to_string() in _replaced:
        return _replaced[mesh.to_string()]
    return mesh.host_mesh() if mesh.device_type().upper() == "GPU" else None


@contextlib.contextmanager
def replaced(mesh: dtensor.Mesh, by: dtensor.Mesh) -> Iterator[None]:
    """Give a mesh another host mesh inside the context. For tests on CPU devices.

    Args:
        mesh: The mesh.
        by: A mesh with the same axes and other devices.
    """
    _replaced[mesh.to_string()] = by
    try:
        yield
    finally:
        del _replaced[mesh.to_string()]


def copied(tensor: tf.Tensor, axes: Axes, source: dtensor.Mesh, target: dtensor.Mesh) -> tf.Tensor:
    """Copy a tensor to the other mesh, in the same layout.

    Args:
        tensor: A DTensor on `source`.
        axes: The layout of the tensor and of the result.
        source: A GPU mesh, or its host mesh.
        target: The other of the two meshes.
    """
    tensor = transfer.relayout(tensor, axes, source)
    if source.device_type().upper() != target.device_type().upper():
        return dtensor.copy_to_mesh(tensor, transfer.layout(axes, target))
    replicated: Axes = (None,) * len(axes)
    tensor = dtensor.copy_to_mesh(transfer.relayout(tensor, replicated, source), transfer.layout(replicated, target))
    return transfer.relayout(tensor, axes, target)


def first_numbers(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the first element of each device's shard. The element exists on a device as soon as the shard does.

    Args:
        tensor: A DTensor with a static shape, on `mesh`.
        axes: The layout of the tensor.
        mesh: The mesh.

    Returns:
        A float32 tensor with a dim for each axis that shards the tensor. The dim has the axis's size and is sharded
            over the axis.
    """
    rows = ShardRows(shape=tuple(tensor.shape), axes=axes, mesh_shape=axis_sizes(mesh))
    split = transfer.relayout(tensor, axes, mesh)
    split = transfer.relayout(tf.reshape(split, rows.split_shape), rows.split_axes, mesh)
    sizes = [1 if axis is None else size for size, axis in zip(rows.split_shape, rows.split_axes, strict=True)]
    first = transfer.relayout(tf.slice(split, [0] * len(sizes), sizes), rows.split_axes, mesh)
    used = tuple(axis for axis in axes if axis is not None)
    numbers = tf.reshape(first, [axis_sizes(mesh)[axis] for axis in used])
    return transfer.relayout(tf.cast(numbers, tf.float32), used, mesh)
