"""The host memory that Python allocates for a function."""

import tracemalloc
from collections.abc import Callable


def peak(function: Callable[[], object]) -> int:
    """Return the most bytes that Python held while the function ran, above what it held before."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
