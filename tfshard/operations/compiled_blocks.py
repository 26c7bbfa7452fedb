"""Compiled blocks: each device runs the forward pass of a block as one XLA program, and the backward pass as another.

DTensor expands a step operation by operation, and TensorFlow runs the operations one by one. A block that computes one
sample after the other needs no communication between its inputs and outputs. It is traced with the local shapes of one
device (local_traces.py), and proved to be by samples (row_proof.py). Two operations in the step then run its programs
(programs.py). DTensor leaves these operations as they are. Weights come in gathered, by the unshard schedule, and their
local gradients are summed over the devices like all gradients.

What a block draws is drawn in the step, so that masks of dropout are those of one device. What it writes (the states of
seeds) is computed in the step. The backward pass takes the results of matrix products from the forward pass, and
computes the rest again from the inputs of the block; in a block of `strategy.recompute` it computes all of it again.
"""

import collections
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.errors import UnsupportedOperationError, warn
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import blocks, layer_patch, local_traces, programs, row_proof, samples
from tfshard.operations.layer_patch import COMPILED
from tfshard.operations.local_traces import LocalTrace
from tfshard.operations.programs import Program
from tfshard.operations.row_proof import NotByRowsError
from tfshard.storage import steps
from tfshard.storage.recomputing import PRODUCTS


def install(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Compile the blocks of a model: the layers that `strategy.recompute` would choose by itself."""
    found = blocks.repeated_layers(model)
    if not found:
        warn(
            f"Model '{model.name}' has no blocks to compile: no layer with sublayers repeats. jit_compile=True "
            "compiles the updates of its optimizer only."
        )
    for layer in found:
        layer_patch.apply(COMPILED, layer, functools.partial(CompiledCall, weakref.ref(layer), mesh))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledBlock:
    """How a block of a model runs.

    Attributes:
        path: The path of the layer.
        programs: The number of XLA programs: 2 with a gradient, 1 without. 0 if the block is not compiled.
        reason: Why the block is not compiled; empty otherwise.
    """

    path: str
    programs: int
    reason: str


def compiled_blocks(model: keras.Model) -> list[CompiledBlock]:
    """Return how the blocks of a model ran in its last traced step. Blocks that did not run yet are left out."""
    return _last_runs(layer_patch.patches_of(model))


def is_compiled(layer: keras.Layer) -> bool:
    """Return whether a layer is a block that ran as programs in the last traced step."""
    return any(each.programs for each in _last_runs(layer_patch.patches_on(layer)))


def _last_runs(patches: Sequence[layer_patch.LayerPatch]) -> list[CompiledBlock]:
    calls = [patch.replacement for patch in patches if patch.change is COMPILED]
    return [each.last for each in calls if isinstance(each, CompiledCall) and each.last is not None]


class CompiledCall:
    """A layer's `call` that runs as XLA programs, if it is proved to be by samples.

    Attributes:
        last: How the block ran in the last traced step.
    """

    def __init__(self, layer: Callable[[], keras.Layer | None], mesh: dtensor.Mesh, call: layer_patch.Method):
        functools.update_wrapper(self, call)
        self._layer, self._mesh, self._call = layer, mesh, call
        self.last: CompiledBlock | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step, layer = steps.current(), self._layer()
        if layer is None or step is None or step.graph is None or steps.here() is not step.graph:
            return self._call(*args, **kwargs)
        try:
            block = _TracedCall(self._call, (args, kwargs), layer, self._mesh)
            pair = block.programs()
        except NotByRowsError as error:
            self._note(layer, 0, str(error))
            return self._call(*args, **kwargs)
        self._note(layer, 1 if pair.backward is None else 2, "")
        with tf.name_scope(layer.name):
            return block.run(pair)

    def _note(self, layer: keras.Layer, count: int, reason: str) -> None:
        if reason and type(layer) not in _told:
            _told.add(type(layer))
            warn(
                f"Block '{layer.path or layer.name}' ({type(layer).__name__}) is not compiled: {reason}. It runs as "
                "without jit_compile=True. strategy.report(model) lists all blocks."
            )
        self.last = CompiledBlock(path=layer.path or layer.name, programs=count, reason=reason)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Pair:
    """The programs of a block, and of all blocks with the same operations.

    Attributes:
        forward: Computes the outputs, and what the backward pass takes of the forward pass.
        backward: Computes the gradients. None without a gradient.
        outputs: For each output, True if it has samples in its first dim.
        drawn: The same for each random tensor.
        upstreams: The numbers of the outputs that have a gradient.
        gradients: The numbers of the inputs that have a gradient.
    """

    forward: Program
    backward: Program | None
    outputs: list[bool]
    drawn: list[bool]
    upstreams: list[int]
    gradients: list[int]


# The classes of layers of which a warning was given.
_told: weakref.WeakSet[type] = weakref.WeakSet()


def forget_warnings() -> None:
    """Let blocks that are not compiled warn again."""
    _told.clear()


# Programs by what they compute. A text is the reason why there are none.
_pairs: collections.OrderedDict[Hashable, _Pair | str] = collections.OrderedDict()
_MOST = 256


@dataclasses.dataclass(frozen=True, eq=False)
class _Gradients:
    """The gradients in the graph of a trace.

    Attributes:
        upstreams: The placeholder of the gradient of each output that has one, with the number of the output.
        targets: The gradient of each input that has one, with the number of the input.
    """

    upstreams: list[tuple[int, tf.Tensor]] = dataclasses.field(default_factory=list)
    targets: list[tuple[int, tf.Tensor]] = dataclasses.field(default_factory=list)


class _TracedCall:
    """A call of a block in a step that is traced.

    The inputs of its programs are the tensors among the arguments, their masks, the variables, captured tensors and
    random tensors, in this order.

    Args:
        call: The layer's call.
        arguments: Its arguments and keyword arguments.
        layer: The layer.
        mesh: The mesh.

    Raises:
        NotByRowsError: The block cannot be compiled.
    """

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, Any], layer: keras.Layer, mesh: dtensor.Mesh):
        self._call, self._arguments, self._layer = call, arguments, layer
        self._mesh, self._axes = mesh, axis_sizes(mesh)
        if any(self._axes[axis] > 1 for axis in self._axes.tensor):
            raise NotByRowsError("the mesh has a model axis")
        given = local_traces.tensors_in(arguments)
        self._given = [*given, *local_traces.masks_of(given)]
        self._devices = self._axes.data_size
        self._are_samples = [self._has_samples(each) for each in self._given]
        self._trace = self._traced(
            [self._local_shape(each, has) for each, has in zip(self._given, self._are_samples, strict=True)]
        )
        for outer, _ in self._trace.captured:
            if outer.dtype in (tf.resource, tf.variant) or (self._devices > 1 and self._has_samples(outer)):
                raise NotByRowsError(f"it uses '{getattr(outer, 'name', outer.dtype.name)}' from outside of its call")

    def _has_samples(self, tensor: tf.Tensor) -> bool:
        """Return whether the devices have different rows of a tensor.

        With one device, or with a batch that the axis does not divide, all devices compute the same.
        """
        if not tensor.shape.is_fully_defined():
            raise NotByRowsError("the shapes of its inputs are not known")
        if self._devices == 1 or not tensor.shape.rank or isinstance(tensor, tf.__internal__.EagerTensor):
            return False
        if samples.are_in(tensor, 0):
            return bool(tensor.shape[0] % self._devices == 0)
        if any(samples.are_in(tensor, dim) for dim in range(1, tensor.shape.rank)):
            raise NotByRowsError("an input does not have the samples in its first dim")
        return False

    def _local_shape(self, tensor: tf.Tensor, has_samples: bool) -> tuple[int, ...]:
        shape = tuple(tensor.shape)
        return (shape[0] // self._devices, *shape[1:]) if has_samples else shape

    def _traced(self, shapes: Sequence[tuple[int, ...]]) -> LocalTrace:
        layers = _private.flatten_layers(self._layer)
        return local_traces.trace(self._call, self._arguments, shapes, layers)

    def _inputs(self) -> list[tf.Tensor]:
        trace = self._trace
        return [*trace.arguments, *trace.read, *(inner for _, inner in trace.captured), *trace.drawn]

    def _input_samples(self, drawn: Sequence[bool]) -> list[bool]:
        """Return for each input whether it has samples."""
        between = len(self._trace.read) + len(self._trace.captured)
        return [*self._are_samples, *[False] * between, *drawn]

    # --- programs

    def programs(self) -> _Pair:
        """Return the programs of the block. Blocks with the same operations share them.

        Raises:
            NotByRowsError: The block cannot be compiled.
        """
        trace, other, records, kept = self._trace, self._other_trace(), _private.could_record(), self._kept()
        key: tuple[Hashable, ...] = (
            programs.digest(trace.operations, [*trace.outputs, *self._inputs(), *trace.written]),
            # Blocks that are equal for these samples may differ for others: then the proof of one says nothing.
            None if other is None else programs.digest(other.operations, other.outputs),
            tuple(self._are_samples),
            self._devices,
            self._mesh.device_type(),
            kept,
            records,
        )
        gradients = None
        if records and programs.has_custom_gradients(trace.operations):
            # Equal operations may have other gradients.
            gradients = self._differentiated()
            targets = [each for _, each in gradients.targets]
            key = (*key, programs.digest(trace.graph.get_operations(), [*targets, *self._inputs()]))
        if key not in _pairs:
            if gradients is None:
                gradients = self._differentiated() if records else _Gradients()
            try:
                _pairs[key] = self._lowered(gradients, kept, other)
            except NotByRowsError as error:
                _pairs[key] = str(error)
            while len(_pairs) > _MOST:
                _pairs.popitem(last=False)
        _pairs.move_to_end(key)
        found = _pairs[key]
        if isinstance(found, str):
            raise NotByRowsError(found)
        return found

    def _kept(self) -> frozenset[str]:
        """Return the types of operations whose results the backward pass takes from the forward pass."""
        marks = [each for each in layer_patch.patches_on(self._layer) if each.change is layer_patch.BLOCK]
        if marks:
            return blocks.keeps_of(marks[0])
        return PRODUCTS if _private.remat_mode(self._layer) in (None, "activations") else frozenset()

    def _differentiated(self) -> _Gradients:
        trace, inputs = self._trace, self._inputs()
        numbers = [n for n, each in enumerate(inputs[: len(inputs) - len(trace.drawn)]) if each.dtype.is_floating]
        outputs = [(n, each) for n, each in enumerate(trace.outputs) if each.dtype.is_floating]
        with trace.graph.as_default(), _private.stop_recording():
            ups = [tf.compat.v1.placeholder(each.dtype, each.shape) for _, each in outputs]
            made = tf.gradients([each for _, each in outputs], [inputs[n] for n in numbers], ups)
            found = [(n, tf.convert_to_tensor(each)) for n, each in zip(numbers, made, strict=True) if each is not None]
        return _Gradients([(n, up) for (n, _), up in zip(outputs, ups, strict=True)], found)

    def _lowered(self, gradients: _Gradients, kept: frozenset[str], other: LocalTrace | None) -> _Pair:
        trace, inputs = self._trace, self._inputs()
        self._check_outside()
        of_outputs, of_drawn = self._proved(other)
        targets, upstreams = [each for _, each in gradients.targets], [each for _, each in gradients.upstreams]
        saved = self._saved(targets, kept)
        has = self._input_samples(of_drawn)
        if any(has):
            # The local gradients of a weight become one tensor with a row for each device.
            with trace.graph.as_default(), _private.stop_recording():
                targets = [each if has[n] else tf.expand_dims(each, 0) for n, each in gradients.targets]
        return _Pair(
            forward=self._program(inputs, [*trace.outputs, *saved]),
            backward=self._program([*inputs, *saved, *upstreams], targets) if targets else None,
            outputs=of_outputs,
            drawn=of_drawn,
            upstreams=[number for number, _ in gradients.upstreams],
            gradients=[number for number, _ in gradients.targets],
        )

    def _program(self, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor]) -> Program:
        try:
            return programs.lower(inputs, outputs, self._mesh)
        except programs.NotCompiledError as error:
            raise NotByRowsError(f"XLA cannot compile it. {error}") from error

    def _saved(self, targets: Sequence[tf.Tensor], kept: frozenset[str]) -> list[tf.Tensor]:
        """Return what the backward pass takes from the forward pass."""
        inputs, forward = self._inputs(), set(self._trace.operations)
        known = {each.ref() for each in inputs}
        taken = {
            each.ref(): each
            for operation in programs.between(inputs, targets)
            if operation not in forward
            for each in operation.inputs
            if each.op in forward and each.ref() not in known
        }
        return programs.recomputed_from(taken.values(), known, kept)

    def _check_outside(self) -> None:
        """Check that what the block draws and writes can be computed in the step: it follows from no samples."""
        trace = self._trace
        wanted = [each for tensor in trace.drawn for each in tensor.op.inputs[1:]]
        wanted += trace.written
        inside = {value.ref() for value, has in zip(trace.arguments, self._are_samples, strict=True) if has}
        for operation in programs.between([], wanted):
            if any(each.ref() in inside for each in operation.outputs) or operation.type in _private.ALL_RANDOM_OPS:
                raise NotByRowsError("it writes to a variable, or draws, what depends on the samples")

    def _other_trace(self) -> LocalTrace | None:
        """Return the trace for a prime number of samples, for the proof. None if no input has samples."""
        trace = self._trace
        if not any(self._are_samples):
            return None
        shapes = [tuple(each.shape) for each in trace.arguments]
        rows = [shape[0] for shape, has in zip(shapes, self._are_samples, strict=True) if has]
        tensors = [each for operation in trace.operations for each in operation.outputs]
        prime = row_proof.prime_for([each.shape for each in tensors if each.shape.is_fully_defined()])
        return self._traced(
            [
                (shape[0] // math.gcd(*rows) * prime, *shape[1:]) if has else shape
                for shape, has in zip(shapes, self._are_samples, strict=True)
            ]
        )

    def _proved(self, other: LocalTrace | None) -> tuple[list[bool], list[bool]]:
        """Return whether each output, and each random tensor, has samples."""
        if other is None:
            return [False] * len(self._trace.outputs), [False] * len(self._trace.drawn)
        return row_proof.samples_in(self._with_samples(self._trace), self._with_samples(other))

    def _with_samples(self, trace: LocalTrace) -> row_proof.Trace:
        has = [each for each, has in zip(trace.arguments, self._are_samples, strict=True) if has]
        return row_proof.Trace(trace.operations, has, trace.outputs, trace.drawn, trace.written)

    # --- the step

    def run(self, pair: _Pair) -> Any:
        """Add the programs to the step, and return what the layer's call returns."""
        trace = self._trace
        values = [variable.value() for variable, _ in trace.variables.reads.values()]
        variables = [tf.cast(value, taken.dtype) for value, taken in zip(values, trace.read, strict=True)]
        captured = [tf.convert_to_tensor(outer) for outer, _ in trace.captured]
        outside = self._outside(values, captured)
        drawn = [self._draw(each, outside, has) for each, has in zip(trace.drawn, pair.drawn, strict=True)]
        written = [(variable, outside.made(value)) for variable, value in trace.variables.writes.values()]
        results = self._called(pair, [*self._given, *variables, *captured, *drawn])
        for variable, value in written:
            variable.assign(value)
        count = len(local_traces.tensors_in(trace.result))
        masks = iter(results[count:])
        for inner, made in zip(trace.outputs, results[:count], strict=False):
            if local_traces.masks_of([inner]):
                _private.set_mask(made, next(masks))
        return local_traces.replaced(trace.result, results[:count])

    def _called(self, pair: _Pair, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run the forward program, and the backward program where a gradient is taken."""
        has, count = self._input_samples(pair.drawn), len(pair.outputs)
        locals_: list[tf.Tensor] = []

        def forward(tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
            entered = [self._entered(each, rows) for each, rows in zip(tensors, has, strict=True)]
            results = pair.forward.call(entered)
            made, saved = results[:count], results[count:]
            locals_[:] = made
            left = [self._left(*each) for each in zip(made, pair.outputs, strict=True)]
            return left, entered, saved

        def differentiable(*tensors: tf.Tensor) -> Any:
            left, entered, saved = forward(tensors)

            def backward(*upstreams: tf.Tensor) -> list[tf.Tensor | None]:
                found: list[tf.Tensor | None] = [None] * len(tensors)
                if pair.backward is None:
                    return found
                ups = [self._upstream(upstreams[n], pair.outputs[n], any(has)) for n in pair.upstreams]
                made = self._called_once(pair.backward, [*entered, *saved, *ups])
                for number, gradient in zip(pair.gradients, made, strict=True):
                    found[number] = self._gradient(gradient, has[number], any(has))
                return found

            return left, backward

        records = _private.could_record()
        results = list(tf.custom_gradient(differentiable)(*given)) if records else forward(given)[0]
        for result, local, rows in zip(results, locals_, pair.outputs, strict=True):
            if rows:
                _note_local(result, local)
        return results

    def _called_once(self, program: Program, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Run a backward program. Its result has no gradient."""
        if not _private.could_record():
            return program.call(inputs)

        def refuse(*_: tf.Tensor) -> Any:
            raise UnsupportedOperationError(
                f"Compiled block '{self._layer.path or self._layer.name}' has no second derivative. Compile the model "
                "without jit_compile=True."
            )

        return list(tf.custom_gradient(lambda *tensors: (program.call(tensors), refuse))(*inputs))

    def _layout(self, rank: int, has_samples: bool) -> tuple[str | None, ...]:
        return tuple(self._axes.data if has_samples and dim == 0 else None for dim in range(rank))

    def _entered(self, tensor: tf.Tensor, has_samples: bool) -> tf.Tensor:
        """Return the local shard of a tensor, for a program."""
        local = _locals_of(tensor).get(("local", tensor.ref())) if has_samples else None
        if local is not None:
            return local[0]
        layout = self._layout(tensor.shape.rank, has_samples)
        tensor = transfer.relayout(tensor, layout, self._mesh)
        if not has_samples:
            return tensor
        with local_shards.scope():
            return local_shards.to_local(tensor, layout, self._mesh)

    def _left(self, tensor: tf.Tensor, has_samples: bool) -> tf.Tensor:
        """Return the global tensor of a program's local result."""
        layout = self._layout(tensor.shape.rank, has_samples)
        if not has_samples:
            return transfer.relayout(tensor, layout, self._mesh)
        return local_shards.from_local(tensor, layout, self._mesh)

    def _upstream(self, tensor: tf.Tensor, has_samples: bool, is_shared_out: bool) -> tf.Tensor:
        """Return the local gradient of an output. All devices share a gradient of what they all computed."""
        if is_shared_out and not has_samples:
            tensor = tensor / tf.cast(self._devices, tensor.dtype)
        return self._entered(tensor, has_samples)

    def _gradient(self, tensor: tf.Tensor, has_samples: bool, is_shared_out: bool) -> tf.Tensor:
        """Return the gradient of an input. The local gradients of a weight are summed over the devices."""
        if has_samples:
            left = self._left(tensor, True)
            _note_local(left, tensor)
            return left
        if not is_shared_out:
            return self._left(tensor, False)
        return tf.reduce_sum(self._left(tensor, True), 0)

    def _outside(self, values: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]) -> "_Outside":
        trace = self._trace
        known = {
            inner.ref(): outer
            for inner, outer, has in zip(trace.arguments, self._given, self._are_samples, strict=True)
            if not has
        }
        placeholders = [*(each for _, each in trace.variables.reads.values()), *(inner for _, inner in trace.captured)]
        known |= {inner.ref(): outer for inner, outer in zip(placeholders, [*values, *captured], strict=True)}
        return _Outside(known)

    def _draw(self, tensor: tf.Tensor, outside: "_Outside", has_samples: bool) -> tf.Tensor:
        """Draw a random tensor in the step, for all devices."""
        shape = [size * self._devices if has_samples and not dim else size for dim, size in enumerate(tensor.shape)]
        parameters = [outside.made(each) for each in tensor.op.inputs[1:]]
        drawn = outside.run(tensor.op, [tf.constant(shape, tensor.op.inputs[0].dtype), *parameters])[0]
        return transfer.relayout(drawn, self._layout(len(shape), has_samples), self._mesh)


class _Outside:
    """Computes tensors of a trace in the step.

    Args:
        known: The tensors of the step, by the reference of the tensor in the trace.
    """

    def __init__(self, known: dict[Hashable, tf.Tensor]):
        self._known = known

    def made(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor of the trace, computed in the step."""
        for operation in programs.between([ref.deref() for ref in self._known], [tensor]):  # type: ignore[attr-defined]
            if operation.type == "Const":
                results = [tf.constant(tf.get_static_value(operation.outputs[0]))]
            else:
                results = self.run(operation, [self._known[each.ref()] for each in operation.inputs])
            self._known |= {old.ref(): new for old, new in zip(operation.outputs, results, strict=True)}
        return self._known[tensor.ref()]

    @staticmethod
    def run(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run an operation of the trace in the step, with other inputs."""
        call = _private.Call(type=operation.type, inputs=tuple(operation.inputs), get_attr=operation.get_attr)
        return _private.same_operation(call, inputs)


def _note_local(tensor: tf.Tensor, local: tf.Tensor) -> None:
    """Record the local shards of which a global tensor was made: another program takes them as they are."""
    _locals_of(tensor)["local", tensor.ref()] = local, None


def _locals_of(tensor: tf.Tensor) -> steps.Gathered:
    """Return the tensors that the step has recorded for the graph of a tensor. They end with the step."""
    step = steps.current()
    return {} if step is None else step.reads.gathered(tensor.graph)
