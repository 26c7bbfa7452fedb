"""Compiled updates: each device runs an optimizer's update of a variable, or of a group, as one XLA program.

Keras's optimizers update by twenty or more small operations for each variable. The update of a buffer is traced with
the local shapes of one device, and proved to be elementwise: then each device computes its local shard of the new
values from its local shards of the gradient, the parameter and the slots. DTensor leaves the operation that runs the
program as it is, and nothing is sent.

Single numbers, such as the learning rate, the number of the step and the scale of the loss, are inputs of the program.
Everything around the update stays in the step: the reduction and clipping of gradients, the encoding of slots, and
masks of groups whose members are not updated alike.
"""

import collections
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.graph import dim_rules
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import programs
from tfshard.operations.programs import Program
from tfshard.storage import access, gradient, steps
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledUpdate:
    """How the update of a variable, or of a group, runs.

    Attributes:
        name: The path of the variable, or of the first variable of the group.
        is_compiled: True if it runs as XLA programs.
        reason: Why it does not; empty otherwise.
    """

    name: str
    is_compiled: bool
    reason: str


class _NotLocalError(Exception):
    """An update cannot be proved to be elementwise. The message is the reason."""


# The reason why the last traced update of each storage is not compiled, by update function; empty for compiled updates.
_Reasons = weakref.WeakKeyDictionary[Storage, dict[str, str]]
# The optimizers with compiled updates.
_chosen: _private.WeakIdentityDict[keras.optimizers.Optimizer, _Reasons] = _private.WeakIdentityDict()


def choose(optimizer: keras.optimizers.Optimizer | None, *, is_compiled: bool) -> None:
    """Compile the updates of an optimizer and of the optimizers inside it, or stop to compile them."""
    for each in _private.optimizer_chain(optimizer):
        if is_compiled:
            _chosen.setdefault(each, weakref.WeakKeyDictionary())
        else:
            _chosen.pop(each, None)


def compiled_updates(optimizer: keras.optimizers.Optimizer | None) -> list[CompiledUpdate]:
    """Return how the updates of an optimizer ran in the last traced step, one for each variable or group."""
    found = []
    for each in _private.optimizer_chain(optimizer):
        for storage, reasons in (_chosen.get(each) or {}).items():
            reason = next(filter(None, reasons.values()), "")
            paths = storage.paths
            found.append(
                CompiledUpdate(name=paths[0] if paths else storage.name, is_compiled=not reason, reason=reason)
            )
    return found


def run(
    optimizer: keras.optimizers.Optimizer | None,
    function: Callable[..., Any],
    variable: ShardedVariable,
    args: Sequence[Any],
) -> Any:
    """Run an update, as one program if the optimizer has compiled updates. Call this in the scope of the update.

    Args:
        optimizer: The optimizer.
        function: Updates the variable: `function(variable, *args)`.
        variable: The variable. In an update of a packed buffer, it stands for the buffer.
        args: The gradient, and more arguments. Tensors of the variable's shape are in its update layout.
    """
    step, reasons = steps.current(), None if optimizer is None else _chosen.get(optimizer)
    if reasons is None or step is None or not step.writes.is_recorded_in(steps.here()):
        return function(variable, *args)
    noted = reasons.setdefault(variable.storage, {})
    name = getattr(function, "__name__", "")
    try:
        if _private.could_record():
            raise _NotLocalError("a gradient tape records it")
        update = _TracedUpdate(function, variable, args)
        program = update.program()
    except _NotLocalError as error:
        noted[name] = str(error)
        return function(variable, *args)
    noted[name] = ""
    return update.run(program)


class _BufferPlaceholders:
    """The buffers that an update reads and writes while it is traced (`steps.LocalVariables`).

    Args:
        scope: The access of the update.
        shape_of: Returns the shape of the placeholder for a variable.

    Attributes:
        reads: The variable that stands for each buffer that was read, and the placeholder.
        writes: The variable that stands for each buffer that was written, and the new value.
    """

    def __init__(self, scope: access.InUpdate, shape_of: Callable[[ShardedVariable], tuple[int, ...]]):
        self._scope, self._shape_of = scope, shape_of
        self.reads: dict[Storage, tuple[ShardedVariable, tf.Tensor]] = {}
        self.writes: dict[Storage, tuple[ShardedVariable, tf.Tensor]] = {}

    def read(self, variable: Any) -> tf.Tensor:
        storage = self._buffer_of(variable)
        if storage in self.writes:
            return self.writes[storage][1]
        if storage not in self.reads:
            self.reads[storage] = variable, tf.compat.v1.placeholder(variable.dtype, self._shape_of(variable))
        return self.reads[storage][1]

    def write(self, variable: Any, value: tf.Tensor) -> None:
        storage, shape = self._buffer_of(variable), self._shape_of(variable)
        if tuple(value.shape) != shape:
            raise _NotLocalError(f"it assigns a tensor of another shape to variable '{variable.path}'")
        self.writes[storage] = variable, value

    def _buffer_of(self, variable: ShardedVariable) -> Storage:
        if variable.layout.kind is not None:
            raise _NotLocalError(f"variable '{variable.path}' is stored in rows of a table")
        if not self._scope.is_buffer(variable.storage):
            raise _NotLocalError(f"it needs variable '{variable.path}' in full")
        return variable.storage


@dataclasses.dataclass(frozen=True, eq=False)
class _Trace:
    """A traced update.

    Attributes:
        args: The number of each tensor among the arguments, and its placeholder.
        buffers: The buffers.
        captured: Single numbers of the step that the update uses, each with its placeholder.
        result: What the update returned.
        operations: The operations.
    """

    args: list[tuple[int, tf.Tensor]]
    buffers: _BufferPlaceholders
    captured: list[tuple[tf.Tensor, tf.Tensor]]
    result: Any
    operations: list[tf.Operation]

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The placeholders of arguments, buffers and captured numbers, in this order."""
        read = [value for _, value in self.buffers.reads.values()]
        return [*(value for _, value in self.args), *read, *(inner for _, inner in self.captured)]

    @property
    def outputs(self) -> list[tf.Tensor]:
        """The new values."""
        return [value for _, value in self.buffers.writes.values()]

    @property
    def digest(self) -> bytes:
        return programs.digest(self.operations, [*self.outputs, *self.inputs])


# Programs by what they compute. A text is the reason why there is none.
_programs: collections.OrderedDict[Hashable, Program | str] = collections.OrderedDict()
_MOST = 256


class _TracedUpdate:
    """An update in a step that is traced.

    Args:
        function: The update function.
        variable: The variable.
        args: The other arguments.

    Raises:
        _NotLocalError: The update cannot be compiled.
    """

    def __init__(self, function: Callable[..., Any], variable: ShardedVariable, args: Sequence[Any]):
        self._function, self._variable, self._args = function, variable, args
        self._mesh: dtensor.Mesh = variable.mesh
        scope = access.current()
        assert isinstance(scope, access.InUpdate), "An update runs in its scope."
        self._scope = scope
        self._shape, self._axes = variable.layout.update_shape, variable.layout.update
        self._local_shape = transfer.shard_shape(self._shape, transfer.layout(self._axes, self._mesh))
        self._local = self._traced(self._local_shape)

    # --- traces

    def _traced(self, shape: tuple[int, ...]) -> _Trace:
        """Trace the update with another shape of the buffer."""
        graph = _private.func_graph(local_shards.NAME)
        buffers = _BufferPlaceholders(self._scope, lambda variable: self._placeholder_shape(variable, shape))
        args, placeholders = list(self._args), []
        with graph.as_default(), steps.changed(local=buffers):
            for number, each in enumerate(args):
                if isinstance(each, tf.__internal__.CompositeTensor) and not isinstance(each, (tf.Tensor, tf.Variable)):
                    raise _NotLocalError(f"it takes a {type(each).__name__}")
                if isinstance(each, tf.Tensor):
                    local = shape if self._is_sharded_argument(each) else tuple(each.shape)
                    args[number] = tf.compat.v1.placeholder(each.dtype, local)
                    placeholders.append((number, args[number]))
            result = self._function(self._variable, *args)
        if any(isinstance(each, tf.Tensor) for each in keras.tree.flatten(result)):
            raise _NotLocalError("it returns a tensor")
        for outer, _ in graph.captures:
            if outer.dtype in (tf.resource, tf.variant) or not _is_number(outer):
                raise _NotLocalError(f"it uses '{getattr(outer, 'name', outer.dtype.name)}' from outside of its call")
        if not buffers.writes:
            raise _NotLocalError("it changes nothing")
        return _Trace(placeholders, buffers, list(graph.captures), result, graph.get_operations())

    def _is_sharded_argument(self, tensor: tf.Tensor) -> bool:
        """Return whether an argument has an element for each element of the buffer. Others are single numbers."""
        if tuple(tensor.shape) == self._shape:
            return True
        if not _is_number(tensor):
            raise _NotLocalError(f"it takes an argument of shape={tensor.shape} for a buffer of shape={self._shape}")
        return False

    def _placeholder_shape(self, variable: ShardedVariable, shape: tuple[int, ...]) -> tuple[int, ...]:
        layout = variable.layout
        if (layout.update_shape, layout.update) == (self._shape, self._axes):
            return shape
        if any(layout.update) or any(size != 1 for size in layout.update_shape):
            raise _NotLocalError(f"variable '{variable.path}' has another layout")
        return layout.update_shape

    # --- the program

    def program(self) -> Program:
        """Return the program of the update. Updates with the same operations and local shapes share it.

        Raises:
            _NotLocalError: The update cannot be compiled.
        """
        full = self._local if self._local_shape == self._shape else self._traced(self._shape)
        key = self._local.digest, full.digest, self._mesh.device_type()
        if key not in _programs:
            try:
                _programs[key] = self._lowered(full)
            except _NotLocalError as error:
                _programs[key] = str(error)
            while len(_programs) > _MOST:
                _programs.popitem(last=False)
        _programs.move_to_end(key)
        found = _programs[key]
        if isinstance(found, str):
            raise _NotLocalError(found)
        return found

    def _lowered(self, full: _Trace) -> Program:
        local = self._local
        _check_elementwise(local, self._local_shape)
        _check_same(local, self._local_shape, full, self._shape)
        try:
            return programs.lower(local.inputs, local.outputs, self._mesh)
        except programs.NotCompiledError as error:
            raise _NotLocalError(f"XLA cannot compile it. {error}") from error

    # --- the step

    def run(self, program: Program) -> Any:
        """Add the program to the step. Returns what the update function returns."""
        local = self._local
        given = [self._args[number] for number, _ in local.args]
        given += [_value(variable) for variable, _ in local.buffers.reads.values()]
        given += [tf.convert_to_tensor(outer) for outer, _ in local.captured]
        results = program.call([self._entered(each) for each in given])
        for (variable, _), result in zip(local.buffers.writes.values(), results, strict=True):
            axes = self._axes if tuple(variable.layout.update_shape) == self._shape else variable.layout.update
            variable.assign(local_shards.from_local(result, axes, self._mesh, _every_index))
        return local.result

    def _entered(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return an operand of the program: a number, or a tensor in a parted layout, of which each device takes its
        local shard."""
        axes: Axes = self._axes if tuple(tensor.shape) == self._shape else (None,) * tensor.shape.rank
        if not any(axes):
            return _kept(steps.here(), ("replicated", tensor.ref()), lambda: self._pinned(tensor, axes))
        return local_shards.parted(self._pinned(tensor, axes), axes, self._mesh)

    def _pinned(self, tensor: tf.Tensor, axes: Axes) -> tf.Tensor:
        is_pinned = tensor.op.type == "Relayout" and gradient.layout_of(tensor) == axes
        return tensor if is_pinned else transfer.relayout(tensor, axes, self._mesh)


def _is_number(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.is_fully_defined() and tensor.shape.num_elements() == 1)


def _value(variable: ShardedVariable) -> tf.Tensor:
    """Return the value of a buffer in the step. The updates of a step share the read of a number."""
    step = steps.current()
    assert step is not None, "Updates are compiled in steps only."
    if any(size != 1 for size in variable.layout.update_shape) or variable.storage.recorded() is not None:
        return variable.value()
    return _kept(step.graph, ("number", variable.storage), variable.value)


def _every_index(size: int, axis: str, mesh: dtensor.Mesh) -> tf.Tensor:
    return _kept(steps.here(), ("every index", size, axis), lambda: local_shards.every_index(size, axis, mesh))


def _kept(graph: tf.Graph | None, key: Hashable, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return a tensor that the step has made in a graph before, or make it. The tensors end with the step."""
    step = steps.current()
    assert step is not None, "Updates are compiled in steps only."
    kept = step.reads.gathered(graph)
    if ("update", key) not in kept:
        kept["update", key] = make(), None
    return kept["update", key][0]


# --- the proof ---------------------------------------------------------------------------------------


def _check_elementwise(trace: _Trace, shape: tuple[int, ...]) -> None:
    """Check that elements of the buffer meet no other elements, and that all else are single numbers.

    Raises:
        _NotLocalError: An operation is not elementwise, or has side effects.
    """
    elements = {each.ref() for each in trace.inputs if tuple(each.shape) == shape}
    for operation in trace.operations:
        if _private.is_stateful(operation):
            raise _NotLocalError(f"{_described(operation)} has side effects")
        if not any(each.ref() in elements for each in operation.inputs):
            continue
        if not dim_rules.is_elementwise(operation):
            raise _NotLocalError(f"{_described(operation)} is not elementwise")
        for each in operation.inputs:
            if each.ref() not in elements and not _is_number(each) and _uniform(each) is None:
                raise _NotLocalError(f"{_described(operation)} takes a constant that differs between elements")
        for each in operation.outputs:
            if tuple(each.shape) != shape:
                raise _NotLocalError(f"the result of {_described(operation)} has another shape")
            elements.add(each.ref())
    for each in trace.outputs:
        if each.ref() not in elements and not _is_number(each) and _uniform(each) is None:
            raise _NotLocalError(f"its result '{each.name}' does not depend on the elements of the buffer")


def _check_same(local: _Trace, local_shape: tuple[int, ...], full: _Trace, full_shape: tuple[int, ...]) -> None:
    """Check that the update does the same with a local shard as with the full buffer.

    Raises:
        _NotLocalError: The update depends on the shape of the buffer.
    """
    if local is full:
        return
    first = [each for each in local.operations if not _is_constant(each)]
    second = [each for each in full.operations if not _is_constant(each)]
    partner: dict[Hashable, tf.Tensor] = {}

    def are_same(one: tf.Tensor, other: tf.Tensor) -> bool:
        if other.ref() in partner or not _is_constant(other.op):
            return partner.get(other.ref()) is one
        values = tf.get_static_value(one), tf.get_static_value(other)
        if all(each is not None for each in values) and np.array_equal(*values):
            return True
        uniform = _uniform(one), _uniform(other)
        shapes = tuple(one.shape), tuple(other.shape)
        return shapes == (local_shape, full_shape) and uniform[0] is not None and uniform[0] == uniform[1]

    same = len(first) == len(second)
    for one, other in zip(first, second, strict=False):
        same = same and one.type == other.type and len(one.inputs) == len(other.inputs)
        same = same and _attributes(one) == _attributes(other)
        same = same and all(are_same(a, b) for a, b in zip(one.inputs, other.inputs, strict=True))
        if not same:
            raise _NotLocalError(f"{_described(one)} depends on the shape of the buffer")
        partner |= {b.ref(): a for a, b in zip(one.outputs, other.outputs, strict=True)}
    pairs = [*zip(local.outputs, full.outputs, strict=False), *zip(local.inputs, full.inputs, strict=False)]
    counts = [(len(each.outputs), len(each.inputs)) for each in (local, full)]
    if not same or counts[0] != counts[1] or not all(are_same(a, b) for a, b in pairs):
        raise _NotLocalError("it depends on the shape of the buffer")


def _is_constant(operation: tf.Operation) -> bool:
    """Return whether an operation makes a constant. TensorFlow makes a `Fill` of a large one with equal elements."""
    return operation.type in ("Const", "Fill") and all(_is_constant(each.op) for each in operation.inputs)


def _uniform(tensor: tf.Tensor) -> Any:
    """Return the value of all elements of a constant; None for other tensors."""
    if tensor.op.type == "Fill":
        return _uniform(tensor.op.inputs[1])
    value = tf.get_static_value(tensor) if tensor.op.type == "Const" else None
    if value is None or not np.size(value):
        return None
    first = np.ravel(value)[0]
    return first if np.all(np.asarray(value) == first) else None


# Attributes that differ between equal operations.
_UNCOMPARED = frozenset(("_class", "_gradient_op_type", "_output_shapes", "shape"))


def _attributes(operation: tf.Operation) -> dict[str, bytes]:
    attributes = operation.node_def.attr
    return {
        name: attributes[name].SerializeToString(deterministic=True) for name in attributes if name not in _UNCOMPARED
    }


def _described(operation: tf.Operation) -> str:
    return f"operation '{operation.name}' ({operation.type})"
