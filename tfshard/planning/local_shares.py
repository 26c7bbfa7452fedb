"""Among how many devices of the model axes is each tensor of a step sharded?"""

import collections
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import tensorflow as tf

from tfshard.graph.dim_rules import Flow, advance
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import Axes


def shares_of(sources: Mapping[Any, Axes], mesh_shape: MeshAxes) -> Callable[[tf.Tensor], int]:
    """Follow the sharded dims of variables through a graph, forward and backward, by the rules of `dim_rules`.

    Args:
        sources: References to tensors that stand for variables, with the axis of each dim.
        mesh_shape: Axis name to size.

    Returns:
        A function that returns the number of devices for a tensor.
    """
    found: dict[Hashable, int] = collections.defaultdict(lambda: 1)
    for axis in mesh_shape.tensor:
        seen: dict[Hashable, int] = {}
        left = [(ref.deref(), axes.index(axis)) for ref, axes in sources.items() if axis in axes]
        while left:
            tensor, dim = left.pop()
            if tensor.ref() in seen:
                continue
            seen[tensor.ref()] = dim
            for user in tensor.consumers():
                for number, each in enumerate(user.inputs):
                    if each is tensor:
                        left += _next(user, number, dim, mesh_shape[axis])
        for ref in seen:
            found[ref] *= mesh_shape[axis]
    return lambda tensor: found[tensor.ref()]


def _next(operation: tf.Operation, number: int, dim: int, devices: int) -> list[tuple[tf.Tensor, int]]:
    outcome = advance(operation, number, dim, devices)
    if isinstance(outcome, Flow):
        return [(operation.outputs[output], to) for output, to in outcome.outputs]
    given = operation.inputs[number].shape
    if operation.type == "BiasAddGrad" and dim == given.rank - 1:
        return [(operation.outputs[0], 0)]
    # Gradients of operations that work element by element, and softmax cross entropy with its gradient.
    if operation.type.endswith(("Grad", "SoftmaxCrossEntropyWithLogits", "ScatterNdNonAliasingAdd")):
        return [(output, dim) for output in operation.outputs if output.shape == given]
    return []
