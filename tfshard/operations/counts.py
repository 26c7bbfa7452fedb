"""The rewrite rule of `tf.math.bincount`."""

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.operations import rows
from tfshard.operations.registry import rewrite_rule


@rewrite_rule(
    "DenseBincount", graph=True, eager=False, gradient="none", sizes="any",
    fault="refuses the operations that follow: DTensor does not see that the bounds fix the number of bins",
    cases=("bincount",),
)  # fmt: skip
def count(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Count with a constant number of bins. Each device counts in its local rows of a matrix."""
    values, size, weights = call.inputs
    bins = _number(size)
    if bins is None:
        return None
    by_rows = values.shape.rank == 2 and rows.can_be(values, mesh)
    weighted = weights.shape.rank == 2
    if by_rows:
        values = rows.to_local(values, mesh)
        weights = rows.to_local(weights, mesh) if weighted else weights
    inputs = [values, tf.constant(bins, size.dtype), weights]
    (counts,) = _private.same_operation(call, inputs)
    return [rows.from_local(counts, mesh) if by_rows else counts]


def _number(size: tf.Tensor) -> int | None:
    """Return a number that is known, or that two bounds determine."""
    known = tf.get_static_value(size)
    if known is not None or size.op.type != "Minimum":
        return None if known is None else int(known)
    most, other = (tf.get_static_value(each) for each in size.op.inputs)
    at_least = next((each for each in size.op.inputs if each.op.type == "Maximum"), None)
    bound = other if most is None else most
    if at_least is None or bound is None:
        return None
    least = [tf.get_static_value(each) for each in at_least.op.inputs]
    return int(bound) if any(each is not None and each >= bound for each in least) else None
