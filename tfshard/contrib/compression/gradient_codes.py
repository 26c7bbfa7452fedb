"""Gradients as they are sent: bfloat16, or codes of 8 bits in blocks of 256 elements that share a scale.

The codes are linear (`devices/block_codes.py`): an element becomes the nearest of 255 multiples of the block's largest
magnitude over 127. Dettmers 2016, "8-Bit Approximations for Parallelism in Deep Learning",
https://arxiv.org/abs/1511.04561, has other spacings; these codes take the fewest operations. The rounding error is
kept, and sent with a later gradient.
"""

import tensorflow as tf

from tfshard.devices import block_codes

# The bits of a word that are the first of two elements of bfloat16.
_UPPER = 0xFFFF0000


def encode(values: tf.Tensor, compression: str) -> tf.Tensor:
    """Encode lines for sending.

    Args:
        values: float32, `(lines, elements)`, on one device.
        compression: `"bfloat16"` or `"int8"`.

    Returns:
        float32, `(lines, words)`: words of 32 bits, which are no numbers. Only copy them, and never add them. A word
        holds two bfloat16 elements or four codes.
    """
    if compression != "bfloat16":
        return block_codes.encode(values, compression)
    lines, elements = values.shape
    narrow = tf.cast(tf.pad(values, [[0, 0], [0, elements % 2]]), tf.bfloat16)
    # The upper half of each word is the element.
    pairs = tf.reshape(tf.cast(narrow, tf.float32), (lines, 2, -1))
    lower = tf.bitwise.right_shift(_bits(pairs[:, 1]), _word(16))
    return tf.bitcast(tf.bitwise.bitwise_or(_bits(pairs[:, 0]), lower), tf.float32)


def decode(encoded: tf.Tensor, compression: str, elements: int) -> tf.Tensor:
    """Return the elements that `encode` rounded: float32, `(lines, elements)`."""
    if compression != "bfloat16":
        return block_codes.decode(encoded, compression, elements)
    bits = _bits(encoded)
    halves = tf.bitwise.bitwise_and(bits, _word(_UPPER)), tf.bitwise.left_shift(bits, _word(16))
    pairs = tf.stack([tf.bitcast(each, tf.float32) for each in halves], axis=1)
    return tf.reshape(pairs, (encoded.shape[0], -1))[:, :elements]


def _bits(values: tf.Tensor) -> tf.Tensor:
    """Return the bits of float32 elements. On GPUs, all operations on uint32 here are on the device."""
    return tf.bitcast(values, tf.uint32)


def _word(number: int) -> tf.Tensor:
    return tf.constant(number, tf.uint32)
