"""Follow and replace the tensors of a graph that is traced already."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator

import tensorflow as tf

from tfshard import _private


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpInput:
    """An input of an operation, by its number."""

    operation: tf.Operation
    number: int

    @property
    def tensor(self) -> tf.Tensor:
        return self.operation.inputs[self.number]

    def replace(self, tensor: tf.Tensor) -> None:
        """Give the operation another tensor."""
        _private.update_input(self.operation, self.number, tensor)


def consumers(tensor: tf.Tensor) -> list[OpInput]:
    """Return the inputs of operations that take a tensor."""
    return [
        OpInput(operation=user, number=number)
        for user in tensor.consumers()
        for number, each in enumerate(user.inputs)
        if each is tensor
    ]


def ancestors(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Return the operations that tensors are computed by."""
    found: set[tf.Operation] = set()
    add_ancestors(found, tensors)
    return found


def add_ancestors(found: set[tf.Operation], tensors: Iterable[tf.Tensor]) -> None:
    """Add the operations that tensors are computed by to a set that has the ancestors of all its operations."""
    left = [tensor.op for tensor in tensors]
    while left:
        operation = left.pop()
        if operation not in found:
            found.add(operation)
            left += [each.op for each in operation.inputs]


def descendants(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Return operations, and all operations that use their results."""
    found: set[tf.Operation] = set()
    left = list(operations)
    while left:
        operation = left.pop()
        if operation not in found:
            found.add(operation)
            left += [user for output in operation.outputs for user in output.consumers()]
    return found


def depends_on(tensor: tf.Tensor, operations: Collection[tf.Operation], passes: Callable[[tf.Operation], bool]) -> bool:
    """Return whether a tensor depends on one of some operations, through operations that `passes` accepts."""
    seen, left = set(), [tensor.op]
    while left:
        operation = left.pop()
        if operation in operations:
            return True
        if operation not in seen and passes(operation):
            seen.add(operation)
            left += [each.op for each in operation.inputs]
    return False


def graphs_out_to(outermost: tf.Graph | None) -> list[tf.Graph | None]:
    """Return the graphs from the one that is being built out to a given one. In eager code, the only item is None."""
    if outermost is None:
        return [None]
    graph = tf.compat.v1.get_default_graph()
    graphs = [graph]
    while graph is not None and graph is not outermost:
        graph = _private.outer_graph(graph)
        graphs.append(graph)
    return graphs


@contextlib.contextmanager
def adding_to(graph: tf.Graph | None) -> Iterator[None]:
    """Add operations to a graph without control dependencies. No gradient tape records them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_private.stop_recording())
        if graph is not None:
            stack.enter_context(graph.as_default())
            stack.enter_context(tf.control_dependencies(None))
        yield
