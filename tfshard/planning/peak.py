"""What a device holds at the peak of a training step, predicted from the graph of the step and its layouts."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfshard import tables
from tfshard.graph.model_specs import ModelOrSpecs, OptimizerLike, SlotSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.planning import liveness, training_graph, variable_traffic
from tfshard.planning.training_graph import Kind, TrainingGraph
from tfshard.storage import update_order


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Peak:
    """Bytes of the fullest device at the peak of a step, by what they are of at that moment.

    Attributes:
        stored_bytes: Parameters, untrained state and slots at rest.
        gathered_bytes: What was gathered over the batch axis: to be read, or, at stages 1 and 2, new values.
        gradient_bytes: Gradients as they come out of the backward pass, and shards of them that wait for the update.
        reduced_bytes: The buffers of reductions, and what gradients that are reduced as one are joined in.
        updated_bytes: New values of parameters and slots.
        activation_bytes: All else that the step made: what the backward pass waits for, and what it makes.
        overlap_bytes: Not part of the peak: what a step may hold on top where devices are busy, and reductions that do
            not wait for each other run at once, or an update's old values are freed late.
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
        return f"{tables.size(self.peak_bytes)} a device at the peak of a step" + (f": {named}" if named else "")


# What a client on CPU holds besides tensors: TensorFlow 2.21, its libraries and the compiled step.
PROCESS_BYTES = 800 << 20

# Of a small model, by how much a step's peak may be above the predicted one, in bytes.
_LEAST_ABOVE = 2 << 20

PARTS = tuple(field.name for field in dataclasses.fields(Peak) if field.name != "overlap_bytes")


_PART = {
    Kind.GATHER: "gathered_bytes",
    Kind.GRADIENT: "gradient_bytes",
    Kind.SHARD: "gradient_bytes",
    Kind.JOINED: "reduced_bytes",
    Kind.REDUCTION: "reduced_bytes",
    Kind.UPDATE: "updated_bytes",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateTiming:
    """When an optimizer's updates can run.

    Attributes:
        needs_all_gradients: Whether none can before all gradients are there: with a `global_clipnorm`, or in a branch.
        in_branch: Whether they are in a branch, which gives out all new values at its end: with
            `gradient_accumulation_steps`.
    """

    needs_all_gradients: bool = False
    in_branch: bool = False

    @staticmethod
    def of(optimizer: OptimizerLike) -> "UpdateTiming":
        """Of an optimizer."""
        in_branch = getattr(optimizer, "gradient_accumulation_steps", None) is not None
        is_clipped = getattr(optimizer, "global_clipnorm", None) is not None
        return UpdateTiming(needs_all_gradients=in_branch or is_clipped, in_branch=in_branch)


def trace(
    model: ModelOrSpecs,
    placement: ModelPlacement,
    *,
    inputs: Any,
    slots: Sequence[SlotSpec],
    timing: UpdateTiming,
    is_part: bool = False,
    recompute: str | Sequence[str] | None = None,
) -> TrainingGraph:
    """A step with its updates, as predictions of its peak and its time need it.

    Args:
        model: A built model. Without inputs, it is taken as its specs, of which each is used once, in their order, by a
            product with one sample.
        placement: Where the variables go.
        inputs: What the model is called on, over all devices; or None.
        slots: The optimizer's variables.
        timing: When updates can run.
        is_part: Whether it is one of several parts of a step: gradients are added up in each, and all updated after the
            last.
        recompute: Which blocks are computed again, besides those that are marked (`blocks.install`).

    Raises:
        LayoutError: The model cannot be called on its inputs.
    """
    return training_graph.trace(
        model if inputs is not None else placement.specs,
        placement,
        inputs=inputs,
        slot_bytes=replaced_bytes_of(placement, slots, in_branch=timing.in_branch),
        needs_all_gradients=timing.needs_all_gradients,
        is_part=is_part,
        recompute=recompute,
    )


def peak_of(
    graph: TrainingGraph,
    placement: ModelPlacement,
    *,
    stored_bytes: int,
    activation_bytes: int = 0,
) -> Peak:
    """The peak of a step: its operations are run one after the other, on paper (`liveness`).

    Args:
        graph: The graph of the step, or of a part of it (`trace`).
        placement: Where the variables go.
        stored_bytes: What rests on a device.
        activation_bytes: Of the device's share of a batch, on top of what is found.
    """
    moment = liveness.peak_of(graph)
    overlap = liveness.peak_of(graph, at_once=True).bytes - moment.bytes
    made: dict[str, int] = collections.Counter()
    for what, bytes_ in moment.made.items():
        made[_PART[what] if isinstance(what, Kind) else "activation_bytes"] += bytes_
    made["activation_bytes"] += activation_bytes
    made["gradient_bytes"] += variable_traffic.sum_bytes(
        placement.config.microbatches, placement.variables, placement.mesh_shape
    )
    return Peak(stored_bytes=stored_bytes, overlap_bytes=max(0, overlap), **made)


def with_room(peak_bytes: int, *, recompute: bool) -> int:
    """What a device should have for a peak: by how much steps were measured to be above it is a twentieth, with
    recomputation a sixth, and 2 MiB at least."""
    return peak_bytes + max(peak_bytes // (6 if recompute else 20), _LEAST_ABOVE)


def slot_bytes_of(placement: ModelPlacement, slots: Sequence[SlotSpec]) -> Mapping[str, int]:
    """Bytes of the slots of a unit on one device, by its name."""
    return {name: sum(own) for name, own in _slot_bytes(placement, slots).items()}


def replaced_bytes_of(placement: ModelPlacement, slots: Sequence[SlotSpec], *, in_branch: bool) -> Mapping[str, int]:
    """Bytes of those slots of a unit on one device, by its name, that are new while the old ones are there: of slots
    that are written one after the other, the largest (`update_order`)."""
    found: dict[str, int] = {}
    for name, own in _slot_bytes(placement, slots).items():
        in_turn = [] if in_branch else [each for each in own if each >= update_order.LEAST_BYTES]
        found[name] = sum(own) - sum(in_turn) + max(in_turn, default=0)
    return found


def _slot_bytes(placement: ModelPlacement, slots: Sequence[SlotSpec]) -> dict[str, list[int]]:
    name_of = {each.spec.path: variable_traffic.unit_name(each) for each in placement.variables}
    found: dict[str, list[int]] = collections.defaultdict(list)
    for slot in slots:
        layout = placement.slot(slot.spec, slot.reference)
        if slot.reference is not None and layout.member == 0:
            found[name_of[slot.reference]].append(variable_traffic.resting_bytes(layout, placement.mesh_shape))
    return found
