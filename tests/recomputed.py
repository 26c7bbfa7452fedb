"""What steps compute again, for tests of several subpackages."""

import contextlib
from collections.abc import Iterator

import pytest

from tfshard.storage import recomputing


@contextlib.contextmanager
def added_operations() -> Iterator[list[int]]:
    """Yield a list that gets, for each graph with blocks, the number of operations that recomputation adds."""
    added, original = [], recomputing.recompute

    def noting(graph, blocks, barrier, stored):
        before = len(graph.get_operations())
        found = original(graph, blocks, barrier, stored)
        added.append(len(graph.get_operations()) - before)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputing, "recompute", noting)
        yield added
