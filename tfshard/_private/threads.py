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
