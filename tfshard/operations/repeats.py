"""`tf.repeat` by a list of counts, in a step that is being traced: a gather by index.

TensorFlow tiles all elements by the largest count and masks the result. The size of the result is unknown while a step
is traced, even if the counts are known, and DTensor refuses operations on it. A gather by index has a known size
whenever the counts are known.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor


def repeat(
    mesh: dtensor.Mesh, original: Callable[..., tf.Tensor], input: Any, repeats: Any, axis: Any = None, name: Any = None
) -> tf.Tensor:
    """`tf.repeat`. Calls `original` for a single count, and for arguments that TensorFlow refuses."""
    del mesh
    data, counts = tf.convert_to_tensor(input), tf.convert_to_tensor(repeats)
    if tf.executing_eagerly() or counts.shape.rank != 1 or counts.shape[0] in (1, None) or not data.shape.rank:
        return original(input, repeats, axis, name)
    if axis is None:
        data, axis = tf.reshape(data, [-1]), 0
    if data.shape[axis] not in (None, counts.shape[0]):
        return original(input, repeats, axis, name)
    known = tf.get_static_value(counts)
    if known is not None:
        index = tf.constant(np.repeat(np.arange(known.size, dtype="int32"), np.maximum(known, 0)))
    else:
        # The source of an element is the number of elements with all copies before it.
        ends = tf.cumsum(tf.maximum(tf.cast(counts, tf.int32), 0))
        index = tf.searchsorted(ends, tf.range(ends[-1]), side="right")
    return tf.gather(data, index, axis=axis, name=name)
