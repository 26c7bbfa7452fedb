"""CheckpointManager: training runs to disk and back. A checkpoint is complete or absent."""

import atexit
import os
import pathlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.checkpoints import files, reduction_state, remote_files, training_state
from tfshard.checkpoints.local_store import LocalStore
from tfshard.checkpoints.manifest import Position
from tfshard.checkpoints.reader import Checkpoint
from tfshard.checkpoints.remote_store import RemoteStore
from tfshard.checkpoints.stores import Store
from tfshard.checkpoints.training_state import Optimizers
from tfshard.checkpoints.writer import Snapshot, Writing
from tfshard.devices import clients, process_lock
from tfshard.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from tfshard.training import datasets


class CheckpointManager:
    """Saves training runs to a directory, and restores them on any mesh and at any ZeRO stage.

    A checkpoint holds the variables of the model, the states of seed generators and metrics, and the position in the
    data. It also holds the variables of the optimizers: slots, step count, learning rate, loss scale, averages,
    accumulated gradients. Each local shard is written once, by one of the devices that hold it; no variable is
    gathered.

    Args:
        directory: The directory of the checkpoints of one training run; several clients share the directory. A path, or
            the URL of a remote directory, such as `"gs://bucket/run"`, `"s3://bucket/run"` or `"hdfs://host/run"`.
        keep: How many steps are kept; older steps are deleted after a newer step is committed. None: all.
        storage_options: Keyword arguments of the fsspec file system of a remote directory, such as credentials.
        read_only: True to restore only. A remote directory is not written to, not even to check that it can be.

    Attributes:
        directory: The directory: a `pathlib.Path`, or the URL of a remote directory.

    Raises:
        CheckpointError: A wrong argument.
        CheckpointStorageError: A remote directory cannot be used: a package is missing, the credentials are wrong, or
            the bucket does not exist.

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

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        storage_options: Mapping[str, Any] | None = None,
        read_only: bool = False,
    ):
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"keep must be a positive integer, or None to keep all. Received: keep={keep!r}")
        if not isinstance(directory, (str, os.PathLike)):
            raise CheckpointError(f"directory must be a path or a URL. Received: directory={directory!r}")
        if remote_files.is_url(directory):
            self._store: Store = RemoteStore(str(directory), storage_options, writes=not read_only)
        elif storage_options:
            raise CheckpointError(
                "storage_options belong to a remote directory, such as 'gs://bucket/run'. Received: "
                f"directory={str(directory)!r}, storage_options for {sorted(storage_options)}"
            )
        else:
            self._store = LocalStore(remote_files.local_path(directory))
        self.directory = self._store.directory
        self.keep = keep
        self.read_only = read_only
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"CheckpointManager('{self.directory}', keep={self.keep})"

    def steps(self) -> list[int]:
        """Return the committed steps, in order."""
        return sorted(self._store.committed())

    def latest_step(self) -> int | None:
        """Return the highest committed step, or None."""
        return max(self.steps(), default=None)

    def save(
        self,
        model: keras.Model,
        step: int,
        *,
        iterator: object = None,
        optimizers: Optimizers = None,
        wait: bool = True,
    ) -> pathlib.Path | str:
        """Write a checkpoint. Saving a step again replaces its checkpoint atomically.

        With several clients, each client calls `save`.

        Args:
            model: A built model, under a `ShardedStrategy` or not.
            step: Training steps so far; the name of the checkpoint.
            iterator: The `tf.data` iterator of a custom training loop, or `iter()` of a dataset that
                `strategy.experimental_distribute_dataset` returned; the checkpoint includes its position. (For `fit`,
                use `CheckpointCallback`.)
            optimizers: Optimizers of a custom training loop: one, a list, or a mapping from name to optimizer. Without
                them, `save` finds the compiled optimizer and attributes of the model. None: also the optimizers that
                hold slots of the model's variables. `()`: the compiled optimizer only.
            wait: True: return when the checkpoint is committed. False: return when the values are on the host; a thread
                writes them while training continues. Only one checkpoint is written at a time: the next `save` waits
                for it.

        Returns:
            The checkpoint's directory, a path or a URL, which does not exist yet with `wait=False`.

        Raises:
            CheckpointError: The checkpoint cannot be written, or the previous checkpoint, with `wait=False`, could not.
                Earlier checkpoints still exist. If no `save` or `wait` follows a failure, the program ends with the
                error and exit code 1.
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
    ) -> pathlib.Path | str:
        """`save`, with the position in the data and the states of iterators, which are restored in this order."""
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
    ) -> pathlib.Path | str:
        if isinstance(step, (bool, np.bool_)) or not isinstance(step, (int, np.integer)) or step < 0:
            raise CheckpointError(f"step must be an integer, 0 or larger. Received: step={step!r}")
        step = int(step)
        if self.read_only:
            raise CheckpointError("A CheckpointManager with read_only=True does not save. Received: read_only=True")
        training_state.build_optimizers(model, training_state.optimizers(model, optimizers))
        variables = training_state.collect(model, named=training_state.optimizers(model, optimizers))
        writing = Writing(self._store, self.keep, step)
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
            # Not a daemon thread: a program that ends waits for its last checkpoint.
            _look_at_the_end()
            self._thread = threading.Thread(target=self._write, args=(writing, snapshot), name="tfshard-checkpoint")
            _threads.add(self._thread)
            self._thread.start()
        return writing.final

    def _write(self, writing: Writing, snapshot: Snapshot) -> None:
        try:
            writing.run(snapshot)
        except BaseException as error:  # The next `wait`, or the end of the program, raises it.
            writing.end(failed=True)
            self._error = error
            _failed.add(self)
        else:
            writing.end(failed=False)

    def _raise_unwritten(self, error: BaseException) -> NoReturn:
        if not isinstance(error, (OSError, tf.errors.OpError)):
            raise error
        raise CheckpointError(
            f"A checkpoint could not be written: {error!s:.300}. Earlier checkpoints are unchanged. Received: "
            f"directory='{self.directory}'"
        ) from error

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is committed.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            _failed.discard(self)
            self._raise_unwritten(error)

    def open(self, step: int | None = None) -> Checkpoint:
        """Open a committed checkpoint: read the manifest, and compare names and sizes of files, but read no data.

        Args:
            step: The step; None: the latest.

        Raises:
            CheckpointError: No such checkpoint exists.
            CheckpointCorruptError: The manifest is damaged, or files are missing, too many or of the wrong size.
        """
        there = self._store.committed()
        if step is None:
            step = max(there, default=None)
        if step not in there:
            raise CheckpointError(
                f"The checkpoint does not exist. Steps in '{self.directory}': {sorted(there)}. Received: step={step!r}"
            )
        assert step is not None
        return Checkpoint.open(self._store, files.name_of(step, there[step]))

    def restore(
        self, model: keras.Model, step: int | None = None, *, iterator: object = None, optimizers: Optimizers = None
    ) -> Checkpoint:
        """Restore a checkpoint into a model, whatever mesh, ZeRO stage and groups it was saved with.

        Before the first variable changes, `restore` verifies every file and checksum and compares every name, shape and
        dtype. Each device reads its local shards. With several clients, each client calls `restore`.

        Args:
            model: A built model. Its optimizer, if any, is restored, and built first if necessary.
            step: The step; None: the latest.
            iterator: A new `tf.data` iterator of the dataset of the saved iterator; `restore` moves it to the saved
                position.
            optimizers: Optimizers of a custom training loop, as in `save`, under the same names; `restore` builds
                unbuilt optimizers. `()`: ignore such optimizers in the checkpoint.

        Returns:
            The `Checkpoint`: `checkpoint.step` and `checkpoint.position` say where to resume.

        Raises:
            CheckpointError: No such checkpoint exists.
            CheckpointCorruptError: The checkpoint is damaged. The message names every fault; no variable changed.
            CheckpointMismatchError: The checkpoint does not fit. The message names every variable; no variable changed.
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
        """`restore`, from an opened checkpoint. Calls `accepted` before the first variable changes."""
        training_state.check_built(model)
        stored = checkpoint.manifest.variables
        named = training_state.optimizers(model, optimizers, stored)
        variables = training_state.collect(model, named=named)
        left_out = optimizers is not None and not isinstance(optimizers, keras.optimizers.Optimizer) and not optimizers
        mismatches = checkpoint.mismatches(variables, {each.name for each in named}, left_out=left_out)
        problems = self._problems(checkpoint)
        checkpoint._raise_corrupt(problems + (mismatches if problems else []))
        if mismatches:
            raise CheckpointMismatchError(
                f"The checkpoint of step {checkpoint.step} does not fit model '{model.name}' and its optimizers, and "
                "nothing was restored:\n" + "".join(f"- {line}\n" for line in mismatches)
                + f"Build and compile the model as it was when it was saved. Received: {checkpoint.directory}"
            )  # fmt: skip
        accepted()
        with process_lock.held():
            self._restore_variables(checkpoint, model, named, optimizers)
        clients.here().continue_steps("training step", checkpoint.step)

    def _problems(self, checkpoint: Checkpoint) -> list[str]:
        """Return the faults of a checkpoint. Clients that read from a remote directory divide the work."""
        here = clients.here()
        if not self._store.shares_verification or here.count == 1:
            return checkpoint.problems()
        problems = checkpoint.problems(here.rank, here.count)
        # A fault that one client finds stops all of them before the first variable changes.
        here.agree(
            f"the verification of the checkpoint of step {checkpoint.step}", {"faults": problems[:10]},
            error=CheckpointCorruptError,
            hint="The checkpoint is damaged, and nothing was restored. Restore another step "
            f"(CheckpointManager.steps() lists them). Received: {checkpoint.directory}",
        )  # fmt: skip
        return problems

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
        reduction_state.restore(checkpoint, variables)


# --- a checkpoint that failed after the last `wait` of the program

# Strong references: the failure of an unreferenced manager is reported, too.
_failed: set[CheckpointManager] = set()
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_exit_code = 0
_looks = False


def _look_at_the_end() -> None:
    """Report failures of writer threads at the end of the program, before its clients part
    (`Launched._wait_for_others`)."""
    global _looks
    if not _looks:
        _looks = True
        atexit.register(_tell)
        # A remote file system may need Python's thread pools, which end before the threads of a program do.
        _private.before_executors_end(_wait_for_threads)


def _wait_for_threads() -> None:
    for thread in list(_threads):
        thread.join()


def _tell() -> None:
    """Report checkpoints that could not be written and that nobody waited for, like uncaught exceptions."""
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
        # The interpreter decides its exit code before it runs the atexit functions.
        os._exit(_exit_code)


# Registered at import to run last: atexit runs functions in reverse order.
atexit.register(_exit_with_error)
