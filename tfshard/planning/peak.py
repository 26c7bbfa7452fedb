"""Estimate the memory of a device at the peak of a step, from layouts and the graph of the forward and backward pass.

The estimate has one rule: a tensor lives from the operation that makes it to the last operation that takes it, in the
order of the trace. The layouts tell what the step stores, gathers, reduces and updates. TensorFlow runs operations in
another order at times, so a measured peak differs: docs/planning.md says by how much, and `with_margin` is the margin
that `advise` keeps.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfshard import _private, tables
from tfshard.graph import flops
from tfshard.graph.model_specs import OptimizerLike, SlotSpec
from tfshard.layouts import variable_layout
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning import variable_traffic
from tfshard.planning.step_graph import VIEWS, Gradient, StepGraph


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Peak:
    """Bytes of the fullest device at the peak of a step, in parts.

    Attributes:
        stored_bytes: Stored parameters, untrained state and slots.
        gathered_bytes: Parameters that the step gathered over the batch axis.
        gradient_bytes: Full gradients, and shards of gradients that wait for the update.
        reduced_bytes: The buffers of reductions.
        updated_bytes: New values of slots beside the old ones.
        activation_bytes: All other tensors: the forward tensors that the backward pass needs, and the tensors that it
            makes.
        overlap_bytes: Not part of the peak: the largest slot. A busy device may free its old value late.
    """

    stored_bytes: int = 0
    gathered_bytes: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0
    updated_bytes: int = 0
    activation_bytes: int = 0
    overlap_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """All together."""
        return sum(getattr(self, name) for name in PARTS)

    def resident_bytes(self, devices: int = 1) -> int:
        """Return about how many bytes a client of a launched run on CPU holds, by the kernel's count.

        These are TensorFlow itself (`PROCESS_BYTES`), the peak of each device, and the copy of the largest collective
        that is on its way between clients. Measured: benchmarks/LOG.md, "Memory of launched runs".

        Args:
            devices: Devices of the client.
        """
        sent = max(self.gathered_bytes // 2, self.reduced_bytes)
        return PROCESS_BYTES + devices * (self.peak_bytes + self.overlap_bytes) + sent

    def __str__(self) -> str:
        return self.parts_text()

    __repr__ = __str__

    def parts_text(self) -> str:
        """Return the peak and its parts in one line."""
        parts = [(name.removesuffix("_bytes"), getattr(self, name)) for name in PARTS]
        named = ", ".join(f"{name} {tables.size(number)}" for name, number in parts if number)
        return f"{tables.size(self.peak_bytes)} on each device at the peak of a step" + (f": {named}" if named else "")


# The memory of a client on CPU in addition to tensors: TensorFlow 2.21, its libraries and the compiled step.
PROCESS_BYTES = 800 << 20

# The bytes by which the peak of a small model may exceed the prediction.
_LEAST_ABOVE = 2 << 20

PARTS = tuple(field.name for field in dataclasses.fields(Peak) if field.name != "overlap_bytes")

_CUTS = frozenset(("Slice", "StridedSlice"))
_CROSS_ENTROPIES = frozenset(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"))
# If devices wait for each other in the backward pass, as in batch normalization, TensorFlow computes gradients of
# kernels later than the trace. Measured with ResNet50 and EfficientNetB0 (docs/measurements.md).
_LATER = 1.25
# If nothing in the backward pass waits, TensorFlow computes some gradients of weights last, and keeps their operands
# until then. This share of all such operands was measured.
_LATE_SHARE = 0.4
# In the names of operations that compute gradients.
_TAPE = "gradient_tape/"
# Operations with a result as large as an input that never write into it.
_COPYING = frozenset(("ScatterNdNonAliasingAdd",))
# The operations that put a tensor into a list, with the number of the input that the tensor is.
_PUT = {"TensorListPushBack": 1, "TensorListSetItem": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateTiming:
    """When an optimizer's updates can run.

    Attributes:
        needs_all_gradients: True if updates wait for all gradients: with a `global_clipnorm`, or in a branch.
        in_branch: True if updates are in a branch, which returns all new values at its end: with
            `gradient_accumulation_steps`.
    """

    needs_all_gradients: bool = False
    in_branch: bool = False

    @staticmethod
    def of(optimizer: OptimizerLike) -> "UpdateTiming":
        """Return the timing of an optimizer's updates."""
        in_branch = getattr(optimizer, "gradient_accumulation_steps", None) is not None
        is_clipped = getattr(optimizer, "global_clipnorm", None) is not None
        return UpdateTiming(needs_all_gradients=in_branch or is_clipped, in_branch=in_branch)


@dataclasses.dataclass(frozen=True)
class _Lifetime:
    """Memory that the step holds from one moment to another, both included."""

    begin: int
    end: int
    bytes: int
    part: str


def peak_of(
    graph: StepGraph,
    placement: ModelPlacement,
    *,
    stored_bytes: int,
    slots: Sequence[SlotSpec],
    timing: UpdateTiming,
    activation_bytes: int = 0,
    waits_in_backward: bool = False,
) -> Peak:
    """Estimate the peak of a step, or of one of its microbatches.

    Args:
        graph: The graph of the step, or of a microbatch.
        placement: The layouts of the model's variables.
        stored_bytes: Bytes that the device stores between steps.
        slots: The optimizer's variables.
        timing: When updates can run.
        activation_bytes: Bytes to add to the activations of the graph.
        waits_in_backward: True if devices wait for each other in the backward pass, as batch normalization does.
    """
    microbatches = placement.config.microbatches
    made = added_bytes(
        graph,
        placement,
        slots=slots,
        timing=timing,
        waits_in_backward=waits_in_backward,
        is_microbatch=microbatches.count > 1,
    )
    made["activation_bytes"] += activation_bytes
    made["gradient_bytes"] += variable_traffic.sum_bytes(microbatches, placement.variables, placement.mesh_shape)
    largest_slot = max((max(each) for each in _slot_bytes(placement, slots).values()), default=0)
    return Peak(stored_bytes=stored_bytes, overlap_bytes=largest_slot, **made)


def added_bytes(
    graph: StepGraph,
    placement: ModelPlacement,
    *,
    slots: Sequence[SlotSpec],
    timing: UpdateTiming,
    waits_in_backward: bool,
    is_microbatch: bool,
    least: int = 0,
) -> dict[str, int]:
    """Return the bytes that a step, or one of its microbatches, adds on a device at the peak, for each part of `Peak`.

    Args:
        graph: As for `peak_of`, as all others.
        placement: The layouts.
        slots: The optimizer's variables.
        timing: When updates can run.
        waits_in_backward: True if devices wait for each other in the backward pass.
        is_microbatch: True for the graph of a microbatch. The step updates after the last microbatch.
        least: Bytes below which a tensor does not count, as a trace leaves out smaller tensors.
    """
    timing = UpdateTiming() if is_microbatch else timing
    lifetimes = _Lifetimes(graph, placement, slots, timing, waits_in_backward, is_microbatch, least)
    found = lifetimes.at_peak()
    if lifetimes.is_free:
        late = lifetimes.with_late_gradients().at_peak()["activation_bytes"]
        found["activation_bytes"] += int(_LATE_SHARE * max(0, late - found["activation_bytes"]))
    return found


class _Lifetimes:
    """When each tensor of a step is made and freed, in the order of the trace. Moment 2 n is operation number n."""

    def __init__(
        self,
        graph: StepGraph,
        placement: ModelPlacement,
        slots: Sequence[SlotSpec],
        timing: UpdateTiming,
        waits_in_backward: bool,
        is_microbatch: bool,
        least: int,
    ):
        self._graph = graph
        self._placement = placement
        self._slots = slots
        self._timing = timing
        self._least = least
        self._mesh_shape = placement.mesh_shape
        self._devices = placement.mesh_shape.data_size
        self._is_microbatch = is_microbatch
        self._users: dict[Hashable, list[tf.Operation]] = collections.defaultdict(list)
        for operation, inputs in graph.needed.items():
            for each in inputs:
                self._users[each.ref()].append(operation)
        scattered = [each for each in graph.gradients if self._is_scattered(each.layout)]
        uses = collections.Counter(each.layout.spec.path for each in scattered)
        self._scattered = [
            each for each in scattered if not variable_traffic.joins(each.layout, uses[each.layout.spec.path])
        ]
        alone = {each.tensor.ref() for each in self._scattered}
        self._merged = [each for each in graph.gradients if each.tensor.ref() not in alone]
        self._waits = waits_in_backward and self._devices > 1
        self._number_of = self._numbers(set())
        self._end = 2 * len(self._number_of) + 2

    @property
    def is_free(self) -> bool:
        """True if nothing in the backward pass waits for a gradient or for other devices."""
        return not self._waits and not self._scattered

    def with_late_gradients(self) -> "_Lifetimes":
        """Let the gradients of weights be computed last, and return this object."""
        self._number_of = self._numbers(self._only_for_gradients())
        return self

    def at_peak(self) -> dict[str, int]:
        """Return the bytes of each part of `Peak` at the moment when they are most."""
        spans = [*self._tensors(), *self._gradients(), *self._updates()]
        changes: dict[int, list[tuple[str, int]]] = collections.defaultdict(list)
        for span in spans:
            changes[span.begin].append((span.part, span.bytes))
            changes[span.end + 1].append((span.part, -span.bytes))
        held: dict[str, int] = collections.Counter()
        most: dict[str, int] = collections.Counter()
        for moment in sorted(changes):
            for part, bytes_ in changes[moment]:
                held[part] += bytes_
            if sum(held.values()) > sum(most.values()):
                most = collections.Counter(held)
        if self._waits:
            most["activation_bytes"] = int(most["activation_bytes"] * _LATER)
        return most

    def _is_scattered(self, layout: VariableLayout) -> bool:
        """Return True if each device keeps only its shard of a variable's gradient, and the gradient is reduced
        alone."""
        if self._devices == 1:
            return False
        if variable_layout.is_added_up_by_replicas(layout, self._mesh_shape):
            return True
        return layout.flat is None and layout.sharded is not None and layout.update_sharded

    # --- the order --------------------------------------------------------------------------------------

    def _numbers(self, late: set[tf.Operation]) -> dict[tf.Operation, int]:
        """Number the operations in the order of the trace, but some at the end.

        An operation that the schedule of gathers added follows directly after its inputs.
        """
        needed = self._graph.needed
        added = self._graph.added
        place = {each: number for number, each in enumerate(self._graph.operations) if each not in added}

        def place_of(operation: tf.Operation) -> int:
            if operation not in place:
                # An added operation may take the output of one that was added after it.
                place[operation] = max((place_of(each.op) for each in needed.get(operation, ())), default=0)
            return place[operation]

        order = sorted(needed, key=lambda each: (each in late, place_of(each), each in added))
        return {operation: number for number, operation in enumerate(order)}

    def _only_for_gradients(self) -> set[tf.Operation]:
        """Return the operations of the tape that only the merged gradients need."""
        ends = (each.tensor.op for each in self._merged)
        found = {each for each in ends if _TAPE in each.name and not self._takers(each)}
        left = list(found)
        while left:
            for each in self._graph.needed[left.pop()]:
                if each.op not in found and _TAPE in each.op.name and self._takers(each.op) <= found:
                    found.add(each.op)
                    left.append(each.op)
        return found

    def _takers(self, operation: tf.Operation) -> set[tf.Operation]:
        return {user for output in operation.outputs for user in self._users[output.ref()]}

    # --- tensors of the graph ---------------------------------------------------------------------------

    def _tensors(self) -> Iterable[_Lifetime]:
        """Yield the tensors of the graph, gathers and gradients included."""
        last: dict[Any, int] = {}
        for operation, number in self._number_of.items():
            for each in self._graph.needed[operation]:
                ref = self._base(each).ref()
                last[ref] = max(last.get(ref, 0), number)
        gradients = self._last_of_gradients()
        begin: dict[Any, int] = {}
        for operation, number in self._number_of.items():
            for output in operation.outputs:
                ref = output.ref()
                if self._base(output).ref() == ref and (ref in last or ref in gradients):
                    begin[ref] = 2 * number + self._is_in_place(operation, output, last)
        for ref, first in begin.items():
            part = "gathered_bytes" if ref.deref().op in self._graph.stand_ins else "activation_bytes"
            bytes_, end = self._bytes(ref.deref()), 2 * last.get(ref, 0)
            if ref in gradients:
                part, bytes_ = "gradient_bytes", gradients[ref][0]
                end = max(end, gradients[ref][1])
            yield _Lifetime(first, max(first, end), bytes_, part)
        if self._mesh_shape.tensor:
            yield from self._beside_model_axes()

    def _beside_model_axes(self) -> Iterable[_Lifetime]:
        """Yield what DTensor adds on a model axis: a copy of each gather, and softmax cross entropy in steps."""
        for operation, number in self._number_of.items():
            if operation in self._graph.stand_ins:
                yield _Lifetime(2 * number, 2 * number, self._bytes(operation.outputs[0]), "gathered_bytes")
            elif operation.type in _CROSS_ENTROPIES and self._graph.shares(operation.inputs[0]) > 1:
                yield _Lifetime(2 * number, 2 * number, 2 * self._bytes(operation.inputs[0]), "activation_bytes")

    def _base(self, tensor: tf.Tensor) -> tf.Tensor:
        """Follow views back to the tensor that owns the memory."""
        while True:
            operation = tensor.op
            if operation in self._graph.stand_ins:
                return tensor
            if operation.type == "IdentityN":
                tensor = operation.inputs[tensor.value_index]
            elif operation.inputs and (
                operation.type in VIEWS or (operation.type in _CUTS and self._is_stored(operation.inputs[0]))
            ):
                tensor = operation.inputs[0]
            else:
                return tensor

    def _is_stored(self, tensor: tf.Tensor) -> bool:
        """Return True for tensors that the step stores or gathers, and for slices of them."""
        base = self._base(tensor)
        return base.op in self._graph.stand_ins or base.name in self._graph.stored

    def _is_in_place(self, operation: tf.Operation, output: tf.Tensor, last: Mapping[Hashable, int]) -> bool:
        """Return True if an operation writes its result into an input that nothing needs later.

        Operations that work element by element do. A transposed matrix is a flag of the product that takes it.
        """
        is_copy = operation.type in _COPYING or operation.type in flops.LOOPS or flops.flops_of(operation)
        if operation in self._graph.stand_ins or is_copy:
            return False
        bytes_ = self._bytes(output)
        bases = (self._base(each) for each in self._graph.needed[operation])
        return any(
            last[each.ref()] == self._number_of[operation] and self._bytes(each) == bytes_ > 0
            for each in bases
            if each.op not in self._graph.stand_ins
        )

    def _bytes(self, tensor: tf.Tensor) -> int:
        """Return the bytes of a tensor on one device; 0 for the batch, stored values and small tensors."""
        operation = tensor.op
        stand_in = self._graph.stand_ins.get(operation)
        if stand_in is not None:
            return self._counted(stand_in.sent)
        if operation.type in ("Const", "Placeholder") or operation in self._graph.known:
            return 0
        if tensor.dtype == tf.variant:
            return self._list_bytes(tensor)
        return self._counted(_size(tensor) // self._graph.shares(tensor))

    def _counted(self, bytes_: int) -> int:
        return bytes_ if bytes_ >= self._least else 0

    def _list_bytes(self, tensor: tf.Tensor) -> int:
        """Return the bytes of a list that the iterations of a loop fill, such as the tensors that its gradient needs of
        each iteration."""
        loop = tensor.op
        body = _private.function_graph(loop, "body") if loop.type in flops.LOOPS else None
        if body is None:
            return 0
        put = body.outputs[tensor.value_index].op
        while put.type in VIEWS:
            put = put.inputs[0].op
        if put.type not in _PUT:
            return 0
        item = put.inputs[_PUT[put.type]]
        share = self._graph.shares(loop.outputs[0])
        return (flops.turns_of(loop) or 1) * self._counted(_size(item) // share)

    # --- gradients after the backward pass ----------------------------------------------------------------------

    def _local_bytes(self, gradient: Gradient) -> int:
        """Return the bytes of a gradient on one device, full over the batch axis."""
        layout = gradient.layout
        return variable_traffic.device_bytes(layout.spec.shape, layout.compute, self._mesh_shape, layout.spec.dtype)

    def _made(self, gradient: Gradient) -> int:
        """Return the moment when a gradient is made."""
        return 2 * self._number_of.get(self._base(gradient.tensor).op, 0)

    def _last_of_gradients(self) -> dict[Hashable, tuple[int, int]]:
        """Return the bytes of each gradient and the moment that frees it, by the reference of its tensor.

        Merged gradients wait for the last of them, and scattered ones for their reduction. If devices wait for each
        other in the backward pass, DTensor writes each merged gradient to the buffer when it exists.
        """
        waits_for_all = self._timing.needs_all_gradients or (self._devices > 1 and not self._waits)
        found: dict[Hashable, tuple[int, int]] = {}
        for each in self._merged:
            end = self._end if waits_for_all else self._made(each) + 1
            found[self._base(each.tensor).ref()] = (self._counted(self._local_bytes(each)), end)
        for each, freed in self._freed_after_scatter():
            found[self._base(each.tensor).ref()] = (self._counted(self._local_bytes(each)), freed)
        return found

    def _freed_after_scatter(self) -> Iterable[tuple[Gradient, int]]:
        """Yield the scattered gradients, each with the moment when its reduction has ended.

        At stage 3 the backward pass waits for the reduction. At stages 1 and 2 it makes one more gradient meanwhile.
        """
        order = sorted(self._scattered, key=self._made)
        for number, each in enumerate(order):
            is_last = number + 1 == len(order) or self._placement.config.zero_stage.shard_params
            yield each, self._made(each) + 2 if is_last else self._made(order[number + 1])

    def _gradients(self) -> Iterable[_Lifetime]:
        """Yield the buffers of reductions, and shards of gradients that wait for the update."""
        for each, freed in self._freed_after_scatter():
            bytes_ = self._counted(self._local_bytes(each))
            ring = bytes_ * (self._devices - 1) // self._devices
            if variable_layout.is_added_up_by_replicas(each.layout, self._mesh_shape):
                ring = 2 * bytes_  # The shards of all devices of a replica, and the gathered sums.
            yield _Lifetime(self._made(each) + 1, freed, ring, "reduced_bytes")
            if self._timing.needs_all_gradients:
                yield _Lifetime(freed, self._end + 2, bytes_ // self._devices, "gradient_bytes")
        if self._devices == 1 or not self._merged:
            return
        # The buffer of the merged all-reduce exists from the first gradient on. The step cuts the reduced gradients out
        # of the buffer, and then frees it.
        sizes = [self._local_bytes(each) for each in self._merged]
        yield _Lifetime(min(map(self._made, self._merged)), self._end + 1, self._counted(sum(sizes)), "reduced_bytes")
        yield _Lifetime(self._end + 1, self._end + 2, sum(map(self._counted, sizes)), "gradient_bytes")

    def _updates(self) -> Iterable[_Lifetime]:
        """New slots that exist beside the old ones. In a branch all new values wait for its end.

        The new value of a variable takes the memory of its gradient.
        """
        if self._timing.in_branch:
            slots = slot_bytes_of(self._placement, self._slots)
            yield _Lifetime(self._end + 2, self._end + 2, sum(slots.values()), "updated_bytes")


def _size(tensor: tf.Tensor) -> int:
    count = None if tensor.shape.rank is None else tensor.shape.num_elements()
    return (
        0 if count is None or tensor.dtype in (tf.resource, tf.string, tf.variant) else int(count * tensor.dtype.size)
    )


def with_margin(peak_bytes: int, *, recompute: bool) -> int:
    """Return the bytes that a device should have for a predicted peak.

    Measured peaks were up to 15% above the prediction, with recomputation up to a fifth.
    """
    return peak_bytes + max(int(peak_bytes * (0.2 if recompute else 0.15)), _LEAST_ABOVE)


def slot_bytes_of(placement: ModelPlacement, slots: Sequence[SlotSpec]) -> Mapping[str, int]:
    """Return the bytes of the slots of each variable or group on one device, by its name."""
    return {name: sum(each) for name, each in _slot_bytes(placement, slots).items()}


def _slot_bytes(placement: ModelPlacement, slots: Sequence[SlotSpec]) -> dict[str, list[int]]:
    name_of = {each.spec.path: variable_traffic.unit_name(each) for each in placement.variables}
    found: dict[str, list[int]] = collections.defaultdict(list)
    for slot in slots:
        layout = placement.slot(slot.spec, slot.reference)
        if slot.reference is not None and layout.member == 0:
            found[name_of[slot.reference]].append(variable_traffic.resting_bytes(layout, placement.mesh_shape))
    return found
