"""Compiled blocks: each device runs the forward pass of a block as one XLA program, and the backward pass as another.

DTensor expands a step operation by operation, and TensorFlow runs the operations one by one. A block that computes one
sample after the other needs no communication between its inputs and outputs. It is traced with the local shapes of one
device (local_traces.py), and proved to be by samples (row_proof.py). Two operations in the step then run its programs
(programs.py). DTensor leaves these operations as they are. Weights come in gathered, by the unshard schedule, and their
local gradients are summed over the devices like all gradients.

On a mesh with a model axis, a block whose weights the axis shards is cut into pieces (block_pieces.py). Each piece runs
without communication, and has a forward and a backward program.

What a block draws is drawn in the step, so that masks of dropout are those of one device. What it writes (the states of
seeds) is computed in the step. The backward pass takes the results of matrix products from the forward pass, and
computes the rest again from the inputs of the block; in a block of `strategy.recompute` it computes all of it again.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.errors import UnsupportedOperationError, warn
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import (
    block_pieces,
    block_spans,
    blocks,
    layer_patch,
    local_traces,
    origins,
    programs,
    row_proof,
    samples,
    sequence,
)
from tfshard.operations.block_pieces import Piece, Sharding, TracedBlock
from tfshard.operations.block_spans import WeightSpan
from tfshard.operations.layer_patch import COMPILED
from tfshard.operations.local_traces import LocalTrace
from tfshard.operations.programs import Pack, Program
from tfshard.operations.row_proof import NotByRowsError
from tfshard.storage import steps
from tfshard.storage.recomputing import PRODUCTS
from tfshard.storage.variables import ShardedVariable


def install(model: keras.Model, mesh: dtensor.Mesh, *, warns: bool) -> None:
    """Compile the blocks of a model, and its other layers of several operations.

    Args:
        model: A built model.
        mesh: The mesh.
        warns: True to warn of what is not compiled.
    """
    found = blocks.compilable_layers(model)
    others = _others(model, found)
    if not found and warns and model not in _without_blocks:
        _without_blocks.add(model)
        warn(
            f"Model '{model.name}' has no blocks to compile: no layer that holds two layers with weights repeats. XLA "
            "compiles only single layers of several operations, such as normalizations, and updates of the optimizer."
        )
    for layer in (*found, *others):
        least = 0 if layer in found else _LEAST_OPERATIONS
        make = functools.partial(CompiledCall, weakref.ref(layer), mesh, least, warns)
        call = layer_patch.apply(COMPILED, layer, make).replacement
        assert isinstance(call, CompiledCall)
        call.warns = warns  # The patch may be from an earlier `compile`.


# Operations between a weight and the lookup of its rows.
_CARRYING = frozenset(("Cast", "Identity", "Relayout", "Reshape"))
# A program costs copies of its results. It pays for a layer of at least this many operations, such as a normalization;
# a matrix product with a bias and a ReLU has three operations.
_LEAST_OPERATIONS = 8


def _others(model: keras.Model, found: Sequence[keras.Layer]) -> list[keras.Layer]:
    """Return the outermost layers with weights that are no blocks, hold no blocks, and are no models."""
    of_blocks = {id(each) for layer in found for each in _private.flatten_layers(layer)}
    inside, others = set(of_blocks), []
    for layer in _private.flatten_layers(model):
        below = {id(each) for each in _private.flatten_layers(layer)}
        if isinstance(layer, keras.Model) or below & of_blocks or id(layer) in inside or not layer.weights:
            continue
        if any(isinstance(each, keras.layers.Embedding) for each in _private.flatten_layers(layer)):
            inside |= below
            continue  # It looks up rows.
        if any(
            patch.change is layer_patch.HEAD
            for each in _private.flatten_layers(layer)
            for patch in layer_patch.patches_on(each)
        ):
            continue  # The loss looks for its hidden states in the step.
        others.append(layer)
        inside |= below
    return others


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledBlock:
    """How a block of a model, or another layer, runs.

    Attributes:
        path: The path of the layer.
        programs: The number of XLA programs: for each piece 2 with a gradient, 1 without. 0 if it is not compiled.
        reason: Why the block is not compiled; empty otherwise.
        is_block: False for a layer that is no block.
    """

    path: str
    programs: int
    reason: str
    is_block: bool


def compiled_blocks(model: keras.Model) -> list[CompiledBlock]:
    """Return how the blocks of a model ran in its last traced step. Blocks that did not run yet are left out."""
    return [each for each in _last_runs(layer_patch.patches_of(model)) if each.is_block]


def other_layers(model: keras.Model) -> list[CompiledBlock]:
    """Return how other layers of several operations ran in the last traced step."""
    return [each for each in _last_runs(layer_patch.patches_of(model)) if not each.is_block]


def is_compiled(layer: keras.Layer) -> bool:
    """Return whether a layer is a block that ran as programs in the last traced step."""
    return any(each.programs for each in _last_runs(layer_patch.patches_on(layer)))


def _last_runs(patches: Sequence[layer_patch.LayerPatch]) -> list[CompiledBlock]:
    calls = [patch.replacement for patch in patches if patch.change is COMPILED]
    return [each.last for each in calls if isinstance(each, CompiledCall) and each.last is not None]


class CompiledCall:
    """A layer's `call` that runs as XLA programs, if it is proved to be by samples.

    Args:
        layer: Returns the layer.
        mesh: The mesh.
        least: The least number of operations that are compiled; 0 for a block.
        warns: True to warn if the block is not compiled.
        call: The layer's `call`.

    Attributes:
        warns: As in the arguments.
        last: How the block ran in the last traced step.
    """

    def __init__(
        self,
        layer: Callable[[], keras.Layer | None],
        mesh: dtensor.Mesh,
        least: int,
        warns: bool,
        call: layer_patch.Method,
    ):
        functools.update_wrapper(self, call)
        self._layer, self._mesh, self._least, self.warns, self._call = layer, mesh, least, warns, call
        self.last: CompiledBlock | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step, layer = steps.current(), self._layer()
        if layer is None or step is None or step.graph is None or steps.here() is not step.graph:
            return self._call(*args, **kwargs)
        try:
            sharded = _variable_of_a_kind(layer)
            if sharded is not None:
                if not self._is_block(layer):
                    return self._call(*args, **kwargs)
                assert sharded.layout.kind is not None
                raise NotByRowsError(f"variable '{sharded.path}' is one of the {sharded.layout.kind.noun}")
            block = _TracedCall(self._call, (args, kwargs), layer, self._mesh)
            if not self._is_block(layer) and not block.is_worth(self._least):
                return self._call(*args, **kwargs)
            pairs = block.programs()
        except NotByRowsError as error:
            self._note(layer, 0, str(error))
            return self._call(*args, **kwargs)
        self._note(layer, sum(1 if each.backward is None else 2 for each in pairs), "")
        with tf.name_scope(layer.name):
            return block.run(pairs)

    def _note(self, layer: keras.Layer, count: int, reason: str) -> None:
        is_block = self._is_block(layer)
        if reason and self.warns and is_block and type(layer) not in _told:
            _told.add(type(layer))
            warn(
                f"Block '{layer.path or layer.name}' ({type(layer).__name__}) is not compiled: {reason}. It runs as "
                "without jit_compile=True. strategy.report(model) lists all blocks."
            )
        self.last = CompiledBlock(path=layer.path or layer.name, programs=count, reason=reason, is_block=is_block)

    def _is_block(self, layer: keras.Layer) -> bool:
        """Return whether the layer is a block. `strategy.recompute` may have made it one since."""
        return not self._least or any(each.change is layer_patch.BLOCK for each in layer_patch.patches_on(layer))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Pair:
    """The programs of a piece of a block, and of all blocks with the same operations.

    Attributes:
        forward: Computes the outputs, and what the backward pass takes of the forward pass.
        backward: Computes the gradients. None without a gradient.
        taken: For each input, the number of its tensor in the trace (`block_pieces.numbered`).
        given: The sharding of each input.
        made: For each output, the number of its tensor in the trace.
        results: The sharding of each output.
        upstreams: The numbers of the outputs that have a gradient.
        gradients: The numbers of the inputs that have a gradient, but for packed inputs.
        packs: The packed inputs.
        packed_gradients: The numbers of the packs that have a gradient.
        packed_inputs: The numbers of the packed inputs that have one.
        is_sharded: True if each device along the model axis computes a share.
    """

    forward: Program
    backward: Program | None
    taken: list[int]
    given: list[Sharding]
    made: list[int]
    results: list[Sharding]
    upstreams: list[int]
    gradients: list[int]
    packs: list[Pack]
    packed_gradients: list[int]
    packed_inputs: frozenset[int]
    is_sharded: bool

    @property
    def has_samples(self) -> bool:
        """True if devices along the data axis compute with different samples."""
        return any(each.data is not None for each in self.given)


def _variable_of_a_kind(layer: keras.Layer) -> ShardedVariable | None:
    """Return the first variable of a layer that no device reads in full (`VariableKind`), or None."""
    stored = [_private.backend_variable(each) for each in layer.variables]
    return next((each for each in stored if isinstance(each, ShardedVariable) and each.layout.kind is not None), None)


# The classes of layers of which a warning was given.
_told: weakref.WeakSet[type] = weakref.WeakSet()
# The models of which a warning said that they have no blocks.
_without_blocks: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def forget_warnings() -> None:
    """Let blocks that are not compiled warn again."""
    _told.clear()
    _without_blocks.clear()


# Programs by what they compute.
_pairs = programs.ProgramCache[list[_Pair]](NotByRowsError)


@dataclasses.dataclass(frozen=True, eq=False)
class _Gradients:
    """The gradients in the graph of a trace.

    Attributes:
        upstreams: The placeholder of the gradient of each output that has one, with the number of the output.
        targets: The gradient of each input that has one, with the number of the input.
    """

    upstreams: list[tuple[int, tf.Tensor]] = dataclasses.field(default_factory=list)
    targets: list[tuple[int, tf.Tensor]] = dataclasses.field(default_factory=list)


def _differentiated(piece: Piece) -> _Gradients:
    """Add the gradients of a piece to its graph."""
    outputs = [(n, each) for n, each in enumerate(piece.outputs) if each.dtype.is_floating]
    with piece.graph.as_default(), _private.stop_recording():
        ups = [tf.compat.v1.placeholder(each.dtype, each.shape) for _, each in outputs]
        made = tf.gradients([each for _, each in outputs], [piece.inputs[n] for n in piece.differentiated], ups)
        pairs = zip(piece.differentiated, made, strict=True)
        found = [(n, tf.convert_to_tensor(each)) for n, each in pairs if each is not None]
    return _Gradients([(n, up) for (n, _), up in zip(outputs, ups, strict=True)], found)


def _saved(piece: Piece, targets: Sequence[tf.Tensor], kept: frozenset[str]) -> list[tf.Tensor]:
    """Return what the backward pass of a piece takes from its forward pass."""
    inputs, forward = piece.inputs, set(piece.operations)
    known = {each.ref() for each in inputs}
    taken = {
        each.ref(): each
        for operation in programs.between(inputs, targets)
        if operation not in forward
        for each in operation.inputs
        if each.op in forward and each.ref() not in known
    }
    return programs.recomputed_from(taken.values(), known, kept)


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
        model_axes = [axis for axis in self._axes.tensor if self._axes[axis] > 1]
        if len(model_axes) > 1:
            raise NotByRowsError(f"the mesh has several model axes ({', '.join(model_axes)})")
        self._model = model_axes[0] if model_axes else None
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
        if samples.may_be_in(tensor, 0):
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

    def _places(self) -> list[int | None]:
        """Return the dim of each variable that the model axis shards."""
        found: list[int | None] = []
        for variable, _ in self._trace.variables.reads.values():
            dims = [dim for dim, axis in enumerate(variable.layout.compute) if axis is not None]
            if any(variable.layout.compute[dim] != self._model for dim in dims):
                if any(self._axes[variable.layout.compute[dim]] > 1 for dim in dims):
                    raise NotByRowsError(f"several axes shard variable '{variable.path}'")
                dims = []
            found.append(dims[0] if dims else None)
        return found

    @functools.cached_property
    def _spans(self) -> list[WeightSpan]:
        """The spans of the block's weights. Empty if the model axis shards any weight of the block."""
        if any(each is not None for each in self._places()) or self._is_for_tf_gradients():
            return []
        trace = self._trace
        return block_spans.find(list(trace.variables.reads.values()), trace.read, len(trace.arguments))

    @staticmethod
    def _is_for_tf_gradients() -> bool:
        """Return whether `tf.gradients` may be asked for gradients. The call then takes each weight, to refuse it."""
        return not (_private.could_record() or steps.context().skips_frozen)

    @functools.cached_property
    def _active(self) -> frozenset[int]:
        """The numbers of the inputs that have a gradient: all but weights that are not trained.

        An argument of a first block has one, too, so that the block shares the programs of other blocks.
        """
        trace, frozen = self._trace, set[int]()
        if steps.context().skips_frozen:
            weights = [
                {id(_private.backend_variable(each)) for each in found}
                for found in (self._layer.variables, self._layer.trainable_variables)
            ]
            frozen = weights[0] - weights[1]
        reads = [variable for variable, _ in trace.variables.reads.values()]
        found = [
            *(True for _ in trace.arguments),
            *(id(each) not in frozen and (each.trainable or each.is_watched()) for each in reads),
            *(True for _ in trace.captured),
        ]
        return frozenset(
            number
            for number, (each, is_active) in enumerate(zip(self._inputs(), found, strict=False))
            if is_active and each.dtype.is_floating
        )

    def is_worth(self, least: int) -> bool:
        """Return whether the call has at least some number of operations, and looks up no rows of a variable.

        XLA adds the gradients of rows one by one on CPUs.
        """
        weights = {value.ref() for _, value in self._trace.variables.reads.values()}
        weights |= {each.ref() for each in self._trace.read}
        operations = [each for each in self._trace.operations if each.type not in ("Const", "Placeholder")]
        for each in operations:
            if each.type == "GatherV2":
                table = each.inputs[0]
                while table.ref() not in weights and table.op.type in _CARRYING:
                    table = table.op.inputs[0]
                if table.ref() in weights:
                    return False
        return len(operations) >= least

    # --- programs

    def programs(self) -> list[_Pair]:
        """Return the programs of the pieces of the block, in order. Blocks with the same operations share them.

        Raises:
            NotByRowsError: The block cannot be compiled.
        """
        self._check_outside()  # Not for all blocks with the same operations: the reason names a variable.
        trace, other, records, kept = self._trace, self._other_trace(), _private.could_record(), self._kept()
        changed = [each for each, _ in trace.variables.changes]
        key: tuple[Hashable, ...] = (
            programs.digest(trace.operations, [*trace.outputs, *self._inputs(), *trace.written, *changed]),
            # Blocks that are equal for these samples may differ for others: then the proof of one says nothing.
            None if other is None else programs.digest(other.operations, other.outputs),
            tuple(self._are_samples),
            self._devices,
            tuple(self._places()),
            tuple(dim for _, dim in trace.variables.changes),
            None if self._model is None else self._axes[self._model],
            self._mesh.device_type(),
            kept,
            records,
            tuple(each.pack for each in self._spans),
            self._active if records else None,
        )
        gradients = None
        if records and programs.has_custom_gradients(trace.operations):
            # Equal operations may have other gradients.
            gradients = _differentiated(self._whole({}))
            targets = [each for _, each in gradients.targets]
            key = (*key, programs.digest(trace.graph.get_operations(), [*targets, *self._inputs()]))
        return _pairs.find(key, lambda: [self._lowered(each, records, kept) for each in self._pieces(other)])

    def _kept(self) -> frozenset[str]:
        """Return the types of operations whose results the backward pass takes from the forward pass."""
        marks = [each for each in layer_patch.patches_on(self._layer) if each.change is layer_patch.BLOCK]
        if marks:
            return blocks.keeps_of(marks[0])
        return PRODUCTS if _private.remat_mode(self._layer) in (None, "activations") else frozenset()

    def _pieces(self, other: LocalTrace | None) -> list[Piece]:
        """Return the pieces of the block: one, if the model axis shards no weight of it."""
        samples_ = self._proved(other)
        places = self._places()
        if self._model is None or not any(each is not None for each in places):
            return [self._whole(samples_)]
        trace = self._trace
        return block_pieces.cut(
            TracedBlock(
                graph=trace.graph,
                operations=trace.operations,
                inputs=self._inputs(),
                arguments=trace.arguments,
                drawn=trace.drawn,
                outputs=trace.outputs,
                samples=samples_,
                places={each.ref(): dim for each, dim in zip(trace.read, places, strict=True) if dim is not None}
                | self._sequences(),
                changes={each.ref(): dim for each, dim in trace.variables.changes},
                active=[self._inputs()[number] for number in self._active],
                devices=self._axes[self._model],
            )
        )

    def _sequences(self) -> dict[Hashable, int]:
        """Return the dim of the positions of each argument that sequence parallelism shards along them."""
        lengths = {each.shape[1] for each, _ in self._trace.variables.changes}
        return {
            each.ref(): 1
            for each in self._trace.arguments
            if each.dtype.is_floating and each.shape.rank == 3 and each.shape[1] in lengths
        }

    def _whole(self, samples_: Mapping[Hashable, int]) -> Piece:
        """Return the block as one piece."""
        trace, inputs = self._trace, self._inputs()
        numbers = block_pieces.numbered(trace.operations)
        return Piece(
            graph=trace.graph,
            operations=trace.operations,
            inputs=inputs,
            taken=[numbers[each.ref()] for each in inputs],
            given=[Sharding(samples_.get(each.ref())) for each in inputs],
            outputs=trace.outputs,
            made=[numbers[each.ref()] for each in trace.outputs],
            results=[Sharding(samples_.get(each.ref())) for each in trace.outputs],
            differentiated=sorted(self._active),
        )

    def _lowered(self, piece: Piece, records: bool, kept: frozenset[str]) -> _Pair:
        gradients = _differentiated(piece) if records else _Gradients()
        upstreams = [each for _, each in gradients.upstreams]
        saved = _saved(piece, [each for _, each in gradients.targets], kept)
        outputs, packs = list(piece.outputs), [each.pack for each in self._spans]
        packed = {number: place for place, pack in enumerate(packs) for number in pack.numbers}
        has_samples = any(each.data is not None for each in piece.given)
        found = dict(gradients.targets)
        numbers = [number for number in found if number not in packed]
        packed_gradients = sorted({packed[number] for number in found if number in packed})
        # The local gradients of a weight become one tensor with a row for each device, and so do partial sums.
        with piece.graph.as_default(), _private.stop_recording():
            targets = [found[number] for number in numbers]
            targets += [block_spans.joined(found, packs[place], piece.inputs) for place in packed_gradients]
            for place, number in enumerate([*numbers, *(packs[each].numbers[0] for each in packed_gradients)]):
                for _ in self._summed(piece.given[number], has_samples, piece.is_sharded):
                    targets[place] = tf.expand_dims(targets[place], 0)
            for number, sharding in enumerate(piece.results):
                if sharding.is_partial:
                    outputs[number] = tf.expand_dims(outputs[number], 0)
        return _Pair(
            forward=self._program(piece.inputs, [*outputs, *saved], packs),
            backward=self._program([*piece.inputs, *saved, *upstreams], targets, packs) if targets else None,
            taken=piece.taken,
            given=piece.given,
            made=piece.made,
            results=piece.results,
            upstreams=[number for number, _ in gradients.upstreams],
            gradients=numbers,
            packs=packs,
            packed_gradients=packed_gradients,
            packed_inputs=frozenset(found).intersection(packed),
            is_sharded=piece.is_sharded,
        )

    def _summed(self, given: Sharding, has_samples: bool, is_sharded: bool) -> list[str]:
        """Return the axes over which the local gradients of an input are summed."""
        over_data = [self._axes.data] if has_samples and given.data is None else []
        over_model = [self._model] if is_sharded and given.model is None else []
        return [axis for axis in (*over_data, *over_model) if axis is not None]

    def _program(self, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], packs: Sequence[Pack]) -> Program:
        try:
            return programs.lower(inputs, outputs, self._mesh, packs=packs)
        except programs.NotCompiledError as error:
            raise NotByRowsError(f"XLA cannot compile it. {error}") from error

    def _check_outside(self) -> None:
        """Check that what the block draws and writes can be computed in the step: it follows from no samples."""
        trace = self._trace
        if not self._follows_from_samples([*trace.written, *(n for each in trace.drawn for n in each.op.inputs[1:])]):
            return
        for variable, value in trace.variables.writes.values():
            if self._follows_from_samples([value]):
                place = f"variable '{variable.path}'{self._owner_of(variable)}"
                raise NotByRowsError(f"it writes values that depend on the samples to {place}")
        for each in trace.drawn:
            if self._follows_from_samples(each.op.inputs[1:]):
                raise NotByRowsError(f"the seed or a parameter of {origins.described(each.op)} depends on the samples")

    def _follows_from_samples(self, wanted: Sequence[tf.Tensor]) -> bool:
        """Return whether tensors of the trace depend on samples or on random numbers."""
        arguments = zip(self._trace.arguments, self._are_samples, strict=True)
        inside = {value.ref() for value, has in arguments if has}
        return any(
            operation.type in _private.ALL_RANDOM_OPS or any(each.ref() in inside for each in operation.outputs)
            for operation in programs.between([], wanted)
        )

    def _owner_of(self, variable: Any) -> str:
        """Return a text that names the layer of the block that has a variable."""
        for layer in reversed(_private.flatten_layers(self._layer)):
            if any(_private.backend_variable(each) is variable for each in layer.variables):
                return f" of layer '{layer.name}' ({type(layer).__name__})"
        return ""

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

    def _proved(self, other: LocalTrace | None) -> dict[Hashable, int]:
        """Return the dim of the samples in each tensor that has samples."""
        if other is None:
            return {}
        traces = self._with_samples(self._trace), self._with_samples(other)
        try:
            found = row_proof.samples_in(*traces)
        except NotByRowsError:
            self._check_is_stable()
            raise
        if _private.could_record():
            row_proof.check_custom_gradients(*traces, found)
        return found

    def _check_is_stable(self) -> None:
        """Check that the block computes the same each time it is traced: otherwise the proof compares other things."""
        again = self._traced([tuple(each.shape) for each in self._trace.arguments])
        operation = row_proof.first_differing(self._with_samples(self._trace), self._with_samples(again))
        if operation is not None:
            raise NotByRowsError(
                f"its call computes something else each time it is traced, as with a Python counter: "
                f"{origins.described(operation)}"
            )

    def _with_samples(self, trace: LocalTrace) -> row_proof.Trace:
        has = [each for each, has in zip(trace.arguments, self._are_samples, strict=True) if has]
        return row_proof.Trace(trace.operations, has, trace.outputs, trace.drawn, trace.written)

    # --- the step

    def run(self, pairs: Sequence[_Pair]) -> Any:
        """Add the programs to the step, and return what the layer's call returns."""
        trace = self._trace
        numbers = block_pieces.numbered(trace.operations)
        captured = [tf.convert_to_tensor(outer) for outer, _ in trace.captured]
        outside = self._outside(captured)
        in_spans = {number for span in self._spans for number in span.pack.numbers}
        variables = [
            variable.read_in_span() if number in in_spans else tf.cast(variable.value(), taken.dtype)
            for number, ((variable, _), taken) in enumerate(
                zip(trace.variables.reads.values(), trace.read, strict=True), len(trace.arguments)
            )
        ]
        shardings = {number: each for pair in pairs for number, each in zip(pair.taken, pair.given, strict=True)}
        drawn = [self._draw(each, outside, shardings.get(numbers[each.ref()], Sharding())) for each in trace.drawn]
        written = [(variable, outside.made(value)) for variable, value in trace.variables.writes.values()]
        given = [*self._given, *variables, *captured, *drawn]
        made = {numbers[inner.ref()]: outer for inner, outer in zip(self._inputs(), given, strict=True)}
        left: dict[int, Sharding] = {}
        resharded: dict[tuple[int, Sharding], tf.Tensor] = {}
        for pair in pairs:
            taken = []
            for number, place in zip(pair.taken, pair.given, strict=True):
                if (number, place) not in resharded:
                    resharded[number, place] = self._resharded(made[number], left.get(number, place), place)
                taken.append(resharded[number, place])
            made |= zip(pair.made, self._called(pair, taken), strict=True)
            left |= zip(pair.made, pair.results, strict=True)
        for after, dim in trace.variables.changes:
            before = made.get(numbers[after.op.inputs[0].ref()])
            if before is not None:  # The block returns it.
                layout = self._layout(before.shape.rank, Sharding(0 if self._has_samples(before) else None, dim))
                made[numbers[after.ref()]] = transfer.relayout(before, layout, self._mesh)
        results = [made[numbers[each.ref()]] for each in trace.outputs]
        for variable, value in written:
            variable.assign(value)
        count = len(local_traces.tensors_in(trace.result))
        masks = iter(results[count:])
        for inner, result in zip(trace.outputs, results[:count], strict=False):
            if local_traces.masks_of([inner]):
                _private.set_mask(result, next(masks))
        return local_traces.replaced(trace.result, results[:count])

    def _resharded(self, tensor: tf.Tensor, before: Sharding, after: Sharding) -> tf.Tensor:
        """Gather a result of a piece over the model axis, or scatter it, if the next piece needs that."""
        if before.model == after.model:
            return tensor
        rank = tensor.shape.rank
        return sequence.resharded(tensor, self._layout(rank, before), self._layout(rank, after), self._mesh)

    def _called(self, pair: _Pair, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run the forward program, and the backward program where a gradient is taken."""
        count = len(pair.results)
        locals_: list[tf.Tensor] = []
        packed = {number for pack in pair.packs for number in pack.numbers}
        flat: list[tf.Tensor] = []
        scope = tf.get_current_name_scope()

        def forward(
            tensors: Sequence[tf.Tensor],
        ) -> tuple[list[tf.Tensor], list[tf.Tensor | None], list[tf.Tensor]]:
            entered = [
                None if number in packed else self._entered(each, place)
                for number, (each, place) in enumerate(zip(tensors, pair.given, strict=True))
            ]
            flat[:] = [self._entered(each.value(), Sharding()) for each in self._spans]
            results = pair.forward.call([*entered, *flat])
            made, saved = results[:count], results[count:]
            locals_[:] = made
            left = [self._left(*each) for each in zip(made, pair.results, strict=True)]
            return left, entered, saved

        def differentiable(*tensors: tf.Tensor) -> Any:
            left, entered, saved = forward(tensors)

            def backward(*upstreams: tf.Tensor) -> list[tf.Tensor | None]:
                found: list[tf.Tensor | None] = [None] * len(tensors)
                if pair.backward is None:
                    return found
                with tf.name_scope(f"gradient_tape/{scope}/"):  # The scope of the tape, and the block's.
                    ups = [self._upstream(upstreams[n], pair.results[n], pair.has_samples) for n in pair.upstreams]
                    made = self._called_once(pair.backward, [*entered, *saved, *ups, *flat])
                    for number, gradient in zip(pair.gradients, made, strict=False):
                        found[number] = self._gradient(gradient, pair.given[number], pair)
                    for place, gradient in zip(pair.packed_gradients, made[len(pair.gradients) :], strict=True):
                        parts = self._spans[place].gradients(self._gradient(gradient, Sharding(), pair))
                        for number, part in zip(pair.packs[place].numbers, parts, strict=True):
                            found[number] = part if number in pair.packed_inputs else None
                return found

            return left, backward

        records = _private.could_record()
        if self._is_for_tf_gradients():
            refuse = self._refuse("is not differentiated by tf.gradients. Use a tf.GradientTape, or compile")
            results = list(tf.custom_gradient(lambda *tensors: (forward(tensors)[0], refuse))(*given))
        elif not records:
            results = forward(given)[0]
        elif pair.packs:
            results = _private.with_gradient(differentiable, given)
        else:
            results = list(tf.custom_gradient(differentiable)(*given))
        for result, local, sharding in zip(results, locals_, pair.results, strict=True):
            self._note_local(result, local, sharding)
        return results

    def _called_once(self, program: Program, inputs: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
        """Run a backward program. Its result has no gradient."""
        if not _private.could_record():
            return program.call(inputs)
        given = [each for each in inputs if each is not None]
        refuse = self._refuse("has no second derivative, as a gradient penalty needs. Compile")

        def run(*tensors: tf.Tensor) -> Any:
            left = iter(tensors)
            return program.call([None if each is None else next(left) for each in inputs]), refuse

        return list(tf.custom_gradient(run)(*given))

    def _refuse(self, what: str) -> Callable[..., Any]:
        """Return a gradient function that raises."""

        def refuse(*_: tf.Tensor) -> Any:
            raise UnsupportedOperationError(
                f"Compiled block '{self._layer.path or self._layer.name}' {what} the model without jit_compile=True."
            )

        return refuse

    def _layout(self, rank: int, sharding: Sharding, summed: Sequence[str] = ()) -> Axes:
        """Return the layout of a tensor, with a row for each device of some axes in front."""
        axes: list[str | None] = [None] * rank
        if sharding.data is not None:
            axes[sharding.data] = self._axes.data
        if sharding.model is not None:
            axes[sharding.model] = self._model
        return (*summed, *axes)

    def _entered(self, tensor: tf.Tensor, sharding: Sharding) -> tf.Tensor:
        """Return the local shard of a tensor, for a program."""
        layout = self._layout(tensor.shape.rank, sharding)
        local = _locals_of(tensor).get(("local", tensor.ref(), layout))
        if local is not None:
            return local[0]
        return local_shards.local_shard(tensor, layout, self._mesh)

    def _left(self, tensor: tf.Tensor, sharding: Sharding, summed: Sequence[str] = ()) -> tf.Tensor:
        """Return the global tensor of a program's local result: the sum over some axes, or over partial sums."""
        assert self._model is not None or not sharding.is_partial
        summed = [self._model] if sharding.is_partial and self._model is not None else summed
        layout = self._layout(tensor.shape.rank - len(summed), sharding, summed)
        if not any(layout):
            return transfer.relayout(tensor, layout, self._mesh)
        left = local_shards.from_local(tensor, layout, self._mesh)
        return tf.reduce_sum(left, list(range(len(summed)))) if summed else left

    def _upstream(self, tensor: tf.Tensor, sharding: Sharding, has_samples: bool) -> tf.Tensor:
        """Return the local gradient of an output.

        If all devices computed the output, each has its full gradient, and the local gradients are summed later.
        """
        tensor = tf.convert_to_tensor(tensor)  # It may be IndexedSlices.
        if has_samples and sharding.data is None:
            tensor = tensor / tf.cast(self._devices, tensor.dtype)
        return self._entered(tensor, sharding)

    def _gradient(self, tensor: tf.Tensor, sharding: Sharding, pair: _Pair) -> tf.Tensor:
        """Return the gradient of an input. The local gradients of a weight are summed over the devices."""
        summed = self._summed(sharding, pair.has_samples, pair.is_sharded)
        left = self._left(tensor, sharding, summed)
        if not summed:
            self._note_local(left, tensor, sharding)
        return left

    def _note_local(self, tensor: tf.Tensor, local: tf.Tensor, sharding: Sharding) -> None:
        """Record the local shards of which a global tensor was made: another program takes them as they are."""
        layout = self._layout(tensor.shape.rank, sharding)
        if any(layout) and not sharding.is_partial:
            _locals_of(tensor)["local", tensor.ref(), layout] = local, None

    def _outside(self, captured: Sequence[tf.Tensor]) -> "_Outside":
        trace = self._trace
        known = {
            inner.ref(): outer
            for inner, outer, has in zip(trace.arguments, self._given, self._are_samples, strict=True)
            if not has
        }
        known |= {inner.ref(): outer for (_, inner), outer in zip(trace.captured, captured, strict=True)}
        wanted = [each for tensor in trace.drawn for each in tensor.op.inputs[1:]] + trace.written
        needed = set(programs.between([], wanted))
        for variable, inner in trace.variables.reads.values():
            if inner.op in needed:
                known[inner.ref()] = variable.value()
        return _Outside(known)

    def _draw(self, tensor: tf.Tensor, outside: "_Outside", sharding: Sharding) -> tf.Tensor:
        """Draw a random tensor in the step, for all devices."""
        shape = [size * self._devices if dim == sharding.data else size for dim, size in enumerate(tensor.shape)]
        parameters = [outside.made(each) for each in tensor.op.inputs[1:]]
        drawn = outside.run(tensor.op, [tf.constant(shape, tensor.op.inputs[0].dtype), *parameters])[0]
        return transfer.relayout(drawn, self._layout(len(shape), sharding), self._mesh)


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


def _locals_of(tensor: tf.Tensor) -> steps.Gathered:
    """Return the tensors that the step has recorded for the graph of a tensor. They end with the step."""
    step = steps.current()
    return {} if step is None else step.reads.gathered(tensor.graph)
