"""Snapshot and Writing: a training run to a checkpoint.

# Note: why a checkpoint is complete or absent

The writer writes everything to a directory with a temporary name and syncs it. Then one rename gives the directory its
name. A directory named `step-...` is therefore complete, whenever the process was killed. Saving a step again makes a
new generation, `step-00000012.1`, and the highest generation wins: at every moment, the old or the new generation
exists. The writer renames a directory to a temporary name before deleting it.

The data are in TensorFlow's tensor-bundle format, with each variable in its full shape. `tf.train.load_checkpoint`
reads them.
"""

import dataclasses
import fcntl
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfshard import __version__, _private
from tfshard.checkpoints import files, held_shards, manifest
from tfshard.checkpoints.manifest import Manifest, Position, StoredFile, StoredShard, StoredVariable
from tfshard.checkpoints.training_state import StateVariable
from tfshard.devices import checksums, clients
from tfshard.errors import CheckpointError
from tfshard.training.strategy import ShardedStrategy

# How long a client waits for the shards of the others.
_CLIENTS_SECONDS = 1800
_POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A training run at one step, as far as this client writes it, in tensors on the host.

    Attributes:
        step: Training steps so far.
        plan: Mesh, ZeRO stage and the like, for information.
        variables: Every variable of the run.
        held: The boxes that this client writes.
        position: The position in the data, or None.
        states: The states of `tf.data` iterators, which are restored in this order.
    """

    step: int
    plan: dict[str, object]
    variables: Sequence[StateVariable]
    held: Sequence[held_shards.HeldShard]
    position: Position | None
    states: Sequence[tf.Tensor]

    @classmethod
    def take(
        cls,
        model: keras.Model,
        variables: Sequence[StateVariable],
        step: int,
        position: Position | None,
        states: Sequence[tf.Tensor],
    ) -> "Snapshot":
        """Take a snapshot of the current values."""
        return cls(
            step=step,
            plan=_plan(model),
            variables=variables,
            held=held_shards.held(variables, first_client=clients.here().rank == 0),
            position=position,
            states=states,
        )


def _plan(model: keras.Model) -> dict[str, object]:
    strategy = _private.distribute_strategy(model)
    if not isinstance(strategy, ShardedStrategy):
        return {"mesh": None}
    return {
        "mesh": strategy.mesh_shape.given,
        "zero_stage": strategy.zero_stage.value,
        "layout_map": repr(strategy.layout_map),
        "analyzer": repr(strategy.config.analyzer),
        "clients": clients.here().count,
    }


class Writing:
    """The writing of one checkpoint, in steps that any thread can do after `begin`."""

    def __init__(self, root: pathlib.Path, keep: int | None, step: int):
        self.root = root
        self.keep = keep
        self.step = step
        self.temporary = root / files.temporary_name(step)
        self._here = clients.here()
        self._lock: int | None = None
        self._generation = 0

    @property
    def final(self) -> pathlib.Path:
        return self.root / files.name_of(self.step, self._generation)

    def begin(self, keys: Sequence[str]) -> None:
        """Prepare the directory: the first client removes leftovers of earlier writers, the others wait for it.

        Args:
            keys: The keys of the variables, equal on all clients.
        """
        if self._here.rank == 0:
            files.make(self.root)
            self._take_lock()
            for name in os.listdir(self.root):
                if files.is_temporary(name):
                    shutil.rmtree(self.root / name)
            os.mkdir(self.temporary)
        told = {"variables": len(keys), "their names": checksums.of_text("\n".join(keys))}
        self._here.agree(f"checkpoint-{self.step}", told, error=CheckpointError)
        there = files.committed(self.root)
        self._generation = there[self.step] + 1 if self.step in there else 0

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

    def end(self, *, failed: bool) -> None:
        """Release the lock. After a failure, delete the temporary directory as far as possible."""
        if self._lock is not None:
            if failed:
                shutil.rmtree(self.temporary, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def run(self, snapshot: Snapshot) -> None:
        """Write and commit the checkpoint, and delete the steps that `keep` does not keep."""
        stored = self._write_shards(snapshot)
        if self._here.count > 1:
            self._publish(stored)
            if self._here.rank > 0:
                self._await_commit()
                return
            stored = self._gather()
        self._commit(snapshot, stored)
        self._prune()

    def _write_shards(self, snapshot: Snapshot) -> dict[str, StoredVariable]:
        """Write this client's boxes and iterator states to separate files."""
        names, specs, tensors = [], [], []
        found: dict[str, list[StoredShard]] = {}
        for shard in snapshot.held:
            array = shard.array()
            found.setdefault(shard.variable.key, []).append(
                StoredShard(box=shard.box, checksum=checksums.of_array(array))
            )
            names.append(shard.variable.key)
            specs.append(files.spec(shard.variable.shape, shard.box))
            tensors.append(shard.tensor if shard.is_tensor else tf.constant(array))
        with tf.device("CPU:0"):
            if names:
                tf.raw_ops.SaveV2(
                    prefix=str(self._prefix()), tensor_names=names, shape_and_slices=specs, tensors=tensors
                )
            if snapshot.position is not None and self._here.rank < snapshot.position.clients:
                tf.raw_ops.SaveV2(
                    prefix=str(self.temporary / files.iterator_prefix(self._here.rank)),
                    tensor_names=[files.state_name(i) for i in range(len(snapshot.states))],
                    shape_and_slices=[""] * len(snapshot.states),
                    tensors=snapshot.states,
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
                shards=tuple(found.get(variable.key, ())),
            )
        return stored

    def _prefix(self) -> pathlib.Path:
        single = self._here.count == 1
        return self.temporary / (files.DATA if single else files.part_prefix(self._here.rank))

    # --- several clients: they meet in the directory, because a collective in this thread would meet the collectives of
    # a step

    def _publish(self, stored: dict[str, StoredVariable]) -> None:
        """Tell the first client which boxes this client wrote."""
        rank = self._here.rank
        for prefix in (files.part_prefix(rank), files.iterator_prefix(rank)):
            for path in files.with_prefix(self.temporary, prefix):
                files.sync(path)
        files.publish(self.temporary / files.part_list(rank), manifest.encode_part(stored))

    def _gather(self) -> dict[str, StoredVariable]:
        """Return the variables with the boxes of all clients, and merge their data into one bundle."""
        ranks = range(self._here.count)
        lists = [self.temporary / files.part_list(rank) for rank in ranks]
        self._wait_for(lambda: all(each.exists() for each in lists), "the shards of the other clients")
        stored = manifest.decode_parts([each.read_bytes() for each in lists], str(self.temporary))
        for each in lists:
            os.unlink(each)
        parts = [self.temporary / files.part_prefix(rank) for rank in ranks]
        with tf.device("CPU:0"):
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[str(part) for part in parts if files.holds_tensors(part)],
                destination_prefix=str(self.temporary / files.DATA),
                delete_old_dirs=False,
            )
        return stored

    def _await_commit(self) -> None:
        self._wait_for(
            lambda: self.final.exists() or not self.temporary.exists(), "the first client to commit the checkpoint"
        )
        if not self.final.exists():
            raise CheckpointError(f"The first client did not commit the checkpoint. Received: {self.final}")

    def _wait_for(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _CLIENTS_SECONDS
        while not there():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Waited {_CLIENTS_SECONDS} seconds for {what}. All clients must save to one directory that each "
                    f"client can read. Received: directory='{self.root}'"
                )
            time.sleep(_POLL_SECONDS)

    # --- the first client

    def _commit(self, snapshot: Snapshot, stored: dict[str, StoredVariable]) -> None:
        written_files = {}
        for path in sorted(self.temporary.iterdir()):
            files.sync(path)
            digest = None
            if manifest.needs_sha256(path.name):
                with open(path, "rb") as file:
                    digest = files.sha256(file)
            written_files[path.name] = StoredFile(bytes=path.stat().st_size, sha256=digest)
        written = Manifest(
            step=self.step,
            generation=self._generation,
            versions=_versions(),
            plan=snapshot.plan,
            position=snapshot.position,
            variables=stored,
            files=written_files,
        )
        files.write(self.temporary / files.MANIFEST, manifest.encode(written))
        files.sync(self.temporary)
        # Before this rename nothing is committed; after it, everything is.
        os.rename(self.temporary, self.final)
        files.sync(self.root)

    def _prune(self) -> None:
        there = files.committed(self.root)
        # A run that resumed from an older step still has the later steps, so the step just saved must be kept
        # explicitly.
        kept = {self.step, *(sorted(there)[-self.keep :] if self.keep is not None else there)}
        for step, generation in files.checkpoints(self.root):
            if step not in kept or generation != there[step]:
                files.remove(self.root / files.name_of(step, generation))


def _versions() -> dict[str, str]:
    return {"tfshard": __version__, "tensorflow": tf.__version__, "keras": keras.__version__}
