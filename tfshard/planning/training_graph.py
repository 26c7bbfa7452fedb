"""The graph of a training step before it is expanded: forward and backward pass, gathers, reductions and updates.

What one device computes: the model's own operations on its share of a batch, traced as Keras traces them, with nothing
allocated. What is stored stands in it as placeholders; gathers, reductions and updates are operations that stand for
those of the step. Blocks are recomputed and turns arranged by what does it in a step (`recomputing.recompute`,
`unshard_schedule.arrange`).
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
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.errors import LayoutError
from tfshard.graph import adapters, inventory, model_graph
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts import variable_layout
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import Axes, VariableLayout, itemsize
from tfshard.operations import activations, blocks, cross_entropies, loops
from tfshard.planning import local_shares, variable_traffic
from tfshard.storage import graph_edits, recomputing, steps, unshard_schedule, update_order
from tfshard.storage.barrier import Barrier
from tfshard.storage.step_record import Block

# What gives its first input, and copies nothing.
VIEWS = frozenset("Bitcast ExpandDims Identity PreventGradient Reshape Snapshot Squeeze StopGradient".split())
# What gives a part of it, with a copy or without (`liveness.is_aligned`).
CUTS = frozenset(("Slice", "StridedSlice"))
# And what else takes next to no time.
WITHOUT_WORK = VIEWS | CUTS | {"Const", "IdentityN", "NoOp", "Placeholder", "Shape"}

# In the names of operations that are not the model's: before those in the order of names, as it is in a step
# (`joining`).
_OURS = "Ours"


class Kind(enum.Enum):
    """What an operation of a step stands for."""

    GATHER = "gather"
    GRADIENT = "gradient"
    JOINED = "joined"
    REDUCTION = "reduction"
    SHARD = "shard"
    UPDATE = "update"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What an operation that stands for others takes of memory on one device.

    Attributes:
        kind: What it is.
        unit: The name of what is gathered.
        sent: Of a collective, bytes of the whole tensor.
        is_cut: Whether devices need a part of what is reduced only.
        by_replicas: Whether it is added up in each replica, and then between them.
        output: Bytes of what it gives; None where it gives its input.
        temporary: Bytes that it has while it works, on top.
    """

    kind: Kind
    output: int | None
    temporary: int = 0
    unit: str = ""
    sent: int = 0
    is_cut: bool = False
    by_replicas: bool = False

    @property
    def is_collective(self) -> bool:
        """Whether devices wait for each other in it."""
        return self.kind in (Kind.GATHER, Kind.REDUCTION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingGraph:
    """A step on one device.

    Attributes:
        operations: In the order in which they were added.
        costs: Of operations that stand for others.
        stored: The names of placeholders of what rests.
        shards: Operations on what rests of a unit on a device, before it is gathered.
        devices: Among how many the batch axis shares what is stored out.
        results: What the step is there for.
        is_part: Whether it is one of several parts of a step, which are turns of a loop.
        shares: Among how many devices of model axes a tensor is shared out.
    """

    operations: tuple[tf.Operation, ...]
    costs: Mapping[tf.Operation, Cost]
    stored: frozenset[str]
    shards: frozenset[tf.Operation]
    devices: int
    results: tuple[tf.Tensor, ...]
    is_part: bool
    shares: Callable[[tf.Tensor], int]

    @property
    def itemsizes(self) -> dict[str, int]:
        """Bytes of an element of what is gathered to be read, by the name of its unit."""
        return {cost.unit: each.outputs[0].dtype.size for each, cost in self.costs.items() if cost.unit}

    @functools.cached_property
    def known(self) -> frozenset[tf.Operation]:
        """Operations whose results are known before the step runs: of constants, and of shapes."""
        return recomputing.known_before(self.operations)

    @functools.cached_property
    def needed(self) -> dict[tf.Operation, list[tf.Tensor]]:
        """What each operation that leads to a result takes of what is not known before the step runs."""
        found: dict[tf.Operation, list[tf.Tensor]] = {}
        taken: set[Hashable] = set()
        left = list(self.results)
        while left:
            tensor = left.pop()
            operation = tensor.op
            if tensor.ref() in taken or operation in self.known:
                continue
            taken.add(tensor.ref())
            is_new = operation not in found
            # TensorFlow takes unused outputs of an IdentityN away, with their inputs.
            inputs: Sequence[tf.Tensor] = operation.inputs
            if operation.type == "IdentityN":
                inputs = [operation.inputs[tensor.value_index]]
            taking = [each for each in inputs if each.op not in self.known]
            own = found.setdefault(operation, [])
            if is_new or operation.type == "IdentityN":
                own += taking
                left += taking
        return found

    @functools.cached_property
    def summed_over_devices(self) -> frozenset[tf.Operation]:
        """Operations for which the devices wait: what they add up of their samples, they go on with, as with the
        moments of a batch."""
        if self.devices == 1:
            return frozenset()
        users: dict[tf.Operation, list[tf.Operation]] = collections.defaultdict(list)
        for operation, inputs in self.needed.items():
            for each in inputs:
                users[each.op].append(operation)

        def goes_on(operation: tf.Operation) -> bool:
            size = operation.outputs[0].shape.num_elements() or 0
            left, seen = [operation], {operation}
            while left:
                for user in users[left.pop()]:
                    if user in self.costs or user in seen:
                        continue
                    if any((output.shape.num_elements() or 0) > size for output in user.outputs):
                        return True
                    seen.add(user)
                    left.append(user)
            return False

        return frozenset(each for each in self.needed if _sums_samples(each) and goes_on(each))

    def gathers(self) -> dict[str, int]:
        """How often each unit is gathered to be read, by its name."""
        counted = collections.Counter(cost.unit for each, cost in self.costs.items() if each in self.needed)
        return {unit: count for unit, count in counted.items() if unit}


def trace(
    model: ModelOrSpecs,
    placement: ModelPlacement,
    *,
    inputs: Any = None,
    slot_bytes: Mapping[str, int] | None = None,
    needs_all_gradients: bool = False,
    is_part: bool = False,
    recompute: str | Sequence[str] | None = None,
) -> TrainingGraph:
    """Traces a step. Of a list of specs, each variable is used once, in their order, by a product with one sample.

    Args:
        model: A built model, or specs.
        placement: Where its variables go.
        inputs: What the model is called on, over all devices; as for `model_graph.trace`.
        slot_bytes: Bytes of slots that are new while the old ones are there, by unit, on one device.
        needs_all_gradients: Whether no variable can be updated before all gradients are there (`global_clipnorm`).
        is_part: Whether it is one of several parts of a step: gradients are added up in each, and all updated after the
            last.
        recompute: Which blocks are computed again, besides those that the model has marked: as `blocks.install` takes
            them.

    Raises:
        LayoutError: The model cannot be called on its inputs, or no loss can be made of its outputs.
    """
    if is_part:
        slot_bytes, needs_all_gradients = {}, False
    traced = _Trace(placement, slot_bytes or {}, needs_all_gradients, is_part)
    return traced.run(model, inputs, recompute)


class _Trace:
    """A step that is being traced.

    Args:
        placement: Where the variables go.
        slot_bytes: Bytes of slots that are new while the old ones are there, by unit, on one device.
        needs_all_gradients: Whether updates wait for all gradients.
        is_part: Whether it is one of several parts of a step.
    """

    def __init__(
        self,
        placement: ModelPlacement,
        slot_bytes: Mapping[str, int],
        needs_all_gradients: bool,
        is_part: bool,
    ):
        self._placement = placement
        self._mesh_shape = placement.mesh_shape
        self._devices = placement.mesh_shape.data_size
        self._reshard = placement.config.reshard
        self._zero_stage = placement.config.zero_stage
        self._slot_bytes = slot_bytes
        self._needs_all = needs_all_gradients
        self._is_part = is_part
        self._units = variable_traffic.members_of(placement.variables)
        self._graph = _private.func_graph("tfshard_training")
        # What rests, by the name of its unit; the value of each variable, by path.
        self._stored: dict[str, tf.Tensor] = {}
        self._values: dict[str, tf.Tensor] = {}
        # Tensors that stand for variables, with their compute layouts.
        self._sources: dict[Any, Axes] = {}
        self._name_of = {each.spec.path: name for name, members in self._units.items() for each in members}
        # Gradients that are reduced by themselves, as shards, with the name of their unit: one for each read.
        self._scattered: list[tuple[str, tf.Tensor]] = []
        # Of what stands alone, how often it is read, and those gradients that are reduced together, one for each read.
        self._reads: dict[str, int] = collections.Counter()
        self._joining: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
        self._costs: dict[tf.Operation, Cost] = {}
        self._loss: tf.Tensor
        self._results: list[tf.Tensor] = []

    def run(self, model: ModelOrSpecs, inputs: Any, recompute: str | Sequence[str] | None) -> TrainingGraph:
        with self._graph.as_default(), contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The model's own call warns again when it is trained.
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
                tensors = model_graph.local_inputs(model, inputs, self._devices)
                gradients = self._differentiate(functools.partial(loss_of_model, model, tensors))
            else:
                gradients = self._differentiate(functools.partial(_loss_of_chain, list(self._values)))
            with tf.name_scope(_OURS):
                arranged = self._update(gradients)
        return self._arrange(noted, arranged)

    # --- forward and backward -------------------------------------------------------------------------

    def _store(self, name: str, members: Sequence[VariableLayout]) -> None:
        first = members[0]
        if not first.grouped:
            whole = tf.compat.v1.placeholder(first.spec.dtype, first.spec.shape)
            self._stored[name] = self._values[first.spec.path] = whole
            self._sources[whole.ref()] = first.compute
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

    def _is_scattered(self, layout: VariableLayout) -> bool:
        """Whether its gradient is reduced by itself, and cut."""
        alone = layout.flat is None and layout.sharded is not None
        return alone and layout.spec.trainable and layout.update_sharded and self._devices > 1

    def _read(self, path: str) -> tf.Tensor:
        """The value of a variable, as a step reads it: each time anew; outside of a loop or a branch that uses it."""
        value = self._values[path]
        name = self._name_of[path]
        first = self._units[name][0]
        if first.grouped:
            return value
        with steps.scope_of(value):
            if first.spec.trainable and self._devices > 1:
                return self._noting(name, first, value)
            return tf.identity(value) if self._is_gathered(first) else value

    def _noting(self, name: str, layout: VariableLayout, value: tf.Tensor) -> tf.Tensor:
        """Return the same value. Its gradient is reduced and sliced where it is computed (as by
        `gradient.with_pinned_gradient`), or joins the gradients that are reduced as one. Each use has its own."""
        bytes_ = self._bytes(layout)
        self._reads[name] += 1

        def gradient(upstream: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
            whole = tf.convert_to_tensor(upstream)
            if not self._is_scattered(layout) or variable_traffic.joins(layout, self._reads[name]):
                self._joining[name].append(whole)
                return whole
            transposed = whole.op if whole.op.type == "Transpose" else None  # Done on the shards (`gradient.scatter`).
            reduced = self._reduced(whole if transposed is None else transposed.inputs[0], bytes_, is_cut=True)
            shard = self._stand_in(reduced, Kind.SHARD, bytes_ // self._devices)
            if transposed is not None:
                shard = tf.transpose(shard, transposed.inputs[1])
                self._costs[shard.op] = Cost(kind=Kind.SHARD, output=bytes_ // self._devices)
            self._scattered.append((name, shard))
            return shard

        return tf.custom_gradient(lambda given: (tf.identity(given), gradient))(value)

    def _trained(self) -> list[VariableLayout]:
        return [each for each in self._placement.variables if each.spec.trainable]

    def _differentiate(self, loss: Callable[[Callable[[str], tf.Tensor]], tf.Tensor]) -> dict[str, tf.Tensor]:
        """The gradient of each trained variable, by path.

        Args:
            loss: Gives the loss for what gives the value of a variable by its path.
        """
        watched = {
            each.spec.path: self._values[each.spec.path] for each in self._placement.variables if each.spec.trainable
        }
        with tf.GradientTape() as tape:
            tape.watch(list(watched.values()))
            result = loss(self._read)
        self._loss = result
        found = zip(watched, tape.gradient(result, list(watched.values())), strict=True)
        return {path: tf.convert_to_tensor(gradient) for path, gradient in found if gradient is not None}

    def _together(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `Step.tie`."""
        made: list[tf.Tensor] = tf.raw_ops.IdentityN(input=[tf.compat.v1.placeholder(tf.float32, ()), *tensors])
        self._results.append(made[0])
        return made[1:]

    # --- reductions and updates -----------------------------------------------------------------------

    def _stand_in(
        self, tensor: tf.Tensor, kind: Kind, output: int | None, temporary: float = 0, **sent: Any
    ) -> tf.Tensor:
        made = tf.identity(tensor)
        self._costs[made.op] = Cost(kind=kind, output=output, temporary=int(temporary), **sent)
        return made

    def _update(self, gradients: Mapping[str, tf.Tensor]) -> list[unshard_schedule.Gradient]:
        """Adds what becomes of gradients.

        Returns:
            Those for which the backward pass waits.
        """
        scattered = dict(self._scattered)
        merged: dict[tf.DType, dict[str, list[tf.Tensor]]] = {}
        by_replicas: dict[str, tf.Tensor] = {}
        for name, members in self._units.items():
            for each in members:
                gradient = gradients.get(each.spec.path)
                if gradient is None:
                    continue
                if variable_layout.is_added_up_by_replicas(each, self._mesh_shape):
                    if name not in scattered:
                        bytes_ = self._bytes(each)
                        # The pieces of all devices of a replica, and what is gathered of sums (`replicas.all_reduce`).
                        by_replicas[name] = self._stand_in(
                            gradient, Kind.REDUCTION, bytes_, bytes_, sent=bytes_, by_replicas=True
                        )
                    continue
                own = self._joining.get(name, [] if name in scattered else [gradient])
                if own:
                    merged.setdefault(gradient.dtype, {})[each.spec.path] = own
        joined: dict[str, list[tf.Tensor]] = {}
        for together in merged.values():
            joined |= self._merged(together)
        waiting = dict(by_replicas)
        shards: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
        for name, shard in self._scattered:
            shards[name].append(shard)
        for name, own in shards.items():
            waiting[name] = self._sum([*own, *joined.pop(name, [])], Kind.SHARD)
        if self._needs_all:
            together = waiting | {name: self._of_unit(name, own) for name, own in joined.items()}
            tied = dict(zip(together, tf.raw_ops.IdentityN(input=list(together.values())), strict=True))
            waiting, joined = {name: tied[name] for name in waiting}, {name: [tied[name]] for name in joined}
        updated = self._updated_in_turn(joined) | {name: self._updated(name, each) for name, each in waiting.items()}
        updated = {name: self._gathered_again(name, each) for name, each in updated.items()}
        self._results += updated.values()
        return [
            unshard_schedule.Gradient(
                key=name,
                tensor=tensor,
                is_scattered=self._units[name][0].gradient != self._units[name][0].compute,
                updated=updated[name] if scattered[name] is tensor else None,
            )
            for name, tensor in self._scattered
        ]

    def _bytes(self, layout: VariableLayout) -> int:
        """Of a gradient, whole over the batch axis."""
        return variable_traffic.device_bytes(layout.spec.shape, layout.compute, self._mesh_shape, layout.spec.dtype)

    def _reduced(self, gradient: tf.Tensor, bytes_: int, is_cut: bool = False) -> tf.Tensor:
        """A ring reduces in place, with a buffer for each piece but its own (TensorFlow's ring_reducer.cc)."""
        ring = bytes_ * (1 - 1 / self._devices)
        return self._stand_in(gradient, Kind.REDUCTION, None, ring, sent=bytes_, is_cut=is_cut)

    def _sum(self, parts: Sequence[tf.Tensor], kind: Kind, output: int | None = None) -> tf.Tensor:
        """Of gradients of one variable, where the first is, if `output` is None."""
        if len(parts) == 1:
            return parts[0]
        return self._joined(parts, kind, output)

    def _joined(self, parts: Sequence[tf.Tensor], kind: Kind, output: int | None) -> tf.Tensor:
        """What is made of several, of any shape."""
        made = tf.concat([tf.reshape(each, [-1]) for each in parts], axis=0)
        self._costs[made.op] = Cost(kind=kind, output=output)
        return made

    def _merged(self, gradients: Mapping[str, Sequence[tf.Tensor]]) -> dict[str, list[tf.Tensor]]:
        """Gradients that are reduced as one, of the members of each unit, by its name.

        Args:
            gradients: By path, one for each use.
        """
        sizes = {each.spec.path: self._bytes(each) for each in self._placement.variables}
        total = sum(len(own) * sizes[path] for path, own in gradients.items())
        parts = {path: list(own) for path, own in gradients.items()}
        if self._devices > 1:
            every = [each for own in gradients.values() for each in own]
            # With the loss, which is there first.
            joined = self._joined([tf.cast(self._loss, every[0].dtype), *every], Kind.JOINED, total)
            reduced = self._reduced(joined, total)
            # Cut out again as copies: behind the loss they do not begin where TensorFlow's SliceOp would only point to
            # them. In which order is not known; most is there where those of large units come first.
            for path in sorted(gradients, key=lambda path: -self._unit_bytes(path)):
                parts[path] = [self._stand_in(reduced, Kind.GRADIENT, sizes[path]) for _ in gradients[path]]
        summed = {path: self._sum(own, Kind.GRADIENT, sizes[path]) for path, own in parts.items()}
        if self._devices > 1:  # No update begins before all are cut out (update_order.py).
            summed = dict(zip(summed, tf.raw_ops.IdentityN(input=list(summed.values())), strict=True))
        found: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
        for path, gradient in summed.items():
            found[self._name_of[path]].append(gradient)
        return found

    def _of_unit(self, name: str, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Of the gradients of its members, what a unit is updated with."""
        if len(gradients) == 1:
            return gradients[0]
        return self._joined(gradients, Kind.SHARD, self._update_bytes(self._units[name][0]))

    def _unit_bytes(self, path: str) -> int:
        """Of what is updated together with a variable."""
        return sum(self._bytes(each) for each in self._units[self._name_of[path]])

    def _update_bytes(self, layout: VariableLayout) -> int:
        """Of what an optimizer updates of a unit, on one device."""
        slot = layout.slot(layout.spec)
        return variable_traffic.device_bytes(slot.storage_shape, slot.storage, self._mesh_shape, layout.spec.dtype)

    def _updated_in_turn(self, gradients: Mapping[str, list[tf.Tensor]]) -> dict[str, tf.Tensor]:
        """What becomes of gradients that come at once, by unit: one update after the other (update_order.py)."""
        place = {each.spec.path: number for number, each in enumerate(self._placement.variables)}
        updated: dict[str, tf.Tensor] = {}
        before: str | None = None
        # That of a group runs when the last of its members has come.
        for name in sorted(gradients, key=lambda name: max(place[each.spec.path] for each in self._units[name])):
            first, *others = gradients[name]
            waits = self._devices > 1 and self._update_bytes(self._units[name][0]) >= update_order.LEAST_BYTES
            if waits and before is not None:
                updated[before], first = tf.raw_ops.IdentityN(input=[updated[before], first])
            updated[name] = self._updated(name, self._of_unit(name, [first, *others]))
            before = name if waits else before
        return updated

    def _updated(self, name: str, gradient: tf.Tensor) -> tf.Tensor:
        """What is stored of a unit from now on. An update makes new values of slots, and then what changes the
        variable, in the room of the old ones (`liveness.peak_of`, `at_once`)."""
        shard = self._update_bytes(self._units[name][0])
        return self._stand_in(gradient, Kind.UPDATE, shard, self._slot_bytes.get(name, 0))

    def _gathered_again(self, name: str, updated: tf.Tensor) -> tf.Tensor:
        """What is stored of a unit, if that is whole."""
        first = self._units[name][0]
        zero_stage = self._zero_stage
        is_sharded = zero_stage.shard_slots and not zero_stage.shard_params and self._devices > 1
        if not (is_sharded and variable_traffic.is_gathered(first, zero_stage)):
            return updated
        whole = variable_traffic.whole_bytes(first, self._mesh_shape)
        return self._stand_in(updated, Kind.GATHER, whole, sent=whole)

    # --- turns ----------------------------------------------------------------------------------------

    def _arrange(self, noted: Sequence[Block], gradients: Sequence[unshard_schedule.Gradient]) -> TrainingGraph:
        barrier = Barrier(read_token=lambda: tf.compat.v1.placeholder(tf.float32, ()))
        stored_values = {each.ref() for each in self._stored.values()}
        operations = recomputing.recompute(self._graph, noted, barrier, stored_values)
        stored = {
            name: unshard_schedule.StoredBuffer(
                key=name,
                bytes=variable_traffic.whole_bytes(members[0], self._mesh_shape),
                itemsize=itemsize(members[0].spec.dtype),
                is_gathered=self._is_gathered(members[0]),
                keeps=self._reshard.keeps(each.spec.path for each in members),
            )
            for name, members in self._units.items()
        }
        reads = [(each, self._stored[name]) for name, each in stored.items()]
        if gradients or any(each.is_gathered for each in stored.values()):
            unshard_schedule.arrange(operations, reads, gradients, self._reshard, barrier)
        self._results += [each.updated for each in gradients if each.updated is not None]
        self._results += barrier.tokens
        return self._finished(stored)

    def _finished(self, stored: Mapping[str, unshard_schedule.StoredBuffer]) -> TrainingGraph:
        name_of = {tensor.ref(): name for name, tensor in self._stored.items()}
        begun: dict[Hashable, str] = {}
        gathered: dict[Hashable, tf.Tensor] = {}
        shards: set[tf.Operation] = set()
        for operation in self._graph.get_operations():
            for number, each in enumerate(operation.inputs):
                name = name_of.get(each.ref()) or begun.get(each.ref())
                if name is None or not stored[name].is_gathered:
                    continue
                if operation.type == "Identity" and each.ref() in gathered:
                    _replace(operation.outputs[0], gathered[each.ref()])  # As TensorFlow merges operations.
                elif operation.type == "Identity":
                    gathered[each.ref()] = operation.outputs[0]
                    whole = stored[name].bytes // stored[name].itemsize * each.dtype.size
                    # Beside model axes it is copied once it is gathered (`local_shards.from_local`).
                    copy = whole if self._mesh_shape.tensor else 0
                    self._costs[operation] = Cost(kind=Kind.GATHER, output=whole, temporary=copy, unit=name, sent=whole)
                elif operation.type == "IdentityN":
                    begun[operation.outputs[number].ref()] = name
                elif operation.type in ("Cast", "Bitcast"):
                    begun[operation.outputs[0].ref()] = name
                    shards.add(operation)
        return TrainingGraph(
            operations=tuple(self._graph.get_operations()),
            costs=self._costs,
            stored=frozenset(tensor.name for tensor in self._stored.values()),
            shards=frozenset(shards),
            devices=self._mesh_shape.shards,
            results=(self._loss, *self._results),
            is_part=self._is_part,
            shares=local_shares.shares_of(self._all_sources(), self._mesh_shape),
        )

    def _all_sources(self) -> dict[Any, Axes]:
        """Tensors that stand for variables, those too that turns have cut out of a group that they gather again: they
        are copies, which are given the shape of a variable by the same constant."""
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


def _sums_samples(operation: tf.Operation) -> bool:
    """Whether it adds up over the first dim, and not over all."""
    if operation.type not in ("Mean", "Sum") or (operation.outputs[0].shape.num_elements() or 0) <= 1:
        return False
    dims = tf.get_static_value(operation.inputs[1])
    return dims is not None and 0 in np.ravel(dims)


def _replace(tensor: tf.Tensor, other: tf.Tensor) -> None:
    """Gives all that take a tensor another one."""
    for each in graph_edits.consumers(tensor):
        each.replace(other)


class _Reads(keras.StatelessScope):  # type: ignore[misc]
    """A scope in which variables are read from a graph where they are used.

    Args:
        read: Gives the value of a variable, by path.
        model: Whose variables.
    """

    def __init__(self, read: Callable[[str], tf.Tensor], model: keras.Model):
        super().__init__()
        self._read = read
        self._paths = {id(variable): variable.path for variable, _ in inventory.owned_variables(model)}

    def get_current_value(self, variable: keras.Variable) -> Any:
        written = super().get_current_value(variable)
        return self._read(self._paths[id(variable)]) if written is None and id(variable) in self._paths else written


def loss_of_model(model: keras.Model, tensors: Any, read: Callable[[str], tf.Tensor]) -> tf.Tensor:
    """The loss of a model in the graph that is being built, for labels of which only shapes are known.

    Args:
        model: The model; without a loss that it is compiled with, a mean square is taken.
        tensors: What it is called on.
        read: Gives the value of a variable, by path.

    Raises:
        LayoutError: The model cannot be called on the tensors, or no loss can be made of its outputs.
    """
    with _Reads(read, model), adapters.apart(model):
        try:
            return _loss_of(model, model(tensors, training=True))
        # A model's own call may raise anything.
        except Exception as error:
            raise LayoutError(
                f"A training step of model '{model.name}' cannot be traced: give an example of what it is called on, "
                f"inputs=. The call failed with: {error}"
            ) from error


def _loss_of_chain(paths: Sequence[str], read: Callable[[str], tf.Tensor]) -> tf.Tensor:
    """Of products of one sample with one variable after the other."""
    x = tf.compat.v1.placeholder(tf.float32, (1, 1))
    for value in map(read, paths):
        rows = value.shape[0] if value.shape.rank else 1
        matrix = tf.cast(tf.reshape(value, (rows, -1)), tf.float32)
        x = tf.reduce_sum(tf.matmul(tf.tile(x, (1, rows)), matrix), axis=1, keepdims=True)
    # Its gradient is made of the sample.
    return tf.reduce_mean(tf.square(x))


def _loss_of(model: keras.Model, outputs: Any) -> tf.Tensor:
    """The loss that a model is compiled with, for labels of which only shapes are known; without one, a mean square.

    Labels have the shape of the output, or lack its last dim, as class numbers do: the first that the loss takes.
    """
    compiled = _private.compile_arguments(model).get("loss") if model.compiled else None
    named = keras.tree.flatten(outputs)
    losses = [compiled] * len(named)
    if isinstance(compiled, dict):
        names = list(outputs) if isinstance(outputs, dict) else list(model.output_names)
        losses = [compiled.get(name) for name in names]
    elif isinstance(compiled, (list, tuple)):
        losses = list(compiled)
    found = [
        _one_loss(loss, output)
        for loss, output in zip(losses, named, strict=True)
        if loss is not None or not any(losses)
    ]
    return tf.add_n([tf.cast(each, tf.float32) for each in (*found, *model.losses)])


def _one_loss(loss: Any, output: tf.Tensor) -> tf.Tensor:
    if loss is None:
        return tf.reduce_mean(tf.square(tf.cast(output, tf.float32)))
    function = keras.losses.get(loss)
    failure: Exception | None = None
    for shape, dtype in ((output.shape, tf.float32), (output.shape[:-1], tf.int32)):
        try:
            return tf.reduce_mean(function(tf.compat.v1.placeholder(dtype, shape), output))
        except Exception as error:  # A loss may raise anything on labels that it does not take.
            failure = failure or error
    raise LayoutError(f"Loss {loss!r} takes no labels that fit outputs of shape={tuple(output.shape)}: {failure}")
