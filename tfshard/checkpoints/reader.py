"""Checkpoint: a committed checkpoint, which is verified in full before any of it is used.

The reader does not use TensorFlow's restore, which is not atomic and ignores missing keys. When TensorFlow's restore
fails on a mesh, no later operation on the mesh works. The reader instead reads and compares everything first, on the
host.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence, Set

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.checkpoints import bundles, files, held_shards, manifest, training_state
from tfshard.checkpoints.manifest import Manifest, Position, StoredShard, StoredVariable
from tfshard.checkpoints.stores import READ_ERRORS, Store
from tfshard.checkpoints.training_state import StateVariable
from tfshard.devices import checksums, clients
from tfshard.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from tfshard.layouts import boxes
from tfshard.layouts.boxes import Box
from tfshard.training import datasets

# The bytes of boxes that are read at once for verification.
_CHUNK_BYTES = 1 << 26


def _names(optimizers: Set[str]) -> list[str]:
    """Return names of optimizers for messages; the compiled optimizer has none."""
    return [name or "(the compiled one)" for name in sorted(optimizers)]


class Checkpoint:
    """A committed checkpoint.

    Attributes:
        directory: The directory of the checkpoint: a path, or the URL of a remote directory.
        manifest: The contents, a `tfshard.checkpoints.manifest.Manifest`.
    """

    def __init__(self, store: Store, name: str, found: Manifest):
        self.directory = store.place(name)
        self.manifest = found
        self._store = store
        self._name = name

    @property
    def step(self) -> int:
        """Training steps so far."""
        return self.manifest.step

    @property
    def position(self) -> Position | None:
        """The position in the data, or None if none was saved."""
        return self.manifest.position

    def __repr__(self) -> str:
        return f"<Checkpoint step={self.step} in '{self.directory}'>"

    @classmethod
    def open(cls, store: Store, name: str) -> "Checkpoint":
        """Read a manifest and check that exactly the files that it names exist.

        Raises:
            CheckpointCorruptError: A file is wrong; the message names every fault.
        """
        directory = store.place(name)
        try:
            content = store.manifest(name, manifest.MAX_BYTES + 1)
        except OSError as error:
            raise CheckpointCorruptError(
                f"The manifest of a checkpoint cannot be read: {error.strerror or error}. Received: {directory}"
            ) from error
        found = cls(store, name, manifest.decode(content, f"{directory}/{files.MANIFEST}"))
        found._raise_corrupt(found._file_problems())
        return found

    def _file_problems(self) -> list[str]:
        problems = []
        if self._name != files.name_of(self.manifest.step, self.manifest.generation):
            problems.append(f"it was written as {files.name_of(self.manifest.step, self.manifest.generation)}")
        present = self._store.sizes(self._name)
        del present[files.MANIFEST]
        for name in sorted(present.keys() - self.manifest.files.keys()):
            problems.append(f"file '{name}' does not belong to it")
        for name, file in self.manifest.files.items():
            if name not in present:
                problems.append(f"file '{name}' is missing")
            elif present[name] is None:
                problems.append(f"file '{name}' is not a regular file")
            elif present[name] != file.bytes:
                problems.append(f"file '{name}' has {present[name]} bytes instead of {file.bytes}")
        claimed = sum(self._bytes(stored, shard.box) for stored, shard in self._stored_shards())
        held = sum(file.bytes for file in self.manifest.files.values() if file.sha256 is None)
        if claimed != held:
            problems.append(f"its shards have {claimed} bytes, but its data files have {held}")
        return problems

    def _raise_corrupt(self, problems: list[str]) -> None:
        if problems:
            raise CheckpointCorruptError(
                f"The checkpoint of step {self.step} is damaged, and nothing was restored:\n"
                + "".join(f"- {problem}\n" for problem in problems)
                + f"Restore another step (CheckpointManager.steps() lists them). Received: {self.directory}"
            )

    def _stored_shards(self) -> Iterator[tuple[StoredVariable, StoredShard]]:
        for stored in self.manifest.variables.values():
            for shard in stored.shards:
                yield stored, shard

    @staticmethod
    def _bytes(stored: StoredVariable, box: Box) -> int:
        return box.elements * int(tf.as_dtype(stored.dtype).size)

    def verify(self) -> None:
        """Read everything and compare it with the checksums.

        Raises:
            CheckpointCorruptError: The message names every file and every box that differs.
        """
        self._raise_corrupt(self.problems())

    def problems(self, share: int = 0, shares: int = 1) -> list[str]:
        """Return the faults that `verify` reports, or those in one of several shares of the data."""
        problems = self._file_problems()
        for name, file in self.manifest.files.items():
            if file.sha256 is None:
                continue
            try:
                if self._store.sha256(self._name, name) != file.sha256:
                    problems.append(f"file '{name}' has another checksum")
            except OSError as error:
                problems.append(f"file '{name}' cannot be read: {error}")
        if problems:
            return problems  # TensorFlow must not read files that are known to be wrong.
        for chunk in itertools.islice(self._chunks(), share, None, shares):
            try:
                arrays: Iterable[np.ndarray | None] = self._read(
                    [(key, stored, shard.box) for key, stored, shard in chunk]
                )
            except CheckpointCorruptError:
                arrays = itertools.repeat(None)  # The single reads below tell which box is damaged.
            for (key, stored, shard), array in zip(chunk, arrays, strict=False):
                problem = self._shard_problem(key, stored, shard, array)
                if problem is not None:
                    problems.append(f"the shard of '{key}' at {shard.box.offset} of shape={shard.box.shape} {problem}")
        return problems

    def _shard_problem(
        self, key: str, stored: StoredVariable, shard: StoredShard, array: np.ndarray | None
    ) -> str | None:
        if array is None:
            try:
                (array,) = self._read([(key, stored, shard.box)])
            except CheckpointCorruptError as error:
                return f"cannot be read ({error.__cause__!s:.80})"
        if array.shape != shard.box.shape:
            return f"has shape={array.shape}"
        return None if checksums.of_array(array) == shard.checksum else "has another checksum"

    def _chunks(self) -> Iterator[list[tuple[str, StoredVariable, StoredShard]]]:
        """Yield the boxes in chunks that are read at once."""
        chunk: list[tuple[str, StoredVariable, StoredShard]] = []
        size = 0
        for key, stored in self.manifest.variables.items():
            for shard in stored.shards:
                chunk.append((key, stored, shard))
                size += self._bytes(stored, shard.box)
                if size >= _CHUNK_BYTES:
                    yield chunk
                    chunk, size = [], 0
        if chunk:
            yield chunk

    def _read(self, wanted: Sequence[tuple[str, StoredVariable, Box]]) -> list[np.ndarray]:
        try:
            return self._store.read(self._name, wanted)
        except READ_ERRORS as error:
            raise CheckpointCorruptError(
                f"The data of the checkpoint of step {self.step} cannot be read. Received: {self.directory}"
            ) from error

    def read(self, key: str, box: Box | None = None) -> np.ndarray:
        """Return a variable, or a box of it, as an array."""
        stored = self.manifest.variables[key]
        box = boxes.full_box(stored.shape) if box is None else box
        if not box.elements:
            return np.zeros(box.shape, tf.as_dtype(stored.dtype).as_numpy_dtype)
        return self._read([(key, stored, box)])[0]

    def mismatches(self, variables: Iterable[StateVariable], optimizers: Set[str], *, left_out: bool) -> list[str]:
        """Return the differences between the checkpoint and the variables of a model.

        Args:
            variables: The result of `training_state.collect`.
            optimizers: The names of the optimizers among the variables. Without a compiled optimizer, the compiled
                optimizer of the checkpoint is not needed.
            left_out: True to ignore other optimizers in the checkpoint.
        """
        found = {v.key: v for v in variables if v.kind not in ("metric", "seed", training_state.REDUCTION)}
        theirs = {name for key in self.manifest.variables if (name := training_state.optimizer_of(key)) is not None}
        lines = []
        for name in sorted(optimizers - theirs - {""}):
            lines.append(
                f"optimizer '{name}' is not in the checkpoint, which has optimizers {_names(theirs)}: pass restore "
                "the optimizers that were passed to save (optimizers=), or optimizers=() for none"
            )
        for name in sorted(theirs - optimizers - {""}) if not left_out else ():
            count = sum(training_state.optimizer_of(key) == name for key in self.manifest.variables)
            lines.append(
                f"optimizer '{name}' ({count} variables) is in the checkpoint, but the model has optimizers "
                f"{_names(optimizers)}: pass it to restore (optimizers={{'{name}': ...}}), or skip it (optimizers=())"
            )
        for key, variable in found.items():
            stored = self.manifest.variables.get(key)
            if (training_state.optimizer_of(key) or "") not in theirs | {""}:
                continue
            if stored is None:
                lines.append(f"'{key}' of shape={variable.shape} is not in the checkpoint")
            elif stored.shape != variable.shape:
                lines.append(f"'{key}' has shape={stored.shape} in the checkpoint and {variable.shape} in the model")
            elif stored.dtype != variable.dtype:
                lines.append(f"'{key}' is {stored.dtype} in the checkpoint and {variable.dtype} in the model")
        for key, stored in self.manifest.variables.items():
            needed = stored.kind in ("parameter", "state") or training_state.optimizer_of(key) in optimizers
            if needed and key not in found:
                lines.append(f"'{key}' of shape={stored.shape} is not in the model")
        return lines

    def assign(self, variables: Iterable[StateVariable]) -> None:
        """Assign the stored values to variables.

        Variables that are not stored, or are stored in another shape or dtype, keep their values. The state that
        reductions of gradients keep does not change here: `reduction_state` restores it.
        """
        stored = self.manifest.variables
        fitting = [
            v
            for v in variables
            if v.key in stored
            and (stored[v.key].shape, stored[v.key].dtype) == (v.shape, v.dtype)
            and v.kind != training_state.REDUCTION
        ]
        held_shards.assign(fitting, lambda variable, box: self.read(variable.key, box))

    def restore_iterators(self, iterators: Sequence[object], model: keras.Model) -> None:
        """Move new `tf.data` iterators of the saved dataset to the saved positions.

        Args:
            iterators: The iterators, one for each saved state, in the same order.
            model: The trained model; its strategy says if each client feeds its local part of a batch.

        Raises:
            CheckpointError: The checkpoint has no iterator states, or the states belong to another dataset.
            CheckpointMismatchError: Each client saved a state, and the number of clients differs.
        """
        saved = 0 if self.position is None else self.position.clients
        if not saved:
            raise CheckpointError(
                f"The checkpoint of step {self.step} was saved without an iterator: pass `save` the iterator that "
                f"you want to restore. Received: {self.directory}"
            )
        savers = datasets.iterator_savers(_private.distribute_strategy(model))
        if saved != savers:
            raise CheckpointMismatchError(
                f"The checkpoint of step {self.step} holds the positions of {saved} clients in their data, but this "
                f"run has {savers}. With already_sharded=True, resume with the same number of clients. Without it, "
                f"all clients share one position, and any number of clients can resume. Received: {self.directory}"
            )
        try:
            prefix = files.iterator_prefix(clients.here().rank % saved)
            with tf.device("CPU:0"), self._store.bundle(self._name, prefix) as path:
                states = bundles.read_states(path, len(iterators))
                for iterator, state in zip(iterators, states, strict=True):
                    datasets.restore_iterator(iterator, state)
        except tf.errors.OpError as error:
            raise CheckpointError(
                f"The position in the data of the checkpoint of step {self.step} does not fit this dataset. Build "
                f"the dataset as it was when the checkpoint was saved. TensorFlow says: {error!s:.200}. Received: "
                f"{self.directory}"
            ) from error
