"""Put batches from the host on the mesh, in two parts.

`stage_batch` cuts the local shards of a batch, and may copy them to their devices. Any thread may call it.
`StagedBatch.on_mesh` makes DTensors of the shards, in the thread that runs the step.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import checksums, clients, host_memory, messages, transfer
from tfshard.devices.mesh_tensors import MeshTensor
from tfshard.errors import StrategyError
from tfshard.layouts import boxes, variable_layout
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.sequence_chunks import SequenceChunks
from tfshard.layouts.variable_layout import Axes


def batch_axes(shape: tuple[int, ...], mesh: dtensor.Mesh) -> Axes:
    """Return the layout of a batch: sharded over the batch axis if the axis divides the first dim, else replicated.

    Every device computes a replicated batch in full. Results, including batch statistics and custom losses, match a
    single device without padding or masks. No sample is dropped or counted twice.
    """
    axes = axis_sizes(mesh)
    if not shape or shape[0] == 0 or shape[0] % axes.data_size:
        return (None,) * len(shape)
    return (axes.data, *(None,) * (len(shape) - 1))


def shares_samples(shape: tuple[int, ...], mesh: dtensor.Mesh) -> bool:
    """Return whether the devices of the batch axis split the samples of a tensor that is on the host.

    Otherwise every device has all samples. The shape is that of full sequences, also with a context axis.
    """
    return bool(shape and shape[0]) and shape[0] % axis_sizes(mesh).sample_shards == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A batch split into equal microbatches. A microbatch takes rows from every device, so no row moves between
    devices.

    Attributes:
        count: The number of microbatches.
        rows: The rows of a microbatch over all devices.
        mesh: The mesh.
    """

    count: int
    rows: int
    mesh: dtensor.Mesh

    @classmethod
    def of(cls, batch: Any, count: int, mesh: dtensor.Mesh) -> "Parts":
        """Plan the microbatches of a batch with static shapes.

        Args:
            batch: A (nested) batch in a step that is being traced.
            count: The number of microbatches. If it does not divide the rows of a device, there are more microbatches,
                so that none is larger than requested. A batch without rows has one.
            mesh: The mesh.

        Raises:
            StrategyError: The tensors have different numbers of rows.
        """
        shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf) and leaf.shape.rank]
        if not shapes:
            return cls(count=1, rows=0, mesh=mesh)
        sizes = {shape[0] for shape in shapes}
        if len(sizes) > 1 or None in sizes:
            raise StrategyError(
                "A step can be split into microbatches only if all its input tensors have the same number of rows, "
                "or no rows. Let the step function capture other tensors from outside, or set strategy.microbatches "
                f"= 1. Received: tensors of shapes {shapes}"
            )
        (size,) = sizes
        axes = axis_sizes(mesh)
        devices = axes.data_size if any(batch_axes(shapes[0], mesh)) else 1
        if axes.contexts > 1 and axes.data_size > 1 and devices == 1:
            raise StrategyError(
                f"Microbatches on a mesh with a context axis need a batch size that is divisible by the "
                f"{axes.sample_shards} devices of axis '{axes.data}': a microbatch has all chunks of its sequences. "
                f"Change the batch size, or set strategy.microbatches = 1. Received: a batch of "
                f"{size // axes.contexts} samples"
            )
        found = variable_layout.divisor_from(size // devices, count)
        return cls(count=found, rows=size // found, mesh=mesh)

    def split(self, leaf: Any) -> Any:
        """Reshape a tensor `(count * rows, ...)` to `(devices, count, rows / devices, ...)`, the input of `part`."""
        if not self.has_rows(leaf):
            return leaf
        shape, axes = tuple(leaf.shape), batch_axes(tuple(leaf.shape), self.mesh)
        devices = axis_sizes(self.mesh).data_size if axes[0] is not None else 1
        leaf = transfer.relayout(leaf, axes, self.mesh)
        leaf = tf.reshape(leaf, (devices, self.count, self.rows // devices, *shape[1:]))
        return transfer.relayout(leaf, (axes[0], *(None,) * (leaf.shape.rank - 1)), self.mesh)

    def part(self, leaf: Any, split: Any, number: tf.Tensor) -> Any:
        """Return the microbatch `(rows, ...)` with this number, from 0.

        Args:
            leaf: A tensor of the batch.
            split: The result of `split` for `leaf`.
            number: A scalar.
        """
        if not self.has_rows(leaf):
            return leaf
        axis = batch_axes(tuple(leaf.shape), self.mesh)[0]
        rows = tf.gather(split, number, axis=1)
        rows = transfer.relayout(rows, (axis, *(None,) * (rows.shape.rank - 1)), self.mesh)
        rows = tf.reshape(rows, (self.rows, *leaf.shape[1:]))
        return transfer.relayout(rows, (axis, *(None,) * (rows.shape.rank - 1)), self.mesh)

    @staticmethod
    def has_rows(leaf: Any) -> bool:
        """Return whether a leaf of a batch is split into microbatches."""
        return bool(tf.is_tensor(leaf) and leaf.shape.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputShard:
    """The part of each batch that a client of a launched run feeds, with `ShardedStrategy(already_sharded=True)`.

    Clients that differ only in model axes feed the same part. A process that was not launched feeds the full batch.

    Attributes:
        index: The number of the part, from 0, in sample order.
        count: The number of parts: `dataset.shard(count, index)`.
    """

    index: int
    count: int

    @classmethod
    def of(cls, mesh: dtensor.Mesh) -> "InputShard":
        """Return the part of this client.

        Raises:
            StrategyError: The clients' parts overlap.
        """
        axes = axis_sizes(mesh)
        places = [0 if axes.data is None else location[axes.data] for location in mesh.local_device_locations()]
        size = axes.data_size
        first, held = min(places), len(set(places))
        if size % held or first % held or max(places) - first + 1 != held:
            raise StrategyError(
                "Already sharded input needs a mesh in which each client holds a separate, equally large part of "
                f"the batch axis. Change the order or the sizes of the axes. Received: mesh={axes}"
            )
        return cls(index=first // held, count=size // held)


# Tensors of this many bytes are cut without a copy, and arrays go to TensorFlow's memory with one copy.
_LARGE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedTensor:
    """A tensor on its way to the mesh: its local shards exist, but not the DTensor.

    Attributes:
        shards: The local shards, in device order.
        shape: The shape of the full tensor.
        dtype: The dtype.
        layout: The layout on the mesh.
        checksum: A checksum of the full value, or None if no other client compares the value.
    """

    shards: Sequence[tf.Tensor]
    shape: tuple[int, ...]
    dtype: tf.DType
    layout: dtensor.Layout
    checksum: int | None

    def on_mesh(self) -> tf.Tensor:
        """Return the DTensor. The caller holds the process lock."""
        tensor = messages.packed(self.shards, self.shape, self.dtype, self.layout)
        if self.checksum is not None:
            clients.here().note_checksum(tensor, self.checksum)
        return tensor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedBatch:
    """A batch on its way to the mesh.

    Attributes:
        host: The (nested) batch.
        leaves: The leaves of the batch, with a `StagedTensor` for each leaf that goes to the mesh.
        told: What the clients must agree on before they use the batch. None if they need no agreement.
        fault: The error of an already sharded batch, which is raised after the agreement.
    """

    host: Any
    leaves: Sequence[Any]
    told: Mapping[str, object] | None = None
    fault: Exception | None = None

    def on_mesh(self) -> Any:
        """Return the batch as DTensors. In a launched run, all clients call this in their main threads."""
        if self.told is not None:
            _agree_on_parts(self.told)
        if self.fault is not None:
            raise self.fault
        leaves = [leaf.on_mesh() if isinstance(leaf, StagedTensor) else leaf for leaf in self.leaves]
        return tf.nest.pack_sequence_as(self.host, leaves)


def stage_batch(
    batch: Any, mesh: dtensor.Mesh, already_sharded: bool = False, *, on_devices: bool = False
) -> StagedBatch:
    """Cut the local shards of a (nested) batch. Any thread may call this: it does not use DTensor's device.

    Args:
        batch: As for `batch_to_mesh`.
        mesh: The mesh.
        already_sharded: As for `batch_to_mesh`.
        on_devices: True to copy the shards to their devices now. By default the packing of the DTensor copies them.
    """
    leaves = tf.nest.flatten(batch)
    if axis_sizes(mesh).contexts > 1:
        leaves = _in_chunks(leaves, mesh)

    def staged() -> list[Any]:
        return [stage(leaf, mesh, already_sharded, on_devices=on_devices) for leaf in leaves]

    if not already_sharded:
        return StagedBatch(host=batch, leaves=staged())
    dense = [leaf for leaf in leaves if not _stays(leaf) and not isinstance(leaf, tf.RaggedTensor)]
    told = _told_of_parts(dense, mesh) if dense else None
    try:
        return StagedBatch(host=batch, leaves=staged(), told=told)
    except Exception as fault:
        return StagedBatch(host=batch, leaves=[], told=told, fault=fault)


def stage(value: Any, mesh: dtensor.Mesh, already_sharded: bool = False, *, on_devices: bool = False) -> Any:
    """Cut the local shards of a leaf of a batch. None and DTensors stay as they are. Sparse tensors become dense."""
    if isinstance(value, MeshTensor):
        return value.on_mesh
    if _stays(value):
        return value
    if isinstance(value, tf.RaggedTensor):
        raise StrategyError(
            "Ragged batches cannot be put on a mesh. Make them dense in the input pipeline, for example with "
            f"RaggedTensor.to_tensor. Received: a {type(value).__name__} of shape={value.shape}"
        )
    host = _host_value(value)
    shape = tuple(host.shape)
    if already_sharded and shape:
        return _staged_rows(host, mesh, on_devices)
    axes, sizes = batch_axes(shape, mesh), axis_sizes(mesh)
    parts = [boxes.shard_box(shape, axes, sizes, location) for location in mesh.local_device_locations()]
    here = clients.here()
    return StagedTensor(
        shards=_shards(host, parts, mesh, on_devices),
        shape=shape,
        dtype=tf.as_dtype(host.dtype),
        layout=transfer.layout(axes, mesh),
        checksum=here.checksum(transfer.host_view(host)) if here.is_launched else None,
    )


def to_mesh(value: Any, mesh: dtensor.Mesh, already_sharded: bool = False) -> Any:
    """Convert a leaf of a batch to a DTensor. None and DTensors stay as they are. Sparse tensors become dense."""
    staged = stage(value, mesh, already_sharded)
    return staged.on_mesh() if isinstance(staged, StagedTensor) else staged


def _in_chunks(leaves: Sequence[Any], mesh: dtensor.Mesh) -> list[Any]:
    """Split the leaves of a batch into rows of chunks (layouts/sequence_chunks.py).

    The length of the sequences is dim 1 of the first tensor that has a dim 1 of more than one position. Tensors without
    a sequence are repeated for each chunk.

    Raises:
        StrategyError: A tensor has another length, or the context axis does not divide the length.
    """
    axes = axis_sizes(mesh)
    chunks = SequenceChunks.of(axes)
    hosts = [leaf if _stays(leaf) or isinstance(leaf, tf.RaggedTensor) else _host_array(leaf) for leaf in leaves]
    arrays = [each for each in hosts if isinstance(each, np.ndarray)]
    length = next((each.shape[1] for each in arrays if each.ndim > 1 and each.shape[1] > 1), None)
    shapes = [tuple(each.shape) for each in arrays]
    if length is None:
        if any(each.ndim for each in arrays) and not any(map(transfer.is_dtensor, leaves)):
            raise StrategyError(
                f"Mesh axis '{axes.context}' splits sequences, and no tensor of the batch has one. Give tensors of "
                f"shape (batch, sequence, ...), or leave the axis out of the mesh. Received: tensors of {shapes}"
            )
        return hosts
    if length % axes.contexts:
        raise StrategyError(
            f"Mesh axis '{axes.context}' of {axes.contexts} devices does not divide sequences of {length} positions. "
            f"Pad the sequences to a multiple of {axes.contexts}, with a mask or sample weights of 0 for the padding. "
            f"Received: tensors of shapes {shapes}"
        )

    def split(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            return leaf
        if leaf.ndim == 1 or leaf.shape[1] == 1:
            return chunks.repeated(leaf)
        if leaf.shape[1] != length:
            raise StrategyError(
                f"Mesh axis '{axes.context}' splits dim 1 of every tensor of a batch, so all need the length of the "
                f"first one, {length}, or length 1. Reshape the others to (batch, 1, ...) if they have no sequence, "
                f"or leave the axis out of the mesh. Received: tensors of shapes {shapes}"
            )
        return chunks.rows_of(leaf)

    return [split(leaf) for leaf in hosts]


def _stays(value: Any) -> bool:
    return value is None or transfer.is_dtensor(value) or isinstance(value, MeshTensor | tf.experimental.Optional)


def _staged_rows(rows: Any, mesh: dtensor.Mesh, on_devices: bool) -> StagedTensor:
    """Cut this client's rows of a batch into the shards of its devices."""
    shape, axis = tuple(rows.shape), axis_sizes(mesh).data
    if axis is None:
        places, held = [0] * len(mesh.local_device_locations()), 1
    else:
        places = [location[axis] for location in mesh.local_device_locations()]
        held = len(set(places))
    if axis is not None and (shape[0] == 0 or shape[0] % held):
        raise StrategyError(
            f"Already sharded input: the batch size of a client must be a multiple of its {held} positions on the "
            f"batch axis. Use drop_remainder=True and another batch size. Received: a batch of shape={shape}"
        )
    count = shape[0] // held
    parts = [
        boxes.Box(offset=(count * (place - min(places)), *(0,) * (len(shape) - 1)), shape=(count, *shape[1:]))
        for place in places
    ]
    return StagedTensor(
        shards=_shards(rows, parts, mesh, on_devices),
        shape=shape,
        dtype=tf.as_dtype(rows.dtype),
        layout=transfer.layout((axis, *(None,) * (len(shape) - 1)), mesh),
        checksum=None,
    )


def _shards(host: Any, parts: Sequence[boxes.Box], mesh: dtensor.Mesh, on_devices: bool) -> list[tf.Tensor]:
    """Return the local shards of a value of the host, one for each local device. Equal parts share one tensor.

    The shards of a large value are in memory of TensorFlow's allocator. TensorFlow copies from such memory to a GPU
    through pinned buffers.
    """
    cut = {part: _cut(host, part) for part in parts}
    shards = [cut[part] for part in parts]
    # On a GPU, the result of an eager operation of int32 is in the memory of the host.
    if not on_devices or tf.as_dtype(host.dtype) == tf.int32:
        return shards
    copied = []
    for shard, device in zip(shards, mesh.local_devices(), strict=True):
        with tf.device(device):
            copied.append(tf.identity(shard))
    return copied


def _cut(host: Any, part: boxes.Box) -> tf.Tensor:
    if isinstance(host, np.ndarray):
        rows = host[part.slices]
        return host_memory.tensor_of(rows) if rows.nbytes >= _LARGE else tf.constant(rows)
    with tf.device("CPU:0"):
        # A view, if the rows are aligned.
        return host if tuple(host.shape) == part.shape else host[part.offset[0] : part.offset[0] + part.shape[0]]


def on_host(value: Any) -> Any:
    """Return a leaf of a batch as the array for the mesh. Leaves that `to_mesh` keeps or refuses stay as they are."""
    return value if _stays(value) or isinstance(value, tf.RaggedTensor) else _host_array(value)


def _host_value(value: Any) -> Any:
    """Return an array, or the tensor itself if it is large and on the host."""
    is_eager = isinstance(value, tf.__internal__.EagerTensor)
    if is_eager and "CPU" in value.backing_device and value.dtype.size * math.prod(value.shape) >= _LARGE:
        return value
    return _host_array(value)


def _host_array(value: Any) -> np.ndarray:
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    if tf.is_tensor(value):
        return np.asarray(value.numpy())
    array = np.asarray(value)
    # tf.convert_to_tensor converts Python numbers to float32 and int32.
    if not isinstance(value, (np.ndarray, np.generic)) and array.dtype in (np.float64, np.int64):
        array = array.astype({"f": np.float32, "i": np.int32}[array.dtype.kind])
    return array


def batch_to_mesh(batch: Any, mesh: dtensor.Mesh, already_sharded: bool = False) -> Any:
    """Convert a (nested) batch to DTensors.

    Args:
        batch: The full batch. Every client of a launched run passes the same batch, and takes its rows.
        mesh: The mesh.
        already_sharded: If True, the batch holds only this client's rows.
    """
    return stage_batch(batch, mesh, already_sharded).on_mesh()


# The agreement on already sharded input: each client reports the rows it feeds in a step.
_PARTS = "their parts of a batch"


def _told_of_parts(leaves: list[Any], mesh: dtensor.Mesh) -> dict[str, object]:
    """Return what a client tells the others about its rows of a batch.

    Clients that differ only in model axes have the same part of the batch, and must feed the same rows.
    """
    values = [_host_value(leaf) for leaf in leaves]
    shapes = [[list(value.shape), tf.as_dtype(value.dtype).name] for value in values]
    told: dict[str, object] = {"shapes and dtypes": shapes}
    part = InputShard.of(mesh)
    if part.count < clients.here().count:
        rows = checksums.of_text(str([checksums.of_array(transfer.host_view(value)) for value in values]))
        told[f"checksum of the rows of part {part.index} (from 0) of {part.count}"] = rows
    return told


def _agree_on_parts(told: Mapping[str, object]) -> None:
    """Raise an error on all clients if already sharded rows do not fit together, before a step uses them."""
    clients.here().agree(
        _PARTS, told, error=StrategyError,
        hint="Batches must have the same shapes on all clients, and clients with the same part of the batch "
             "(strategy.input_shard.index) must feed the same rows: use dataset.shard(part.count, part.index), and "
             "the same seed for shuffling.",
    )  # fmt: skip


def end_of_data() -> None:
    """Agree that already sharded input has ended on all clients.

    Raises:
        StrategyError: The input has not ended on another client.
    """
    clients.here().agree(_PARTS, {"shapes and dtypes": "none: the end of the data"}, error=StrategyError)
