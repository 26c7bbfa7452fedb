"""EmbeddingTables: which embedding tables rest sharded by rows, and are read and updated by rows in a step."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from tfshard.errors import StrategyError
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.layout_map import LayoutMap, VariableSpec

# What an update of rows means.
KERAS, LAZY = "keras", "lazy"


@dataclasses.dataclass(frozen=True)
class EmbeddingTables:
    """Embedding tables that rest sharded by rows over the batch axis, at every ZeRO stage, and are never gathered.

    In a step the devices send each other the ids that they look up, the rows for them, and the gradients of these rows.
    An optimizer updates each device's own rows. docs/tables.md has what is sent, and when.

    Args:
        patterns: Regular expressions, one of which matches the whole path of each table, such as
            `".*item_embedding/embeddings"`.
        sparse: What an update means. `"keras"`: what plain Keras does on one device with the gradient of a lookup. SGD
            without momentum and Adagrad then touch only rows that were looked up; moments of others (SGD with
            momentum, Adam, RMSprop, ...) decay in all rows in each step, which takes time and memory for all rows of a
            device. A row that was looked up several times has its gradients squared one by one. `"lazy"`: an update of
            the rows that were looked up, with the sum of a row's gradients, and of their slots; all others stay as they
            are, whatever the optimizer (as PyTorch's SparseAdam does).

    Raises:
        StrategyError: No pattern, one that is no regular expression, or an unknown meaning.

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
                    f"A pattern of embedding tables is no regular expression: {error}. Received: patterns={given!r}"
                ) from error
        if self.sparse not in (KERAS, LAZY):
            raise StrategyError(f"sparse must be 'keras' or 'lazy'. Received: sparse={self.sparse!r}")
        object.__setattr__(self, "patterns", given)

    @staticmethod
    def of(given: Any) -> "EmbeddingTables | None":
        """What a user gave: one of these, patterns, or None.

        Raises:
            StrategyError: It is of another type.
        """
        if given is None or isinstance(given, EmbeddingTables):
            return given
        if isinstance(given, (str, list, tuple)):
            return EmbeddingTables(given)
        raise StrategyError(
            "tables must be a tfshard.EmbeddingTables, patterns of variables' paths, or None. "
            f"Received: tables={given!r}"
        )

    def matches(self, spec: VariableSpec) -> bool:
        """Whether a variable is one of these tables."""
        return self.matches_path(spec.path)

    def matches_path(self, path: str) -> bool:
        """Whether the variable at a path is one of these tables."""
        return any(re.fullmatch(pattern, path) for pattern in self.patterns)

    def take_out_of(self, layout_map: LayoutMap) -> LayoutMap:
        """A layout map that was found for a model, without the rules for these tables. Its patterns are paths."""
        for pattern in list(layout_map):
            if self.matches_path(re.sub(r"\\(.)", r"\1", pattern)):
                del layout_map[pattern]
        return layout_map

    def check_used(self, paths: Sequence[str]) -> None:
        """Raises `StrategyError` for patterns that match none of the paths of a model's variables."""
        unmatched = [each for each in self.patterns if not any(re.fullmatch(each, path) for path in paths)]
        if unmatched:
            raise StrategyError(
                f"Patterns of tables= match no variable: {unmatched}. A pattern must match the whole path "
                f"(re.fullmatch). First variable paths: {sorted(paths)[:12]}"
            )

    def check(self, spec: VariableSpec, mesh_axes: MeshAxes, slot_dtype: str | None) -> None:
        """Raises `StrategyError` if a variable that matches cannot be such a table.

        Args:
            spec: The variable.
            mesh_axes: The mesh.
            slot_dtype: The dtype in which its slots are to rest, if not in their own.
        """
        if len(spec.shape) != 2 or spec.dtype != "float32":
            raise StrategyError(
                "An embedding table is a matrix of float32, with a row for each id. Correct the patterns of tables=. "
                f"Received: '{spec.path}' of shape={spec.shape}, dtype={spec.dtype}"
            )
        if mesh_axes.data is None:
            raise StrategyError(
                "Embedding tables are sharded over the batch axis, and the mesh has none. Add batch=... to "
                f"create_mesh(). Received: mesh={mesh_axes.given} for table '{spec.path}'"
            )
        if mesh_axes.replicas > 1:
            raise StrategyError(
                "Embedding tables are sharded over all devices of the batch axis, and cannot be where there are "
                "replicas. Use a mesh without the axis of replicas, or leave out tables=. "
                f"Received: mesh={mesh_axes.given} for table '{spec.path}'"
            )
        if slot_dtype is not None:
            raise StrategyError(
                "Slots of embedding tables rest in float32. Say so, before other patterns: "
                f"slot_dtype={{{'|'.join(self.patterns)!r}: 'float32', ...}}. "
                f"Received: slot_dtype='{slot_dtype}' for table '{spec.path}'"
            )


def rows_of_a_device(rows: int, devices: int) -> int:
    """How many rows of a table each device has, the last one's filled up.

    >>> rows_of_a_device(10, 4)
    3
    """
    return -(-rows // devices)


def capacities(ids: int) -> tuple[int, ...]:
    """For how many ids the lists have room that a device sends to each other, from the shortest to the longest.

    A step takes the shortest in which the longest list of all devices finds room, so nothing is ever left out. There
    are few of them, each an eighth longer than the one before: TensorFlow keeps a plan for each.

    Args:
        ids: How many a device looks up.

    >>> capacities(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20)
    """
    found = [1]
    while found[-1] < ids:
        found.append(min(ids, max(found[-1] + 1, found[-1] * 9 // 8)))
    return tuple(found)


def ids_of_a_device(shape: Sequence[int], devices: int) -> int:
    """How many ids of a lookup a device has, those that fill it up included.

    Args:
        shape: Of the ids, of the whole batch.
        devices: Of the batch axis.
    """
    return -(-math.prod(shape) // devices)
