"""Chunks of sequences: how a context axis splits a batch. Pure NumPy.

A context axis of c devices splits a batch `(B, T, ...)` along dim 1. DTensor's mesh has no such axis. For DTensor and
the model, the batch is `(B * c, T / c, ...)`, with a row for each chunk of a sequence, and the data axis shards the
rows. Consecutive devices of the data axis have the chunks of the same samples, in order.
"""

import dataclasses

import numpy as np

from tfshard.layouts.axes import MeshAxes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceChunks:
    """The way in which a mesh splits sequences.

    Attributes:
        contexts: The number of chunks of a sequence.
        sample_shards: The number of devices with different samples.

    Example:

    >>> import numpy as np
    >>> chunks = SequenceChunks(contexts=2, sample_shards=1)
    >>> chunks.rows_of(np.array([[1, 2, 3, 4], [5, 6, 7, 8]])).tolist()
    [[1, 2], [5, 6], [3, 4], [7, 8]]
    """

    contexts: int
    sample_shards: int

    @classmethod
    def of(cls, axes: MeshAxes) -> "SequenceChunks":
        """Return the chunks of a mesh with these axes."""
        return cls(contexts=axes.contexts, sample_shards=axes.sample_shards)

    def shards(self, samples: int) -> int:
        """Return the number of shards of a batch with this many samples; 1 if every device has all samples."""
        return self.sample_shards if samples and samples % self.sample_shards == 0 else 1

    def rows_of(self, sequences: np.ndarray) -> np.ndarray:
        """Return sequences `(B, T, ...)` as rows of chunks, `(B * c, T / c, ...)`. The context axis must divide T."""
        batch, length, *rest = sequences.shape
        shards = self.shards(batch)
        split = np.reshape(sequences, (shards, batch // shards, self.contexts, length // self.contexts, *rest))
        return np.moveaxis(split, 2, 1).reshape(batch * self.contexts, length // self.contexts, *rest)

    def repeated(self, samples: np.ndarray) -> np.ndarray:
        """Repeat `(B, ...)` for each chunk of a sample: `(B * c, ...)`, in the order of `rows_of`."""
        batch, *rest = samples.shape
        shards = self.shards(batch)
        split = np.reshape(samples, (shards, 1, batch // shards, *rest))
        rows: np.ndarray = np.repeat(split, self.contexts, axis=1).reshape(batch * self.contexts, *rest)
        return rows

    def sequences_of(self, rows: np.ndarray) -> np.ndarray:
        """Return rows `(B * c, T / c, ...)` as sequences `(B, T, ...)`: the inverse of `rows_of`."""
        count, length, *rest = rows.shape
        batch = count // self.contexts
        shards = self.shards(batch)
        split = np.reshape(rows, (shards, self.contexts, batch // shards, length, *rest))
        return np.moveaxis(split, 1, 2).reshape(batch, length * self.contexts, *rest)

    def chunks_of_rows(self, rows: int) -> np.ndarray:
        """Return the number of each row's chunk within its sequence, from 0, `(rows,)`."""
        batch = rows // self.contexts
        shards = self.shards(batch)
        numbers = np.arange(self.contexts).reshape(1, self.contexts, 1)
        return np.broadcast_to(numbers, (shards, self.contexts, batch // shards)).reshape(rows)

    def positions(self, rows: int, length: int) -> np.ndarray:
        """Return the position of each element of `(rows, length)` in its sequence, from 0, int32."""
        first = self.chunks_of_rows(rows).astype("int32")[:, np.newaxis] * length
        return (first + np.arange(length, dtype="int32")).astype("int32")
