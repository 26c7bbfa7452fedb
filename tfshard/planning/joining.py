"""The order in which DTensor writes gradients to the buffer that they are reduced in.

It reduces them as one, in the order in which they stand in the function (dtensor_allreduce_combine_optimization.cc):
each is written behind those before it, and freed. They stand there in the order in which MLIR's importer takes a graph:
the reverse post-order of a depth-first search that takes what uses an operation in the order of names, the last first
(GetReversePostOrder of TensorFlow's graph/algorithm.cc). So those of a model of convolutions come from the last layer
to the first, as they are made: `Conv2DBackpropInput`, on which all layers before hang, is searched before
`Conv2DBackpropFilter`. Of products it is the other way round (MatMul_1 before MatMul): what is made first is
written last, and all gradients wait for those of the first layer. In the body of a loop, as of a batch in parts, they
are written as they are made, the loss behind the first of them.
"""

import collections
from collections.abc import Sequence

import tensorflow as tf

from tfshard.planning.training_graph import CUTS, VIEWS, WITHOUT_WORK


def in_order(
    gradients: Sequence[tf.Tensor], operations: Sequence[tf.Operation], *, in_loop: bool = False
) -> list[tf.Tensor]:
    """Gradients in the order in which they are written.

    Args:
        gradients: Of a step, as they are joined.
        operations: Of its graph, in the order in which they were added.
        in_loop: Whether the step is the body of a loop, in which they are written as they are made.
    """
    place = {operation: number for number, operation in enumerate(operations if in_loop else _imported(operations))}
    return sorted(gradients, key=lambda each: place[_maker(each)])


def _maker(tensor: tf.Tensor) -> tf.Operation:
    """What computed it, which others reshaped or cast; of what is given, what reshaped it last."""
    operation = tensor.op
    rearranging = VIEWS | CUTS | {"Cast"}
    given = WITHOUT_WORK - rearranging
    while operation.type in rearranging and operation.inputs[0].op.type not in given:
        operation = operation.inputs[0].op
    return operation


def _imported(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The reverse post-order of a search from what has no inputs."""
    users: dict[tf.Operation, set[tf.Operation]] = collections.defaultdict(set)
    for operation in operations:
        for each in operation.inputs:
            users[each.op].add(operation)
    found: list[tf.Operation] = []
    seen: set[tf.Operation] = set()
    left = [(each, False) for each in sorted((each for each in operations if not each.inputs), key=_name)]
    while left:
        operation, is_left = left.pop()
        if is_left:
            found.append(operation)
        elif operation not in seen:
            seen.add(operation)
            left.append((operation, True))
            left += [(each, False) for each in sorted(users[operation], key=_name) if each not in seen]
    return found[::-1]


def _name(operation: tf.Operation) -> str:
    name: str = operation.name
    return name
