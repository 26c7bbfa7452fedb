"""Keras variables: their values, name scopes, placeholders without values, and seeds."""

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
    """Return the callers of the open name scopes, outermost first (`name_scope.caller`)."""
    stack = _global_state.get_global_attribute("name_scope_stack") or []
    return [entry.caller for entry in stack if entry.caller is not None]


def is_in_optimizer() -> bool:
    """Return whether a Keras optimizer's `apply` is open: it opens a name scope (`BaseOptimizer.apply`)."""
    return any(isinstance(caller, keras.optimizers.Optimizer) for caller in scope_callers())


@contextlib.contextmanager
def abstract_scope(refuse: Callable[..., Any]) -> Iterator[list[keras.Variable]]:
    """Create Keras variables with a shape and dtype but no value inside the context, unless a value is given.

    A `keras.StatelessScope` initializes the variables when it ends, and keeps them in a global list
    ("uninitialized_variables") until then. This context removes its variables from the list, so no later scope
    allocates them. `refuse(path, shape, dtype=)` replaces their initializers (`Variable._initializer`), because each
    read of such a variable would draw new random numbers.

    Yields:
        The variables made from a value, such as an optimizer's step count. These variables keep the value.
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
    """Make variables from values as if outside the stateless scope ("stateless_scope"), and list them.

    Keras refuses such variables in a stateless scope.
    """
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


def placeholder_variable(path: str, shape: tuple[int, ...], dtype: str) -> keras.Variable:
    """Return a placeholder Keras variable with this path (`Variable._path`), for which an optimizer can be built.

    Call this in a graph, where TensorFlow allocates no value.
    """
    variable = keras.Variable("zeros", shape=shape, dtype=dtype, name=path.rpartition("/")[2])
    variable._path = path
    return variable


def initializer_of(initial_value: Any) -> tuple[keras.Variable, Callable[..., Any]] | None:
    """Return the Keras variable being created and its initializer, or None if `initial_value` is anything else.

    Keras passes TensorFlow a function as the initial value. Its closure holds both
    (`Variable._initialize_with_initializer`).
    """
    if not inspect.isfunction(initial_value):
        return None
    found = inspect.getclosurevars(initial_value).nonlocals
    variable, initializer = found.get("self"), found.get("initializer")
    return (variable, initializer) if isinstance(variable, keras.Variable) and callable(initializer) else None


def variable_dtype(variable: keras.Variable) -> str:
    """Return the dtype of a Keras variable outside autocast scopes (`Variable._dtype`)."""
    return str(variable._dtype)


def backend_variable(variable: keras.Variable) -> tf.Variable | None:
    """Return the tf.Variable inside a Keras variable, or None before it is built (`Variable._value`)."""
    return variable._value


def is_resource_variable(variable: Any) -> bool:
    """Return whether an object is a TensorFlow variable on a single device (`BaseResourceVariable`)."""
    return isinstance(variable, _resource_variable_ops.BaseResourceVariable)


def set_backend_variable(variable: keras.Variable, value: tf.Variable) -> None:
    """Replace the tf.Variable inside a Keras variable (`Variable._value`)."""
    variable._value = value


def plain_variable(value: np.ndarray | tf.Tensor, like: tf.Variable) -> tf.Variable:
    """Return a tf.Variable on this device that optimizers treat as `like` (`Variable._unique_id`)."""
    variable = tf.Variable(value, trainable=like.trainable, name=like.name.partition(":")[0], dtype=like.dtype)
    variable._unique_id = like._unique_id
    return variable


def is_seed_state(name: str) -> bool:
    """Return whether a name or path belongs to a seed generator's state (`SeedGenerator.state`)."""
    return name.rpartition("/")[2] == "seed_generator_state"


@overload
def global_seed_generator(create: Literal[True]) -> keras.random.SeedGenerator: ...


@overload
def global_seed_generator(create: bool = False) -> keras.random.SeedGenerator | None: ...


def global_seed_generator(create: bool = False) -> keras.random.SeedGenerator | None:
    """Return the generator for random operations that have no seed, or None.

    Keras has the name `GLOBAL_SEED_GENERATOR` since 3.13, and used the same key before.
    """
    if create:
        return _seed_generator.global_seed_generator()
    key = getattr(_seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")
    return _global_state.get_global_attribute(key)


def random_seed_is_set() -> bool:
    """Return whether `keras.utils.set_random_seed` has been called (`rng_utils.get_random_seed`)."""
    return _rng_utils.get_random_seed() is not None
