"""Float32 elements as codes of 8 bits, in blocks of 256 that each have a scale.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (https://arxiv.org/abs/2110.02861). `encode`
divides a block by its largest magnitude. A code names the decade of each quotient (one of seven), and a place in the
decade. Higher decades have more places: large elements are the most exact, and an element a ten-millionth of the
largest still has a code. With the sign, the decades have 1, 2, 4, ... 64 places: 127 magnitudes. A block without
negative elements, such as a block of second moments, needs no sign and has twice as many places.

Three things differ from the paper. Each block chooses its map by its elements, not by the name of the slot. No element
other than 0 becomes 0, whatever its neighbours are: a second moment of 0 would divide an update by epsilon. The largest
element is exact, with either sign; encoding a decoded block therefore gives the same codes.

DTensor expands all operations along dims in front of the block, so each device encodes its local shard.
"""

import math

import numpy as np
import tensorflow as tf

from tfshard.layouts.variable_layout import BLOCK_ELEMENTS

_DECADES = 7
# Words of 64 bits: GPUs keep constants, sums and slices of int32 in the memory of the host.
_SHIFTS = np.array([0, 8, 16, 24], np.int64)
# Float32 numbers below are rounded to zero by TensorFlow's kernels on CPU.
_SMALLEST = float(np.finfo(np.float32).tiny)


def encode(values: tf.Tensor) -> tf.Tensor:
    """Encode blocks as codes and scales.

    Args:
        values: float32, `(..., 256)`.

    Returns:
        uint8, `(..., 260)`: the codes, and behind them the four bytes of the scale. The scale is the largest magnitude,
        with a negative sign if no element of the block is negative. A block with an element that is not finite decodes
        to elements that are not finite.
    """
    largest = tf.reduce_max(tf.abs(values), axis=-1, keepdims=True)
    largest = tf.where(largest < _SMALLEST, tf.zeros_like(largest), largest)
    unsigned = tf.cast(tf.reduce_min(values, axis=-1, keepdims=True) >= 0, tf.float32)
    magnitude = tf.abs(values) / tf.where(largest > 0, largest, tf.ones_like(largest))
    decade = tf.floor(tf.math.log(magnitude) * (1 / math.log(10))) + _DECADES
    decade = tf.clip_by_value(decade, 0.0, _DECADES - 1.0)
    places = tf.pow(2.0, decade + unsigned)
    in_decade = magnitude * tf.pow(10.0, _DECADES - 1 - decade)
    place = tf.clip_by_value(tf.floor((in_decade - 0.1) * places / 0.9), 0.0, places - 1)
    code = places + place - unsigned + 128 * tf.cast(values < 0, tf.float32)
    code = tf.where(tf.equal(values, 0), tf.zeros_like(code), code)
    return tf.concat([tf.cast(code, tf.uint8), _to_bytes(largest * (1 - 2 * unsigned))], axis=-1)


def decode(stored: tf.Tensor) -> tf.Tensor:
    """Return the elements that `encode` rounded to these codes.

    Args:
        stored: uint8, `(..., 260)`.

    Returns:
        float32, `(..., 256)`.
    """
    scale = _from_bytes(stored[..., BLOCK_ELEMENTS:])
    number = tf.cast(stored[..., :BLOCK_ELEMENTS], tf.float32) + 256 * tf.cast(scale < 0, tf.float32)
    return tf.gather(tf.constant(_TABLE), tf.cast(number, tf.int32)) * tf.abs(scale)


def _to_bytes(scale: tf.Tensor) -> tf.Tensor:
    """float32 `(..., 1)` as uint8 `(..., 4)`. DTensor does not expand a bitcast that changes the shape."""
    words = tf.bitwise.right_shift(tf.cast(tf.bitcast(scale, tf.int32), tf.int64), _SHIFTS)
    return tf.cast(tf.bitwise.bitwise_and(words, 255), tf.uint8)


def _from_bytes(stored: tf.Tensor) -> tf.Tensor:
    """Invert `_to_bytes`."""
    words = tf.bitwise.left_shift(tf.cast(stored, tf.int64), _SHIFTS)
    return tf.bitcast(tf.cast(tf.reduce_sum(words, axis=-1, keepdims=True), tf.int32), tf.float32)


def _magnitudes(places_of_the_first: int) -> np.ndarray:
    """0, and the middle of each place of each decade; of the last place its end, which is 1."""
    found = [0.0]
    for decade in range(_DECADES):
        places = places_of_the_first << decade
        found += [10.0 ** (decade - _DECADES + 1) * (0.1 + 0.9 * (place + 0.5) / places) for place in range(places)]
    return np.array([*found[:-1], 1.0])


def _table() -> np.ndarray:
    """Return the value of each code: 256 with a sign, and 256 without. The last one does not occur."""
    signed = _magnitudes(1)
    return np.concatenate([signed, -signed, _magnitudes(2), [1.0]]).astype(np.float32)


_TABLE = _table()
