"""CheckpointCallback: a training run that resumes at the batch where it was killed.

# Note: how fit resumes in the middle of an epoch

Keras's `fit` counts the steps of an epoch in its EpochIterator. The EpochIterator asks the dataset for an iterator and
hands the iterator to each step. Before the first step of a resumed run, the callback sets three things: the variables;
the iterator, restored to its position, which the sharded dataset gives out next (`ShardedDataset.continue_with`); and
the count of the EpochIterator, so that the first steps are skipped. The callback sets metrics after the epoch has
begun, because the beginning of an epoch resets them.

A save that is due at the end of a step happens before the next step or at the end of the epoch. A position is
therefore never "after the last step, before the end".

Shuffling keeps state (the seeds and the buffer of `Dataset.shuffle`, the permutation of arrays), and the state of the
iterator includes it. Each new iterator draws new seeds from its dataset. The callback must not change the training, so
it makes no iterator that an uninterrupted run would not make. It makes the first iterator when training begins, to
refuse data with a position that cannot be saved, and the first epoch uses that iterator. An iterator that has read its
input to the end, perhaps ahead of the training, has forgotten the seeds, but an unused iterator knows them. The
callback therefore keeps an unused iterator, takes its draw back, and saves its state, too.
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
    """Saves a training run while `fit` trains, and resumes from the last checkpoint when the script is run again.

    If the directory has a checkpoint when training begins, the callback restores the model and its optimizer, and `fit`
    continues with the batch after the last trained batch. The result is bit for bit the result of an uninterrupted run.
    Without a checkpoint, training begins as usual. The mesh and the ZeRO stage may differ from the saved ones.

    Args:
        directory: The directory of the checkpoints of one training run: a path, or the URL of a remote directory.
        every_steps: Save after this many steps.
        every_epochs: Save after this many epochs. The end of the last epoch is always saved.
        async_save: True if a thread writes while training continues. The values are the values at the end of the step.
        keep: How many steps are kept.
        optimizers: Optimizers in addition to the compiled optimizer and to attributes of the model, as in
            `CheckpointManager.save`.
        storage_options: Keyword arguments of the fsspec file system of a remote directory, such as credentials.

    Raises:
        CheckpointError: `every_steps` and `every_epochs` are both missing, or not positive integers. In `fit`: a
            checkpoint does not fit, is damaged or could not be written, or the position of the data cannot be saved.
            The position of arrays and `tf.data` datasets can be saved. The position of a `keras.utils.PyDataset` can be
            saved with `every_epochs` and `fit(shuffle=False)`.
        CheckpointStorageError: A remote directory cannot be used, as in `CheckpointManager`.

    The callback does not save the state of other callbacks, such as the patience of `EarlyStopping`.

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
        *,
        storage_options: Mapping[str, Any] | None = None,
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
        self.manager = CheckpointManager(directory, keep=keep, storage_options=storage_options)
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self.async_save = async_save
        self.optimizers = optimizers
        self._begun: _FitProgress | None = None

    @property
    def _run(self) -> "_FitProgress":
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
        run = self._begun = _FitProgress(self.model, epochs)
        run.check(in_epoch=self.every_steps is not None)
        if self.manager.latest_step() is None:
            return
        start = run.start_at(self.manager.open())
        # Refuse everything that can be refused before a variable changes.
        self.manager.restore_from(start.checkpoint, self.model, lambda: run.go_to(start), self.optimizers)
        self._tell(start)
        _private.set_initial_epoch(self.model, start.position.epoch)

    def _tell(self, start: "_Start") -> None:
        """Print where the run resumes, unless fit prints nothing."""
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
                    f"The checkpoint of step {checkpoint.step} resumes at epoch {position.epoch}, but fit begins at "
                    "another epoch. Leave initial_epoch out, or choose another directory. Received: "
                    f"initial_epoch={epoch}"
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
                f"{run.resumed.position.epoch}. To train more, give fit more epochs; to start again, choose another "
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
    """The point where a run resumes.

    Attributes:
        checkpoint: The checkpoint to restore.
        position: The position in the data.
        step: The step in the epoch, from 0.
    """

    checkpoint: Checkpoint
    position: Position
    step: int


class _FitProgress:
    """The progress of one run of `fit` through its data.

    Attributes:
        epoch: The current epoch.
        step: Training steps so far, including the steps before an interruption.
        saved: The step at which the run was last saved.
        due: True if the run should be saved at the next opportunity.
        begun: The first step of the current execution.
        trained: True if an epoch has begun.
        resumed: The point where the run resumes, until the first epoch has begun.
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
        # An unused iterator: the others forget the seeds of their dataset when they reach the end.
        self._spare: Iterator[Any] | None = None

    @property
    def _dataset(self) -> datasets.ShardedDataset:
        dataset: datasets.ShardedDataset = self._epochs.dataset
        return dataset

    def check(self, *, in_epoch: bool) -> None:
        """Raise `CheckpointError` for data with a position that cannot be saved.

        Args:
            in_epoch: True if the position should be saved in the middle of an epoch.
        """
        kind = self._epochs.kind
        if kind == "PyDataset":
            if in_epoch or self._epochs.shuffles:
                raise CheckpointError(
                    "The position in a PyDataset can be saved only at the end of an epoch, and its order only if "
                    "fit does not shuffle it. Use every_epochs alone with fit(shuffle=False), or arrays or a "
                    f"tf.data dataset. Received: shuffle={bool(self._epochs.shuffles)}, every_steps "
                    f"{'given' if in_epoch else 'not given'}"
                )
        elif kind not in ("arrays", "tf.data"):
            raise CheckpointError(
                "The position in this data cannot be saved, so a run could not resume exactly. Use arrays or a "
                f"tf.data dataset. Received: data of {kind}"
            )
        elif kind == "arrays" and self._epochs.shuffles == "batch":
            raise CheckpointError(
                "The position in arrays that are shuffled in batches cannot be saved. Use shuffle=True or False. "
                "Received: shuffle='batch'"
            )
        elif kind == "tf.data" and self._dataset.host.options().experimental_symbolic_checkpoint:
            # Measured: such an iterator does not continue with the same batches.
            raise CheckpointError(
                "The position in a dataset with experimental_symbolic_checkpoint cannot be saved exactly. Leave the "
                "option out. Received: options().experimental_symbolic_checkpoint=True"
            )
        else:
            host = iter(self._dataset.host)
            before = self._state(host)
            self._spare = iter(self._dataset.host)
            _private.restore_iterator(host, before)  # Takes back the seeds that the spare iterator drew.
            self._dataset.continue_with(host)

    def start_at(self, checkpoint: Checkpoint) -> _Start:
        """Return where this run resumes from a checkpoint.

        Raises:
            CheckpointError: The run cannot resume from it.
        """
        position = checkpoint.position
        if position is None or position.step is None:
            raise CheckpointError(
                f"The checkpoint of step {checkpoint.step} was not saved by a CheckpointCallback and does not "
                "contain the position in the data. Give the callback a separate directory, and restore this "
                f"checkpoint with CheckpointManager.restore. Received: {checkpoint.directory}"
            )
        if position.step % self._epochs.steps_per_execution:
            raise CheckpointError(
                f"The checkpoint of step {checkpoint.step} is at step {position.step} of an epoch, which is not a "
                f"multiple of steps_per_execution. Received: steps_per_execution={self._epochs.steps_per_execution}"
            )
        return _Start(checkpoint=checkpoint, position=position, step=position.step)

    def _state(self, iterator: object) -> tf.Tensor:
        # Keras permutes arrays with a random operation; the permutation is part of the state.
        return datasets.iterator_state(iterator, ignore_random=self._epochs.kind == "arrays")

    def position(self, epoch: int, step: int) -> tuple[Position, list[tf.Tensor]] | None:
        """Return the position at `step` of `epoch`, with iterator states, or None if the epoch ends before the step.

        Keras does not know the length of every dataset, and announces a step without a batch.
        """
        iterator = self._dataset.current
        assert iterator is not None
        at_end, states = iterator.exhausted, []
        if self._epochs.kind != "PyDataset":
            states = [self._state(iterator), self._state(self._spare)]
        # After the states were taken, because this reads a batch.
        if step and iterator.is_at_end():
            return None
        fresh = not step and (at_end or not self._epochs.spans_epochs)
        # The count already includes the step that is about to run.
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
        """Make the next epoch begin where the checkpoint was taken."""
        checkpoint, position = start.checkpoint, start.position
        self.resumed = start
        self.step = self.saved = checkpoint.step
        if position.clients:
            host = datasets.HostBatches(iter(self._dataset.host))
            self._spare = iter(self._dataset.host)
            # The unused iterator comes last: it sets the seeds that the next iterator draws.
            checkpoint.restore_iterators([host, self._spare], self._model)
            self._dataset.continue_with(None if position.fresh else host)
        self._epochs.start_at(step=start.step, consumed=position.consumed, num_batches=position.num_batches)
