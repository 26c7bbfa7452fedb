"""Operations that need all of a dim on each device: splits, tiles and paddings of one that may be sharded.

DTensor refuses them, or shards a result that cannot be. Here the dim is whole before and after the operation, where it
is the batch, or the last of two or three dims on a mesh of several axes. What shards other dims is not known while a
step is traced, and a layout may keep what shards one dim only ("match"): with more dims, such as those of heads, more
would be gathered than has to be.
"""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.layouts.axes import axis_sizes


def split(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Split and SplitV."""
    number = 1 if call.type == "Split" else 0
    axis = tf.get_static_value(call.inputs[0 if call.type == "Split" else 2])
    rank = call.inputs[number].shape.rank
    if axis is None or not rank:
        return None
    return _with_whole_dims(call, number, [int(axis) % rank], mesh)


def tile(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Tile."""
    multiples = tf.get_static_value(call.inputs[1])
    if multiples is None:
        return None
    return _with_whole_dims(call, 0, [dim for dim, times in enumerate(multiples) if times > 1], mesh)


def pad(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Pad and PadV2."""
    paddings = tf.get_static_value(call.inputs[1])
    if paddings is None:
        return None
    return _with_whole_dims(call, 0, [dim for dim, both in enumerate(paddings) if any(both)], mesh)


def _with_whole_dims(
    call: _private.Call, number: int, dims: Sequence[int], mesh: dtensor.Mesh
) -> list[tf.Tensor] | None:
    shape = call.inputs[number].shape
    dims = [dim for dim in dims if shape[dim] != 1]
    if 0 in dims:
        kept = 1  # Samples may be there, after a transpose.
    elif axis_sizes(mesh).shards_by_several and shape.rank in (2, 3) and shape.rank - 1 in dims:
        kept = 0
    else:
        return None
    specs = [dtensor.MATCH if dim == kept and dim not in dims else dtensor.UNSHARDED for dim in range(shape.rank)]
    layout = dtensor.Layout(specs, mesh)
    inputs = list(call.inputs)
    inputs[number] = dtensor.relayout(inputs[number], layout)
    return [dtensor.relayout(result, layout) for result in _private.same_operation(call, inputs)]
