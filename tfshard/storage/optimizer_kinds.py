"""The optimizers that update element by element: they can update a padded or grouped buffer directly."""

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
    """Return whether each updated element depends on the same element of the gradient, slots and parameter only.

    A subclass may do anything, so it declares this with a class attribute: `tfshard_elementwise = True`.
    """
    declared = getattr(type(optimizer), "tfshard_elementwise", None)
    return type(optimizer) in _ELEMENTWISE if declared is None else bool(declared)


def update_key(optimizer: keras.optimizers.Optimizer, fn: Callable[..., Any], variable: tf.Variable) -> Hashable:
    """Return a key for everything that changes an elementwise update except the elements. Members with equal keys are
    updated alike.

    The key says whether Keras's weight decay excludes the variable. A subclass with an `update_step` that looks at the
    variable (such as for its learning rate) defines a method `tfshard_update_key(variable)`.
    """
    key = getattr(optimizer, "tfshard_update_key", None)
    return _private.uses_weight_decay(optimizer, fn, variable), key(variable) if key is not None else None


def adds_up_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether Keras on TensorFlow updates by a sparse gradient as by the dense sum of its rows.

    SGD and Lion do: they use the gradient in sums only. Other optimizers square the gradient, as does clipping by a
    norm, and Keras squares each occurrence of a row separately.
    """
    chain = _private.optimizer_chain(optimizer)
    clips = ("clipnorm", "global_clipnorm", "clipvalue")
    if any(getattr(part, name, None) is not None for part in chain for name in clips):
        return False
    return type(chain[-1]) in (keras.optimizers.SGD, keras.optimizers.Lion)
