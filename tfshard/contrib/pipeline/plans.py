"""Plans and measurements of a pipeline: stored bytes, sent bytes, and waiting times."""

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import tables
from tfshard.contrib.pipeline import models
from tfshard.contrib.pipeline.cut import Source
from tfshard.contrib.pipeline.pipeline import Pipeline
from tfshard.contrib.pipeline.runner import Measured
from tfshard.contrib.pipeline.schedules import Schedule, Timed
from tfshard.devices import messages
from tfshard.errors import StrategyError, warn
from tfshard.graph.flops import training_flops
from tfshard.measure.report import REPORTERS, Report

if TYPE_CHECKING:
    from tfshard.layouts.planner import ShardingPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A pipeline stage.

    Attributes:
        rank: The pipeline rank.
        layers: The names of the layers.
        stored: The variables that the stage's devices store, and the collectives of a step without microbatches.
        flops: FLOPs of the forward and backward pass with one batch, over all devices; NaN if the graph does not tell.
        sent_bytes: Bytes that the stage sends to other pipeline ranks for one batch, over all devices. The gradients of
            floating-point tensors come back with as many bytes.
        in_flight: The largest number of microbatches for which the stage keeps its inputs at once.
    """

    rank: int
    layers: tuple[str, ...]
    stored: "ShardingPlan"
    flops: float
    sent_bytes: int
    in_flight: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The result of `plan`; `print` it, or use it as data.

    Attributes:
        mesh: Axis name to size.
        schedule: The schedule.
        stages: The stages in order.
    """

    mesh: dict[str, int]
    schedule: Schedule
    stages: tuple[PlannedStage, ...]

    @property
    def parts(self) -> tuple[PlannedStage, ...]:
        """The old name of `stages`, which warns."""
        warn("PipelinePlan.parts is called PipelinePlan.stages since tfshard 0.3.", DeprecationWarning)
        return self.stages

    def bytes_per_device(self, kind: str | None = None) -> int:
        """Return the bytes that the fullest device stores; `kind` as for `ShardingPlan.bytes_per_device`."""
        held = [0] * self.schedule.ranks
        for stage in self.stages:
            held[stage.rank] += stage.stored.bytes_per_device(kind)
        return max(held)

    def bubble(self, times: dict[tuple[bool, int], float] | None = None) -> float:
        """Return the share of time in which pipeline ranks wait, in a step with instant communication.

        Args:
            times: The duration of a task, by (is forward, stage), such as `Measured.times`. By default it follows from
                FLOPs: a forward pass takes a third, and a backward pass with recomputation takes four thirds. In the
                last stage, both together take three thirds.
        """
        return self.schedule.bubble(times or self._times())

    def _times(self) -> dict[tuple[bool, int], float]:
        last = len(self.stages) - 1
        known = all(not math.isnan(stage.flops) for stage in self.stages)
        flops = [stage.flops if known else 1.0 for stage in self.stages]
        return {
            (forward, number): each * (1 if forward else 3 if number == last else 4) / 3
            for number, each in enumerate(flops)
            for forward in (True, False)
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data: JSON types only."""
        return {
            "mesh": self.mesh,
            "schedule": self.schedule.name,
            "microbatches": self.schedule.microbatches,
            "bubble": self.bubble(),
            "bytes_per_device": self.bytes_per_device(),
            "stages": [
                {
                    "rank": stage.rank,
                    "layers": list(stage.layers),
                    "flops": stage.flops,
                    "sent_bytes": stage.sent_bytes,
                    "in_flight": stage.in_flight,
                    "stored": stage.stored.to_dict(),
                }
                for stage in self.stages
            ],
        }

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        table = tables.plain("Parts")
        for name in ("stage", "rank", "layers", "parameters", "stored per device", "FLOPs", "sent", "in flight"):
            table.add_column(name, justify="left" if name == "layers" else "right")
        for number, stage in enumerate(self.stages):
            first, last = stage.layers[0], stage.layers[-1]
            table.add_row(
                str(number),
                str(stage.rank),
                first if len(stage.layers) == 1 else f"{first} to {last}",
                tables.size(stage.stored.bytes_on_one_device("parameter")),
                tables.size(stage.stored.resting_bytes()),
                "?" if math.isnan(stage.flops) else f"{stage.flops:.3g}",
                tables.size(stage.sent_bytes),
                str(stage.in_flight),
            )
        head = (
            f"Pipeline on {math.prod(self.mesh.values())} devices "
            f"({', '.join(f'{name}={size}' for name, size in self.mesh.items())}), {self.schedule.name}, "
            f"{self.schedule.microbatches} microbatches: ranks are idle for {self.bubble():.0%} of a step"
        )
        return f"{head}\n\n{tables.as_text(table)}"


def plan(model: keras.Model, inputs: Any, optimizer: keras.optimizers.Optimizer | str | None = None) -> PipelinePlan:
    """Plan a pipeline without running it: stored bytes, sent bytes, and waiting times.

    Args:
        model: A model that `tfshard.pipeline` has cut, compiled under a strategy.
        inputs: A batch as for `fit`, without labels: arrays, or anything with a shape and a dtype.
        optimizer: As for `strategy.plan`; by default the compiled optimizer of the model.

    Raises:
        StrategyError: The model is not on a pipeline.

    Example:

    >>> import keras, numpy as np, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> layers = [keras.layers.Dense(8, name=f"dense_{i}") for i in range(4)]
    >>> model = tfshard.pipeline(keras.Sequential([keras.Input((8,)), *layers]), stages=["dense_2"], microbatches=4)
    >>> model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(pipeline=2, batch=2)))
    >>> planned = tfshard.pipelining.plan(model, np.ones((16, 8), "float32"))
    >>> [stage.sent_bytes for stage in planned.stages], planned.schedule.in_flight
    ([512, 0], (2, 0))
    """
    pipeline = _pipeline(model)
    cut = pipeline.cut
    shapes = cut.shapes(inputs)
    rows = next(iter(shapes.values())).shape[0]
    schedule = Schedule.of(
        pipeline.schedule, ranks=len(pipeline.ranks), stages=len(cut.stages), microbatches=pipeline.count_of(rows)
    )
    optimizer = model.optimizer if optimizer is None else optimizer
    stages = []
    for stage in cut.stages:
        rank = pipeline.ranks[stage.number % len(pipeline.ranks)]
        takes = [shapes[source] for source in stage.takes]
        with rank.seen():
            stored = rank.strategy.plan(stage.model, optimizer=optimizer, inputs=takes)
            flops = training_flops(stage.model, takes)
        sent = sum(
            _bytes(shapes[source])
            for source in (Source(stage.number, number) for number in range(stage.gives))
            for reader in cut.readers(source)
            if reader % len(pipeline.ranks) != rank.number
        )
        stages.append(
            PlannedStage(
                rank=rank.number,
                layers=stage.layers,
                stored=stored,
                flops=math.nan if flops is None else float(flops),
                sent_bytes=sent,
                in_flight=schedule.in_flight[stage.number],
            )
        )
    return PipelinePlan(mesh=pipeline.strategy.pipeline_axes.given, schedule=schedule, stages=tuple(stages))


def _bytes(spec: tf.TensorSpec) -> int:
    return int(spec.shape.num_elements() * spec.dtype.size)


def reports(model: keras.Model) -> tuple[Report, ...]:
    """Measure the stored bytes of each device, and return a report for each pipeline rank with its stages.

    Raises:
        StrategyError: The model is not on a pipeline.
    """
    found = []
    for rank in _pipeline(model).ranks:
        with rank.seen():
            found.append(Report.from_model(model, rank.strategy, [stage.model for stage in rank.stages]))
    return tuple(found)


REPORTERS.append(lambda model: reports(model) if is_pipeline(model) else ())


def measured(model: keras.Model) -> Measured | None:
    """Return the measurements of the last training step: begin and end of each task, kept bytes and sent bytes.

    Returns None before the first step that ran without compiling. In a launched run, all clients must call this
    function, and each gets the times of all tasks.

    Raises:
        StrategyError: The model is not on a pipeline.
    """
    pipeline = _pipeline(model)
    found = pipeline.measured
    if found is None:
        return None
    tasks = tuple(
        _timed(rank_tasks, rank.strategy.mesh) for rank_tasks, rank in zip(found.tasks, pipeline.ranks, strict=True)
    )
    return dataclasses.replace(found, tasks=tasks)


def _timed(tasks: tuple[Timed, ...], mesh: dtensor.Mesh) -> tuple[Timed, ...]:
    """Return the tasks of a pipeline rank, timed by a client that ran them."""
    if messages.is_everywhere(mesh):
        return tasks
    local_times = None if mesh.is_remote() else np.array([(each.begin, each.end) for each in tasks])
    times = messages.from_first(local_times, (len(tasks), 2), tf.float64, mesh)
    return tuple(
        dataclasses.replace(each, begin=float(begin), end=float(end))
        for each, (begin, end) in zip(tasks, times, strict=True)
    )


def is_pipeline(model: keras.Model) -> bool:
    """Return True if a model was cut, and compiled on a mesh with a pipeline axis."""
    return models.pipeline_of(model) is not None


def _pipeline(model: keras.Model) -> Pipeline:
    found = models.pipeline_of(model)
    if found is None:
        raise StrategyError(
            "The model is not on a pipeline: cut it with tfshard.pipeline, and compile it with a strategy whose mesh "
            f"has a pipeline axis. Received: model={model!r}"
        )
    return found
