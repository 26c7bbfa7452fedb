"""CheckpointCallback: a training run that goes on where it was killed, to the batch.

# Note: how fit goes on in the middle of an epoch

Keras's `fit` counts the steps of an epoch in its EpochIterator, which asks the dataset for an iterator and hands that
to each step. Three things are put in place before the first step of a resumed run: the variables; the iterator, which
the sharded dataset gives out next (`ShardedDataset.continue_with`), brought to where it was; and the EpochIterator's
count, from which the first steps are left out. Metrics are set when the epoch has begun, because that resets them.

A save that is due at the end of a step is made before the next one or at the end of the epoch, so that a position is
never "after the last step, before the end".

What shuffles keeps its own state (the seeds and the buffer of `Dataset.shuffle`, the permutation of arrays), and the
iterator's state holds it. Each iterator draws new seeds from its dataset. So nothing here makes one that an
uninterrupted run would not make: the callback does not change what is trained. The first one is made when training
begins, so that data whose position cannot be saved are refused, and the first epoch gets it. But what has read its
input to the end, perhaps ahead of the training, has forgotten the seeds. An iterator that is never used knows them, so
one is kept (its draw is taken back), and its state is saved too.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.checkpoints import training_state
from tfshard.checkpoints.manager import CheckpointManager
from tfshard.checkpoints.manifest import Position
from tfshard.checkpoints.reader import Checkpoint
from tfshard.devices import clients
from tfshard.errors import CheckpointError, warn
from tfshard.training import datasets
from tfshard.training.strategy import ShardedStrategy

_Logs = Mapping[str, object] | None


class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types.
    """Saves a training run while `fit` trains, and goes on from the last checkpoint when the script is run again.

    When training begins and the directory has a checkpoint, the model and its optimizer are restored and `fit` goes
    on with the batch after the one that was trained last, with the bits of a run that was never interrupted. Where it
    has none, training begins as always. The mesh and the stage may be others than before.

    Args:
        directory: Where checkpoints are kept; one training run to a directory.
        every_steps: Save after so many steps.
        every_epochs: Save after so many epochs. The end of the last epoch is saved in any case.
        async_save: Whether a thread writes while training goes on. The values are those at the end of the step.
        keep: How many steps are kept.
        optimizers: Optimizers beside the one that the model is compiled with and attributes of the model, as in
            `CheckpointManager.save`.

    Raises:
        CheckpointError: Neither `every_steps` nor `every_epochs`, or not positive integers. In `fit`: a checkpoint
            does not fit, is damaged or could not be written, or the data's position cannot be saved. Arrays and
            `tf.data` datasets can; a `keras.utils.PyDataset` with `every_epochs` and `fit(shuffle=False)`.

    The state of other callbacks is not saved, such as the patience of `EarlyStopping`.

    Example:

    >>> import keras, numpy as np, tempfile, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> directory = tempfile.mkdtemp()
    >>> def script(epochs):
    ...     model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    ...     model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    ...     saving = tfshard.CheckpointCallback(directory, every_steps=1)
    ...     x, y = np.ones((16, 8)), np.ones((16, 4))
    ...     return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[saving])
    >>> script(epochs=1).epoch, script(epochs=3).epoch
    ([0], [1, 2])
    >>> tfshard.CheckpointManager(directory).steps()
    [4, 5, 6]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every_steps: int | None = None,
        every_epochs: int | None = None,
        async_save: bool = True,
        keep: int | None = 3,
        optimizers: training_state.Optimizers = None,
    ):
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise CheckpointError(f"{name} must be a positive integer or None. Received: {name}={value!r}")
        if every_steps is None and every_epochs is None:
            raise CheckpointError(
                "A CheckpointCallback needs every_steps or every_epochs, or both. Received: every_steps=None, "
                "every_epochs=None"
            )
        self.manager = CheckpointManager(directory, keep=keep)
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self.async_save = async_save
        self.optimizers = optimizers
        self._begun: _Run | None = None

    @property
    def _run(self) -> "_Run":
        assert self._begun is not None
        return self._begun

    def on_train_begin(self, logs: _Logs = None) -> None:
        self.manager.wait()
        epochs = datasets.epochs_of(self.model)
        if epochs is None or not isinstance(_private.distribute_strategy(self.model), ShardedStrategy):
            raise CheckpointError(
                "CheckpointCallback needs a model that was compiled with strategy=tfshard.ShardedStrategy(...). "
                f"Received: model={self.model!r}"
            )
        run = self._begun = _Run(self.model, epochs)
        run.check(in_epoch=self.every_steps is not None)
        if self.manager.latest_step() is None:
            return
        start = run.start_at(self.manager.open())
        # Everything that can be refused is refused before a variable is changed.
        self.manager.restore_from(start.checkpoint, self.model, lambda: run.go_to(start), self.optimizers)
        self._tell(start)
        _private.set_initial_epoch(self.model, start.position.epoch)

    def _tell(self, start: "_Start") -> None:
        """Print where the run goes on, unless fit prints nothing."""
        if not self.params.get("verbose") or clients.here().rank:
            return
        position = start.position
        batch = f"batch {position.step + 1} of " if position.step else ""
        place = f"{batch}epoch {position.epoch + 1}"
        print(
            f"Resuming from the checkpoint of step {start.checkpoint.step} in '{self.manager.directory}', at {place}."
        )

    def on_epoch_begin(self, epoch: int, logs: _Logs = None) -> None:
        run = self._run
        run.epoch = epoch
        run.trained = True
        if run.resumed is not None:
            start, run.resumed = run.resumed, None
            checkpoint, position = start.checkpoint, start.position
            if epoch != position.epoch:
                raise CheckpointError(
                    f"The checkpoint of step {checkpoint.step} goes on at epoch {position.epoch}, and fit "
                    f"begins at another. Leave initial_epoch out, or give another directory. "
                    f"Received: initial_epoch={epoch}"
                )
            if position.step:
                checkpoint.assign(v for v in training_state.collect(self.model) if v.kind == "metric")

    def on_train_batch_begin(self, batch: int, logs: _Logs = None) -> None:
        if self._run.due:
            self._save(self._run.epoch, batch)
        self._run.begun = batch

    def on_train_batch_end(self, batch: int, logs: _Logs = None) -> None:
        run = self._run
        run.step += batch - run.begun + 1
        run.due = self.every_steps is not None and run.step - run.saved >= self.every_steps

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        last = epoch + 1 == self.params.get("epochs")
        due = self.every_epochs is not None and (epoch + 1) % self.every_epochs == 0
        if self._run.due or due or last:
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: _Logs = None) -> None:
        run, self._begun = self._run, None
        _private.set_initial_epoch(self.model, None)
        self.manager.wait()
        if not run.trained and run.resumed is not None:
            warn(
                f"Nothing was trained: the last checkpoint in '{self.manager.directory}' is at the end of epoch "
                f"{run.resumed.position.epoch}. To train more, give fit more epochs; to train anew, give another "
                "directory."
            )

    def _save(self, epoch: int, step: int) -> None:
        run = self._run
        found = run.position(epoch, step)
        if found is not None:
            position, states = found
            self.manager.save_at(
                self.model, run.step, position=position, states=states, optimizers=self.optimizers,
                wait=not self.async_save,
            )  # fmt: skip
            run.saved, run.due = run.step, False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Start:
    """Where a run goes on.

    Attributes:
        checkpoint: What it goes on from.
        position: Where in the data that is.
        step: In the epoch, from 0.
    """

    checkpoint: Checkpoint
    position: Position
    step: int


class _Run:
    """A run of `fit`: where it is in its data.

    Attributes:
        epoch: The epoch that runs.
        step: Training steps so far, those before the run was interrupted included.
        saved: At which of them the run was saved last.
        due: Whether it is to be saved at the next opportunity.
        begun: The first step of the execution that runs.
        trained: Whether an epoch was begun.
        resumed: Where it goes on, until the first epoch has begun.
    """

    def __init__(self, model: keras.Model, epochs: object):
        self.epoch = 0
        self.step = 0
        self.saved = 0
        self.due = False
        self.begun = 0
        self.trained = False
        self.resumed: _Start | None = None
        self._model = model
        self._epochs = _private.EpochIterator(epochs)
        # An iterator that is never used: at their end the others have forgotten the seeds of their dataset.
        self._spare: Iterator[Any] | None = None

    @property
    def _dataset(self) -> datasets.ShardedDataset:
        dataset: datasets.ShardedDataset = self._epochs.dataset
        return dataset

    def check(self, *, in_epoch: bool) -> None:
        """Raises `CheckpointError` for data whose position cannot be saved.

        Args:
            in_epoch: Whether it is to be saved in the middle of an epoch.
        """
        kind = self._epochs.kind
        if kind == "PyDataset":
            if in_epoch or self._epochs.shuffles:
                raise CheckpointError(
                    "The position in a PyDataset can be saved at the end of epochs only, and its order only when fit "
                    "does not shuffle it. Use every_epochs alone with fit(shuffle=False), or arrays or a tf.data "
                    f"dataset. Received: shuffle={bool(self._epochs.shuffles)}, every_steps "
                    f"{'given' if in_epoch else 'not given'}"
                )
        elif kind not in ("arrays", "tf.data"):
            raise CheckpointError(
                "The position in these data cannot be saved, so a run could not go on exactly. Use arrays or a tf.data "
                f"dataset. Received: data of {kind}"
            )
        elif kind == "arrays" and self._epochs.shuffles == "batch":
            raise CheckpointError(
                "The position in arrays that are shuffled in batches cannot be saved. Use shuffle=True or False. "
                "Received: shuffle='batch'"
            )
        elif kind == "tf.data" and self._dataset.host.options().experimental_symbolic_checkpoint:
            # Measured: it does not go on with the same batches.
            raise CheckpointError(
                "The position in a dataset with experimental_symbolic_checkpoint cannot be saved exactly. Leave the "
                "option out. Received: options().experimental_symbolic_checkpoint=True"
            )
        else:
            host = iter(self._dataset.host)
            before = self._state(host)
            self._spare = iter(self._dataset.host)
            _private.restore_iterator(host, before)  # Takes back the seeds that the other one drew.
            self._dataset.continue_with(host)

    def start_at(self, checkpoint: Checkpoint) -> _Start:
        """Where this run goes on from a checkpoint.

        Raises:
            CheckpointError: It cannot.
        """
        position = checkpoint.position
        if position is None or position.step is None:
            raise CheckpointError(
                f"The checkpoint of step {checkpoint.step} was not saved by a CheckpointCallback and does not say "
                "where in the data fit was. Give the callback a directory of its own, and use "
                f"CheckpointManager.restore. Received: {checkpoint.directory}"
            )
        if position.step % self._epochs.steps_per_execution:
            raise CheckpointError(
                f"The checkpoint of step {checkpoint.step} is at step {position.step} of an epoch, where no execution "
                "of steps_per_execution steps begins. Received: "
                f"steps_per_execution={self._epochs.steps_per_execution}"
            )
        return _Start(checkpoint=checkpoint, position=position, step=position.step)

    def _state(self, iterator: object) -> tf.Tensor:
        # Keras's own permutation of arrays is a random operation; what it drew is part of the state.
        return datasets.iterator_state(iterator, ignore_random=self._epochs.kind == "arrays")

    def position(self, epoch: int, step: int) -> tuple[Position, list[tf.Tensor]] | None:
        """The position that is `step` of `epoch`, with states of the iterator; None when the epoch ends before it.

        Keras does not know the length of every dataset, and announces a step for which there is no batch.
        """
        iterator = self._dataset.current
        assert iterator is not None
        at_end, states = iterator.exhausted, []
        if self._epochs.kind != "PyDataset":
            states = [self._state(iterator), self._state(self._spare)]
        # After its state was taken: this reads a batch.
        if step and iterator.is_at_end():
            return None
        fresh = not step and (at_end or not self._epochs.spans_epochs)
        # The count of the step that is about to run is in already.
        consumed = 0 if fresh else self._epochs.steps_seen - (self._epochs.steps_per_execution if step else 0)
        position = Position(
            epoch=epoch,
            step=step,
            consumed=consumed,
            num_batches=self._epochs.num_batches,
            fresh=fresh,
            clients=datasets.iterator_savers(_private.distribute_strategy(self._model)) if states else 0,
        )
        return position, states

    def go_to(self, start: _Start) -> None:
        """Makes the next epoch begin where the checkpoint was taken."""
        checkpoint, position = start.checkpoint, start.position
        self.resumed = start
        self.step = self.saved = checkpoint.step
        if position.clients:
            host, self._spare = iter(self._dataset.host), iter(self._dataset.host)
            # Last the one that is never used: it sets the seeds that the next iterator draws.
            checkpoint.restore_iterators([host, self._spare], self._model)
            self._dataset.continue_with(None if position.fresh else host)
        self._epochs.start_at(step=start.step, consumed=position.consumed, num_batches=position.num_batches)
