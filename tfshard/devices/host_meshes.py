"""The mesh of the host's processors beside a mesh of GPUs, and copies between the two.

A mesh of GPUs has a host mesh with a CPU device for each of its devices. What is sharded in the same way on both goes
from each device to its own CPU device and back, without a collective.

# Note: tried on parts of one GPU

Tests run it on two meshes of CPU devices (`replaced`), where DTensor copies whole tensors only: there, and only there,
`copied` gathers before and cuts after. Steps on parts of a GPU had the numbers of one device (docs/measurements.md).
What follows was read in TensorFlow's source (tensorflow/dtensor/mlir; docs/planning.md, "Slots on the host"):

- Between a GPU mesh and a mesh of CPU devices, a tensor with equal shards on both, and not whole on every device, is
  sent and received by each pair of devices (dtensor_send_recv.cc). TensorFlow tests this on GPUs in both directions
  (multi_mesh_test.py).
- What is whole on every device goes through the first device and an all-reduce. DTensor's pass that merges all-reduces
  does not see that one of them waits, by way of the host, for another: merged, they wait for each other. So nothing
  whole is copied here, not even the numbers that copies wait for.
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
    """The host mesh of a mesh of GPUs; None for other devices."""
    if mesh.to_string() in _replaced:
        return _replaced[mesh.to_string()]
    return mesh.host_mesh() if mesh.device_type().upper() == "GPU" else None


@contextlib.contextmanager
def replaced(mesh: dtensor.Mesh, by: dtensor.Mesh) -> Iterator[None]:
    """A context in which a mesh has another host mesh, for tests on CPU devices.

    Args:
        mesh: The mesh.
        by: Of the same axes, of other devices.
    """
    _replaced[mesh.to_string()] = by
    try:
        yield
    finally:
        del _replaced[mesh.to_string()]


def copied(tensor: tf.Tensor, axes: Axes, source: dtensor.Mesh, target: dtensor.Mesh) -> tf.Tensor:
    """A tensor on the other mesh, in the same layout.

    Args:
        tensor: A DTensor, on `source`.
        axes: Its layout, which is that of the result.
        source: A mesh of GPUs, or its host mesh.
        target: The other of the two.
    """
    tensor = transfer.relayout(tensor, axes, source)
    if source.device_type().upper() != target.device_type().upper():
        return dtensor.copy_to_mesh(tensor, transfer.layout(axes, target))
    whole: Axes = (None,) * len(axes)
    tensor = dtensor.copy_to_mesh(transfer.relayout(tensor, whole, source), transfer.layout(whole, target))
    return transfer.relayout(tensor, axes, target)


def first_numbers(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """The first element of each device's piece of a tensor: it exists on a device when the piece does.

    Args:
        tensor: A DTensor of a static shape, on `mesh`.
        axes: Its layout.
        mesh: The mesh.

    Returns:
        A float32 tensor with a dim for each axis that shards the tensor, of the axis's size, sharded over it.
    """
    rows = ShardRows(shape=tuple(tensor.shape), axes=axes, mesh_shape=axis_sizes(mesh))
    split = transfer.relayout(tensor, axes, mesh)
    split = transfer.relayout(tf.reshape(split, rows.split_shape), rows.split_axes, mesh)
    sizes = [1 if axis is None else size for size, axis in zip(rows.split_shape, rows.split_axes, strict=True)]
    first = transfer.relayout(tf.slice(split, [0] * len(sizes), sizes), rows.split_axes, mesh)
    used = tuple(axis for axis in axes if axis is not None)
    numbers = tf.reshape(first, [axis_sizes(mesh)[axis] for axis in used])
    return transfer.relayout(tf.cast(numbers, tf.float32), used, mesh)
