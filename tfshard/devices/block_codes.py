"""Codes of one byte for elements that devices send each other. Blocks of 256 elements share a float32 scale.

- `"int8"`: the element over the scale, rounded to an integer from -127 to 127. The scale is the block's largest
  magnitude over 127.
- `"float8_e4m3fn"`: the element over the scale, rounded to an 8-bit float with a sign, 4 bits of exponent and 3 of
  mantissa (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433). The scale is
  the block's largest magnitude over 448, the format's largest number.

The error of int8 is at most half a step for all elements of a block. The error of float8 is relative to the element, so
float8 keeps small elements next to a large one. (ZeRO++, Wang et al. 2023, https://arxiv.org/abs/2306.10209, sends
parameters in linear codes, such as int8.)

Devices send float32 words of four codes. NCCL in TensorFlow gathers float32, float64, float16, int32 and int64 only,
and GPUs keep int32 in the memory of the host. TensorFlow's bitcast cannot make the codes: it takes no float8, and a
bitcast of several elements to one in a "parted" layout ends the process.
"""

import numpy as np
import tensorflow as tf

from tfshard.layouts.variable_layout import BLOCK_ELEMENTS, BLOCK_WORDS

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
# Added to an int8 code, so that all codes are positive.
_BIAS = 128

# Of float8_e4m3fn: the bits of the mantissa, the difference between the exponent biases of float32 and float8, the
# smallest normal number, and the step between the smaller numbers.
_MANTISSA, _BIASES, _NORMAL, _SUBNORMAL = 3, 127 - 7, 2.0**-6, 2.0**-9
# The bits that float32's mantissa has in excess.
_DROPPED = 23 - _MANTISSA


def encode(values: tf.Tensor, dtype: str) -> tf.Tensor:
    """Encode lines for sending.

    Args:
        values: Local elements, float32, `(lines, elements)`. Each line is cut into blocks.
        dtype: `"int8"` or `"float8_e4m3fn"`.

    Returns:
        float32, `(lines, words)`: for each block, 64 words of codes and the scale. Words of codes are bits, not
        numbers: only copy them. A block with an element that is not finite decodes to NaN.
    """
    lines, elements = values.shape
    values = tf.pad(values, [[0, 0], [0, -elements % BLOCK_ELEMENTS]])
    blocks = tf.reshape(values, (lines, -1, BLOCK_ELEMENTS))
    largest = tf.reduce_max(tf.abs(blocks), axis=-1, keepdims=True)
    is_finite = tf.reduce_all(tf.math.is_finite(blocks), axis=-1, keepdims=True)
    scale = tf.where(is_finite, largest / _LARGEST[dtype], np.float32("nan"))
    # The codes of a block that is not finite do not matter.
    scaled = tf.math.divide_no_nan(blocks, tf.where(is_finite, scale, tf.zeros_like(scale)))
    scaled = tf.clip_by_value(scaled, -_LARGEST[dtype], _LARGEST[dtype])
    codes = tf.round(scaled) + _BIAS if dtype == "int8" else _float8_codes(scaled)
    of_words = tf.reshape(codes, (*blocks.shape[:-1], -1, 4))
    words = _shifted(of_words, 0)
    for byte in range(1, 4):
        words = tf.bitwise.bitwise_or(words, _shifted(of_words, byte))
    return tf.reshape(tf.concat([tf.bitcast(words, tf.float32), scale], axis=-1), (lines, -1))


def decode(encoded: tf.Tensor, dtype: str, elements: int) -> tf.Tensor:
    """Return the rounded elements, float32, `(lines, elements)`, from the result of `encode`."""
    lines = encoded.shape[0]
    blocks = tf.reshape(encoded, (lines, -1, BLOCK_WORDS))
    codes = tf.reshape(tf.bitcast(blocks[..., :-1], tf.uint8), (lines, -1, BLOCK_ELEMENTS))
    # TensorFlow runs these operations in place, so that memory holds little more than the result.
    multiples = tf.cast(codes, tf.float32) - _BIAS if dtype == "int8" else tf.gather(_FLOAT8, tf.cast(codes, tf.int32))
    values = multiples * blocks[..., -1:]
    return tf.reshape(values, (lines, -1))[:, :elements]


def _float8_codes(scaled: tf.Tensor) -> tf.Tensor:
    """Return the codes of the nearest float8_e4m3fn numbers, from 0 to 255 in float32. Ties go to even codes."""
    magnitude = tf.abs(scaled)
    bits = tf.bitcast(magnitude, tf.uint32)
    is_odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, _word(_DROPPED)), _word(1))
    nearest = tf.bitwise.right_shift(bits + is_odd + _word((1 << (_DROPPED - 1)) - 1), _word(_DROPPED))
    normal = tf.cast(nearest, tf.float32) - (_BIASES << _MANTISSA)
    code = tf.where(magnitude < _NORMAL, tf.round(magnitude / _SUBNORMAL), normal)
    return code + 128 * tf.cast(scaled < 0, tf.float32)


def _float8_table() -> np.ndarray:
    """Return the float8_e4m3fn number of each code from 0 to 255."""
    codes = np.arange(256)
    exponent, mantissa = codes >> _MANTISSA & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    magnitude = np.where(exponent == 0, mantissa * _SUBNORMAL, normal)
    table: np.ndarray = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return table


_FLOAT8 = _float8_table()


def _word(number: int) -> tf.Tensor:
    return tf.constant(number, tf.uint32)


def _shifted(codes: tf.Tensor, byte: int) -> tf.Tensor:
    """Return the codes of one byte of each word, at the place of the byte."""
    return tf.bitwise.left_shift(tf.cast(codes[..., byte], tf.uint32), _word(8 * byte))
