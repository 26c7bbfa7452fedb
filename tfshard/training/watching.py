"""Tell callbacks which batches each step of a `fit` runs on."""

import abc
import contextlib
import dataclasses
import importlib.util
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from tfshard.errors import TelemetryError


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedStep:
    """A step, or the steps of one execution of Keras.

    Attributes:
        kind: `"training step"`, `"evaluation step"` or `"prediction step"`; `"step"` for `strategy.run`.
        batches: The batches on the mesh, structured as Keras's data; for `strategy.run`, its arguments.
        shapes: The shapes of all tensors as text, to use as a key.
        compiles: True if the step runs on these shapes for the first time, and is therefore compiled.
    """

    kind: str
    batches: Sequence[Any]
    shapes: str
    compiles: bool


class StepWatcher(abc.ABC):
    """Mixed into a Keras callback, to be told about the steps of its `fit`."""

    @abc.abstractmethod
    def watched_step(self, step: WatchedStep) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the step runs. The step has ended on all devices when the context exits."""


def check_can_write(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raise `TelemetryError` if a callback needs a package that is not installed.

    Keras would only fail after an epoch.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard) and not _has_tensorboard():
            raise TelemetryError(
                "keras.callbacks.TensorBoard needs the package tensorboard, which TensorFlow does not install since "
                "2.21. Install it (pip install 'tfshard[tensorboard]'), or leave the callback out: "
                f"tfshard.callbacks.Telemetry(log_dir=...) writes without it. Received: callback={callback!r}"
            )


def _has_tensorboard() -> bool:
    try:
        return importlib.util.find_spec("tensorboard") is not None
    except ValueError:  # Python raises ValueError for a module with a blocked import.
        return False


class _Watchers(threading.local):
    """The watchers of the `fit` that runs in this thread."""

    watchers: tuple[StepWatcher, ...] = ()


class Watched:
    """The watchers of a strategy's steps."""

    def __init__(self) -> None:
        self._here = _Watchers()

    @contextlib.contextmanager
    def by(self, watchers: Sequence[StepWatcher]) -> Iterator[None]:
        """Add watchers in this context."""
        before = self._here.watchers
        self._here.watchers = (*before, *watchers)
        try:
            yield
        finally:
            self._here.watchers = before

    @contextlib.contextmanager
    def step(self, kind: str, batches: Sequence[Any], shapes: str, compiles: bool) -> Iterator[None]:
        """Run a step in this context, as described by `WatchedStep`."""
        if not self._here.watchers:
            yield
            return
        step = WatchedStep(kind=kind, batches=batches, shapes=shapes, compiles=compiles)
        with contextlib.ExitStack() as stack:
            for watcher in self._here.watchers:
                stack.enter_context(watcher.watched_step(step))
            yield


def callbacks_of(model: keras.Model, arguments: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks among the arguments of `fit`."""
    given = inspect.signature(keras.Model.fit).bind(model, *arguments, **options).arguments.get("callbacks")
    lists = [each.callbacks if isinstance(each, keras.callbacks.CallbackList) else [each] for each in _flat(given)]
    return [each for found in lists for each in found]


def _flat(given: Any) -> list[Any]:
    return [each for each in keras.tree.flatten(given) if each is not None]
