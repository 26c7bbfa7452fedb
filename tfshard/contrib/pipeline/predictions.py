"""Predicts the memory and the time of a pipelined step, for `advise` and `simulate`. Nothing is allocated."""

import dataclasses
import math

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.contrib.pipeline import models
from tfshard.contrib.pipeline.cut import CutModel, Source, cut
from tfshard.contrib.pipeline.schedules import Schedule
from tfshard.errors import LayoutError, StrategyError
from tfshard.graph import model_specs
from tfshard.layouts.axes import BATCH_AXIS
from tfshard.layouts.config import Microbatches, ShardingConfig
from tfshard.layouts.layout_map import LayoutMap
from tfshard.layouts.placement import ModelPlacement
from tfshard.planning import pipelined_steps, statistics_traffic, step_graph
from tfshard.planning.analyzer import without_peak
from tfshard.planning.links import Links
from tfshard.planning.machine import Work
from tfshard.planning.peak import Peak, UpdateTiming, peak_of
from tfshard.planning.pipelined_steps import PipelinePrediction, PipelineQuestion
from tfshard.planning.sharding_plan import ShardingPlan
from tfshard.planning.step_times import TracedStep, updated_bytes_of

_SCHEDULE = "1f1b"
# A backward task computes the forward pass again, except in the last stage, where one task does both passes. A backward
# pass takes twice the time of a forward pass.
_FORWARD, _BACKWARD, _BOTH = 1 / 3, 4 / 3, 1.0
# A step on more devices is predicted from a step on this many, as in `contrib.simulate`.
_TRACED_DEVICES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PredictedStage:
    """The prediction of one stage.

    Attributes:
        peak: Bytes of a device of the stage.
        compute_seconds: The time in which a device computes the forward and the backward pass of a microbatch.
        task_seconds: The same with the collectives that computing does not hide.
        update_seconds: The time of the updates of a step.
        collective_seconds: The time of the collectives of a microbatch, one after the other.
        sent_bytes: Bytes that a microbatch sends to the next stages, over all devices of the stage.
        unknown: Traffic with unknown bytes, or an empty text.
    """

    peak: Peak
    compute_seconds: float
    task_seconds: float
    update_seconds: float
    collective_seconds: float
    sent_bytes: int
    unknown: str


def predict(question: PipelineQuestion) -> PipelinePrediction | None:
    """Predict a step of a model on a pipeline; None if the model cannot be cut into so many stages."""
    model, ranks = question.model, question.ranks
    # A layer that normalizes by the batch would normalize by a microbatch.
    if models.refusal_of_steps(model) is not None or statistics_traffic.statistics_of(model):
        return None
    optimizer = model_specs.optimizer_of(model, question.optimizer)
    if isinstance(optimizer, keras.optimizers.Optimizer) and len(_private.optimizer_chain(optimizer)) > 1:
        return None
    schedule = Schedule.of(_SCHEDULE, ranks=ranks, stages=ranks, microbatches=question.microbatches)
    with _private.symbolic_calls_undone(model):
        try:
            made = cut(model, ranks)
            models.check_shared(made, ranks)
            stages = [_stage(question, made, number, optimizer, schedule.in_flight[number]) for number in range(ranks)]
        except (LayoutError, StrategyError):
            return None
    return _of_stages(question, schedule, stages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TracedStage:
    """A stage with one microbatch, traced for every mesh on which a device has as many rows.

    Attributes:
        peak: Bytes of a device, without stored bytes and without the inputs of other microbatches.
        step: The step, to be timed on a machine; None without a machine.
        graph: The graph of the forward and the backward pass.
        input_bytes: Bytes of the inputs on a device.
        sent_bytes: Bytes that a device sends to other stages.
    """

    peak: Peak
    step: TracedStep | None
    graph: step_graph.StepGraph
    input_bytes: int
    sent_bytes: int


def _trace(
    question: PipelineQuestion,
    made: CutModel,
    number: int,
    optimizer: model_specs.OptimizerLike,
    config: ShardingConfig,
    devices: int,
    rows: int,
) -> _TracedStage:
    """Trace a stage with a microbatch of some rows for each of some devices."""
    stage = made.stages[number]
    shapes = made.shapes(keras.tree.map_structure(lambda each: _with_rows(each, rows * devices), question.inputs))
    takes = [shapes[source] for source in stage.takes]
    specs = model_specs.specs_of(stage.model)
    placement = ModelPlacement.of(specs, config, mesh_shape={BATCH_AXIS: devices}).check()
    graph = step_graph.trace(stage.model, placement, inputs=takes, recompute=question.recompute)
    peak = peak_of(
        graph,
        placement,
        stored_bytes=0,
        slots=model_specs.slots_of(optimizer, specs),
        timing=UpdateTiming.of(optimizer),
        waits_in_backward=bool(statistics_traffic.statistics_of(stage.model)),
    )
    step = None
    if question.machine is not None:
        step = TracedStep.of(stage.model, placement, inputs=takes, recompute=question.recompute)
    given = [Source(number, each) for each in range(stage.gives)]
    sent = sum(_bytes(shapes[each]) * sum(reader != number for reader in made.readers(each)) for each in given)
    return _TracedStage(
        peak=peak,
        step=step,
        graph=graph,
        input_bytes=sum(map(_bytes, takes)) // devices,
        sent_bytes=sent // devices,
    )


def _with_rows(spec: object, rows: int) -> tf.TensorSpec:
    """Return the spec of an input with another number of rows."""
    shape: tuple[int, ...] = tuple(spec.shape)  # type: ignore[attr-defined]
    dtype = keras.backend.standardize_dtype(spec.dtype)  # type: ignore[attr-defined]
    return tf.TensorSpec((rows, *shape[1:]), dtype)


def _stage(
    question: PipelineQuestion,
    made: CutModel,
    number: int,
    optimizer: model_specs.OptimizerLike,
    in_flight: int,
) -> _PredictedStage:
    """Predict a stage.

    Args:
        question: The question.
        made: The stages.
        number: The number of the stage.
        optimizer: The optimizer.
        in_flight: For how many microbatches the stage keeps its inputs.
    """
    stage, mesh_shape = made.stages[number], {BATCH_AXIS: question.data_size}
    config = dataclasses.replace(
        question.config, layout_map=LayoutMap(), microbatches=Microbatches(count=question.microbatches)
    )
    samples = keras.tree.flatten(question.inputs)[0].shape[0]
    rows = samples // (question.data_size * question.microbatches)
    devices = min(question.data_size, _TRACED_DEVICES)
    key = (question.ranks, number, devices, rows, config.zero_stage, question.recompute, question.machine is None)
    if key not in question.traced:
        question.traced[key] = _trace(question, made, number, optimizer, config, devices, rows)
    traced: _TracedStage = question.traced[key]
    specs = model_specs.specs_of(stage.model)
    slots = model_specs.slots_of(optimizer, specs)
    placement = ModelPlacement.of(specs, config, mesh_shape=mesh_shape).check()
    stored = ShardingPlan.from_placement(placement, slots=slots).resting_bytes()
    kept = traced.peak.activation_bytes + in_flight * traced.input_bytes
    compute = task = update = collectives = 0.0
    if question.machine is not None:
        assert traced.step is not None
        start = question.machine.seconds(Work(steps=1))
        time = traced.step.on(question.machine, mesh_shape, updated_bytes=0)
        compute, task = max(0.0, time.compute_seconds - start), max(0.0, time.seconds - start)
        collectives = time.collective_seconds
        update = question.machine.seconds(Work(updated_bytes=updated_bytes_of(placement, slots), steps=1))
    elif question.links is not None:
        plan = without_peak(placement, stage.model, slots=slots, optimizer=optimizer, inputs=None, graph=traced.graph)
        # The plan has the collectives of a step; all of them run once for each microbatch.
        collectives = (plan.over(question.links).collective_seconds or 0.0) / question.microbatches
    return _PredictedStage(
        peak=dataclasses.replace(traced.peak, stored_bytes=stored, activation_bytes=kept),
        compute_seconds=compute,
        task_seconds=task,
        update_seconds=update,
        collective_seconds=collectives,
        sent_bytes=traced.sent_bytes * question.data_size,
        unknown="" if traced.step is None else traced.step.unknown,
    )


def _of_stages(question: PipelineQuestion, schedule: Schedule, stages: list[_PredictedStage]) -> PipelinePrediction:
    """Return the prediction of a step from the predictions of its stages."""
    count, last = question.microbatches, len(stages) - 1
    links = question.links if question.machine is None else question.machine.links
    sent = 0.0 if links is None else max(_sent_seconds(each, question, links) for each in stages)
    known = question.machine is not None

    def times(seconds: list[float]) -> dict[tuple[bool, int], float]:
        return {
            (forward, number): each * (_FORWARD if forward else _BOTH if number == last else _BACKWARD)
            for number, each in enumerate(seconds)
            for forward in (True, False)
        }

    # Without a machine, all stages are taken to need the same time: the cut balances them.
    tasks = times([each.task_seconds if known else 1.0 for each in stages])
    bubble = schedule.bubble(tasks, sent if known else 0.0)
    peak = max((each.peak for each in stages), key=lambda each: each.peak_bytes + each.overlap_bytes)
    collective = None
    if links is not None:
        collective = max(count * each.collective_seconds for each in stages) + 2 * count * sent
    if question.machine is None:
        return PipelinePrediction(peak=peak, bubble=bubble, collective_seconds=collective)
    length = max(each.end for row in schedule.timed(tasks, sent) for each in row)
    busy = [
        count * each * (_FORWARD + _BACKWARD if number < last else _BOTH)
        for number, each in enumerate(each.compute_seconds for each in stages)
    ]
    update = max(each.update_seconds for each in stages)
    if question.machine.cores is not None:
        # The ranks share the cores, of which one rank alone may use all.
        at_once = max(1.0, question.machine.cores / question.data_size)
        length, update = max(length, sum(busy) / at_once), sum(each.update_seconds for each in stages) / at_once
    return PipelinePrediction(
        peak=peak,
        bubble=bubble,
        seconds=length + update,
        compute_seconds=max(busy) + update,
        collective_seconds=collective,
        unknown="; ".join(dict.fromkeys(each.unknown for each in stages if each.unknown)),
    )


def _sent_seconds(stage: _PredictedStage, question: PipelineQuestion, links: Links) -> float:
    """Return the time in which a stage sends the results of one microbatch to the next stage."""
    if not stage.sent_bytes:
        return 0.0
    # Devices with consecutive numbers are on one host, and a rank has consecutive devices.
    share = min(question.data_size, links.devices_per_host)
    several_hosts = links.has_hosts and question.ranks * question.data_size > links.devices_per_host
    link = (links.between if several_hosts else links.inside)["all-gather"]
    return link.seconds(stage.sent_bytes * (share if several_hosts else 1) / question.data_size)


def _bytes(spec: tf.TensorSpec) -> int:
    elements: int = math.prod(tuple(spec.shape)) * int(spec.dtype.size)
    return elements


pipelined_steps.PREDICTORS.append(predict)
