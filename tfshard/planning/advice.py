"""advise: which mesh and ZeRO stage fit a model in the memory of the devices, with the reasons."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.table

from tfshard import tables
from tfshard.errors import LayoutError, StrategyError
from tfshard.graph import auto_layout, model_specs
from tfshard.graph.model_specs import ModelOrSpecs, OptimizerLike, SlotSpec
from tfshard.layouts.axes import BATCH_AXIS, MODEL_AXIS
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.planning.analyzer import DEFAULT, ParameterAnalyzer
from tfshard.planning.peak import Peak, peak_of
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.storage import turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate(Peak):
    """A mesh and a stage that were considered, with the predicted peak of a step. All bytes are of the fullest device.

    Attributes:
        mesh_shape: Axis name to size.
        zero_stage: 0 to 3.
        problem: Why it cannot be used whatever the memory, or None.
        memory_per_device: What a device has.
    """

    mesh_shape: dict[str, int]
    zero_stage: int
    problem: str | None = None
    memory_per_device: int

    @property
    def fits(self) -> bool:
        """Whether it can be used and its peak is within the memory."""
        return self.problem is None and self.peak_bytes <= self.memory_per_device


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
) -> Advice:
    """Recommends a mesh and a ZeRO stage for a model, or says by how much nothing fits.

    The smallest stage that fits with all devices on the batch axis is preferred: a lower stage sends less, and the
    batch axis sends nothing for activations. Meshes with a model axis are considered when a layout map names the
    axis `model`, the smallest model axis first.

    The peak of a step on one device is predicted as the sum of

    - parameters, untrained state and slots as they rest (the plan's bytes),
    - what is gathered over the batch axis: two of the largest variables or groups, and what
      `reshard_after_forward` says is to stay,
    - gradients: the largest, whole, and those that wait for the update: of groups, and all if the optimizer has a
      `global_clipnorm`,
    - the buffers of reductions, as large as what they reduce,
    - new values of parameters and slots: of the largest variable or group, at stage 0 of all,
    - activations: `activation_bytes` for each sample in the device's share of the batch.

    docs/planning.md sets the sum beside what steps took. Not counted: activations that are not given, what the runtime
    holds besides, fragmentation. Leave room for them in `memory_per_device`.

    Args:
        model: A built `keras.Model`, also one from `tfshard.abstract_model`, or a list of `VariableSpec`.
        devices: How many there are; all are used.
        memory_per_device: Bytes of one device.
        batch: Samples of one step over all devices.
        optimizer: An optimizer, its name, or None for no slots.
        analyzer: Makes the groups; None for none.
        layout_map: As for `tfshard.ShardedStrategy`.
        activation_bytes: Bytes that one sample's activations take on a device at the peak. By default not counted.
        reshard_after_forward: As for `tfshard.ShardedStrategy`.

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
    ({'batch': 4}, 3, 43)
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
    gathering = turns.Gathering.of(reshard_after_forward)
    needs_all_gradients = getattr(optimizer, "global_clipnorm", None) is not None
    candidates = []
    for size in sizes:
        # Each mesh has the model axis where the layout map names it.
        mesh_shape = {BATCH_AXIS: devices // size} | ({MODEL_AXIS: size} if has_model_axis else {})
        chosen = auto_layout.resolve(layout_map, model, mesh_shape)
        for stage in (0, 1, 2, 3):
            empty = Candidate(mesh_shape=mesh_shape, zero_stage=stage, memory_per_device=memory_per_device)
            if batch % mesh_shape[BATCH_AXIS]:
                problem = f"its batch axis does not divide the batch of {batch}: every device would compute all of it"
                candidates.append(dataclasses.replace(empty, problem=problem))
                continue
            activations = (activation_bytes or 0) * (batch // mesh_shape[BATCH_AXIS])
            empty = dataclasses.replace(empty, activation_bytes=activations)
            candidates.append(_measure(empty, specs, slots, chosen, analyzer, gathering, needs_all_gradients))
    return _choose(candidates, activation_bytes is None, has_model_axis)


def _measure(
    empty: Candidate,
    specs: Sequence[VariableSpec],
    slots: Sequence[SlotSpec],
    layout_map: LayoutMap,
    analyzer: ParameterAnalyzer | None,
    gathering: turns.Gathering,
    needs_all_gradients: bool,
) -> Candidate:
    try:
        placement = ModelPlacement.of(
            specs,
            mesh_shape=empty.mesh_shape,
            zero_stage=empty.zero_stage,
            layout_map=layout_map,
            groups=analyzer,
        ).check()
    except LayoutError as e:
        return dataclasses.replace(empty, problem=str(e))
    peak = peak_of(
        placement,
        ShardingPlan.from_placement(placement, slots=slots),
        gathering=gathering,
        needs_all_gradients=needs_all_gradients,
        activation_bytes=empty.activation_bytes,
    )
    return dataclasses.replace(empty, **dataclasses.asdict(peak))


def _choose(candidates: Sequence[Candidate], without_activations: bool, has_model_axis: bool) -> Advice:
    """Candidates come in order of preference."""
    possible = [candidate for candidate in candidates if candidate.problem is None]
    chosen = next((candidate for candidate in possible if candidate.fits), None)
    shortfall: int | None = 0
    if chosen is not None:
        text = f"{_mesh_text(chosen.mesh_shape)} at stage {chosen.zero_stage}"
        reasons = [
            f"Recommended: {text}. It is the first that fits: {chosen.peak_bytes:,} bytes at the peak of a step, of "
            f"{chosen.memory_per_device:,} on a device."
        ]
        reasons += [
            f"{_mesh_text(other.mesh_shape)} at stage {other.zero_stage} was passed over: "
            + (other.problem or f"{other.peak_bytes - other.memory_per_device:,} bytes too large.")
            for other in candidates[: candidates.index(chosen)]
        ]
    elif possible:
        best = min(possible, key=lambda candidate: candidate.peak_bytes)
        shortfall = best.peak_bytes - best.memory_per_device
        reasons = [
            f"Nothing fits. {_mesh_text(best.mesh_shape)} at stage {best.zero_stage} comes closest: it needs "
            f"{best.peak_bytes:,} bytes a device, {shortfall:,} more than there are."
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
        reasons.append("Activations are not counted: give activation_bytes, the bytes of one sample's.")
    return Advice(recommended=chosen, shortfall_bytes=shortfall, reasons=tuple(reasons), candidates=tuple(candidates))


def _mesh_text(mesh_shape: Mapping[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh_shape.items())
