"""Access: how a variable is read and written in the current context.

Each read or write of a variable goes to the access object of the current context. `current` chooses the object:

    | context                                             | access             | a read gives                          |
    |-----------------------------------------------------|--------------------|---------------------------------------|
    | eager code outside of steps and updates             | `OnHost`           | a copy on the host                    |
    | a traced function that no strategy runs             | `InPlainFunction`  | an ordinary tensor on one device      |
    | a traced function that runs steps, between them     | `AroundSteps`      | the full value on the mesh            |
    | a step, or a graph where Keras only learns shapes   | `InStep`           | the full value in the compute layout  |
    | a block that is compiled (compiled_blocks.py)       | `InLocalTrace`     | a placeholder in the block's graph    |
    | an optimizer's update                               | `InUpdate`         | the value in the update layout, or,   |
    |                                                     |                    | if a buffer packs it, the full value  |
    | an update of a packed buffer as one tensor          | `InPackedUpdate`   | the same, for its members and slots   |
    | an update of a part of a variable                   | `InPartialUpdate`  | the part, also of the slots           |
    | an update that is compiled (compiled_updates.py)    | `InLocalUpdate`    | a placeholder in the update's graph   |

Branches of a `tf.cond`, called functions and recomputed blocks have no access object. In a step, the write log
(write_log.py) follows the graph that is being built, and blocks only mark operations.
"""

from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import process_lock, transfer
from tfshard.layouts.variable_kind import PartialKind
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.storage import outside, rounded_writes, steps
from tfshard.storage.step_record import PartialUpdate
from tfshard.storage.steps import Step
from tfshard.storage.storage import Storage
from tfshard.storage.writes import Recorded


class VariableView(outside.View, Protocol):
    """A `ShardedVariable`, as far as its access knows it."""

    layout: VariableLayout
    mesh: dtensor.Mesh

    @property
    def dtype(self) -> tf.DType: ...

    def numpy(self) -> np.ndarray: ...

    def value(self) -> tf.Tensor: ...

    def assign(self, value: Any) -> Any: ...

    def set_from_host(self, host: np.ndarray) -> None:
        """Set the full value from the host."""

    def to_tensor(self, value: Any) -> tf.Tensor:
        """Return a value to assign as a tensor of the variable's dtype."""

    def check_shape(self, shape: Any, expected: tuple[int, ...] | None = None) -> None:
        """Raise `ValueError` if a value to assign does not have the variable's shape."""

    def full(self) -> tf.Tensor:
        """Return the full value in the compute layout, as the current graph sees it."""

    def gradient_source(self) -> tf.Tensor:
        """Return the tensor or handle that gradients are taken with respect to, if no traced step has read it."""


class Access(Protocol):
    """Reads and writes variables in one context."""

    def read(self, variable: VariableView) -> tf.Tensor:
        """Return the value."""

    def write(self, variable: VariableView, value: Any) -> None:
        """Set or record the value."""

    def shape(self, variable: VariableView) -> tuple[int, ...]:
        """Return the shape of reads. In an update of a part: the full shape, since the size of the part is unknown."""

    def handle(self, variable: VariableView) -> tf.Tensor:
        """Return the tensor or handle that gradient tapes differentiate with respect to."""


def current() -> Access:
    """Return the access of the current context."""
    step, update, local = steps.current(), steps.open_update(), steps.context().local
    if local is not None:
        return InLocalTrace(step, local) if update is None else InLocalUpdate(step, local)
    if step is None and _private.is_eager() and update is None:
        return OnHost()
    if outside.is_here():
        return AroundSteps() if outside.is_around_steps() else InPlainFunction()
    if update is None:
        return InStep(step)
    if update.part is not None:
        return InPartialUpdate(step, update.part)
    if update.packed is not None:
        return InPackedUpdate(step, update.packed)
    return InUpdate(step)


class OnHost:
    """Eager code outside of steps: reads copy to the host, and writes take effect at once."""

    def read(self, variable: VariableView) -> tf.Tensor:
        records = _private.could_record()
        with _private.stop_recording():
            value = tf.constant(variable.numpy())
        return outside.watched(variable, value) if records else value

    def write(self, variable: VariableView, value: Any) -> None:
        host = transfer.host_view(value).astype(variable.dtype.as_numpy_dtype, copy=False)
        variable.check_shape(host.shape)
        outside.warn_of_update(variable)
        with process_lock.held():
            variable.set_from_host(host)

    def shape(self, variable: VariableView) -> tuple[int, ...]:
        return variable.layout.spec.shape

    def handle(self, variable: VariableView) -> tf.Tensor:
        return variable.gradient_source() if variable.storage.read_by_eager_step else variable.outside_handle


class InPlainFunction:
    """A traced function that no strategy runs (outside.py)."""

    def read(self, variable: VariableView) -> tf.Tensor:
        return outside.watched(variable, outside.read(variable))

    def write(self, variable: VariableView, value: Any) -> None:
        tensor = variable.to_tensor(value)
        variable.check_shape(tensor.shape)
        outside.write(variable, tensor)

    def shape(self, variable: VariableView) -> tuple[int, ...]:
        return variable.layout.spec.shape

    def handle(self, variable: VariableView) -> tf.Tensor:
        return variable.outside_handle


class AroundSteps(InPlainFunction):
    """A traced function that runs steps: each read and each write between them is a separate step."""

    def read(self, variable: VariableView) -> tf.Tensor:
        with steps.step_scope(reads_only=True):
            return transfer.replicate(variable.value(), variable.mesh)

    def write(self, variable: VariableView, value: Any) -> None:
        tensor = variable.to_tensor(value)
        variable.check_shape(tensor.shape)
        with steps.step_scope():
            variable.assign(tensor)


class InStep:
    """A step, traced or eager. Without a step: a graph that is never run, or eager code inside an update."""

    def __init__(self, step: Step | None):
        self._step = step

    def read(self, variable: VariableView) -> tf.Tensor:
        if self._step is not None:
            self._step.check_mesh(variable)
            self._step.check_read(variable)
        if variable.storage.waits and _private.in_symbolic_scope():
            # Keras learns shapes there. The graph is never run.
            return tf.compat.v1.placeholder(variable.dtype, self.shape(variable))
        kind = variable.layout.partial_kind
        return self._read(variable) if kind is None else self._read_of_kind(variable, kind)

    def _read(self, variable: VariableView) -> tf.Tensor:
        value = variable.full()
        if self._step is not None and variable.storage.is_read_rounded(variable.member):
            self._step.reads.note_rounded(variable, value)
        return value

    def _read_of_kind(self, variable: VariableView, kind: PartialKind) -> tf.Tensor:
        if self._step is None:
            # Keras learns shapes. The graph is never run.
            return tf.compat.v1.placeholder(variable.dtype, self.shape(variable))
        return self._step.record.state_of(kind).read(variable)

    def write(self, variable: VariableView, value: Any) -> None:
        if self._step is not None:
            self._step.check_mesh(variable)
        tensor = variable.to_tensor(value)
        kind = variable.layout.partial_kind
        if kind is None:
            self._write(variable, tensor)
        else:
            self._write_of_kind(variable, kind, tensor)

    def _write(self, variable: VariableView, tensor: tf.Tensor) -> None:
        variable.check_shape(tensor.shape)
        if self._step is None:
            variable.storage.write(Recorded(base=None, written={variable.member: tensor}))
        else:
            exact = rounded_writes.exact_value(variable, tensor)
            self._step.writes.record_member(variable.storage, variable.member, exact)

    def _write_of_kind(self, variable: VariableView, kind: PartialKind, tensor: tf.Tensor) -> None:
        kind.assign(variable, tensor)

    def shape(self, variable: VariableView) -> tuple[int, ...]:
        return variable.layout.spec.shape

    def handle(self, variable: VariableView) -> tf.Tensor:
        step, kind = self._step, variable.layout.partial_kind
        if step is None:
            return variable.gradient_source()
        read = step.reads.last(variable)
        if read is not None:
            return read
        if kind is not None and not _private.is_eager():
            return step.record.state_of(kind).gradient_source(variable)
        source = step.reads.source(variable)
        if source is None:
            source = variable.gradient_source()
            if steps.here() is step.graph is not None and variable.storage.format.packed:
                # A tape watches it, perhaps before a compiled block reads the variable in a span.
                step.reads.set_source(variable, source)
        return source


class InLocalTrace(InStep):
    """A block of a step that is traced with the local shapes of a device (operations/compiled_blocks.py)."""

    def __init__(self, step: Step | None, local: steps.LocalVariables):
        super().__init__(step)
        self._local = local

    def read(self, variable: VariableView) -> tf.Tensor:
        return self._local.read(variable)

    def write(self, variable: VariableView, value: Any) -> None:
        tensor = variable.to_tensor(value)
        variable.check_shape(tensor.shape)
        self._local.write(variable, tensor)


class InUpdate(InStep):
    """An optimizer's update: variables are read and written in the update layout, unless a buffer packs them."""

    def is_buffer(self, storage: Storage) -> bool:
        """Return whether a variable of the storage has the role of the buffer."""
        return not storage.format.packed

    def _read(self, variable: VariableView) -> tf.Tensor:
        if self.is_buffer(variable.storage):
            return variable.storage.update_value()
        return super()._read(variable)

    def _write(self, variable: VariableView, tensor: tf.Tensor) -> None:
        storage = variable.storage
        if not (storage.format.packed and self.is_buffer(storage)):
            super()._write(variable, tensor)
            return
        variable.check_shape(tensor.shape, variable.layout.update_shape)
        if self._step is None:
            storage.write(Recorded(base=tensor, written={}))
        else:
            self._step.writes.record_base(storage, tensor)

    def shape(self, variable: VariableView) -> tuple[int, ...]:
        # TensorFlow asks for it in `tf.ones_like(variable)`. An update of the buffer reads the buffer.
        layout = variable.layout
        return layout.update_shape if self.is_buffer(variable.storage) else layout.spec.shape


class InPackedUpdate(InUpdate):
    """An update of a packed buffer as one tensor: one member has the role of the buffer, and its slots have the roles
    of the slots' buffers."""

    def __init__(self, step: Step | None, packed: Any):
        super().__init__(step)
        self._packed = packed

    def is_buffer(self, storage: Storage) -> bool:
        return super().is_buffer(storage) or self._packed in (storage, storage.root)


class InPartialUpdate(InUpdate):
    """An update of a part of a variable of a kind: the variable and its slots stand for the part."""

    def __init__(self, step: Step | None, part: PartialUpdate):
        super().__init__(step)
        self._part = part

    def _read_of_kind(self, variable: VariableView, kind: PartialKind) -> tf.Tensor:
        del kind
        return self._part.value(variable.storage)

    def _write_of_kind(self, variable: VariableView, kind: PartialKind, tensor: tf.Tensor) -> None:
        del kind
        self._part.record(variable.storage, tensor)


class InLocalUpdate(InLocalTrace):
    """An optimizer's update that is traced with the local shapes of a device (operations/compiled_updates.py)."""

    def write(self, variable: VariableView, value: Any) -> None:
        self._local.write(variable, variable.to_tensor(value))

    def shape(self, variable: VariableView) -> tuple[int, ...]:
        # TensorFlow asks for it in `tf.ones_like(variable)`.
        return tuple(self._local.read(variable).shape)
