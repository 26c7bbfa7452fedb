"""Which optimizers update element by element, so that a padded or grouped buffer can be updated as it is."""

from collections.abc import Callable, Hashable
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private

_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adadelta,
    keras.optimizers.Lion,
    keras.optimizers.Ftrl,
)


def is_elementwise(optimizer: keras.optimizers.Optimizer | None) -> bool:
    """Whether each element of an update depends on the same element of gradient, slots and parameter only.

    A subclass may do anything, so it has to say so with a class attribute: `tfshard_elementwise = True`.
    """
    declared = getattr(type(optimizer), "tfshard_elementwise", None)
    return type(optimizer) in _ELEMENTWISE if declared is None else bool(declared)


def update_key(optimizer: keras.optimizers.Optimizer, fn: Callable[..., Any], variable: tf.Variable) -> Hashable:
    """What an elementwise update depends on besides the elements: members of a group with one key are updated alike.

    For Keras's weight decay, whether the variable is excluded from it. A subclass whose `update_step` looks at the
    variable (a learning rate of its own, say) gives a method `tfshard_update_key(variable)`.
    """
    key = getattr(optimizer, "tfshard_update_key", None)
    return _private.uses_weight_decay(optimizer, fn, variable), key(variable) if key is not None else None


# Those of Keras that square a gradient once, and use it besides in sums and multiples only.
_SQUARE = (
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
)


def squares(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an update depends on a gradient, and on its square, by sums and multiples only."""
    return type(optimizer) in _SQUARE


def is_known_sparse(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it is known what an update is of a sparse gradient with the same row in several places."""
    return type(optimizer) is keras.optimizers.SGD or squares(optimizer)


def adds_up_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether Keras on TensorFlow updates by a sparse gradient as by the dense sum of its rows.

    SGD and Lion do: they use the gradient in sums only. Other optimizers square the gradient, and so does clipping by
    a norm, and Keras squares each occurrence of a row by itself.
    """
    chain = _private.optimizer_chain(optimizer)
    clips = ("clipnorm", "global_clipnorm", "clipvalue")
    if any(getattr(part, name, None) is not None for part in chain for name in clips):
        return False
    return type(chain[-1]) in (keras.optimizers.SGD, keras.optimizers.Lion)


def leaves_others(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Whether Keras's update leaves elements and slots as they are whose gradient is zero."""
    if decays(optimizer, variable):
        return False
    is_plain = type(optimizer) is keras.optimizers.SGD and not optimizer.momentum
    return is_plain or type(optimizer) is keras.optimizers.Adagrad


def decays(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Whether an optimizer lets a variable decay."""
    return _private.decays(optimizer, variable)
