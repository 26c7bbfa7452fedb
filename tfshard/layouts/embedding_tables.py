"""EmbeddingTables: embedding tables that are stored sharded by rows, and that a step reads and updates by rows."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from tfshard.errors import StrategyError
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.layout_map import LayoutMap, VariableSpec

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
            batch looks a row up several times, each gradient of the row is squared separately.
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
                    f"A pattern of embedding tables is no regular expression: {error}. Received: patterns={given!r}"
                ) from error
        if self.sparse not in (KERAS, LAZY):
            raise StrategyError(f"sparse must be 'keras' or 'lazy'. Received: sparse={self.sparse!r}")
        object.__setattr__(self, "patterns", given)

    @staticmethod
    def of(given: Any) -> "EmbeddingTables | None":
        """Convert a user's argument: an `EmbeddingTables`, patterns, or None.

        Raises:
            StrategyError: `given` has another type.
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
        """Return True if a variable is one of these tables."""
        return self.matches_path(spec.path)

    def matches_path(self, path: str) -> bool:
        """Return True if the variable at `path` is one of these tables."""
        return any(re.fullmatch(pattern, path) for pattern in self.patterns)

    def take_out_of(self, layout_map: LayoutMap) -> LayoutMap:
        """Remove the rules for these tables from an automatic layout map, and return the map."""
        for pattern in list(layout_map):
            if self.matches_path(re.sub(r"\\(.)", r"\1", pattern)):
                del layout_map[pattern]
        return layout_map

    def check_used(self, paths: Sequence[str]) -> None:
        """Raise `StrategyError` for patterns that match no path of a model's variables."""
        unmatched = [each for each in self.patterns if not any(re.fullmatch(each, path) for path in paths)]
        if unmatched:
            raise StrategyError(
                f"Patterns of tables= match no variable: {unmatched}. A pattern must match the whole path "
                f"(re.fullmatch). First variable paths: {sorted(paths)[:12]}"
            )

    def check(self, spec: VariableSpec, mesh_axes: MeshAxes, slot_dtype: str | None) -> None:
        """Raise `StrategyError` if a matching variable cannot be an embedding table.

        Args:
            spec: The variable.
            mesh_axes: The mesh.
            slot_dtype: The dtype in which the slots would be stored; None for the dtype of the slots.
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
    """Return the number of rows that each device stores, with padding on the last device.

    >>> rows_of_a_device(10, 4)
    3
    """
    return -(-rows // devices)


def capacities(ids: int) -> tuple[int, ...]:
    """Return the possible lengths, in ids, of the lists that devices exchange, from the shortest to the longest.

    A step takes the shortest length that holds the longest list of all devices, so no id is dropped. Each length is
    about an eighth longer than the previous length: TensorFlow keeps a plan for each length, so the lengths must be
    few.

    Args:
        ids: How many ids a device looks up.

    >>> capacities(20)
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20)
    """
    found = [1]
    while found[-1] < ids:
        found.append(min(ids, max(found[-1] + 1, found[-1] * 9 // 8)))
    return tuple(found)


def ids_of_a_device(shape: Sequence[int], devices: int) -> int:
    """Return how many ids of a lookup each device has, with padding.

    Args:
        shape: The shape of the ids of the full batch.
        devices: The size of the batch axis.
    """
    return -(-math.prod(shape) // devices)
