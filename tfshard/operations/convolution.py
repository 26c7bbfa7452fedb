"""Convolutions that DTensor does not expand, or expands badly: with sharded kernels, and of volumes in groups.

DTensor expands no convolution over sharded channels ("Filter for convolution must have fully replicated layout" in
TensorFlow's conv_spmd_expander.cc). If a model axis shards the kernel, the module therefore sums matrix products: for
each place of the kernel, the product of a shifted input and a matrix. DTensor expands these products, and sums them
locally before the all-reduce. A column and a row kernel send one all-reduce forward and one backward, like two Dense
layers.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import layer_patch, samples
from tfshard.storage import steps
from tfshard.storage.variables import ShardedVariable


def install(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Patch the layers of a model that can convolve with sharded kernels."""
    for layer in _private.flatten_layers(model):
        if _private.can_shard_convolution(layer):
            layer_patch.apply(layer_patch.CONVOLUTION, layer, functools.partial(_convolution_op, layer, mesh))
        if isinstance(layer, keras.layers.Conv3D) and layer.groups > 1:
            layer_patch.apply(layer_patch.GROUPS, layer, functools.partial(_by_group, layer, mesh))


def _by_group(layer: keras.Layer, mesh: dtensor.Mesh, original: layer_patch.Method) -> layer_patch.Method:
    """Replace a layer's `convolution_op` inside a step by one convolution for each group of channels. Outside of XLA,
    TensorFlow has no CPU kernel for all groups together."""

    def convolution_op(inputs: Any, kernel: Any) -> tf.Tensor:
        if steps.current() is None:
            return original(inputs, kernel)
        axis = -1 if layer.data_format == "channels_last" else 1
        inputs = transfer.by_sample(inputs, mesh)  # A split of sharded channels is refused.
        parts = zip(tf.split(inputs, layer.groups, axis), tf.split(kernel, layer.groups, -1), strict=True)
        results = [
            keras.ops.conv(part, of_group, list(layer.strides), layer.padding, layer.data_format, layer.dilation_rate)
            for part, of_group in parts
        ]
        return tf.concat(results, axis)

    return convolution_op


def _convolution_op(layer: keras.Layer, mesh: dtensor.Mesh, original: layer_patch.Method) -> layer_patch.Method:
    """Replace a layer's `convolution_op` inside a step by matrix products if the kernel is sharded."""

    def convolution_op(inputs: Any, kernel: Any) -> tf.Tensor:
        axes = _kernel_axes(layer)
        if steps.current() is None or not any(axes):
            return original(inputs, kernel)
        return convolve(
            tf.convert_to_tensor(inputs),
            tf.convert_to_tensor(kernel),
            strides=layer.strides,
            dilation=layer.dilation_rate,
            same=layer.padding == "same",
            pins=tuple(functools.partial(_pinned, axis=axis, mesh=mesh) for axis in axes[-2:]),
        )

    return convolution_op


def _kernel_axes(layer: keras.Layer) -> Axes:
    """Return the model axes that shard the kernel of a layer, by dim. Empty if the kernel is not on a mesh."""
    current = _private.backend_variable(_private.layer_variables(layer)[0])
    return current.layout.compute if isinstance(current, ShardedVariable) else ()


def _pinned(images: tf.Tensor, *, axis: str | None, mesh: dtensor.Mesh) -> tf.Tensor:
    """Pin images so that the data axis shards samples and `axis` shards channels.

    DTensor pads a tensor only if the result gets the same layout, and it takes this layout from the operations behind
    the padding.
    """
    if tf.executing_eagerly() or images.shape[0] is None:
        return images
    if any(samples.is_on_model_axis(images, dim, mesh) for dim in range(1, images.shape.rank - 1)):
        images = samples.by_row(images, mesh)
    sizes = axis_sizes(mesh)
    data = sizes.data if sizes.data_size > 1 and images.shape[0] % sizes.data_size == 0 else None
    return transfer.relayout(images, (data, *[None] * (images.shape.rank - 2), axis), mesh)


def _as_it_is(images: tf.Tensor) -> tf.Tensor:
    return images


def convolve(
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    *,
    strides: Sequence[int],
    dilation: Sequence[int],
    same: bool,
    pins: Sequence[Callable[[tf.Tensor], tf.Tensor]] = (_as_it_is, _as_it_is),
) -> tf.Tensor:
    """Compute `tf.nn.convolution` by matrix products.

    Args:
        inputs: `(batch, *spatial, channels)` with known spatial sizes.
        kernel: `(*sizes, channels, filters)`.
        strides: The stride of each spatial dim.
        dilation: The dilation of each spatial dim.
        same: True to pad the inputs so that the output has `size / stride` places. False for no padding.
        pins: Pin the layouts of images with the channels of the inputs, and of images with the filters.
    """
    sizes = tuple(kernel.shape[:-2])
    spans = [(k - 1) * d + 1 for k, d in zip(sizes, dilation, strict=True)]
    lengths = [int(n) for n in inputs.shape[1:-1]]
    outputs, before, after = [], [], []
    for length, span, stride in zip(lengths, spans, strides, strict=True):
        output = -(-length // stride) if same else (length - span) // stride + 1
        missing = max((output - 1) * stride + span - length, 0) if same else 0
        outputs.append(output)
        before.append(missing // 2)
        after.append(missing - missing // 2)
    offsets = [tuple(i * d for i, d in zip(place, dilation, strict=True)) for place in
               itertools.product(*map(range, sizes))]  # fmt: skip

    def shifted(padded: tf.Tensor, offset: Sequence[int]) -> tf.Tensor:
        return _window(padded, offset, outputs, strides)

    def apply(
        inputs: tf.Tensor, kernel: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
        padded = _pad(inputs, before, after, pins[0])
        matrices = tf.unstack(tf.reshape(kernel, (math.prod(sizes), *kernel.shape[-2:])))
        # A single all-reduce behind the sum, if the channels are sharded.
        result = tf.add_n([
            _product(shifted(padded, offset), matrix) for offset, matrix in zip(offsets, matrices, strict=True)
        ])  # fmt: skip

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            per_place = [_outer(shifted(padded, offset), upstream) for offset in offsets]
            # The gradient of the input works alike: the upstream gradient, padded with zeros and shifted the other way.
            spread = _spread(pins[1](upstream), strides)
            room = [span - 1 for span in spans]
            padded_lengths = [n + b + a for n, b, a in zip(lengths, before, after, strict=True)]
            behind = [n - size for n, size in zip(padded_lengths, spread.shape[1:-1], strict=True)]
            spread = _pad(spread, room, [max(0, size) for size in behind], pins[1])
            ones = [1] * len(lengths)
            parts = []
            for offset, matrix in zip(offsets, matrices, strict=True):
                begin = [r - o + b for r, o, b in zip(room, offset, before, strict=True)]
                parts.append(_product(_window(spread, begin, lengths, ones), tf.transpose(matrix)))
            return tf.add_n(parts), tf.reshape(tf.stack(per_place), kernel.shape)

        return result, gradient

    return tf.custom_gradient(apply)(inputs, kernel)


def _spatial(tensor: tf.Tensor) -> str:
    return "hwd"[: tensor.shape.rank - 2]


def _product(tensor: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    dims = _spatial(tensor)
    return tf.einsum(f"b{dims}x,xy->b{dims}y", tensor, matrix)


def _outer(tensor: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    dims = _spatial(tensor)
    return tf.einsum(f"b{dims}x,b{dims}y->xy", tensor, upstream)


def _pad(
    tensor: tf.Tensor, before: Sequence[int], after: Sequence[int], pin: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    if not any((*before, *after)):
        return tensor
    return pin(tf.pad(pin(tensor), [(0, 0), *zip(before, after, strict=True), (0, 0)]))


def _window(tensor: tf.Tensor, begin: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> tf.Tensor:
    """`sizes` places of each spatial dim from `begin` on, `strides` apart."""
    end = [b + (n - 1) * s + 1 for b, n, s in zip(begin, sizes, strides, strict=True)]
    # Batch and channels as they are.
    ends = 1 | 1 << (tensor.shape.rank - 1)
    return tf.strided_slice(
        tensor, [0, *begin, 0], [0, *end, 0], [1, *strides, 1], begin_mask=ends, end_mask=ends
    )  # fmt: skip


def _spread(tensor: tf.Tensor, strides: Sequence[int]) -> tf.Tensor:
    """Insert zeros between the places of each spatial dim. The places are then `strides` apart."""
    for dim, stride in enumerate(strides, start=1):
        if stride == 1:
            continue
        shape = list(tensor.shape)
        apart = tf.pad(tf.expand_dims(tensor, dim + 1), [(0, stride - 1 if i == dim + 1 else 0) for i in
                                                          range(tensor.shape.rank + 1)])  # fmt: skip
        shape[dim] = shape[dim] * stride
        merged = tf.reshape(apart, [-1 if n is None else n for n in shape])
        wanted = shape[dim] - (stride - 1)
        tensor = tf.split(merged, [wanted, shape[dim] - wanted], axis=dim)[0]
    return tensor
