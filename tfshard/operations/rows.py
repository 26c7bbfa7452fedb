"""Functions of rows, computed by each device on its own: a way around what DTensor has no expansion for.

DTensor expands every operation by a rule of its own. It has none for many that take one sample after the other: the
gradient of an average pooling, a matrix inverse, a loop with lists. Here DTensor is told that their operands are the
same on every device, so that it leaves them as they are, while each device has its own rows in them.

- `enter` takes from a tensor that the batch axis shards what a device has of it: in the graph, and on each device, a
  tensor of so many rows.
- `leave` is the way back: what the devices have, one after the other, is a tensor that the batch axis shards.
- `shared` is for what all rows use, such as weights: its gradient is summed over the devices.
- `total` is that sum.

Each is the gradient of another one, of any order. Between them stands any code whose rows do not depend on one another.

How it is done: an operation on a tensor in a "parted" layout is not expanded (SkipExpansionForPartedLayout in
TensorFlow 2.21's dtensor/mlir/spmd_expander.cc), every device does it with what it has. `tf.gather` there takes the
rows 0 to b-1: of all rows by the graph's types, and of its own on a device. And it gives B rows by the types, and b on
a device, where the indices are sharded.

What is in here must not be brought to another layout by the batch axis: DTensor would take pieces of what it believes
to be whole. Operations that are added here, and their gradients, are known by their names (`is_inside`).
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.errors import UnsupportedOperationError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.storage import steps

# In the names of operations, functions and loops here. TensorFlow puts it into those of their gradients, too.
_NAME = transfer.LOCAL


def are_shared_out(tensor: tf.Tensor, mesh: dtensor.Mesh) -> bool:
    """Whether the batch axis divides the rows of a tensor, so that each device has its own."""
    size = axis_sizes(mesh).data_size
    return size > 1 and bool(tensor.shape.rank) and tensor.shape[0] is not None and tensor.shape[0] % size == 0


def can_be(tensor: tf.Tensor, mesh: dtensor.Mesh) -> bool:
    """Whether a compiled step is being traced in which each device can have its own rows of a tensor."""
    return steps.current() is not None and not tf.executing_eagerly() and are_shared_out(tensor, mesh)


def is_inside(call: _private.Call) -> bool:
    """Whether an operation is computed by each device on its own rows."""
    if call.outputs is None:
        return False
    if any(is_named(output.op) for output in call.outputs):
        return True
    graph: tf.Graph | None = call.outputs[0].graph if call.outputs else None
    while graph is not None:
        if _NAME in getattr(graph, "name", ""):
            return True
        graph = _private.outer_graph(graph)
    return False


def is_named(operation: tf.Operation) -> bool:
    """Whether an operation was made in `inside`, or is of the gradient of one."""
    return _NAME in operation.name


def inside() -> contextlib.AbstractContextManager[Any]:
    """A context for operations on what `enter` gives."""
    context: contextlib.AbstractContextManager[Any] = tf.name_scope(_NAME)
    return context


def enter(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Of a tensor `(B, ...)`, the `(B / devices, ...)` that a device has. The batch axis divides B."""
    return with_gradient(_enter, leave, tensor, mesh)


def leave(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Of what each device has, `(b, ...)`, the tensor `(b * devices, ...)` that the batch axis shards."""
    return with_gradient(_leave, enter, tensor, mesh)


def enter_shard(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """`enter` for a tensor of which model axes shard dims, too: what a device has, in the shape of that. Not to be
    differentiated.

    Args:
        tensor: `(B, ...)`, in a step that is traced. The batch axis divides B.
        axes: The model axes that shard its dims; none shards the first.
        mesh: The mesh.
    """
    if not any(axes):
        tensor = transfer.by_sample(tensor, mesh)
    sizes = axis_sizes(mesh)
    axes = (sizes.data, *axes[1:])
    return local_shard(tensor, axes, mesh)


def local_shard(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the local shard of a tensor in layout `axes`, in the local shape. You cannot differentiate it."""
    sizes = axis_sizes(mesh)
    local = dtensor.relayout(tensor, transfer.layout(axes, mesh).to_parted())
    # The slice covers all that a device has, so nothing is copied: what a product takes waits for the backward pass.
    shards = [1 if axis is None else sizes[axis] for axis in axes]
    local = local[tuple(slice(None if n == 1 else size // n) for size, n in zip(tensor.shape, shards, strict=True))]
    return transfer.relayout(local, (None,) * local.shape.rank, mesh)


def shared(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """A tensor that is the same for all rows; its gradient is the sum of those that the devices have."""
    return with_gradient(lambda tensor, mesh: tf.identity(tensor), total, tensor, mesh)


def total(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """The sum of the tensors that the devices have, the same on all of them."""
    return with_gradient(_total, shared, tensor, mesh)


def with_gradient(
    forward: Callable[[tf.Tensor, dtensor.Mesh], tf.Tensor],
    backward: Callable[[tf.Tensor, dtensor.Mesh], tf.Tensor],
    tensor: tf.Tensor,
    mesh: dtensor.Mesh,
) -> tf.Tensor:
    """Return `forward(tensor, mesh)`, whose gradient is `backward(upstream, mesh)`."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return forward(tensor, mesh)

    def apply(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return forward(tensor, mesh), lambda upstream: backward(upstream, mesh)

    return tf.custom_gradient(apply)(tensor)


def _parted(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """A tensor whose first dim the batch axis shards, of which every device does what follows with its own rows."""
    tensor = transfer.by_sample(tensor, mesh)
    axes = (axis_sizes(mesh).data,) + (None,) * (tensor.shape.rank - 1)
    return dtensor.relayout(tensor, transfer.layout(axes, mesh).to_parted())


def _enter(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    count = tensor.shape[0] // axis_sizes(mesh).data_size
    with inside():
        rows = tf.gather(_parted(tensor, mesh), np.arange(count, dtype="int32"))
    return transfer.relayout(rows, (None,) * rows.shape.rank, mesh)


def _leave(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    axes = axis_sizes(mesh)
    indices = np.tile(np.arange(tensor.shape[0], dtype="int32"), axes.data_size)
    with inside():
        full = transfer.relayout(tensor, (None,) * tensor.shape.rank, mesh)
        rows = tf.gather(full, _parted(tf.constant(indices), mesh))
    return transfer.relayout(rows, (axes.data,) + (None,) * (rows.shape.rank - 1), mesh)


def _total(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    return tf.reduce_sum(_leave(tf.expand_dims(tensor, 0), mesh), 0)


def apply(
    function: Callable[..., Any], arguments: Sequence[Any], mesh: dtensor.Mesh, *, whole_captures: bool = False
) -> Any:
    """Calls a function of rows on the rows of each device.

    Args:
        function: Takes what is in `arguments`, with the rows of a device, and returns a structure of tensors of as many
            rows. A row of its results depends on the same row of its arguments only. It may use variables and tensors
            of the step.
        arguments: Structures of tensors `(B, ...)`, or of None. The batch axis divides B.
        mesh: The mesh.
        whole_captures: Whether the function uses all of each tensor that it takes from outside. Else a tensor of B rows
            that was made of the batch is meant row by row, too, such as the dropout mask of a recurrent cell.

    Returns:
        What the function returns, with B rows.

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

    flat.__name__ = _NAME
    specs = [tf.TensorSpec([count, *leaf.shape[1:]], leaf.dtype) for leaf in rows]
    outer, size = tf.compat.v1.get_default_graph(), rows[0].shape[0]

    # What the function takes from outside has the rows of a device while it is traced. It is brought afterwards: in
    # here no tape would record how.
    stands_for: dict[int, tf.Tensor] = {}

    def bring(tensor: tf.Tensor) -> tf.Tensor:
        if whole_captures or not _has_rows(tensor, size):
            return tensor
        stand_in = tf.zeros([count, *tensor.shape[1:]], tensor.dtype)
        stands_for[id(stand_in)] = tensor
        return stand_in

    with _private.captures_brought(outer, bring):
        traced = tf.function(flat, autograph=False).get_concrete_function(*specs)
    types = _private.operation_types(traced.graph)
    written = sorted(each for each in types if each.startswith("Assign"))
    if written:
        raise UnsupportedOperationError(
            "What is computed by each device on its own rows cannot write to a variable: each device would write what "
            f"its own rows give. Received: a function, such as a cell of a recurrent layer, with {written[0]}"
        )
    random = types & _private.ALL_RANDOM_OPS
    if random:
        raise UnsupportedOperationError(
            "What is computed by each device on its own rows cannot draw random numbers: all devices would draw the "
            "same. Draw them before, and pass them on. Received: a function, such as a cell of a recurrent layer, with "
            f"{sorted(random)[0]}"
        )
    for result in tf.nest.flatten(traced.structured_outputs):
        if not isinstance(result, tf.Tensor) or not result.shape.rank or result.shape[0] != count:
            raise UnsupportedOperationError(
                "What is computed by each device on its own rows has to give as many rows as it is given. Received: a "
                f"result of shape {getattr(result, 'shape', None)} for {count} rows of a device"
            )
    with inside():
        captures = [stands_for.get(id(each), each) for each in traced.captured_inputs]
        _private.set_captures(traced, [_captured(each, None if whole_captures else size, mesh) for each in captures])
        results = traced(*[enter(leaf, mesh) for leaf in rows])
        return tf.nest.map_structure(lambda result: leave(result, mesh), results)


def _captured(tensor: tf.Tensor, size: int | None, mesh: dtensor.Mesh) -> tf.Tensor:
    """What a function gets for a tensor of the step that it uses: its rows if it has `size` of them, else all of it."""
    if tensor.dtype in (tf.resource, tf.variant):
        return tensor
    if size is None:
        return shared(transfer.whole(tensor, mesh), mesh)
    return enter(tensor, mesh) if _has_rows(tensor, size) else shared(tensor, mesh)


def _has_rows(tensor: tf.Tensor, size: int) -> bool:
    is_value = tensor.dtype not in (tf.resource, tf.variant)
    return bool(is_value and tensor.shape.rank and tensor.shape[0] == size and comes_from_batch(tensor))


def comes_from_batch(tensor: tf.Tensor) -> bool:
    """Whether a tensor is made of the step's arguments or of random numbers: not of variables and constants alone."""
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
