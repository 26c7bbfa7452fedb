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
# Added to a code, so that all codes are positive.
_BIAS = _LARGEST + 1
# The bits of a word that are the first of two elements of bfloat16.
_UPPER = 0xFFFF0000


def encode(values: tf.Tensor, compression: str) -> tf.Tensor:
    """Encode lines for sending.

    Args:
        values: float32, `(lines, elements)`, on one device.
        compression: `"bfloat16"` or `"int8"`.

    Returns:
        float32, `(lines, words)`: words of 32 bits, which are no numbers. Only copy them, and never add them. A word
        holds two bfloat16 elements or four codes; a block has 256 codes and then its scale. A block with an element
        that is not finite decodes to NaN. Collectives take no smaller elements, and GPUs keep int32 in the memory of
        the host. (TensorFlow's bitcast of several elements to one is not used: in a "parted" layout it ends the
        process.)
    """
    lines, elements = values.shape
    if compression == "bfloat16":
        narrow = tf.cast(tf.pad(values, [[0, 0], [0, elements % 2]]), tf.bfloat16)
        # The upper half of each word is the element.
        pairs = tf.reshape(tf.cast(narrow, tf.float32), (lines, 2, -1))
        lower = tf.bitwise.right_shift(_bits(pairs[:, 1]), _word(16))
        return tf.bitcast(tf.bitwise.bitwise_or(_bits(pairs[:, 0]), lower), tf.float32)
    values = tf.pad(values, [[0, 0], [0, -elements % BLOCK_ELEMENTS]])
    blocks = tf.reshape(values, (lines, -1, BLOCK_ELEMENTS))
    largest = tf.reduce_max(tf.abs(blocks), axis=-1, keepdims=True)
    is_finite = tf.reduce_all(tf.math.is_finite(blocks), axis=-1, keepdims=True)
    scale = tf.where(is_finite, largest / _LARGEST, np.float32("nan"))
    # A block that is not finite may have any codes.
    codes = tf.round(tf.math.divide_no_nan(blocks, tf.where(is_finite, scale, tf.zeros_like(scale))))
    codes = tf.clip_by_value(codes, -_LARGEST, _LARGEST) + _BIAS
    quarters = tf.reshape(codes, (*blocks.shape[:-1], 4, -1))
    words = _shifted(quarters, 0)
    for quarter in range(1, 4):
        words = tf.bitwise.bitwise_or(words, _shifted(quarters, quarter))
    return tf.reshape(tf.concat([tf.bitcast(words, tf.float32), scale], axis=-1), (lines, -1))


def decode(encoded: tf.Tensor, compression: str, elements: int) -> tf.Tensor:
    """Return the elements that `encode` rounded: float32, `(lines, elements)`."""
    lines = encoded.shape[0]
    if compression == "bfloat16":
        bits = _bits(encoded)
        halves = tf.bitwise.bitwise_and(bits, _word(_UPPER)), tf.bitwise.left_shift(bits, _word(16))
        pairs = tf.stack([tf.bitcast(each, tf.float32) for each in halves], axis=1)
        return tf.reshape(pairs, (lines, -1))[:, :elements]
    blocks = tf.reshape(encoded, (lines, -1, BLOCK_WORDS))
    bits = _bits(blocks[..., :-1])
    shifted = [tf.bitwise.right_shift(bits, _word(8 * quarter)) for quarter in range(4)]
    codes = [tf.cast(tf.bitwise.bitwise_and(each, _word(255)), tf.float32) for each in shifted]
    values = (tf.concat(codes, axis=-1) - _BIAS) * blocks[..., -1:]
    return tf.reshape(values, (lines, -1))[:, :elements]


def _bits(values: tf.Tensor) -> tf.Tensor:
    """Return the bits of float32 elements. On GPUs, all operations on uint32 here are on the device."""
    return tf.bitcast(values, tf.uint32)


def _word(number: int) -> tf.Tensor:
    return tf.constant(number, tf.uint32)


def _shifted(quarters: tf.Tensor, quarter: int) -> tf.Tensor:
    """Return the codes of a quarter of each block, at the place of the quarter in a word."""
    return tf.bitwise.left_shift(tf.cast(quarters[..., quarter, :], tf.uint32), _word(8 * quarter))
