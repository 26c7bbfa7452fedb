"""Predict steps of a model on clusters of any size, and find the best mesh, without running a step."""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import keras
import rich.box
import rich.table

from tfshard import tables
from tfshard.errors import LayoutError, StrategyError
from tfshard.graph import auto_layout, model_graph, model_specs
from tfshard.graph.flops import training_flops
from tfshard.graph.model_specs import OptimizerLike
from tfshard.layouts import option_checks
from tfshard.layouts.axes import BATCH_AXIS, MODEL_AXIS, PIPELINE_AXIS, REPLICA_AXIS, MeshAxes
from tfshard.layouts.config import Microbatches, ReshardPolicy, ShardingConfig, ZeroStage
from tfshard.layouts.layout_map import LayoutMap
from tfshard.layouts.parameter_analyzer import DEFAULT, ParameterAnalyzer
from tfshard.layouts.placement import ModelPlacement
from tfshard.operations import blocks
from tfshard.planning import pipelined_steps, statistics_traffic, step_graph
from tfshard.planning.machine import Machine, MachineLike
from tfshard.planning.peak import UpdateTiming, added_bytes, with_margin
from tfshard.planning.pipelined_steps import PipelinePrediction, PipelineQuestion
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.planning.step_times import TracedStep, updated_bytes_of
from tfshard.planning.variable_traffic import sum_bytes

# A step on more devices is predicted from a step on this many. The computation of a device is the same. Its shards are
# smaller still, and small beside its peak. The stored bytes are counted exactly.
_TRACED_DEVICES = 8
# The least numbers of rows that a device has of a microbatch, to try; then four times as many, as often as they fit.
_ROWS = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The time and memory of a step on a mesh.

    Attributes:
        devices: The number of devices.
        mesh_shape: Axis name to size.
        zero_stage: 0 to 3.
        microbatches: The number of microbatches.
        recompute: True if blocks are computed again.
        batch: Samples of a step, over all devices.
        seconds: The time of a step.
        compute_seconds: The time in which a device computes.
        collective_seconds: The time in which a device sends. Sending that computing hides is in both times.
        utilization: Model FLOPs of a step over what the devices could do in its time (MFU, Chowdhery et al. 2022).
        peak_bytes: Bytes of a device at the peak of a step.
        needed_bytes: The memory that a device needs, in bytes.
        unknown: Further traffic with unknown bytes; empty if none.
        bubble: On a mesh with a pipeline axis, the share of time in which pipeline ranks wait; else None.
    """

    devices: int
    mesh_shape: dict[str, int]
    zero_stage: int
    microbatches: int
    recompute: bool
    batch: int
    seconds: float
    compute_seconds: float
    collective_seconds: float
    utilization: float | None
    peak_bytes: int
    needed_bytes: int
    unknown: str = ""
    bubble: float | None = None

    @property
    def samples_per_second(self) -> float:
        """Over all devices."""
        return self.batch / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Simulation:
    """The result of `simulate`; `print` it, or use it as data.

    Attributes:
        machine: The machine.
        best: The quickest step that fits for each number of devices, or None.
        considered: All predictions, by number of devices, the quickest first. Predictions that do not fit are included.
        problems: Why no step is possible, for each number of devices without a step.
    """

    machine: Machine
    best: dict[int, Prediction | None]
    considered: dict[int, tuple[Prediction, ...]]
    problems: dict[int, str]

    def __str__(self) -> str:
        table = rich.table.Table(title=f"Fastest steps on {self.machine.name}", box=rich.box.SIMPLE_HEAD)
        for column in ("devices", "mesh", "stage", "microbatches", "recompute"):
            table.add_column(column, no_wrap=True)
        for column in ("step, ms", "samples/s", "MFU", "memory"):
            table.add_column(column, justify="right", no_wrap=True)
        for devices, each in self.best.items():
            if each is None:
                table.add_row(str(devices), f"nothing: {self.problems[devices]}")
                continue
            table.add_row(
                f"{devices:,}",
                tables.mesh(each.mesh_shape),
                str(each.zero_stage),
                str(each.microbatches),
                "yes" if each.recompute else "no",
                tables.milliseconds(each.seconds),
                f"{each.samples_per_second:,.1f}",
                "-" if each.utilization is None else f"{each.utilization:.0%}",
                tables.size(each.needed_bytes),
            )
        unknown = sorted({each.unknown for each in self.best.values() if each is not None and each.unknown})
        legend = "recompute: blocks are recomputed in the backward pass; memory: memory that a device should have."
        return tables.as_text(table, legend, *(f"Not counted: {each}" for each in unknown))

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, bytes and seconds as numbers."""
        return {
            "machine": self.machine.to_dict(),
            "best": {
                str(devices): None if each is None else dataclasses.asdict(each) for devices, each in self.best.items()
            },
            "problems": {str(devices): problem for devices, problem in self.problems.items()},
        }

    def to_json(self, **options: Any) -> str:
        """Return `to_dict` as JSON. The options go to `json.dumps`."""
        return json.dumps(self.to_dict(), **options)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw samples a second and the utilization over the number of devices. Needs matplotlib.

        Raises:
            StrategyError: No step fits, so the plot would be empty.
        """
        import matplotlib.figure

        found = [each for each in self.best.values() if each is not None]
        if not found:
            raise StrategyError(
                f"The simulation has nothing to draw: no step fits on {self.machine.name}. Print the simulation to "
                f"see how much memory is missing. Received: devices={list(self.best)}"
            )
        figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot([each.devices for each in found], [each.samples_per_second for each in found], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("devices")
        axes.set_ylabel("samples a second")
        axes.set_title(self.machine.name)
        utilizations = [each.utilization for each in found if each.utilization is not None]
        if len(utilizations) == len(found):
            other = axes.twinx()
            other.plot([each.devices for each in found], utilizations, marker="s", color="tab:orange")
            other.set_ylim(0, 1)
            other.set_ylabel("MFU", color="tab:orange")
        figure.savefig(path)


def simulate(
    model: keras.Model,
    machine: MachineLike,
    devices: Iterable[int],
    batch: int,
    *,
    length: int | None = None,
    optimizer: OptimizerLike = model_specs.AUTO,
    analyzer: ParameterAnalyzer | None = DEFAULT,
    layout_map: Any = None,
    zero_stages: Sequence[int] = (3,),
    reshard_after_forward: bool | str | Sequence[str] = True,
) -> Simulation:
    """Predict steps of a model on clusters of several sizes, and find the quickest mesh that fits each size.

    For each number of devices, `simulate` tries the sizes of the model axis within a host (with a layout map) and
    replicas of full hosts. It also tries numbers of microbatches, blocks computed again or not, and pipelines of 2, 4
    and 8 stages if the model can be cut (`tfshard.pipeline`). The graph of a step gives its time
    (`tfshard.planning.machine`), with the collectives beside it; memory is estimated as in `advise`.
    Nothing is allocated. docs/simulating.md lists the assumptions, and compares predictions with measured and published
    numbers.

    Args:
        model: A built model, also from `tfshard.abstract_model`, in the dtype policy of the training.
        machine: A `tfshard.planning.Machine`, or the path of its file.
        devices: The numbers of devices.
        batch: Samples of one step over all devices.
        length: The size of open dims of the model's inputs other than the first: the tokens of a sequence.
        optimizer: As for `tfshard.advise`.
        analyzer: Makes the groups; None for none.
        layout_map: As for `tfshard.ShardedStrategy`, over the axis `model`.
        zero_stages: The ZeRO stages that are considered.
        reshard_after_forward: As for `tfshard.ShardedStrategy`.

    Raises:
        StrategyError: A number is not a positive integer, the machine cannot be read or has no links for so many
            devices, or the model's inputs are unknown.
        LayoutError: The layout map names an axis other than `batch` and `model`.

    Example: eight times the devices, on hosts of eight with a slow network between them.

    >>> import keras, tfshard
    >>> from tfshard.planning import Link, Links, Machine
    >>> links = Links.of(
    ...     devices_per_host=8, inside=Link(latency=1e-5, bandwidth=1e11), between=Link(latency=1e-4, bandwidth=1e9),
    ...     device_type="GPU",
    ... )
    >>> machine = Machine.from_dict({
    ...     "product_flops": 1e14, "bandwidth": 1e12, "memory": 16e9, "devices_per_host": 8,
    ...     "inside": {"latency": 1e-5, "bandwidth": 1e11}, "between": {"latency": 1e-4, "bandwidth": 1e9},
    ... })
    >>> def build():
    ...     return keras.Sequential([keras.Input((1024,)), *[keras.layers.Dense(1024) for _ in range(4)]])
    >>> found = tfshard.simulate(tfshard.abstract_model(build), machine, devices=[8, 64], batch=8192)
    >>> found.best[8].mesh_shape, found.best[64].mesh_shape
    ({'batch': 8}, {'replica': 8, 'batch': 8})
    """
    simulator = Simulator(
        model,
        batch,
        length=length,
        optimizer=optimizer,
        analyzer=analyzer,
        layout_map=layout_map,
        zero_stages=zero_stages,
        reshard_after_forward=reshard_after_forward,
    )
    return simulator.on(machine, devices)


def meshes(devices: int, devices_per_host: int, has_model_axis: bool) -> list[dict[str, int]]:
    """Return flat meshes and meshes with replicas of full hosts, with each size of the model axis within a host."""
    found = []
    for size in range(1, min(devices, devices_per_host) + 1):
        if devices % size or devices_per_host % size or (size > 1 and not has_model_axis):
            continue
        model = {MODEL_AXIS: size} if size > 1 else {}
        shares = devices // size
        found.append({BATCH_AXIS: shares} | model)
        inside = devices_per_host // size
        while 1 < inside < shares:
            if shares % inside == 0:
                found.append({REPLICA_AXIS: shares // inside, BATCH_AXIS: inside} | model)
            inside *= 4
    return found


def _rows(most: int) -> list[int]:
    """Return the numbers of rows of a microbatch to try on a device that has at most `most`."""
    found = list(_ROWS)
    while found[-1] * 4 <= most:
        found.append(found[-1] * 4)
    return found


class CannotBeError(Exception):
    """The reason why a step on a mesh is impossible."""


class Simulator:
    """Predicts steps of one model on any machine. Each step is traced once for a mesh, and serves all machines.

    Args:
        model: As for `simulate`, like the other arguments.
        batch: Samples.
        length: The size of open dims.
        optimizer: The optimizer.
        analyzer: Makes the groups.
        layout_map: The layout map.
        zero_stages: The stages.
        reshard_after_forward: How steps gather.

    Raises:
        StrategyError: As `simulate`.
        LayoutError: As `simulate`.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: int,
        *,
        length: int | None = None,
        optimizer: OptimizerLike = model_specs.AUTO,
        analyzer: ParameterAnalyzer | None = DEFAULT,
        layout_map: Any = None,
        zero_stages: Sequence[int] = (3,),
        reshard_after_forward: bool | str | Sequence[str] = True,
    ):
        option_checks.positive_integer("batch", batch)
        if not isinstance(model, keras.Model):
            raise StrategyError(
                "A simulation needs a keras.Model, because it reads the model's graph. Received: "
                f"model={model!r} ({type(model)})"
            )
        self._specs = model_specs.specs_of(model)
        if model_graph.batch_of(model, 1, length) is None:
            raise StrategyError(
                "A simulation needs the shapes of the model's inputs. Build the model on inputs whose dims are "
                f"known, except for the batch, or give length= for the open dims. Received: model={model.name!r}, "
                f"length={length!r}"
            )
        self._automatic = auto_layout.is_auto(layout_map)
        if not self._automatic:
            layout_map = LayoutMap.from_any(layout_map)
            layout_map.check_axes({BATCH_AXIS: 1, MODEL_AXIS: 1})
        self._model = model
        self._analyzer = analyzer
        self._layout_map = layout_map
        self._zero_stages = [ZeroStage.from_number(each) for each in zero_stages]
        self._reshard = ReshardPolicy.from_options(reshard_after_forward)
        self._length = length
        self._batch = batch
        optimizer = model_specs.optimizer_of(model, optimizer)
        self._slots = model_specs.slots_of(optimizer, self._specs)
        self._optimizer = optimizer
        self._timing = UpdateTiming.of(optimizer)
        self._has_blocks = blocks.can_mark(model)
        self._steps: dict[tuple[object, ...], tuple[TracedStep, int]] = {}
        # What predictions of pipelines have traced.
        self._pipelined: dict[Hashable, Any] = {}
        flops = training_flops(model, model_graph.batch_of(model, 1, length))
        self._flops = None if flops is None else flops * batch

    def on(self, machine: MachineLike, devices: Iterable[int]) -> Simulation:
        """Find the quickest steps on a machine, by number of devices, as `simulate` does."""
        machine, counts = Machine.from_any(machine), list(devices)
        for count in counts:
            option_checks.positive_integer("devices", count)
            machine.links.check_devices(count)
        has_model_axis = self._automatic or any(MODEL_AXIS in rule.axes for rule in self._layout_map.values())
        best: dict[int, Prediction | None] = {}
        considered, problems = {}, {}
        for count in counts:
            found: list[Prediction] = []
            refused: list[str] = []
            for mesh_shape in meshes(count, machine.links.devices_per_host, has_model_axis):
                for stage in self._zero_stages:
                    try:
                        found += self.predictions(machine, mesh_shape, stage)
                    except CannotBeError as error:
                        refused.append(str(error))
            found += self._pipelines(machine, count)
            found.sort(key=lambda each: each.seconds)
            considered[count] = tuple(found)
            fits = [each for each in found if machine.memory is None or each.needed_bytes <= machine.memory]
            best[count] = fits[0] if fits else None
            if found and not fits:
                least = min(each.needed_bytes for each in found)
                problems[count] = f"a step needs at least {least:,} bytes on each device, which has {machine.memory:,}"
            elif not fits:
                problems[count] = refused[-1]
        return Simulation(machine=machine, best=best, considered=considered, problems=problems)

    def _pipelines(self, machine: Machine, devices: int) -> list[Prediction]:
        """Return the predictions for meshes with a pipeline axis, if the model can be cut."""
        found = []
        recomputes = (None, *[blocks.AUTO] * self._has_blocks)
        for ranks, stage, recompute in itertools.product(pipelined_steps.sizes(devices), self._zero_stages, recomputes):
            data_size = devices // ranks
            count = pipelined_steps.microbatches_of(ranks, data_size, self._batch)
            inputs = model_graph.batch_of(self._model, self._batch, self._length)
            if count is None:
                continue
            question = PipelineQuestion(
                model=self._model,
                ranks=ranks,
                data_size=data_size,
                microbatches=count,
                config=ShardingConfig(zero_stage=stage, analyzer=self._analyzer, reshard=self._reshard),
                inputs=inputs,
                optimizer=self._optimizer,
                recompute=recompute,
                machine=machine,
                traced=self._pipelined,
            )
            predicted = pipelined_steps.predict(question)
            if predicted is not None:
                found.append(self._of_pipeline(question, predicted, machine, devices))
        return found

    def _of_pipeline(
        self, question: PipelineQuestion, predicted: PipelinePrediction, machine: Machine, devices: int
    ) -> Prediction:
        assert predicted.seconds is not None and predicted.compute_seconds is not None
        could = predicted.seconds * devices * (machine.peak_flops or machine.product_flops)
        is_recomputed = question.recompute is not None
        return Prediction(
            devices=devices,
            mesh_shape={PIPELINE_AXIS: question.ranks, BATCH_AXIS: question.data_size},
            zero_stage=question.config.zero_stage.value,
            microbatches=question.microbatches,
            recompute=is_recomputed,
            batch=self._batch,
            seconds=predicted.seconds,
            compute_seconds=predicted.compute_seconds,
            collective_seconds=predicted.collective_seconds or 0.0,
            utilization=None if self._flops is None else self._flops / could,
            peak_bytes=predicted.peak.peak_bytes,
            needed_bytes=with_margin(predicted.peak.peak_bytes, recompute=is_recomputed),
            unknown=predicted.unknown,
            bubble=predicted.bubble,
        )

    def predictions(
        self,
        machine: Machine,
        mesh_shape: dict[str, int],
        stage: ZeroStage,
        *,
        rows: Iterable[int] | None = None,
        recomputes: Iterable[str | None] = (None, blocks.AUTO),
    ) -> list[Prediction]:
        """Return the predictions for a mesh and a stage, with blocks computed again and without. The rows of a
        microbatch on a device grow until the step does not fit.

        Args:
            machine: The machine.
            mesh_shape: The mesh.
            stage: The ZeRO stage.
            rows: The numbers of rows to try, if they divide the rows of a device. By default some powers of two, and
                all rows of a device as one microbatch.
            recomputes: The blocks to compute again, if any, as for `strategy.recompute`.
        """
        axes = MeshAxes.of(mesh_shape)
        if self._batch % axes.data_size:
            raise CannotBeError(f"a batch of {self._batch} samples is not divisible by {axes.data_size} devices")
        local_batch = self._batch // axes.data_size
        try:
            placement = self._placement(mesh_shape, stage)
        except LayoutError as error:
            raise CannotBeError(str(error)) from None
        stored_bytes = ShardingPlan.from_placement(placement, slots=self._slots).resting_bytes()
        if machine.memory is not None and stored_bytes > machine.memory:
            raise CannotBeError(
                f"parameters and slots take {stored_bytes:,} bytes on each device, which has {machine.memory:,}"
            )
        tried = {*_rows(local_batch), local_batch} if rows is None else set(rows)
        found = []
        for recompute in recomputes:
            if recompute == blocks.AUTO and not self._has_blocks:
                continue
            for each in sorted(each for each in tried if local_batch % each == 0):
                one = self._prediction(
                    machine, placement, mesh_shape, stage, stored_bytes, each, local_batch // each, recompute
                )
                found.append(one)
                if machine.memory is not None and one.needed_bytes > machine.memory:
                    break
        return found

    def _prediction(
        self,
        machine: Machine,
        placement: ModelPlacement,
        mesh_shape: dict[str, int],
        stage: ZeroStage,
        stored_bytes: int,
        rows: int,
        count: int,
        recompute: str | None,
    ) -> Prediction:
        step, made = self._traced(mesh_shape, stage, rows, count > 1, recompute)
        microbatches = Microbatches(count=count)
        updated = updated_bytes_of(placement, self._slots)
        time = step.on(machine, mesh_shape, updated_bytes=updated, microbatches=count)
        peak = stored_bytes + made + sum_bytes(microbatches, placement.variables, placement.mesh_shape)
        devices = math.prod(mesh_shape.values())
        could = time.seconds * devices * (machine.peak_flops or machine.product_flops)
        return Prediction(
            devices=devices,
            mesh_shape=mesh_shape,
            zero_stage=stage.value,
            microbatches=count,
            recompute=recompute is not None,
            batch=self._batch,
            seconds=time.seconds,
            compute_seconds=time.compute_seconds,
            collective_seconds=time.collective_seconds,
            utilization=None if self._flops is None else self._flops / could,
            peak_bytes=peak,
            needed_bytes=with_margin(peak, recompute=recompute is not None),
            unknown=step.unknown,
        )

    def _placement(self, mesh_shape: Mapping[str, int], stage: ZeroStage) -> ModelPlacement:
        config = ShardingConfig(
            layout_map=auto_layout.resolve(self._layout_map, self._model, mesh_shape),
            zero_stage=stage,
            analyzer=self._analyzer,
            reshard=self._reshard,
        )
        return ModelPlacement.of(self._specs, config, mesh_shape=mesh_shape).check()

    def _traced(
        self, mesh_shape: Mapping[str, int], stage: ZeroStage, rows: int, is_part: bool, recompute: str | None
    ) -> tuple[TracedStep, int]:
        """Return the trace of a microbatch with some rows a device, and the bytes that it adds at its peak."""
        most = {REPLICA_AXIS: 2, BATCH_AXIS: _TRACED_DEVICES}
        small = {axis: min(size, most.get(axis, size)) for axis, size in mesh_shape.items()}
        key = (*small.items(), stage, rows, is_part, recompute)
        if key not in self._steps:
            placement = self._placement(small, stage)
            inputs = model_graph.batch_of(self._model, rows * MeshAxes.of(small).data_size, self._length)
            # After the last microbatch the step updates everything.
            timing = UpdateTiming() if is_part else self._timing
            step = TracedStep.of(self._model, placement, inputs=inputs, timing=timing, recompute=recompute)
            made = added_bytes(
                step_graph.trace(self._model, placement, inputs=inputs, recompute=recompute),
                placement,
                slots=self._slots,
                timing=timing,
                waits_in_backward=bool(statistics_traffic.statistics_of(self._model)),
                is_microbatch=is_part,
            )
            self._steps[key] = step, sum(made.values())
        return self._steps[key]
