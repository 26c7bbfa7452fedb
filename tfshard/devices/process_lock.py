"""The lock that lets one thread of a process use the mesh at a time.

A process has one DTensor device, one set of environment switches that DTensor reads when it compiles, and one function
library. A step runs alone, including its trace and its compilation. The code that puts variables on the mesh, sets them
or reads them also runs alone. A thread may acquire the lock again, as when a callback calls `predict`.

A thread that holds the lock never waits for data or for an independent thread, because the other thread may need the
lock.

TensorFlow holds a lock of each tf.function that it traces. A trace that waits for the process's lock releases its
function locks meanwhile, because the thread that holds the process's lock may call the same function.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients

_Function = TypeVar("_Function", bound=Callable[..., Any])

_lock = threading.RLock()


class _Here(threading.local):
    # True if this thread works for another thread that holds the lock and waits.
    works_for_holder = False
    # The contexts to hold until the current tf.function returns, and whether a step was traced in the function.
    call: contextlib.ExitStack | None = None
    traced_steps = False


_here = _Here()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep other threads from using the mesh inside the context."""
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
    """Wrap a function to hold the lock while it runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with held():
            return function(*args, **kwargs)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


@contextlib.contextmanager
def working_for_holder() -> Iterator[None]:
    """Mark this thread as started and awaited by the thread that holds the lock."""
    before, _here.works_for_holder = _here.works_for_holder, True
    try:
        yield
    finally:
        _here.works_for_holder = before


# tf.functions in which steps were traced.
_with_steps: _private.WeakIdentitySet[Callable[..., Any]] = _private.WeakIdentitySet()


@functools.cache
def start() -> None:
    """Hold the lock, from now on, while a thread uses DTensor's device or calls a tf.function on the mesh.

    A tf.function is on the mesh if it takes mesh tensors or runs steps.
    """
    _private.set_device_in(held)
    _private.around_function_calls(_while_called)
    _private.run_functions_with_steps_in(_while_step_runs)
    _private.note_function_locks()


@contextlib.contextmanager
def _while_step_runs() -> Iterator[None]:
    with held(), clients.here().communication():
        yield


def hold_until_function_returns() -> None:
    """Hold the lock until the tf.function that is being traced has been compiled and has run."""
    if _here.call is not None:
        _here.call.enter_context(held())
        _here.traced_steps = True


@contextlib.contextmanager
def _while_called(function: Callable[..., Any], arguments: Any) -> Iterator[None]:
    if not _private.is_eager():  # A function inside another function.
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
