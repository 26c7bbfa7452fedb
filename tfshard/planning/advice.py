"""advise: which mesh and ZeRO stage fit a model in the memory of the devices, with the reasons."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfshard import tables
from tfshard.errors import LayoutError, StrategyError
from tfshard.graph import auto_layout, model_graph, model_specs
from tfshard.graph.model_specs import ModelOrSpecs, OptimizerLike, SlotSpec
from tfshard.layouts import gradient_reduction, option_checks, variable_layout
from tfshard.layouts.axes import BATCH_AXIS, MODEL_AXIS, PIPELINE_AXIS, REPLICA_AXIS, MeshAxes
from tfshard.layouts.config import Microbatches, Precision, ReshardPolicy, ShardingConfig, ZeroStage
from tfshard.layouts.dtype_rules import DtypeByPath
from tfshard.layouts.gradient_reduction import GradientReduction
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.parameter_analyzer import DEFAULT, ParameterAnalyzer
from tfshard.layouts.placement import ModelPlacement
from tfshard.operations import blocks
from tfshard.planning import linter, pipelined_steps, statistics_traffic, step_graph, variable_traffic
from tfshard.planning.analyzer import without_peak
from tfshard.planning.links import Links, LinksLike
from tfshard.planning.machine import Machine, MachineLike
from tfshard.planning.peak import PROCESS_BYTES, Peak, UpdateTiming, peak_of, with_margin
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.planning.step_graph import StepGraph
from tfshard.planning.step_times import TracedStep, updated_bytes_of

# `advise` proposes a compression if collectives and encoding take at most the share `_CLEARLY` of the time of exact
# sums. The comparison assumes that computing hid the share `_HIDDEN` of the link's saved time anyhow. Compression loses
# precision, and encoding takes time to compute.
_CLEARLY, _HIDDEN = 0.9, 0.5
# With a machine, steps that take at most so many times the time of the fastest count as alike: predictions are off by
# as much (docs/simulating.md).
_ALIKE = 1.06
AUTO = "auto"
_INDIVISIBLE = "its batch axis does not divide the batch"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Candidate(Peak):
    """A candidate mesh and stage, with the predicted peak of a step. All bytes are on the fullest device.

    Attributes:
        mesh_shape: Axis name to size.
        zero_stage: The ZeRO stage, which is also its number.
        recompute: True if blocks are computed again (`strategy.recompute(model)`).
        microbatches: The microbatches of a step.
        problem: Why the candidate is impossible with any memory, or None.
        memory_per_device: The memory of a device, in bytes.
        collective_seconds: The time of a step's collectives, one after the other. None without links, or if their bytes
            are unknown.
        compression: The compression of gradients; None for exact sums.
        encode_seconds: The time in which a device encodes and decodes the gradients of a step; None without links.
        step_seconds: The time of a step; None without a machine, or with a compression.
        bubble: On a mesh with a pipeline axis, the share of time in which pipeline ranks wait; else None.
    """

    mesh_shape: dict[str, int]
    zero_stage: ZeroStage
    recompute: bool = False
    microbatches: int = 1
    problem: str | None = None
    memory_per_device: int
    collective_seconds: float | None = None
    compression: Any = None
    encode_seconds: float | None = None
    step_seconds: float | None = None
    bubble: float | None = None

    @property
    def code(self) -> str:
        """Python lines that compile `model` like this, with `optimizer`, `loss` and, with a model axis, `layout_map`.

        >>> import tfshard
        >>> from tfshard.layouts import VariableSpec
        >>> advice = tfshard.advise([VariableSpec(path="a/kernel", shape=(64, 64))], 4, "1GiB", batch=32)
        >>> print(advice.recommended.code)
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
        model.compile(optimizer, loss, strategy=strategy)
        """
        lines = [f"strategy = {self.strategy_code()}", "model.compile(optimizer, loss, strategy=strategy)"]
        if PIPELINE_AXIS in self.mesh_shape:
            ranks = self.mesh_shape[PIPELINE_AXIS]
            lines.insert(0, f"model = tfshard.pipeline(model, stages={ranks}, microbatches={self.microbatches})")
        return "\n".join(lines + ["strategy.recompute(model)"] * self.recompute)

    def strategy_code(self, layout_map: str = "layout_map") -> str:
        """Return the Python expression that makes the strategy.

        Args:
            layout_map: The expression of the layout map, which a mesh with a model axis needs.
        """
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        options = [f"tfshard.create_mesh({axes})"]
        options += [f"layout_map={layout_map}"] * (MODEL_AXIS in self.mesh_shape)
        options.append(f"zero_stage={self.zero_stage}")
        if self.microbatches > 1 and PIPELINE_AXIS not in self.mesh_shape:
            options.append(f"microbatches={self.microbatches}")
        if self.compression is not None:
            # A PowerSGD prints its fields.
            prefix = "" if isinstance(self.compression, str) else "tfshard."
            options.append(f"compression={prefix}{self.compression!r}")
        return f"tfshard.ShardedStrategy({', '.join(options)})"

    @property
    def seconds(self) -> float:
        """The time of collectives and encoding, one after the other; infinite if unknown."""
        if self.collective_seconds is None or self.encode_seconds is None:
            return math.inf
        return self.collective_seconds + self.encode_seconds

    @property
    def needed_bytes(self) -> int:
        """The memory that a device needs: the peak, a margin, and one slot, because a busy device frees its old value
        late."""
        return with_margin(self.peak_bytes, recompute=self.recompute) + self.overlap_bytes

    @property
    def fits(self) -> bool:
        """True if the candidate is possible and its needed bytes fit into the memory."""
        return self.problem is None and self.needed_bytes <= self.memory_per_device

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{_text(self)}: {self.problem}"
        verdict = "fits" if self.fits else "does not fit"
        return f"{_text(self)}: {self.parts_text()}; {verdict} in {tables.size(self.memory_per_device)}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """The result of `advise`; `print` it, or use it as data.

    Attributes:
        recommended: The candidate to use, or None when none fits.
        shortfall_bytes: The bytes a device that the best candidate lacks. 0 if a candidate fits, None if none is
            possible with any memory.
        reasons: The reasons, in sentences.
        candidates: Every mesh and stage that was considered, the preferred ones first.
    """

    recommended: Candidate | None
    shortfall_bytes: int | None
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        table = tables.plain("Memory of a device at the peak of a step")
        table.add_column("mesh", min_width=len("replica=2 x"))
        for column in ("stage", "stored", "gathered", "gradients", "reduced", "updated", "acti-\nvations", "peak"):
            table.add_column(column, justify="right", no_wrap=True)
        stepped = any(each.step_seconds is not None for each in self.candidates)
        timed = any(each.collective_seconds is not None for each in self.candidates)
        encoded = any(each.compression is not None for each in self.candidates)
        if timed:
            # The time includes encoding: another column would leave too little width for the last one.
            table.add_column("takes,\nms" if encoded else "sends,\nms", justify="right", no_wrap=True)
        if stepped:
            table.add_column("step,\nms", justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for each in self.candidates:
            parts = (each.stored_bytes, each.gathered_bytes, each.gradient_bytes, each.reduced_bytes)
            numbers = (*parts, each.updated_bytes, each.activation_bytes, each.peak_bytes)
            cells = [tables.short_size(number) if each.problem is None else "" for number in numbers]
            if timed:
                cells.append("" if math.isinf(each.seconds) else tables.milliseconds(each.seconds))
            if stepped:
                cells.append("" if each.step_seconds is None else tables.milliseconds(each.step_seconds))
            needed = f"too large: needs {tables.short_size(each.needed_bytes)} with room to spare"
            verdict = each.problem or ("fits" if each.fits else needed)
            verdict += ", with recompute" if each.recompute else ""
            verdict += "" if each.bubble is None else f", ranks wait {each.bubble:.0%}"
            verdict += f", microbatches={each.microbatches}" if each.microbatches > 1 else ""
            verdict += "" if each.compression is None else f", {each.compression}"
            table.add_row(tables.mesh(each.mesh_shape), str(each.zero_stage), *cells, verdict)
        return tables.as_text(*self.reasons, table)

    __repr__ = __str__


def advise(
    model: ModelOrSpecs,
    devices: int,
    memory_per_device: int | str,
    batch: int,
    *,
    optimizer: OptimizerLike = model_specs.AUTO,
    analyzer: ParameterAnalyzer | None = DEFAULT,
    layout_map: Any = None,
    activation_bytes: int | None = None,
    reshard_after_forward: bool | str | Sequence[str] = True,
    slot_dtype: DtypeByPath = None,
    inputs: Any = None,
    links: LinksLike | None = None,
    compression: Any = None,
    machine: MachineLike | None = None,
    pipelines: bool = True,
) -> Advice:
    """Recommend a mesh and a ZeRO stage for a model, or say how many bytes are missing.

    `advise` prefers the smallest stage that fits with all devices on the batch axis: a lower stage sends less, and the
    batch axis sends no activations. Its next choice is stage 3 with blocks computed again, which costs time. It
    considers meshes with a model axis if a layout map names the axis `model`, the smallest model axis first. If nothing
    fits, it considers microbatches, the fewest first, unless a layer normalizes by the batch: such a layer would
    normalize by a microbatch.

    With `links` (the result of `tfshard profile-network`), `advise` prefers the fitting mesh and stage with the
    shortest time of collectives alone. It computes blocks again only if nothing else fits. It also considers hybrid
    meshes, `create_mesh(replica=2, batch=4)`: a replica is a host, or some hosts.

    With `machine` (measured by `tfshard calibrate`, or described in a file), `advise` prefers the fitting mesh and
    stage with the shortest steps, or the first in the order above whose steps are at most 6% longer. A step is the
    computation, repeated computation included, and the part of the collectives that the computation does not hide
    (docs/simulating.md). `links` replaces the links of the machine. If nothing fits otherwise, `advise` then considers
    blocks computed again at every stage, and microbatches.

    `advise` also considers pipelines (`create_mesh(pipeline=2, batch=2)`, `tfshard.pipeline`) if the model can be cut:
    with `machine` in any case, else only if nothing else fits. Their steps include the time in which pipeline ranks
    wait. `Candidate.code` has the lines that compile a model like a candidate.

    With `compression` and links, `advise` also considers each mesh and stage with the compression, and proposes it if
    it clearly pays: if collectives and encoding take at most nine tenths of the time of exact collectives, even if
    computing hid half of the time saved on the link. The reasons give the gain or loss on the recommended mesh and
    stage, with or without the proposal.

    `advise` estimates the peak of a step on one device from its layouts and its traced graph. docs/planning.md says
    how, and docs/measurements.md compares the estimates with measured steps. `advise` keeps a margin above the
    estimate. The estimate excludes other memory of the runtime, and fragmentation. Leave room for them in
    `memory_per_device`; `Candidate.resident_bytes` says what a client on CPU holds with the runtime.

    Args:
        model: A built `keras.Model`, also one from `tfshard.abstract_model`, or a list of `VariableSpec`.
        devices: The number of devices; all are used.
        memory_per_device: The memory of a device: bytes, or a text such as `"16GiB"` or `"80GB"`.
        batch: Samples of one step over all devices.
        optimizer: An optimizer, its name, or None for no slots. By default the optimizer that the model was compiled
            with, else Adam.
        analyzer: Makes the groups; None for none.
        layout_map: As for `tfshard.ShardedStrategy`.
        activation_bytes: Bytes that one sample's activations take on a device at the peak. By default they are found in
            the model's graph, if the shapes of its inputs are known.
        reshard_after_forward: As for `tfshard.ShardedStrategy`.
        slot_dtype: As for `tfshard.ShardedStrategy`.
        inputs: The inputs of a step, with `batch` samples (or anything with shapes and dtypes). By default the shapes
            that the model was built for, if only their batch dim is open.
        links: `tfshard.planning.Links`, or the path of their file.
        compression: As for `tfshard.ShardedStrategy`, or `"auto"` for `"bfloat16"` and `"int8"`.
        machine: A `tfshard.planning.Machine`, or the path of its file. It needs a `keras.Model` with known `inputs`.
        pipelines: False to leave out meshes with a pipeline axis.

    Returns:
        The `Advice`.

    Raises:
        StrategyError: A number is not a positive integer, or a size or the model is invalid. Or a compression is given
            without links, or the links lack its encoding time.
        LayoutError: The layout map names an axis other than `batch` and `model`.

    >>> import tfshard
    >>> from tfshard.layouts import VariableSpec
    >>> specs = [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, 1024)) for i in range(8)]
    >>> advice = tfshard.advise(specs, devices=4, memory_per_device=60 << 20, batch=32)
    >>> advice.recommended.mesh_shape, advice.recommended.zero_stage, advice.recommended.peak_bytes >> 20
    ({'batch': 4}, 3, 35)
    """
    try:
        memory_per_device = tables.parse_size("memory_per_device", memory_per_device)
    except ValueError as error:
        raise StrategyError(str(error)) from None
    option_checks.positive_integer("devices", devices)
    option_checks.positive_integer("batch", batch)
    on = None if machine is None else Machine.from_any(machine)
    known = Links.from_any(links) if links is not None else None if on is None else on.links
    if known is not None:
        known.check_devices(devices)
    reductions = _reductions(compression, known)
    automatic = auto_layout.is_auto(layout_map)
    if not automatic:
        layout_map = LayoutMap.from_any(layout_map)
        layout_map.check_axes({BATCH_AXIS: 1, MODEL_AXIS: 1})
    has_model_axis = automatic or any(MODEL_AXIS in rule.axes for rule in layout_map.values())
    specs = model_specs.specs_of(model)
    optimizer = model_specs.optimizer_of(model, optimizer)
    slots = model_specs.slots_of(optimizer, specs)
    sizes = [size for size in range(1, devices + 1) if devices % size == 0] if has_model_axis else [1]
    if activation_bytes is None and inputs is None and isinstance(model, keras.Model):
        inputs = model_graph.batch_of(model, batch)
    step = _AdvisedStep(
        model=model,
        specs=specs,
        slots=slots,
        optimizer=optimizer,
        links=known,
        config=ShardingConfig(
            analyzer=analyzer,
            reshard=ReshardPolicy.from_options(reshard_after_forward),
            precision=Precision.from_options(slot_dtype=slot_dtype),
        ),
        timing=UpdateTiming.of(optimizer),
        inputs=None if activation_bytes is not None else inputs,
        machine=on,
        automatic=automatic,
    )
    if on is not None and (step.inputs is None or not isinstance(model, keras.Model)):
        raise StrategyError(
            "The time of a step on a machine is predicted from the graph of a keras.Model. Give a keras.Model, and "
            f"example inputs (inputs=). Received: model of type {type(model).__name__}, inputs={inputs!r}, "
            f"activation_bytes={activation_bytes}"
        )
    has_blocks = step.inputs is not None and isinstance(model, keras.Model) and blocks.can_mark(model)
    candidates = []
    meshes = _meshes(devices, sizes if has_model_axis else None, known)
    maps = [auto_layout.resolve(layout_map, model, each) for each in meshes]
    ways = [*((stage, False) for stage in ZeroStage), *[(ZeroStage.PARAMETERS, True)] * has_blocks]
    for mesh_shape, chosen in zip(meshes, maps, strict=True):
        data_size = MeshAxes.of(mesh_shape).data_size
        possible = [each for each in reductions if data_size > 1 and _fits_mesh(each, mesh_shape)]
        for (stage, recompute), reduction in itertools.product(ways, [None, *possible]):
            empty = Candidate(
                mesh_shape=mesh_shape,
                zero_stage=stage,
                recompute=recompute,
                memory_per_device=memory_per_device,
                compression=None if reduction is None else reduction.option,
            )
            if batch % data_size:
                problem = f"{_INDIVISIBLE} of {batch}: every device would compute it in full"
                candidates.append(dataclasses.replace(empty, problem=problem))
                continue
            activations = (activation_bytes or 0) * (batch // data_size)
            candidates.append(step.measure(empty, chosen, reduction, activations))
    if not any(each.fits and (on is None or not each.recompute) for each in candidates):
        if on is not None and has_blocks:
            ways += [(stage, True) for stage in ZeroStage if stage is not ZeroStage.PARAMETERS]
            candidates += step.measure_split(meshes, maps, ways[-3:], batch=batch, count=1, memory=memory_per_device)
        if step.inputs is not None and isinstance(model, keras.Model) and can_split(model):
            candidates += _in_microbatches(
                lambda count: step.measure_split(
                    meshes, maps, ways, batch=batch, count=count, memory=memory_per_device
                ),
                max(batch // MeshAxes.of(each).data_size for each in meshes),
            )
    pipelined = []
    if pipelines and (on is not None or not any(each.fits for each in candidates)):
        pipelined = step.pipelines(devices, batch, memory_per_device, has_blocks=has_blocks)
    if on is not None:
        candidates = _by_step(candidates + pipelined)
    elif known is not None:
        # Candidates with unknown times come last.
        exact = {_where(each): each for each in candidates if each.compression is None}
        candidates.sort(key=lambda each: (each.recompute, _preferred_by(each, exact[_where(each)])))
    if on is None:
        candidates += pipelined  # The bubble is not in the time of collectives, so that pipelines come last.
    return _choose(candidates, activation_bytes is None and inputs is None, has_model_axis)


def _by_step(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates by the time of a step.

    Candidates that fit and are about as fast as the fastest come first. They keep their order: the lowest stage with
    all devices on the batch axis comes before the others.
    """
    fitting = [each.step_seconds for each in candidates if each.fits and each.step_seconds is not None]
    limit = _ALIKE * min(fitting, default=0.0)

    def place(candidate: Candidate) -> float:
        seconds = math.inf if candidate.step_seconds is None else candidate.step_seconds
        return 0.0 if candidate.fits and seconds <= limit else seconds

    return sorted(candidates, key=place)


def _in_microbatches(measure: Callable[[int], list[Candidate]], most: int) -> list[Candidate]:
    """Return the candidates with the fewest microbatches with which something fits, by bisection over powers of 2.

    Args:
        measure: Returns the candidates with a number of microbatches.
        most: The rows of a device.
    """
    counts = [1 << power for power in range(1, most.bit_length())]
    found: dict[int, list[Candidate]] = {}
    least, first = 0, len(counts) - 1
    while counts and least <= first:
        # The most microbatches come first: if nothing fits with them, nothing does.
        place = first if not found else (least + first) // 2
        found[counts[place]] = measure(counts[place])
        if any(each.fits for each in found[counts[place]]):
            first = place - 1
        elif len(found) == 1:
            break
        else:
            least = place + 1
    return [each for count in sorted(found) for each in found[count]]


def can_split(model: keras.Model) -> bool:
    """Return whether a step in microbatches computes what a step on the full batch computes: no layer normalizes by the
    statistics of a batch."""
    return not statistics_traffic.statistics_of(model)


def _meshes(devices: int, model_sizes: Sequence[int] | None, links: Links | None) -> list[dict[str, int]]:
    """Return the meshes to consider: flat ones and, over several hosts, meshes with replicas of full hosts.

    Args:
        devices: The number of devices.
        model_sizes: Sizes of the model axis. If given, each mesh has a model axis.
        links: The links between devices, if they are known.
    """
    hosts = devices // links.devices_per_host if links is not None and links.has_hosts else 1
    found = []
    for size in model_sizes or [1]:
        model = {} if model_sizes is None else {MODEL_AXIS: size}
        shares = devices // size
        found.append({BATCH_AXIS: shares} | model)
        found += [
            {REPLICA_AXIS: replicas, BATCH_AXIS: shares // replicas} | model
            for replicas in range(2, hosts + 1)
            if hosts % replicas == 0 and shares % replicas == 0 and shares > replicas
        ]
    return found


def _reductions(given: Any, links: Links | None) -> list[GradientReduction]:
    """Return the reductions of the values of `compression=` to consider, checked."""
    options = gradient_reduction.automatic_options() if given == AUTO else [given]
    found = [reduction for each in options if (reduction := gradient_reduction.from_option(each)) is not None]
    if not found:
        return []
    if links is None:
        raise StrategyError(
            "The gain of a compression depends on the links. Give links=, a file that 'tfshard profile-network "
            f"--save=FILE' wrote. Received: compression={given!r}, links=None"
        )
    for each in found:
        links.encode_seconds(each.option, 0)
    return found


def _fits_mesh(reduction: GradientReduction, mesh_shape: Mapping[str, int]) -> bool:
    """Return True if devices of the mesh can reduce gradients by a reduction."""
    with contextlib.suppress(StrategyError):
        reduction.check_mesh(MeshAxes.of(mesh_shape))
        return True
    return False


def _where(candidate: Candidate) -> tuple[object, ...]:
    """Return the key that candidates share if only their compression differs."""
    return tuple(candidate.mesh_shape.items()), candidate.zero_stage, candidate.recompute, candidate.microbatches


def _at_most(candidate: Candidate, exact: Candidate) -> float:
    """Return the time of collectives and encoding, if computing hid a part of the saved time of exact collectives."""
    spared = exact.seconds - (candidate.seconds - (candidate.encode_seconds or 0.0))
    return candidate.seconds + _HIDDEN * max(0.0, spared)


def _preferred_by(candidate: Candidate, exact: Candidate) -> float:
    """Return the number of seconds to minimize. A compression that does not clearly pay counts more."""
    if candidate.compression is None or math.isinf(candidate.seconds):
        return candidate.seconds
    return _at_most(candidate, exact) / _CLEARLY


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AdvisedStep:
    """The settings that all candidates share.

    Attributes:
        model: The model or its specs.
        specs: The variables of the model.
        slots: The slots of the optimizer.
        optimizer: The optimizer.
        links: The links between devices, if they are known.
        config: The settings that all candidates share.
        timing: When updates can run.
        inputs: The inputs of the model. None if they are unknown, or the caller gave the activations.
        machine: The machine, if it is known.
        automatic: True if tfshard finds the layout maps.
    """

    model: ModelOrSpecs
    specs: Sequence[VariableSpec]
    slots: Sequence[SlotSpec]
    optimizer: OptimizerLike
    links: Links | None
    config: ShardingConfig
    timing: UpdateTiming
    inputs: Any
    machine: Machine | None
    automatic: bool

    def measure(
        self, empty: Candidate, layout_map: LayoutMap, reduction: GradientReduction | None, activation_bytes: int
    ) -> Candidate:
        """Return a candidate with its peak, or with the reason why it is impossible."""
        microbatches = Microbatches(count=empty.microbatches)
        try:
            config = dataclasses.replace(
                self.config,
                layout_map=layout_map,
                zero_stage=empty.zero_stage,
                reduction=reduction,
                microbatches=microbatches,
            )
            placement = ModelPlacement.of(self.specs, config, mesh_shape=empty.mesh_shape).check()
        except LayoutError as e:
            return dataclasses.replace(empty, problem=str(e))
        if self.automatic and linter.shards_nothing(placement):
            problem = f"layout_map='{AUTO}' finds nothing to shard over '{MODEL_AXIS}'"
            return dataclasses.replace(empty, problem=problem)
        graph = step_graph.trace(
            self.model if self.inputs is not None else placement.specs,
            placement,
            inputs=variable_traffic.inputs_of_microbatch(microbatches, self.inputs, empty.mesh_shape),
            recompute=blocks.AUTO if empty.recompute else None,
        )
        stored_bytes = ShardingPlan.from_placement(placement, slots=self.slots).resting_bytes()
        peak = peak_of(
            graph,
            placement,
            stored_bytes=stored_bytes,
            slots=self.slots,
            timing=self.timing,
            activation_bytes=activation_bytes,
            waits_in_backward=self.inputs is not None and bool(statistics_traffic.statistics_of(self.model)),
        )
        return self._timed(dataclasses.replace(empty, **dataclasses.asdict(peak)), placement, graph)

    def pipelines(self, devices: int, batch: int, memory_per_device: int, *, has_blocks: bool) -> list[Candidate]:
        """Return the candidates with a pipeline axis, the shortest axis first, if the model can be cut."""
        if not isinstance(self.model, keras.Model) or self.inputs is None:
            return []
        found = []
        ways: list[tuple[ZeroStage, str | None]] = [(ZeroStage.SLOTS, None), (ZeroStage.PARAMETERS, None)]
        ways += [(ZeroStage.PARAMETERS, blocks.AUTO)] * has_blocks
        for ranks, (stage, recompute) in itertools.product(pipelined_steps.sizes(devices), ways):
            data_size = devices // ranks
            count = pipelined_steps.microbatches_of(ranks, data_size, batch)
            if count is None:
                continue
            predicted = pipelined_steps.predict(
                pipelined_steps.PipelineQuestion(
                    model=self.model,
                    ranks=ranks,
                    data_size=data_size,
                    microbatches=count,
                    config=dataclasses.replace(self.config, zero_stage=stage),
                    inputs=self.inputs,
                    optimizer=self.optimizer,
                    recompute=recompute,
                    links=self.links,
                    machine=self.machine,
                )
            )
            if predicted is None:
                continue
            found.append(
                Candidate(
                    mesh_shape={PIPELINE_AXIS: ranks, BATCH_AXIS: data_size},
                    zero_stage=stage,
                    recompute=recompute is not None,
                    memory_per_device=memory_per_device,
                    microbatches=count,
                    bubble=predicted.bubble,
                    step_seconds=predicted.seconds,
                    collective_seconds=predicted.collective_seconds,
                    encode_seconds=None if predicted.collective_seconds is None else 0.0,
                    **dataclasses.asdict(predicted.peak),
                )
            )
        return found

    def measure_split(
        self,
        meshes: Sequence[Mapping[str, int]],
        maps: Sequence[LayoutMap],
        ways: Sequence[tuple[ZeroStage, bool]],
        *,
        batch: int,
        count: int,
        memory: int,
    ) -> list[Candidate]:
        """Return the candidates with at least `count` microbatches, on each mesh whose devices have as many rows.

        Args:
            meshes: The meshes.
            maps: The layout map of each mesh.
            ways: Stages, and whether blocks are computed again.
            batch: Samples of a step.
            count: Microbatches of a step. The number grows until it divides the rows of a device.
            memory: Bytes of a device.
        """
        found = []
        for mesh_shape, layout_map in zip(meshes, maps, strict=True):
            rows, left = divmod(batch, MeshAxes.of(mesh_shape).data_size)
            if left or rows < count:
                continue
            for stage, recompute in ways:
                empty = Candidate(
                    mesh_shape=dict(mesh_shape),
                    zero_stage=stage,
                    recompute=recompute,
                    microbatches=variable_layout.divisor_from(rows, count),
                    memory_per_device=memory,
                )
                found.append(self.measure(empty, layout_map, None, 0))
        return found

    def _timed(self, empty: Candidate, placement: ModelPlacement, graph: StepGraph) -> Candidate:
        """Add the time of collectives and encoding, if the links are known."""
        if self.links is None:
            return empty
        with contextlib.ExitStack() as stack:
            if empty.recompute:
                assert isinstance(self.model, keras.Model)
                stack.enter_context(blocks.marked(self.model, blocks.AUTO))
            planned = without_peak(
                placement,
                self.model,
                slots=self.slots,
                optimizer=self.optimizer,
                inputs=self.inputs,
                # Without inputs, `graph` is the graph of the specs, not of the model.
                graph=graph if self.inputs is not None else None,
            )
        if self.machine is not None and empty.compression is None:
            empty = dataclasses.replace(empty, step_seconds=self._step_seconds(empty, placement))
        encode_seconds = self.links.encode_seconds(empty.compression, _encoded_bytes(placement, planned))
        return dataclasses.replace(
            empty, collective_seconds=planned.over(self.links).collective_seconds, encode_seconds=encode_seconds
        )

    def _step_seconds(self, candidate: Candidate, placement: ModelPlacement) -> float:
        """Return the seconds of a step on the machine."""
        assert self.machine is not None and isinstance(self.model, keras.Model)
        traced = TracedStep.of(
            self.model,
            placement,
            inputs=variable_traffic.inputs_of_microbatch(
                placement.config.microbatches, self.inputs, candidate.mesh_shape
            ),
            timing=self.timing,
            recompute=blocks.AUTO if candidate.recompute else None,
        )
        updated = updated_bytes_of(placement, self.slots)
        return traced.on(
            self.machine, candidate.mesh_shape, updated_bytes=updated, microbatches=candidate.microbatches
        ).seconds


def _encoded_bytes(placement: ModelPlacement, plan: ShardingPlan) -> int:
    """Return the float32 bytes of gradients that a device encodes in a step.

    Args:
        placement: The layouts of the model's variables, with their reductions.
        plan: The plan of the placement. It tells how often a step reduces each gradient.
    """
    total, axes = 0, placement.mesh_shape
    for layout in placement.variables:
        if layout.reduction is None or not layout.spec.trainable:
            continue
        kinds = [each.kind for each in layout.reduction.sends(layout, axes)]
        count = sum(each.count for each in plan.collectives if (each.what, each.kind) == (layout.spec.path, kinds[0]))
        total += layout.reduction.encoded_bytes(layout, axes) * count // kinds.count(kinds[0])
    return total


def _choose(candidates: Sequence[Candidate], without_activations: bool, has_model_axis: bool) -> Advice:
    """Choose from candidates in order of preference."""
    possible = [candidate for candidate in candidates if candidate.problem is None]
    chosen = next((candidate for candidate in possible if candidate.fits), None)
    shortfall: int | None = 0
    if chosen is not None:
        why = "It is the first configuration that fits"
        if chosen.step_seconds is not None:
            milliseconds = tables.milliseconds(chosen.step_seconds)
            fastest = min(each.step_seconds for each in possible if each.fits and each.step_seconds is not None)
            why = f"Of the configurations that fit, it has the fastest steps, {milliseconds} ms"
            if chosen.step_seconds > fastest:
                why = (
                    f"Its steps take {milliseconds} ms, about as long as the fastest of the configurations that fit, "
                    f"{tables.milliseconds(fastest)} ms, and it is the first of those"
                )
        elif chosen.collective_seconds is not None:
            why = "Of the configurations that fit, it has the fastest collectives"
        reasons = [
            f"Recommended: {_text(chosen)}. {why}: {tables.size(chosen.peak_bytes)} at the peak of a step, "
            f"{tables.size(chosen.needed_bytes)} with room to spare, of {tables.size(chosen.memory_per_device)} on a "
            "device."
        ]
        reasons += _compared(chosen, possible)
        reasons += _judged(chosen, possible)
        reasons.append(
            f"On CPU a client with one device holds about {tables.size(chosen.resident_bytes())}, of which TensorFlow "
            f"itself takes {tables.size(PROCESS_BYTES)}."
        )
        reasons += [
            f"{_text(other)} was rejected: "
            + (other.problem or f"{tables.size(other.needed_bytes - other.memory_per_device)} too large.")
            for other in candidates[: candidates.index(chosen)]
        ]
    elif possible:
        best = min(possible, key=lambda candidate: candidate.needed_bytes)
        shortfall = best.needed_bytes - best.memory_per_device
        reasons = [
            f"Nothing fits. {_text(best)} comes closest: it needs {tables.size(best.needed_bytes)} on each device, "
            f"{tables.size(shortfall)} more than a device has."
        ]
    else:
        shortfall = None
        first = candidates[0]
        is_indivisible = first.problem is not None and first.problem.startswith(_INDIVISIBLE)
        remedy = ". Change the batch or the number of devices." if is_indivisible else ""
        reasons = [f"Nothing can be used. {tables.mesh(first.mesh_shape)}: {first.problem}{remedy}"]
    if not has_model_axis and (chosen is None or chosen.zero_stage.shard_params):
        reasons.append(
            "A layout map over the axis 'model' would allow a model axis, which also shards the gathered parameters "
            "and the gradients."
        )
    if without_activations:
        reasons.append("Activations are not counted: give example inputs (inputs=), or activation_bytes.")
    return Advice(recommended=chosen, shortfall_bytes=shortfall, reasons=tuple(reasons), candidates=tuple(candidates))


def _compared(chosen: Candidate, possible: Sequence[Candidate]) -> list[str]:
    """Return a sentence on the time of the best fitting mesh of the other kind, hybrid or flat, if it is known."""
    if chosen.collective_seconds is None:
        return []
    is_hybrid = REPLICA_AXIS in chosen.mesh_shape
    others = [each for each in possible if (REPLICA_AXIS in each.mesh_shape) != is_hybrid and each.fits]
    if not others:
        return []
    best = min(others, key=lambda each: each.seconds)
    encoding = "" if chosen.compression is None else " and its encoding"
    return [
        f"Its collectives{encoding} take {tables.milliseconds(chosen.seconds)} ms, one after the other; of the "
        f"{'flat' if is_hybrid else 'hybrid'} meshes {_text(best)} would take {tables.milliseconds(best.seconds)} ms."
    ]


def _judged(chosen: Candidate, possible: Sequence[Candidate]) -> list[str]:
    """Return sentences on the gain or loss of each compression on the recommended mesh and stage."""
    twins = {each.compression: each for each in possible if _where(each) == _where(chosen)}
    exact = twins[None]
    reasons = []
    for compression, each in twins.items():
        if compression is None or math.isinf(each.seconds):
            continue
        if not each.encode_seconds:
            reasons.append(f"compression={compression!r} there compresses no gradient: all gradients are too small.")
            continue
        assert exact.collective_seconds is not None and each.collective_seconds is not None
        reduction = gradient_reduction.from_option(compression)
        assert reduction is not None
        gain = reduction.gain_text(
            link_seconds=exact.collective_seconds - each.collective_seconds, encode_seconds=each.encode_seconds
        )
        reasons.append(f"compression={compression!r} there: {gain} {_verdict(each, exact, chosen)}")
    return reasons


def _verdict(each: Candidate, exact: Candidate, chosen: Candidate) -> str:
    """Say whether a compression is proposed, and if not, why."""
    most = _at_most(each, exact)
    share = f"That is {each.seconds / exact.seconds:.2f} of the time of exact sums"
    if most > each.seconds:
        share += f", {most / exact.seconds:.2f} if half of the former was hidden behind computing"
    if each is chosen:
        return f"{share}: it is recommended."
    if not each.fits:
        return f"{share}, but it is {tables.size(each.needed_bytes - each.memory_per_device)} too large."
    if most > _CLEARLY * exact.seconds:
        return f"{share}: leave it out."
    return f"{share}."


def _text(candidate: Candidate) -> str:
    again = " with strategy.recompute(model)" if candidate.recompute else ""
    again += f" with microbatches={candidate.microbatches}" if candidate.microbatches > 1 else ""
    option = "" if candidate.compression is None else f" with compression={candidate.compression!r}"
    waits = "" if candidate.bubble is None else f", in which ranks wait {candidate.bubble:.0%} of the time"
    return f"{tables.mesh(candidate.mesh_shape)} at stage {candidate.zero_stage}{again}{option}{waits}"
