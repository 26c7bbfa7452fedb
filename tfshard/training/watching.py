"""Callbacks that are told what each step of a `fit` is run on."""

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
    """A step, or the steps that Keras does at once.

    Attributes:
        kind: `"training step"`, `"evaluation step"`, `"prediction step"`; `"step"` of `strategy.run`.
        batches: What each is run on, on the mesh, as Keras's data give it; the arguments of `strategy.run`.
        shapes: Of all that it is run on, as text: a key for what follows from shapes.
        compiles: Whether it was not run on such shapes before, so that it is compiled.
    """

    kind: str
    batches: Sequence[Any]
    shapes: str
    compiles: bool


class StepWatcher(abc.ABC):
    """What a Keras callback is besides, to be told of the steps of the `fit` that it is given to."""

    @abc.abstractmethod
    def watched_step(self, step: WatchedStep) -> contextlib.AbstractContextManager[None]:
        """A context in which the step is run, and has ended on all devices."""


def check_can_write(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises `TelemetryError` if a callback needs a package that is not there: Keras would find out after an epoch."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.TensorBoard) and not _has_tensorboard():
            raise TelemetryError(
                "keras.callbacks.TensorBoard needs the package tensorboard, which TensorFlow does not bring since 2.21."
                " Install it (pip install tensorboard), or leave the callback out: "
                "tfshard.callbacks.Telemetry(log_dir=...) writes without it. "
                f"Received: callback={callback!r}"
            )


def _has_tensorboard() -> bool:
    try:
        return importlib.util.find_spec("tensorboard") is not None
    except ValueError:  # What Python says of a module that is kept from being imported.
        return False


class _Watchers(threading.local):
    """Those of the `fit` that runs in this thread."""

    watchers: tuple[StepWatcher, ...] = ()


class Watched:
    """A strategy's steps, and who watches them."""

    def __init__(self) -> None:
        self._here = _Watchers()

    @contextlib.contextmanager
    def by(self, watchers: Sequence[StepWatcher]) -> Iterator[None]:
        """A context in which these watch, too."""
        before = self._here.watchers
        self._here.watchers = (*before, *watchers)
        try:
            yield
        finally:
            self._here.watchers = before

    @contextlib.contextmanager
    def step(self, kind: str, batches: Sequence[Any], shapes: str, compiles: bool) -> Iterator[None]:
        """A context in which a step is run (`WatchedStep`)."""
        if not self._here.watchers:
            yield
            return
        step = WatchedStep(kind=kind, batches=batches, shapes=shapes, compiles=compiles)
        with contextlib.ExitStack() as stack:
            for watcher in self._here.watchers:
                stack.enter_context(watcher.watched_step(step))
            yield


def callbacks_of(model: keras.Model, arguments: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """The callbacks among the arguments of `fit`."""
    given = inspect.signature(keras.Model.fit).bind(model, *arguments, **options).arguments.get("callbacks")
    lists = [each.callbacks if isinstance(each, keras.callbacks.CallbackList) else [each] for each in _flat(given)]
    return [each for found in lists for each in found]


def _flat(given: Any) -> list[Any]:
    return [each for each in keras.tree.flatten(given) if each is not None]
