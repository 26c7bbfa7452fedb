"""Arrays and tensors on the host, without the copies between them that can be spared."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

# Those that NumPy knows as TensorFlow does, so that it can look at a tensor's memory.
_VISIBLE_TO_NUMPY = (tf.float16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.bool)
# DeepCopy has no kernel for them.
_NOT_COPIED = (tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2)


def tensor_of(value: np.ndarray) -> tf.Tensor:
    """A tensor of an array's elements, in memory that TensorFlow's allocator gave. Eager only.

    The elements are written to where they stay. `tf.constant` takes up to two copies more: it puts a cut of an array
    in order first, and drops that copy when it is called the next time.

    Args:
        value: The array; it may be a cut of another.
    """
    dtype = tf.as_dtype(value.dtype)
    with tf.device("CPU:0"):
        if dtype in _NOT_COPIED:
            return tf.constant(value)
        if dtype not in _VISIBLE_TO_NUMPY:
            return tf.raw_ops.DeepCopy(x=tf.constant(value))
        tensor = tf.raw_ops.Empty(shape=value.shape, dtype=dtype, init=False)
    seen = view(tensor)
    if seen.size:
        # Nobody else has the tensor yet, so nobody sees it change.
        memory = (ctypes.c_byte * seen.nbytes).from_address(seen.ctypes.data)
        np.ndarray(seen.shape, seen.dtype, buffer=memoryview(memory))[...] = value
    return tensor


def computed(function: Callable[[], tf.Tensor]) -> tf.Tensor:
    """What a function gives, computed on the host as a graph. Eager only.

    An operation of a graph works in the memory of its operand where it can; in eager code each has memory of its own.

    Args:
        function: Of TensorFlow operations.
    """
    with tf.device("CPU:0"), _as_it_is():
        return tf.function(function, autograph=False, jit_compile=False)()


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    """TensorFlow does not rewrite graphs: it would compute one without operands once more, to see if it can keep that
    as a constant."""
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


def view(tensor: tf.Tensor) -> np.ndarray:
    """The elements of an eager tensor on the host, without a copy where that can be.

    Not to be written to, nor kept: it keeps the tensor's memory.
    """
    return np.asarray(memoryview(tensor)) if tensor.dtype in _VISIBLE_TO_NUMPY else np.asarray(tensor.numpy())
