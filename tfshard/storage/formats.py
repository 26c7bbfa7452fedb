"""StorageFormat: how a storage keeps its members on the mesh.

`Unpacked` keeps one variable in the variable's shape. `Flat` keeps one or more variables in a padded buffer. A format
knows everything that differs between the two. To add a way of storing, add a class here and a line in
`StorageFormat.of`. A format that changes only the elements, such as their dtype, overrides `encode` and `decode`
(tests/storage/test_formats.py). A format that stores the local shards of another format's buffer in another form, such
as `InBlocks`, wraps the other format.

The words: *values* are the members' full values, in their shapes. The *buffer* holds all members in one tensor.
*stored* is the buffer as it is kept between steps, with its elements encoded.
"""

import abc
import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import host_meshes, local_shards, replicas, transfer
from tfshard.layouts import boxes, variable_layout
from tfshard.layouts.axes import MeshAxes, axis_sizes
from tfshard.layouts.boxes import Shard
from tfshard.layouts.shard_rows import ShardRows
from tfshard.layouts.variable_layout import Axes, FlatForm, FlatMember, VariableLayout
from tfshard.storage import eight_bits, gradient
from tfshard.storage.initial_values import HostValue, drawn

# An array on the host, or a tensor, also on the mesh.
Elements = TypeVar("Elements")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A variable of a storage.

    Attributes:
        shape: The full shape of the variable.
        compute: The compute layout of the variable.
        update: The layout in which the variable is updated if it is updated alone.
    """

    shape: tuple[int, ...]
    compute: Axes
    update: Axes


# Flat tensors of members that follow each other, and the number of these members, by the number of the first member.
FlatSpans: TypeAlias = Mapping[int, tuple[tf.Tensor, int]]
NO_SPANS: FlatSpans = types.MappingProxyType({})


class StorageFormat(abc.ABC):
    """Stores the members of a storage on the mesh, and brings them to the layouts of reads, writes and updates.

    Attributes:
        mesh: The mesh.
        stored_on: The mesh on which the buffer is stored between steps: the host mesh, or `mesh`.
        members: The variables in the buffer, by number.
        shape: The shape of the buffer.
        storage: The layout in which the buffer is stored between steps.
        update: The layout in which the buffer is updated.
        gathered: The layout from which members are read: gathered over the batch axis.
        direct: True if a read is the stored tensor, brought to the compute layout. A tape can watch the stored tensor
            then.
        is_encoded: True if the stored elements have another form than the updated elements.
        packed: True if members have another shape in the buffer than alone. An elementwise update then updates the
            buffer as one tensor.
        codes: The dtype of codes in which steps may gather the stored buffer; None if the buffer is gathered exactly.
        is_repeated: True if every replica stores the same shards along the data axis. Otherwise each replica stores
            others.
    """

    direct: bool
    packed: bool
    is_repeated: bool
    is_encoded = False

    def __init__(self, layout: VariableLayout, mesh: dtensor.Mesh, members: tuple[Member, ...]):
        self.mesh = mesh
        self.stored_on = (host_meshes.of(mesh) if layout.on_host else None) or mesh
        self.members = members
        self.shape = layout.storage_shape
        self.storage = layout.storage
        self.update = layout.update
        self.gathered = layout.gathered
        self.codes = layout.gather_dtype if layout.storage != layout.gathered else None

    @property
    def mesh_axes(self) -> MeshAxes:
        """The mesh axes. They include replicas only if every replica stores the same shards."""
        axes = axis_sizes(self.mesh)
        return axes if self.is_repeated else MeshAxes(axes.axes)

    @property
    def is_gathered(self) -> bool:
        """True if a read gathers the stored buffer over the batch axis."""
        return self.storage != self.gathered

    @property
    def gathered_elements(self) -> int:
        """The number of elements that a device holds of the gathered buffer."""
        sizes = axis_sizes(self.mesh)
        shares = math.prod(sizes[axis] for axis in self.gathered if axis is not None)
        return math.prod(self.gathered_shape) // shares

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape of the buffer once it is gathered over the batch axis."""
        return self.shape

    @staticmethod
    def of(layout: VariableLayout, mesh: dtensor.Mesh) -> "StorageFormat":
        """Return the format of the storage for a variable of this layout."""
        format: StorageFormat
        if layout.partial_kind is not None:
            format = layout.partial_kind.format(layout, mesh)
            return format
        unpacked, flat = Unpacked, Flat
        if layout.stored_dtype == "bfloat16":
            unpacked, flat = UnpackedInBfloat16, FlatInBfloat16
        elif layout.spec.dtype == "int32" and not _has_int32(mesh):
            unpacked, flat = UnpackedInInt64, FlatInInt64
        if layout.flat is None:
            format = unpacked(layout, mesh)
        elif layout.flat.word > 1:
            format = FlatInWords(layout, layout.flat, mesh)
        else:
            format = flat(layout, layout.flat, mesh)
        return InBlocks(layout, format) if layout.stored_dtype == "int8" else format

    # --- elements -------------------------------------------------------------------------------------

    def encode(self, values: Elements) -> Elements:
        """Return the stored form of a buffer: an array on the host, or a tensor on the mesh."""
        return values

    def decode(self, stored: Elements) -> Elements:
        """Invert `encode`."""
        return stored

    def encode_local(self, values: Elements) -> Elements:
        """Return the stored form of one device's shard of the buffer: an array or a tensor on the host."""
        return self.encode(values)

    def decode_local(self, stored: Elements) -> Elements:
        """Invert `encode_local`."""
        return self.decode(stored)

    # --- on the host ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def pack_host(self, values: Mapping[int, HostValue]) -> np.ndarray:
        """Return the stored buffer for the given values of members, by number. Absent members become zeros.

        Initial values that are not drawn yet are drawn one after the other.
        """

    @abc.abstractmethod
    def unpack_host(self, stored: np.ndarray, member: int) -> np.ndarray:
        """Return the value of a member."""

    # --- on the mesh ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def pack(self, written: Mapping[int, tf.Tensor], read: Callable[[int], tf.Tensor]) -> tf.Tensor:
        """Return the buffer, in any layout, after writes to members.

        Args:
            written: The written values by member, in any layout.
            read: Returns the value of a member in its compute layout, after the writes.
        """

    def to_stored(self, buffer: tf.Tensor) -> tf.Tensor:
        """Encode a buffer of any layout, and bring it to the storage layout."""
        return self._in_storage_layout(self.encode(buffer))

    def _in_storage_layout(self, buffer: tf.Tensor) -> tf.Tensor:
        """Bring an encoded buffer of any layout to the storage layout. Stages 1 and 2 gather the buffer after its
        update."""
        axes = gradient.layout_of(buffer) if self.storage != self.update else None
        return replicas.gathered(buffer, axes or self.storage, self.storage, self.mesh)

    def in_update(self, buffer: tf.Tensor) -> tf.Tensor:
        """Bring a buffer of any layout to the update layout."""
        return transfer.relayout(buffer, self.update, self.mesh)

    def for_update(self, stored: tf.Tensor) -> tf.Tensor:
        """Decode a stored buffer, and bring it to the update layout."""
        return self.decode(transfer.relayout(stored, self.update, self.mesh))

    @abc.abstractmethod
    def gather(self, stored: tf.Tensor, codes: str | None = None) -> tf.Tensor:
        """Return the buffer from which `read` takes members: full along the batch axis, by one all-gather if it is
        sharded.

        Args:
            stored: The stored buffer.
            codes: The dtype of codes in which devices send their shards (`replicas.gather`). By default exactly.
        """

    @abc.abstractmethod
    def read(self, gathered: tf.Tensor, member: int) -> tf.Tensor:
        """Return the value of a member in its compute layout, from the result of `gather`."""

    # --- updates of the buffer: of packed formats -----------------------------------------------------

    def pack_gradients(
        self, gradients: Sequence[tf.Tensor | None], dtype: tf.DType, spans: FlatSpans = NO_SPANS
    ) -> tf.Tensor:
        """Pack full gradients, in the members' shapes, into one tensor in the update layout of the buffer.

        Args:
            gradients: The gradient of each member. Zeros replace None.
            dtype: Their dtype.
            spans: Flat gradients, which replace the gradients of their members.
        """
        raise AssertionError("Its member is updated separately.")

    def mask(self, members: frozenset[int]) -> tf.Tensor:
        """Return which elements of the buffer belong to `members`, in a shape that broadcasts to the buffer's shape."""
        raise AssertionError("Its member is updated separately.")

    # --- on one device, outside of a step -------------------------------------------------------------

    @abc.abstractmethod
    def extract(self, stored: tf.Tensor, member: int) -> tf.Tensor:
        """Return the value of a member from an ordinary tensor."""

    @abc.abstractmethod
    def insert(self, stored: Callable[[], tf.Tensor], member: int, value: tf.Tensor) -> tf.Tensor:
        """Return the stored buffer after one member got a new value.

        Args:
            stored: Returns the stored buffer, for the other members.
            member: The number of the member.
            value: Its full value, an ordinary tensor.
        """

    # --- the local shards -----------------------------------------------------------------------------

    @abc.abstractmethod
    def shards_at(self, location: Mapping[str, int]) -> list[Shard]:
        """Return the shards of members that the device at `location` (axis name to index) stores."""

    @abc.abstractmethod
    def share(self, shard_bytes: int, member: int) -> int:
        """Return the bytes of a device's shard of the buffer that belong to one member. The bytes of all members add up
        to the shard."""


class Unpacked(StorageFormat):
    """A single variable in the variable's shape."""

    direct = True
    packed = False
    is_repeated = False

    def __init__(self, layout: VariableLayout, mesh: dtensor.Mesh):
        super().__init__(layout, mesh, (Member(shape=layout.spec.shape, compute=layout.compute, update=layout.update),))

    def pack_host(self, values: Mapping[int, HostValue]) -> np.ndarray:
        return self.encode(drawn(values[0]))

    def unpack_host(self, stored: np.ndarray, member: int) -> np.ndarray:
        return self.decode(stored)

    def pack(self, written: Mapping[int, tf.Tensor], read: Callable[[int], tf.Tensor]) -> tf.Tensor:
        return written[0]

    def gather(self, stored: tf.Tensor, codes: str | None = None) -> tf.Tensor:
        return self.decode(replicas.gathered(stored, self.storage, self.gathered, self.mesh, codes))

    def read(self, gathered: tf.Tensor, member: int) -> tf.Tensor:
        return gathered

    def extract(self, stored: tf.Tensor, member: int) -> tf.Tensor:
        return self.decode(stored)

    def insert(self, stored: Callable[[], tf.Tensor], member: int, value: tf.Tensor) -> tf.Tensor:
        return self.encode(value)

    def shards_at(self, location: Mapping[str, int]) -> list[Shard]:
        return [Shard(member=0, box=boxes.shard_box(self.shape, self.storage, axis_sizes(self.mesh), location))]

    def share(self, shard_bytes: int, member: int) -> int:
        return shard_bytes


# Brings a tensor to a layout.
Pin: TypeAlias = Callable[[tf.Tensor, Axes], tf.Tensor]


def _as_it_is(tensor: tf.Tensor, axes: Axes) -> tf.Tensor:
    """Return the tensor: ordinary tensors have no layout to pin."""
    return tensor


def _to_rows(value: tf.Tensor, rows: ShardRows, pin: Pin) -> tf.Tensor:
    """Reshape a member to a tensor with a row for each shard."""
    value = pin(value, rows.axes)
    if rows.front:
        value = pin(tf.reshape(value, rows.split_shape), rows.split_axes)
        value = pin(tf.transpose(value, rows.to_front), rows.moved_axes)
    return pin(tf.reshape(value, rows.row_shape), rows.row_axes)


def _from_rows(tensor: tf.Tensor, rows: ShardRows, pin: Pin) -> tf.Tensor:
    """Invert `_to_rows`."""
    if rows.front:
        tensor = pin(tf.reshape(tensor, rows.moved_shape), rows.moved_axes)
        tensor = pin(tf.transpose(tensor, np.argsort(rows.to_front)), rows.split_axes)
    return pin(tf.reshape(tensor, rows.shape), rows.axes)


class Flat(StorageFormat):
    """A group of variables, or a single one, in a `FlatForm`.

    Every step between the two forms is pinned to its layout. Left to propagation, the batch axis of the buffer would
    travel back through the reshapes and meet dims that it does not divide.
    """

    direct = False
    packed = True
    is_repeated = True

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        return self._form.gathered_shape

    def __init__(self, layout: VariableLayout, form: FlatForm, mesh: dtensor.Mesh):
        members = [Member(shape=place.shape, compute=place.compute, update=place.compute) for place in form.members]
        super().__init__(layout, mesh, tuple(members))
        self._form = form
        self._model_axes: Axes = form.model_axes
        # The shape of the buffer without rows: the members follow each other in its last dim.
        self._in_line = (*form.model_sizes, form.rows * form.columns)

    # --- on the host ----------------------------------------------------------------------------------

    def pack_host(self, values: Mapping[int, HostValue]) -> np.ndarray:
        dtype = next(iter(values.values())).dtype
        filled = (
            drawn(values[i]) if i in values else np.zeros(place.shape, dtype)
            for i, place in enumerate(self._form.members)
        )
        return self.encode(
            self._for_replicas(variable_layout.flatten_host_values(filled, dtype, self._form), self.shape)
        )

    def unpack_host(self, stored: np.ndarray, member: int) -> np.ndarray:
        stored = stored[..., : self._form.rows, :]
        return variable_layout.unflatten_host_value(self.decode(stored), self._form, self._form.members[member])

    @staticmethod
    def _for_replicas(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Repeat the rows for each replica, if the buffer of this shape contains them repeatedly."""
        count = shape[-2] // rows.shape[-2]
        return rows if count == 1 else np.concatenate([rows] * count, axis=-2)

    # --- on the mesh ----------------------------------------------------------------------------------

    def _pin(self, tensor: tf.Tensor, axes: Axes) -> tf.Tensor:
        return transfer.relayout(tensor, axes, self.mesh)

    def pack(self, written: Mapping[int, tf.Tensor], read: Callable[[int], tf.Tensor]) -> tf.Tensor:
        return self._join([read(i) for i in range(len(self.members))])

    def pack_gradients(
        self, gradients: Sequence[tf.Tensor | None], dtype: tf.DType, spans: FlatSpans = NO_SPANS
    ) -> tf.Tensor:
        filled = [
            transfer.zeros(member.shape, dtype, member.compute, self.mesh) if gradient is None else gradient
            for gradient, member in zip(gradients, self.members, strict=True)
        ]
        buffer = self._join(filled, spans)
        if self.update == self.gathered or self._has_replicas:
            return self._brought(buffer, self.update)
        return transfer.scatter(buffer, self.update, self.mesh)

    @property
    def _has_replicas(self) -> bool:
        return axis_sizes(self.mesh).replicas > 1

    def _brought(self, buffer: tf.Tensor, axes: Axes) -> tf.Tensor:
        """Bring the buffer, sharded or gathered, to one of the two layouts."""
        form = self._form
        is_sharded = self._has_replicas and buffer.shape[-2] == form.buffer_shape[-2]
        if is_sharded and axes == form.gathered_axes:
            return replicas.gather(buffer, form.buffer_axes, self.mesh)
        if self._has_replicas and not is_sharded and axes == form.buffer_axes:
            return replicas.spread(buffer, axes, self.mesh)
        return self._pin(buffer, axes)

    def to_stored(self, buffer: tf.Tensor) -> tf.Tensor:
        if self._has_replicas:
            return self.encode(self._brought(buffer, self.storage))
        return self._in_storage_layout(self.encode(buffer))

    def in_update(self, buffer: tf.Tensor) -> tf.Tensor:
        return self._brought(buffer, self.update)

    def for_update(self, stored: tf.Tensor) -> tf.Tensor:
        return self.decode(self._brought(stored, self.update))

    def _join(self, values: Sequence[tf.Tensor], spans: FlatSpans = NO_SPANS) -> tf.Tensor:
        """Join members to the buffer, gathered over the batch axis, with zeros between and behind the members."""
        form, model = self._form, self._model_axes
        parts, end, joined = [], 0, 0
        for number, (value, place) in enumerate(zip(values, form.members, strict=True)):
            if number < joined:
                continue
            if place.offset > end:
                parts.append(self._zeros(place.offset - end, value.dtype))
            if number in spans:
                flat, count = spans[number]
                joined, end = number + count, form.members[number + count - 1].end
                parts.append(self._pin(flat, (*model, None)))
                continue
            parts.append(self._to_part(value, place, self._pin))
            end = place.end
        if form.padding:
            parts.append(self._zeros(form.padding, parts[-1].dtype))
        buffer = self._pin(tf.concat(parts, axis=-1), (*model, None)) if len(parts) > 1 else parts[0]
        return self._pin(tf.reshape(buffer, form.gathered_shape), form.gathered_axes)

    def _zeros(self, elements: int, dtype: tf.DType) -> tf.Tensor:
        return transfer.zeros((*self._form.model_sizes, elements), dtype, (*self._model_axes, None), self.mesh)

    def _to_part(self, value: tf.Tensor, place: FlatMember, pin: Pin) -> tf.Tensor:
        """Reshape the value of a member to its place in the line."""
        return _to_rows(value, self._form.shard_rows(place), pin)

    def gather(self, stored: tf.Tensor, codes: str | None = None) -> tf.Tensor:
        if codes is not None:
            buffer = replicas.gather(stored, self.storage, self.mesh, codes=codes)
        elif self._has_replicas:
            buffer = self._brought(stored, self._form.gathered_axes)
        else:
            buffer = replicas.gathered(stored, self.storage, self._form.gathered_axes, self.mesh)
        return self.decode(self._pin(tf.reshape(buffer, self._in_line), (*self._model_axes, None)))

    def read(self, gathered: tf.Tensor, member: int) -> tf.Tensor:
        return self._from_line(gathered, self._form.members[member], self._pin)

    def places(self) -> tuple[FlatMember, ...] | None:
        """Return where the elements of each member are in the line; None if model axes shard the members."""
        return None if self._model_axes else self._form.members

    def span(self, gathered: tf.Tensor, start: int, end: int) -> tf.Tensor:
        """Return elements of the line, of several members that follow each other, from the result of `gather`."""
        if (start, end) == (0, self._in_line[-1]):
            return gathered
        return self._pin(gathered[start:end], (None,))

    def _from_line(self, line: tf.Tensor, place: FlatMember, pin: Pin) -> tf.Tensor:
        """Return the value of a member from the line."""
        tensor = line
        if (place.offset, place.elements) != (0, self._in_line[-1]):
            tensor = pin(tensor[..., place.offset : place.end], (*self._model_axes, None))
        return _from_rows(tensor, self._form.shard_rows(place), pin)

    def mask(self, members: frozenset[int]) -> tf.Tensor:
        form = self._form
        line = np.zeros(self._in_line[-1], bool)
        for member in members:
            line[form.members[member].offset : form.members[member].end] = True
        mask = line.reshape((*(1 for _ in form.model_sizes), form.rows, form.columns))
        if self.update != self.gathered:
            mask = self._for_replicas(mask, form.buffer_shape)
        axes = (*(None for _ in form.model_sizes), *self.update[-2:])
        if _private.is_eager():
            return transfer.host_to_mesh(mask, axes, self.mesh)
        return transfer.relayout(tf.constant(mask), axes, self.mesh)

    # --- on one device, outside of a step -------------------------------------------------------------

    def extract(self, stored: tf.Tensor, member: int) -> tf.Tensor:
        line = tf.reshape(self.decode(self._of_one_replica(stored)), self._in_line)
        return self._from_line(line, self._form.members[member], _as_it_is)

    def _of_one_replica(self, stored: tf.Tensor) -> tf.Tensor:
        return stored[..., : self._form.rows, :] if stored.shape[-2] != self._form.rows else stored

    def insert(self, stored: Callable[[], tf.Tensor], member: int, value: tf.Tensor) -> tf.Tensor:
        return self._inserted(stored(), member, self.encode(value))

    def _inserted(self, buffer: tf.Tensor, member: int, value: tf.Tensor) -> tf.Tensor:
        place = self._form.members[member]
        line = tf.reshape(self._of_one_replica(buffer), self._in_line)
        part = self._to_part(value, place, _as_it_is)
        joined = tf.concat([line[..., : place.offset], part, line[..., place.end :]], -1)
        rows = tf.reshape(joined, self._form.gathered_shape)
        return tf.concat([rows] * (self.shape[-2] // self._form.rows), axis=-2)

    # --- the local shards -----------------------------------------------------------------------------

    def shards_at(self, location: Mapping[str, int]) -> list[Shard]:
        return boxes.flat_shards(self._form, self.storage, location)

    def share(self, shard_bytes: int, member: int) -> int:
        # A shard is cut where the next member begins.
        begins = [0, *(place.offset for place in self._form.members[1:]), self._form.elements]
        return (
            shard_bytes * begins[member + 1] // self._form.elements
            - shard_bytes * begins[member] // self._form.elements
        )


class _Cast(StorageFormat):
    """Stores members of one dtype as another one, rounded to the nearest where that has fewer bits."""

    direct = False
    is_encoded = True
    _value_dtype: tf.DType
    _stored_dtype: tf.DType

    def encode(self, values: Any) -> Any:
        return _cast(values, self._stored_dtype)

    def decode(self, stored: Any) -> Any:
        return _cast(stored, self._value_dtype)


def _cast(elements: Any, dtype: tf.DType) -> Any:
    return tf.cast(elements, dtype) if tf.is_tensor(elements) else elements.astype(dtype.as_numpy_dtype)


class _Bfloat16(_Cast):
    _value_dtype, _stored_dtype = tf.float32, tf.bfloat16


class UnpackedInBfloat16(_Bfloat16, Unpacked):
    """A single variable in the variable's shape, as bfloat16."""


class FlatInBfloat16(_Bfloat16, Flat):
    """Members in a padded buffer of bfloat16."""


class _Int64(_Cast):
    _value_dtype, _stored_dtype = tf.int32, tf.int64


class UnpackedInInt64(_Int64, Unpacked):
    """A single variable in the variable's shape, as int64."""


class FlatInInt64(_Int64, Flat):
    """Members in a padded buffer of int64."""


def _has_int32(mesh: dtensor.Mesh) -> bool:
    """Return whether devices can hold int32 variables. TensorFlow keeps the int32 variables of GPUs on the host."""
    return str(mesh.device_type()).upper() != "GPU"


class FlatInWords(Flat):
    """Members of one byte an element in a padded buffer, stored as int64.

    DTensor gathers integers of 32 and 64 bits only. It casts smaller integers to int32, and gathers them by an
    all-reduce: eight times the bytes. Each device takes its words apart locally.
    """

    is_encoded = True

    def __init__(self, layout: VariableLayout, form: FlatForm, mesh: dtensor.Mesh):
        super().__init__(layout, form, mesh)
        self._dtype = tf.as_dtype(layout.spec.dtype)
        self.shape = (*self.shape[:-1], form.columns // form.word)

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        return (*self._form.gathered_shape[:-1], self._form.columns // self._form.word)

    # --- elements -------------------------------------------------------------------------------------

    def encode(self, values: Any) -> Any:
        return self._to_words(values, self.storage) if tf.is_tensor(values) else self.encode_local(values)

    def decode(self, stored: Any) -> Any:
        return self._from_words(stored, self.update) if tf.is_tensor(stored) else self.decode_local(stored)

    def encode_local(self, values: Any) -> Any:
        if not tf.is_tensor(values):
            return np.ascontiguousarray(values).view(tf.int64.as_numpy_dtype)
        return tf.bitcast(tf.reshape(values, (*values.shape[:-1], -1, self._form.word)), tf.int64)

    def decode_local(self, stored: Any) -> Any:
        if not tf.is_tensor(stored):
            return np.ascontiguousarray(stored).view(self._dtype.as_numpy_dtype)
        return tf.reshape(tf.bitcast(stored, self._dtype), (*stored.shape[:-1], -1))

    def _to_words(self, values: tf.Tensor, axes: Axes) -> tf.Tensor:
        values = self._pin(values, axes)
        split = self._pin(tf.reshape(values, (*values.shape[:-1], -1, self._form.word)), (*axes, None))
        return local_shards.run_locally(
            lambda shard: tf.bitcast(shard, tf.int64), split, (*axes, None), axes, self.mesh
        )

    def _from_words(self, stored: tf.Tensor, axes: Axes) -> tf.Tensor:
        split = local_shards.run_locally(
            lambda shard: tf.bitcast(shard, self._dtype), stored, axes, (*axes, None), self.mesh
        )  # fmt: skip
        return self._pin(tf.reshape(split, (*stored.shape[:-1], -1)), axes)

    # --- on the mesh ----------------------------------------------------------------------------------

    def gather(self, stored: tf.Tensor, codes: str | None = None) -> tf.Tensor:
        assert codes is None, "Integers are gathered exactly."
        words = self._brought(stored, self._form.gathered_axes)
        axes = (*self._model_axes, None)
        line = self._pin(tf.reshape(words, (*self._in_line[:-1], -1)), axes)
        return self._from_words(line, axes)

    # --- on one device, outside of a step -------------------------------------------------------------

    def extract(self, stored: tf.Tensor, member: int) -> tf.Tensor:
        line = tf.reshape(self.decode_local(self._of_one_replica(stored)), self._in_line)
        return self._from_line(line, self._form.members[member], _as_it_is)

    def insert(self, stored: Callable[[], tf.Tensor], member: int, value: tf.Tensor) -> tf.Tensor:
        return self.encode_local(self._inserted(self.decode_local(stored()), member, value))


class InBlocks(StorageFormat):
    """Float32 members of another format, in codes of 8 bits with a scale for each block of 256 (eight_bits.py).

    The stored tensor is a matrix with one row for each block. It holds the blocks of each shard of the other format's
    buffer, in the update layout of that buffer. No block has elements of two shards, so encoding sends nothing.
    """

    direct = False
    is_encoded = True

    def __init__(self, layout: VariableLayout, inner: StorageFormat):
        super().__init__(layout, inner.mesh, inner.members)
        assert inner.storage == inner.update, "Slots are stored in their update layout."
        self.packed, self.is_repeated = inner.packed, inner.is_repeated
        self._inner = inner
        self._rows = ShardRows(shape=inner.shape, axes=inner.storage, mesh_shape=axis_sizes(inner.mesh))
        self._blocks = -(-self._rows.elements // variable_layout.BLOCK_ELEMENTS)
        self.shape = (*self._rows.sizes, self._blocks, variable_layout.BLOCK_BYTES)
        self.storage = self.update = (*self._rows.front, None, None)
        self.gathered = tuple(axis if axis in inner.gathered else None for axis in self.storage)

    # --- elements -------------------------------------------------------------------------------------

    def encode(self, values: Any) -> Any:
        return self._encode(values, self._pin) if tf.is_tensor(values) else _by_tensors(self._encode, values)

    def decode(self, stored: Any) -> Any:
        return self._decode(stored, self._pin) if tf.is_tensor(stored) else _by_tensors(self._decode, stored)

    def encode_local(self, values: Any) -> Any:
        if not tf.is_tensor(values):
            return _by_tensors(self.encode_local, values)
        encoded = self._to_blocks(tf.reshape(values, (self._rows.elements,)), _as_it_is)
        return tf.reshape(encoded, (*(1 for _ in self._rows.front), *encoded.shape))

    def decode_local(self, stored: Any) -> Any:
        if not tf.is_tensor(stored):
            return _by_tensors(self.decode_local, stored)
        return tf.reshape(self._from_blocks(tf.reshape(stored, stored.shape[-2:]), _as_it_is), self._rows.shard_shape)

    def _pin(self, tensor: tf.Tensor, axes: Axes) -> tf.Tensor:
        return transfer.relayout(tensor, axes, self.mesh)

    def _encode(self, values: tf.Tensor, pin: Pin = _as_it_is) -> tf.Tensor:
        return self._to_blocks(_to_rows(values, self._rows, pin), pin)

    def _decode(self, stored: tf.Tensor, pin: Pin = _as_it_is) -> tf.Tensor:
        return _from_rows(self._from_blocks(pin(stored, self.storage), pin), self._rows, pin)

    def _to_blocks(self, rows: tf.Tensor, pin: Pin) -> tf.Tensor:
        """Encode rows `(..., elements)` as blocks `(..., blocks, bytes)`. Zeros fill up the last block."""
        front, elements = tuple(rows.shape[:-1]), self._blocks * variable_layout.BLOCK_ELEMENTS
        if elements > self._rows.elements:
            shape, axes = (*front, elements - self._rows.elements), self._rows.row_axes
            filling = tf.zeros(shape) if pin is _as_it_is else transfer.zeros(shape, tf.float32, axes, self.mesh)
            rows = pin(tf.concat([rows, filling], axis=-1), axes)
        blocks = pin(tf.reshape(rows, (*front, self._blocks, variable_layout.BLOCK_ELEMENTS)), self.storage)
        return pin(eight_bits.encode(blocks), self.storage)

    def _from_blocks(self, stored: tf.Tensor, pin: Pin) -> tf.Tensor:
        """Invert `_to_blocks`."""
        front, axes = tuple(stored.shape[:-2]), self._rows.row_axes
        blocks = pin(eight_bits.decode(stored), self.storage)
        rows = pin(tf.reshape(blocks, (*front, self._blocks * variable_layout.BLOCK_ELEMENTS)), axes)
        return pin(rows[..., : self._rows.elements], axes)

    # --- the inner format -------------------------------------------------------------------

    def pack_host(self, values: Mapping[int, HostValue]) -> np.ndarray:
        stored: np.ndarray = self.encode(self._inner.pack_host(values))
        return stored

    def unpack_host(self, stored: np.ndarray, member: int) -> np.ndarray:
        return self._inner.unpack_host(self.decode(stored), member)

    def pack(self, written: Mapping[int, tf.Tensor], read: Callable[[int], tf.Tensor]) -> tf.Tensor:
        return self._inner.pack(written, read)

    def gather(self, stored: tf.Tensor, codes: str | None = None) -> tf.Tensor:
        assert codes is None, "Slots are gathered exactly."
        return self._inner.gather(self.decode(stored))

    def read(self, gathered: tf.Tensor, member: int) -> tf.Tensor:
        return self._inner.read(gathered, member)

    def to_stored(self, buffer: tf.Tensor) -> tf.Tensor:
        return super().to_stored(self._inner.in_update(buffer))

    def in_update(self, buffer: tf.Tensor) -> tf.Tensor:
        return self._inner.in_update(buffer)

    def extract(self, stored: tf.Tensor, member: int) -> tf.Tensor:
        return self._inner.extract(self._decode(stored), member)

    def insert(self, stored: Callable[[], tf.Tensor], member: int, value: tf.Tensor) -> tf.Tensor:
        return self._encode(self._inner.insert(lambda: self._decode(stored()), member, value))

    def shards_at(self, location: Mapping[str, int]) -> list[Shard]:
        return self._inner.shards_at(location)

    def share(self, shard_bytes: int, member: int) -> int:
        return self._inner.share(shard_bytes, member)


def _by_tensors(function: Callable[[tf.Tensor], tf.Tensor], values: np.ndarray) -> np.ndarray:
    """Call a function of tensors on an array, on the host."""
    with tf.device("CPU:0"):
        result: np.ndarray = function(tf.constant(values)).numpy()
    return result
