"""Snapshot and Writing: a training run to a checkpoint.

The data are in TensorFlow's tensor-bundle format, with each variable in its full shape. `tf.train.load_checkpoint`
reads them. `local_store` and `remote_store` say why a checkpoint is complete or absent.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfshard import __version__, _private
from tfshard.checkpoints import files, held_shards, manifest
from tfshard.checkpoints.manifest import Manifest, Position, StoredShard, StoredVariable
from tfshard.checkpoints.stores import Store
from tfshard.checkpoints.training_state import StateVariable
from tfshard.devices import checksums, clients
from tfshard.errors import CheckpointError
from tfshard.training.strategy import ShardedStrategy

# How long a client waits for the shards of the others.
_CLIENTS_SECONDS = 1800


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

    def __init__(self, store: Store, keep: int | None, step: int):
        self.store = store
        self.keep = keep
        self.step = step
        self.attempt = store.attempt(step)
        self._here = clients.here()

    @property
    def final(self) -> pathlib.Path | str:
        return self.attempt.place

    def begin(self, keys: Sequence[str]) -> None:
        """Prepare the directory: the first client removes leftovers of earlier writers, the others wait for it.

        Args:
            keys: The keys of the variables, equal on all clients.
        """
        if self._here.rank == 0:
            self.attempt.begin()
        told = {"variables": len(keys), "their names": checksums.of_text("\n".join(keys))}
        self._here.agree(f"checkpoint-{self.step}", told, error=CheckpointError)
        self.attempt.join(self._here.rank)

    def end(self, *, failed: bool) -> None:
        """Let others write. After a failure, delete what was written, as far as possible."""
        self.attempt.end(failed=failed)

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
        found: dict[str, list[StoredShard]] = {}
        for shard in snapshot.held:
            found.setdefault(shard.variable.key, []).append(
                StoredShard(box=shard.box, checksum=checksums.of_array(shard.array()))
            )
        self.attempt.write_shards(self._here.rank, self._here.count, snapshot.held, self._wait_for)
        if snapshot.position is not None and self._here.rank < snapshot.position.clients:
            self.attempt.write_states(files.iterator_prefix(self._here.rank), snapshot.states)
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

    # --- several clients: they meet in the directory, because a collective in this thread would meet the collectives of
    # a step

    def _publish(self, stored: dict[str, StoredVariable]) -> None:
        """Tell the first client which boxes this client wrote."""
        self.attempt.publish(self._here.rank, manifest.encode_part(stored))

    def _gather(self) -> dict[str, StoredVariable]:
        """Return the variables with the boxes of all clients, and merge their data into one bundle."""
        count = self._here.count
        self._wait_for(lambda: self.attempt.has_published(count), "the shards of the other clients")
        return manifest.decode_parts(self.attempt.gather(count), str(self.final))

    def _await_commit(self) -> None:
        self._wait_for(
            lambda: self.attempt.is_committed() or self.attempt.is_given_up(),
            "the first client to commit the checkpoint",
        )
        if not self.attempt.is_committed():
            raise CheckpointError(f"The first client did not commit the checkpoint. Received: {self.final}")

    def _wait_for(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _CLIENTS_SECONDS
        while not there():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Waited {_CLIENTS_SECONDS} seconds for {what}. All clients must save to one directory that each "
                    f"client can read. Received: directory='{self.store.directory}'"
                )
            time.sleep(self.store.poll_seconds)

    # --- the first client

    def _commit(self, snapshot: Snapshot, stored: dict[str, StoredVariable]) -> None:
        written = Manifest(
            step=self.step,
            generation=self.attempt.generation,
            versions=_versions(),
            plan=snapshot.plan,
            position=snapshot.position,
            variables=stored,
            files=self.attempt.files(),
        )
        self.attempt.commit(manifest.encode(written))

    def _prune(self) -> None:
        there = self.store.committed()
        # A run that resumed from an older step still has the later steps, so the step just saved must be kept
        # explicitly.
        kept = {self.step, *(sorted(there)[-self.keep :] if self.keep is not None else there)}
        for step, generation in self.store.checkpoints():
            if step not in kept or generation != there[step]:
                self.store.remove(files.name_of(step, generation))


def _versions() -> dict[str, str]:
    return {"tfshard": __version__, "tensorflow": tf.__version__, "keras": keras.__version__}
