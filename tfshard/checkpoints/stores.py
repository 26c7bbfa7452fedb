"""Store and Attempt: the place of a run's checkpoints, and one checkpoint that is being written there.

`local_store` and `remote_store` have the two kinds. `writer` and `reader` know only these interfaces.
"""

import abc
import contextlib
import pathlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfshard.checkpoints.bundle_index import BadIndexError
from tfshard.checkpoints.held_shards import HeldShard
from tfshard.checkpoints.manifest import StoredFile, StoredVariable
from tfshard.layouts.boxes import Box

# The errors of `Store.read` for data that are damaged or missing.
READ_ERRORS = (tf.errors.OpError, OSError, BadIndexError)

Wanted: TypeAlias = tuple[str, StoredVariable, Box]
"""A box to read: the key of the variable, the variable, the box in its shape."""

Wait: TypeAlias = Callable[[Callable[[], bool], str], None]
"""Waits until a function returns True. The text says what for."""


class Attempt(abc.ABC):
    """A checkpoint that is being written. It does not exist for readers before `commit` returns.

    The first client calls `begin` before any client calls `join`. Each client then writes its shards and states. With
    several clients, each client calls `publish`, and the first client `gather`.
    """

    @property
    @abc.abstractmethod
    def place(self) -> pathlib.Path | str:
        """The path or URL of the checkpoint once it is committed. Known after `join`."""

    @property
    @abc.abstractmethod
    def generation(self) -> int:
        """How often this step was saved before. Known after `join`."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Exclude other writers, and delete what killed saves left.

        Raises:
            CheckpointError: Another writer is at work.
        """

    @abc.abstractmethod
    def join(self, rank: int) -> None:
        """Prepare to write, after the first client has begun."""

    @abc.abstractmethod
    def write_shards(self, rank: int, count: int, held: Sequence[HeldShard], wait: Wait) -> None:
        """Write the boxes of this client."""

    @abc.abstractmethod
    def write_states(self, prefix: str, states: Sequence[tf.Tensor]) -> None:
        """Write the states of this client's iterators to files with a prefix."""

    @abc.abstractmethod
    def publish(self, rank: int, listed: bytes) -> None:
        """Tell the first client that this client has written everything, with the list of its boxes."""

    @abc.abstractmethod
    def has_published(self, count: int) -> bool:
        """Return True if all of `count` clients have published."""

    @abc.abstractmethod
    def gather(self, count: int) -> list[bytes]:
        """Merge the data of all clients, and return the lists that they published."""

    @abc.abstractmethod
    def files(self) -> dict[str, StoredFile]:
        """Return the files of the checkpoint, after all of them are durable."""

    @abc.abstractmethod
    def commit(self, content: bytes) -> None:
        """Make the checkpoint exist, in one atomic operation, with this manifest."""

    @abc.abstractmethod
    def is_committed(self) -> bool:
        """Return True if the checkpoint exists."""

    @abc.abstractmethod
    def is_given_up(self) -> bool:
        """Return True if the first client has ended, with a commit or without."""

    @abc.abstractmethod
    def end(self, *, failed: bool) -> None:
        """Let other writers write. After a failure, delete what was written, as far as possible."""


class Store(abc.ABC):
    """The directory of the checkpoints of one training run.

    Attributes:
        directory: Its path or URL.
        poll_seconds: How long a client that waits for others pauses between two looks.
        shares_verification: True if each client verifies its share of the data, because reading is expensive.
    """

    directory: pathlib.Path | str
    poll_seconds: float
    shares_verification: bool

    @abc.abstractmethod
    def checkpoints(self) -> list[tuple[int, int]]:
        """Return step and generation of each committed checkpoint, in order."""

    def committed(self) -> dict[int, int]:
        """Return the committed steps, with the highest generation of each."""
        return dict(self.checkpoints())

    @abc.abstractmethod
    def place(self, name: str) -> pathlib.Path | str:
        """Return the path or URL of a checkpoint."""

    @abc.abstractmethod
    def attempt(self, step: int) -> Attempt:
        """Return a checkpoint to write."""

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Delete a checkpoint. From the first moment on, it does not exist for readers."""

    # --- reading a committed checkpoint

    @abc.abstractmethod
    def manifest(self, name: str, limit: int) -> bytes:
        """Return the first `limit` bytes of the manifest.

        Raises:
            OSError: The manifest cannot be read.
        """

    @abc.abstractmethod
    def sizes(self, name: str) -> dict[str, int | None]:
        """Return the size of each file of a checkpoint; None if it is not a regular file."""

    @abc.abstractmethod
    def sha256(self, name: str, file: str) -> str:
        """Return the SHA-256 of a file of a checkpoint.

        Raises:
            OSError: The file cannot be read.
        """

    @abc.abstractmethod
    def read(self, name: str, wanted: Sequence[Wanted]) -> list[np.ndarray]:
        """Return boxes of variables.

        Raises:
            Exception: One of `READ_ERRORS`.
        """

    @abc.abstractmethod
    def bundle(self, name: str, prefix: str) -> contextlib.AbstractContextManager[pathlib.Path]:
        """Return a context with the local prefix of a bundle of a checkpoint, for TensorFlow's reader."""
