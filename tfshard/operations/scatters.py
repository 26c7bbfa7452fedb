"""Rewrite rules of scatters, gathers by index tuples, `tf.where` and top-k.

DTensor matches the dims of indices, updates and the result by their numbers, as if indices always had one dim in front.
If indices have several dims, or the batch axis shards the updated tensor, a kernel applies global indices to a local
shard: wrong numbers, or a failing kernel. `tf.where` finds the places in each local shard, and no device knows how many
places the other devices found.

The rules replicate the operands and the result, and write the indices as a matrix. Sharded operands cost an all-gather.
Top-k keeps the rows sharded.
"""

import math

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import branches, samples, unsized
from tfshard.operations.registry import rewrite_rule

_FAULT = "gives global indices to kernels that hold a local shard: wrong numbers, or a failing kernel"


@rewrite_rule(
    "ScatterNd", graph=True, eager=True, gradient="registered", sizes="any",
    fault=_FAULT + "; **ends the process** for constant int64 indices", cases=("scatter", "scatter in an eager step"),
)  # fmt: skip
def scatter(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor:
    """Scatter replicated updates into replicated zeros."""
    _check_ranks(call)
    indices, updates, shape = call.inputs
    known = tf.get_static_value(shape)
    if known is not None and math.prod(known) > tf.int32.max:
        raise UnsupportedOperationError(
            f"tf.scatter_nd needs a shape with fewer than 2**31 elements. Received: shape={known.tolist()}"
        )
    if known is None and call.outputs is not None and call.outputs[0].shape.is_fully_defined():
        known = np.array(call.outputs[0].shape)  # TensorFlow knows more of it, as of a product of sizes.
    rows, updates = _as_rows(call, transfer.replicate(indices, mesh), transfer.replicate(updates, mesh))
    if known is None:
        # DTensor needs the shape of a ScatterNd.
        zeros = tf.raw_ops.Empty(
            shape=transfer.replicate(tf.cast(shape, tf.int32), mesh), dtype=updates.dtype, init=True
        )
        return transfer.replicate(tf.raw_ops.TensorScatterSub(tensor=zeros, indices=rows, updates=-updates), mesh)
    # DTensor makes the shape again as int32, and ends the process where the indices are int64.
    result = tf.raw_ops.ScatterNd(indices=tf.cast(rows, tf.int32), updates=updates, shape=known.astype("int32"))
    return transfer.replicate(result, mesh)


@rewrite_rule(
    "TensorScatterUpdate", "TensorScatterAdd", graph=True, eager=True, gradient="registered", sizes="any",
    fault=_FAULT, cases=("scatter into a tensor", "scatter in an eager step"),
)  # fmt: skip
def tensor_scatter(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor:
    """Scatter replicated updates into a replicated tensor."""
    _check_ranks(call)
    if not call.is_eager and _private.is_called_by("tensorflow.python.ops.parallel_for"):
        raise UnsupportedOperationError(
            "A compiled step on a mesh cannot have a tf.vectorized_map (keras.ops.fold, keras.ops.vectorized_map) of a "
            f"scatter: DTensor ends the process at its gradient. Use tf.map_fn. Received: {call.type}"
        )
    tensor, indices, updates = (transfer.replicate(each, mesh) for each in call.inputs)
    rows, updates = _as_rows(call, indices, updates)
    operation = getattr(tf.raw_ops, call.type)
    return transfer.replicate(operation(tensor=tensor, indices=rows, updates=updates), mesh)


@rewrite_rule(
    "SparseToDense", "ComputeAccidentalHits", graph=True, eager=True, gradient="registered", sizes="any",
    fault="refuses them if the next operation is sharded",
    cases=("sampled softmax", "dense of sparse in an eager step"),
)  # fmt: skip
def replicate(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor]:
    """Replicate the operands and the results."""
    _check_ranks(call)
    inputs = [transfer.replicate(each, mesh) for each in call.inputs]
    if call.type == "SparseToDense":
        inputs[1] = call.inputs[1]  # A shape.
    return [transfer.replicate(each, mesh) for each in _private.same_operation(call, inputs)]


@rewrite_rule(
    "GatherNd", graph=True, eager=True, gradient="registered", sizes="any",
    fault=_FAULT, cases=("gather by index tuples", "gather in an eager step"),
)  # fmt: skip
def gather(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor:
    """Gather replicated index tuples from a replicated tensor."""
    _check_ranks(call)
    params, indices = (transfer.replicate(each, mesh) for each in call.inputs)
    front, length = _index_shape(call, indices)
    result = tf.raw_ops.GatherNd(params=params, indices=_matrix(indices, front, length))
    if len(front) != 1:
        result = tf.reshape(transfer.replicate(result, mesh), [*front, *_static(call, params.shape[length:])])
    return transfer.replicate(result, mesh)


@rewrite_rule(
    "GatherV2", graph=True, eager=True, gradient="registered", sizes="any",
    fault="refuses batch dims if the next operation is sharded differently",
    cases=("gather with batch dims", "gather in an eager step"),
)  # fmt: skip
def gather_with_batch_dims(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """Shard both operands of a gather with batch dims, and its result, over the batch axis."""
    _check_ranks(call)
    if not call.get_attr("batch_dims"):
        return None
    params, indices, axis = call.inputs
    result = tf.raw_ops.GatherV2(
        params=transfer.by_sample(params, mesh),
        indices=transfer.by_sample(indices, mesh),
        axis=axis,
        batch_dims=call.get_attr("batch_dims"),
    )
    return transfer.by_sample(result, mesh)


@rewrite_rule(
    "TopKV2", graph=True, eager=True, gradient="registered", sizes="any",
    fault="refuses it if the next operation shards the last dim; returns results of unknown size for a `k` that "
          "follows from static shapes (`tf.sort`)", cases=("top k", "top k in an eager step"),
)  # fmt: skip
def top_k(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor]:
    """Shard the operand and the results over the batch axis, and make `k` a constant where the graph knows it."""
    _check_ranks(call)
    values, k = call.inputs
    number = None if call.is_eager else branches.number_of(k)  # As tf.sort has it, where DTensor does not see it.
    k = k if number is None else number
    among_samples = values.shape.rank > 1 and not call.is_eager and samples.are_in(values, values.shape.rank - 1)
    is_replicated = values.shape.rank == 1 or among_samples or unsized.is_unsized(call)
    place = transfer.replicate if is_replicated else samples.by_row
    found = tf.raw_ops.TopKV2(input=place(values, mesh), k=k, sorted=call.get_attr("sorted"))
    found = [place(each, mesh) for each in found]
    # A transpose, as in `tf.sort` along the batch, cannot shard a replicated tensor.
    return [samples.sharded_along(each, -1, mesh) for each in found] if among_samples else found


@rewrite_rule(
    "Where", graph=True, eager=True, gradient="none", sizes="any",
    fault="finds the places in each local shard: wrong numbers (`tf.where(c)`, `tf.boolean_mask`); refuses more than "
    "one dim", cases=("where", "where in an eager step"),
)  # fmt: skip
def where(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor:
    """Find the places in a replicated vector, and compute the index tuples from them."""
    _check_ranks(call)
    (condition,) = call.inputs
    if condition.shape.rank == 1:
        return transfer.replicate(tf.raw_ops.Where(condition=transfer.replicate(condition, mesh)), mesh)
    condition = transfer.replicate(condition, mesh)
    shape = unsized.sizes(condition)
    condition = transfer.replicate(unsized.vector(condition), mesh)
    places = transfer.replicate(tf.raw_ops.Where(condition=condition), mesh)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # A scalar has no dims, and no columns. An empty dim has no places.
    columns = [
        places // _at_least_one(stride) % _at_least_one(size) for stride, size in zip(strides, shape, strict=True)
    ]
    return transfer.replicate(tf.concat(columns, axis=1) if columns else places[:, :0], mesh)


def _at_least_one(size: unsized.Size) -> unsized.Size:
    return max(size, 1) if isinstance(size, int) else tf.cast(tf.maximum(size, 1), tf.int64)


def _check_ranks(call: _private.Call) -> None:
    """Raise `UnsupportedOperationError` if the rank of an operand is not known."""
    for tensor in call.inputs:
        if tensor.shape.rank is None:
            _static(call, tensor.shape)


def _as_rows(call: _private.Call, indices: tf.Tensor, updates: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return replicated indices as a matrix, and replicated updates with one dim for the rows of the matrix."""
    front, length = _index_shape(call, indices)
    if len(front) == 1:
        return indices, updates
    behind = _static(call, updates.shape[len(front) :])
    return _matrix(indices, front, length), tf.reshape(updates, [math.prod(front), *behind])


def _matrix(indices: tf.Tensor, front: tuple[int, ...], length: int) -> tf.Tensor:
    return indices if len(front) == 1 else tf.reshape(indices, [math.prod(front), length])


def _index_shape(call: _private.Call, indices: tf.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the dims of index tuples, and the length of each. The number of rows of a matrix may be unknown."""
    if indices.shape.rank == 2 and indices.shape[1] is not None:
        return (indices.shape[0],), indices.shape[1]
    *front, length = _static(call, indices.shape)
    return tuple(front), length


def _static(call: _private.Call, shape: tf.TensorShape) -> tuple[int, ...]:
    if not shape.is_fully_defined():
        raise UnsupportedOperationError(
            f"TensorFlow operation '{call.type}' needs operands whose shapes are known before the step runs. Give them "
            f"one with tf.ensure_shape or a fixed batch size. Received: a shape of {shape}"
        )
    return tuple(shape)
