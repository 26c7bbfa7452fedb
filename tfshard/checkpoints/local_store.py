"""LocalStore: checkpoints in a directory of a file system, committed by one rename.

The writer writes everything to a directory with a temporary name and syncs it. Then one rename gives the directory its
name. A directory named `step-...` is therefore complete, whenever the process was killed. Saving a step again makes a
new generation, `step-00000012.1`, and the highest generation wins: at every moment, the old or the new generation
exists. The writer renames a directory to a temporary name before deleting it.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfshard.checkpoints import bundles, files, manifest, stores
from tfshard.checkpoints.held_shards import HeldShard
from tfshard.checkpoints.manifest import StoredFile
from tfshard.checkpoints.stores import Wanted
from tfshard.errors import CheckpointCorruptError, CheckpointError


class LocalAttempt(stores.Attempt):
    """A directory with a temporary name."""

    def __init__(self, root: pathlib.Path, step: int):
        self.root = root
        self.step = step
        self.temporary = root / files.temporary_name(step)
        self._lock: int | None = None
        self._generation = 0

    @property
    def place(self) -> pathlib.Path:
        return self.root / files.name_of(self.step, self._generation)

    @property
    def generation(self) -> int:
        return self._generation

    def begin(self) -> None:
        files.make(self.root)
        self._take_lock()
        for name in os.listdir(self.root):
            if files.is_temporary(name):
                shutil.rmtree(self.root / name)
        os.mkdir(self.temporary)

    def _take_lock(self) -> None:
        self._lock = os.open(self.root / files.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise CheckpointError(
                "Another process, or another CheckpointManager, is saving to this directory. Give each training run "
                f"a separate directory. Received: directory='{self.root}'"
            ) from None

    def join(self, rank: int) -> None:
        there = files.committed(self.root)
        self._generation = there[self.step] + 1 if self.step in there else 0

    def write_shards(self, rank: int, count: int, held: Sequence[HeldShard], wait: stores.Wait) -> None:
        if held:
            prefix = files.DATA if count == 1 else files.part_prefix(rank)
            bundles.save_shards(self.temporary / prefix, held)

    def write_states(self, prefix: str, states: Sequence[tf.Tensor]) -> None:
        bundles.save_states(self.temporary / prefix, states)

    def publish(self, rank: int, listed: bytes) -> None:
        for prefix in (files.part_prefix(rank), files.iterator_prefix(rank)):
            for path in files.with_prefix(self.temporary, prefix):
                files.sync(path)
        files.publish(self.temporary / files.part_list(rank), listed)

    def has_published(self, count: int) -> bool:
        return all((self.temporary / files.part_list(rank)).exists() for rank in range(count))

    def gather(self, count: int) -> list[bytes]:
        lists = [self.temporary / files.part_list(rank) for rank in range(count)]
        listed = [each.read_bytes() for each in lists]
        for each in lists:
            os.unlink(each)
        parts = [self.temporary / files.part_prefix(rank) for rank in range(count)]
        bundles.merge([part for part in parts if files.holds_tensors(part)], self.temporary / files.DATA)
        return listed

    def files(self) -> dict[str, StoredFile]:
        found = {}
        for path in sorted(self.temporary.iterdir()):
            files.sync(path)
            digest = None
            if manifest.needs_sha256(path.name):
                with open(path, "rb") as file:
                    digest = files.sha256(file)
            found[path.name] = StoredFile(bytes=path.stat().st_size, sha256=digest)
        return found

    def commit(self, content: bytes) -> None:
        files.write(self.temporary / files.MANIFEST, content)
        files.sync(self.temporary)
        # Before this rename nothing is committed; after it, everything is.
        os.rename(self.temporary, self.place)
        files.sync(self.root)

    def is_committed(self) -> bool:
        return self.place.exists()

    def is_given_up(self) -> bool:
        return not self.temporary.exists()

    def end(self, *, failed: bool) -> None:
        if self._lock is not None:
            if failed:
                shutil.rmtree(self.temporary, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


class LocalStore(stores.Store):
    """A directory on a file system that all clients see, with file locks."""

    directory: pathlib.Path
    poll_seconds = 0.05
    shares_verification = False

    def __init__(self, directory: pathlib.Path):
        self.directory = directory

    def checkpoints(self) -> list[tuple[int, int]]:
        return files.checkpoints(self.directory)

    def place(self, name: str) -> pathlib.Path:
        return self.directory / name

    def attempt(self, step: int) -> LocalAttempt:
        return LocalAttempt(self.directory, step)

    def remove(self, name: str) -> None:
        files.remove(self.directory / name)

    def manifest(self, name: str, limit: int) -> bytes:
        directory = self.directory / name
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            raise CheckpointCorruptError(
                f"A checkpoint must be a directory, and not a link to one. Received: {directory}"
            )
        with files.open_regular(directory / files.MANIFEST) as file:
            return file.read(limit)

    def sizes(self, name: str) -> dict[str, int | None]:
        with os.scandir(self.directory / name) as entries:
            present = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        return {name: found.st_size if stat.S_ISREG(found.st_mode) else None for name, found in present.items()}

    def sha256(self, name: str, file: str) -> str:
        with files.open_regular(self.directory / name / file) as opened:
            return files.sha256(opened)

    def read(self, name: str, wanted: Sequence[Wanted]) -> list[np.ndarray]:
        # On the host, because an operation that fails on a mesh leaves the mesh unusable.
        with tf.device("CPU:0"):
            tensors = tf.raw_ops.RestoreV2(
                prefix=str(self.directory / name / files.DATA),
                tensor_names=[key for key, _, _ in wanted],
                shape_and_slices=[files.spec(stored.shape, box) for _, stored, box in wanted],
                dtypes=[tf.as_dtype(stored.dtype) for _, stored, _ in wanted],
            )
        return [np.asarray(tensor) for tensor in tensors]

    @contextlib.contextmanager
    def bundle(self, name: str, prefix: str) -> Iterator[pathlib.Path]:
        yield self.directory / name / prefix
