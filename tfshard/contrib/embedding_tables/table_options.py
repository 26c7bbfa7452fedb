"""EmbeddingTables: the option of users that chooses embedding tables, and the meaning of their updates."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from tfshard.errors import StrategyError

# The meanings of an update by rows.
KERAS, LAZY = "keras", "lazy"


@dataclasses.dataclass(frozen=True)
class EmbeddingTables:
    """Embedding tables that the batch axis shards by rows at every ZeRO stage, and that no step gathers.

    In a step, devices exchange the ids that they look up, the rows for the ids, and the gradients of the rows. The
    optimizer updates the local rows of each device. docs/tables.md lists the collectives.

    Args:
        patterns: Regular expressions of the tables' full paths, such as
            `".*item_embedding/embeddings"`.
        sparse: The meaning of an update.
            `"keras"`: plain Keras's update on one device with the gradient of a lookup. SGD without momentum and
            Adagrad update only the rows that the batch looked up. The moments of other optimizers (SGD with momentum,
            Adam, RMSprop, ...) decay in all rows in each step, which takes time and memory for all local rows. If a
            batch looks up a row several times, each gradient of the row is squared separately.
            `"lazy"`: every optimizer updates only the rows that the batch looked up, and the slots of these rows, with
            the sum of each row's gradients (as PyTorch's SparseAdam does).

    Raises:
        StrategyError: No pattern, an invalid regular expression, or an unknown meaning.

    Example:

    >>> import tfshard
    >>> tfshard.EmbeddingTables(".*item_embedding/embeddings", sparse="lazy")
    EmbeddingTables(patterns=('.*item_embedding/embeddings',), sparse='lazy')
    """

    patterns: str | Sequence[str]
    sparse: str = KERAS

    def __post_init__(self) -> None:
        given = (self.patterns,) if isinstance(self.patterns, str) else tuple(self.patterns)
        if not given:
            raise StrategyError("EmbeddingTables needs a pattern. Received: patterns=()")
        for pattern in given:
            try:
                re.compile(pattern)
            except (TypeError, re.error) as error:
                raise StrategyError(
                    f"A pattern of embedding tables is not a regular expression: {error}. Received: patterns={given!r}"
                ) from error
        if self.sparse not in (KERAS, LAZY):
            raise StrategyError(f"sparse must be 'keras' or 'lazy'. Received: sparse={self.sparse!r}")
        object.__setattr__(self, "patterns", given)

    @staticmethod
    def of(given: Any) -> "EmbeddingTables":
        """Convert a user's argument: an `EmbeddingTables`, or patterns.

        Raises:
            StrategyError: `given` has another type.
        """
        if isinstance(given, EmbeddingTables):
            return given
        if isinstance(given, (str, list, tuple)):
            return EmbeddingTables(given)
        raise StrategyError(
            "tables must be a tfshard.EmbeddingTables, patterns of variables' paths, or None. "
            f"Received: tables={given!r}"
        )

    def matches_path(self, path: str) -> bool:
        """Return True if the variable at `path` is one of these tables."""
        return any(re.fullmatch(pattern, path) for pattern in self.patterns)
