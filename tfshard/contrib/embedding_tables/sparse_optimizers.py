"""How Keras's optimizers update a variable by a sparse gradient."""

import keras
import tensorflow as tf

from tfshard import _private

# Keras's optimizers that square a gradient once, and otherwise use the gradient only in sums and multiples.
_SQUARE = (
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
)


def squares(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether an update uses a gradient and its square, in sums and multiples only."""
    return type(optimizer) in _SQUARE


def is_known_sparse(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether tfshard knows how the optimizer updates rows that occur twice in a sparse gradient."""
    return type(optimizer) is keras.optimizers.SGD or squares(optimizer)


def leaves_others(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Return whether Keras's update leaves elements and slots with a zero gradient unchanged."""
    if _private.decays(optimizer, variable):
        return False
    is_plain = type(optimizer) is keras.optimizers.SGD and not optimizer.momentum
    return is_plain or type(optimizer) is keras.optimizers.Adagrad
