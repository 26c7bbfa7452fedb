"""Collectives over the data axis (all devices, or one replica), and gathers over other axes.

DTensor's collectives span full mesh axes, and DTensor shards a dim over one axis only. Its layouts cannot express a
batch that is sharded over all devices together with variables that are gathered within a host. On meshes with several
axes, DTensor gathers by reductions (gathers.py). In this module, each device runs TensorFlow's collectives on its local
shard, in groups that tfshard defines. DTensor expands no operation on a tensor in a "parted" layout
(SkipExpansionForPartedLayout in TensorFlow 2.21's dtensor/mlir/spmd_expander.cc).

Each collective has a unique instance key. All clients trace the same steps in the same order, so the keys are equal on
all clients. A copied operation needs a new key (`renewed`).
"""

import functools
import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import block_codes, clients, device_order, expansions, local_shards, messages, transfer
from tfshard.errors import MeshError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes

GATHER = "CollectiveGatherV2"

# A function of a tensor, its layout and its mesh.
Function: TypeAlias = Callable[[tf.Tensor, Axes, dtensor.Mesh], tf.Tensor]

# The attribute that marks the operations of a gather in codes: encoding, collective and decoding.
CODED = "_tfshard_coded_gather"

# The dtypes that `gather` supports. It sends bfloat16 as float16.
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)

# The index of the gather's input that holds the instance key.
_INSTANCE = 3

# Group keys, up to twice this number: far from DTensor's keys and from those of messages.
_FIRST_GROUP = 0x40000000
_instances = itertools.count(0x100000)


def gathered(tensor: tf.Tensor, axes: Axes, target: Axes, mesh: dtensor.Mesh, codes: str | None = None) -> tf.Tensor:
    """Change a tensor's layout from `axes` to `target`. Uses `gather` where DTensor would gather by a reduction.

    On a mesh with several axes, DTensor gathers by an all-reduce of zero-padded shards (devices/gathers.py), which
    sends twice the bytes and holds the full tensor twice. On all meshes, it gathers bfloat16 by an all-reduce of
    float32.

    Args:
        tensor: The tensor.
        axes: Its layout.
        target: The layout of the result.
        mesh: The mesh.
        codes: As for `gather`. The tensor is then gathered over the data axis, in a step that is being traced.
    """
    sizes = axis_sizes(mesh)
    over = [axis for axis, kept in zip(axes, target, strict=True) if axis is not None and kept is None]
    is_gather = len(over) == 1 and target == tuple(None if axis == over[0] else axis for axis in axes)
    by_reduction = sizes.shards_by_several or tensor.dtype == tf.bfloat16
    if codes is not None:
        assert is_gather and over[0] == sizes.data, (axes, target)
        return gather(tensor, axes, mesh, codes=codes)
    if not (is_gather and sizes[over[0]] > 1 and by_reduction and tensor.dtype in _DTYPES):
        return transfer.relayout(tensor, target, mesh)
    return gather(tensor, axes, mesh, None if over[0] == sizes.data else over[0])


def gather(
    stored: tf.Tensor, axes: Axes, mesh: dtensor.Mesh, over: str | None = None, codes: str | None = None
) -> tf.Tensor:
    """All-gather a tensor's local shards over an axis, by one collective: by default within each replica.

    Args:
        stored: A tensor with a dim that the axis shards. All replicas hold equal shards: with several replicas, a dim
            that the data axis shards has a row for each device.
        axes: The tensor's layout.
        mesh: The mesh.
        over: The axis, if not the data axis.
        codes: The dtype of the codes that each device sends in place of its shard (block_codes.py), only in a step that
            is being traced. By default devices send the elements.

    Returns:
        The tensor in the same layout, but replicated over the axis. With replicas, it has one replica's rows. With
        `codes`, all elements are rounded, also those of the local shard.
    """
    if codes is not None:
        with _private.marked(CODED):
            return _gather_codes(stored, axes, mesh, codes)
    if tf.executing_eagerly():
        return _in_a_function(gather if over is None else _gather_over(over), stored, axes, mesh)
    sizes = axis_sizes(mesh)
    axis = over or sizes.data
    assert axis is not None
    group_size = sizes[over] if over else sizes.shards
    dim = axes.index(axis)
    allow_collectives()
    shard = transfer.shard_shape(tuple(stored.shape), transfer.layout(axes, mesh))
    first = [dim, *(each for each in range(len(shard)) if each != dim)]
    local = local_shards.parted(transfer.relayout(stored, axes, mesh), axes, mesh)
    with tf.name_scope("all_gather"):
        with local_shards.scope():
            line = tf.reshape(tf.transpose(local, first) if dim else local, (-1,))
        # The collective sends two-byte values bit by bit and does not interpret them.
        is_brain = line.dtype == tf.bfloat16
        rows = tf.raw_ops.CollectiveGatherV2(
            input=tf.bitcast(line, tf.float16) if is_brain else line,
            group_size=group_size,
            **_common(_keys_along(mesh, over) if over else _keys_of_replicas(mesh), mesh),
        )
    # The shape is unknown otherwise: in the graph, the local shard's type has the global shape.
    rows = tf.ensure_shape(rows, (group_size * math.prod(shard),))
    rows = tf.bitcast(rows, tf.bfloat16) if is_brain else rows
    return _joined(rows, shard, group_size, axes, axis, mesh)


def _gather_codes(stored: tf.Tensor, axes: Axes, mesh: dtensor.Mesh, codes: str) -> tf.Tensor:
    """All-gather a tensor's local shards within each replica, as codes of one byte."""
    sizes = axis_sizes(mesh)
    axis, group_size = sizes.data, sizes.shards
    assert axis is not None
    allow_collectives()
    shard = transfer.shard_shape(tuple(stored.shape), transfer.layout(axes, mesh))
    dim, elements = axes.index(axis), math.prod(shard)
    with tf.name_scope("all_gather"), local_shards.scope():
        local = local_shards.varying(local_shards.to_local(transfer.relayout(stored, axes, mesh), axes, mesh), mesh)
        first = [dim, *(each for each in range(len(shard)) if each != dim)]
        line = tf.reshape(tf.transpose(local, first) if dim else local, (1, -1))
        words = block_codes.encode(tf.cast(line, tf.float32), codes)
        # Replicated, not parted: a barrier would give the activation beside the codes the same parted layout.
        words = transfer.relayout(words, (None, None), mesh)
        rows = tf.raw_ops.CollectiveGatherV2(
            input=words, group_size=group_size, **_common(_keys_of_replicas(mesh), mesh)
        )
        rows = tf.ensure_shape(rows, (group_size, words.shape[1]))
        rows = tf.cast(block_codes.decode(rows, codes, elements), stored.dtype)
    return _joined(rows, shard, group_size, axes, axis, mesh)


def _joined(
    rows: tf.Tensor, shard: tuple[int, ...], group_size: int, axes: Axes, axis: str, mesh: dtensor.Mesh
) -> tf.Tensor:
    """Join the shards that a device has gathered over an axis.

    Args:
        rows: The shards one after the other, each transposed so that the sharded dim comes first.
        shard: The shape of a shard.
        group_size: The number of shards.
        axes: The layout before the gather.
        axis: The axis.
        mesh: The mesh.
    """
    dim = axes.index(axis)
    first = [dim, *(each for each in range(len(shard)) if each != dim)]
    rows = tf.reshape(rows, [group_size * shard[dim], *(shard[each] for each in first[1:])])
    rows = transfer.relayout(rows, (None,) * len(shard), mesh)
    if dim:
        rows = tf.transpose(rows, [first.index(each) for each in range(len(shard))])
        # Otherwise DTensor assigns the layout of the consumer, into which it cannot transpose.
        rows = transfer.relayout(rows, (None,) * len(shard), mesh)
    left = tuple(None if each == axis else each for each in axes)
    return local_shards.from_local(rows, left, mesh) if any(left) else rows


@functools.cache
def _gather_over(axis: str) -> Function:
    """Return `gather` over an axis, the same function at each call."""
    return functools.partial(gather, over=axis)


@functools.cache
def allow_collectives() -> None:
    """Let each device run TensorFlow's collectives on its local shard."""
    collectives = (GATHER, "CollectiveAllToAllV2", "CollectiveReduceV2")
    expansions.allow_local(*collectives, "EnsureShape")
    _private.run_when_used(collectives)


def meet(mesh: dtensor.Mesh) -> None:
    """Make the devices of each group meet once, as `transfer.meet` does for DTensor's groups. Eager only.

    Args:
        mesh: The mesh.

    Raises:
        MeshError: TensorFlow has the devices of a group in another order than the mesh.
    """
    sizes = axis_sizes(mesh)
    if mesh.to_string() in _met:
        return
    if sizes.shards_by_several:
        for axis in (each for each in sizes.tensor if sizes[each] > 1):
            stored = transfer.host_to_mesh(np.arange(sizes[axis], dtype="float32"), (axis,), mesh)
            with clients.here().operation(f"the first meeting of the devices along '{axis}'", first=True):
                device_order.check(gather(stored, (axis,), mesh, axis), axis, mesh)
    if sizes.data_size == 1:
        _met.add(mesh.to_string())
        return
    assert sizes.data is not None
    shape = [*(sizes[axis] for axis in sizes.tensor), sizes.data_size, 1]
    axes = (*sizes.tensor, sizes.data, None)
    places = np.broadcast_to(np.arange(sizes.data_size, dtype="float32")[:, np.newaxis] % sizes.shards, shape)
    stored = transfer.host_to_mesh(places, axes, mesh)
    with clients.here().operation("the first meeting of the devices of a replica", first=True):
        gathered = gather(stored, axes, mesh)
        device_order.check(gathered, sizes.data, mesh, lambda place: _places(place // sizes.shards, sizes.shards))
        if sizes.replicas > 1:
            zero = transfer.host_to_mesh(np.zeros(1, np.float32), (None,), mesh)
            _in_a_function(_all_reduce, zero, (None,), mesh)
        if sizes.contexts > 1:
            index = np.arange(sizes.data_size, dtype="float32")[:, np.newaxis] % sizes.contexts
            stored = transfer.host_to_mesh(index, (sizes.data, None), mesh)
            found = _in_a_function(_gathered_chunks, stored, (sizes.data, None), mesh)
            size = sizes.contexts
            device_order.check(found, sizes.data, mesh, lambda place: _places(place // size, size))
    _met.add(mesh.to_string())


_met: set[str] = set()


def _gathered_chunks(stored: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Gather the rows of the devices that share sequences, to check their order."""
    local = local_shards.parted(stored, axes, mesh)
    return transfer.relayout(gathered_in_context(local, mesh), (None, None), mesh)


def _places(number: int, count: int) -> slice:
    """Return the slice of a replica's devices on the data axis."""
    return slice(number * count, (number + 1) * count)


def meet_to_exchange(mesh: dtensor.Mesh) -> None:
    """Make the devices that exchange gradients meet once, as `meet` does. Eager only.

    The groups are all devices of the data axis and, with replicas, the devices at each position of the replicas.

    Raises:
        MeshError: TensorFlow has the devices of a group in another order than the mesh.
    """
    sizes, key = axis_sizes(mesh), f"{mesh.to_string()} to exchange"
    if sizes.data_size == 1 or key in _met:
        return
    assert sizes.data is not None
    step = sizes.shards if sizes.replicas > 1 else 1

    def meeting(places: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
        rows = gathered_rows(local_shards.parted(places, axes, mesh), mesh)
        # The group of all devices and the all-to-all group meet too. The places do not change.
        rows += 0.0 * sum_over_devices(exchanged(rows, mesh), mesh)
        return transfer.relayout(rows, (None, None), mesh)

    places = np.arange(sizes.data_size, dtype="float32")[:, np.newaxis] // step
    sharded = transfer.host_to_mesh(places, (sizes.data, None), mesh)
    with clients.here().operation("the first meeting of the devices that exchange gradients", first=True):
        found = _in_a_function(meeting, sharded, (sizes.data, None), mesh)
        device_order.check(found, sizes.data, mesh, lambda place: slice(place % step, None, step))
    _met.add(key)


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
    """Return a concrete function, which runs as a graph even if Keras runs functions eagerly."""
    traced = tf.function(lambda tensor: function(tensor, axes, mesh), autograph=False)
    return traced.get_concrete_function(tf.TensorSpec(shape, dtype))


def spread(rows: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Repeat one replica's rows for all devices of the data axis. Each device copies its row locally.

    Args:
        rows: `(model..., shards, columns)`, replicated over the data axis.
        axes: The layout of the result.
        mesh: The mesh.

    Returns:
        `(model..., data, columns)`.
    """
    sizes = axis_sizes(mesh)
    replicated = (*axes[:-2], None, None)
    if tf.executing_eagerly():
        return _in_a_function(spread, rows, axes, mesh)
    numbers = tf.constant(np.tile(np.arange(sizes.shards, dtype="int32"), sizes.replicas))
    local = transfer.relayout(numbers, (axes[-2],), mesh)
    return transfer.relayout(
        tf.gather(transfer.relayout(rows, replicated, mesh), local, axis=len(axes) - 2), axes, mesh
    )


def all_reduce(local: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """All-reduce local tensors over the devices of the data axis that hold the same model shards.

    This is a reduce-scatter within each replica, an all-reduce between replicas, and an all-gather within each replica.
    Each device sends only its shard to other replicas.

    Args:
        local: The local tensor, in a step that is being traced. DTensor treats it as replicated.
        mesh: The mesh.
    """
    sizes, count = axis_sizes(mesh), local.shape.num_elements()
    with tf.name_scope("all_reduce"), local_shards.scope():
        line = tf.reshape(local, (-1,))
        if sizes.shards > 1:
            line = sum_in_replica(line, mesh)
        line = _all_reduced(line, sizes.replicas, _keys_between_replicas(mesh), mesh)
        if sizes.shards > 1:
            line = gathered_in_replica(line, mesh)
        return transfer.relayout(tf.reshape(line[:count], local.shape), (None,) * local.shape.rank, mesh)


def chain(kind: str, over: str, words: int, count: int, mesh: dtensor.Mesh) -> Callable[[], tf.Tensor]:
    """Build a function that runs a chain of dependent collectives on float32 zeros.

    Args:
        kind: `"all-gather"`, `"all-reduce"` or `"all-to-all"`.
        over: `"inside"`: the devices of each replica. `"between"`: the devices at the same position in each replica.
            `"across"`: all devices.
        words: The number of elements of the full tensor on one device, a multiple of the group size.
        count: The number of collectives.
        mesh: A mesh with a data axis only.
    """
    sizes = axis_sizes(mesh)
    group_size, keys = {
        "inside": (sizes.shards, _keys_of_replicas(mesh)),
        "between": (sizes.replicas, _keys_between_replicas(mesh)),
        "across": (sizes.data_size, _keys(mesh, np.zeros_like, 1)),
    }[over]
    allow_collectives()

    def run(local: tf.Tensor) -> tf.Tensor:
        common = {
            "group_size": group_size,
            "group_key": _local_number(keys, mesh),
            "ordering_token": [],
            "is_stateless": False,
        }
        for _ in range(count):
            keyed = {"instance_key": new_instance(), **common}
            if kind == "all-gather":
                gathered = tf.raw_ops.CollectiveGatherV2(input=local[: words // group_size], **keyed)
                local = tf.ensure_shape(gathered, (words,))
            elif kind == "all-reduce":
                local = tf.raw_ops.CollectiveReduceV2(input=local, merge_op="Add", final_op="Id", **keyed)
            else:
                chunks = tf.reshape(local, (group_size, -1))
                local = tf.reshape(tf.raw_ops.CollectiveAllToAllV2(input=chunks, **keyed), (-1,))
        return transfer.relayout(local, (None,), mesh)

    zeros = transfer.host_to_mesh(np.zeros(words, np.float32), (None,), mesh)
    traced = tf.function(run, autograph=False).get_concrete_function(tf.TensorSpec((words,), tf.float32))
    return lambda: traced(zeros)


def exchanged(rows: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Run an all-to-all between replicas, or between all devices if the mesh has no replicas.

    Args:
        rows: `(devices that exchange, ...)` on each device: a row for each device of the group. In a step that is being
            traced.
        mesh: A mesh with a data axis only.

    Returns:
        A tensor with the shape of `rows`: the row from each device of the group.
    """
    allow_collectives()
    size, key = _between(mesh)
    return tf.raw_ops.CollectiveAllToAllV2(
        input=rows,
        group_size=size,
        **_common(key, mesh),
    )


def gathered_rows(row: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Run an all-gather between replicas, or between all devices if the mesh has no replicas.

    Args:
        row: `(1, ...)` on each device. In a step that is being traced.
        mesh: A mesh with a data axis only.

    Returns:
        `(devices that exchange, ...)`, equal on all devices of the group.
    """
    allow_collectives()
    size, key = _between(mesh)
    rows = tf.raw_ops.CollectiveGatherV2(
        input=row,
        group_size=size,
        **_common(key, mesh),
    )
    return tf.ensure_shape(rows, (size, *row.shape[1:]))


def exchanged_in_context(rows: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Run an all-to-all between the devices that share sequences.

    Args:
        rows: `(contexts, ...)` on each device: a row for each device of the group. In a step that is being traced.
        mesh: A mesh with a context axis.

    Returns:
        A tensor with the shape of `rows`: the row from each device of the group, in the order of their chunks.
    """
    allow_collectives()
    return tf.raw_ops.CollectiveAllToAllV2(
        input=rows,
        group_size=axis_sizes(mesh).contexts,
        **_common(_keys_of_contexts(mesh), mesh),
    )


def gathered_in_context(row: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Run an all-gather between the devices that share sequences.

    Args:
        row: `(1, ...)` on each device. In a step that is being traced.
        mesh: A mesh with a context axis.

    Returns:
        `(contexts, ...)`, in the order of the chunks.
    """
    allow_collectives()
    size = axis_sizes(mesh).contexts
    rows = tf.raw_ops.CollectiveGatherV2(
        input=row,
        group_size=size,
        **_common(_keys_of_contexts(mesh), mesh),
    )
    return tf.ensure_shape(rows, (size, *row.shape[1:]))


def sum_over_devices(local: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Sum local tensors over all devices of the data axis by one all-reduce. Use this for small tensors.

    Args:
        local: The local tensor, in a step that is being traced. DTensor treats it as replicated.
        mesh: A mesh with a data axis only.
    """
    sizes = axis_sizes(mesh)
    return _all_reduced(local, sizes.data_size, _keys_of_all(mesh), mesh)


def _all_reduced(local: tf.Tensor, group_size: int, keys: np.ndarray, mesh: dtensor.Mesh) -> tf.Tensor:
    allow_collectives()
    return tf.raw_ops.CollectiveReduceV2(
        input=local, merge_op="Add", final_op="Id", group_size=group_size, **_common(keys, mesh)
    )


def sum_in_replica(local: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Reduce-scatter a local tensor within its replica, by an all-to-all and a local sum.

    Args:
        local: A 1-D local tensor, in a step that is being traced. DTensor treats it as replicated.
        mesh: The mesh.

    Returns:
        The 1-D local shard of the sum. The replica's devices split the sum equally, and the last shard is zero-padded.
    """
    sizes = axis_sizes(mesh)
    count = local.shape.num_elements()
    columns = -(-count // sizes.shards)
    allow_collectives()
    chunks = tf.reshape(tf.pad(local, [[0, sizes.shards * columns - count]]), (sizes.shards, columns))
    chunks = tf.raw_ops.CollectiveAllToAllV2(
        input=chunks,
        group_size=sizes.shards,
        **_common(_keys_of_replicas(mesh), mesh),
    )
    return tf.reduce_sum(chunks, 0)


def gathered_in_replica(shard: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """All-gather 1-D local shards within each replica."""
    sizes = axis_sizes(mesh)
    allow_collectives()
    line = tf.raw_ops.CollectiveGatherV2(
        input=shard,
        group_size=sizes.shards,
        **_common(_keys_of_replicas(mesh), mesh),
    )
    return tf.ensure_shape(line, (sizes.shards * shard.shape[0],))


def _common(keys: np.ndarray, mesh: dtensor.Mesh) -> dict[str, Any]:
    """Return the common arguments of all collectives for groups with these keys, by location."""
    return {
        "group_key": _local_number(keys, mesh),
        "instance_key": new_instance(),
        "ordering_token": [],
        "is_stateless": False,
    }


def _between(mesh: dtensor.Mesh) -> tuple[int, np.ndarray]:
    """Return the size of the group that exchanges gradients, and its keys by location."""
    sizes = axis_sizes(mesh)
    if sizes.replicas > 1:
        return sizes.replicas, _keys_between_replicas(mesh)
    return sizes.data_size, _keys_of_all(mesh)


def new_instance() -> int:
    """Return an unused instance key."""
    return next(_instances)


def new_instances(count: int) -> int:
    """Return the first of `count` consecutive unused instance keys."""
    return [next(_instances) for _ in range(count)][0]


def group_key(mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the group key of the data axis's devices with the same model shards. Only for meshes without replicas."""
    sizes = axis_sizes(mesh)
    assert sizes.replicas == 1, "With replicas there is a group for each."
    allow_collectives()
    return _local_number(_keys_of_replicas(mesh), mesh)


def renewed(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the inputs for a copy of a gather, with a new instance key."""
    return [*inputs[:_INSTANCE], tf.constant(new_instance()), *inputs[_INSTANCE + 1 :]]


def _keys_of_replicas(mesh: dtensor.Mesh) -> np.ndarray:
    """Return the group keys, by location, for the devices of a replica that hold the same model shards."""
    sizes = axis_sizes(mesh)
    return _keys(mesh, lambda index: index // sizes.shards, sizes.replicas)


def _keys_between_replicas(mesh: dtensor.Mesh) -> np.ndarray:
    """Return the group keys, by location, for the devices at the same position in each replica."""
    sizes = axis_sizes(mesh)
    return _keys(mesh, lambda index: index % sizes.shards, sizes.shards)


def _keys_of_contexts(mesh: dtensor.Mesh) -> np.ndarray:
    """Return the group keys, by location, for the devices that share sequences and hold the same model shards."""
    sizes = axis_sizes(mesh)
    return _keys(mesh, lambda index: index // sizes.contexts, sizes.sample_shards)


def _keys_of_all(mesh: dtensor.Mesh) -> np.ndarray:
    """Return the group keys, by location, for the devices of the data axis that hold the same model shards."""
    return _keys(mesh, lambda index: 0 * index, 1)


def _keys_along(mesh: dtensor.Mesh, axis: str) -> np.ndarray:
    """Return the group keys, by location, for the devices that differ only in their place on an axis."""
    return _keys(mesh, lambda index: 0 * index, 1, axis)


def _keys(
    mesh: dtensor.Mesh, part: Callable[[np.ndarray], np.ndarray], parts: int, axis: str | None = None
) -> np.ndarray:
    """Return a key for each part of an axis and each location on the other axes.

    Args:
        mesh: The mesh.
        part: Maps an index on the axis to its part.
        parts: The number of parts.
        axis: The axis. By default the data axis.

    Raises:
        MeshError: The group of other devices has a key already.
    """
    sizes = axis_sizes(mesh)
    axis = axis or sizes.data
    at = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    assert axis is not None
    at[axis] = part(at[axis])
    counts = [parts if each == axis else size for each, size in sizes.items()]
    groups = np.ravel_multi_index([at[each] for each in sizes], counts)
    # The locations of each group in a row, in mesh order.
    rows = np.argsort(groups, axis=None, kind="stable").reshape(math.prod(counts), -1)
    devices = np.array(messages.devices_of(mesh), dtype=object)
    keys = np.empty(groups.size, "int32")
    for row in rows:
        keys[row] = _key(tuple(devices[row]))
    shaped: np.ndarray = keys.reshape(groups.shape)
    return shaped


@functools.cache
def _key(devices: tuple[str, ...]) -> int:
    """Return the group key of devices, the same on all clients. TensorFlow knows a group by its key alone."""
    key = _FIRST_GROUP + zlib.crc32(" ".join(devices).encode()) % _FIRST_GROUP
    others = _groups.setdefault(key, devices)
    if others != devices:
        raise MeshError(
            f"Two groups of devices have the same key, {key:#x}. Use one of their meshes in this process, or create a "
            f"mesh with its devices in another order. Received: {', '.join(devices)}; before: {', '.join(others)}"
        )
    return key


# The devices of each key.
_groups: dict[int, tuple[str, ...]] = {}


def _local_number(numbers: np.ndarray, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return each device's number as a scalar, from numbers with a dim for each axis of the mesh."""
    with local_shards.scope():
        local = local_shards.parted(tf.constant(numbers), tuple(axis_sizes(mesh)), mesh)
        # A slice, not a lookup: GPUs slice int32 on the host, where a collective reads its keys.
        return tf.reshape(tf.slice(tf.reshape(local, (-1,)), (0,), (1,)), ())
