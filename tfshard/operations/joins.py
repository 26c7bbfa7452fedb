"""Rewrite rules of operations that join, cut or reorder the samples of a batch: concats, stacks, slices, gathers.

If the batch axis shards the dim, DTensor refuses most of these operations ("concat dimension in sharded dimension"). It
also shards results that it cannot shard, as soon as the next operation works row by row. The rules replicate the
operands, and each device keeps its local rows of the result. They leave an operation that moves no sample.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.graph import dim_rules
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import dims, samples, slices
from tfshard.operations.conditions import batch_axis_has_devices
from tfshard.operations.registry import rewrite_rule

# The operands that an operation may join, cut or reorder along the first dim. ConcatV2 joins all but the last.
_OPERANDS: dict[str, tuple[int, ...]] = {
    "Split": (1,),
    "StridedSliceGrad": (4,),
    **dict.fromkeys(
        ("SplitV", "Tile", "Pad", "PadV2", "MirrorPad", "MirrorPadGrad", "Slice", "StridedSlice", "Unpack", "GatherV2",
         "ReverseV2", "Roll"),
        (0,),
    ),
}  # fmt: skip
_FAULT = "refuses to join, cut or reorder the samples of a batch if a following operation works row by row"


@rewrite_rule(
    "GatherV2", graph=True, eager=False, gradient="registered", when=batch_axis_has_devices, order=2, sizes="any",
    fault=_FAULT, cases=("gather of samples",),
)  # fmt: skip
@rewrite_rule(
    "ConcatV2", "Split", "SplitV", "Tile", "Pad", "PadV2", "MirrorPad", "MirrorPadGrad", "Slice", "ReverseV2", "Roll",
    graph=True, eager=False, gradient="registered", when=batch_axis_has_devices, order=2,
    fault=_FAULT, cases=("concat of samples",),
)  # fmt: skip
def join_rows(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the operands if samples move along the first dim, and keep the local rows of the result."""
    return _rows(call, mesh, lambda given: _private.same_operation(call, given))


@rewrite_rule(
    "StridedSlice", "StridedSliceGrad", graph=True, eager=False, gradient="registered", when=batch_axis_has_devices,
    sizes="any", fault=_FAULT, cases=("slice of samples",),
)  # fmt: skip
def slice_rows(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the operand if samples move along the first dim, slice it, and keep the local rows of the result."""
    rewrite = slices.full_slice if call.type == "StridedSlice" else slices.full_slice_gradient

    def compute(given: list[tf.Tensor]) -> list[tf.Tensor]:
        result = rewrite(dataclasses.replace(call, inputs=tuple(given)))
        return _private.same_operation(call, given) if result is None else [result]

    return _rows(call, mesh, compute)


def _rows(
    call: _private.Call, mesh: dtensor.Mesh, compute: Callable[[list[tf.Tensor]], list[tf.Tensor]]
) -> list[tf.Tensor] | None:
    numbers = range(len(call.inputs) - 1) if call.type == "ConcatV2" else _OPERANDS[call.type]
    tensors = [call.inputs[number] for number in numbers]
    # The gradient of a slice is a Pad. Its result has no known shape if the slice began at a tensor.
    sized = tensors if call.type in ("Pad", "PadV2") else (*tensors, *(call.outputs or ()))
    if not all(each.shape.rank and each.shape.is_fully_defined() for each in sized):
        return None
    if not any(_moves_rows(call, number) for number in numbers):
        return None
    if any(samples.are_in(each, 0) for each in tensors) or _is_gradient_of_a_join(call):
        brought, place = transfer.replicate, samples.by_row
    elif call.type == "ConcatV2" and tensors[0].shape.rank > 1 and tensors[0].dtype.is_floating:
        brought = place = dims.pin_rows  # For example gradients of the results of a split.
    else:
        return None
    inputs = list(call.inputs)
    for number in numbers:
        inputs[number] = brought(inputs[number], mesh)
    if call.type == "GatherV2":
        inputs[1] = transfer.by_sample(inputs[1], mesh)
    results = compute(inputs)
    results = [brought(each, mesh) for each in results]
    return results if _has_no_rows(call) else [place(each, mesh) for each in results]


def _is_gradient_of_a_join(call: _private.Call) -> bool:
    """Return whether a slice with a computed begin takes the gradient of an operand of a concat or a pad."""
    is_computed = call.type == "Slice" and call.inputs[1].op.type in ("ConcatOffset", "Reshape")
    return is_computed and call.inputs[0].dtype.is_floating and call.inputs[0].shape.rank > 1


def _has_no_rows(call: _private.Call) -> bool:
    """Return whether an operation takes single rows, as `x[0]` and `tf.unstack` do."""
    return call.type == "Unpack" or (call.type == "StridedSlice" and bool(call.get_attr("shrink_axis_mask") & 1))


def _moves_rows(call: _private.Call, number: int) -> bool:
    """Return whether an operation changes the first dim of an operand."""
    assert call.outputs is not None
    if call.type in ("ReverseV2", "Roll"):
        axes = tf.get_static_value(call.inputs[1 if call.type == "ReverseV2" else 2])
        return axes is not None and bool(np.any(axes.reshape(-1) % call.inputs[0].shape.rank == 0))
    if call.type == "GatherV2":
        return bool(tf.get_static_value(call.inputs[2]) == 0 and not call.get_attr("batch_dims"))
    if call.type == "StridedSliceGrad":
        return bool(call.outputs[0].shape[0] != call.inputs[4].shape[0])
    if call.type in ("MirrorPad", "MirrorPadGrad"):
        return bool(call.outputs[0].shape[0] != call.inputs[0].shape[0])
    return not isinstance(dim_rules.advance(call.outputs[0].op, number, 0, 1), dim_rules.Flow)


@rewrite_rule(
    "Pack", graph=True, eager=False, gradient="registered", when=batch_axis_has_devices,
    fault=_FAULT, cases=("stack of samples",),
)  # fmt: skip
def stack(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Stack the local rows of tensors of samples along a first dim, or pin the layout of other tensors."""
    assert call.outputs is not None
    rank = call.outputs[0].shape.rank
    if call.get_attr("axis") % rank != 0 or rank < 2 or not call.outputs[0].shape.is_fully_defined():
        return None
    if any(samples.are_in(each, 0) for each in call.inputs):
        inputs = [transfer.by_sample(each, mesh) for each in call.inputs]
        (result,) = _private.same_operation(call, inputs)
        return [samples.sharded_along(result, 1, mesh)]
    if not call.inputs[0].dtype.is_floating or all(each.op.type == "Const" for each in call.inputs):
        return None
    if rank > 2 and axis_sizes(mesh).shards_by_several:
        return None  # For example matrices of a kernel: a model axis may shard any dim.
    inputs = [dims.pin_rows(each, mesh, kept=0) for each in call.inputs]
    return [dims.pin_rows(each, mesh) for each in _private.same_operation(call, inputs)]


@rewrite_rule(
    "Unpack", graph=True, eager=False, gradient="registered", when=batch_axis_has_devices,
    fault=_FAULT, cases=("unstack of samples",),
)  # fmt: skip
def unstack(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the first dim. The results of a tensor without samples keep their sharding."""
    found = join_rows(call, mesh)
    (tensor,) = call.inputs
    if found is not None or call.get_attr("axis") % (tensor.shape.rank or 1) != 0 or not tensor.dtype.is_floating:
        return found
    if (tensor.shape.rank or 0) < 2 or not tensor.shape.is_fully_defined():
        return None
    layout = samples.layout_replicated_along(tensor, 0, mesh)
    results = _private.same_operation(call, [dtensor.relayout(tensor, layout)])
    part = dtensor.Layout(layout.sharding_specs[1:], mesh)
    return [dtensor.relayout(each, part) for each in results]


@rewrite_rule(
    "Reshape", graph=True, eager=False, gradient="registered", when=batch_axis_has_devices,
    fault=_FAULT, cases=("reshape of samples",),
)  # fmt: skip
def reshape(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate samples that are merged with a dim in front of them or split, and shard a dim that is made of them."""
    tensor = call.inputs[0]
    assert call.outputs is not None
    (output,) = call.outputs
    devices = axis_sizes(mesh).data_size
    if not tensor.shape.is_fully_defined() or not output.shape.is_fully_defined():
        return None
    before, after = list(tensor.shape), list(output.shape)
    for dim, size in enumerate(before):
        if size == 1 or isinstance(dim_rules.advance(output.op, 0, dim, devices), dim_rules.Flow):
            continue
        if samples.are_in(tensor, dim):
            (result,) = _private.same_operation(call, [transfer.replicate(tensor, mesh), call.inputs[1]])
            places = [each for each in _made_of(before, after, dim) if after[each] % devices == 0]
            return [samples.sharded_along(result, places[0], mesh) if places else transfer.replicate(result, mesh)]
    return None


def _made_of(before: Sequence[int], after: Sequence[int], dim: int) -> list[int]:
    """Return the dims of a reshaped tensor along which the elements of a former dim lie."""
    behind, size = math.prod(before[dim + 1 :]), before[dim]
    found = []
    for place, count in enumerate(after):
        step = math.prod(after[place + 1 :])
        # The strides of the two overlap.
        if count > 1 and step < behind * size and step * count > behind:
            found.append(place)
    return found
