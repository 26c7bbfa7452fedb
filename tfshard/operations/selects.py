"""Rewrite rules of selections."""

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.operations.conditions import model_axis_has_devices
from tfshard.operations.registry import rewrite_rule


def selects_by_number(call: _private.Call) -> bool:
    """The condition is a scalar, and an operand has dims."""
    condition, *sides = call.inputs
    return condition.shape.rank == 0 and any(side.shape.rank for side in sides)


@rewrite_rule(
    "Select", "SelectV2", graph=True, eager=False, gradient="registered", when=selects_by_number, sizes="unknown",
    fault="**ends the process**", cases=("select of unknown size",),
)  # fmt: skip
@rewrite_rule(
    "Select", "SelectV2", graph=True, eager=True, gradient="registered", when=selects_by_number,
    fault="**ends the process** (`tf.where(scalar, a, b)`)", cases=("select by a number", "select in an eager step"),
)  # fmt: skip
def select_by_tensor(call: _private.Call) -> tf.Tensor:
    """Select by a condition of one element that has as many dims as the operands."""
    condition, *sides = call.inputs
    rank = max(side.shape.rank or 0 for side in sides)
    return tf.raw_ops.SelectV2(condition=tf.reshape(condition, [1] * rank), t=sides[0], e=sides[1])


@rewrite_rule(
    "OneHot", graph=True, eager=False, gradient="none", when=model_axis_has_devices,
    fault='refuses it where the classes are sharded ("non-broadcastable operands"), as experts are',
    cases=("one-hot vectors",),
)  # fmt: skip
def one_hot(call: _private.Call) -> tf.Tensor | None:
    """Compare the indices with the number of each class."""
    indices, depth, on_value, off_value = call.inputs
    count, rank = tf.get_static_value(depth), indices.shape.rank
    if count is None or rank is None:
        return None
    axis = call.get_attr("axis") % (rank + 1)
    shape = [int(count) if dim == axis else 1 for dim in range(rank + 1)]
    classes = np.arange(count, dtype=indices.dtype.as_numpy_dtype).reshape(shape)
    return tf.where(tf.equal(tf.expand_dims(indices, axis), classes), on_value, off_value)
