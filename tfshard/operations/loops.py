"""The loops of recurrent layers, and rewrite rules of the lists of tensors that loops fill.

DTensor expands a `tf.while_loop`, but no TensorLists. Loops collect results in lists, and their gradients collect the
values that they need. Every device keeps the full lists (expansions.py). In recurrent layers, which take most of a
model's time, each device runs the loop with its local rows instead (rows.py). On GPUs, Keras runs the loops of LSTM and
GRU by cuDNN, which DTensor does not expand: TensorFlow runs them here.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import expansions
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import branches, layer_patch, rows
from tfshard.operations.registry import rewrite_rule
from tfshard.operations.replacing import replaced
from tfshard.storage import steps


def install(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Patch a model's recurrent layers: each device runs their loops with its local rows."""
    for layer in _private.flatten_layers(model):
        if isinstance(layer, keras.layers.RNN):
            layer_patch.apply(layer_patch.RECURRENCE, layer, functools.partial(_inner_loop, mesh))


def states(model: keras.Model) -> list[keras.Variable]:
    """Return the states of recurrent layers with `stateful=True`, which no list of Keras has."""
    layers = [layer for layer in _private.flatten_layers(model) if isinstance(layer, keras.layers.RNN)]
    kept = [keras.tree.flatten(layer.states) for layer in layers if layer.stateful and layer.built]
    return [state for of_layer in kept for state in of_layer if isinstance(state, keras.Variable)]


def _inner_loop(mesh: dtensor.Mesh, original: layer_patch.Method) -> layer_patch.Method:
    """Return a layer's `inner_loop` that each device runs with its local rows inside a compiled step."""

    def inner_loop(sequences: Any, initial_state: Any, mask: Any, training: bool = False) -> Any:
        def loop(sequences: Any, initial_state: Any, mask: Any) -> Any:
            if steps.current() is None:
                return original(sequences, initial_state, mask, training=training)
            with without_cudnn():
                return original(sequences, initial_state, mask, training=training)

        if not rows.can_be(sequences, mesh):
            return loop(sequences, initial_state, mask)
        return rows.local_map(loop, [sequences, initial_state, mask], mesh)

    return inner_loop


def without_cudnn() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Keras runs the loops of LSTM and GRU without cuDNN, or refuses `use_cudnn=True`."""
    return replaced((_private.keras_backend_rnn, name, _refused) for name in ("lstm", "gru"))


def _refused(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


@rewrite_rule(
    "TensorListElementShape", graph=True, eager=False, gradient="none", sizes="any", local="also",
    fault="returns a size of `-2**63` for it", cases=("item of a list",),
)  # fmt: skip
def element_shape(call: _private.Call) -> list[tf.Tensor] | None:
    """Return the shape of an element as a constant."""
    assert call.outputs is not None
    shape = _private.element_shape(call.inputs[0])
    return None if shape is None else [tf.constant(shape, call.outputs[0].dtype)]


def _is_in_loop(call: _private.Call) -> bool:
    """The operation is in a loop, and the shape of the element is known."""
    assert call.outputs is not None
    return _private.graph_is_loop(call.outputs[0].graph) and call.outputs[0].shape.is_fully_defined()


def _item_gradient(operation: tf.Operation, gradient: tf.Tensor) -> tuple[tf.Tensor, None, None]:
    """Set the gradient in an empty list that has the length of the list in the forward pass."""
    items, index, _ = operation.inputs
    count = _length_of(items)
    assert count is not None, "`item` made the TensorListLength."
    empty = tf.raw_ops.TensorListReserve(
        element_shape=tf.constant(operation.outputs[0].shape.as_list(), tf.int32),
        num_elements=count,
        element_dtype=gradient.dtype,
    )
    return tf.raw_ops.TensorListSetItem(input_handle=empty, index=index, item=gradient), None, None


# TensorFlow's gradient asks the list for its length. In loops that a persistent tape or nested tapes record, TensorFlow
# keeps the list of each iteration for that in a list of lists.
@rewrite_rule(
    "TensorListGetItem", graph=True, eager=False, gradient=_item_gradient, when=_is_in_loop, sizes="any", local="also",
    fault="**ends the process** in the gradient of a loop that a persistent tape or nested tapes record",
    cases=("loop under a persistent tape",),
)  # fmt: skip
def item(call: _private.Call) -> list[tf.Tensor] | None:
    """Give the operation a gradient that takes the length of the list from the forward pass."""
    if _length_of(call.inputs[0]) is None:
        expansions.allow(tf.raw_ops.TensorListLength(input_handle=call.inputs[0]).op)
    return _private.same_operation(call, call.inputs)


def _length_of(items: tf.Tensor) -> tf.Tensor | None:
    """Return the TensorListLength of a list, if its graph has one."""
    return next((user.outputs[0] for user in items.consumers() if user.type == "TensorListLength"), None)


def _pushes_list_of_loop(call: _private.Call) -> bool:
    """The element is a list that an inner loop filled."""
    return call.inputs[1].dtype == tf.variant and call.inputs[1].op.type in _LOOPS


@rewrite_rule(
    "TensorListPushBack", graph=True, eager=False, gradient="none", when=_pushes_list_of_loop, sizes="any",
    local="also", fault="**ends the process**, or does not say why, in the gradient of a loop in a loop",
    cases=("gradient of a loop in a loop",),
)  # fmt: skip
def refuse_list_of_lists(call: _private.Call) -> None:
    """Refuse the gradient of a loop in a loop."""
    del call
    raise UnsupportedOperationError(
        "A compiled step on a mesh cannot have the gradient of a loop in a loop (tf.while_loop, keras.ops.scan, "
        "keras.ops.fori_loop): the outer loop would keep the lists of the inner one. Unroll one of the loops in "
        "Python, or write the inner loop with operations on a full axis."
    )


# A loop, and the function in which TensorFlow puts a loop that a persistent tape or nested tapes record.
_LOOPS = ("PartitionedCall", "StatefulPartitionedCall", "StatelessWhile", "While")


@rewrite_rule(
    "TensorListStack", graph=True, eager=False, gradient="registered", sizes="any",
    fault="returns a tensor with a dim of unknown size for it, although the length follows from static shapes "
          "(`tf.TensorArray(size=tf.shape(x)[1])`)", cases=("loop that fills a list",),
)  # fmt: skip
def stack(call: _private.Call) -> tf.Tensor | None:
    """Give the operation the length of the list as a constant."""
    assert call.outputs is not None
    count = None if call.outputs[0].shape.rank is None else _length(call.inputs[0])
    if count is None or call.get_attr("num_elements") == count:
        return None
    handle, shape = call.inputs
    dtype = call.outputs[0].dtype
    return [
        tf.raw_ops.TensorListStack(input_handle=handle, element_shape=shape, element_dtype=dtype, num_elements=count)
    ]


def _length(tensor_list: tf.Tensor, arguments: Mapping[int, tf.Tensor] = MappingProxyType({})) -> int | None:
    """Return how many tensors a list has, if that follows from constants and static shapes.

    Args:
        tensor_list: The list.
        arguments: The operands of the call of a function in which the list is, by `id` of the function's placeholder.
    """
    operation = tensor_list.op
    if operation.type == "Placeholder":
        outside = arguments.get(id(tensor_list), _private.captured(tensor_list))
        return None if outside is None else _length(outside)
    if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
        # The function in which TensorFlow puts a loop that a persistent tape or nested tapes record.
        graph = _private.function_graph(operation, "f")
        if graph is None:
            return None
        operands = {id(inner): outer for inner, outer in zip(graph.inputs, operation.inputs, strict=False)}
        return _length(graph.outputs[tensor_list.value_index], operands)
    if operation.type == "Identity":
        return _length(operation.inputs[0], arguments)
    if operation.type in ("TensorListReserve", "TensorListResize"):
        return branches.number_of(operation.inputs[1])
    if operation.type == "TensorListFromTensor":
        size: int | None = operation.inputs[0].shape[0]
        return size
    if operation.type == "EmptyTensorList":
        return 0
    if operation.type == "TensorListSetItem":
        length = _length(operation.inputs[0], arguments)
        if length is None or not operation.get_attr("resize_if_index_out_of_bounds"):
            return length
        index = branches.number_of(operation.inputs[1])
        return None if index is None else max(length, index + 1)
    if operation.type == "TensorListPushBack":
        length = _length(operation.inputs[0], arguments)
        return None if length is None else length + 1
    if operation.type in ("While", "StatelessWhile") and _private.keeps_lengths(operation, tensor_list.value_index):
        return _length(operation.inputs[tensor_list.value_index], arguments)
    return None


def _is_in_body(call: _private.Call) -> bool:
    """The operation is in the body of a loop or in a branch."""
    assert call.outputs is not None
    return can_make(call.outputs[0].op.graph)


# `IdentityNSPMDExpander::ExpandOp` has the fault. DTensor takes constants out of a body, too.
@rewrite_rule(
    "IdentityN", graph=True, eager=False, gradient="registered", when=_is_in_body, sizes="any", local="also",
    fault="puts the identity of a custom gradient behind the operations that make its operands, also if these are "
    "outside of the loop or branch", cases=("custom gradient in a branch",),
)  # fmt: skip
def make_in_body(call: _private.Call) -> None:
    """Make operands from outside, and constants, results of operations in the body. The operation itself stays."""
    assert call.outputs is not None
    operation = call.outputs[0].op
    for number, operand in enumerate(operation.inputs):
        if operand.op.type == "Placeholder" or _is_constant(operand):
            _private.update_input(operation, number, made_here(operand))


def can_make(graph: tf.Graph) -> bool:
    """Return whether a graph is the body of a loop or a branch for which `made_here` does something."""
    return _private.unknown_zero(graph) is not None


def made_here(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor that an operation in the body of a loop or branch makes: the operand plus zero."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_complex or tensor.dtype.is_bool):
        return tensor
    none = _private.unknown_zero(tf.compat.v1.get_default_graph())
    assert none is not None, "Others need not do it."
    return tf.logical_or(tensor, none < 0) if tensor.dtype.is_bool else tensor + tf.cast(none, tensor.dtype)


def _is_constant(tensor: tf.Tensor) -> bool:
    """Return whether a tensor follows from constants and shapes."""
    seen, left = set(), [tensor.op]
    while left:
        operation = left.pop()
        if operation in seen or operation.type in _OF_SHAPES:
            continue
        if not operation.inputs and operation.type != "Const":
            return False
        seen.add(operation)
        left += [each.op for each in operation.inputs]
    return True


_OF_SHAPES = frozenset(("OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"))
