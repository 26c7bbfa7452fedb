"""Measure how long a device takes to compress a gradient, for `compression_pays`."""

import math
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfshard.contrib.compression import gradient_codes
from tfshard.contrib.compression.options import PowerSGD
from tfshard.layouts import gradient_reduction
from tfshard.layouts.gradient_reduction import MEASURED_BYTES

_SIDE = math.isqrt(MEASURED_BYTES // 4)


def encode_seconds_per_byte(how: str | PowerSGD | None, *, repeats: int = 5) -> float:
    """Measure the seconds to encode and decode a byte of a float32 gradient on this host: the best of several runs.

    Each run encodes a gradient of 4 MiB, decodes it for the residual, and decodes a received gradient. With PowerSGD, a
    run multiplies the gradient by its factors as a step does, with the orthogonalization between. Other work on the
    host slows the measurement.

    Args:
        how: `"bfloat16"`, `"int8"` or a `tfshard.PowerSGD`; None takes no time.
        repeats: The number of runs, after one warm-up run.

    Raises:
        StrategyError: Another compression.

    Example:

    >>> import tfshard
    >>> 0 < tfshard.measure.encode_seconds_per_byte("int8", repeats=1) < 1
    True
    """
    reduction = gradient_reduction.from_option(how)
    if reduction is None:
        return 0.0
    run = reduction.encoder(1)
    seconds = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        run().numpy()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:]) / MEASURED_BYTES


def encoder(how: str | PowerSGD, devices: int) -> Callable[[], tf.Tensor]:
    """Return a function that encodes and decodes a gradient of `MEASURED_BYTES` on several devices at once.

    The devices of this host work like the devices of a step. The result of the function is ready when all devices are.
    """

    def coded(gradient: tf.Tensor) -> tf.Tensor:
        if isinstance(how, PowerSGD):
            factor = gradient[:, : how.rank]
            left, _ = tf.linalg.qr(tf.matmul(gradient, factor))
            right = tf.matmul(gradient, left, transpose_a=True)
            made = tf.matmul(left, right, transpose_b=True)
            return gradient - made + tf.matmul(left, right + 1.0, transpose_b=True)
        assert isinstance(how, str)
        encoded = gradient_codes.encode(gradient, how)
        received = tf.roll(encoded, 1, axis=0)  # A different tensor, as if from other devices.
        decoded = gradient_codes.decode(encoded, how, _SIDE)
        return gradient - decoded + gradient_codes.decode(received, how, _SIDE)

    def run(*gradients: tf.Tensor) -> tf.Tensor:
        last = []
        for number, gradient in enumerate(gradients):
            with tf.device(f"CPU:{number}"):
                last.append(coded(gradient)[-1, -1])
        with tf.device("CPU:0"):
            return tf.add_n(last)

    values = np.random.RandomState(0).normal(size=(_SIDE, _SIDE)).astype("float32")
    gradients = []
    for number in range(devices):
        with tf.device(f"CPU:{number}"):
            gradients.append(tf.constant(values))
    traced = tf.function(run, autograph=False)
    return lambda: traced(*gradients)
