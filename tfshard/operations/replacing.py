"""Functions of modules that are others for a while."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfshard import _private


@contextlib.contextmanager
def replaced(functions: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Return a context in which functions of modules are replaced.

    Args:
        functions: For each function, its module, its name, and the replacement. The replacement receives the original
            function, and then the arguments of the call.
    """
    with contextlib.ExitStack() as stack:
        for module, name, version in functions:
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, _private.in_this_thread(functools.partial(version, original), original))
        yield
