"""CheckpointManager: training runs to disk and back, piece by piece.

# Note: why a checkpoint is whole or not there

Everything is written to a directory with a temporary name and synced; then one rename gives it its name. So a directory
named `step-...` is complete, whenever the process was killed. A step that is saved again gets a new generation,
`step-00000012.1`, and the highest wins: at no moment is there neither the old one nor the new one. What is deleted is
renamed to a temporary name first.

The data are in TensorFlow's tensor-bundle format, each variable in its own shape, so `tf.train.load_checkpoint` reads
them. TensorFlow's own restore is not used: it is not all or nothing, a missing key is no error to it, and when it fails
on a mesh, no later operation on that mesh works. Here all is read and compared first, on the host.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private, boxes, clients, data, manifest, pieces, training_state
from tfshard.boxes import Box
from tfshard.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from tfshard.manifest import Manifest, Position, StoredFile, StoredPiece, StoredVariable
from tfshard.strategy import ShardedStrategy
from tfshard.training_state import StateVariable

MANIFEST = "manifest.json"
_DATA = "data"
_TEMPORARY = ".tmp-"
_LOCK = ".lock"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
# How many bytes of pieces are read at once to be verified.
_CHUNK_BYTES = 1 << 26
# How long a client waits for the pieces of the others.
_CLIENTS_SECONDS = 1800
_POLL_SECONDS = 0.05


# --- Names and files ---------------------------------------------------------------------------------


def _name(step: int, generation: int) -> str:
    return f"step-{step:08d}" + (f".{generation}" if generation else "")


def _committed(root: pathlib.Path) -> dict[int, int]:
    """The steps that are there, with the highest generation of each."""
    found: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(root):
            match = _NAME.fullmatch(name)
            if match is not None:
                step, generation = int(match[1]), int(match[2] or 0)
                if _name(step, generation) == name:
                    found[step] = max(generation, found.get(step, 0))
    return found


def _sync(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: pathlib.Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _open_here(path: pathlib.Path) -> Iterator[Any]:
    """Opens a regular file of a checkpoint; a link that would lead out of its directory is not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"not a regular file: {path.name}")
        yield file


def _remove(path: pathlib.Path) -> None:
    """Deletes a checkpoint; half deleted, it has a temporary name."""
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _spec(shape: Sequence[int], box: Box) -> str:
    """A box in the words of TensorFlow's `shape_and_slices`."""
    if not shape:
        return ""
    ranges = ":".join(f"{begin},{size}" for begin, size in zip(box.offset, box.shape, strict=True))
    return " ".join(map(str, shape)) + " " + ranges


# --- Reading -----------------------------------------------------------------------------------------


class Checkpoint:
    """A committed checkpoint.

    Attributes:
        directory: Where it is.
        manifest: What it holds, a `tfshard.manifest.Manifest`.
    """

    def __init__(self, directory: pathlib.Path, found: Manifest):
        self.directory = directory
        self.manifest = found

    @property
    def step(self) -> int:
        """Training steps so far."""
        return self.manifest.step

    @property
    def position(self) -> Position | None:
        """Where in the data the run was, or None when it was not told."""
        return self.manifest.position

    def __repr__(self) -> str:
        return f"<Checkpoint step={self.step} in '{self.directory}'>"

    @classmethod
    def open(cls, directory: pathlib.Path) -> "Checkpoint":
        """Reads a manifest and looks whether the files that it names are there, and no others.

        Raises:
            CheckpointCorruptError: Something is wrong with them; the message names everything.
        """
        try:
            if not stat.S_ISDIR(os.lstat(directory).st_mode):
                raise CheckpointCorruptError(
                    f"A checkpoint must be a directory, and no link to one. Received: {directory}"
                )
            with _open_here(directory / MANIFEST) as file:
                content = file.read(manifest.MAX_BYTES + 1)
        except OSError as error:
            raise CheckpointCorruptError(
                f"The manifest of a checkpoint cannot be read: {error.strerror or error}. Received: {directory}"
            ) from error
        found = cls(directory, manifest.decode(content, str(directory / MANIFEST)))
        found._raise_corrupt(found._file_problems())
        return found

    def _file_problems(self) -> list[str]:
        problems = []
        if self.directory.name != _name(self.manifest.step, self.manifest.generation):
            problems.append(f"it was written as {_name(self.manifest.step, self.manifest.generation)}")
        with os.scandir(self.directory) as entries:
            present = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        del present[MANIFEST]
        for name in sorted(present.keys() - self.manifest.files.keys()):
            problems.append(f"file '{name}' does not belong to it")
        for name, file in self.manifest.files.items():
            if name not in present:
                problems.append(f"file '{name}' is missing")
            elif not stat.S_ISREG(present[name].st_mode):
                problems.append(f"file '{name}' is not a regular file")
            elif present[name].st_size != file.bytes:
                problems.append(f"file '{name}' has {present[name].st_size} bytes instead of {file.bytes}")
        claimed = sum(self._bytes(stored, piece.box) for stored, piece in self._stored_pieces())
        held = sum(file.bytes for file in self.manifest.files.values() if file.sha256 is None)
        if claimed != held:
            problems.append(f"its pieces have {claimed} bytes and its files of data {held}")
        return problems

    def _raise_corrupt(self, problems: list[str]) -> None:
        if problems:
            raise CheckpointCorruptError(
                f"The checkpoint of step {self.step} is damaged, and nothing was restored:\n"
                + "".join(f"- {problem}\n" for problem in problems)
                + f"Restore another step (CheckpointManager.steps() lists them). Received: {self.directory}"
            )

    def _stored_pieces(self) -> Iterator[tuple[StoredVariable, StoredPiece]]:
        for stored in self.manifest.variables.values():
            for piece in stored.pieces:
                yield stored, piece

    @staticmethod
    def _bytes(stored: StoredVariable, box: Box) -> int:
        return box.elements * tf.as_dtype(stored.dtype).size

    def verify(self) -> None:
        """Reads everything and compares it with its checksums.

        Raises:
            CheckpointCorruptError: The message names every file and every piece that differs.
        """
        self._raise_corrupt(self.problems())

    def problems(self) -> list[str]:
        """What `verify` complains of."""
        problems = self._file_problems()
        for name, file in self.manifest.files.items():
            if file.sha256 is None:
                continue
            try:
                with _open_here(self.directory / name) as opened:
                    if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                        problems.append(f"file '{name}' has another checksum")
            except OSError as error:
                problems.append(f"file '{name}' cannot be read: {error}")
        if problems:
            return problems  # TensorFlow reads no file that is known to be wrong.
        for chunk in self._chunks():
            try:
                arrays: Iterable[Any] = self._read([(key, stored, piece.box) for key, stored, piece in chunk])
            except CheckpointCorruptError:
                arrays = itertools.repeat(None)  # Which of them, the next reads tell.
            for (key, stored, piece), array in zip(chunk, arrays, strict=False):
                problem = self._piece_problem(key, stored, piece, array)
                if problem is not None:
                    problems.append(f"the piece of '{key}' at {piece.box.offset} of shape={piece.box.shape} {problem}")
        return problems

    def _piece_problem(self, key: str, stored: StoredVariable, piece: StoredPiece, array: Any) -> str | None:
        if array is None:
            try:
                (array,) = self._read([(key, stored, piece.box)])
            except CheckpointCorruptError as error:
                return f"cannot be read ({error.__cause__!s:.80})"
        if array.shape != piece.box.shape:
            return f"has shape={array.shape}"
        return None if _checksum(array) == piece.checksum else "has another checksum"

    def _chunks(self) -> Iterator[list[tuple[str, StoredVariable, StoredPiece]]]:
        """The pieces, so many at a time as are read at once."""
        chunk: list[tuple[str, StoredVariable, StoredPiece]] = []
        size = 0
        for key, stored in self.manifest.variables.items():
            for piece in stored.pieces:
                chunk.append((key, stored, piece))
                size += self._bytes(stored, piece.box)
                if size >= _CHUNK_BYTES:
                    yield chunk
                    chunk, size = [], 0
        if chunk:
            yield chunk

    def _read(self, wanted: Sequence[tuple[str, StoredVariable, Box]]) -> list[np.ndarray]:
        try:
            # On the host: an operation that fails on a mesh leaves the mesh unusable.
            with tf.device("CPU:0"):
                tensors = tf.raw_ops.RestoreV2(
                    prefix=str(self.directory / _DATA),
                    tensor_names=[key for key, _, _ in wanted],
                    shape_and_slices=[_spec(stored.shape, box) for _, stored, box in wanted],
                    dtypes=[tf.as_dtype(stored.dtype) for _, stored, _ in wanted],
                )
        except tf.errors.OpError as error:
            raise CheckpointCorruptError(
                f"The data of the checkpoint of step {self.step} cannot be read. Received: {self.directory}"
            ) from error
        return [np.asarray(tensor) for tensor in tensors]

    def read(self, key: str, box: Box | None = None) -> np.ndarray:
        """A variable, or a box of it, as an array."""
        stored = self.manifest.variables[key]
        box = boxes.whole(stored.shape) if box is None else box
        if not box.elements:
            return np.zeros(box.shape, tf.as_dtype(stored.dtype).as_numpy_dtype)
        return self._read([(key, stored, box)])[0]

    def mismatches(self, variables: Iterable[StateVariable], *, optimizer: bool) -> list[str]:
        """How the checkpoint differs from the variables of a model.

        Args:
            variables: What `training_state.collect` found.
            optimizer: Whether the model has an optimizer: without one, the checkpoint's slots are not needed.
        """
        found = {v.key: v for v in variables if v.kind not in ("metric", "seed")}
        lines = []
        for key, variable in found.items():
            stored = self.manifest.variables.get(key)
            if stored is None:
                lines.append(f"'{key}' of shape={variable.shape} is not in the checkpoint")
            elif stored.shape != variable.shape:
                lines.append(f"'{key}' has shape={stored.shape} in the checkpoint and {variable.shape} in the model")
            elif stored.dtype != variable.dtype:
                lines.append(f"'{key}' is {stored.dtype} in the checkpoint and {variable.dtype} in the model")
        for key, stored in self.manifest.variables.items():
            needed = stored.kind in ("parameter", "state") or (stored.kind == "slot" and optimizer)
            if needed and key not in found:
                lines.append(f"'{key}' of shape={stored.shape} is not in the model")
        return lines

    def assign(self, variables: Iterable[StateVariable]) -> None:
        """Gives variables their stored values; those that are not stored, or in another shape, keep theirs."""
        stored = self.manifest.variables
        fitting = [
            v for v in variables if v.key in stored and (stored[v.key].shape, stored[v.key].dtype) == (v.shape, v.dtype)
        ]
        pieces.assign(fitting, lambda variable, box: self.read(variable.key, box))

    def restore_iterator(self, iterator: Any) -> None:
        """Brings a `tf.data` iterator, new and of the same dataset, to where it was.

        Raises:
            CheckpointError: There is no state of an iterator, or it is not one of this dataset.
        """
        saved = 0 if self.position is None else self.position.clients
        if saved != clients.count():
            raise CheckpointError(
                f"The checkpoint of step {self.step} holds the position of {saved} iterators, one for each client, and "
                f"there are {clients.count()} clients. Received: {self.directory}"
            )
        try:
            with tf.device("CPU:0"):
                (state,) = tf.raw_ops.RestoreV2(
                    prefix=str(self.directory / _iterator_prefix(clients.rank())),
                    tensor_names=["iterator"],
                    shape_and_slices=[""],
                    dtypes=[tf.variant],
                )
                _private.restore_iterator(data.host_iterator(iterator), state)
        except tf.errors.OpError as error:
            raise CheckpointError(
                f"The position in the data of the checkpoint of step {self.step} does not fit this dataset: it has to "
                f"be made as it was when the checkpoint was saved. TensorFlow says: {error!s:.200}. "
                f"Received: {self.directory}"
            ) from error


def _iterator_prefix(client: int) -> str:
    return f"iterator-{client:05d}"


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


# --- Writing -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Snapshot:
    """A training run at one step, as far as this client writes it: tensors on the host.

    Attributes:
        step: Training steps so far.
        plan: For information: mesh, stage and the like.
        variables: Every variable of the run.
        held: The pieces that this client writes.
        position: Where in the data the run is, or None.
        iterator: The state of the `tf.data` iterator, or None.
    """

    step: int
    plan: dict[str, Any]
    variables: Sequence[StateVariable]
    held: Sequence[pieces.HeldPiece]
    position: Position | None
    iterator: tf.Tensor | None

    @classmethod
    def take(cls, model: keras.Model, step: int, position: Position | None, state: tf.Tensor | None) -> "_Snapshot":
        """The values now."""
        variables = training_state.collect(model)
        return cls(
            step=step,
            plan=_plan(model),
            variables=variables,
            held=pieces.held(variables, first_client=clients.rank() == 0),
            position=position,
            iterator=state,
        )


def _plan(model: keras.Model) -> dict[str, Any]:
    strategy = _private.distribute_strategy(model)
    if not isinstance(strategy, ShardedStrategy):
        return {"mesh": None}
    return {
        "mesh": dict(strategy.mesh_shape),
        "zero_stage": strategy.zero_stage,
        "layout_map": repr(strategy.layout_map),
        "analyzer": repr(strategy.analyzer),
        "clients": clients.count(),
    }


class _Writing:
    """The writing of one checkpoint, in steps that any thread can do after `begin`."""

    def __init__(self, root: pathlib.Path, keep: int | None, step: int):
        self.root = root
        self.keep = keep
        self.step = step
        self.temporary = root / f"{_TEMPORARY}{_name(step, 0)}"
        self._lock: int | None = None
        self._generation = 0

    @property
    def final(self) -> pathlib.Path:
        return self.root / _name(self.step, self._generation)

    def begin(self, mesh: Any) -> None:
        """Makes room: the first client clears what earlier writers left, the others wait for it."""
        if clients.rank() == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            for name in os.listdir(self.root):
                if name.startswith(_TEMPORARY):
                    shutil.rmtree(self.root / name)
            self.temporary.mkdir()
        if clients.count() > 1:
            clients.barrier(mesh, f"checkpoint-{self.step}")
        there = _committed(self.root)
        self._generation = there[self.step] + 1 if self.step in there else 0

    def _take_lock(self) -> None:
        self._lock = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise CheckpointError(
                "Another process, or another CheckpointManager, is saving to this directory. Give each training run a "
                f"directory of its own. Received: directory='{self.root}'"
            ) from None

    def end(self, *, failed: bool) -> None:
        """Lets others write. What a failure left is deleted, as far as that can be done."""
        if self._lock is not None:
            if failed:
                shutil.rmtree(self.temporary, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def run(self, snapshot: _Snapshot) -> None:
        """Writes, commits, and deletes what is older than `keep` steps."""
        stored = self._write_pieces(snapshot)
        if clients.count() > 1:
            self._publish(stored)
            if clients.rank() > 0:
                self._await_commit()
                return
            stored = self._gather()
        self._commit(snapshot, stored)
        self._prune()

    def _write_pieces(self, snapshot: _Snapshot) -> dict[str, StoredVariable]:
        """This client's pieces, and its iterator, to files of its own."""
        names, specs, tensors = [], [], []
        found: dict[str, list[StoredPiece]] = {}
        for piece in snapshot.held:
            array = piece.array()
            found.setdefault(piece.variable.key, []).append(StoredPiece(box=piece.box, checksum=_checksum(array)))
            names.append(piece.variable.key)
            specs.append(_spec(piece.variable.shape, piece.box))
            tensors.append(piece.tensor if piece.begin is None else tf.constant(array))
        with tf.device("CPU:0"):
            if names:
                tf.raw_ops.SaveV2(
                    prefix=str(self._prefix()), tensor_names=names, shape_and_slices=specs, tensors=tensors
                )
            if snapshot.iterator is not None:
                tf.raw_ops.SaveV2(
                    prefix=str(self.temporary / _iterator_prefix(clients.rank())),
                    tensor_names=["iterator"],
                    shape_and_slices=[""],
                    tensors=[snapshot.iterator],
                )
        stored = {}
        for variable in snapshot.variables:
            layout = getattr(variable.value, "layout", None)
            stored[variable.key] = StoredVariable(
                kind=variable.kind,
                path=variable.path,
                shape=variable.shape,
                dtype=variable.dtype,
                layout=None if layout is None else layout.storage,
                group=None if layout is None else layout.group,
                pieces=tuple(found.get(variable.key, ())),
            )
        return stored

    def _prefix(self) -> pathlib.Path:
        single = clients.count() == 1
        return self.temporary / (_DATA if single else f"part-{clients.rank():05d}")

    # --- several clients: they meet in the directory, because a collective in this thread would meet those of a step

    def _publish(self, stored: dict[str, StoredVariable]) -> None:
        """Tells the first client what was written here."""
        for path in self.temporary.glob(f"part-{clients.rank():05d}.*"):
            _sync(path)
        for path in self.temporary.glob(f"{_iterator_prefix(clients.rank())}.*"):
            _sync(path)
        part = {key: manifest.encode_variable(variable) for key, variable in stored.items()}
        name = self.temporary / f"part-{clients.rank():05d}.json"
        _write(name.with_suffix(".tmp"), json.dumps(part).encode())
        os.rename(name.with_suffix(".tmp"), name)

    def _gather(self) -> dict[str, StoredVariable]:
        """What all clients have written, and their data as one bundle."""
        parts = [self.temporary / f"part-{client:05d}.json" for client in range(clients.count())]
        self._wait_for(lambda: all(part.exists() for part in parts), "the pieces of the other clients")
        merged: dict[str, Any] = {}
        for part in parts:
            for key, variable in json.loads(part.read_bytes()).items():
                merged.setdefault(key, {**variable, "pieces": []})["pieces"] += variable["pieces"]
            part.unlink()
        prefixes = [str(part.with_suffix("")) for part in parts if part.with_suffix(".index").exists()]
        with tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=prefixes, destination_prefix=str(self.temporary / _DATA), delete_old_dirs=False
            )
        return {key: manifest.decode_variable(variable, key) for key, variable in merged.items()}

    def _await_commit(self) -> None:
        self._wait_for(
            lambda: self.final.exists() or not self.temporary.exists(), "the first client to commit the checkpoint"
        )
        if not self.final.exists():
            raise CheckpointError(f"The first client did not commit the checkpoint. Received: {self.final}")

    def _wait_for(self, there: Any, what: str) -> None:
        deadline = time.monotonic() + _CLIENTS_SECONDS
        while not there():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Waited {_CLIENTS_SECONDS} seconds for {what}. All clients have to save to one directory that "
                    f"each of them sees. Received: directory='{self.root}'"
                )
            time.sleep(_POLL_SECONDS)

    # --- the first client

    def _commit(self, snapshot: _Snapshot, stored: dict[str, StoredVariable]) -> None:
        files = {}
        for path in sorted(self.temporary.iterdir()):
            _sync(path)
            digest = None
            if manifest.needs_sha256(path.name):
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[path.name] = StoredFile(bytes=path.stat().st_size, sha256=digest)
        written = Manifest(
            step=self.step,
            generation=self._generation,
            versions=_versions(),
            plan=snapshot.plan,
            position=snapshot.position,
            variables=stored,
            files=files,
        )
        _write(self.temporary / MANIFEST, manifest.encode(written))
        _sync(self.temporary)
        # Before this, there is nothing; after it, everything.
        os.rename(self.temporary, self.final)
        _sync(self.root)

    def _prune(self) -> None:
        kept = _committed(self.root)
        if self.keep is not None:
            kept = {step: kept[step] for step in sorted(kept)[-self.keep :]}
        for name in os.listdir(self.root):
            match = _NAME.fullmatch(name)
            if match is not None and kept.get(int(match[1])) != int(match[2] or 0):
                _remove(self.root / name)


def _versions() -> dict[str, str]:
    from tfshard import __version__  # The package is complete by now.

    return {"tfshard": __version__, "tensorflow": tf.__version__, "keras": keras.__version__}


# --- The manager -------------------------------------------------------------------------------------


class CheckpointManager:
    """Saves training runs to a directory, and restores them on any mesh and at any stage.

    A checkpoint holds the parameters and other variables of the model, the optimizer's (slots, step count, learning
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
        return sorted(_committed(self.directory))

    def latest_step(self) -> int | None:
        """The highest step that was committed, or None."""
        return max(self.steps(), default=None)

    def save(self, model: keras.Model, step: int, *, iterator: Any = None, wait: bool = True) -> pathlib.Path:
        """Writes a checkpoint. A step that is saved again is replaced, and at no moment missing.

        With several clients, each calls it.

        Args:
            model: A built model, under a `ShardedStrategy` or not.
            step: Training steps so far; the name of the checkpoint.
            iterator: The `tf.data` iterator of a training loop of your own, or `iter()` of a dataset that
                `strategy.experimental_distribute_dataset` returned; its position is saved too. (For `fit`,
                `CheckpointCallback` does that.)
            wait: Whether to return when the checkpoint is committed. With False it returns when the values are on the
                host, and a thread writes them while training goes on. One at a time: the next `save` waits for it.

        Returns:
            The checkpoint's directory, which with `wait=False` is not there yet.

        Raises:
            CheckpointError: It cannot be written, or the one before, with `wait=False`, could not. What was committed
                before is still there.
        """
        position, state = None, None
        if iterator is not None:
            state = data.iterator_state(iterator)
            position = Position(epoch=0, step=None, consumed=0, num_batches=None, fresh=False, clients=clients.count())
        return self.save_at(model, step, position=position, state=state, wait=wait)

    def save_at(
        self, model: keras.Model, step: int, *, position: Position | None, state: tf.Tensor | None, wait: bool
    ) -> pathlib.Path:
        """`save`, with the position in the data and the state of the iterator given."""
        self.wait()
        if isinstance(step, (bool, np.bool_)) or not isinstance(step, (int, np.integer)) or step < 0:
            raise CheckpointError(f"step must be an integer, 0 or larger. Received: step={step!r}")
        step = int(step)
        training_state.collect(model, metrics=False)  # Raises for what is not a built model.
        training_state.build_optimizer(model)
        writing = _Writing(self.directory, self.keep, step)
        try:
            writing.begin(getattr(_private.distribute_strategy(model), "mesh", None))
            snapshot = _Snapshot.take(model, step, position, state)
        except BaseException as error:
            writing.end(failed=True)
            self._raise_unwritten(error)
        if wait:
            self._write(writing, snapshot)
            self.wait()
        else:
            # Not a daemon: a program that ends waits for its last checkpoint.
            self._thread = threading.Thread(target=self._write, args=(writing, snapshot), name="tfshard-checkpoint")
            self._thread.start()
        return writing.final

    def _write(self, writing: _Writing, snapshot: _Snapshot) -> None:
        try:
            writing.run(snapshot)
        except BaseException as error:  # Of a thread: raised by the next `wait`.
            writing.end(failed=True)
            self._error = error
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
            self._raise_unwritten(error)

    def open(self, step: int | None = None) -> Checkpoint:
        """A committed checkpoint, with its manifest read and its files counted; their content is not read yet.

        Args:
            step: Which; None: the latest.

        Raises:
            CheckpointError: There is none.
            CheckpointCorruptError: The manifest is damaged, or files are missing, too many or of the wrong size.
        """
        there = _committed(self.directory)
        if step is None:
            step = max(there, default=None)
        if step not in there:
            raise CheckpointError(
                f"There is no such checkpoint. Steps in '{self.directory}': {sorted(there)}. Received: step={step!r}"
            )
        assert step is not None
        return Checkpoint.open(self.directory / _name(step, there[step]))

    def restore(self, model: keras.Model, step: int | None = None, *, iterator: Any = None) -> Checkpoint:
        """Gives a model the values of a checkpoint, whatever mesh, stage and groups it was saved with.

        Before the first variable is changed, every file and checksum is verified and every name, shape and dtype
        compared. Each device reads its own pieces. With several clients, each calls it.

        Args:
            model: A built model. Its optimizer is restored if it has one, and built if it is not.
            step: Which checkpoint; None: the latest.
            iterator: A new `tf.data` iterator, of the dataset whose iterator was saved, to be brought to where it was.

        Returns:
            The `Checkpoint`: `checkpoint.step` and `checkpoint.position` say where to go on.

        Raises:
            CheckpointError: There is none.
            CheckpointCorruptError: It is damaged. The message names everything that is; nothing was changed.
            CheckpointMismatchError: It does not fit. The message names every variable; nothing was changed.
        """
        self.wait()
        checkpoint = self.open(step)
        self.restore_from(
            checkpoint, model, lambda: None if iterator is None else checkpoint.restore_iterator(iterator)
        )
        return checkpoint

    def restore_from(self, checkpoint: Checkpoint, model: keras.Model, accepted: Callable[[], Any]) -> None:
        """`restore`, from a checkpoint that was opened; calls `accepted` before the first variable is changed."""
        variables = training_state.collect(model)
        has_optimizer = getattr(model, "optimizer", None) is not None
        mismatches = checkpoint.mismatches(variables, optimizer=has_optimizer)
        problems = checkpoint.problems()
        checkpoint._raise_corrupt(problems + (mismatches if problems else []))
        if mismatches:
            raise CheckpointMismatchError(
                f"The checkpoint of step {checkpoint.step} does not fit model '{model.name}' and its optimizer, and "
                "nothing was restored:\n" + "".join(f"- {line}\n" for line in mismatches)
                + f"Build and compile the model as it was. Received: {checkpoint.directory}"
            )  # fmt: skip
        accepted()
        training_state.build_optimizer(model)
        stored = checkpoint.manifest.variables
        seed = training_state.GLOBAL_SEED
        if seed in stored and stored[seed].kind == "seed" and all(v.key != seed for v in variables):
            training_state.make_global_seed(model)
        checkpoint.assign(training_state.collect(model))
