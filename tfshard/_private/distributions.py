"""Keras's distribution API (`keras.distribution`): the functions of its TensorFlow backend, and the points where Keras
on JAX asks for the distribution."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as _global_state
from keras.src.backend.tensorflow import distribution_lib as _backend
from keras.src.distribution import distribution_lib as _distribution_lib

from tfshard._private import patches


def set_distribution_backend(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Give Keras's TensorFlow backend the functions of `keras.distribution` (`backend.tensorflow.distribution_lib`).

    Keras itself has a prototype of some of them ("DO NOT USE"), which distributes nothing.
    """
    for name, function in functions.items():
        patches.replace(_backend, name, function, "keras.distribution on TensorFlow")


def around_new_variables(enter: Callable[[keras.Variable], contextlib.AbstractContextManager[object]]) -> None:
    """Create each value of a Keras variable in the context `enter(variable)`, if a Keras distribution is active.

    Keras on JAX asks the distribution for the layout at the same point (`Variable._initialize`).
    """
    original = keras.Variable._initialize

    @functools.wraps(original)
    def initialize(self: keras.Variable, value: Any) -> None:
        if keras.distribution.distribution() is None or isinstance(value, tf.Variable):
            original(self, value)
            return
        if not callable(value):
            # A distribution asks for the shape, which Keras would set after the value.
            self._shape = self._validate_shape(value.shape)
        with enter(self):
            original(self, value)

    patches.replace(keras.Variable, "_initialize", initialize, "shards variables under a Keras distribution")


def before_first_use_of_models(prepare: Callable[[keras.Model], bool]) -> None:
    """Call `prepare(model)` when a model predicts or is saved, and call the method again if it returns True.

    Keras has no point at which a model that was built under `set_distribution` is complete.
    """
    reason = "moves the batches of a model that was built under a Keras distribution, without compile"
    for owner, name in (
        (_trainer_class(), "make_predict_function"),
        (keras.Model, "export"),
        (keras.Model, "save"),
        (keras.Model, "save_weights"),
    ):
        patches.replace(owner, name, _prepared(getattr(owner, name), name, prepare), reason)


def _trainer_class() -> type:
    """Return the base class of `keras.Model` that trains with TensorFlow. Its name differs between versions."""
    found: type = next(cls for cls in keras.Model.__mro__ if "make_predict_function" in vars(cls))
    return found


def _prepared(original: Callable[..., Any], name: str, prepare: Callable[[keras.Model], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, keras.Model) and prepare(self):
            return getattr(self, name)(*args, **kwargs)
        return original(self, *args, **kwargs)

    return method


def explicit_layout(variable: keras.Variable) -> Any:
    """Return the layout of a Keras variable, or None (`Variable._layout`)."""
    return getattr(variable, "_layout", None)


def set_explicit_layout(variable: keras.Variable, layout: Any) -> None:
    """Set the layout of a Keras variable, as Keras on JAX does (`Variable._layout`)."""
    variable._layout = layout


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """Deactivate the Keras distribution in the context (`distribution_lib.GLOBAL_ATTRIBUTE_NAME`)."""
    name = _distribution_lib.GLOBAL_ATTRIBUTE_NAME
    active = _global_state.get_global_attribute(name)
    _global_state.set_global_attribute(name, None)
    try:
        yield
    finally:
        _global_state.set_global_attribute(name, active)


def remove_distribution_backend() -> None:
    """Restore what the functions of this module replaced. Keras then distributes nothing on TensorFlow."""
    patches.undo(_targets())


def _targets() -> Iterable[str]:
    prefixes = (f"{_backend.__name__}.", f"{keras.Variable.__module__}.Variable._initialize")
    names = {"make_predict_function", "export", "save", "save_weights"}
    return [
        each.target
        for each in patches.made()
        if each.target.startswith(prefixes) or each.target.rpartition(".")[2] in names
    ]
