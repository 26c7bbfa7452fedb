"""The lock with which the threads of a process take turns on the mesh.

A process has one DTensor device, one set of environment switches that DTensor reads when it compiles, and one library
of functions. A step runs alone, its trace and its compilation included. So does what brings variables to the mesh,
sets them or reads them. A thread may take the lock again, as when a callback calls `predict`.

Nobody waits for data, or for a thread that works for itself, while holding the lock: that thread may need it.

TensorFlow holds a lock of each tf.function that it traces. A trace that waits for the process's lock releases its
function locks while it waits, because the thread that holds the process's lock may call the same function.
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private

_Function = TypeVar("_Function", bound=Callable[..., Any])

_lock = threading.RLock()


class _Here(threading.local):
    # Whether this thread works for another one, which holds the lock and waits for it.
    works_for_holder = False
    # What the tf.function that is being called holds until it returns, and whether steps were traced in it.
    call: contextlib.ExitStack | None = None
    traced_steps = False


_here = _Here()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A context in which no other thread works with the mesh."""
    if _here.works_for_holder:
        yield
        return
    lock = _lock
    is_taken = lock.acquire(blocking=False)
    try:
        if not is_taken:
            with _private.function_locks_released():
                is_taken = lock.acquire()
        yield
    finally:
        if is_taken:  # Not if Ctrl-C ended the wait.
            lock.release()


def locked(function: _Function) -> _Function:
    """Return a function that holds the lock while it runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with held():
            return function(*args, **kwargs)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


@contextlib.contextmanager
def working_for_holder() -> Iterator[None]:
    """A context of a thread that the holder of the lock has started, and waits for."""
    before, _here.works_for_holder = _here.works_for_holder, True
    try:
        yield
    finally:
        _here.works_for_holder = before


# tf.functions in which steps were traced.
_with_steps: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


@functools.cache
def start() -> None:
    """From now on whoever sets what DTensor's device works with holds the lock, and so does a call of a tf.function
    that takes tensors on a mesh, or that runs steps."""
    _private.set_device_in(held)
    _private.around_function_calls(_while_called)
    _private.run_functions_with_steps_in(held)
    _private.note_function_locks()


def hold_until_function_returns() -> None:
    """Hold the lock until the tf.function that is being traced was compiled and has run."""
    if _here.call is not None:
        _here.call.enter_context(held())
        _here.traced_steps = True


@contextlib.contextmanager
def _while_called(function: Callable[..., Any], arguments: Any) -> Iterator[None]:
    if not _private.is_eager():  # It is part of another function.
        yield
        return
    before = _here.call, _here.traced_steps
    with contextlib.ExitStack() as _here.call:
        if function in _with_steps or any(map(_is_on_mesh, tf.nest.flatten(arguments))):
            _here.call.enter_context(held())
        _here.traced_steps = False
        try:
            yield
        finally:
            if _here.traced_steps:
                _with_steps.add(function)
            _here.call, _here.traced_steps = before


def _is_on_mesh(argument: Any) -> bool:
    return isinstance(argument, tf.__internal__.EagerTensor) and dtensor.is_dtensor(argument)
