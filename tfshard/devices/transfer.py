"""Tensors to devices and back: the few DTensor calls that everything above shares."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import clients, device_order, gathers, host_memory, messages
from tfshard.devices.words import from_words, to_words
from tfshard.layouts import boxes
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes

_met: set[str] = set()


def meet(mesh: dtensor.Mesh) -> None:
    """Let the devices of a mesh meet once, in each group of devices that a collective can take. Eager only.

    TensorFlow forms a group at its first collective. If an operation fails on one device before that, the group stays
    cancelled for as long as the process lives: every later step fails, and with another error. The devices therefore
    gather their places along each axis. DTensor gathers over one axis only; over several it reduces.

    Raises:
        MeshError: TensorFlow has the devices of a group in another order than the mesh.
    """
    if mesh.to_string() in _met:
        return
    sizes = axis_sizes(mesh)
    axes = [name for name, size in sizes.items() if size > 1]
    groups = [group for count in range(1, len(axes) + 1) for group in itertools.combinations(axes, count)]
    tensors = [host_to_mesh(np.zeros([sizes[axis] for axis in group], np.float32), group, mesh) for group in groups]
    places = [host_to_mesh(np.arange(sizes[axis], dtype=np.float32), (axis,), mesh) for axis in axes]

    def meeting(tensors: list[tf.Tensor], places: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        reduced = [relayout(tf.reduce_sum(tensor), (), mesh) for tensor in tensors]
        return reduced, [relayout(each, (None,), mesh) for each in places]

    if groups:
        with clients.here().operation("the first meeting of the devices of a mesh", first=True):
            with gathers.one_axis_at_once():
                specs = tf.nest.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), [tensors, places])
                # A concrete function: TensorFlow warns of retracing if many meshes call functions of the same name.
                traced = tf.function(meeting, autograph=False).get_concrete_function(*specs)
                _, gathered = traced(tensors, places)
            for axis, each in zip(axes, gathered, strict=True):
                device_order.check(each, axis, mesh)
    _met.add(mesh.to_string())


def layout(axes: Axes, mesh: dtensor.Mesh) -> dtensor.Layout:
    """Return a DTensor layout from the mesh axis, or None, of each dim."""
    return dtensor.Layout([dtensor.UNSHARDED if axis is None else axis for axis in axes], mesh)


def axes_of(layout: dtensor.Layout) -> Axes:
    """Return the mesh axis, or None, of each dim of a DTensor layout. Inverts `layout`."""
    return tuple(None if axis == dtensor.UNSHARDED else axis for axis in layout.sharding_specs)


def shard_shape(shape: tuple[int, ...], layout: dtensor.Layout) -> tuple[int, ...]:
    """Return the shape of a local shard."""
    sizes = axis_sizes(layout.mesh)
    return boxes.shard_box(shape, axes_of(layout), sizes, dict.fromkeys(sizes, 0)).shape


def relayout(tensor: tf.Tensor | tf.IndexedSlices, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Bring a DTensor to the layout `axes`, with the communication that it takes."""
    return dtensor.relayout(tensor, layout(axes, mesh))


def replicate(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Replicate a tensor of a step: pin it in a graph, move it in eager code."""
    return _in_turn(tensor, (None,) * tensor.shape.rank, mesh)


def by_sample(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Shard a tensor of a step over the batch axis in its first dim. If the axis does not divide the dim, replicate the
    tensor."""
    axes = axis_sizes(mesh)
    size = tensor.shape[0] if tensor.shape.rank else None
    axis = axes.data if axes.data_size > 1 and size is not None and size % axes.data_size == 0 else None
    return _in_turn(tensor, tuple(None if dim else axis for dim in range(tensor.shape.rank)), mesh)


def _in_turn(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """`relayout` to a layout without other axes than one for the first dim.

    With CollectiveGatherV2, a gather over two axes at once is refused, so all dims but the first come first. Two of
    them that are sharded, and not the first, stay an error in a graph, which does not know its tensors' layouts.
    """
    if tf.executing_eagerly():
        if not is_dtensor(tensor):
            return tensor
        specs = list(dtensor.fetch_layout(tensor).sharding_specs)
        for dim in range(1, len(specs)):
            if specs[dim] != dtensor.UNSHARDED:
                specs[dim] = dtensor.UNSHARDED
                tensor = dtensor.relayout(tensor, dtensor.Layout(specs, mesh))
    elif tensor.shape.rank > 1 and axis_sizes(mesh).shards_by_several:
        specs = [dtensor.MATCH] + [dtensor.UNSHARDED] * (tensor.shape.rank - 1)
        tensor = dtensor.relayout(tensor, dtensor.Layout(specs, mesh))
    return relayout(tensor, axes, mesh)


def scatter(tensor: tf.Tensor | tf.IndexedSlices, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """`relayout` to fewer elements a device, in newly allocated memory.

    On CPU a shard along the first dim is a view of the full tensor. In-place arithmetic passes the view on to its
    results: a parameter of one quarter would keep four quarters alive until the next step.
    """
    tensor = relayout(tensor, axes, mesh)
    if mesh.device_type().upper() != "CPU" or not axes or axes[0] is None:
        return tensor
    dim = next((dim for dim, axis in enumerate(axes) if dim > 0 and axis is None and tensor.shape[dim] > 1), None)
    if dim is not None:
        return _copied(tensor, dim, axes, mesh)
    sizes = axis_sizes(mesh)
    if axes[0] != sizes.data:
        return tensor  # Cut along a later dim, as a row kernel: no view.
    # Every dim is sharded, as in a column kernel. Split the last dim with several local elements in two: the axis that
    # shards it, and the local elements.
    shares = [1 if axis is None else sizes[axis] for axis in axes]
    dim = next((d for d in reversed(range(len(axes))) if tensor.shape[d] > shares[d]), None)
    if dim is None:
        return tensor
    shape = [*tensor.shape[:dim], shares[dim], tensor.shape[dim] // shares[dim], *tensor.shape[dim + 1 :]]
    split = (*axes[: dim + 1], None, *axes[dim + 1 :])
    copied = _copied(relayout(tf.reshape(tensor, shape), split, mesh), dim + 1, split, mesh)
    return relayout(tf.reshape(copied, tensor.shape), axes, mesh)


def _copied(tensor: tf.Tensor, dim: int, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Copy a tensor in the layout `axes` to new memory. `dim` has several elements and is not sharded."""
    # Concat is the only operation that DTensor expands and that never works in place. The halves do not come from a
    # split: in a step, the rule for splits (`operations.dims`) would replicate the dim.
    half = tensor.shape[dim] // 2
    begins, counts = (0, half), (half, tensor.shape[dim] - half)
    halves = [
        tf.slice(
            tensor,
            [begin if each == dim else 0 for each in range(tensor.shape.rank)],
            [count if each == dim else size for each, size in enumerate(tensor.shape)],
        )
        for begin, count in zip(begins, counts, strict=True)
    ]
    return relayout(tf.concat([relayout(part, axes, mesh) for part in halves], axis=dim), axes, mesh)


def host_to_mesh(value: np.ndarray, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Put a host value on the mesh. Each device receives only its local shard."""
    sizes = axis_sizes(mesh)
    parts = [boxes.shard_box(value.shape, axes, sizes, location) for location in mesh.local_device_locations()]
    shards = [tf.constant(value[part.slices]) for part in parts]
    return messages.packed(shards, value.shape, tf.as_dtype(value.dtype), layout(axes, mesh))


def host_shards(value: np.ndarray, axes: Axes, mesh: dtensor.Mesh) -> Iterator[tf.Tensor]:
    """Yield the shards of a host value for a variable, in the order of this client's devices, made one by one.

    TensorFlow allocates their memory. Its allocator on CPU keeps freed memory: shards in NumPy's memory would leave the
    memory of the shards that they replace unused. Each shard goes to its device before the next is made.
    """
    sizes = axis_sizes(mesh)
    on_host = mesh.device_type().upper() == "CPU"
    for location, device in zip(mesh.local_device_locations(), mesh.local_devices(), strict=True):
        shard = host_memory.tensor_of(value[boxes.shard_box(value.shape, axes, sizes, location).slices])
        if not on_host:
            with tf.device(device):
                shard = tf.identity(shard)
        yield shard


def zeros(shape: tuple[int, ...], dtype: tf.DType, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return zeros on the mesh, in eager code and in a graph."""
    if tf.executing_eagerly():
        return host_to_mesh(np.zeros(shape, dtype.as_numpy_dtype), axes, mesh)
    return relayout(tf.zeros(shape, dtype), axes, mesh)


def mesh_to_host(tensor: tf.Tensor) -> np.ndarray:
    """Return the full value of an eager DTensor, joined on the host from the devices' shards.

    If clients of a launched run hold different shards, or none, they exchange them: all clients have to call this.
    """
    found = dtensor.fetch_layout(tensor)
    value = _put_together(tensor, found)
    if messages.is_everywhere(found.mesh):
        assert value is not None
        return value
    return messages.from_first(value, tensor.shape, tensor.dtype, found.mesh)


def _put_together(tensor: tf.Tensor, found: dtensor.Layout) -> np.ndarray | None:
    """Join the full value from the shards of the clients with devices of its mesh. Returns None on other clients."""
    mesh, sizes = found.mesh, axis_sizes(found.mesh)
    local = [np.asarray(shard) for shard in messages.unpacked(tensor)]
    if found.is_fully_replicated():
        return local[0] if local else None
    specs = axes_of(found)
    used = tuple(axis for axis in mesh.dim_names if axis in specs)
    shards = {}
    for shard, location in zip(local, mesh.local_device_locations(), strict=True):
        shards[boxes.part(used, location)] = shard
    if not _is_with_each(used, mesh):
        like = np.empty(shard_shape(tuple(tensor.shape), found), tensor.dtype.as_numpy_dtype)
        shards = _exchange(shards, used, mesh, like)
    if not local:
        return None
    full = np.empty(tuple(tensor.shape), local[0].dtype)
    for part, shard in shards.items():
        box = boxes.shard_box(full.shape, specs, sizes, dict(zip(used, part, strict=True)))
        full[box.slices] = shard
    return full


def is_local(axes: Sequence[str], mesh: dtensor.Mesh) -> bool:
    """Return whether every client holds all shards of a tensor that `axes` shard. The result is the same on all
    clients."""
    return messages.is_everywhere(mesh) and _is_with_each(axes, mesh)


def _is_with_each(axes: Sequence[str], mesh: dtensor.Mesh) -> bool:
    """Return whether every client with devices of a mesh holds all shards of a tensor that `axes` shard."""
    if len(messages.clients_of(mesh)) == 1:
        return True
    names = mesh.global_devices()
    held: dict[int, set[tuple[int, ...]]] = {}
    for device, location in mesh.unravel_index().items():
        client = messages.client_of(names[device]) if names else device // mesh.num_local_devices()
        held.setdefault(client, set()).add(boxes.part(axes, location))
    count = math.prod(axis_sizes(mesh)[axis] for axis in axes)
    return all(len(parts) == count for parts in held.values())


def _exchange(
    shards: Mapping[tuple[int, ...], np.ndarray], used: tuple[str, ...], mesh: dtensor.Mesh, like: np.ndarray
) -> dict[tuple[int, ...], np.ndarray]:
    """Return all shards of a tensor, by place on the `used` axes, from the local shards.

    Shards are sent as words of 32 bits: all-gathers take few dtypes, and every bit arrives.

    Args:
        shards: The local shards. Empty on a client without devices of the mesh, which also takes part.
        used: The axes.
        mesh: The mesh.
        like: An array of a shard's shape and dtype.
    """
    rows = []
    for location in mesh.local_device_locations():
        shard = shards[boxes.part(used, location)]
        rows.append(to_words(shard).reshape(*(1 for _ in used), -1))
    axes: Axes = (*used, None)
    row = to_words(like)
    with clients.here().operation(f"the exchange of {row.nbytes} bytes for each device", first=True):
        shape = (*(axis_sizes(mesh)[axis] for axis in used), row.size)
        gathered = messages.packed([tf.constant(row) for row in rows], shape, tf.int32, layout(axes, mesh))
        # Gather one axis after the other: an eager relayout over two axes at once can fail.
        with gathers.one_axis_at_once():
            for i in reversed(range(len(used))):
                axes = tuple(None if dim == i else axis for dim, axis in enumerate(axes))
                gathered = relayout(gathered, axes, mesh)
        received = messages.unpacked(gathered)
    if not received:
        return {}
    words = np.asarray(received[0])
    return {part: from_words(words[part], like.shape, like.dtype) for part in np.ndindex(words.shape[:-1])}


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is an eager tensor that lives on a mesh."""
    return isinstance(value, tf.__internal__.EagerTensor) and dtensor.is_dtensor(value)


def to_host(value: Any) -> np.ndarray:
    """Return a NumPy value of a DTensor, a tensor, a variable or a number."""
    if is_dtensor(value):
        return mesh_to_host(value)
    numpy = getattr(value, "numpy", None)
    return np.asarray(numpy() if callable(numpy) else value)


def eager_on_host(value: Any) -> Any:
    """Return an eager tensor of the host for one on a mesh; anything else, and variables, as they are."""
    return tf.constant(to_host(value)) if is_dtensor(value) else value


def host_view(value: Any) -> np.ndarray:
    """`to_host` without a copy if possible. Do not write to the array or keep it: it keeps the tensor's memory."""
    if not isinstance(value, tf.__internal__.EagerTensor) or is_dtensor(value):
        return to_host(value)
    return host_memory.view(value)


def map_tensors(fn: Callable[[tf.Tensor], Any], structure: Any) -> Any:
    """Map `fn` over the tensors of a structure. Other leaves stay unchanged."""
    return tf.nest.map_structure(lambda leaf: fn(leaf) if tf.is_tensor(leaf) else leaf, structure)


def local_bytes(tensor: tf.Tensor) -> Mapping[str, int]:
    """Return the bytes that each device of this process holds of an eager DTensor, by device name."""
    return {shard.device: int(np.asarray(shard).nbytes) for shard in messages.unpacked(tensor)}
