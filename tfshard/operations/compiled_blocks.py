"""Compile blocks of a model: each device runs the forward pass of a block as one XLA program, and the backward pass as
another.

DTensor expands a step operation by operation, and TensorFlow runs the operations one by one. A block that computes one
sample after the other needs no communication between its inputs and outputs. `call` traces such a block with the local
shapes of one device, proves that it is by samples (row_proof.py), and puts two operations into the step, which DTensor
leaves as they are. Weights come in gathered, by the unshard schedule, and their local gradients go out to be reduced
like any other gradient.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.layouts.axes import MeshAxes, axis_sizes
from tfshard.operations import programs, row_proof, samples
from tfshard.operations.programs import Program
from tfshard.operations.row_proof import NotByRowsError, Trace
from tfshard.storage import steps
from tfshard.storage.recomputing import PRODUCTS


@dataclasses.dataclass(eq=False)
class LocalVariables:
    """The variables that a block reads and writes while it is traced (`StepContext.local`).

    Attributes:
        reads: The placeholder of each variable that was read, and the variable.
        writes: The new value of each variable that was written, and the variable.
    """

    reads: dict[int, tuple[Any, tf.Tensor]] = dataclasses.field(default_factory=dict)
    writes: dict[int, tuple[Any, tf.Tensor]] = dataclasses.field(default_factory=dict)

    def read(self, variable: Any) -> tf.Tensor:
        """Return the value that the block wrote, or a placeholder."""
        if variable.layout.kind is not None:
            raise NotByRowsError(f"variable '{variable.path}' is of a kind of its own")
        if id(variable) in self.writes:
            return self.writes[id(variable)][1]
        if id(variable) not in self.reads:
            value = tf.compat.v1.placeholder(variable.dtype, variable.layout.spec.shape)
            self.reads[id(variable)] = variable, value
        return self.reads[id(variable)][1]

    def write(self, variable: Any, value: tf.Tensor) -> None:
        """Record a new value."""
        self.writes[id(variable)] = variable, value


@dataclasses.dataclass(eq=False)
class BlockTrace:
    """A block, traced with one batch size.

    Attributes:
        graph: The graph.
        arguments: The placeholder of each tensor argument.
        variables: The variables.
        result: What the block returned.
        captured: The tensors from outside, and their placeholders.
    """

    graph: tf.Graph
    arguments: list[tf.Tensor]
    variables: LocalVariables
    result: Any
    captured: list[tuple[tf.Tensor, tf.Tensor]]

    @property
    def outputs(self) -> list[tf.Tensor]:
        """The tensors of the result."""
        return [each for each in keras.tree.flatten(self.result) if isinstance(each, tf.Tensor)]

    @property
    def operations(self) -> list[tf.Operation]:
        found: list[tf.Operation] = self.graph.get_operations()
        return found

    @property
    def drawn(self) -> list[tf.Tensor]:
        """The random tensors."""
        return [each.outputs[0] for each in self.operations if each.type in _private.ALL_RANDOM_OPS]


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledBlock:
    """The programs of a block.

    Attributes:
        forward: Computes the outputs, and what the backward pass takes from them.
        backward: Computes the gradients of the inputs. None without a gradient.
        inputs: For each input of the programs: True if it has samples.
        outputs: For each output: True if it has samples.
        drawn: For each random tensor: True if it has samples.
        gradients: The numbers of the inputs that have a gradient.
    """

    forward: Program
    backward: Program | None
    outputs: list[bool]
    drawn: list[bool]
    gradients: list[int]
    upstreams: list[int]


def call(function: Callable[..., Any], args: Any, kwargs: Any, mesh: dtensor.Mesh, name: str) -> Any:
    """Call a block, compiled if it can be.

    Args:
        function: The `call` of the block's layer.
        args: Its arguments.
        kwargs: Its keyword arguments.
        mesh: The mesh.
        name: The name of the block.
    """
    try:
        return _Block(function, args, kwargs, mesh).run()
    except NotByRowsError as error:
        REASONS[name] = str(error)
        return function(*args, **kwargs)


REASONS: dict[str, str] = {}
_compiled: collections.OrderedDict[bytes, CompiledBlock | str] = collections.OrderedDict()
_MOST = 256


class _Block:
    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, mesh: dtensor.Mesh):
        self._function, self._arguments = function, (args, kwargs)
        self._mesh, self._axes = mesh, axis_sizes(mesh)
        if any(self._axes[axis] > 1 for axis in self._axes.tensor):
            raise NotByRowsError("a model axis shards its kernels")
        self._given = [each for each in keras.tree.flatten(self._arguments) if isinstance(each, tf.Tensor)]
        self._given += [mask for each in self._given if (mask := _mask(each)) is not None]
        for each in self._given:
            if not each.shape.is_fully_defined():
                raise NotByRowsError("the shapes of its arguments are not known")
        # With one device, or with a batch that the axis does not divide, all devices compute the same.
        self._samples = [self._axes.data_size > 1 and self._has_samples(each) for each in self._given]
        self._local = [
            (each.shape[0] // self._axes.data_size, *each.shape[1:]) if has else tuple(each.shape)
            for each, has in zip(self._given, self._samples, strict=True)
        ]

    def _has_samples(self, tensor: tf.Tensor) -> bool:
        if not tensor.shape.rank:
            return False
        if samples.are_in(tensor, 0):
            return tensor.shape[0] % self._axes.data_size == 0
        if any(samples.are_in(tensor, dim) for dim in range(1, tensor.shape.rank)):
            raise NotByRowsError(f"argument '{tensor.name}' does not have its samples in dim 0")
        return False

    def run(self) -> Any:
        trace = self._traced(self._local)
        inputs = self._inputs(trace)
        records = _private.could_record()
        targets, upstreams, gradients = self._differentiated(trace, inputs) if records else ([], [], [])
        key = self._key(trace, inputs, gradients, upstreams)
        compiled = _compiled.get(key)
        if compiled is None:
            try:
                compiled = self._compile(trace, inputs, targets, upstreams, gradients)
            except NotByRowsError as error:
                compiled = str(error)
            _compiled[key] = compiled
            while len(_compiled) > _MOST:
                _compiled.popitem(last=False)
        else:
            _compiled.move_to_end(key)
        if isinstance(compiled, str):
            raise NotByRowsError(compiled)
        return self._emit(trace, inputs, compiled)

    # --- tracing

    def _traced(self, shapes: Sequence[tuple[int, ...]]) -> BlockTrace:
        """Trace the block with arguments of some shapes."""
        graph = _private.func_graph(local_shards.NAME)
        variables = LocalVariables()
        with graph.as_default(), steps.changed(local=variables):
            placeholders = [
                tf.compat.v1.placeholder(each.dtype, shape) for each, shape in zip(self._given, shapes, strict=True)
            ]
            inner = {each.ref(): made for each, made in zip(self._given, placeholders, strict=True)}
            for each, made in zip(self._given, placeholders, strict=True):
                if (mask := _mask(each)) is not None:
                    _private.keras_backend.set_keras_mask(made, inner[mask.ref()])
            args, kwargs = keras.tree.map_structure(
                lambda each: inner[each.ref()] if isinstance(each, tf.Tensor) else each, self._arguments
            )
            try:
                result = self._function(*args, **kwargs)
            except NotByRowsError:
                raise
        captured = [(outer, placeholder) for outer, placeholder in graph.captures]
        trace = BlockTrace(graph, placeholders, variables, result, captured)
        for each in trace.outputs:
            if each.graph is not graph:
                raise NotByRowsError("it returns a tensor from outside")
        if captured:
            raise NotByRowsError(f"it uses tensor '{getattr(captured[0][0], 'name', 'of eager code')}' from outside")
        return trace

    def _inputs(self, trace: BlockTrace) -> list[tf.Tensor]:
        """Return the inputs of the programs: arguments, variables, and what is computed outside."""
        return [*trace.arguments, *(value for _, value in trace.variables.reads.values()), *trace.drawn]

    # --- programs

    def _differentiated(
        self, trace: BlockTrace, inputs: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[int], list[int]]:
        """Return the gradients, and the numbers of the outputs and of the inputs that have one."""
        numbers = [n for n, each in enumerate(inputs) if each.dtype.is_floating and each.op.type == "Placeholder"]
        with_gradient = [n for n, each in enumerate(trace.outputs) if each.dtype.is_floating]
        with trace.graph.as_default(), _private.stop_recording():
            begin = len(trace.operations)
            ups = [tf.compat.v1.placeholder(trace.outputs[n].dtype, trace.outputs[n].shape) for n in with_gradient]
            made = tf.gradients([trace.outputs[n] for n in with_gradient], [inputs[n] for n in numbers], ups)
            made = [None if each is None else tf.convert_to_tensor(each) for each in made]
        self._backward_begin = begin
        self._ups = ups
        found = [(n, each) for n, each in zip(numbers, made, strict=True) if each is not None]
        return [each for _, each in found], with_gradient, [n for n, _ in found]

    def _key(
        self, trace: BlockTrace, inputs: Sequence[tf.Tensor], gradients: Sequence[int], upstreams: Sequence[int]
    ) -> bytes:
        ends = [*trace.outputs, *inputs]
        made = programs.digest(trace.operations, ends)
        return made + repr((gradients, upstreams, self._samples, self._axes.data_size, self._mesh.device_type())).encode()

    def _compile(
        self,
        trace: BlockTrace,
        inputs: Sequence[tf.Tensor],
        targets: Sequence[tf.Tensor],
        upstreams: Sequence[int],
        gradients: Sequence[int],
    ) -> CompiledBlock:
        forward_operations = trace.operations[: self._backward_begin] if upstreams else trace.operations
        of_outputs, of_drawn = self._prove(trace, forward_operations)
        device_type = self._mesh.device_type()
        known = {each.ref() for each in inputs}
        saved: list[tf.Tensor] = []
        if targets:
            begun = set(forward_operations)
            backward = programs.between([*inputs, *self._ups], targets)
            taken = {
                each.ref(): each
                for operation in backward
                if operation not in begun
                for each in operation.inputs
                if each.op in begun and each.ref() not in known
            }
            saved = programs.recomputed_from(taken.values(), known, PRODUCTS)
        forward = programs.lower(inputs, [*trace.outputs, *saved], device_type)
        made = None
        if targets:
            sharded = any(self._samples) or any(of_drawn)
            with trace.graph.as_default(), _private.stop_recording():
                # The local gradients of all devices become one tensor, with a row for each device.
                has = self._with_samples(inputs, trace, of_drawn)
                results = [
                    tf.expand_dims(each, 0) if sharded and not has[number] else each
                    for number, each in zip(gradients, targets, strict=True)
                ]
            made = programs.lower([*inputs, *saved, *self._ups], results, device_type)
        return CompiledBlock(forward, made, of_outputs, of_drawn, list(gradients), list(upstreams))

    def _with_samples(self, inputs: Sequence[tf.Tensor], trace: BlockTrace, drawn: Sequence[bool]) -> list[bool]:
        read = [False] * len(trace.variables.reads)
        return [*self._samples, *read, *drawn]

    def _prove(self, trace: BlockTrace, operations: Sequence[tf.Operation]) -> tuple[list[bool], list[bool]]:
        """Return whether each output, and each random tensor, has samples."""
        if not any(self._samples):
            return [False] * len(trace.outputs), [False] * len(trace.drawn)
        rows = {shape[0] for shape, has in zip(self._local, self._samples, strict=True) if has}
        least = min(rows)
        if any(each % least for each in rows):
            raise NotByRowsError("the numbers of rows of its arguments are no multiples of each other")
        prime = row_proof.prime_for(self._local)
        other = self._traced(
            [
                (shape[0] // least * prime, *shape[1:]) if has else shape
                for shape, has in zip(self._local, self._samples, strict=True)
            ]
        )
        if len(other.variables.writes) != len(trace.variables.writes):
            raise NotByRowsError("what it writes depends on the size of the batch")
        return row_proof.samples_in(
            self._of(trace, operations), self._of(other, other.operations)
        )

    def _of(self, trace: BlockTrace, operations: Sequence[tf.Operation]) -> Trace:
        has = [each for each, has in zip(trace.arguments, self._samples, strict=True) if has]
        drawn = [each for each in trace.drawn if each.op in set(operations)]
        return Trace(operations, has, trace.outputs, drawn)

    # --- the step

    def _emit(self, trace: BlockTrace, inputs: Sequence[tf.Tensor], compiled: CompiledBlock) -> Any:
        """Add the programs to the step, and return what the block returns."""
        mesh, axes = self._mesh, self._axes
        outer = [*self._given, *(variable.value() for variable, _ in trace.variables.reads.values())]
        outer += self._draw(trace, outer, compiled.drawn)
        has = self._with_samples(inputs, trace, compiled.drawn)
        sharded = any(has)
        shapes = [tuple(each.shape) for each in trace.outputs]
        total = [
            (shape[0] * axes.data_size, *shape[1:]) if of_samples else shape
            for shape, of_samples in zip(shapes, compiled.outputs, strict=True)
        ]

        def apply(*tensors: tf.Tensor) -> Any:
            local = [self._enter(each, rows) for each, rows in zip(tensors, has, strict=True)]
            results = compiled.forward.call(local)
            count = len(total)
            outputs = [
                self._leave(each, shape, rows)
                for each, shape, rows in zip(results[:count], total, compiled.outputs, strict=True)
            ]
            saved = results[count:]

            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
                assert compiled.backward is not None
                ups = []
                for number in compiled.upstreams:
                    up, rows = upstream[number], compiled.outputs[number]
                    if sharded and not rows:
                        up = up / tf.cast(axes.data_size, up.dtype)
                    ups.append(self._enter(up, rows))
                made = compiled.backward.call([*local, *saved, *ups])
                found: list[tf.Tensor | None] = [None] * len(tensors)
                for number, each in zip(compiled.gradients, made, strict=True):
                    shape = tuple(tensors[number].shape)
                    if sharded and not has[number]:
                        rows = self._leave(each, (axes.data_size, *shape), True)
                        found[number] = tf.reduce_sum(rows, 0)
                    else:
                        found[number] = self._leave(each, shape, has[number])
                return found

            return outputs, gradient

        if compiled.backward is None:
            results = apply(*outer)[0]
        else:
            results = tf.custom_gradient(apply)(*outer)
        for variable, value in self._written(trace, outer, inputs):
            variable.assign(value)
        waiting = iter(results)
        return keras.tree.map_structure(
            lambda each: next(waiting) if isinstance(each, tf.Tensor) else each, trace.result
        )

    def _enter(self, tensor: tf.Tensor, has_samples: bool) -> tf.Tensor:
        """Return the local shard of a tensor, for a program."""
        layout = self._layout(tensor.shape.rank, has_samples)
        return local_shards.parted(transfer.relayout(tensor, layout, self._mesh), layout, self._mesh)

    def _leave(self, tensor: tf.Tensor, shape: tuple[int, ...], has_samples: bool) -> tf.Tensor:
        """Return the global tensor of a program's result."""
        layout = self._layout(len(shape), has_samples)
        if not has_samples:
            return transfer.relayout(tensor, layout, self._mesh)
        tensor.set_shape([shape[0] // self._axes.data_size, *shape[1:]])
        return local_shards.from_local(tensor, layout, self._mesh)

    def _layout(self, rank: int, has_samples: bool) -> tuple[str | None, ...]:
        return tuple(self._axes.data if has_samples and dim == 0 else None for dim in range(rank))

    def _draw(self, trace: BlockTrace, outer: Sequence[tf.Tensor], has_samples: Sequence[bool]) -> list[tf.Tensor]:
        """Draw the random tensors of the block in the step, for all devices."""
        known = self._known(trace, outer)
        found = []
        for tensor, of_samples in zip(trace.drawn, has_samples, strict=True):
            operation = tensor.op
            shape = list(tensor.shape)
            if of_samples:
                shape[0] *= self._axes.data_size
            inputs = [self._outside(each, known) for each in operation.inputs[1:]]
            made = _private.same_operation(
                _private.Call(type=operation.type, inputs=(), get_attr=operation.get_attr), [tf.constant(shape), *inputs]
            )
            found.append(made[0])
        return found

    def _written(
        self, trace: BlockTrace, outer: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]
    ) -> list[tuple[Any, tf.Tensor]]:
        known = self._known(trace, outer)
        return [
            (variable, self._outside(value, known)) for variable, value in trace.variables.writes.values()
        ]

    def _known(self, trace: BlockTrace, outer: Sequence[tf.Tensor]) -> dict[Any, tf.Tensor]:
        inner = [*trace.arguments, *(value for _, value in trace.variables.reads.values())]
        return {
            each.ref(): tensor
            for each, tensor, has in zip(inner, outer[: len(inner)], [*self._samples, *[False] * 999], strict=False)
            if not has
        }

    def _outside(self, tensor: tf.Tensor, known: dict[Any, tf.Tensor]) -> tf.Tensor:
        """Compute a tensor that does not depend on samples in the step."""
        for operation in programs.between([ref.deref() for ref in known], [tensor]):
            if operation.type == "Placeholder":
                raise NotByRowsError("it draws or writes what depends on samples")
            call_ = _private.Call(type=operation.type, inputs=(), get_attr=operation.get_attr)
            if operation.type == "Const":
                made = [tf.constant(tf.get_static_value(operation.outputs[0]))]
            else:
                made = _private.same_operation(call_, [known[each.ref()] for each in operation.inputs])
            known |= {old.ref(): new for old, new in zip(operation.outputs, made, strict=True)}
        return known[tensor.ref()]


def _mask(tensor: tf.Tensor) -> tf.Tensor | None:
    mask = _private.keras_backend.get_keras_mask(tensor)
    return mask if isinstance(mask, tf.Tensor) else None
