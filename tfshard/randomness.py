"""Random numbers in a step: equal on devices that hold the same part of a tensor, independent on others."""

import contextlib

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, placement
from tfshard.layouts import Axes
from tfshard.mesh import BATCH_AXIS, axis_sizes


def random_axes(shape: tuple[int, ...], mesh_shape: dict[str, int]) -> Axes:
    """The layout in which random numbers of a shape are drawn on a mesh of several axes."""
    divides = bool(shape) and BATCH_AXIS in mesh_shape and shape[0] % mesh_shape[BATCH_AXIS] == 0
    return (BATCH_AXIS if divides else None, *(None,) * (len(shape) - 1)) if shape else ()


@contextlib.contextmanager
def consistent(mesh: dtensor.Mesh):
    """A context for tracing a step, in which replicas draw the same random numbers on a mesh of several axes.

    DTensor gives each shard of a random tensor a seed of its own, made from the device's coordinates along the axes
    that shard the tensor. It makes such a seed once in a step, and finds it again by comparing the numbers of those
    axes, but only as many as the tensor at hand has (`GetDeviceSeed` in TensorFlow 2.21's
    dtensor/mlir/expansions/random_op_spmd_expander.cc). On a (batch, model) mesh, after dropout of heads or hidden
    features, which both axes shard, dropout of a tensor that only the batch axis shards is given the seed of both. So
    devices that should hold the same activations do not, and training goes silently wrong
    (tests/test_tensor_parallel_random.py).

    Here all random tensors are drawn sharded over the batch axis only, and each device takes its part of what it drew.
    That needs no communication, but a device draws the numbers of the whole model axis. On a mesh of one axis nothing
    is changed: each shard draws its own.
    """
    sizes = axis_sizes(mesh)
    if _private.is_eager() or sum(size > 1 for size in sizes.values()) < 2:
        yield
        return

    def pin(tensor: tf.Tensor) -> tf.Tensor:
        if not tensor.shape.is_fully_defined():
            return tensor  # DTensor refuses it.
        return placement.relayout(tensor, random_axes(tuple(tensor.shape), sizes), mesh)

    with _private.replaced_outputs(_private.RANDOM_OPS, pin):
        yield
