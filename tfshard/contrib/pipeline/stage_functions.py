"""The compiled functions of a pipeline stage: forward pass, backward pass, the last stage's loss, and the update.

A backward pass recomputes the stage's forward pass from the stage's inputs, as in Huang et al. 2019, "GPipe", section
2.3. Between the two passes, a stage keeps only its inputs of a microbatch. The second forward pass reads other values
(the seeds of dropout, states) as the first forward pass read them, and its writes are dropped.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.contrib.pipeline.cut import CutModel, Source, Stage
from tfshard.contrib.pipeline.ranks import PipelineRank
from tfshard.devices import batching, transfer
from tfshard.graph import inventory
from tfshard.layouts.axes import axis_sizes
from tfshard.storage import steps
from tfshard.storage.microbatch import Microbatch
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.training import readiness
from tfshard.training.microbatches import OptimizerCall, Shares, sharded_of

# A tensor that passes from stage to stage, and its mask.
Passed = tuple[tf.Tensor, tf.Tensor | None]
# Sums of gradients, in the order of a stage's storages.
Sums = list[tf.Tensor]


@dataclasses.dataclass(kw_only=True)
class Kept:
    """The values that a stage keeps of a microbatch for its backward pass.

    Attributes:
        takes: The inputs of the stage.
        states: The earlier values of the variables that the forward pass wrote.
    """

    takes: list[Passed]
    states: list[tf.Tensor]

    @property
    def bytes(self) -> int:
        """Bytes on all devices together; replicated tensors count once."""
        tensors = [*(each for passed in self.takes for each in passed if each is not None), *self.states]
        return sum(each.shape.num_elements() * each.dtype.size for each in tensors)


def _compiled(rank: PipelineRank, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that runs as a step on the mesh of a pipeline rank.

    A single thread traces the function; afterwards other threads may call it.
    """

    def step(*args: Any) -> Any:
        with rank.seen():
            with rank.strategy.extended.step():
                result = function(*args)
                readiness.check_captures(tf.compat.v1.get_default_graph())
            return result() if callable(result) else result

    # TensorFlow counts traces by a function's code, and would count all these functions as one; a partial has no code.
    uncounted = functools.partial(step)
    compiled: Callable[..., Any] = tf.function(uncounted, jit_compile=False, reduce_retracing=False, autograph=False)
    return compiled


class StageFunctions:
    """The functions of one stage.

    Args:
        model: The model that was cut.
        cut: All stages of the model.
        stage: The stage.
        rank: The pipeline rank of the stage.
        count: The number of microbatches of a batch.
    """

    def __init__(self, model: keras.Model, cut: CutModel, stage: Stage, rank: PipelineRank, count: int):
        self._model, self._cut, self.stage, self.rank, self._count = model, cut, stage, rank, count
        self.forward = _compiled(rank, self._forward)
        self.forward_without_training = _compiled(rank, self._forward_without_training)
        self.backward = _compiled(rank, self._backward)
        self.loss_and_backward = _compiled(rank, self._loss_and_backward)
        self.loss = _compiled(rank, self._loss)
        self.predictions = _compiled(rank, lambda takes, others: self._predictions(takes, others, training=False))
        self.added = _compiled(rank, lambda sums, more: [a + b for a, b in zip(sums, more, strict=True)])
        # Variables that the forward pass wrote.
        self._written: list[keras.Variable] = []
        # The storages of the gradient sums, and the update that takes the sums.
        self.storages: list[Storage] = []
        self.update: OptimizerCall | None = None

    # --- the passes

    def _forward(self, takes: list[Passed], number: tf.Tensor) -> Callable[[], Any]:
        """Run the forward pass of a training step.

        Args:
            takes: The inputs of the stage.
            number: The number of the microbatch, as a vector of equal elements.

        Returns:
            The outputs of the stage, its losses, and the earlier values of the variables that it wrote.
        """
        self._note_microbatch(takes, number)
        fixed = {id(variable) for variable in self.stage.model.trainable_variables}
        states = [each for each, _ in inventory.owned_variables(self.stage.model) if id(each) not in fixed]
        before = [tf.convert_to_tensor(each) for each in states]
        gives = self._gives(takes, training=True)
        self._keep_seeds(number, dict(zip(map(id, states), before, strict=True)))
        losses = self._losses()
        step = steps.current()
        assert step is not None
        written = set(step.writes.storages)
        kept = [_storage(each) in written for each in states]
        self._written = [each for each, keep in zip(states, kept, strict=True) if keep]
        values = [self._replicated(each) for each, keep in zip(before, kept, strict=True) if keep]
        return lambda: (gives, losses, values, step.record.token)

    def _note_microbatch(self, takes: Sequence[Passed], number: tf.Tensor) -> None:
        """Make random operations draw the numbers of this microbatch's rows of the full batch."""
        step = steps.current()
        assert step is not None
        step.batch.note([tensor for tensor, _ in takes])
        if step.batch.rows:
            # With several sizes, the largest: draws of other sizes then differ from one device, but no draw repeats.
            step.batch.microbatch = Microbatch(
                number=number[0], count=self._count, rows=max(step.batch.rows), is_of_each_device=False
            )  # fmt: skip

    def _keep_seeds(self, number: tf.Tensor, before: Mapping[int, tf.Tensor]) -> None:
        """Start all microbatches of a batch with equal seeds: only the last microbatch writes new seeds.

        Args:
            number: The number of the microbatch.
            before: The earlier seeds, by the id of the variable.
        """
        step = steps.current()
        assert step is not None
        written, is_last = set(step.writes.storages), tf.equal(number[0], self._count - 1)
        for variable, _ in inventory.owned_variables(self.stage.model):
            if _private.is_seed_state(variable.path) and _storage(variable) in written:
                first, new = before[id(variable)], tf.convert_to_tensor(variable)
                variable.assign(first + (new - first) * tf.cast(is_last, new.dtype))

    def _forward_without_training(self, takes: list[Passed]) -> tuple[list[Passed], tf.Tensor | None]:
        """Return the outputs of the stage, and its losses."""
        return self._gives(takes, training=False), self._losses()

    def _gives(self, takes: list[Passed], *, training: bool) -> list[Passed]:
        """Return the outputs of the stage for its inputs."""
        return [
            (self._placed(tensor, rows), None if mask is None else self._placed(mask, rows))
            for (tensor, mask), rows in zip(self._called(takes, training=training), self.stage.has_rows, strict=True)
        ]

    def _losses(self, collected: Sequence[tf.Tensor] = ()) -> tf.Tensor | None:
        """Return the sum of the additional losses of the stage, after it was called.

        Args:
            collected: Losses that Keras gave to a scope instead of the layers.
        """
        losses = [*collected, *self.stage.model.losses]
        if not losses:
            return None
        # As `_aggregate_additional_loss` does.
        return self._replicated(tf.add_n([tf.cast(tf.reduce_sum(each), tf.float32) for each in losses]))

    def _called(self, takes: Sequence[Passed], *, training: bool) -> list[Passed]:
        masks = [mask for _, mask in takes]
        # As an argument: Keras would warn about a mask on an input of a functional model.
        more = {"mask": masks} if any(mask is not None for mask in masks) else {}
        outputs = keras.tree.flatten(self.stage.model([tensor for tensor, _ in takes], training=training, **more))
        return [(tensor, _private.mask_of(tensor)) for tensor in outputs]

    def _backward(
        self,
        takes: list[Passed],
        number: tf.Tensor,
        states: list[tf.Tensor],
        slopes: list[list[tf.Tensor]],
        of_loss: tf.Tensor | None,
    ) -> Callable[[], Any]:
        """Run the backward pass of a stage, except the last.

        Args:
            takes, number, states: The values of the forward pass.
            slopes: For each output, the gradients from the stages that took the output.
            of_loss: The gradient of the stage's losses.

        Returns:
            The gradients of the inputs, None for an input without one; and the gradient sums of the stage's storages.
        """
        self._note_microbatch(takes, number)
        with tf.GradientTape() as tape:
            takes, watched = self._watched(takes, tape)
            before = list(zip(self._written, states, strict=True))
            with keras.StatelessScope(state_mapping=before, collect_losses=True) as scope:
                given = self._gives(takes, training=True)
            losses = self._losses(scope.losses)
        reached = [(tensor, tf.add_n(of)) for (tensor, _), of in zip(given, slopes, strict=True) if of]
        if losses is not None and of_loss is not None:
            reached.append((losses, of_loss))
        targets, gradients = [tensor for tensor, _ in reached], [gradient for _, gradient in reached]
        return self._differentiated(tape, targets, gradients, watched)

    def _watched(self, takes: Sequence[Passed], tape: tf.GradientTape) -> tuple[list[Passed], list[tf.Tensor | None]]:
        """Watch the floating-point inputs from other stages, and return None for the other inputs."""
        passed: list[Passed] = []
        watched: list[tf.Tensor | None] = []
        for source, (tensor, mask) in zip(self.stage.takes, takes, strict=True):
            if source.stage >= 0 and tensor.dtype.is_floating:
                tape.watch(tensor)
                watched.append(tensor)
            else:
                watched.append(None)
            passed.append((tensor, mask))
        return passed, watched

    def _differentiated(
        self,
        tape: tf.GradientTape,
        targets: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor] | None,
        watched: Sequence[tf.Tensor | None],
    ) -> Callable[[], Any]:
        variables = self.stage.model.trainable_variables
        sources = [*variables, *(each for each in watched if each is not None)]
        found = tape.gradient(list(targets), sources, output_gradients=gradients) if targets else [None] * len(sources)
        update = OptimizerCall(
            optimizer=self._model.optimizer, gradients=found[: len(variables)], variables=variables, share=1.0
        )
        sums: dict[Any, tf.Tensor] = {
            storage: each for (storage, _), each in update.sums(self.rank.strategy.mesh, reduced=True).items()
        }
        step = steps.current()
        assert step is not None
        step.return_sums(sums)
        self.storages, self.update = list(sums), update
        of_takes = iter(found[len(variables) :])
        slopes = [None if each is None else self._slope(next(of_takes), each) for each in watched]

        def result() -> Any:
            return slopes, list(sums.values()), step.record.token

        return result

    def _slope(self, gradient: Any, tensor: tf.Tensor) -> tf.Tensor | None:
        if gradient is None:
            return None
        return self._placed(tf.convert_to_tensor(gradient), rows=bool(tensor.shape.rank))

    # --- the last part

    def _predictions(self, takes: list[Passed], others: list[Passed], *, training: bool) -> Any:
        """Return the outputs of the model, from the inputs of the last stage and the outputs of earlier stages."""
        outputs, passed = self._called(takes, training=training), iter(others)
        flat = []
        for source in self._cut.outputs:
            tensor, mask = outputs[source.number] if source.stage == self.stage.number else next(passed)
            if mask is not None:
                tensor = tf.identity(tensor)
                _private.set_mask(tensor, mask)
            flat.append(tensor)
        return _private.packed_outputs(self._cut.graph, flat)

    def _loss_of(
        self,
        batch: tuple[Any, Any, Any],
        predicted: Any,
        losses: Sequence[tf.Tensor],
        totals: Sequence[tf.Tensor],
        samples: int,
        *,
        training: bool,
    ) -> tf.Tensor:
        """Return the loss of a microbatch, scaled to make the mean over all microbatches the loss of the batch."""
        x, y, sample_weight = batch
        with (
            _private.additional_losses(self._model, [*losses, *self.stage.model.losses]),
            _private.reduced_losses(Shares(self._count, [each[0] for each in totals])),
        ):
            loss = _private.compute_loss(self._model, x, y, predicted, sample_weight, training=training)
        _private.track_loss(self._model, loss, tf.constant(samples))
        return loss

    def _loss_and_backward(
        self,
        takes: list[Passed],
        number: tf.Tensor,
        others: list[Passed],
        losses: list[tf.Tensor],
        batch: tuple[Any, Any, Any],
        totals: list[tf.Tensor],
        samples: int,
    ) -> Callable[[], Any]:
        """Run the last stage of a training step.

        Args:
            takes: The inputs of the stage.
            number: The number of the microbatch, as a vector of equal elements.
            others: Outputs of the model that other stages computed.
            losses: Losses of other stages.
            batch: x, y and sample weights of the microbatch; x is None unless a custom `compute_loss` takes it.
            totals: The divisors of the losses of the full batch, each as a vector of equal elements.
            samples: The number of samples in the microbatch.

        Returns:
            Gradients of `takes`, of `others` and of `losses`; the gradient sums of the stage's storages; the metrics'
            results.
        """
        self._note_microbatch(takes, number)
        owned = [each for each, _ in inventory.owned_variables(self.stage.model)]
        before = {id(each): tf.convert_to_tensor(each) for each in owned if _private.is_seed_state(each.path)}
        with tf.GradientTape() as tape:
            takes, watched = self._watched(takes, tape)
            for tensor in [*(tensor for tensor, _ in others if tensor.dtype.is_floating), *losses]:
                tape.watch(tensor)
            predicted = self._predictions(takes, others, training=True)
            loss = self._loss_of(batch, predicted, losses, totals, samples, training=True)
            scaled = self._model.optimizer.scale_loss(loss) / tf.cast(self._count, loss.dtype)
        self._keep_seeds(number, before)
        more = [tensor if tensor.dtype.is_floating else None for tensor, _ in others]
        result = self._differentiated(tape, [scaled], None, [*watched, *more, *losses])
        logs = self._logs(batch, predicted)

        def with_logs() -> Any:
            slopes, sums, token = result()
            ends = len(watched), len(watched) + len(more)
            return slopes[: ends[0]], slopes[ends[0] : ends[1]], slopes[ends[1] :], sums, logs, token

        return with_logs

    def _loss(
        self,
        takes: list[Passed],
        others: list[Passed],
        losses: list[tf.Tensor],
        batch: tuple[Any, Any, Any],
        totals: list[tf.Tensor],
        samples: int,
    ) -> Any:
        """Run the last stage of an evaluation step, and return the metrics' results."""
        predicted = self._predictions(takes, others, training=False)
        self._loss_of(batch, predicted, losses, totals, samples, training=False)
        return self._logs(batch, predicted)

    def _logs(self, batch: tuple[Any, Any, Any], predicted: Any) -> Any:
        x, y, sample_weight = batch
        logs = self._model.compute_metrics(x, y, predicted, sample_weight=sample_weight)
        return transfer.map_tensors(self._replicated, logs)

    # --- layouts

    def _placed(self, tensor: tf.Tensor, rows: bool) -> tf.Tensor:
        """Lay out a tensor for the next stage: sharded by rows if it has rows, else replicated."""
        mesh = self.rank.strategy.mesh
        shape = tuple(tensor.shape)
        axes = batching.batch_axes(shape, mesh) if rows else (None,) * len(shape)
        return transfer.relayout(tensor, axes, mesh)

    def _replicated(self, value: Any) -> Any:
        return self.rank.strategy.extended.replicate(value)


def _storage(variable: keras.Variable) -> Storage | None:
    current = _private.backend_variable(variable)
    return current.storage if isinstance(current, ShardedVariable) else None


class PipelineRankFunctions:
    """The functions of a pipeline rank, which use the gradient sums of its stages at the end of a step.

    Args:
        rank: The pipeline rank.
        stages: The functions of its stages.
        optimizer: The model's optimizer.
        mirrored: Variables that have mirrors on some pipeline rank, by id.

    Attributes:
        mirrored: Trainable variables that other pipeline ranks update.
        copied: Variables that this pipeline rank updates and that have mirrors.
    """

    def __init__(
        self,
        rank: PipelineRank,
        stages: Sequence[StageFunctions],
        optimizer: keras.optimizers.Optimizer,
        mirrored: Collection[int],
    ):
        self.rank = rank
        self._stages = list(stages)
        self._optimizer = optimizer
        self.mirrored = [variable for variable, _ in rank.mirrors.values() if variable.trainable]
        self.copied = [variable for variable in rank.variables if id(variable) in mirrored]
        self.values = _compiled(rank, lambda: [self._shared_out(sharded_of(each).value()) for each in self.copied])
        self.receive_shared = _compiled(rank, self._receive_shared)
        self.gradients_of_mirrors = _compiled(rank, self._gradients_of_mirrors)
        self.square = _compiled(rank, self._square)
        # The storages that an update writes; empty until the update is traced.
        self.written: frozenset[Any] = frozenset()
        self.update = _compiled(rank, self._update)

    def _merged(self, sums: list[Sums]) -> dict[Storage, tf.Tensor]:
        merged: dict[Storage, tf.Tensor] = {}
        for stage, stage_sums in zip(self._stages, sums, strict=True):
            for storage, each in zip(stage.storages, stage_sums, strict=True):
                merged[storage] = merged[storage] + each if storage in merged else each
        return merged

    def _gradients_of_mirrors(self, sums: list[Sums]) -> list[tf.Tensor | None]:
        """Return the gradient of each variable in `mirrored`, or None."""
        merged, found = self._merged(sums), []
        for variable in self.mirrored:
            here = sharded_of(variable)
            each = merged.get(here.storage)
            if each is not None and here.storage.format.packed:
                each = here.storage.format.read(here.storage.format.gather(each), here.member)
            found.append(None if each is None else self._shared_out(each))
        return found

    def _shared_out(self, tensor: tf.Tensor) -> tf.Tensor:
        """Shard a tensor for the way to another pipeline rank: along a dim that the data axis divides."""
        mesh, shape = self.rank.strategy.mesh, tuple(tensor.shape)
        sizes = axis_sizes(mesh)
        dim = next((dim for dim, size in enumerate(shape) if size % sizes.data_size == 0), None)
        axes = tuple(sizes.data if at == dim else None for at in range(len(shape)))
        return transfer.relayout(transfer.replicate(tensor, mesh), axes, mesh)

    def _receive_shared(self, values: Sequence[tf.Tensor]) -> None:
        """Assign the home values to the mirrors."""
        for variable, value in zip(self.mirrored, values, strict=True):
            sharded_of(variable).assign(transfer.replicate(value, self.rank.strategy.mesh))

    def _with_mirrors(
        self, sums: list[Sums], of_mirrors: Mapping[int, Sequence[tf.Tensor]]
    ) -> tuple[dict[Storage, tf.Tensor], set[int]]:
        """Return the gradient sums with the gradients of mirrors added, and the ids of the variables that have mirrors.

        Args:
            sums: The sums of the stages.
            of_mirrors: The gradients of a variable's mirrors, by its number in `rank.variables`.
        """
        merged, more = self._merged(sums), set()
        for number, gradients in of_mirrors.items():
            variable = sharded_of(self.rank.variables[number])
            more.add(id(variable))
            replicated = [transfer.replicate(each, self.rank.strategy.mesh) for each in gradients]
            storage, gradient = variable.storage, tf.add_n(replicated)
            if storage.format.packed:
                members = [gradient if at == variable.member else None for at in range(len(storage.format.members))]
                gradient = storage.format.pack_gradients(members, gradient.dtype)
            else:
                gradient = variable.to_update(gradient)
            merged[storage] = merged[storage] + gradient if storage in merged else gradient
        return merged, more

    def _square(self, sums: list[Sums], of_mirrors: Mapping[int, Sequence[tf.Tensor]]) -> tf.Tensor:
        """Return the sum of squares of all gradients of the pipeline rank; gradients of mirrors count at home."""
        merged, _ = self._with_mirrors(sums, of_mirrors)
        squares = [_square(each) for each in merged.values()]
        squares += [-_square(each) for each in self._gradients_of_mirrors(sums) if each is not None]
        return self.rank.strategy.extended.replicate(tf.add_n(squares) if squares else tf.zeros(()))

    def _update(
        self, sums: list[Sums], of_mirrors: Mapping[int, Sequence[tf.Tensor]], norm: tf.Tensor | None
    ) -> Callable[[], Any]:
        """OptimizerCall the variables of the pipeline rank.

        Args:
            sums: The sums of the stages.
            of_mirrors: As for `_with_mirrors`.
            norm: The norm of all gradients of the model, if the optimizer clips by it, as a vector of equal elements.
        """
        merged, more = self._with_mirrors(sums, of_mirrors)
        present = {
            id(_private.backend_variable(variable))
            for stage in self._stages
            if stage.update is not None
            for variable, gradient in zip(stage.update.variables, stage.update.gradients, strict=True)
            if gradient is not None
        } | more
        variables = self.rank.variables
        # `apply` only tests which variables have a gradient, and takes the values from the sums.
        has_one: list[Any] = [id(_private.backend_variable(each)) in present or None for each in variables]
        update = OptimizerCall(optimizer=self._optimizer, gradients=has_one, variables=variables, share=1.0)
        with (
            _private.only_for(self._optimizer, variables),
            _private.known_global_norm(None if norm is None else norm[0]),
        ):
            update.apply({(storage, None): each for storage, each in merged.items()})
        step = steps.current()
        assert step is not None
        self.written = frozenset(step.writes.storages)
        return lambda: None


def _square(gradient: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))


def sources_of_outputs(cut: CutModel) -> list[Source]:
    """Return the model outputs that stages before the last compute."""
    return [source for source in cut.outputs if source.stage != cut.stages[-1].number]
