"""Buffers that their variables have left. A function that was traced before the move would read them, and must not run.

A variable leaves its buffer when its model is compiled under a strategy, moves to another strategy, or moves into a
group. Keras and tfshard make the functions of models again. A `tf.function` of a user goes on with the old buffer.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfshard import _private
from tfshard.errors import StrategyError

# The variables that left the buffer of each handle, in words.
_left: _private.WeakIdentityDict[tf.Tensor, str] = _private.WeakIdentityDict()


def note(handle: tf.Tensor, what: str) -> None:
    """Refuse, from now on, calls of functions that read a buffer.

    Args:
        handle: The resource of the buffer.
        what: The variables that left the buffer, for the error.
    """
    _left[handle] = what
    _private.check_inputs(_check)


def forget(handle: tf.Tensor) -> None:
    """Allow calls again: the variables are back in the buffer."""
    _left.pop(handle)


def _check(inputs: Sequence[Any]) -> None:
    if not _left:
        return
    found = next((what for what in map(_left.get, inputs) if what is not None), None)
    if found is not None:
        raise StrategyError(
            "A tf.function was traced before variables moved to other buffers, and would read the buffers that they "
            "left. Make the function again, tf.function(step), after the last model.compile(..., strategy=strategy), "
            f"and run it by that strategy: strategy.run(step). Received: a function that reads {found}"
        )
