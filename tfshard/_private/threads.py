"""Replacements of TensorFlow and Keras functions that apply to one thread only."""

import functools
import threading
from collections.abc import Callable
from typing import Any


def in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `replacement` in this thread and `original` in every other thread."""
    here = threading.get_ident()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == here else original)(*args, **kwargs)

    return call


def before_executors_end(function: Callable[[], None]) -> None:
    """Call a function when the main thread ends, before Python shuts down its thread pools.

    Functions of `atexit` run later, when asyncio can resolve no host names any more.
    """
    # Functions are called in reverse order; the thread pools register their own at this import.
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(function)  # type: ignore[attr-defined]
