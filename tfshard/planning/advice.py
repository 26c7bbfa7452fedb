"""advise: which mesh and ZeRO stage fit a model in the memory of the devices, with the reasons."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import rich.box
import rich.table

from tfshard import tables
from tfshard.errors import LayoutError, StrategyError
from tfshard.graph import auto_layout, model_graph, model_specs
from tfshard.graph.model_specs import ModelOrSpecs, OptimizerLike, SlotSpec
from tfshard.layouts.axes import BATCH_AXIS, MODEL_AXIS
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.slot_dtypes import SlotDtype, SlotDtypes
from tfshard.operations import blocks
from tfshard.planning.analyzer import DEFAULT, ParameterAnalyzer
from tfshard.planning.peak import Peak, needs_all_gradients, peak_of
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.storage import turns

# Of a small model, by how much a step's peak may be above the predicted one, in bytes.
_LEAST_ABOVE = 2 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Peak):
    """A mesh and a stage that were considered, with the predicted peak of a step. All bytes are of the fullest device.

    Attributes:
        mesh_shape: Axis name to size.
        zero_stage: 0 to 3.
        recompute: Whether blocks are computed again (`strategy.recompute(model)`).
        problem: Why it cannot be used whatever the memory, or None.
        memory_per_device: What a device has.
    """

    mesh_shape: dict[str, int]
    zero_stage: int
    recompute: bool = False
    problem: str | None = None
    memory_per_device: int

    @property
    def needed_bytes(self) -> int:
        """What a device should have: the peak, what reductions take that run at once, and by how much steps were
        measured to be above it: a twentieth, with recomputation a sixth, and 2 MiB at least."""
        above = max(self.peak_bytes // (6 if self.recompute else 20), _LEAST_ABOVE)
        return self.peak_bytes + self.overlap_bytes + above

    @property
    def fits(self) -> bool:
        """Whether it can be used and what it needs is within the memory."""
        return self.problem is None and self.needed_bytes <= self.memory_per_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """The result of `advise`; `print` it, or use it as data.

    Attributes:
        recommended: The candidate to use, or None when none fits.
        shortfall_bytes: By how many bytes a device the best candidate misses; 0 when one fits, None when there is
            none that could be used whatever the memory.
        reasons: Sentences.
        candidates: Every mesh and stage that was considered, the preferred ones first.
    """

    recommended: Candidate | None
    shortfall_bytes: int | None
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        table = rich.table.Table(title="MiB a device at the peak of a step", box=rich.box.SIMPLE_HEAD)
        table.add_column("mesh", no_wrap=True)
        for column in ("stage", "stored", "gathered", "gradients", "reduced", "updated", "activations", "peak"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for each in self.candidates:
            parts = (each.stored_bytes, each.gathered_bytes, each.gradient_bytes, each.reduced_bytes)
            numbers = (*parts, each.updated_bytes, each.activation_bytes, each.peak_bytes)
            cells = [f"{number / (1 << 20):,.1f}" if each.problem is None else "" for number in numbers]
            verdict = each.problem or ("fits" if each.fits else "too large")
            verdict += ", with recompute" if each.recompute else ""
            table.add_row(_mesh_text(each.mesh_shape), str(each.zero_stage), *cells, verdict)
        return tables.as_text(*self.reasons, table)


def advise(
    model: ModelOrSpecs,
    devices: int,
    memory_per_device: int,
    batch: int,
    *,
    optimizer: OptimizerLike = "adam",
    analyzer: ParameterAnalyzer | None = DEFAULT,
    layout_map: Any = None,
    activation_bytes: int | None = None,
    reshard_after_forward: bool | str | Sequence[str] = True,
    slot_dtype: SlotDtype = None,
    inputs: Any = None,
) -> Advice:
    """Recommends a mesh and a ZeRO stage for a model, or says by how much nothing fits.

    The smallest stage that fits with all devices on the batch axis is preferred: a lower stage sends less, and the
    batch axis sends nothing for activations. Then comes stage 3 with blocks computed again, which costs time. Meshes
    with a model axis are considered when a layout map names the axis `model`, the smallest model axis first.

    The peak of a step on one device is found by running its operations one after the other, on paper: what rests, what
    is gathered for its turns, activations until their last use, gradients, the buffers of reductions, new values.
    docs/planning.md says how, and docs/measurements.md sets it beside what steps took. Not counted: what is in the
    loops of recurrent layers, what the runtime holds besides, fragmentation. Leave room for them in
    `memory_per_device`.

    Args:
        model: A built `keras.Model`, also one from `tfshard.abstract_model`, or a list of `VariableSpec`.
        devices: How many there are; all are used.
        memory_per_device: Bytes of one device.
        batch: Samples of one step over all devices.
        optimizer: An optimizer, its name, or None for no slots.
        analyzer: Makes the groups; None for none.
        layout_map: As for `tfshard.ShardedStrategy`.
        activation_bytes: Bytes that one sample's activations take on a device at the peak. By default they are found in
            the model's graph, if the shapes of its inputs are known.
        reshard_after_forward: As for `tfshard.ShardedStrategy`.
        slot_dtype: As for `tfshard.ShardedStrategy`.
        inputs: What a step calls the model on, of `batch` samples (or anything with shapes and dtypes). By default what
            the model was built for, if it leaves no dim open but the batch.

    Returns:
        The `Advice`.

    Raises:
        StrategyError: A number that is not a positive integer, or a model that cannot be planned.
        LayoutError: The layout map names an axis other than `batch` and `model`.

    Example:

    >>> import tfshard
    >>> from tfshard.layouts import VariableSpec
    >>> specs = [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, 1024)) for i in range(8)]
    >>> advice = tfshard.advise(specs, devices=4, memory_per_device=60 << 20, batch=32)
    >>> advice.recommended.mesh_shape, advice.recommended.zero_stage, advice.recommended.peak_bytes >> 20
    ({'batch': 4}, 3, 35)
    """
    numbers = {"devices": devices, "memory_per_device": memory_per_device, "batch": batch}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise StrategyError(f"{name} must be a positive integer. Received: {name}={number!r}")
    automatic = auto_layout.is_auto(layout_map)
    if not automatic:
        layout_map = LayoutMap.from_any(layout_map)
        layout_map.check_axes({BATCH_AXIS: 1, MODEL_AXIS: 1})
    has_model_axis = automatic or any(MODEL_AXIS in rule.axes for rule in layout_map.values())
    specs = model_specs.specs_of(model)
    slots = model_specs.slots_of(optimizer, specs)
    sizes = [size for size in range(1, devices + 1) if devices % size == 0] if has_model_axis else [1]
    if activation_bytes is None and inputs is None and isinstance(model, keras.Model):
        inputs = model_graph.batch_of(model, batch)
    step = _Step(
        model=model,
        specs=specs,
        slots=slots,
        analyzer=analyzer,
        gathering=turns.Gathering.of(reshard_after_forward),
        needs_all_gradients=needs_all_gradients(optimizer),
        slot_dtypes=SlotDtypes.of(slot_dtype),
        inputs=None if activation_bytes is not None else inputs,
    )
    has_blocks = step.inputs is not None and isinstance(model, keras.Model) and blocks.can_mark(model)
    candidates = []
    for size in sizes:
        # Each mesh has the model axis where the layout map names it.
        mesh_shape = {BATCH_AXIS: devices // size} | ({MODEL_AXIS: size} if has_model_axis else {})
        chosen = auto_layout.resolve(layout_map, model, mesh_shape)
        for stage, recompute in [(0, False), (1, False), (2, False), (3, False), *[(3, True)] * has_blocks]:
            empty = Candidate(
                mesh_shape=mesh_shape, zero_stage=stage, recompute=recompute, memory_per_device=memory_per_device
            )
            if batch % mesh_shape[BATCH_AXIS]:
                problem = f"its batch axis does not divide the batch of {batch}: every device would compute all of it"
                candidates.append(dataclasses.replace(empty, problem=problem))
                continue
            activations = (activation_bytes or 0) * (batch // mesh_shape[BATCH_AXIS])
            candidates.append(step.measure(empty, chosen, activations))
    return _choose(candidates, activation_bytes is None and inputs is None, has_model_axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """What is the same for all candidates.

    Attributes:
        model: The model or its specs.
        specs: Its variables.
        slots: The optimizer's.
        analyzer: Makes the groups.
        gathering: How steps gather.
        needs_all_gradients: Whether updates wait for all gradients.
        slot_dtypes: The dtypes in which slots rest.
        inputs: What the model is called on; None where that is not known, or activations are given.
    """

    model: ModelOrSpecs
    specs: Sequence[VariableSpec]
    slots: Sequence[SlotSpec]
    analyzer: ParameterAnalyzer | None
    gathering: turns.Gathering
    needs_all_gradients: bool
    slot_dtypes: SlotDtypes
    inputs: Any

    def measure(self, empty: Candidate, layout_map: LayoutMap, activation_bytes: int) -> Candidate:
        """A candidate with its peak, or why it cannot be used."""
        try:
            placement = ModelPlacement.of(
                self.specs,
                mesh_shape=empty.mesh_shape,
                zero_stage=empty.zero_stage,
                layout_map=layout_map,
                groups=self.analyzer,
                slot_dtypes=self.slot_dtypes,
            ).check()
        except LayoutError as e:
            return dataclasses.replace(empty, problem=str(e))
        peak = peak_of(
            self.model,
            placement,
            stored_bytes=ShardingPlan.from_placement(placement, slots=self.slots).resting_bytes(),
            slots=self.slots,
            gathering=self.gathering,
            needs_all_gradients=self.needs_all_gradients,
            inputs=self.inputs,
            recompute=blocks.AUTO if empty.recompute else None,
            activation_bytes=activation_bytes,
        )
        return dataclasses.replace(empty, **dataclasses.asdict(peak))


def _choose(candidates: Sequence[Candidate], without_activations: bool, has_model_axis: bool) -> Advice:
    """Candidates come in order of preference."""
    possible = [candidate for candidate in candidates if candidate.problem is None]
    chosen = next((candidate for candidate in possible if candidate.fits), None)
    shortfall: int | None = 0
    if chosen is not None:
        reasons = [
            f"Recommended: {_text(chosen)}. It is the first that fits: {chosen.peak_bytes:,} bytes at the peak of a "
            f"step, {chosen.needed_bytes:,} with room to spare, of {chosen.memory_per_device:,} on a device."
        ]
        reasons += [
            f"{_text(other)} was passed over: "
            + (other.problem or f"{other.needed_bytes - other.memory_per_device:,} bytes too large.")
            for other in candidates[: candidates.index(chosen)]
        ]
    elif possible:
        best = min(possible, key=lambda candidate: candidate.needed_bytes)
        shortfall = best.needed_bytes - best.memory_per_device
        reasons = [
            f"Nothing fits. {_text(best)} comes closest: it needs "
            f"{best.needed_bytes:,} bytes a device, {shortfall:,} more than there are."
        ]
    else:
        shortfall = None
        reasons = [f"Nothing can be used. {_mesh_text(c.mesh_shape)}: {c.problem}" for c in candidates[:1]]
    if not has_model_axis and (chosen is None or chosen.zero_stage == 3):
        reasons.append(
            "A layout map over the axis 'model' would allow a model axis, which also shards what is gathered and the "
            "gradients."
        )
    if without_activations:
        reasons.append(
            "Activations are not counted: give inputs=, what a step calls the model on, or activation_bytes."
        )
    return Advice(recommended=chosen, shortfall_bytes=shortfall, reasons=tuple(reasons), candidates=tuple(candidates))


def _text(candidate: Candidate) -> str:
    again = " with strategy.recompute(model)" if candidate.recompute else ""
    return f"{_mesh_text(candidate.mesh_shape)} at stage {candidate.zero_stage}{again}"


def _mesh_text(mesh_shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh_shape.items())
