"""Replacements of functions of TensorFlow and Keras that hold for one thread."""

import functools
import threading
from collections.abc import Callable
from typing import Any


def in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `replacement` when this thread calls it, and `original` when others do."""
    here = threading.get_ident()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == here else original)(*args, **kwargs)

    return call
