"""Keras variables: what is in them, where they are being created, variables without values, seeds."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state as _global_state
from keras.src.random import seed_generator as _seed_generator
from keras.src.utils import rng_utils as _rng_utils
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops


def scope_callers() -> list[Any]:
    """The objects whose name scopes are open, outermost first (`name_scope.caller`)."""
    stack = _global_state.get_global_attribute("name_scope_stack") or []
    return [entry.caller for entry in stack if entry.caller is not None]


@contextlib.contextmanager
def abstract_scope(refuse: Callable[..., Any]) -> Iterator[list[keras.Variable]]:
    """A context in which Keras variables get a shape and a dtype, and no value unless they are given one.

    A `keras.StatelessScope` leaves variables to be initialised when it ends, and keeps them in a global list
    ("uninitialized_variables") until then. They are taken off that list, so that no later scope allocates them.
    `refuse(path, shape, dtype=)` takes the place of their initializers (`Variable._initializer`): reading one would
    otherwise draw new numbers each time.

    Yields:
        The variables that were made from a value, as an optimizer's count of steps is: they have it.
    """
    waiting = list(_global_state.get_global_attribute("uninitialized_variables") or [])
    given: list[keras.Variable] = []
    try:
        with keras.StatelessScope(initialize_variables=False), _given_values(given):
            yield given
    finally:
        known = {id(variable) for variable in waiting}
        for variable in _global_state.get_global_attribute("uninitialized_variables") or []:
            if id(variable) not in known:
                variable._initializer = functools.partial(refuse, variable.path)
        _global_state.set_global_attribute("uninitialized_variables", waiting)


@contextlib.contextmanager
def _given_values(given: list[keras.Variable]) -> Iterator[None]:
    """In a stateless scope, makes variables from values as if there were none ("stateless_scope"), and lists them;
    Keras refuses them there."""
    create = keras.Variable.__init__

    def initialize(self: keras.Variable, initializer: Any, *args: Any, **kwargs: Any) -> None:
        if callable(initializer) or isinstance(initializer, str):
            create(self, initializer, *args, **kwargs)
            return
        scope = _global_state.get_global_attribute("stateless_scope")
        _global_state.set_global_attribute("stateless_scope", None)
        try:
            create(self, initializer, *args, **kwargs)
        finally:
            _global_state.set_global_attribute("stateless_scope", scope)
        given.append(self)

    with mock.patch.object(keras.Variable, "__init__", initialize):
        yield


def stand_in(path: str, shape: tuple[int, ...], dtype: str) -> keras.Variable:
    """A Keras variable of this path (`Variable._path`) that an optimizer can be built for; no value is made.

    In a graph: TensorFlow allocates nothing there.
    """
    variable = keras.Variable("zeros", shape=shape, dtype=dtype, name=path.rpartition("/")[2])
    variable._path = path
    return variable


def initializer_of(initial_value: Any) -> tuple[keras.Variable, Callable[..., Any]] | None:
    """The Keras variable that is being made with an initializer, and the initializer; None if TensorFlow is given
    anything else. It is given a function, in which they are (`Variable._initialize_with_initializer`)."""
    if not inspect.isfunction(initial_value):
        return None
    found = inspect.getclosurevars(initial_value).nonlocals
    variable, initializer = found.get("self"), found.get("initializer")
    return (variable, initializer) if isinstance(variable, keras.Variable) and callable(initializer) else None


def variable_dtype(variable: keras.Variable) -> str:
    """The dtype that a Keras variable has outside of autocast scopes (`Variable._dtype`)."""
    return str(variable._dtype)


def backend_variable(variable: keras.Variable) -> tf.Variable | None:
    """The tf.Variable inside a Keras variable, None while it is not built (`Variable._value`)."""
    return variable._value


def is_resource_variable(variable: Any) -> bool:
    """Whether it is a variable of TensorFlow's own, on one device (`BaseResourceVariable`)."""
    return isinstance(variable, _resource_variable_ops.BaseResourceVariable)


def set_backend_variable(variable: keras.Variable, value: tf.Variable) -> None:
    """Puts another tf.Variable into a Keras variable (`Variable._value`)."""
    variable._value = value


def plain_variable(value: np.ndarray | tf.Tensor, like: tf.Variable) -> tf.Variable:
    """A tf.Variable on this device that optimizers take for `like` (`Variable._unique_id`)."""
    variable = tf.Variable(value, trainable=like.trainable, name=like.name.partition(":")[0], dtype=like.dtype)
    variable._unique_id = like._unique_id
    return variable


def is_seed_state(name: str) -> bool:
    """Whether a name or path is that of the state of a seed generator (`SeedGenerator.state`)."""
    return name.rpartition("/")[2] == "seed_generator_state"


@overload
def global_seed_generator(create: Literal[True]) -> keras.random.SeedGenerator: ...


@overload
def global_seed_generator(create: bool = False) -> keras.random.SeedGenerator | None: ...


def global_seed_generator(create: bool = False) -> keras.random.SeedGenerator | None:
    """The generator of random operations without a seed of their own, or None (`GLOBAL_SEED_GENERATOR`; Keras has the
    name since 3.13, and the same key before)."""
    if create:
        return _seed_generator.global_seed_generator()
    key = getattr(_seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")
    return _global_state.get_global_attribute(key)


def random_seed_is_set() -> bool:
    """Whether `keras.utils.set_random_seed` was called (`rng_utils.get_random_seed`)."""
    return _rng_utils.get_random_seed() is not None
