"""A `tf.cond` with a branch that is known while a step is traced: DTensor has no expansion for many conditions."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

# The operations that make conditions, in addition to constants, shapes and ranks.
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
    "LogicalNot": np.logical_not,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Identity": np.asarray,
}


def value_of(predicate: tf.Tensor) -> bool | None:
    """Return whether a condition is true. None if constants and static shapes do not tell.

    Example:
        >>> with tf.Graph().as_default():
        ...     x = tf.zeros([2, 3])
        ...     value_of(tf.logical_or(tf.equal(tf.rank(x), 0), tf.equal(tf.shape(x)[1], 3)))
        True
    """
    value = _value(predicate)
    return None if value is None else bool(value)


def number_of(tensor: tf.Tensor) -> int | None:
    """Return an integer. None if constants and static shapes do not tell."""
    value = _value(tensor)
    return None if value is None else int(value)


def _value(tensor: tf.Tensor) -> np.ndarray | None:
    if not tf.is_tensor(tensor) or tf.executing_eagerly():
        return np.asarray(tensor)
    value = tf.get_static_value(tensor)
    if value is not None:
        return np.asarray(value)
    if tensor.op.type == "StridedSlice":
        return _element(tensor)
    function = _FUNCTIONS.get(tensor.op.type)
    if function is None:
        return None
    operands = [_value(each) for each in tensor.op.inputs]
    return None if any(each is None for each in operands) else function(*operands)


def _element(tensor: tf.Tensor) -> np.ndarray | None:
    """Return an element of a vector, such as a known size of a shape with other unknown sizes."""
    vector, begin, *_ = tensor.op.inputs
    place, known = tf.get_static_value(begin), tf.get_static_value(vector)
    if place is None or tensor.shape.rank != 0 or vector.shape.rank != 1:
        return None
    if known is not None:
        return np.asarray(known[int(place[0])])
    shape = vector.op.inputs[0].shape if vector.op.type == "Shape" else tf.TensorShape(None)
    size = None if shape.rank is None else shape[int(place[0])]
    return None if size is None else np.asarray(size)
