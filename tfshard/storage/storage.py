"""Storage: one DTensor variable on the mesh, and the variables that live in it."""

import functools
import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import host_meshes, messages, transfer
from tfshard.layouts import boxes
from tfshard.layouts.axes import axis_sizes
from tfshard.storage import barrier, initial_values, left_buffers, steps
from tfshard.storage.formats import Flat, StorageFormat
from tfshard.storage.graph_edits import OpInput, adding_to
from tfshard.storage.initial_values import HostValue, InitialValue
from tfshard.storage.steps import Gathered
from tfshard.storage.writes import Recorded

# A slot of a variable: the id of its optimizer, and its number among that optimizer's slots of the variable.
SlotKey: TypeAlias = tuple[int, int]

# DTensor compiles a program for each name of a handle, and keeps it: 0.2 MiB and 10 ms. Therefore all handles share one
# name. The slash at the end keeps TensorFlow from putting the name into the name scope of a layer. Messages name a
# variable by its path.
_HANDLE_NAME = "storage/"


class Storage:
    """A DTensor variable that holds one variable, or a group of them.

    Inside a step, the value is the value that the step has recorded. The step carries out writes.

    Attributes:
        format: How it keeps its members.
        mesh: The mesh of steps. The buffer may be stored on another mesh (`StorageFormat.stored_on`).
        members: The variables in the storage, by number.
        root: The storage of the parameters of these slots. For parameters, the storage itself.
        slots: The storages of slots in the same form, by optimizer and number of the slot.
        times_set: How often code outside of steps set the storage from the host.
    """

    def __init__(
        self,
        format: StorageFormat,
        *,
        name: str,
        trainable: bool = False,
        options: Mapping[str, Any] | None = None,
    ):
        self.format = format
        self.mesh = format.mesh
        self.name = name
        self.root = self
        self.slots: weakref.WeakValueDictionary[SlotKey, Storage] = weakref.WeakValueDictionary()
        self._trainable = trainable and format.direct
        self._options = options or {}
        self._host: dict[int, HostValue] = {}
        self._checksums: dict[int, int | None] = {}
        self._buffer: dtensor.DVariable | None = None
        self.members: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
        # An eager step has read the storage, so a caller may ask for a gradient.
        self.read_by_eager_step = False
        self.times_set = 0
        # Full values that eager steps and graphs without a step have read, by graph and member. A tape or their graph
        # keeps them alive: a caller may ask for a gradient after the step.
        self._last_full: weakref.WeakValueDictionary[tuple[int, int], tf.Tensor] = weakref.WeakValueDictionary()

    @property
    def is_group(self) -> bool:
        return len(self.format.members) > 1

    @property
    def paths(self) -> list[str]:
        """The paths of the members."""
        return [variable.path for variable in self.members.values()]

    def slot_storage(self, key: SlotKey, format: StorageFormat, name: str) -> "Storage":
        """Return the storage of the slots `key` of this storage's variables. The first call makes it."""
        storage = self.slots.get(key)
        if storage is None:
            storage = Storage(format, name=name)
            storage.root = self
            self.slots[key] = storage
        return storage

    # --- the buffer on the mesh ------------------------------------------------------------------------

    def fill(self, member: int, value: HostValue) -> None:
        """Set a member from the host.

        `make_if_filled` or the first use makes the buffer, from the values filled until then. Once the buffer exists,
        each device's shard is written separately, after the old shard is freed.
        """
        self._checksums[member] = initial_values.checksum(value)
        self.times_set += 1
        if self._buffer is None:
            self._host[member] = value
            return
        values: dict[int, HostValue] = {member: value}
        if self.is_group:
            stored = transfer.mesh_to_host(self.buffer.value())
            others = (i for i in range(len(self.format.members)) if i != member)
            values |= {i: self.format.unpack_host(stored, i) for i in others}
        shards = self._host_shards(values)
        for _, handle in self.handles:
            _empty(handle, self.buffer.dtype, self.buffer.shape.rank)
            with tf.device(handle.device):
                tf.raw_ops.AssignVariableOp(resource=handle, value=next(shards))

    def set_again(self, member: int, value: np.ndarray) -> None:
        """Call `fill` with an array that the caller goes on using.

        The buffer of waiting members is made when the last member is set. A loader therefore reads a file from its
        begin to its end, and a group is packed once.
        """
        self.fill(member, value)
        if self._buffer is None:
            filled = len(self._host) == len(self.format.members)
            if filled and not any(isinstance(each, InitialValue) for each in self._host.values()):
                self.make_if_filled()
            else:
                self._host[member] = np.array(value)

    def make_if_filled(self) -> None:
        """Make the buffer if all members have a value: nothing waits on the host any more."""
        if self._buffer is None and len(self._host) == len(self.format.members):
            _ = self.buffer

    @property
    def waits(self) -> bool:
        """True if the buffer does not exist yet."""
        return self._buffer is None

    def pop_waiting(self, member: int) -> HostValue | None:
        """Remove and return the value of a member that waits on the host; None if it is in the buffer."""
        return self._host.pop(member, None)

    def pop_checksum(self, member: int) -> int | None:
        """Return the checksum of the value that last filled a member in a launched run. None if a caller has already
        asked for it."""
        return self._checksums.pop(member, None)

    @property
    def buffer(self) -> dtensor.DVariable:
        """The DTensor variable."""
        if self._buffer is None:
            with tf.init_scope():
                value = self._from_host(self._host)
                zeros = self._zeros_of_small(value)
                self._buffer = dtensor.DVariable(
                    lambda: value if zeros is None else zeros,
                    trainable=self._trainable,
                    name=_HANDLE_NAME,
                    **self._options,
                )
                if zeros is not None:
                    self._set_shards(value)
            self._host.clear()
        return self._buffer

    def _zeros_of_small(self, value: tf.Tensor) -> tf.Tensor | None:
        """Return zeros in place of a value that DTensor would take for a constant when it assigns the value.

        DTensor would compile the assignment again for each value, such as the seed of each layer that draws random
        numbers, and keep the program (`_set_shards`). Returns None for other values.
        """
        layout = transfer.layout(self.format.storage, self.format.stored_on)
        if layout.mesh.is_remote() or any(self.format.storage) or not _private.is_small_constant(value):
            return None
        shards = messages.unpacked(value)
        if not np.any(shards[0].numpy()):
            return None  # One program serves all zeros.
        return dtensor.pack([tf.zeros_like(shard) for shard in shards], layout)

    def _from_host(self, values: Mapping[int, HostValue]) -> tf.Tensor:
        layout = transfer.layout(self.format.storage, self.format.stored_on)
        if layout.mesh.is_remote():
            zeros = {member: np.broadcast_to(np.zeros((), each.dtype), each.shape) for member, each in values.items()}
            like = self.format.pack_host(zeros)
            return messages.placeholder(like.shape, tf.as_dtype(like.dtype), layout)
        return dtensor.pack(list(self._host_shards(values)), layout)

    def _host_shards(self, values: Mapping[int, HostValue]) -> Iterator[tf.Tensor]:
        return transfer.host_shards(self.format.pack_host(values), self.format.storage, self.format.stored_on)

    def host_value(self, member: int) -> np.ndarray:
        """Return the full value of a member on the host. Eager only."""
        return self.format.unpack_host(transfer.mesh_to_host(self.buffer.value()), member)

    def local_tensors(self) -> list[tuple[dict[str, int], tf.Tensor]]:
        """Return the local shard of each device of this client, with its location (axis name to index). Eager only."""
        shards = messages.unpacked(self.buffer.value())
        return list(zip(self.format.stored_on.local_device_locations(), shards, strict=True))

    def local_copies(self, *, share_equal: bool = False) -> list[np.ndarray]:
        """Return copies of this client's local shards on the host, for `set_local`. Eager only.

        Args:
            share_equal: True to copy the shard of the first device for all devices that should hold the same shard.
        """
        if not share_equal:
            return [np.array(shard) for _, shard in self.local_tensors()]
        first: dict[tuple[int, ...], np.ndarray] = {}
        found = []
        for location, shard in self.local_tensors():
            part = boxes.part(self.format.storage, boxes.in_replica(location, self.format.mesh_axes))
            if part not in first:
                first[part] = np.array(shard)
            found.append(first[part])
        return found

    @functools.cached_property
    def handles(self) -> list[tuple[dict[str, int], tf.Tensor]]:
        """The resource of each local shard of this client, with its location. The property always returns the same
        objects: TensorFlow orders the reads and writes of a function by them."""
        with tf.init_scope():
            handles = [] if self.format.stored_on.is_remote() else dtensor.unpack(self.buffer.handle)
        for handle in handles:
            _private.describe_resource(handle, self.shard_shape, self.buffer.dtype)
        return list(zip(self.format.stored_on.local_device_locations(), handles, strict=True))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the shard that each device stores."""
        return transfer.shard_shape(self.format.shape, transfer.layout(self.format.storage, self.format.stored_on))

    def set_local(self, shards: list[np.ndarray]) -> None:
        """Set the local shards of this client's devices, in the order of `local_tensors`. Eager only."""
        self.times_set += 1
        if shards:
            value = dtensor.pack(
                [tf.constant(shard) for shard in shards], transfer.layout(self.format.storage, self.format.stored_on)
            )
            self._set_shards(value)

    def _set_shards(self, value: tf.Tensor) -> None:
        """Assign each device its shard of a value in the storage layout. Eager only.

        An operation on the mesh would not do: DTensor compiles an eager operation again for each value of a small
        operand (ExecutableManager::ShouldFoldInput), and never frees a compiled program.
        """
        for (_, handle), shard in zip(self.handles, messages.unpacked(value), strict=True):
            with tf.device(handle.device):
                tf.raw_ops.AssignVariableOp(resource=handle, value=shard)

    def equalize(self) -> bool:
        """Copy the first device's shard to the devices of this client that should hold the same shard. Eager only.

        Returns:
            True if the shards differed.
        """
        first: dict[tuple[int, ...], np.ndarray] = {}
        shards, differed = [], False
        for location, tensor in self.local_tensors():
            part = boxes.part(self.format.storage, boxes.in_replica(location, self.format.mesh_axes))
            shard = tensor.numpy()
            shards.append(first.setdefault(part, shard))
            differed |= shard.tobytes() != shards[-1].tobytes()
        if differed:
            self.set_local(shards)
        return differed

    def write(self, recorded: Recorded) -> None:
        """Assign the recorded buffer now. For steps and eager code."""
        self.write_stored(self.as_stored(recorded))

    def as_stored(self, recorded: Recorded) -> tf.Tensor:
        """Return the recorded buffer, as it will be stored."""
        return self.format.to_stored(self._recorded_buffer(recorded))

    def from_stored(self, value: tf.Tensor) -> tf.Tensor:
        """Return a result of `as_stored` as a buffer that a step can record."""
        return self.format.for_update(value) if self.format.is_encoded else value

    def write_stored(self, value: tf.Tensor, takers: Sequence[OpInput] = ()) -> None:
        """Assign a result of `as_stored` to the buffer. In a graph, `takers` then take it from the buffer."""
        if self.is_stored_on_host:
            value = host_meshes.copied(value, self.format.storage, self.mesh, self.format.stored_on)
        if _private.is_eager():
            self._set_shards(value)
            return
        if not takers:
            self.buffer.assign(value, read_value=False)
            return
        read = barrier.write_then_read(self.buffer, value)
        for taker in takers:
            taker.replace(read)

    # --- values ------------------------------------------------------------------------------------------

    def recorded(self) -> Recorded | None:
        """Return the write that the open step has recorded for this storage."""
        step = steps.current()
        return None if step is None else step.writes.find(self)

    def update_value(self) -> tf.Tensor:
        """Return the buffer in the update layout.

        A value that an update has just written is not rounded to the storage dtype: the update continues with it.
        """
        return self.in_update(self.recorded())

    def in_update(self, recorded: Recorded | None) -> tf.Tensor:
        """Return the recorded buffer, or else the stored buffer, in the update layout."""
        if recorded is not None:
            return self.format.in_update(self._recorded_buffer(recorded))
        with steps.reading_scope():
            stored, step, update = self._stored(for_update=True), steps.current(), steps.open_update()
            gradient = None if update is None else update.gradient
            if step is not None and self._is_sliced_for_update and step.note_slice(stored, gradient):
                # Pinned, or DTensor would slice in front of the barrier.
                stored = transfer.relayout(stored, self.format.storage, self.mesh)
            return self.format.for_update(stored)

    def handed_on(self, recorded: Recorded | None) -> tf.Tensor:
        """Return the same buffer, as a branch returns it and a microbatch passes it on.

        The storage layout avoids a gather where nothing was written. An encoded buffer stays in the update layout.
        """
        if self.format.is_encoded or self.is_stored_on_host:
            return self.in_update(recorded)
        if recorded is not None:
            return self.as_stored(recorded)
        with steps.reading_scope():
            return self.format.to_stored(self._stored())

    def read_stored(self) -> tf.Tensor:
        """Return the stored buffer, before a gather."""
        stored, step = self._stored(), steps.current()
        return stored if step is None or self.is_stored_on_host else step.note_stored_read(self, stored)

    @property
    def is_stored_on_host(self) -> bool:
        """True if the buffer is stored on the host mesh, and copied to the devices for each step that reads it."""
        return self.format.stored_on is not self.mesh

    @property
    def is_stored_as_updated(self) -> bool:
        """True if the buffer is stored on the devices of the update, in the update layout and dtype."""
        return self.format.storage == self.format.update and not self.format.is_encoded and not self.is_stored_on_host

    @property
    def _is_sliced_for_update(self) -> bool:
        """True if each device stores the full buffer and updates a slice of it."""
        return self.format.storage != self.format.update and not self.is_stored_on_host

    @property
    def updated_bytes(self) -> int:
        """The bytes of the buffer on a device, in the update layout."""
        sizes = axis_sizes(self.mesh)
        shares = math.prod(sizes[axis] for axis in self.format.update if axis is not None)
        itemsize: int = self.buffer.dtype.size
        return math.prod(self.format.shape) * itemsize // shares

    def _stored(self, *, for_update: bool = False) -> tf.Tensor:
        """Return the stored buffer on the mesh of steps. An offloaded buffer comes from the host once in a step.

        Args:
            for_update: True if the copy from the host waits for the gradient of the open update. A buffer that is
                gathered must not wait: DTensor would merge an all-reduce of the gather with the all-reduce of the
                gradient.
        """
        if not self.is_stored_on_host:
            return self.buffer.value()
        key, cache = (self, "stored", for_update), self._cache(steps.here())
        if key not in cache:
            stored, step, host = self.buffer.value(), steps.current(), self.format.stored_on
            update = steps.open_update()
            if step is not None and update is not None and for_update:
                stored = step.wait_on_host(stored, update.gradient, update.axes, self.mesh, host)
            cache[key] = (host_meshes.copied(stored, self.format.storage, host, self.mesh), None)
        return cache[key][0]

    def _recorded_buffer(self, recorded: Recorded) -> tf.Tensor:
        """Return the recorded buffer, with the values that were written to members packed into it."""
        if not recorded.written:
            assert recorded.base is not None
            return recorded.base
        return self.format.pack(recorded.written, functools.partial(self._member, recorded))

    def value_before_writes(self, member: int) -> tf.Tensor:
        """Return the value of a member at the begin of the open step."""
        return self._member(None, member)

    def full_value(self, member: int) -> tf.Tensor:
        """Return the full value of a member. The tensor is the same object until the next write.

        A tape differentiates by this tensor (`ShardedVariable.handle`), so the tape need not have watched the gather.
        """
        graph, step = steps.here(), steps.current()
        key = (id(graph), member)
        scratch = graph is not None and step is None  # Keras learns shapes in this graph, and never runs it.
        if (scratch or steps.is_outside()) and key in self._last_full:
            return self._last_full[key]
        value = self._member(self.recorded(), member)
        if graph is None and step is not None:
            self.read_by_eager_step = True
        if scratch or (graph is None and step is not None):
            self._last_full[key] = value
        return value

    def full_span(self, start: int, end: int) -> tf.Tensor:
        """Return elements `start` to `end` of a group's gathered buffer. The step has written no single member."""
        recorded = self.recorded()
        assert isinstance(self.format, Flat), "The caller asks for the places of members."
        assert recorded is None or not recorded.written, "The caller checks it."
        graph = self._graph_of(recorded)
        with adding_to(graph):
            return self.format.span(self._gathered(recorded, graph), start, end)

    def invalidate(self, what: str) -> None:
        """Free the memory of a storage that its variables have left. A function that still reads the storage fails.

        Args:
            what: The variables, for the error of such a function.
        """
        if self._buffer is not None:
            left_buffers.note(self._buffer.handle, what)
            for _, handle in self.handles:
                invalidate(handle, self._buffer.dtype, self._buffer.shape, what)

    def _member(self, recorded: Recorded | None, member: int) -> tf.Tensor:
        if recorded is not None and member in recorded.written:
            return self._written(recorded.written[member], member)
        graph = self._graph_of(recorded)
        cache = self._cache(graph)
        # Each write to a member changes the id of `recorded`. The values of the other members change with the base
        # only.
        base = None if recorded is None else recorded.base
        key = (self, None if base is None else id(base), member, self.codes(recorded))
        if key not in cache:
            with adding_to(graph):
                cache[key] = (self.format.read(self._gathered(recorded, graph), member), base)
        return cache[key][0]

    def _gathered(self, recorded: Recorded | None, graph: tf.Graph | None) -> tf.Tensor:
        """Return the tensor from which members are read (`StorageFormat.gather`)."""
        cache, base = self._cache(graph), None if recorded is None else recorded.base
        codes = self.codes(recorded)
        key = (self, None if base is None else id(base), codes)
        if key not in cache:
            stored = self.read_stored() if base is None else self.format.encode(base)
            cache[key] = (self.format.gather(stored, codes), base)
        return cache[key][0]

    def codes(self, recorded: Recorded | None) -> str | None:
        """Return the dtype of codes in which the current context gathers the buffer; None for an exact gather.

        A buffer that the step has written is gathered exactly. Keras's constraints, for example, read the buffer to
        write it again.
        """
        is_written = recorded is not None and recorded.base is not None
        return None if is_written or not steps.rounds_gathers() else self.format.codes

    def is_read_rounded(self, member: int) -> bool:
        """Return whether the current context rounds a read of a member."""
        recorded = self.recorded()
        is_written = recorded is not None and member in recorded.written
        return not is_written and self.codes(recorded) is not None

    def _written(self, value: tf.Tensor, member: int) -> tf.Tensor:
        """Return the value that was written to a member, as a read gives it. No gradient flows back through an
        assignment."""
        graph = None if _private.is_eager() else value.graph
        cache = self._cache(graph)
        key = (self, member, id(value))
        if key not in cache:
            with adding_to(graph):
                cache[key] = (transfer.relayout(value, self.format.members[member].compute, self.mesh), value)
        return cache[key][0]

    def _graph_of(self, recorded: Recorded | None) -> tf.Graph | None:
        """Return the outermost graph in which the buffer's value is known; None in eager code."""
        if _private.is_eager():
            return None
        if recorded is not None and recorded.base is not None:
            return recorded.base.graph
        step = steps.current()
        return tf.compat.v1.get_default_graph() if step is None else step.graph

    @staticmethod
    def _cache(graph: tf.Graph | None) -> Gathered:
        step = steps.current()
        return {} if step is None else step.reads.gathered(graph)


def invalidate(handle: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape, what: str) -> None:
    """Leave a TensorFlow variable with a few elements, in a shape that does not fit its old shape. A read by mistake
    then fails instead of returning an old value. A scalar keeps its value. Functions that read it are refused.

    The variable keeps some elements: TensorFlow's collectives on CPUs read beyond a tensor without elements.

    Args:
        handle: The resource of the variable.
        dtype: The dtype of the variable.
        shape: The old shape.
        what: The variables that left it, for the error.
    """
    left_buffers.note(handle, what)
    # Sizes that no device's shard has.
    _set_zeros(handle, dtype, [next(n for n in itertools.count(2) if (size or 1) % n) for size in shape])


def _empty(handle: tf.Tensor, dtype: tf.DType, rank: int) -> None:
    """Free the memory of a variable that gets another value at once. A scalar keeps its value."""
    _set_zeros(handle, dtype, [0] * rank)


def _set_zeros(handle: tf.Tensor, dtype: tf.DType, shape: list[int]) -> None:
    if shape:
        with tf.device(handle.device):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape, dtype), validate_shape=False)
