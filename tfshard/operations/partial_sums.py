"""Local gradients: the gradients of each device's local rows, before the reduction over the devices.

DTensor has no layout for partial sums. This module repeats the operations that sum over the rows of the batch, on the
local rows of each device (rows.py). Each device then has a local sum, which DTensor treats as replicated. `stack` makes
a tensor with a layout of the local sums: a row for each device, sharded over the batch axis.

If model axes shard a gradient, a device has its local shard only, in the shape of a shard. The module follows the
layout from the result to the operands.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, replicas, transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import rows
from tfshard.storage.gradient import layout_before

# The inputs of an operation by number, and the model axes that shard the dims of each, but for the first.
Operands: TypeAlias = dict[int, Axes]


def of_gradient(gradient: tf.Tensor | tf.IndexedSlices, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the local gradient. The full gradient is the sum of the local gradients over the devices.

    Args:
        gradient: A full gradient that a layer gives, in a traced step. No model axis shards its variable.
        mesh: A mesh with a batch axis only.
    """
    with _private.stop_recording():
        found = found_of(gradient, mesh)
        if found is None:  # The gradient is replicated, such as the gradient of a weight penalty.
            replicated = transfer.replicate(tf.convert_to_tensor(gradient), mesh)
            found = replicated / tf.cast(axis_sizes(mesh).data_size, gradient.dtype)
        return found


def by_replicas(gradient: tf.Tensor | tf.IndexedSlices, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """Sum a layer's gradient in each replica first, and then between the replicas.

    Args:
        gradient: The gradient, in a traced step.
        axes: The layout of reads of its variable: the model axes that shard it.
        mesh: The mesh.

    Returns:
        The sum, in that layout. None if DTensor has already summed the gradient, or the devices have no local
        gradients.
    """
    with _private.stop_recording():
        found = found_of(gradient, mesh, axes)
        if found is None:
            return None
        total = replicas.all_reduce(found, mesh)
        return local_shards.from_local(total, axes, mesh) if any(axes) else total


def found_of(gradient: tf.Tensor | tf.IndexedSlices, mesh: dtensor.Mesh, axes: Axes = ()) -> tf.Tensor | None:
    """Return the local gradient, as `of_gradient` does. None if the devices have no local gradients.

    Args:
        gradient: The gradient, in a traced step.
        mesh: The mesh.
        axes: The model axes that shard its dims. Empty if no axis does.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return None if any(axes) else _of_lookups(gradient, mesh)
    return _local_gradient(gradient, axes or (None,) * gradient.shape.rank, mesh)


def stack(local: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Stack the local tensors of shape `(...)` to a tensor `(devices, ...)`, a row for each device."""
    with local_shards.scope():
        return rows.from_local(tf.expand_dims(local, 0), mesh)


def unstacked(stacked: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Invert `stack`."""
    with local_shards.scope():
        return tf.squeeze(rows.to_local(stacked, mesh), 0)


def total(stacked: tf.Tensor) -> tf.Tensor:
    """Return the sum of the local tensors that `stack` stacked."""
    return tf.reduce_sum(stacked, 0)


def _local_gradient(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor | None:
    operation = tensor.op
    if operation.type == "IdentityN":  # Part of a custom gradient, such as the gradient of a local loop's inputs.
        return _local_gradient(operation.inputs[tensor.value_index], axes, mesh)
    if operation.type in ("Cast", "Identity", "Relayout"):
        before = _local_gradient(operation.inputs[0], axes, mesh)
        if before is None or operation.type == "Relayout":  # A pin has no operation to repeat.
            return before
        return _again(operation, {0: before})
    if operation.type in ("Reshape", "Transpose") and not any(axes):
        before = _local_gradient(operation.inputs[0], (None,) * operation.inputs[0].shape.rank, mesh)
        return None if before is None else _again(operation, {0: before})
    if operation.type in ("Reshape", "Transpose"):
        sharded = layout_before(tensor, axes, mesh)
        before = None if sharded is None else _local_gradient(operation.inputs[0], sharded, mesh)
        if before is None or operation.type == "Transpose":
            return None if before is None else _again(operation, {0: before})
        with local_shards.scope():
            return tf.reshape(before, _of_shard(tensor.shape, axes, axis_sizes(mesh)))
    if operation.type == "AddN":
        terms = [_local_gradient(each, axes, mesh) for each in operation.inputs]
        if any(each is None for each in terms):
            return None
        return _again(operation, {number: each for number, each in enumerate(terms) if each is not None})
    find = _SUMS.get(operation.type)
    operands = {} if find is None else find(operation, axes)
    if not operands or not all(rows.are_sharded(operation.inputs[number], mesh) for number in operands):
        return None
    with local_shards.scope():
        shards = {number: rows.to_local_shard(operation.inputs[number], of, mesh) for number, of in operands.items()}
        return _again(operation, shards)


def _again(operation: tf.Operation, inputs: Mapping[int, tf.Tensor]) -> tf.Tensor:
    """Repeat an operation with some of its inputs replaced."""
    with local_shards.scope():
        given = [inputs.get(number, each) for number, each in enumerate(operation.inputs)]
        (made,) = _private.copied(operation, given)
    return made


def _of_shard(shape: Sequence[int], axes: Axes, sizes: Mapping[str, int]) -> list[int]:
    """Return the shape of a local shard."""
    return [size if axis is None else size // sizes[axis] for size, axis in zip(shape, axes, strict=True)]


def _of_lookups(gradient: tf.IndexedSlices, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """Return the local gradient of a table: the sum by row of the rows that a device looked up."""
    ids, values = gradient.indices, gradient.values
    count = tf.get_static_value(gradient.dense_shape)[0]
    if not rows.are_sharded(ids, mesh):
        return None
    with local_shards.scope():
        return tf.math.unsorted_segment_sum(rows.to_local(values, mesh), rows.to_local(ids, mesh), count)


def _matrix_product(operation: tf.Operation, axes: Axes) -> Operands:
    if not operation.get_attr("transpose_a") or operation.get_attr("transpose_b"):
        return {}
    return {0: (None, axes[0]), 1: (None, axes[1])}


def _einsum(operation: tf.Operation, axes: Axes) -> Operands:
    given, _, result = operation.get_attr("equation").decode().partition("->")
    labels = given.split(",")
    first = [each[:1] for each in labels]
    if "." in given or len(set(first)) != 1 or not first[0] or first[0] in result:
        return {}
    axis_of = dict(zip(result, axes, strict=True))
    return {number: tuple(axis_of.get(label) for label in each) for number, each in enumerate(labels)}


def _sum(operation: tf.Operation, axes: Axes) -> Operands:
    dims = _static(operation.inputs[1])
    if dims is None or 0 not in np.atleast_1d(dims):
        return {}
    rank = operation.inputs[0].shape.rank
    kept = [dim for dim in range(rank) if operation.get_attr("keep_dims") or dim not in np.atleast_1d(dims) % rank]
    axis_of = dict(zip(kept, axes, strict=True))
    return {0: tuple(axis_of.get(dim) for dim in range(rank))}


def _bias(operation: tf.Operation, axes: Axes) -> Operands:
    rank = operation.inputs[0].shape.rank
    return {0: (*(None,) * (rank - 1), axes[0])} if operation.get_attr("data_format") == b"NHWC" else {}


def _convolution(operation: tf.Operation, axes: Axes) -> Operands:
    if any(axes):
        return {}
    return {number: (None,) * operation.inputs[number].shape.rank for number in (0, 2)}


def _static(tensor: tf.Tensor) -> np.ndarray | None:
    """Return the value of a tensor that follows from shapes, such as the dims that a gradient is summed over."""
    if tensor.op.type != "BroadcastGradientArgs":
        value: np.ndarray | None = tf.get_static_value(tensor)
        return value
    shapes = [_part_of_shape(each) for each in tensor.op.inputs]
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    rank = max(len(shape) for shape in known)
    padded = [np.concatenate([np.ones(rank - len(shape), int), shape]) for shape in known]
    padded_shape, other_shape = padded[tensor.value_index], padded[1 - tensor.value_index]
    return np.flatnonzero(
        (padded_shape == 1) & ((other_shape != 1) | (np.arange(rank) < rank - len(known[tensor.value_index])))
    )


def _part_of_shape(tensor: tf.Tensor) -> np.ndarray | None:
    """Return the value of a shape, or of its first or last dims."""
    operation = tensor.op
    if operation.type != "StridedSlice" or operation.get_attr("shrink_axis_mask"):
        value: np.ndarray | None = tf.get_static_value(tensor)
        return value
    shape, begin, end, stride = (tf.get_static_value(each) for each in operation.inputs)
    if any(each is None for each in (shape, begin, end, stride)):
        return None
    first = None if operation.get_attr("begin_mask") else begin[0]
    last = None if operation.get_attr("end_mask") else end[0]
    part: np.ndarray = shape[first : last : stride[0]]
    return part


# The operations that sum over the first dim of some inputs. Each function takes the operation and the layout of its
# result, and returns these inputs and the model axes that shard their dims.
_SUMS: dict[str, Callable[[tf.Operation, Axes], Operands]] = {
    "BiasAddGrad": _bias,
    "Conv2DBackpropFilter": _convolution,
    "Conv3DBackpropFilterV2": _convolution,
    "DepthwiseConv2dNativeBackpropFilter": _convolution,
    "Einsum": _einsum,
    "MatMul": _matrix_product,
    "Sum": _sum,
}
