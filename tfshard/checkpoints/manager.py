"""CheckpointManager: training runs to disk and back. A checkpoint is whole or not there (why: writer.py)."""

import atexit
import os
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.checkpoints import files, training_state, unsent
from tfshard.checkpoints.manifest import Position
from tfshard.checkpoints.reader import Checkpoint
from tfshard.checkpoints.training_state import Optimizers
from tfshard.checkpoints.writer import Snapshot, Writing
from tfshard.devices import clients, process_lock
from tfshard.errors import CheckpointError, CheckpointMismatchError
from tfshard.training import datasets


class CheckpointManager:
    """Saves training runs to a directory, and restores them on any mesh and at any stage.

    A checkpoint holds the parameters and other variables of the model, its optimizers' (slots, step count, learning
    rate, loss scale, averages, accumulated gradients), the states of seed generators and metrics, and the position in
    the data. Each device's piece is written once, by one of the devices that hold it; no variable is gathered.

    Args:
        directory: Where checkpoints are kept. One training run to a directory; several clients share it.
        keep: How many steps are kept; older ones are deleted after a newer one is committed. None: all.

    Raises:
        CheckpointError: A wrong argument.

    Example:

    >>> import keras, numpy as np, tempfile, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> def build(mesh, stage):
    ...     model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    ...     model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(mesh, zero_stage=stage))
    ...     return model
    >>> model = build(tfshard.create_mesh(batch=4), stage=3)
    >>> _ = model.fit(np.ones((16, 8)), np.ones((16, 4)), batch_size=8, verbose=0)
    >>> manager = tfshard.CheckpointManager(tempfile.mkdtemp())
    >>> _ = manager.save(model, step=2)
    >>> other = build(tfshard.create_mesh(batch=2), stage=1)
    >>> manager.restore(other).step, int(other.optimizer.iterations.numpy())
    (2, 2)
    >>> bool((other.layers[0].kernel.numpy() == model.layers[0].kernel.numpy()).all())
    True
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3):
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"keep must be a positive integer, or None to keep all. Received: keep={keep!r}")
        if not isinstance(directory, (str, os.PathLike)) or "://" in str(directory):
            raise CheckpointError(f"directory must be a path of a local file system. Received: directory={directory!r}")
        self.directory = pathlib.Path(directory)
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"CheckpointManager('{self.directory}', keep={self.keep})"

    def steps(self) -> list[int]:
        """The steps that were committed, in order."""
        return sorted(files.committed(self.directory))

    def latest_step(self) -> int | None:
        """The highest step that was committed, or None."""
        return max(self.steps(), default=None)

    def save(
        self,
        model: keras.Model,
        step: int,
        *,
        iterator: object = None,
        optimizers: Optimizers = None,
        wait: bool = True,
    ) -> pathlib.Path:
        """Writes a checkpoint. A step that is saved again is replaced, and at no moment missing.

        With several clients, each calls it.

        Args:
            model: A built model, under a `ShardedStrategy` or not.
            step: Training steps so far; the name of the checkpoint.
            iterator: The `tf.data` iterator of a training loop of your own, or `iter()` of a dataset that
                `strategy.experimental_distribute_dataset` returned; its position is saved too. (For `fit`,
                `CheckpointCallback` does that.)
            optimizers: Optimizers of a training loop of your own: one, a list, or a mapping from name to optimizer.
                Not needed for the one that the model is compiled with and for attributes of the model. None: those
                that hold slots of the model's variables. `()`: the compiled one only.
            wait: Whether to return when the checkpoint is committed. With False it returns when the values are on the
                host, and a thread writes them while training goes on. One at a time: the next `save` waits for it.

        Returns:
            The checkpoint's directory, which with `wait=False` is not there yet.

        Raises:
            CheckpointError: It cannot be written, or the one before, with `wait=False`, could not. What was committed
                before is still there. A program that ends without another `save` or `wait` is told too: it ends with
                the error and exit code 1.
        """
        position, states = None, []
        if iterator is not None:
            states = [datasets.iterator_state(iterator)]
            savers = datasets.iterator_savers(_private.distribute_strategy(model))
            position = Position(epoch=0, step=None, consumed=0, num_batches=None, fresh=False, clients=savers)
        return self.save_at(model, step, position=position, states=states, optimizers=optimizers, wait=wait)

    def save_at(
        self,
        model: keras.Model,
        step: int,
        *,
        position: Position | None,
        states: list[tf.Tensor],
        optimizers: Optimizers = None,
        wait: bool,
    ) -> pathlib.Path:
        """`save`, with the position in the data and states of iterators, to be restored in this order."""
        self.wait()
        training_state.check_built(model)
        with clients.here().purpose(f"a checkpoint of model '{model.name}'"):
            return self._save(model, step, position, states, optimizers, wait)

    def _save(
        self,
        model: keras.Model,
        step: int,
        position: Position | None,
        states: list[tf.Tensor],
        optimizers: Optimizers,
        wait: bool,
    ) -> pathlib.Path:
        if isinstance(step, (bool, np.bool_)) or not isinstance(step, (int, np.integer)) or step < 0:
            raise CheckpointError(f"step must be an integer, 0 or larger. Received: step={step!r}")
        step = int(step)
        training_state.build_optimizers(model, training_state.optimizers(model, optimizers))
        variables = training_state.collect(model, named=training_state.optimizers(model, optimizers))
        writing = Writing(self.directory, self.keep, step)
        try:
            writing.begin([variable.key for variable in variables])
            with process_lock.held():
                snapshot = Snapshot.take(model, variables, step, position, states)
        except BaseException as error:
            writing.end(failed=True)
            self._raise_unwritten(error)
        if wait:
            self._write(writing, snapshot)
            self.wait()
        else:
            # Not a daemon: a program that ends waits for its last checkpoint.
            _look_at_the_end()
            self._thread = threading.Thread(target=self._write, args=(writing, snapshot), name="tfshard-checkpoint")
            self._thread.start()
        return writing.final

    def _write(self, writing: Writing, snapshot: Snapshot) -> None:
        try:
            writing.run(snapshot)
        except BaseException as error:  # Of a thread: raised by the next `wait`, or at the end of the program.
            writing.end(failed=True)
            self._error = error
            _failed.add(self)
        else:
            writing.end(failed=False)

    def _raise_unwritten(self, error: BaseException) -> NoReturn:
        if not isinstance(error, (OSError, tf.errors.OpError)):
            raise error
        raise CheckpointError(
            f"A checkpoint could not be written: {error!s:.300}. Those committed before are as they were. "
            f"Received: directory='{self.directory}'"
        ) from error

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is committed.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            _failed.discard(self)
            self._raise_unwritten(error)

    def open(self, step: int | None = None) -> Checkpoint:
        """A committed checkpoint, with its manifest read and its files counted; their content is not read yet.

        Args:
            step: Which; None: the latest.

        Raises:
            CheckpointError: There is none.
            CheckpointCorruptError: The manifest is damaged, or files are missing, too many or of the wrong size.
        """
        there = files.committed(self.directory)
        if step is None:
            step = max(there, default=None)
        if step not in there:
            raise CheckpointError(
                f"There is no such checkpoint. Steps in '{self.directory}': {sorted(there)}. Received: step={step!r}"
            )
        assert step is not None
        return Checkpoint.open(self.directory / files.name_of(step, there[step]))

    def restore(
        self, model: keras.Model, step: int | None = None, *, iterator: object = None, optimizers: Optimizers = None
    ) -> Checkpoint:
        """Gives a model the values of a checkpoint, whatever mesh, stage and groups it was saved with.

        Before the first variable is changed, every file and checksum is verified and every name, shape and dtype
        compared. Each device reads its own pieces. With several clients, each calls it.

        Args:
            model: A built model. Its optimizer is restored if it has one, and built if it is not.
            step: Which checkpoint; None: the latest.
            iterator: A new `tf.data` iterator, of the dataset whose iterator was saved, to be brought to where it was.
            optimizers: Those of a training loop of your own, as in `save`, and by the same names; those that are not
                built are built. `()`: leave the ones of the checkpoint out.

        Returns:
            The `Checkpoint`: `checkpoint.step` and `checkpoint.position` say where to go on.

        Raises:
            CheckpointError: There is none.
            CheckpointCorruptError: It is damaged. The message names everything that is; nothing was changed.
            CheckpointMismatchError: It does not fit. The message names every variable; nothing was changed.
        """
        self.wait()
        checkpoint = self.open(step)

        def accepted() -> None:
            if iterator is not None:
                checkpoint.restore_iterators([iterator], model)

        training_state.check_built(model)
        with clients.here().purpose(f"restoring model '{model.name}'"):
            self.restore_from(checkpoint, model, accepted, optimizers)
        return checkpoint

    def restore_from(
        self, checkpoint: Checkpoint, model: keras.Model, accepted: Callable[[], None], optimizers: Optimizers = None
    ) -> None:
        """`restore`, from a checkpoint that was opened; calls `accepted` before the first variable is changed."""
        training_state.check_built(model)
        stored = checkpoint.manifest.variables
        named = training_state.optimizers(model, optimizers, stored)
        variables = training_state.collect(model, named=named)
        left_out = optimizers is not None and not isinstance(optimizers, keras.optimizers.Optimizer) and not optimizers
        mismatches = checkpoint.mismatches(variables, {each.name for each in named}, left_out=left_out)
        problems = checkpoint.problems()
        checkpoint._raise_corrupt(problems + (mismatches if problems else []))
        if mismatches:
            raise CheckpointMismatchError(
                f"The checkpoint of step {checkpoint.step} does not fit model '{model.name}' and its optimizers, and "
                "nothing was restored:\n" + "".join(f"- {line}\n" for line in mismatches)
                + f"Build and compile the model as it was. Received: {checkpoint.directory}"
            )  # fmt: skip
        accepted()
        with process_lock.held():
            self._restore_variables(checkpoint, model, named, optimizers)
        clients.here().continue_steps("training step", checkpoint.step)

    def _restore_variables(
        self,
        checkpoint: Checkpoint,
        model: keras.Model,
        named: list[training_state.NamedOptimizer],
        optimizers: Optimizers,
    ) -> None:
        stored = checkpoint.manifest.variables
        training_state.build_optimizers(model, named)
        seed = training_state.GLOBAL_SEED
        if (
            seed in stored
            and stored[seed].kind == "seed"
            and all(v.key != seed for v in training_state.collect(model, named=named))
        ):
            training_state.make_global_seed(model)
        variables = training_state.collect(model, named=training_state.optimizers(model, optimizers))
        checkpoint.assign(variables)
        unsent.restore(checkpoint, variables)


# --- a checkpoint that failed after the last `wait` of the program

# Strong: a manager that nobody holds any more is told of, too.
_failed: set[CheckpointManager] = set()
_exit_code = 0
_looks = False


def _look_at_the_end() -> None:
    """What fails in a thread is told at the end of the program, once before its clients part (`Launched._leave`)."""
    global _looks
    if not _looks:
        _looks = True
        atexit.register(_tell)


def _tell() -> None:
    """Tells of checkpoints that could not be written and that nobody waited for, as of an uncaught exception."""
    global _exit_code
    for manager in list(_failed):
        try:
            manager.wait()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            _exit_code = 1


def _exit_with_error() -> None:
    if _exit_code:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # The interpreter's own exit code is decided before the functions that run at exit.
        os._exit(_exit_code)


# When tfshard is imported, so that it comes after what is registered later: what runs at exit does so backwards.
atexit.register(_exit_with_error)
