"""Compiled updates: each device runs an optimizer's update of a variable, or of a group, as one XLA program.

Keras's optimizers update by twenty or more small operations for each variable. The update of a buffer is traced in a
graph of its own, and proved to be elementwise: then each device computes its local shard of the new values from its
local shards of the gradient, the parameter and the slots. The program is made of the same operations with the local
shapes. DTensor leaves the operation that runs the program as it is, and nothing is sent.

Single numbers, such as the learning rate, the number of the step and the scale of the loss, are inputs of the program.
Everything around the update stays in the step: the reduction and clipping of gradients, the encoding of slots, and
masks of groups whose members are not updated alike.
"""

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

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


# The reason why the update of each storage was not compiled in the last traced step; empty for compiled updates.
_Reasons: TypeAlias = weakref.WeakKeyDictionary[Storage, str]
# The optimizers with compiled updates. None for optimizers that had compiled updates before.
_chosen: _private.WeakIdentityDict[keras.optimizers.Optimizer, _Reasons | None] = _private.WeakIdentityDict()


def choose(optimizer: keras.optimizers.Optimizer | None, *, is_compiled: bool) -> None:
    """Compile the updates of an optimizer and of the optimizers inside it, or stop to compile them."""
    for each in _private.optimizer_chain(optimizer):
        if is_compiled and _chosen.get(each) is None:
            _chosen[each] = weakref.WeakKeyDictionary()
        elif not is_compiled and each in _chosen:
            _chosen[each] = None


def compiled_updates(optimizer: keras.optimizers.Optimizer | None) -> list[CompiledUpdate]:
    """Return how the updates of an optimizer ran in the last traced step, one for each variable or group."""
    found = []
    for each in _private.optimizer_chain(optimizer):
        for storage, reason in (_chosen.get(each) or {}).items():
            if storage.members:
                found.append(CompiledUpdate(name=storage.paths[0], is_compiled=not reason, reason=reason))
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
    has_gradient = bool(args) and isinstance(args[0], tf.Tensor)
    try:
        if _private.could_record():
            raise _NotLocalError("a gradient tape records it")
        update = _TracedUpdate(function, variable, args)
        program = update.program()
    except _NotLocalError as error:
        if has_gradient:
            reasons[variable.storage] = str(error)
        return function(variable, *args)
    if has_gradient:
        reasons[variable.storage] = ""
    return update.run(program)


class _BufferPlaceholders:
    """The buffers that an update reads and writes while it is traced (`steps.LocalVariables`).

    Args:
        scope: The access of the update.
        check: Raises `_NotLocalError` for a variable whose buffer the update cannot use.

    Attributes:
        reads: The variable that stands for each buffer that was read, and the placeholder.
        writes: The variable that stands for each buffer that was written, and the new value.
    """

    def __init__(self, scope: access.InUpdate, check: Callable[[ShardedVariable], object]):
        self._scope, self._check = scope, check
        self.reads: dict[Storage, tuple[ShardedVariable, tf.Tensor]] = {}
        self.writes: dict[Storage, tuple[ShardedVariable, tf.Tensor]] = {}

    def read(self, variable: Any) -> tf.Tensor:
        storage = self._buffer_of(variable)
        if storage in self.writes:
            return self.writes[storage][1]
        if storage not in self.reads:
            self.reads[storage] = variable, tf.compat.v1.placeholder(variable.dtype, variable.layout.update_shape)
        return self.reads[storage][1]

    def write(self, variable: Any, value: tf.Tensor) -> None:
        storage = self._buffer_of(variable)
        if tuple(value.shape) != tuple(variable.layout.update_shape):
            raise _NotLocalError(f"it assigns a tensor of another shape to variable '{variable.path}'")
        self.writes[storage] = variable, value

    def _buffer_of(self, variable: ShardedVariable) -> Storage:
        if variable.layout.partial_kind is not None:
            raise _NotLocalError(f"variable '{variable.path}' is stored in rows of a table")
        if not self._scope.is_buffer(variable.storage):
            raise _NotLocalError(f"it needs variable '{variable.path}' in full")
        self._check(variable)
        return variable.storage


@dataclasses.dataclass(frozen=True, eq=False)
class _UpdateTrace:
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


# Programs by what they compute.
_programs = programs.ProgramCache[Program](_NotLocalError)


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
        if not scope.is_buffer(variable.storage):
            raise _NotLocalError("it needs the variable in full, which is stored in a flat buffer")
        self._shape, self._axes = variable.layout.update_shape, variable.layout.update
        self._trace = self._traced(scope)

    def _traced(self, scope: access.InUpdate) -> _UpdateTrace:
        graph = _private.func_graph(local_shards.NAME)
        buffers, args, placeholders = _BufferPlaceholders(scope, self._check_layout), list(self._args), []
        with graph.as_default(), steps.changed(local=buffers):
            for number, each in enumerate(args):
                if isinstance(each, tf.__internal__.CompositeTensor) and not isinstance(each, tf.Variable):
                    raise _NotLocalError(f"it takes a {type(each).__name__}")
                if isinstance(each, tf.Tensor):
                    if tuple(each.shape) != self._shape and not _is_number(each):
                        raise _NotLocalError(f"it takes an argument of another shape, {each.shape}")
                    args[number] = tf.compat.v1.placeholder(each.dtype, each.shape)
                    placeholders.append((number, args[number]))
            try:
                result = self._function(self._variable, *args)
            except _NotLocalError:
                raise
            # A function of the user may raise anything here. Its error comes from the plain call.
            except Exception as error:
                text = str(error).strip().partition("\n")[0]
                raise _NotLocalError(f"it fails in a graph of its own ({text})") from error
        if any(isinstance(each, tf.Tensor) for each in keras.tree.flatten(result)):
            raise _NotLocalError("it returns a tensor")
        for outer, _ in graph.captures:
            if outer.dtype in (tf.resource, tf.variant) or not _is_number(outer):
                raise _NotLocalError(f"it uses '{getattr(outer, 'name', outer.dtype.name)}' from outside of its call")
        if not buffers.writes:
            raise _NotLocalError("it changes nothing")
        return _UpdateTrace(placeholders, buffers, list(graph.captures), result, graph.get_operations())

    def _check_layout(self, variable: ShardedVariable) -> None:
        """Check that the buffer of a variable is sharded as the updated buffer, or is a single number."""
        layout = variable.layout
        if (layout.update_shape, layout.update) == (self._shape, self._axes):
            return
        if any(layout.update) or any(size != 1 for size in layout.update_shape):
            raise _NotLocalError(f"variable '{variable.path}' has another layout")

    # --- the program

    def program(self) -> Program:
        """Return the program of the update. Updates with the same operations and layout share it.

        Raises:
            _NotLocalError: The update cannot be compiled.
        """
        trace, local_shape = self._trace, self._local_shape()
        digest = programs.digest(trace.operations, [*trace.outputs, *trace.inputs])
        key = digest, local_shape, self._mesh.device_type()
        return _programs.find(key, lambda: self._lowered(local_shape))

    def _lowered(self, local_shape: tuple[int, ...]) -> Program:
        elementwise = _elementwise(self._trace, self._shape)
        local = _with_shape(self._trace, elementwise, self._shape, local_shape)
        try:
            return programs.lower(*local, self._mesh, takes_parted=any(self._axes))
        except programs.NotCompiledError as error:
            raise _NotLocalError(f"XLA cannot compile it. {error}") from error

    def _local_shape(self) -> tuple[int, ...]:
        return transfer.shard_shape(self._shape, transfer.layout(self._axes, self._mesh))

    # --- the step

    def run(self, program: Program) -> Any:
        """Add the program to the step. Returns what the update function returns."""
        trace = self._trace
        given = [self._args[number] for number, _ in trace.args]
        given += [_value(variable) for variable, _ in trace.buffers.reads.values()]
        given += [tf.convert_to_tensor(outer) for outer, _ in trace.captured]
        results = program.call([self._entered(each) for each in given])
        for (variable, _), result in zip(trace.buffers.writes.values(), results, strict=True):
            variable.assign(local_shards.from_local(result, variable.layout.update, self._mesh, _every_index))
        return trace.result

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


def _elementwise(trace: _UpdateTrace, shape: tuple[int, ...]) -> set[tf.Operation]:
    """Return the operations that compute elements of the buffer. All others compute single numbers.

    Raises:
        _NotLocalError: An operation is not elementwise, or has side effects.
    """
    elements, found = {each.ref() for each in trace.inputs if tuple(each.shape) == shape}, set()
    for operation in trace.operations:
        if _private.is_stateful(operation):
            raise _NotLocalError(f"{_described(operation)} has side effects")
        if not any(each.ref() in elements for each in operation.inputs):
            continue
        if not dim_rules.is_elementwise(operation):
            raise _NotLocalError(f"{_described(operation)} is not elementwise")
        for each in operation.inputs:
            if each.ref() not in elements and not _is_number(each) and _filling(each, shape) is None:
                raise _NotLocalError(f"{_described(operation)} takes a tensor with elements of another kind")
        for each in operation.outputs:
            if tuple(each.shape) != shape:
                raise _NotLocalError(f"the result of {_described(operation)} has another shape")
            elements.add(each.ref())
        found.add(operation)
    for each in trace.outputs:
        if each.ref() not in elements and not _is_number(each) and _filling(each, shape) is None:
            raise _NotLocalError(f"its result '{each.name}' has elements of another kind")
    return found


def _filling(tensor: tf.Tensor, shape: tuple[int, ...]) -> Any:
    """Return the value of all elements of a constant of a shape; None for other tensors."""
    if tuple(tensor.shape) != shape:
        return None
    # TensorFlow makes a `Fill` of a large constant with equal elements.
    source = tensor.op.inputs[1] if tensor.op.type == "Fill" else tensor
    value = tf.get_static_value(source) if source.op.type == "Const" else None
    if value is None or not np.size(value):
        return None
    first = np.ravel(value)[0]
    return first if np.all(np.asarray(value) == first) else None


def _with_shape(
    trace: _UpdateTrace, elementwise: set[tf.Operation], shape: tuple[int, ...], local_shape: tuple[int, ...]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the inputs and outputs of the same elementwise operations for another shape of the buffer."""
    graph = _private.func_graph(local_shards.NAME)
    made: dict[Hashable, tf.Tensor] = {}

    def element(tensor: tf.Tensor) -> tf.Tensor:
        value = _filling(tensor, shape)
        return made[tensor.ref()] if value is None else tf.fill(local_shape, tf.constant(value, tensor.dtype))

    with graph.as_default():
        inputs = [
            tf.compat.v1.placeholder(each.dtype, local_shape if tuple(each.shape) == shape else each.shape)
            for each in trace.inputs
        ]
        made |= {old.ref(): new for old, new in zip(trace.inputs, inputs, strict=True)}
        for operation in programs.between(trace.inputs, trace.outputs):
            taken = [element(each) if operation in elementwise else made[each.ref()] for each in operation.inputs]
            copies = _private.copied(operation, taken, graph=graph)
            made |= {old.ref(): new for old, new in zip(operation.outputs, copies, strict=True)}
        return inputs, [element(each) for each in trace.outputs]


def _described(operation: tf.Operation) -> str:
    return f"operation '{operation.name}' ({operation.type})"
