"""Selections by a condition that DTensor does not expand."""

import numpy as np
import tensorflow as tf

from tfshard import _private


def with_dims(call: _private.Call) -> tf.Tensor | None:
    """SelectV2 and Select with a condition of as many dims as what it selects from: DTensor ends the process as it
    expands one by a single number."""
    condition, *sides = call.inputs
    rank = max((side.shape.rank or 0 for side in sides), default=0)
    if condition.shape.rank != 0 or rank == 0:
        return None
    return tf.raw_ops.SelectV2(condition=tf.reshape(condition, [1] * rank), t=sides[0], e=sides[1])


def one_hot(call: _private.Call) -> tf.Tensor | None:
    """OneHot as a comparison: where something shards the classes, as the experts of a layer, DTensor refuses its own
    expansion ("non-broadcastable operands")."""
    indices, depth, on_value, off_value = call.inputs
    count, rank = tf.get_static_value(depth), indices.shape.rank
    if count is None or rank is None:
        return None
    axis = call.get_attr("axis") % (rank + 1)
    shape = [int(count) if dim == axis else 1 for dim in range(rank + 1)]
    classes = np.arange(count, dtype=indices.dtype.as_numpy_dtype).reshape(shape)
    return tf.where(tf.equal(tf.expand_dims(indices, axis), classes), on_value, off_value)
