"""Arrays and tensors on the host, with as few copies as possible."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

# The dtypes that NumPy and TensorFlow share, so NumPy can view a tensor's memory.
_VISIBLE_TO_NUMPY = (tf.float16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.bool)
# The dtypes without a DeepCopy kernel.
_NOT_COPIED = (tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2)


def tensor_of(value: np.ndarray) -> tf.Tensor:
    """Copy an array to a tensor in memory from TensorFlow's allocator. Eager only.

    This writes the elements directly to their final memory. `tf.constant` makes up to two more copies: it first makes a
    slice of an array contiguous, and frees that copy only at its next call.

    Args:
        value: The array, or a slice of a larger array.
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
        # No other code has the tensor yet, so the write is safe.
        memory = (ctypes.c_byte * seen.nbytes).from_address(seen.ctypes.data)
        np.ndarray(seen.shape, seen.dtype, buffer=memoryview(memory))[...] = value
    return tensor


def computed(function: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Run a function on the host as a graph and return its result. Eager only.

    A graph operation may reuse its operand's memory. An eager operation always allocates.

    Args:
        function: A function of TensorFlow operations.
    """
    with tf.device("CPU:0"), _as_it_is():
        return tf.function(function, autograph=False, jit_compile=False)()


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    """Disable TensorFlow's graph rewriting inside the context.

    TensorFlow would compute a graph without operands a second time, to decide whether to keep its result as a constant.
    """
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


def view(tensor: tf.Tensor) -> np.ndarray:
    """Return the elements of an eager host tensor, without a copy if possible.

    Do not write to the array or keep it: it keeps the tensor's memory alive.
    """
    return np.asarray(memoryview(tensor)) if tensor.dtype in _VISIBLE_TO_NUMPY else np.asarray(tensor.numpy())
