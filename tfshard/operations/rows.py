"""Functions of rows, computed on each device with its local rows, for functions that DTensor has no expansion for.

DTensor has no rule for many operations on one sample after the other: the gradient of an average pooling, a matrix
inverse, a loop with lists. Here each device computes with its local rows of the batch (devices/local_shards.py):

- `to_local` takes the local rows of a tensor that the batch axis shards.
- `from_local` makes a tensor that the batch axis shards of local rows.
- `replicated` is for a tensor that all rows use, such as weights: its gradient is summed over the devices.
- `psum` is that sum.
- `local_map` runs a function on local rows.

`to_local` and `from_local` are gradients of each other, and so are `replicated` and `psum`, of any order. The code
between them may be any code that computes one row after the other. `tfshard.local_map` is the same for any layouts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.errors import UnsupportedOperationError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.storage import steps


def are_sharded(tensor: tf.Tensor, mesh: dtensor.Mesh) -> bool:
    """Return whether the batch axis has several devices and divides the rows of a tensor."""
    size = axis_sizes(mesh).data_size
    return size > 1 and bool(tensor.shape.rank) and tensor.shape[0] is not None and tensor.shape[0] % size == 0


def can_be(tensor: tf.Tensor, mesh: dtensor.Mesh) -> bool:
    """Return whether a compiled step is being traced in which the batch axis shards the rows of a tensor."""
    return steps.current() is not None and not tf.executing_eagerly() and are_sharded(tensor, mesh)


def is_inside(call: _private.Call) -> bool:
    """Return whether an operation computes with local shards."""
    if call.outputs is None:
        return False
    if any(local_shards.is_named(output.op) for output in call.outputs):
        return True
    graph: tf.Graph | None = call.outputs[0].graph if call.outputs else None
    while graph is not None:
        if local_shards.NAME in getattr(graph, "name", ""):
            return True
        graph = _private.outer_graph(graph)
    return False


def to_local(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the local rows `(B / devices, ...)` of a tensor `(B, ...)`. The batch axis divides B."""
    return local_shards.with_gradient(_to_local, from_local, tensor, mesh)


def from_local(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the tensor `(b * devices, ...)` that the batch axis shards, from local rows `(b, ...)`."""
    return local_shards.with_gradient(_from_local, to_local, tensor, mesh)


def to_local_shard(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the local shard of a tensor that model axes shard, too. You cannot differentiate it.

    Args:
        tensor: `(B, ...)`, in a step that is traced. The batch axis divides B.
        axes: The model axes that shard its dims; none shards the first.
        mesh: The mesh.
    """
    if not any(axes):
        tensor = transfer.by_sample(tensor, mesh)
    return local_shards.to_local(tensor, (axis_sizes(mesh).data, *axes[1:]), mesh)


def replicated(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a tensor that all rows use. Its gradient is the sum of the gradients on all devices."""
    return local_shards.with_gradient(lambda tensor, mesh: tf.identity(tensor), psum, tensor, mesh)


def psum(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the sum of a local tensor over the devices of the batch axis, the same on all of them."""
    return local_shards.with_gradient(_psum, replicated, tensor, mesh)


def _to_local(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    with local_shards.scope():
        rows = local_shards.local_rows(transfer.by_sample(tensor, mesh), mesh)
    return transfer.relayout(rows, (None,) * rows.shape.rank, mesh)


def _from_local(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    return local_shards.from_local(tensor, (axis_sizes(mesh).data, *(None,) * (tensor.shape.rank - 1)), mesh)


def _psum(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    return tf.reduce_sum(_from_local(tf.expand_dims(tensor, 0), mesh), 0)


def local_map(
    function: Callable[..., Any], arguments: Sequence[Any], mesh: dtensor.Mesh, *, full_captures: bool = False
) -> Any:
    """Run a function of rows on the local rows of each device.

    Args:
        function: Takes `arguments` with local rows, and returns a structure of tensors with as many rows. A row of its
            results depends on the same row of its arguments only. It may use variables and tensors of the step.
        arguments: Structures of tensors `(B, ...)`, or of None. The batch axis divides B.
        mesh: The mesh.
        full_captures: True if the function uses the full value of each captured tensor. Otherwise the function gets the
            local rows of captured tensors of B rows that were made of the batch, such as the dropout mask of a
            recurrent cell.

    Returns:
        The results of the function, with B rows.

    Raises:
        UnsupportedOperationError: A result has another number of rows, or the function draws random numbers or writes
            to a variable.
    """
    # A variable, as the state of a layer that keeps it, has rows as a tensor has.
    arguments = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), arguments)
    rows = [leaf for leaf in tf.nest.flatten(arguments) if leaf is not None]
    count = rows[0].shape[0] // axis_sizes(mesh).data_size

    def flat(*leaves: tf.Tensor) -> Any:
        waiting = iter(leaves)
        return function(*tf.nest.map_structure(lambda leaf: None if leaf is None else next(waiting), arguments))

    flat.__name__ = local_shards.NAME
    specs = [tf.TensorSpec([count, *leaf.shape[1:]], leaf.dtype) for leaf in rows]
    outer, size = tf.compat.v1.get_default_graph(), rows[0].shape[0]

    # Captured tensors have local rows while the function is traced. They become local afterwards, where a tape records
    # how.
    stands_for: dict[int, tf.Tensor] = {}

    def bring(tensor: tf.Tensor) -> tf.Tensor:
        if full_captures or not _has_rows(tensor, size):
            return tensor
        placeholder = tf.zeros([count, *tensor.shape[1:]], tensor.dtype)
        stands_for[id(placeholder)] = tensor
        return placeholder

    with _private.captures_brought(outer, bring):
        traced = tf.function(flat, autograph=False).get_concrete_function(*specs)
    types = _private.operation_types(traced.graph)
    written = sorted(each for each in types if each.startswith("Assign"))
    if written:
        raise UnsupportedOperationError(
            "A function that each device runs on its local rows cannot write to a variable: each device would write "
            f"another value. Received: a function, such as a cell of a recurrent layer, with {written[0]}"
        )
    random = types & _private.ALL_RANDOM_OPS
    if random:
        raise UnsupportedOperationError(
            "A function that each device runs on its local rows cannot draw random numbers: all devices would draw "
            "the same. Draw them before the call, and pass them as an argument. Received: a function, such as a "
            f"cell of a recurrent layer, with {sorted(random)[0]}"
        )
    for result in tf.nest.flatten(traced.structured_outputs):
        if not isinstance(result, tf.Tensor) or not result.shape.rank or result.shape[0] != count:
            raise UnsupportedOperationError(
                "A function that each device runs on its local rows must return as many rows as it gets. Received: "
                f"a result of shape {getattr(result, 'shape', None)} for {count} rows of a device"
            )
    with local_shards.scope():
        captures = [stands_for.get(id(each), each) for each in traced.captured_inputs]
        _private.set_captures(traced, [_captured(each, None if full_captures else size, mesh) for each in captures])
        results = traced(*[to_local(leaf, mesh) for leaf in rows])
        return tf.nest.map_structure(lambda result: from_local(result, mesh), results)


def _captured(tensor: tf.Tensor, size: int | None, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the value of a captured tensor for a function: its local rows if it has `size` rows, otherwise the full
    tensor."""
    if tensor.dtype in (tf.resource, tf.variant):
        return tensor
    if size is None:
        return replicated(transfer.replicate(tensor, mesh), mesh)
    return to_local(tensor, mesh) if _has_rows(tensor, size) else replicated(tensor, mesh)


def _has_rows(tensor: tf.Tensor, size: int) -> bool:
    is_value = tensor.dtype not in (tf.resource, tf.variant)
    return bool(is_value and tensor.shape.rank and tensor.shape[0] == size and comes_from_batch(tensor))


def comes_from_batch(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is made of the step's arguments or of random numbers, and not only of variables."""
    if tf.executing_eagerly():
        return True
    seen: set[tf.Operation] = set()
    waiting = [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation in seen:
            continue
        seen.add(operation)
        is_argument = operation.type == "Placeholder" and operation.outputs[0].dtype != tf.resource
        if is_argument or operation.type in _private.ALL_RANDOM_OPS:
            return True
        waiting += [each.op for each in operation.inputs]
    return False
