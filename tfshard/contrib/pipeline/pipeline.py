"""Pipeline: the stages of a model on their pipeline ranks, and the steps."""

import collections
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.contrib.pipeline import divisors, ranks
from tfshard.contrib.pipeline.cut import CutModel, Source
from tfshard.contrib.pipeline.ranks import PipelineRank
from tfshard.contrib.pipeline.runner import Measured, Runner
from tfshard.contrib.pipeline.schedules import Schedule, Task, Timed
from tfshard.contrib.pipeline.stage_functions import (
    Kept,
    Passed,
    PipelineRankFunctions,
    StageFunctions,
    Sums,
    sources_of_outputs,
)
from tfshard.devices import batching, clients, instances, messages, transfer
from tfshard.devices.between_meshes import handed_over
from tfshard.errors import StrategyError
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import axis_sizes
from tfshard.training.strategy import ShardedStrategy

# With several clients, the number of steps per batch shape that compile in the same order on all clients. In the second
# step, DTensor compiles a function again if it treated a small tensor as a constant.
_STEPS_IN_TURN = 2
# More elements than DTensor treats as a constant: it does so for 16 elements, but not for 32 (TensorFlow 2.21).
_NO_CONSTANT = 64


class Pipeline:
    """The stages of a model on the pipeline ranks of a strategy.

    Attributes:
        model: The model.
        cut: The stages of the model.
        strategy: The strategy of the last pipeline rank, which knows all pipeline ranks.
        ranks: The pipeline ranks.
        measured: The measurements of the last training step; None before the first step, and for a traced step.
    """

    def __init__(self, model: keras.Model, cut: CutModel, strategy: ShardedStrategy, schedule: str, microbatches: int):
        self.model = model
        self.cut = cut
        self.strategy = strategy
        self.schedule = schedule
        self.microbatches = microbatches
        self.ranks = ranks.ranks_of(cut, strategy)
        self.measured: Measured | None = None
        self._runner = Runner(len(self.ranks))
        self._functions: dict[int, _Functions] = {}
        self._seen: collections.Counter[object] = collections.Counter()

    def place(self) -> None:
        """Move the variables of the model to the pipeline ranks of their stages."""
        ranks.place(self.ranks)

    def place_optimizer(self) -> None:
        """Build the model's optimizer, and move its variables to the pipeline ranks."""
        optimizer = self.model.optimizer
        if optimizer is None:
            return
        if not optimizer.built:
            with self.strategy.scope():
                optimizer.build(self.model.trainable_variables)
        ranks.place_optimizer(self.ranks, optimizer)

    def forget(self) -> None:
        """Drop the compiled functions, because the model has changed."""
        self._functions.clear()
        self._seen.clear()

    def bring_up_to_date(self) -> None:
        """Copy values that were set on the host to each pipeline rank."""
        ranks.bring_up_to_date(self.ranks)

    def count_of(self, rows: int) -> int:
        """Return the number of microbatches: the requested number, or more if that does not divide the batch."""
        devices = axis_sizes(self.strategy.mesh).data_size
        return variable_layout.divisor_from(rows // devices if rows % devices == 0 else rows, self.microbatches)

    # --- steps

    def train(self, data: Any) -> Any:
        """Run one training step on a host batch.

        Returns:
            The metrics' results.
        """
        step = _PipelineStep(self, data, training=True)
        schedule = Schedule.of(
            self.schedule, ranks=len(self.ranks), stages=len(self.cut.stages), microbatches=step.count
        )
        timed = self._run(step, schedule, schedule.tasks)
        step.update()
        messages.wait_until_sent()
        if timed is None:
            instances.count_alike()
        else:
            self.measured = Measured(
                schedule=schedule,
                tasks=tuple(tuple(each) for each in timed),
                in_flight=tuple(step.most_kept),
                kept_bytes=tuple(step.most_bytes),
                sent_bytes=step.sent_bytes,
            )
        return step.logs

    def test(self, data: Any) -> Any:
        """Run one evaluation step on a host batch, and return the metrics' results."""
        step = _PipelineStep(self, data, training=False)
        self._run_forward(step)
        return step.logs

    def predict(self, data: Any) -> Any:
        """Run one prediction step on a host batch.

        Returns:
            The outputs of the model, on the host.
        """
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        step = _PipelineStep(self, (x,), training=False, predicts=True)
        self._run_forward(step)
        stages = [keras.tree.flatten(step.predictions[number]) for number in range(step.count)]
        joined = [tf.constant(np.concatenate(each)) for each in zip(*stages, strict=True)]
        return keras.tree.pack_sequence_as(step.predictions[0], joined)

    def _run_forward(self, step: "_PipelineStep") -> None:
        """Run only the forward passes: every pipeline rank takes one microbatch after the other."""
        count, stages = step.count, len(self.cut.stages)
        schedule = Schedule.of("gpipe", ranks=stages, stages=stages, microbatches=count)
        size = len(self.ranks)
        # By microbatch, to keep a pipeline rank with several stages from waiting for itself.
        tasks = [
            [
                Task(stage < stages - 1, stage, number)
                for first in range(0, count, size)
                for stage in range(rank, stages, size)
                for number in range(first, min(first + size, count))
            ]
            for rank in range(size)
        ]
        timed = self._run(step, schedule, tasks)
        messages.wait_until_sent()
        if timed is None:
            instances.count_alike()

    def _run(
        self, step: "_PipelineStep", schedule: Schedule, tasks: Sequence[Sequence[Task]]
    ) -> list[list[Timed]] | None:
        if self._seen[step.key] == (1 if clients.here().count == 1 else _STEPS_IN_TURN):
            return self._runner.run(schedule, tasks, step.do)
        # A single thread traces and compiles the functions, each with the mesh of its pipeline rank, in the same order
        # on all clients.
        waiting = [collections.deque(rank_tasks) for rank_tasks in tasks]
        done: set[Task] = set()
        while any(waiting):
            for rank, rank_tasks in zip(self.ranks, waiting, strict=True):
                while rank_tasks and all(each in done for each in schedule.needs(rank_tasks[0])):
                    with _private.default_mesh(rank.strategy.mesh):
                        step.do(rank_tasks[0])
                    _private.give_unique_names()
                    done.add(rank_tasks.popleft())
        self._seen[step.key] += 1
        return None

    def functions(self, count: int) -> "_Functions":
        """Return the compiled functions for batches of `count` microbatches."""
        if count not in self._functions:
            self._functions[count] = _Functions(self, count)
        return self._functions[count]


class _Functions:
    """The compiled functions of the stages and pipeline ranks."""

    def __init__(self, pipeline: Pipeline, count: int):
        model, cut = pipeline.model, pipeline.cut
        at = {stage.number: rank for rank in pipeline.ranks for stage in rank.stages}
        self.stages = [StageFunctions(model, cut, stage, at[stage.number], count) for stage in cut.stages]
        mirrored = {key for rank in pipeline.ranks for key in rank.mirrors}
        self.ranks = [
            PipelineRankFunctions(rank, [self.stages[stage.number] for stage in rank.stages], model.optimizer, mirrored)
            for rank in pipeline.ranks
        ]
        self.divisors = {training: divisors.of_batch(model, training=training) for training in (True, False)}


class _PipelineStep:
    """A step, with the values that pass from task to task.

    Args:
        pipeline: The pipeline.
        data: The batch, on the host.
        training: True for a training step.
        predicts: True for a prediction step.
    """

    def __init__(self, pipeline: Pipeline, data: Any, *, training: bool, predicts: bool = False):
        self._pipeline = pipeline
        self._cut = pipeline.cut
        self._training = training
        self._predicts = predicts
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.device("CPU:0"):
            self._inputs = _private.standardized_inputs(self._cut.graph, x)
        leaves = [each for each in keras.tree.flatten((self._inputs, y, sample_weight)) if each is not None]
        self._rows = _rows_of(leaves)
        self.count = pipeline.count_of(self._rows)
        self._functions = pipeline.functions(self.count)
        takes_x = type(pipeline.model).compute_loss is not keras.Model.compute_loss
        takes_x = takes_x or type(pipeline.model).compute_metrics is not keras.Model.compute_metrics
        self._batch = (x if takes_x else None, y, sample_weight)
        shapes = [(tuple(each.shape), str(each.dtype)) for each in leaves]
        self.key = (training, predicts, self.count, str(shapes), str(keras.tree.map_structure(type, (x, y))))
        self._totals: list[tf.Tensor] = []
        if not predicts:
            found = self._functions.divisors[training](x, y, sample_weight)
            self._totals = [_number(each.numpy(), pipeline.strategy.mesh) for each in found]
        self._lock = threading.Lock()
        # Values that pass between tasks, by the task that takes them.
        self._passed: dict[tuple[Source, int, int], Passed] = {}
        self._losses: dict[tuple[int, int], tf.Tensor] = {}
        self._slopes: dict[tuple[Source, int], list[tf.Tensor]] = collections.defaultdict(list)
        self._of_losses: dict[tuple[int, int], tf.Tensor] = {}
        self._kept: dict[tuple[int, int], Kept] = {}
        self._sums: dict[int, Sums] = {}
        self.logs: Any = None
        self.predictions: dict[int, Any] = {}
        self.most_kept = [0] * len(self._cut.stages)
        self.most_bytes = [0] * len(self._cut.stages)
        self.sent_bytes = 0

    def do(self, task: Task) -> None:
        """Run one task."""
        if task.stage == len(self._cut.stages) - 1:
            self._last(task.microbatch)
        elif task.is_forward:
            self._forward(task.stage, task.microbatch)
        else:
            self._backward(task.stage, task.microbatch)

    # --- tasks

    def _forward(self, stage: int, number: int) -> None:
        functions = self._functions.stages[stage]
        takes = [self._take(source, number, stage) for source in functions.stage.takes]
        if self._training:
            gives, losses, states, _ = functions.forward(takes, _numbered(number, functions))
            self._keep(stage, number, Kept(takes=takes, states=states))
        else:
            gives, losses = functions.forward_without_training(takes)
        for place, passed in enumerate(gives):
            for reader in self._cut.readers(Source(stage, place)):
                self._give(Source(stage, place), number, reader, passed)
        if losses is not None:
            self._losses[stage, number] = self._sent(losses, self._pipeline.ranks[-1])

    def _backward(self, stage: int, number: int) -> None:
        functions = self._functions.stages[stage]
        kept = self._kept.pop((stage, number))
        places = range(functions.stage.gives)
        slopes = [self._slopes.pop((Source(stage, place), number), []) for place in places]
        found, sums, _ = functions.backward(
            kept.takes, _numbered(number, functions), kept.states, slopes, self._of_losses.pop((stage, number), None)
        )
        self._add(stage, sums)
        self._hand_back(functions, functions.stage.takes, found, number)

    def _last(self, number: int) -> None:
        functions = self._functions.stages[-1]
        last = functions.stage.number
        takes = [self._take(source, number, last) for source in functions.stage.takes]
        more = sources_of_outputs(self._cut)
        others = [self._take(source, number, last) for source in more]
        if self._predicts:
            found = functions.predictions(takes, others)
            self.predictions[number] = keras.tree.map_structure(transfer.to_host, found)
            return
        stages = [stage for stage, at in sorted(self._losses) if at == number]
        losses = [self._losses.pop((stage, number)) for stage in stages]
        batch = self._rows_of_microbatch(number)
        samples = self._rows // self.count
        if not self._training:
            self.logs = functions.loss(takes, others, losses, batch, self._totals, samples)
            return
        of_takes, of_others, of_losses, sums, self.logs, _ = functions.loss_and_backward(
            takes, _numbered(number, functions), others, losses, batch, self._totals, samples
        )
        self._add(last, sums)
        self._hand_back(functions, functions.stage.takes, of_takes, number)
        self._hand_back(functions, more, of_others, number)
        for stage, slope in zip(stages, of_losses, strict=True):
            if slope is not None:
                self._of_losses[stage, number] = self._sent(slope, self._functions.stages[stage].rank)

    def update(self) -> None:
        """Update the variables of all pipeline ranks, after the last task."""
        pipeline, functions = self._pipeline, self._functions.ranks
        sums = [[self._sums[stage.number] for stage in rank.stages] for rank in pipeline.ranks]
        of_mirrors: list[dict[int, list[tf.Tensor]]] = [{} for _ in pipeline.ranks]
        for rank, rank_sums in zip(functions, sums, strict=True):
            if not rank.mirrored:
                continue
            for variable, gradient in zip(
                rank.mirrored, self._on(rank.rank, rank.gradients_of_mirrors, rank_sums), strict=True
            ):
                if gradient is not None:
                    home, number = self._home(variable)
                    of_mirrors[home.number].setdefault(number, []).append(self._sent(gradient, home))
        norm = self._norm(sums, of_mirrors)
        for rank, rank_sums, more in zip(functions, sums, of_mirrors, strict=True):
            here = None if norm is None else _number(norm, rank.rank.strategy.mesh)
            self._on(rank.rank, rank.update, rank_sums, more, here)
        ranks.find_homes(pipeline.ranks, [each.written for each in functions])
        values = {
            id(variable): value
            for rank in functions
            if rank.copied
            for variable, value in zip(rank.copied, self._on(rank.rank, rank.values), strict=True)
        }
        for rank in functions:
            if rank.mirrored:
                here = [self._sent(values[id(variable)], rank.rank) for variable in rank.mirrored]
                self._on(rank.rank, rank.receive_shared, here)

    def _norm(self, sums: list[list[Sums]], of_mirrors: list[dict[int, list[tf.Tensor]]]) -> np.ndarray | None:
        optimizer = self._pipeline.model.optimizer
        if not optimizer.global_clipnorm:
            return None
        squares = [
            float(transfer.to_host(self._on(rank.rank, rank.square, rank_sums, more)))
            for rank, rank_sums, more in zip(self._functions.ranks, sums, of_mirrors, strict=True)
        ]
        return np.array(math.sqrt(sum(squares)) / (optimizer.loss_scale_factor or 1.0), np.float32)

    def _home(self, variable: keras.Variable) -> tuple[PipelineRank, int]:
        for rank in self._pipeline.ranks:
            for number, each in enumerate(rank.variables):
                if each is variable:
                    return rank, number
        raise AssertionError(f"{variable.path} is on no rank.")

    @staticmethod
    def _on(rank: PipelineRank, function: Callable[..., Any], *args: Any) -> Any:
        with _private.default_mesh(rank.strategy.mesh):
            return function(*args)

    # --- tensors that pass between tasks

    def _take(self, source: Source, number: int, stage: int) -> Passed:
        if source.stage >= 0:
            return self._passed.pop((source, number, stage))
        mesh = self._functions.stages[stage].rank.strategy.mesh
        return batching.to_mesh(self._slice(self._inputs[source.number], number), mesh), None

    def _give(self, source: Source, number: int, reader: int, passed: Passed) -> None:
        rank = self._functions.stages[reader].rank
        tensor, mask = passed
        self._passed[source, number, reader] = (
            self._sent(tensor, rank),
            None if mask is None else self._sent(mask, rank),
        )

    def _hand_back(self, functions: StageFunctions, takes: Iterable[Source], slopes: list[Any], number: int) -> None:
        for source, slope in zip(takes, slopes, strict=True):
            if slope is not None and source.stage >= 0:
                here = self._sent(slope, self._functions.stages[source.stage].rank)
                with self._lock:
                    self._slopes[source, number].append(here)

    def _sent(self, tensor: tf.Tensor, rank: PipelineRank) -> tf.Tensor:
        here = handed_over(tensor, rank.strategy.mesh)
        if here is not tensor:
            with self._lock:
                self.sent_bytes += tensor.shape.num_elements() * tensor.dtype.size
        return here

    def _keep(self, stage: int, number: int, kept: Kept) -> None:
        self._kept[stage, number] = kept
        # All tasks of a stage run in one thread; other threads add and take under other keys.
        stage_kept = [each for (of, _), each in list(self._kept.items()) if of == stage]
        self.most_kept[stage] = max(self.most_kept[stage], len(stage_kept))
        self.most_bytes[stage] = max(self.most_bytes[stage], sum(each.bytes for each in stage_kept))

    def _add(self, stage: int, sums: Sums) -> None:
        before = self._sums.get(stage)
        self._sums[stage] = sums if before is None or not sums else self._functions.stages[stage].added(before, sums)

    def _rows_of_microbatch(self, number: int) -> tuple[Any, Any, Any]:
        mesh = self._pipeline.strategy.mesh
        found: tuple[Any, Any, Any] = keras.tree.map_structure(
            lambda each: None if each is None else batching.to_mesh(self._slice(each, number), mesh), self._batch
        )
        return found

    def _slice(self, value: Any, number: int) -> Any:
        if value is None or not getattr(value, "shape", ()):
            return value
        rows = self._rows // self.count
        return np.asarray(value)[number * rows : (number + 1) * rows]


def _numbered(number: int, functions: StageFunctions) -> tf.Tensor:
    """Return the number of a microbatch, on the mesh of a stage."""
    return _number(np.asarray(number, np.int32), functions.rank.strategy.mesh)


def _number(value: np.ndarray, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a number on a mesh, as a vector of shape `(_NO_CONSTANT,)`."""
    return transfer.host_to_mesh(np.full(_NO_CONSTANT, value, value.dtype), (None,), mesh)


def _rows_of(leaves: Sequence[Any]) -> int:
    sizes = {each.shape[0] for each in leaves if len(each.shape)}
    if len(sizes) != 1:
        raise StrategyError(
            "A pipeline splits a batch into microbatches, so all tensors of the batch need the same number of rows. "
            f"Received: tensors of shapes {[tuple(each.shape) for each in leaves]}"
        )
    return int(sizes.pop())
