"""What a step has written, and what it writes to: steps and storages meet here."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.storage import turns
from tfshard.storage.formats import StorageFormat


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """What a step has written to a storage.

    Attributes:
        base: The buffer that is to be stored, not encoded yet; None for what is stored already.
        written: Whole values of members, by number, newer than `base`.
    """

    base: tf.Tensor | None
    written: Mapping[int, tf.Tensor]


class Writable(Protocol):
    """What a step writes to: a `Storage`, as far as a step knows it."""

    name: str
    mesh: dtensor.Mesh
    format: StorageFormat

    @property
    def paths(self) -> list[str]:
        """Of the variables that live in it."""

    @property
    def is_group(self) -> bool:
        """Whether several variables live in it."""

    @property
    def updated_bytes(self) -> int:
        """Of the buffer on a device, as it is updated."""

    @property
    def rests_as_updated(self) -> bool:
        """Whether it rests where and as it is updated."""

    def in_update(self, recorded: Recorded | None) -> tf.Tensor:
        """What is recorded of the buffer, else what is stored, in the layout in which it is updated."""

    def handed_on(self, recorded: Recorded | None) -> tf.Tensor:
        """The same, as a branch gives it out and a part hands it on."""

    def at_rest(self, recorded: Recorded) -> tf.Tensor:
        """What is recorded, as it is stored."""

    def from_rest(self, value: tf.Tensor) -> tf.Tensor:
        """Return what `at_rest` made, as a buffer that can be recorded."""

    def write_at_rest(self, value: tf.Tensor, users: Sequence[turns.Slot] = ()) -> None:
        """Assigns what `at_rest` made. In a graph, `users` take it from the buffer then."""

    def write(self, recorded: Recorded) -> None:
        """Both, now."""

    def equalize(self) -> bool:
        """Gives devices of this client that should hold the same the value of the first. Eager only.

        Returns:
            Whether they differed.
        """
