"""The order in which TensorFlow multiplies: another one than a model has it, if that takes less.

Grappler's arithmetic optimizer (MinimizeBroadcasts) puts a product of several tensors together anew where some are
scalars: those first. A gradient comes last then, so that what it is multiplied with is one tensor when the forward
pass ends: of a GELU three activations wait for the backward pass, where its formula has four.
"""

import graphlib
from collections.abc import Sequence

import tensorflow as tf


def multiply_early(operations: Sequence[tf.Operation]) -> dict[tf.Operation, list[tf.Tensor]]:
    """What products take once TensorFlow has changed their order: numbers first, then what can be there first.

    Products are left as they are whose factors have several shapes besides; TensorFlow's order of these differs little
    in memory.

    Args:
        operations: Of a graph, in the order in which they were added.
    """
    depth = _depths(operations)
    found: dict[tf.Operation, list[tf.Tensor]] = {}
    taken: set[tf.Operation] = set()
    for root in reversed(operations):
        if root.type != "Mul" or root in taken:
            continue
        factors, inner = _factors(root)
        taken.update(inner)
        numbers = [each for each in factors if each.shape.rank == 0]
        others = sorted((each for each in factors if each.shape.rank != 0), key=lambda each: depth[each.op])
        if not inner or not numbers or any(each.shape.as_list() != root.outputs[0].shape.as_list() for each in others):
            continue
        # Operations that would multiply numbers only are left out.
        takes = numbers
        for operation, factor in zip([*reversed(inner), root][-len(others) :], others, strict=True):
            found[operation] = [*takes, factor]
            takes = [operation.outputs[0]]
    return found


def _depths(operations: Sequence[tf.Operation]) -> dict[tf.Operation, int]:
    """How many operations come one after the other before each of them. Turns change inputs of earlier ones to what
    was added later."""
    makers = {operation: {each.op for each in operation.inputs} for operation in operations}
    order = graphlib.TopologicalSorter(makers).static_order()
    depth: dict[tf.Operation, int] = {}
    for operation in order:
        depth[operation] = 1 + max((depth[each] for each in makers[operation]), default=0)
    return depth


def _factors(root: tf.Operation) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """What a product is made of, and the products within it that nothing else takes."""
    factors: list[tf.Tensor] = []
    inner: list[tf.Operation] = []
    left = list(reversed(root.inputs))
    while left:
        tensor = left.pop()
        operation = tensor.op
        is_inner = operation.type == "Mul" and len(tensor.consumers()) == 1 and not operation.control_inputs
        if is_inner and tensor.shape.is_fully_defined() and tensor.shape.rank:
            inner.append(operation)
            left += reversed(operation.inputs)
        else:
            factors.append(tensor)
    return factors, inner
