"""Run operations on each device's local shards. Only this module makes parted layouts.

DTensor has an expansion rule for each operation. It does not expand an operation with an operand in a "parted" layout
(SkipExpansionForPartedLayout in TensorFlow 2.21's dtensor/mlir/spmd_expander.cc): each device computes with its local
shard. The static shape of the operand in the graph is still the global shape.

- `to_local` and `local_rows` return the local shard in the local shape. A caller declares the result replicated, and
  DTensor then leaves what follows as it is, while the values differ between devices.
- `from_local` is the way back: a `tf.gather`, which sends nothing, by an index tensor that the axis shards.
- `parted` keeps the global shape, for one operation that leaves sharded dims as they are (`run_locally`).

Between `to_local` and `from_local`, never relayout a tensor to a sharded layout: DTensor would slice the local shard
again. The names of operations that are made in `scope`, and of their gradients, tell that they are local (`is_named`).

The gradients of these functions are wrong, except of `with_gradient`. `operations.rows` and `operations.local_map` have
functions that you can differentiate.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes

# A part of the names of operations, functions and loops on local shards, and of their gradients.
NAME = "rows_of_a_device"


def scope() -> contextlib.AbstractContextManager[Any]:
    """A context for operations on local shards: only rewrite rules with `local="also"` or `"only"` apply."""
    context: contextlib.AbstractContextManager[Any] = tf.name_scope(NAME)
    return context


def is_named(operation: tf.Operation) -> bool:
    """Return whether an operation was made in `scope`, or belongs to the gradient of one that was."""
    return NAME in operation.name


def parted(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a tensor in a parted layout: each device runs the next operation on its local shard."""
    return dtensor.relayout(tensor, transfer.layout(axes, mesh).to_parted())


def is_parted(tensor: tf.Tensor) -> bool:
    """Return whether a tensor of a step was brought to a parted layout."""
    return bool(tensor.op.type == "Relayout" and tensor.op.get_attr("layout").startswith(b"parted:"))


def parted_name(rank: int, mesh: dtensor.Mesh) -> str:
    """Return the name of the parted layout that DTensor gives the result of an operation without an expansion."""
    name: str = transfer.layout((None,) * rank, mesh).to_parted().to_string()
    return name


def varying(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a local tensor in a parted layout: each device runs the next operation on its local value."""
    return parted(tensor, (None,) * tensor.shape.rank, mesh)


def run_locally(
    function: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor, axes: Axes, result: Axes, mesh: dtensor.Mesh
) -> tf.Tensor:
    """Run an operation on the local shards of a tensor, in a traced step.

    Args:
        function: A single operation. It keeps sharded dims.
        tensor: The tensor. It is brought to the layout `axes` first.
        axes: The layout.
        result: The layout of the result.
        mesh: The mesh.
    """
    shards = parted(transfer.relayout(tensor, axes, mesh), axes, mesh)
    with scope():
        made = function(shards)
    return transfer.relayout(made, result, mesh)


def to_local(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the local shard of a tensor in layout `axes`, in the local shape."""
    sizes = axis_sizes(mesh)
    local = parted(tensor, axes, mesh)
    # The slice covers the local shard, so nothing is copied: what a product takes waits for the backward pass.
    shards = [1 if axis is None else sizes[axis] for axis in axes]
    local = local[tuple(slice(None if n == 1 else size // n) for size, n in zip(tensor.shape, shards, strict=True))]
    return transfer.relayout(local, (None,) * local.shape.rank, mesh)


def local_shard(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Lay a tensor out in layout `axes`, and return its local shard."""
    tensor = transfer.relayout(tensor, axes, mesh)
    if not any(axes):
        return tensor
    with scope():
        return to_local(tensor, axes, mesh)


def local_rows(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a copy of the local rows of a tensor that the data axis shards, for operations in `scope`."""
    sizes = axis_sizes(mesh)
    count = tensor.shape[0] // sizes.data_size
    shards = parted(tensor, (sizes.data, *(None,) * (tensor.shape.rank - 1)), mesh)
    return tf.gather(shards, np.arange(count, dtype="int32"))


def from_local(
    tensor: tf.Tensor,
    axes: Axes,
    mesh: dtensor.Mesh,
    every: Callable[[int, str, dtensor.Mesh], tf.Tensor] | None = None,
) -> tf.Tensor:
    """Return the global tensor in layout `axes` of which each device has a local shard.

    Args:
        tensor: The local shard.
        axes: The layout.
        mesh: The mesh.
        every: Returns the indices that `every_index` makes. A caller may keep them for further calls in the same graph.
    """
    every = every or every_index
    with scope():
        made = transfer.relayout(tensor, (None,) * tensor.shape.rank, mesh)
        for dim, axis in enumerate(axes):
            if axis is not None:
                made = tf.gather(made, every(tensor.shape[dim], axis, mesh), axis=dim)
    return transfer.relayout(made, axes, mesh)


def every_index(size: int, axis: str, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the indices 0 to `size` - 1 on each device, in a parted layout: as many as the global dim has in all."""
    with scope():
        indices = tf.constant(np.tile(np.arange(size, dtype="int32"), axis_sizes(mesh)[axis]))
        return parted(transfer.relayout(indices, (axis,), mesh), (axis,), mesh)


def with_gradient(
    forward: Callable[[tf.Tensor, dtensor.Mesh], tf.Tensor],
    backward: Callable[[tf.Tensor, dtensor.Mesh], tf.Tensor],
    tensor: tf.Tensor,
    mesh: dtensor.Mesh,
) -> tf.Tensor:
    """Return `forward(tensor, mesh)`, whose gradient is `backward(upstream, mesh)`."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return forward(tensor, mesh)

    def apply(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return forward(tensor, mesh), lambda upstream: backward(upstream, mesh)

    return tf.custom_gradient(apply)(tensor)
