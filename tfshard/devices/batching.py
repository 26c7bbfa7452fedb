"""Batches from the host to the mesh."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import checksums, clients, transfer
from tfshard.devices.mesh_tensors import MeshTensor
from tfshard.errors import StrategyError
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes


def batch_axes(shape: tuple[int, ...], mesh: dtensor.Mesh) -> Axes:
    """The layout of a batch: its first dim over the batch axis when that divides, else whole on every device.

    A whole batch is computed by every device, which gives the numbers of one device without padding or masks:
    no sample is dropped and none counted twice, batch statistics and custom losses included.
    """
    axes = axis_sizes(mesh)
    if not shape or shape[0] == 0 or shape[0] % axes.data_size:
        return (None,) * len(shape)
    return (axes.data, *(None,) * (len(shape) - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """A batch that is taken in equal parts. A part has some of the rows of each device: none is sent to another.

    Attributes:
        count: How many parts.
        rows: Of a part, over all devices.
        mesh: The mesh.
    """

    count: int
    rows: int
    mesh: dtensor.Mesh

    @classmethod
    def of(cls, batch: Any, count: int, mesh: dtensor.Mesh) -> "Parts":
        """Takes a batch of which all shapes are known apart.

        Args:
            batch: A (nested) batch in a step that is traced.
            count: How many parts. There are more if it does not divide the rows of a device, so that no part is larger
                than it was to be; one if the batch has no rows.
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
                "A step can be done in microbatches if all tensors that it gets have as many rows, or none. Let the "
                "step function have others from outside, or set strategy.microbatches = 1. "
                f"Received: tensors of shapes {shapes}"
            )
        (size,) = sizes
        devices = axis_sizes(mesh).data_size if any(batch_axes(shapes[0], mesh)) else 1
        found = variable_layout.parts_of(size // devices, count)
        return cls(count=found, rows=size // found, mesh=mesh)

    def split(self, leaf: Any) -> Any:
        """A tensor `(count * rows, ...)` in parts, for `part`: `(devices, count, rows / devices, ...)`."""
        if not self.has_rows(leaf):
            return leaf
        shape, axes = tuple(leaf.shape), batch_axes(tuple(leaf.shape), self.mesh)
        devices = axis_sizes(self.mesh).data_size if axes[0] is not None else 1
        leaf = transfer.relayout(leaf, axes, self.mesh)
        leaf = tf.reshape(leaf, (devices, self.count, self.rows // devices, *shape[1:]))
        return transfer.relayout(leaf, (axes[0], *(None,) * (leaf.shape.rank - 1)), self.mesh)

    def part(self, leaf: Any, split: Any, number: tf.Tensor) -> Any:
        """The part `(rows, ...)` of this number, from 0.

        Args:
            leaf: A tensor of the batch.
            split: What `split` made of it.
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
        """Whether a leaf of a batch is taken apart."""
        return bool(tf.is_tensor(leaf) and leaf.shape.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputShard:
    """Which part of each batch a client of a launched run feeds, with `ShardedStrategy(already_sharded=True)`.

    Clients that differ in model axes only have the same part. In a process that was not launched it is everything.

    Attributes:
        index: The part, from 0, in the order of the samples of a batch.
        count: How many parts there are: `dataset.shard(count, index)`.
    """

    index: int
    count: int

    @classmethod
    def of(cls, mesh: dtensor.Mesh) -> "InputShard":
        """The part of this client.

        Raises:
            StrategyError: The clients' parts overlap.
        """
        axes = axis_sizes(mesh)
        places = [0 if axes.data is None else location[axes.data] for location in mesh.local_device_locations()]
        size = axes.data_size
        first, held = min(places), len(set(places))
        if size % held or first % held or max(places) - first + 1 != held:
            raise StrategyError(
                "Already sharded input needs a mesh in which each client holds its own part of the batch axis, equally "
                f"large. Change the order or the sizes of the axes. Received: mesh={axes}"
            )
        return cls(index=first // held, count=size // held)


def to_mesh(value: Any, mesh: dtensor.Mesh, already_sharded: bool = False) -> Any:
    """One leaf of a batch as a DTensor; None and what is one already stay as they are. A sparse one becomes dense."""
    if isinstance(value, MeshTensor):
        return value.on_mesh
    if _stays(value):
        return value
    if isinstance(value, tf.RaggedTensor):
        raise StrategyError(
            "Ragged batches cannot be put on a mesh. Make them dense in the input pipeline, for example with "
            f"RaggedTensor.to_tensor. Received: a {type(value).__name__} of shape={value.shape}"
        )
    host = _host_array(value)
    if already_sharded and host.ndim:
        return _own_part_to_mesh(host, mesh)
    tensor = transfer.host_to_mesh(host, batch_axes(host.shape, mesh), mesh)
    clients.here().note_value(tensor, host)
    return tensor


def _stays(value: Any) -> bool:
    return value is None or transfer.is_dtensor(value) or isinstance(value, MeshTensor | tf.experimental.Optional)


def _own_part_to_mesh(rows: np.ndarray, mesh: dtensor.Mesh) -> tf.Tensor:
    """This client's rows of a batch to its devices."""
    axis = axis_sizes(mesh).data
    if axis is None:
        return transfer.host_to_mesh(rows, (None,) * rows.ndim, mesh)
    places = [location[axis] for location in mesh.local_device_locations()]
    held = len(set(places))
    if rows.shape[0] == 0 or rows.shape[0] % held:
        raise StrategyError(
            f"Already sharded input: the batch of a client must be a multiple of its {held} places on the batch axis. "
            f"Use drop_remainder=True and another batch size. Received: a batch of shape={rows.shape}"
        )
    parts = np.split(rows, held)
    pieces = [tf.constant(parts[place - min(places)]) for place in places]
    return dtensor.pack(pieces, transfer.layout((axis, *(None,) * (rows.ndim - 1)), mesh))


def on_host(value: Any) -> Any:
    """One leaf of a batch as the array that goes to the mesh. A leaf that `to_mesh` leaves alone or refuses stays."""
    return value if _stays(value) or isinstance(value, tf.RaggedTensor) else _host_array(value)


def _host_array(value: Any) -> np.ndarray:
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    if tf.is_tensor(value):
        return np.asarray(value.numpy())
    array = np.asarray(value)
    # What tf.convert_to_tensor makes of Python numbers: float32 and int32.
    if not isinstance(value, (np.ndarray, np.generic)) and array.dtype in (np.float64, np.int64):
        array = array.astype({"f": np.float32, "i": np.int32}[array.dtype.kind])
    return array


def batch_to_mesh(batch: Any, mesh: dtensor.Mesh, already_sharded: bool = False) -> Any:
    """A (nested) batch as DTensors.

    Args:
        batch: The whole batch, the same on every client of a launched run: each takes its rows.
        mesh: The mesh.
        already_sharded: The batch holds the rows of this client only.
    """
    dense = [leaf for leaf in tf.nest.flatten(batch) if not _stays(leaf) and not isinstance(leaf, tf.RaggedTensor)]
    if already_sharded and dense:
        _agree_on_parts(dense, mesh)
    return tf.nest.map_structure(lambda leaf: to_mesh(leaf, mesh, already_sharded), batch)


# Already sharded input: each client tells what it feeds in a step.
_PARTS = "their parts of a batch"


def _agree_on_parts(leaves: list[Any], mesh: dtensor.Mesh) -> None:
    """Raises on all clients unless already sharded rows fit together: before a device is touched.

    Clients that have the same part of the batch, because they differ in model axes only, have to feed the same rows.
    """
    here = clients.here()
    arrays = [_host_array(leaf) for leaf in leaves]
    told: dict[str, Any] = {"shapes and dtypes": [[list(array.shape), array.dtype.name] for array in arrays]}
    part = InputShard.of(mesh)
    if part.count < here.count:
        rows = checksums.of_text(str([checksums.of_array(array) for array in arrays]))
        told[f"checksum of the rows of part {part.index} (from 0) of {part.count}"] = rows
    here.agree(
        _PARTS, told, error=StrategyError,
        hint="Batches have to have the same shapes on all clients, and clients with the same part of the batch "
        "(strategy.input_shard.index) to feed the same rows: dataset.shard(part.count, part.index), and the same seed "
        "for shuffling.",
    )  # fmt: skip


def end_of_data() -> None:
    """Already sharded input has ended on this client; it must have ended on all of them.

    Raises:
        StrategyError: It has not.
    """
    clients.here().agree(_PARTS, {"shapes and dtypes": "none: the end of the data"}, error=StrategyError)
