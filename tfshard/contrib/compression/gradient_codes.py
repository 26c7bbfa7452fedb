"""Gradients as they are sent: bfloat16, or codes of 8 bits in blocks of 256 elements that share a scale.

The codes are linear: an element becomes the nearest of 255 multiples of the block's largest magnitude over 127.
Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning", https://arxiv.org/abs/1511.04561, has other
spacings; these codes take the fewest operations. The rounding error is kept, and sent with a later gradient.
"""

import numpy as np
import tensorflow as tf

from tfshard.contrib.compression.compressed_form import BLOCK_WORDS
from tfshard.layouts.variable_layout import BLOCK_ELEMENTS

_LARGEST = 127
# The bits of a word that are the first of two elements of bfloat16.
_UPPER = -(1 << 16)


def encode(values: tf.Tensor, compression: str) -> tf.Tensor:
    """Encode lines for sending.

    Args:
        values: float32, `(lines, elements)`, on one device.
        compression: `"bfloat16"` or `"int8"`.

    Returns:
        int32, `(lines, words)`, since an all-gather takes no smaller elements. A word holds two bfloat16 elements or
        four codes; a block has 256 codes and then its scale. A block with an element that is not finite decodes to NaN.
        (TensorFlow's bitcast of several elements to one is not used: in a "parted" layout it ends the process.)
    """
    lines, elements = values.shape
    if compression == "bfloat16":
        narrow = tf.cast(tf.pad(values, [[0, 0], [0, elements % 2]]), tf.bfloat16)
        # The upper half of each word is the element.
        words = tf.reshape(tf.bitcast(tf.cast(narrow, tf.float32), tf.int32), (lines, 2, -1))
        return _joined(words[:, 0], _shifted(words[:, 1], 16))
    values = tf.pad(values, [[0, 0], [0, -elements % BLOCK_ELEMENTS]])
    blocks = tf.reshape(values, (lines, -1, BLOCK_ELEMENTS))
    largest = tf.reduce_max(tf.abs(blocks), axis=-1, keepdims=True)
    is_finite = tf.reduce_all(tf.math.is_finite(blocks), axis=-1, keepdims=True)
    scale = tf.where(is_finite, largest / _LARGEST, np.float32("nan"))
    # A block that is not finite may have any codes.
    codes = tf.round(tf.math.divide_no_nan(blocks, tf.where(is_finite, scale, tf.zeros_like(scale))))
    codes = tf.clip_by_value(codes, -_LARGEST, _LARGEST)
    quarters = tf.reshape(tf.cast(codes, tf.int32), (*blocks.shape[:-1], 4, -1))
    words = tf.bitwise.left_shift(quarters[..., 0, :], 24)
    for quarter in range(1, 4):
        words = _joined(
            words, tf.bitwise.left_shift(tf.bitwise.bitwise_and(quarters[..., quarter, :], 255), 24 - 8 * quarter)
        )
    return tf.reshape(tf.concat([words, tf.bitcast(scale, tf.int32)], axis=-1), (lines, -1))


def decode(encoded: tf.Tensor, compression: str, elements: int) -> tf.Tensor:
    """Return the elements that `encode` rounded: float32, `(lines, elements)`."""
    lines = encoded.shape[0]
    if compression == "bfloat16":
        words = tf.stack([tf.bitwise.bitwise_and(encoded, _UPPER), tf.bitwise.left_shift(encoded, 16)], axis=1)
        return tf.reshape(tf.bitcast(words, tf.float32), (lines, -1))[:, :elements]
    blocks = tf.reshape(encoded, (lines, -1, BLOCK_WORDS))
    words = blocks[..., :-1]
    # A shift to the right keeps the sign.
    quarters = [tf.bitwise.right_shift(tf.bitwise.left_shift(words, 8 * quarter), 24) for quarter in range(4)]
    codes = tf.cast(tf.concat(quarters, axis=-1), tf.float32)
    values = codes * tf.bitcast(blocks[..., -1:], tf.float32)
    return tf.reshape(values, (lines, -1))[:, :elements]


def _joined(words: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_or(words, others)


def _shifted(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Shift to the right, and fill up with zeros."""
    return tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, bits), (1 << 32 - bits) - 1)
