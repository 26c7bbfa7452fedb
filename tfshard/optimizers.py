"""Which optimizers update element by element, so that a padded or grouped buffer can be updated as it is."""

from typing import Any

import keras

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


def is_elementwise(optimizer: Any) -> bool:
    """Whether each element of an update depends on the same element of gradient, slots and parameter only.

    A subclass may do anything, so it has to say so with a class attribute: `tfshard_elementwise = True`.
    """
    declared = getattr(type(optimizer), "tfshard_elementwise", None)
    return type(optimizer) in _ELEMENTWISE if declared is None else bool(declared)
