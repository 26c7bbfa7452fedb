"""Steps that were traced, and the values that each step writes.

A function may run several steps, and read or write variables around them. DTensor may move a read in front of a write
that it does not depend on (steps.py). Operations behind a step in its function therefore take the value that the step
wrote.
"""

import dataclasses
import weakref
from collections.abc import Mapping

import tensorflow as tf

from tfshard import _private
from tfshard.errors import StrategyError
from tfshard.storage.writes import Writable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Write:
    """A write at the end of a step.

    Attributes:
        storage: The storage that is written.
        tensor: The name of the tensor that is written.
        operations: How many operations the graph had then.
    """

    storage: weakref.ref[Writable]
    tensor: str
    operations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsOfGraph:
    """The steps that were traced in one graph.

    Attributes:
        number: TensorFlow's count when the last trace ended: the function made of it has a higher one in its name.
        writes: Its writes.
        operations: How many operations the graph had when the first step ended.
    """

    number: int
    writes: tuple[Write, ...]
    operations: int


# By the graph: it lives as long as the function that was made of it.
traced: weakref.WeakKeyDictionary[tf.Graph, StepsOfGraph] = weakref.WeakKeyDictionary()


def note_step(graph: tf.Graph, written: Mapping[Writable, tf.Tensor]) -> None:
    """Record the graph of a traced step, and the values that the step writes."""
    count, before = len(graph.get_operations()), traced.get(graph)
    writes = tuple(
        Write(storage=weakref.ref(storage), tensor=value.name, operations=count) for storage, value in written.items()
    )
    traced[graph] = StepsOfGraph(
        number=_private.next_number(),
        writes=writes if before is None else before.writes + writes,
        operations=count if before is None else before.operations,
    )


def is_around_steps(graph: tf.Graph | None) -> bool:
    """Return whether a graph, a graph around it, or a function called in either has run a step."""
    while graph is not None:
        if graph in traced or _operations_with_steps(graph):
            return True
        graph = _private.outer_graph(graph)
    return False


def written_before(graph: tf.Graph | None, storage: Writable) -> tf.Tensor | None:
    """Return the value that earlier steps of the function that is being traced wrote to a storage, as it is stored.

    Args:
        graph: The graph that asks for the value. A branch sees the writes before its `tf.cond`.
        storage: The storage.

    Raises:
        StrategyError: DTensor would not keep the order of a write and the operations behind it.
    """
    between = False
    while graph is not None:
        found = _last_written(graph, storage)
        if found is not None and between:
            raise StrategyError(_unordered(storage))
        if found is not None:
            return found
        between |= not _private.graph_is_branch(graph)
        graph = _private.outer_graph(graph)
    return None


def _last_written(graph: tf.Graph, storage: Writable) -> tf.Tensor | None:
    steps = traced.get(graph)
    writes = () if steps is None else steps.writes
    last = next((each for each in reversed(writes) if each.storage() is storage), None)
    since = 0 if last is None else last.operations
    for number, operation in _operations_with_steps(graph):
        # The body of a loop or of a branch stays where it is, unless it waits for a step. A function is inlined.
        is_moved = "Call" in operation.type or (steps is not None and number >= steps.operations)
        if number >= since and is_moved and _writes(operation, storage):
            raise StrategyError(_unordered(storage))
    return None if last is None else graph.get_tensor_by_name(last.tensor)


def _unordered(storage: Writable) -> str:
    return (
        f"Variable '{storage.name}' is written by a strategy.run, and used or written again in the same tf.function. "
        "One of the two is in a loop, a branch or another tf.function: DTensor does not keep their order. Do both in "
        "one strategy.run, or call tf.functions that run one step each from Python."
    )


# The attributes that name an operation's functions.
_BODIES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "While": ("body",),
    "StatelessWhile": ("body",),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
}


@dataclasses.dataclass
class _Seen:
    """The operations of a graph that were searched: their count, and the operations that call functions with steps, by
    number."""

    count: int = 0
    with_steps: list[tuple[int, str]] = dataclasses.field(default_factory=list)


_seen: weakref.WeakKeyDictionary[tf.Graph, _Seen] = weakref.WeakKeyDictionary()


def _operations_with_steps(graph: tf.Graph) -> list[tuple[int, tf.Operation]]:
    """Return the operations of a graph that call functions with steps, each with its number."""
    if not traced:
        return []
    seen, operations = _seen.setdefault(graph, _Seen()), graph.get_operations()
    for number in range(seen.count, len(operations)):
        if any(each in traced or _operations_with_steps(each) for each in _bodies(operations[number])):
            seen.with_steps.append((number, operations[number].name))
    seen.count = len(operations)
    return [(number, graph.get_operation_by_name(name)) for number, name in seen.with_steps]


def _bodies(operation: tf.Operation) -> list[tf.Graph]:
    graphs = [_private.function_graph(operation, name) for name in _BODIES.get(operation.type, ())]
    return [graph for graph in graphs if graph is not None]


def _writes(operation: tf.Operation, storage: Writable) -> bool:
    """Return whether a step that runs in an operation writes a storage."""
    for graph in _bodies(operation):
        steps = traced.get(graph)
        if steps is not None and any(write.storage() is storage for write in steps.writes):
            return True
        if any(_writes(each, storage) for _, each in _operations_with_steps(graph)):
            return True
    return False
