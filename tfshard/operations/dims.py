"""Rewrite rules of operations that need a full dim on each device: splits, tiles, paddings, convolutions.

DTensor refuses these operations if the dim is sharded, or shards a result that it cannot shard. The rules replicate the
dim before and after the operation if the dim is the batch, or the last of two or three dims on a mesh of several axes.
Tracing does not show what shards the other dims, and a layout may keep the sharding of one dim only ("match"). With
more dims, such as the dims of attention heads, the rules would gather more than they must.
"""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import row_operations, samples, unsized
from tfshard.operations.conditions import model_axis_has_devices
from tfshard.operations.registry import rewrite_rule

_FAULT = "refuses a sharded dim, or shards a result that it cannot shard"


@rewrite_rule(
    "Split", "SplitV", graph=True, eager=False, gradient="registered", order=3, fault=_FAULT, cases=("split",),
)  # fmt: skip
def split(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the dim that is split, before and after."""
    number = 1 if call.type == "Split" else 0
    axis = tf.get_static_value(call.inputs[0 if call.type == "Split" else 2])
    rank = call.inputs[number].shape.rank
    if axis is None or not rank:
        return None
    return _with_full_dims(call, number, [int(axis) % rank], mesh)


@rewrite_rule("Tile", graph=True, eager=False, gradient="registered", order=3, fault=_FAULT, cases=("tile",))
def tile(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the dims that are tiled, before and after."""
    multiples = tf.get_static_value(call.inputs[1])
    if multiples is None:
        return None
    return _with_full_dims(call, 0, [dim for dim, times in enumerate(multiples) if times > 1], mesh)


@rewrite_rule("Pad", "PadV2", graph=True, eager=False, gradient="registered", order=3, fault=_FAULT, cases=("pad",))
def pad(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the dims that are padded, before and after."""
    paddings = tf.get_static_value(call.inputs[1])
    if paddings is None:  # The gradient of a slice that began at a tensor.
        if not call.inputs[0].dtype.is_floating:
            return None
        results = _private.same_operation(call, [pin_rows(call.inputs[0], mesh), *call.inputs[1:]])
        return [pin_rows(each, mesh) for each in results]
    return _with_full_dims(call, 0, [dim for dim, both in enumerate(paddings) if any(both)], mesh)


@rewrite_rule(
    "ConcatV2", graph=True, eager=False, gradient="registered", when=model_axis_has_devices, order=3,
    fault="joins the local shards in front of a row kernel: elements in another order, without an error",
    cases=("concat of features",),
)  # fmt: skip
def concat(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the dim that is joined if it is not the dim of the samples."""
    parts, axis = call.inputs[:-1], tf.get_static_value(call.inputs[-1])
    rank, sizes = parts[0].shape.rank, axis_sizes(mesh)
    if axis is None or not rank:
        return None
    axis, dims = int(axis) % rank, range(rank)
    of_samples = next((dim for dim in dims if any(samples.are_in(part, dim) for part in parts)), None)
    if axis in (0, of_samples) or not parts[0].dtype.is_floating:
        return None
    others = [dim for dim in dims if dim not in (axis, of_samples)]
    on_model = [dim for dim in others if any(samples.is_on_model_axis(part, dim, mesh) for part in parts)]
    # A gradient often cannot be followed back. Heads, if the tensor has them, are next to the dim that is joined.
    kept = next(iter((*on_model, *reversed(others))), None)
    specs = [dtensor.MATCH if dim == kept else dtensor.UNSHARDED for dim in dims]
    if of_samples is not None:
        count = parts[0].shape[of_samples]
        if count is None:
            return None
        if sizes.data_size > 1 and count % sizes.data_size == 0:
            specs[of_samples] = sizes.data
    layout = dtensor.Layout(specs, mesh)
    joined = _private.same_operation(call, [*(dtensor.relayout(part, layout) for part in parts), call.inputs[-1]])
    return [dtensor.relayout(each, layout) for each in joined]


# The operands of operations that DTensor computes for full samples only ("must be batch parallel").
OF_SAMPLES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Conv2D", "Conv3D", "MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D"), (0,)),
    "DepthwiseConv2dNative": (0,),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), (2,)),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"), (0, 2)),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad"), (0, 1, 2)),
    **dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor", "ResizeNearestNeighborGrad"), (0,)),
    "ResizeBilinearGrad": (0, 1),
}
# More than TensorFlow's kernel of a slice has.
_MOST_DIMS = 8


_UNSIZED_GRADIENTS = ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
_REPLICATED_BATCH = 'refuses a replicated batch if the next operation is sharded ("must be batch parallel")'


def _number_depends_on_values(call: _private.Call) -> bool:
    """The number of samples depends on values."""
    gradient = call.inputs[2]
    return bool(gradient.shape.rank) and unsized.depends_on_values(gradient)


@rewrite_rule(
    *_UNSIZED_GRADIENTS, graph=True, eager=False, gradient="registered", when=_number_depends_on_values, sizes="any",
    fault="expands them for known sizes only", cases=("convolution of a masked batch",),
)  # fmt: skip
def replicated_gradient(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor:
    """Compute the full gradient of a convolution on every device."""
    sizes, kernel, gradient = call.inputs
    replicated = (None,) * gradient.shape.rank

    def all_of_it(gradient: tf.Tensor) -> tf.Tensor:
        return _private.same_operation(call, [sizes, kernel, gradient])[0]

    return local_shards.run_locally(all_of_it, gradient, replicated, replicated, mesh)


@rewrite_rule(
    *_UNSIZED_GRADIENTS, graph=True, eager=False, gradient="registered", order=1, sizes="any",
    fault=_REPLICATED_BATCH, cases=("convolution of a replicated batch",),
)  # fmt: skip
@rewrite_rule(
    *(each for each in OF_SAMPLES if each not in _UNSIZED_GRADIENTS),
    graph=True, eager=False, gradient="registered", fault=_REPLICATED_BATCH,
    cases=("convolution of a replicated batch",),
)  # fmt: skip
def shard_samples(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Shard operands and results over the batch axis, which sends nothing."""
    inputs = list(call.inputs)
    for number in OF_SAMPLES[call.type]:
        inputs[number] = samples.by_row(inputs[number], mesh)
    results = _private.same_operation(call, inputs)
    return results if "Filter" in call.type else [samples.by_row(result, mesh) for result in results]


@rewrite_rule(
    "Sum", graph=True, eager=False, gradient="registered", when=model_axis_has_devices,
    fault="cannot slice more than eight dims, which TensorFlow gives the gradient of a Tile",
    cases=("gradient of a tile",),
)  # fmt: skip
def sum_of_tiles(call: _private.Call) -> tf.Tensor | None:
    """Sum the gradient of a Tile over its tiled dims, one after the other."""
    source, axes = call.inputs[0].op, tf.get_static_value(call.inputs[1])
    if source.type != "Reshape" or axes is None or call.get_attr("keep_dims"):
        return None
    tensor = source.inputs[0]
    split, rank = list(call.inputs[0].shape), tensor.shape.rank or 0
    if len(split) <= _MOST_DIMS or len(split) != 2 * rank or list(axes.reshape(-1)) != list(range(0, 2 * rank, 2)):
        return None
    times, sizes = split[::2], split[1::2]
    if None in split or [t * n for t, n in zip(times, sizes, strict=True)] != list(tensor.shape):
        return None
    for dim in (dim for dim in range(rank) if times[dim] > 1):
        if sizes[dim] > 1:
            shape = list(tensor.shape)
            tensor = tf.reshape(tensor, [*shape[:dim], times[dim], sizes[dim], *shape[dim + 1 :]])
        tensor = tf.reduce_sum(tensor, dim, keepdims=sizes[dim] == 1)
    return tf.identity(tensor)


@rewrite_rule(
    "GatherV2", graph=True, eager=False, gradient="registered", order=1, sizes="any",
    fault="shards another dim than the rows in the gradient of `tf.math.unsorted_segment_max`, which it cannot expand",
    cases=("gradient of segments",),
)  # fmt: skip
def shard_segments(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the segments, and shard the indices and the result over the batch axis."""
    segments, indices, axis = call.inputs
    is_gradient = call.outputs is not None and "gradient" in call.outputs[0].op.name
    if not is_gradient or not axis_sizes(mesh).shards_by_several or call.get_attr("batch_dims"):
        return None
    if not segments.shape.rank or segments.shape.rank < 2 or not segments.dtype.is_floating:
        return None
    if tf.get_static_value(axis) != 0 or not all(each.shape.is_fully_defined() for each in (segments, indices)):
        return None
    if not _private.is_called_by("tensorflow.python.ops.math_grad"):
        return None
    given = [transfer.replicate(segments, mesh), transfer.by_sample(indices, mesh), axis]
    return [transfer.by_sample(each, mesh) for each in _private.same_operation(call, given)]


def pin_rows(tensor: tf.Tensor, mesh: dtensor.Mesh, kept: int = 1) -> tf.Tensor:
    """Pin a tensor: no axis shards its dims, except that dim `kept` stays sharded as before."""
    specs = [dtensor.MATCH if dim == kept else dtensor.UNSHARDED for dim in range(tensor.shape.rank)]
    return dtensor.relayout(tensor, dtensor.Layout(specs, mesh))


def _with_full_dims(
    call: _private.Call, number: int, dims: Sequence[int], mesh: dtensor.Mesh
) -> list[tf.Tensor] | None:
    shape = call.inputs[number].shape
    dims = [dim for dim in dims if shape[dim] != 1]
    if 0 in dims:
        kept = 1  # Samples may be there, after a transpose.
    elif axis_sizes(mesh).shards_by_several and shape.rank in (2, 3) and shape.rank - 1 in dims:
        kept = 0
    elif any(samples.is_on_model_axis(call.inputs[number], dim, mesh) for dim in dims):
        # A dim in the middle, as of columns that were reshaped to an image: the model axis shards no other dim.
        results = row_operations.by_rows(call, row_operations.RowOperation(operands=(number,)), mesh)
        if results is not None:
            return results
        by_row = samples.by_row(call.inputs[number], mesh)
        given = [*call.inputs[:number], by_row, *call.inputs[number + 1 :]]
        return [samples.by_row(result, mesh) for result in _private.same_operation(call, given)]
    else:
        return None
    specs = [dtensor.MATCH if dim == kept and dim not in dims else dtensor.UNSHARDED for dim in range(shape.rank)]
    layout = dtensor.Layout(specs, mesh)
    inputs = list(call.inputs)
    inputs[number] = dtensor.relayout(inputs[number], layout)
    return [dtensor.relayout(result, layout) for result in _private.same_operation(call, inputs)]
