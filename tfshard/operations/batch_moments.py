"""Batch normalization in one small gather forward and one small all-reduce backward.

TensorFlow's batch normalization has two reductions forward, one after the other, and several backward. DTensor's
combiner merges them. It compares each pair of reductions, which takes most of the time to compile a net with hundreds
of these layers. This module handles meshes without a tensor axis only: with a tensor axis, channels may be sharded as
well.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import local_shards, transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import rows


def moments(
    mesh: dtensor.Mesh,
    original: Callable[..., Any],
    x: Any,
    axes: Any,
    shift: Any = None,
    keepdims: bool = False,
    name: Any = None,
) -> Any:
    """`tf.nn.moments`: compute mean and variance of each device's local rows, and combine them over the devices.

    The variance keeps all digits, unlike a mean of squares (Chan, Golub and LeVeque 1979, "Updating formulae and a
    pairwise algorithm for computing sample variances", eq. 2.1).
    """
    if (
        not _can_be(x, mesh)
        or not isinstance(axes, (list, tuple))
        or 0 not in (dims := [axis % x.shape.rank for axis in axes])
    ):
        return original(x, axes, shift, keepdims, name)

    def apply(x: tf.Tensor) -> Any:
        with local_shards.scope():
            local = tf.stack(original(rows.to_local(x, mesh), dims, keepdims=True), 1)
            every = rows.from_local(local, mesh)
        means, variances = tf.unstack(transfer.replicate(every, mesh), axis=1)
        mean = tf.reduce_mean(means, 0, keepdims=True)
        variance = tf.reduce_mean(variances + (means - mean) ** 2, 0, keepdims=True)

        def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
            count = tf.cast(tf.size(x) // tf.size(mean), x.dtype)
            of_mean, of_variance = tf.reshape(of_mean, mean.shape), tf.reshape(of_variance, mean.shape)
            # Like TensorFlow, the second derivative of the variance ignores the derivative of the mean.
            return (of_mean + 2 * of_variance * (x - tf.stop_gradient(mean))) / count

        return ((mean, variance) if keepdims else (tf.squeeze(mean, dims), tf.squeeze(variance, dims))), gradient

    return tf.custom_gradient(apply)(x)


def normalize(
    mesh: dtensor.Mesh,
    original: Callable[..., tf.Tensor],
    x: Any,
    mean: Any,
    variance: Any,
    offset: Any,
    scale: Any,
    variance_epsilon: Any,
    name: Any = None,
) -> tf.Tensor:
    """`tf.nn.batch_normalization`: with the gradients of mean, variance, offset and scale from one reduction."""
    given = [each for each in (mean, variance, offset, scale) if each is not None]
    tensors = [tf.convert_to_tensor(each) for each in given] if _can_be(x, mesh) else []
    if not tensors or not _are_of_channels(tensors, x):
        return original(x, mean, variance, offset, scale, variance_epsilon, name)
    has_offset, has_scale = offset is not None, scale is not None

    def apply(x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, *others: tf.Tensor) -> Any:
        scale = others[-1] if has_scale else None
        result = original(x, mean, variance, others[0] if has_offset else None, scale, variance_epsilon)
        padded = [1] * (x.shape.rank - mean.shape.rank) + mean.shape.as_list()
        dims = [dim for dim, size in enumerate(padded) if size == 1]

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            with local_shards.scope():
                local_upstream, centered = (
                    rows.to_local(upstream, mesh),
                    rows.to_local(x, mesh) - rows.replicated(mean, mesh),
                )
                sums = tf.stack([tf.reduce_sum(local_upstream, dims), tf.reduce_sum(local_upstream * centered, dims)])
                sums = rows.psum(sums, mesh)
            of_offset, of_factor = (tf.reshape(each, mean.shape) for each in tf.unstack(sums))
            inverse = tf.math.rsqrt(variance + variance_epsilon)
            factor = inverse if scale is None else inverse * scale
            of_variance = -0.5 * of_factor * factor * inverse**2
            found = [upstream * factor, -factor * of_offset, of_variance]
            return found + [of_offset] * has_offset + [of_factor * inverse] * has_scale

        return result, gradient

    return tf.custom_gradient(apply)(x, *tensors)


def _can_be(x: Any, mesh: dtensor.Mesh) -> bool:
    if axis_sizes(mesh).has_tensor_parallelism or not tf.is_tensor(x):
        return False
    return bool(x.shape.rank and x.dtype in (tf.float32, tf.float64) and rows.can_be(x, mesh))


def _are_of_channels(tensors: list[tf.Tensor], x: tf.Tensor) -> bool:
    """Return whether each tensor has one value for each channel, the same for all samples."""
    shape = tensors[0].shape
    same = all(each.dtype == x.dtype and each.shape == shape for each in tensors) and shape.is_fully_defined()
    return bool(same and (shape.rank < x.shape.rank or shape[0] == 1) and x.shape[1:].is_fully_defined())
