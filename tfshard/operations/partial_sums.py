"""Gradients as each device has them of its own rows, before they are added up over the devices.

DTensor has no layout for partial sums. Here the operations that add up over the rows of the batch are made again, of
the rows of each device (rows.py): each device has a sum of its own where DTensor believes it to be the same on all.
`stack` makes a tensor of it that has a layout: a row for each device, which the batch axis shards.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import replicas, transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import rows


def of_gradient(gradient: tf.Tensor | tf.IndexedSlices, mesh: dtensor.Mesh) -> tf.Tensor:
    """The part of a gradient that a device has: the gradient is their sum over the devices.

    Args:
        gradient: Of a variable that no model axis shards, in a step that is traced: what a layer gives, whole.
        mesh: A mesh with a batch axis only.
    """
    with _private.stop_recording():
        found = _found(gradient, mesh)
        if found is None:  # It is whole on all devices: such as of a penalty of the weights.
            whole = transfer.whole(tf.convert_to_tensor(gradient), mesh)
            found = whole / tf.cast(axis_sizes(mesh).data_size, gradient.dtype)
        return found


def by_replicas(gradient: tf.Tensor | tf.IndexedSlices, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """A gradient, as `of_gradient` takes it, that is added up in each replica first, and then between them.

    Returns:
        The sum, whole. None for one that DTensor has added up already, or of which a device has no part of its own.
    """
    with _private.stop_recording():
        found = _found(gradient, mesh)
        return None if found is None else replicas.all_reduce(found, mesh)


def _found(gradient: tf.Tensor | tf.IndexedSlices, mesh: dtensor.Mesh) -> tf.Tensor | None:
    if isinstance(gradient, tf.IndexedSlices):
        return _of_lookups(gradient, mesh)
    return _own(gradient, mesh)


def stack(own: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """What each device has, of shape `(...)`, as a tensor `(devices, ...)`, a row for each."""
    with rows.inside():
        return rows.leave(tf.expand_dims(own, 0), mesh)


def total(stacked: tf.Tensor) -> tf.Tensor:
    """The sum of what each device has: of what `stack` gave."""
    return tf.reduce_sum(stacked, 0)


def _own(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor | None:
    operation = tensor.op
    if operation.type in ("Cast", "Identity", "Reshape", "Transpose", "Relayout"):
        before = _own(operation.inputs[0], mesh)
        if before is None or operation.type == "Relayout":  # What it was pinned to.
            return before
        return _again(operation, {0: before})
    if operation.type == "AddN":
        terms = [_own(each, mesh) for each in operation.inputs]
        if any(each is None for each in terms):
            return None
        return _again(operation, {number: each for number, each in enumerate(terms) if each is not None})
    of_rows = _SUMS.get(operation.type, lambda operation: ())(operation)
    if not of_rows or not all(rows.are_shared_out(operation.inputs[number], mesh) for number in of_rows):
        return None
    with rows.inside():
        return _again(operation, {number: rows.enter(operation.inputs[number], mesh) for number in of_rows})


def _again(operation: tf.Operation, inputs: Mapping[int, tf.Tensor]) -> tf.Tensor:
    """The same operation, with some of its inputs replaced."""
    with rows.inside():
        given = [inputs.get(number, each) for number, each in enumerate(operation.inputs)]
        (made,) = _private.copied(operation, given)
    return made


def _of_lookups(gradient: tf.IndexedSlices, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """Of a table in which rows were looked up: what a device looked up is added up by row."""
    ids, values = gradient.indices, gradient.values
    count = tf.get_static_value(gradient.dense_shape)[0]
    if not rows.are_shared_out(ids, mesh):
        return None
    with rows.inside():
        return tf.math.unsorted_segment_sum(rows.enter(values, mesh), rows.enter(ids, mesh), count)


def _matrix_product(operation: tf.Operation) -> tuple[int, ...]:
    return (0, 1) if operation.get_attr("transpose_a") and not operation.get_attr("transpose_b") else ()


def _einsum(operation: tf.Operation) -> tuple[int, ...]:
    given, _, result = operation.get_attr("equation").decode().partition("->")
    first = [labels[:1] for labels in given.split(",")]
    sums = "." not in given and len(set(first)) == 1 and first[0] and first[0] not in result
    return tuple(range(len(first))) if sums else ()


def _sum(operation: tf.Operation) -> tuple[int, ...]:
    dims = _static(operation.inputs[1])
    return (0,) if dims is not None and 0 in np.atleast_1d(dims) else ()


def _static(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a tensor that follows from shapes, such as the dims that a gradient is summed over."""
    if tensor.op.type != "BroadcastGradientArgs":
        value: np.ndarray | None = tf.get_static_value(tensor)
        return value
    shapes = [_part_of_shape(each) for each in tensor.op.inputs]
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    rank = max(len(shape) for shape in known)
    padded = [np.concatenate([np.ones(rank - len(shape), int), shape]) for shape in known]
    own, other = padded[tensor.value_index], padded[1 - tensor.value_index]
    return np.flatnonzero((own == 1) & ((other != 1) | (np.arange(rank) < rank - len(known[tensor.value_index]))))


def _part_of_shape(tensor: tf.Tensor) -> np.ndarray | None:
    """The value of a shape, or of its first or last dims."""
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


# The inputs of operations that add up over the first dim of these.
_SUMS: dict[str, Callable[[tf.Operation], tuple[int, ...]]] = {
    "BiasAddGrad": lambda operation: (0,) if operation.get_attr("data_format") == b"NHWC" else (),
    "Conv2DBackpropFilter": lambda operation: (0, 2),
    "Conv3DBackpropFilterV2": lambda operation: (0, 2),
    "DepthwiseConv2dNativeBackpropFilter": lambda operation: (0, 2),
    "Einsum": _einsum,
    "MatMul": _matrix_product,
    "Sum": _sum,
}
