"""Collectives of some devices of the data axis: of those of one replica.

DTensor has collectives over whole axes of a mesh only, and shards a dim over one axis only. So a batch that is sharded
over all devices and variables that are gathered among those of a host are not to be had of its layouts. Here each
device does TensorFlow's own collective on what it has, with the devices of a group of ours: on a tensor in a "parted"
layout no operation is expanded (SkipExpansionForPartedLayout in TensorFlow 2.21's dtensor/mlir/spmd_expander.cc).

Each operation has an instance key of its own, which is the same on all clients, as they trace the same steps in the
same order. One that is copied needs a new one (`renewed`).
"""

import functools
import itertools
import zlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, expansions, transfer
from tfshard.layouts.axes import MeshAxes, axis_sizes
from tfshard.layouts.variable_layout import Axes

GATHER = "CollectiveGatherV2"

# What is done with a tensor of a layout on a mesh.
Function: TypeAlias = Callable[[tf.Tensor, Axes, dtensor.Mesh], tf.Tensor]

# Which of its inputs is its instance key.
_INSTANCE = 3

# Keys of groups: far from DTensor's own, and others for each arrangement of the devices.
_FIRST_GROUP, _ARRANGEMENTS, _GROUPS = 0x40000000, 1 << 16, 1 << 14
_instances = itertools.count(0x100000)


def gather(stored: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """The rows that the devices of a replica have, on each of them: one all-gather among them.

    Args:
        stored: `(model..., data, columns)`, with a row for each device of the data axis. That of a device is the same
            in each replica.
        axes: The layout: the model axes, the data axis, None.
        mesh: The mesh.

    Returns:
        `(model..., shards, columns)`, whole over the data axis.
    """
    if tf.executing_eagerly():
        return _in_a_function(gather, stored, axes, mesh)
    sizes, columns = axis_sizes(mesh), stored.shape[-1]
    model = axes[:-2]
    _allow()
    row = tf.reshape(_parted(transfer.relayout(stored, axes, mesh), axes, mesh), (-1,))
    with tf.name_scope("all_gather"):
        rows = tf.raw_ops.CollectiveGatherV2(
            input=row,
            group_size=sizes.shards,
            group_key=_own_number(_keys_of_replicas(sizes), mesh),
            instance_key=new_instance(),
            ordering_token=[],
            is_stateless=True,
        )
    # Its shape is not known otherwise. What the types say of the row is that of all devices.
    rows = tf.ensure_shape(rows, (sizes.shards * columns,))
    shape = (*(1 for _ in model), sizes.shards, columns)
    result = transfer.relayout(tf.reshape(rows, shape), (None,) * len(shape), mesh)
    for dim, axis in enumerate(model):
        assert axis is not None
        # Each device has its own there, by so many of which the types have it.
        own = _parted(tf.zeros((sizes[axis],), tf.int32), (axis,), mesh)
        taken = (*model[: dim + 1], *(None for _ in shape[dim + 1 :]))
        result = transfer.relayout(tf.gather(result, own, axis=dim), taken, mesh)
    return result


@functools.cache
def _allow() -> None:
    collectives = (GATHER, "CollectiveAllToAllV2", "CollectiveReduceV2")
    expansions.allow_local(*collectives, "EnsureShape")
    _private.run_when_used(collectives)


def meet(mesh: dtensor.Mesh) -> None:
    """Makes the devices of each group meet once, as `transfer.meet` does with those of DTensor's. Eager only."""
    sizes = axis_sizes(mesh)
    if sizes.replicas == 1 or mesh.to_string() in _met:
        return
    shape = [*(sizes[axis] for axis in sizes.tensor), sizes.data_size, 1]
    axes = (*sizes.tensor, sizes.data, None)
    stored = transfer.host_to_mesh(np.zeros(shape, np.float32), axes, mesh)
    with clients.here().operation("the first meeting of the devices of a replica", first=True):
        gather(stored, axes, mesh)
        if not sizes.shards_by_several:
            zero = transfer.host_to_mesh(np.zeros(1, np.float32), (None,), mesh)
            _in_a_function(_all_reduce, zero, (None,), mesh)
    _met.add(mesh.to_string())


_met: set[str] = set()


def _all_reduce(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    del axes
    return all_reduce(tensor, mesh)


def _in_a_function(function: Function, tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    result: tf.Tensor = _traced(function, tuple(tensor.shape), tensor.dtype, axes, mesh)(tensor)
    return result


@functools.cache
def _traced(
    function: Function, shape: tuple[int, ...], dtype: tf.DType, axes: Axes, mesh: dtensor.Mesh
) -> tf.types.experimental.ConcreteFunction:
    """A concrete function, which is one also where Keras runs functions eagerly."""
    traced = tf.function(lambda tensor: function(tensor, axes, mesh), autograph=False)
    return traced.get_concrete_function(tf.TensorSpec(shape, dtype))


def spread(rows: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """A row for each device of the data axis, out of those of one replica. Each device takes its own, as a copy.

    Args:
        rows: `(model..., shards, columns)`, whole over the data axis.
        axes: The layout of the result.
        mesh: The mesh.

    Returns:
        `(model..., data, columns)`.
    """
    sizes = axis_sizes(mesh)
    whole = (*axes[:-2], None, None)
    if tf.executing_eagerly():
        return _in_a_function(spread, rows, axes, mesh)
    numbers = tf.constant(np.tile(np.arange(sizes.shards, dtype="int32"), sizes.replicas))
    own = transfer.relayout(numbers, (axes[-2],), mesh)
    return transfer.relayout(tf.gather(transfer.relayout(rows, whole, mesh), own, axis=len(axes) - 2), axes, mesh)


def all_reduce(own: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """The sum, over all devices of the data axis, of what each device has, on each of them.

    In each replica every device adds up a piece; the pieces are added up between replicas, and gathered again. So each
    device sends its piece to other replicas, and not the whole.

    Args:
        own: What a device has, in a step that is traced. DTensor believes it to be the same on all.
        mesh: A mesh of a data axis only.
    """
    sizes, count = axis_sizes(mesh), own.shape.num_elements()
    columns = -(-count // sizes.shards)
    _allow()
    with tf.name_scope("all_reduce"):
        line = tf.pad(tf.reshape(own, (-1,)), [[0, sizes.shards * columns - count]])
        inside = {"group_size": sizes.shards, "group_key": _own_number(_keys_of_replicas(sizes), mesh)}
        between = {"group_size": sizes.replicas, "group_key": _own_number(_keys_between_replicas(sizes), mesh)}
        common = {"ordering_token": [], "is_stateless": True}
        pieces = tf.reshape(line, (sizes.shards, columns))
        if sizes.shards > 1:
            pieces = tf.raw_ops.CollectiveAllToAllV2(input=pieces, instance_key=new_instance(), **inside, **common)
        piece = tf.raw_ops.CollectiveReduceV2(
            input=tf.reduce_sum(pieces, 0),
            merge_op="Add",
            final_op="Id",
            instance_key=new_instance(),
            **between,
            **common,
        )
        if sizes.shards > 1:
            piece = tf.raw_ops.CollectiveGatherV2(input=piece, instance_key=new_instance(), **inside, **common)
        line = tf.ensure_shape(piece, (sizes.shards * columns,))
        return transfer.relayout(tf.reshape(line[:count], own.shape), (None,) * own.shape.rank, mesh)


def _parted(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """A tensor of which every device does what follows with what it has."""
    return dtensor.relayout(tensor, transfer.layout(axes, mesh).to_parted())


def new_instance() -> int:
    """An instance key that no collective has."""
    return next(_instances)


def renewed(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """The inputs of a copy of a gather."""
    return [*inputs[:_INSTANCE], tf.constant(new_instance()), *inputs[_INSTANCE + 1 :]]


def _keys_of_replicas(sizes: MeshAxes) -> np.ndarray:
    """The key, by location, of the group of those devices of a replica that have the same model shards."""
    return _keys(sizes, lambda index: index // sizes.shards, sizes.replicas, "in a replica")


def _keys_between_replicas(sizes: MeshAxes) -> np.ndarray:
    """The key, by location, of the group of the devices that have the same place in each replica."""
    return _keys(sizes, lambda index: index % sizes.shards, sizes.shards, "between replicas")


def _keys(sizes: MeshAxes, part: Callable[[np.ndarray], np.ndarray], parts: int, what: str) -> np.ndarray:
    """A key for each part of the data axis, and for each location on the others.

    Args:
        sizes: The mesh.
        part: The part of an index on the data axis.
        parts: How many there are.
        what: What tells these groups from others.
    """
    at = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    assert sizes.data is not None
    at[sizes.data] = part(at[sizes.data])
    counts = [parts if axis == sizes.data else size for axis, size in sizes.items()]
    arrangement = zlib.crc32(f"{what} {sizes!r}".encode()) % _ARRANGEMENTS
    keys: np.ndarray = _FIRST_GROUP + arrangement * _GROUPS + np.ravel_multi_index([at[axis] for axis in sizes], counts)
    return keys.astype("int32")


def _own_number(numbers: np.ndarray, mesh: dtensor.Mesh) -> tf.Tensor:
    """Of numbers with a dim for each axis of the mesh, each device's own: a scalar."""
    own = _parted(tf.constant(numbers), tuple(axis_sizes(mesh)), mesh)
    return tf.reshape(tf.gather(tf.reshape(own, (-1,)), (0,)), ())
