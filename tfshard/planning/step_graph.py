"""Trace the forward and backward pass of a step on one device's share of a batch. Nothing is computed or allocated.

Keras traces the model's operations. Variables are placeholders; each gather of a stored variable is an `Identity`. The
passes of a real step then change the graph: `recomputing.recompute` adds the operations that blocks compute again, and
`unshard_schedule.arrange` decides when the step gathers each variable. The plan thereby counts the gathers of a step.

A step's collectives and updates are not in this graph. The simulator adds them (`step_collectives`).
"""

import collections
import contextlib
import dataclasses
import enum
import functools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.graph import model_graph, traced_loss
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import Axes, VariableLayout, itemsize
from tfshard.operations import activations, blocks, context_parallel, cross_entropies, loops
from tfshard.planning import local_shares, variable_traffic
from tfshard.storage import graph_edits, recomputing, steps, unshard_schedule
from tfshard.storage.barrier import Barrier
from tfshard.storage.step_record import Block

# Operations that return their first input, without a copy.
VIEWS = frozenset("Bitcast ExpandDims Identity PreventGradient Reshape Snapshot Squeeze StopGradient".split())
# Operations that take next to no time.
WITHOUT_WORK = VIEWS | {"Const", "IdentityN", "NoOp", "Placeholder", "Shape", "Slice", "StridedSlice"}

# The name scope of operations that are not the model's.
_OURS = "Ours"


class Kind(enum.Enum):
    """The kinds of `StandIn`."""

    GATHER = "gather"
    REDUCTION = "reduction"
    UPDATE = "update"
    COPY = "copy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandIn:
    """An operation with the role of a collective or an update.

    Attributes:
        kind: A collective, an update, or a copy.
        unit: The name of the variable or group that a gather brings to its use.
        sent: Bytes of the full tensor of a collective.
        coded: Bytes of the codes in which a gather sends the tensor; None if it sends the elements as they are.
        updated: Bytes that an update writes on one device.
        is_cut: True if each device keeps its shard of a reduction only.
        by_replicas: True if devices reduce within each replica, and then between replicas.
    """

    kind: Kind
    unit: str = ""
    sent: int = 0
    coded: int | None = None
    updated: int = 0
    is_cut: bool = False
    by_replicas: bool = False

    @property
    def is_collective(self) -> bool:
        """True if devices wait for each other in this operation."""
        return self.kind in (Kind.GATHER, Kind.REDUCTION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of one use of a variable that stands alone, or of a member of a group.

    Attributes:
        layout: The variable.
        tensor: The gradient of a device's samples, in full.
    """

    layout: VariableLayout
    tensor: tf.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepGraph:
    """The graph of a step on one device.

    Attributes:
        operations: The operations in the order of the trace, recomputed ones included.
        added: The last operations, which `unshard_schedule.arrange` added.
        stand_ins: The operations that stand for collectives and updates.
        stored: The names of the placeholders of variables and buffers.
        loss: The loss.
        results: The results of the step, loss and gradients included.
        gradients: The gradients of trained variables.
        shares: Returns the number of devices of model axes that share a tensor.
    """

    operations: tuple[tf.Operation, ...]
    added: frozenset[tf.Operation]
    stand_ins: Mapping[tf.Operation, StandIn]
    stored: frozenset[str]
    loss: tf.Tensor
    results: tuple[tf.Tensor, ...]
    gradients: tuple[Gradient, ...]
    shares: Callable[[tf.Tensor], int]

    @property
    def itemsizes(self) -> dict[str, int]:
        """Bytes of an element of each gathered tensor, by the name of the variable or group."""
        return {each.unit: operation.outputs[0].dtype.size for operation, each in self.stand_ins.items() if each.unit}

    @functools.cached_property
    def known(self) -> frozenset[tf.Operation]:
        """The operations on constants and shapes. Their results are known before the step runs."""
        return recomputing.known_before(self.operations)

    @functools.cached_property
    def needed(self) -> dict[tf.Operation, list[tf.Tensor]]:
        """The operations that lead to a result, each with the inputs that are not known before the step runs."""
        return self.leading_to(self.results)

    def leading_to(self, results: Sequence[tf.Tensor]) -> dict[tf.Operation, list[tf.Tensor]]:
        """Return the operations that lead to some tensors, each with the inputs that are not known."""
        found: dict[tf.Operation, list[tf.Tensor]] = {}
        taken: set[Hashable] = set()
        left = list(results)
        while left:
            tensor = left.pop()
            operation = tensor.op
            if tensor.ref() in taken or operation in self.known:
                continue
            taken.add(tensor.ref())
            is_new = operation not in found
            # TensorFlow removes unused outputs of an IdentityN, with their inputs.
            inputs: Sequence[tf.Tensor] = operation.inputs
            if operation.type == "IdentityN":
                inputs = [operation.inputs[tensor.value_index]]
            taking = [each for each in inputs if each.op not in self.known]
            dependencies = found.setdefault(operation, [])
            if is_new or operation.type == "IdentityN":
                dependencies += taking
                left += taking
        return found

    def gathers(self) -> dict[str, int]:
        """Return how often a step gathers each variable or group, by its name."""
        found = (each.unit for operation, each in self.stand_ins.items() if each.unit and operation in self.needed)
        return dict(collections.Counter(found))


def trace(
    model: ModelOrSpecs,
    placement: ModelPlacement,
    *,
    inputs: Any = None,
    recompute: str | Sequence[str] | None = None,
) -> StepGraph:
    """Trace a step.

    A list of specs counts as a chain: products of one sample with one variable after the other.

    Args:
        model: A built model, or specs.
        placement: The layouts of its variables.
        inputs: The batch of the step over all devices, as for `model_graph.trace`.
        recompute: Blocks to compute again in addition to the model's marked blocks, as for `blocks.install`.

    Raises:
        LayoutError: The model cannot be called on its inputs, or its loss does not fit its outputs.
    """
    return Tracer(placement).run(model, inputs, recompute)


class Tracer:
    """Traces a step. A subclass may add the reductions and updates of gradients to the graph.

    Args:
        placement: The layouts of the model's variables.
    """

    def __init__(self, placement: ModelPlacement):
        self._placement = placement
        self._mesh_shape = placement.mesh_shape
        self._devices = placement.mesh_shape.data_size
        self._reshard = placement.config.reshard
        self._zero_stage = placement.config.zero_stage
        self._units = variable_traffic.members_of(placement.variables)
        self._graph = _private.func_graph("tfshard_step")
        # The placeholder of each variable or buffer, by the name of its unit; the value of each variable, by path.
        self._stored: dict[str, tf.Tensor] = {}
        self._values: dict[str, tf.Tensor] = {}
        # Tensors that stand for variables, with their compute layouts.
        self._sources: dict[Any, Axes] = {}
        self._name_of = {each.spec.path: name for name, members in self._units.items() for each in members}
        self._stand_ins: dict[tf.Operation, StandIn] = {}
        self._loss: tf.Tensor
        self._gradients: list[Gradient] = []
        self._results: list[tf.Tensor] = []

    def run(self, model: ModelOrSpecs, inputs: Any, recompute: str | Sequence[str] | None) -> StepGraph:
        """Trace a model, and let the passes of a step change its graph."""
        with self._graph.as_default(), contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The model warns again when it is trained.
            with tf.name_scope(_OURS):
                for name, members in self._units.items():
                    self._store(name, members)
            noted = stack.enter_context(steps.recorded_blocks(self._graph))
            stack.enter_context(activations.with_derivatives(self._together))
            stack.enter_context(cross_entropies.of_one_device())
            stack.enter_context(loops.without_cudnn())
            if isinstance(model, keras.Model):
                if recompute is not None:
                    stack.enter_context(blocks.marked(model, recompute))
                if self._mesh_shape.contexts > 1:
                    inputs = context_parallel.in_rows(inputs, self._mesh_shape.contexts)
                    stack.enter_context(context_parallel.any_length([model]))
                tensors = model_graph.local_inputs(model, inputs, self._devices)
                gradients = self._differentiate(functools.partial(traced_loss.loss_of_model, model, tensors))
            else:
                gradients = self._differentiate(functools.partial(_loss_of_chain, list(self._values)))
            with tf.name_scope(_OURS):
                waiting = self._after_backward(gradients)
        return self._arrange(noted, waiting)

    def _after_backward(self, gradients: Mapping[str, tf.Tensor]) -> list[unshard_schedule.WaitingGradient]:
        """Add the reductions and updates of gradients to the graph. Return the gradients for which the backward pass
        waits."""
        alone = {each.layout.spec.path for each in self._gradients}
        for layout in self._placement.variables:
            if layout.spec.path in gradients and layout.spec.path not in alone:
                self._gradients.append(Gradient(layout=layout, tensor=gradients[layout.spec.path]))
        self._results += [each.tensor for each in self._gradients]
        return []

    def _read_alone(self, name: str, layout: VariableLayout, value: tf.Tensor) -> tf.Tensor:
        """Return the value of a variable that stands alone, where an operation uses it. Each use has a gradient."""
        del name
        if not layout.spec.trainable:
            return tf.identity(value) if self._is_gathered(layout) else value

        def note(upstream: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
            gradient = tf.convert_to_tensor(upstream)
            self._gradients.append(Gradient(layout=layout, tensor=gradient))
            return gradient

        return tf.custom_gradient(lambda given: (tf.identity(given), note))(value)

    def _store(self, name: str, members: Sequence[VariableLayout]) -> None:
        first = members[0]
        if not first.grouped:
            full = tf.compat.v1.placeholder(first.spec.dtype, first.spec.shape)
            self._stored[name] = self._values[first.spec.path] = full
            self._sources[full.ref()] = first.compute
            return
        form = first.flat
        assert form is not None
        shards = math.prod(form.model_sizes)
        value = self._stored[name] = tf.compat.v1.placeholder(first.spec.dtype, (shards * form.elements,))
        if self._is_gathered(first):
            value = tf.identity(value)
        for each in members:
            place = form.members[each.member]
            part = tf.reshape(value[shards * place.offset : shards * place.end], each.spec.shape)
            self._values[each.spec.path] = part
            self._sources[part.ref()] = each.compute

    def _is_gathered(self, layout: VariableLayout) -> bool:
        shard_params = self._zero_stage.shard_params and self._devices > 1
        return shard_params and variable_traffic.is_gathered(layout, self._zero_stage)

    def _read(self, path: str) -> tf.Tensor:
        """Return the value of a variable for one use, read outside of the loop or branch that uses it."""
        value = self._values[path]
        name = self._name_of[path]
        first = self._units[name][0]
        if first.grouped:
            return value
        with steps.scope_of(value):
            return self._read_alone(name, first, value)

    def _differentiate(self, loss: Callable[[Callable[[str], tf.Tensor]], tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the gradient of each trained variable, by path.

        Args:
            loss: Returns the loss, given a function from the path of a variable to its value.
        """
        trained = [each.spec.path for each in self._placement.variables if each.spec.trainable]
        watched = {path: self._values[path] for path in trained}
        with tf.GradientTape() as tape:
            tape.watch(list(watched.values()))
            self._loss = loss(self._read)
        self._results.append(self._loss)
        found = zip(watched, tape.gradient(self._loss, list(watched.values())), strict=True)
        return {path: tf.convert_to_tensor(gradient) for path, gradient in found if gradient is not None}

    def _together(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Put tensors behind one barrier, like `Step.tie`."""
        return Barrier(read_token=_token, tokens=self._results).tie(*tensors)

    def _arrange(self, noted: Sequence[Block], gradients: Sequence[unshard_schedule.WaitingGradient]) -> StepGraph:
        """Run the passes of a step: recomputation, and the schedule of gathers."""
        barrier = Barrier(read_token=_token)
        stored_values = {each.ref() for each in self._stored.values()}
        operations = recomputing.recompute(self._graph, noted, barrier, stored_values)
        stored = {
            name: unshard_schedule.StoredBuffer(
                key=name,
                bytes=variable_traffic.whole_bytes(members[0], self._mesh_shape),
                itemsize=itemsize(members[0].spec.dtype),
                is_gathered=self._is_gathered(members[0]),
                keeps=self._reshard.keeps(each.spec.path for each in members),
                is_coded=self._coded_bytes(name) is not None,
            )
            for name, members in self._units.items()
        }
        reads = [(each, self._stored[name]) for name, each in stored.items()]
        if gradients or any(each.is_gathered for each in stored.values()):
            unshard_schedule.arrange(operations, reads, gradients, self._reshard, barrier)
        self._results += [each.updated for each in gradients if each.updated is not None]
        self._results += barrier.tokens
        self._mark_gathers(stored)
        arranged = frozenset(operations)
        added = [each for each in self._graph.get_operations() if each not in arranged]
        return StepGraph(
            operations=(*operations, *added),
            added=frozenset(added),
            stand_ins=self._stand_ins,
            stored=frozenset(tensor.name for tensor in self._stored.values()),
            loss=self._loss,
            results=tuple(self._results),
            gradients=tuple(self._gradients),
            shares=local_shares.shares_of(self._all_sources(), self._mesh_shape),
        )

    def _coded_bytes(self, name: str) -> int | None:
        """Return the bytes in which a step gathers a unit in codes; None if it gathers the unit exactly."""
        return variable_traffic.coded_bytes(self._units[name][0], self._mesh_shape)

    def _mark_gathers(self, stored: Mapping[str, unshard_schedule.StoredBuffer]) -> None:
        """Find the `Identity` of each gather, behind its barrier and its cast to the compute dtype."""
        name_of = {tensor.ref(): name for name, tensor in self._stored.items()}
        begun: dict[Hashable, str] = {}
        gathered: dict[Hashable, tf.Tensor] = {}
        for operation in self._graph.get_operations():
            for number, each in enumerate(operation.inputs):
                name = name_of.get(each.ref()) or begun.get(each.ref())
                if name is None or not stored[name].is_gathered:
                    continue
                if operation.type == "Identity" and each.ref() in gathered:
                    _replace(operation.outputs[0], gathered[each.ref()])  # As TensorFlow merges operations.
                elif operation.type == "Identity":
                    gathered[each.ref()] = operation.outputs[0]
                    sent = stored[name].bytes // stored[name].itemsize * each.dtype.size
                    coded = self._coded_bytes(name)
                    self._stand_ins[operation] = StandIn(kind=Kind.GATHER, unit=name, sent=sent, coded=coded)
                elif operation.type == "IdentityN":
                    begun[operation.outputs[number].ref()] = name
                elif operation.type in ("Cast", "Bitcast"):
                    begun[operation.outputs[0].ref()] = name

    def _all_sources(self) -> dict[Any, Axes]:
        """Return the tensors that stand for variables, including copies that a schedule has cut out of a group that it
        gathers again.

        A copy gets the shape of its variable from the same constant.
        """
        axes_of = {
            ref.deref().op.inputs[1].ref(): axes
            for ref, axes in self._sources.items()
            if ref.deref().op.type == "Reshape"
        }
        copies = {
            operation.outputs[0].ref(): axes_of[operation.inputs[1].ref()]
            for operation in self._graph.get_operations()
            if operation.type == "Reshape" and operation.inputs[1].ref() in axes_of
        }
        return self._sources | copies


def _token() -> tf.Tensor:
    """Return a placeholder for the token of a step (barrier.py)."""
    return tf.compat.v1.placeholder(tf.float32, ())


def _replace(tensor: tf.Tensor, other: tf.Tensor) -> None:
    """Give all users of a tensor another tensor."""
    for each in graph_edits.consumers(tensor):
        each.replace(other)


def _loss_of_chain(paths: Sequence[str], read: Callable[[str], tf.Tensor]) -> tf.Tensor:
    """Return a loss of products of one sample with one variable after the other."""
    x = tf.compat.v1.placeholder(tf.float32, (1, 1))
    for value in map(read, paths):
        rows = value.shape[0] if value.shape.rank else 1
        matrix = tf.cast(tf.reshape(value, (rows, -1)), tf.float32)
        x = tf.reduce_sum(tf.matmul(tf.tile(x, (1, rows)), matrix), axis=1, keepdims=True)
    # Its gradient is made of the sample.
    return tf.reduce_mean(tf.square(x))
