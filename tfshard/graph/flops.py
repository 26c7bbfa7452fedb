"""How many floating-point operations a training step takes: its forward and backward pass, counted in their graph."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.graph import inventory, model_graph, traced_loss


def training_flops(model: keras.Model, inputs: Any) -> int | None:
    """Count the operations of matrix products and convolutions in a step. Nothing is computed or allocated.

    A product of (m, k) and (k, n) is 2 m k n: a multiplication and an addition for each k. A convolution is 2 *
    (elements of its output) * (elements of its kernel) / (output channels). The graph includes the backward pass: most
    layers have two products there for one of the forward pass. A chain of Dense layers with P parameters in kernels
    therefore comes to about 6 P for each sample (Kaplan et al. 2020, section 2.1). The count excludes elementwise
    operations, optimizers, and the repeated work of `strategy.recompute`: model FLOPs as in PaLM (Chowdhery et al.
    2022, appendix B).

    Args:
        model: A built model, sharded or not. The loss is the compiled loss, or a mean square.
        inputs: The inputs of the model over all devices: arrays, or anything with a shape and a dtype, nested like the
            model's inputs.

    Returns:
        The count, over all devices. None if the graph does not tell: a dim is unknown before the step runs, or the
        number of iterations of a loop with products or convolutions is unknown.

    Raises:
        LayoutError: The model cannot be called on `inputs`, or no loss can be made of its outputs.

    Example: two products of (8, 4) and (4, 2); the first layer's input needs no gradient.

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> training_flops(model, np.ones((8, 4))) == 2 * (2 * 8 * 4 * 2)
    True
    """
    graph = _private.func_graph("tfshard_flops")
    with graph.as_default(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The model warns again when it is trained.
        variables = [variable for variable, _ in inventory.owned_variables(model)]
        values = {each.path: tf.compat.v1.placeholder(each.dtype, each.shape) for each in variables}
        trained = [values[each.path] for each in variables if each.trainable]
        with tf.GradientTape() as tape:
            tape.watch(trained)
            tensors = model_graph.local_inputs(model, inputs, 1)
            loss = traced_loss.loss_of_model(model, tensors, values.__getitem__)
        gradients = [each for each in tape.gradient(loss, trained) if each is not None]
        try:
            return _of_results([loss, *tf.nest.flatten(gradients, expand_composites=True)])
        except _UnknownError:
            return None


def flops_of(operation: tf.Operation) -> int:
    """Return the count of one operation; 0 if its graph does not tell."""
    try:
        return _OF[operation.type](operation) if operation.type in _OF else 0
    except _UnknownError:
        return 0


def turns_of(loop: tf.Operation) -> int | None:
    """Return the number of iterations of a loop; None if unknown."""
    try:
        return _turns(loop)
    except _UnknownError:
        return None


class _UnknownError(Exception):
    """The graph does not tell."""


def _of_results(tensors: Iterable[tf.Tensor]) -> int:
    """Return the count of all operations that lead to some tensors of a graph. TensorFlow removes the other
    operations."""
    waiting = [each.op for each in tensors]
    needed: set[tf.Operation] = set()
    while waiting:
        operation = waiting.pop()
        if operation not in needed:
            needed.add(operation)
            waiting += [each.op for each in operation.inputs]
    return sum(_OF[each.type](each) for each in needed if each.type in _OF)


def _size(shape: tf.TensorShape) -> int:
    if not shape.is_fully_defined():
        raise _UnknownError
    return math.prod(shape.as_list())


def _of_product(operation: tf.Operation) -> int:
    left = operation.inputs[0].shape
    is_turned = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
    summed = left[-2:-1] if is_turned else left[-1:]
    return 2 * _size(operation.outputs[0].shape) * _size(summed)


def _of_einsum(operation: tf.Operation) -> int:
    """Return the count of an einsum. With two operands, every product is summed once. With a single operand, an einsum
    only sums or transposes."""
    if len(operation.inputs) != 2:
        return 0
    given, result = operation.get_attr("equation").decode().split("->")
    summed: dict[str, int] = {}
    for labels, operand in zip(given.split(","), operation.inputs, strict=True):
        before, _, after = labels.partition("...")
        rank = operand.shape.rank
        if rank is None:
            raise _UnknownError
        places = [*enumerate(before), *((rank - len(after) + place, label) for place, label in enumerate(after))]
        summed |= {label: _size(operand.shape[place : place + 1]) for place, label in places if label not in result}
    return 2 * _size(operation.outputs[0].shape) * math.prod(summed.values())


def _of_convolution(kernel: int, output: int) -> Callable[[tf.Operation], int]:
    """Return a counter of a convolution or one of its gradients.

    Args:
        kernel: The number of the input with the shape of the kernel; -1 for the result.
        output: The number of the input with the shape of the convolution's output; -1 for the result.
    """

    def count(operation: tf.Operation) -> int:
        tensors = [*operation.inputs, operation.outputs[0]]
        shape = tensors[output].shape
        channels = shape[1:2] if operation.get_attr("data_format").startswith(b"NC") else shape[-1:]
        return 2 * _size(shape) * _size(tensors[kernel].shape) // _size(channels)

    return count


def _of_loop(operation: tf.Operation) -> int:
    once = _of_function(operation, "body")
    return once * _turns(operation) if once else 0


def _turns(loop: tf.Operation) -> int:
    """Return the number of iterations of a loop, if it is known. The second input of a loop is its limit, and the loop
    of a gradient runs as often as the loop of the forward pass."""
    most = loop.inputs[1]
    if most.op.type in LOOPS:
        return _turns(most.op)
    # Keras gives the largest length of a sequence.
    known = tf.get_static_value(most.op.inputs[0] if most.op.type == "Max" else most)
    if known is None or known.max() < 0:
        raise _UnknownError
    return int(known.max())


def _of_call(operation: tf.Operation) -> int:
    return _of_function(operation, "f")


def _of_branches(operation: tf.Operation) -> int:
    """Return the count of the branch with the most operations."""
    return max(_of_function(operation, name) for name in ("then_branch", "else_branch"))


def _of_function(operation: tf.Operation, attribute: str) -> int:
    """Return the count of one call of an operation's function."""
    graph = _private.function_graph(operation, attribute)
    if graph is None:
        raise _UnknownError
    return _of_results(graph.outputs)


LOOPS = frozenset({"StatelessWhile", "While"})
_OF: dict[str, Callable[[tf.Operation], int]] = {
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"), _of_product),
    "Einsum": _of_einsum,
    **dict.fromkeys(("Conv", "Conv2D", "Conv3D", "DepthwiseConv2dNative"), _of_convolution(1, -1)),
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), _of_convolution(1, 2)
    ),
    **dict.fromkeys(
        ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"),
        _of_convolution(-1, 2),
    ),
    **dict.fromkeys(LOOPS, _of_loop),
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), _of_call),
    **dict.fromkeys(("If", "StatelessIf"), _of_branches),
}
