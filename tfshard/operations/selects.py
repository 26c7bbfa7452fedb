"""`tf.where` of three tensors where the condition is one number: DTensor ends the process as it expands it."""

import tensorflow as tf

from tfshard import _private


def with_dims(call: _private.Call) -> tf.Tensor | None:
    """SelectV2 and Select with a condition of as many dims as what it selects from."""
    condition, *sides = call.inputs
    rank = max((side.shape.rank or 0 for side in sides), default=0)
    if condition.shape.rank != 0 or rank == 0:
        return None
    return tf.raw_ops.SelectV2(condition=tf.reshape(condition, [1] * rank), t=sides[0], e=sides[1])
