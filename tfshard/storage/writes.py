"""The writes that a step records, and the storages that it writes: steps and storages meet here."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.storage.formats import StorageFormat
from tfshard.storage.graph_edits import OpInput


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """The writes that a step has recorded for a storage.

    Attributes:
        base: The new buffer, not encoded yet; None if the stored buffer is the base.
        written: Full values of members, by number, newer than `base`.
    """

    base: tf.Tensor | None
    written: Mapping[int, tf.Tensor]


class Writable(Protocol):
    """A `Storage`, as far as a step knows it."""

    name: str
    mesh: dtensor.Mesh
    format: StorageFormat

    @property
    def paths(self) -> list[str]:
        """The paths of its variables."""

    @property
    def is_group(self) -> bool:
        """True if several variables share the storage."""

    @property
    def updated_bytes(self) -> int:
        """The bytes of the buffer on a device, in the update layout."""

    @property
    def is_stored_as_updated(self) -> bool:
        """True if the buffer is stored on the devices of the update, in the update layout and dtype."""

    def in_update(self, recorded: Recorded | None) -> tf.Tensor:
        """Return the recorded buffer, or else the stored buffer, in the update layout."""

    def handed_on(self, recorded: Recorded | None) -> tf.Tensor:
        """Return the same buffer, as a branch returns it and a microbatch passes it on."""

    def as_stored(self, recorded: Recorded) -> tf.Tensor:
        """Return the recorded buffer, as it will be stored."""

    def from_stored(self, value: tf.Tensor) -> tf.Tensor:
        """Return a result of `as_stored` as a buffer that a step can record."""

    def write_stored(self, value: tf.Tensor, takers: Sequence[OpInput] = ()) -> None:
        """Assign a result of `as_stored`. In a graph, `takers` take it from the buffer then."""

    def write(self, recorded: Recorded) -> None:
        """Assign the recorded buffer now."""

    def equalize(self) -> bool:
        """Copy the first device's shard to the devices of this client that should hold equal shards. Eager only.

        Returns:
            True if the shards differed.
        """
