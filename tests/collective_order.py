"""Count the pairs of collectives without a fixed order in the graphs of a device.

NCCL matches the collectives of several processes by the order in which each device reaches them. Each graph must
therefore order all its collectives, including collectives of successive loop iterations.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import tensorflow as tf
from tensorflow.python.eager import context


@dataclasses.dataclass(frozen=True)
class Graph:
    """The graph of a function on one device.

    Attributes:
        collectives: The names of its collectives.
        unordered: Pairs of collectives that do not wait for each other. In a loop, also pairs in which the second, in
            the next iteration, does not wait for the first.
    """

    collectives: tuple[str, ...]
    unordered: tuple[tuple[str, str], ...]


@contextlib.contextmanager
def collected() -> Iterator[list[Graph]]:
    """Yield a list that holds, after the context, the graphs with collectives that ran in it."""
    found: list[Graph] = []
    context.context().enable_graph_collection()
    context.context().export_run_metadata()
    try:
        yield found
        for function in context.context().export_run_metadata().function_graphs:
            graphs = [of_nodes(graph.node) for graph in function.partition_graphs]
            found += [graph for graph in graphs if graph.collectives]
    finally:
        context.context().disable_graph_collection()


def of_nodes(nodes: Iterable[tf.compat.v1.NodeDef]) -> Graph:
    """Return the collectives of a graph with loops and branches of TensorFlow 1 (Switch, Merge, ...)."""
    by_name = {node.name: node for node in nodes}
    inputs = {name: [each for each in map(_parsed, node.input) if each[0] in by_name] for name, node in by_name.items()}
    order = _topological(by_name, inputs)
    collectives = [name for name in order if by_name[name].op.startswith("Collective")]
    # The dependencies of a node, as bits: collectives, followed by the first nodes of an iteration.
    marked = [*collectives, *(name for name in order if _is_next(by_name, name))]
    bit = {name: 1 << number for number, name in enumerate(marked)}
    before: dict[str, int] = {}
    frames: dict[str, tuple[str, ...]] = {}
    taken: dict[str, dict[str, frozenset[int]]] = {}
    merges = {source: name for name in order for source, _ in inputs[name] if by_name[source].op == "NextIteration"}
    for name in order:
        node = by_name[name]
        sources = [each for each in inputs[name] if by_name[each[0]].op != "NextIteration"]
        before[name] = 0
        for source, _ in sources:
            before[name] |= before[source] | bit.get(source, 0)
        frame = max((frames[source] for source, _ in sources), key=len, default=())
        if node.op in ("Enter", "RefEnter"):
            frame = (*frame, node.attr["frame_name"].s.decode())
        frames[name] = frame[:-1] if node.op in ("Exit", "RefExit") else frame
        taken[name] = _branches(node, sources, by_name, inputs, taken)
    unordered = []
    for first, second in itertools.combinations(collectives, 2):
        ordered = before[second] & bit[first] or before[first] & bit[second]
        if not ordered and not _exclude(taken[first], taken[second]):
            unordered.append((first, second))
    for first, second in itertools.product(collectives, repeat=2):
        if not frames[first] or frames[first] != frames[second] or _exclude(taken[first], taken[second]):
            continue
        # The first is in one iteration, the second in the next.
        ways = [
            merges[name]
            for name in order
            if by_name[name].op == "NextIteration" and before[name] & bit[first] and frames[name] == frames[first]
        ]
        if not any(before[second] & bit[merge] for merge in ways):
            unordered.append((first, second))
    return Graph(collectives=tuple(collectives), unordered=tuple(unordered))


def _is_next(by_name: dict[str, tf.compat.v1.NodeDef], name: str) -> bool:
    """Return whether an iteration starts at a node."""
    sources = [by_name.get(_parsed(each)[0]) for each in by_name[name].input]
    return any(source is not None and source.op == "NextIteration" for source in sources)


def _parsed(given: str) -> tuple[str, int]:
    """Return the node and the output of an input; -1 for a control edge."""
    if given.startswith("^"):
        return given[1:], -1
    name, _, output = given.partition(":")
    return name, int(output or 0)


def _topological(by_name: dict, inputs: dict[str, list[tuple[str, int]]]) -> list[str]:
    order: list[str] = []
    state: dict[str, int] = {}
    for root in by_name:
        stack = [root]
        while stack:
            name = stack[-1]
            if state.get(name) == 2:
                stack.pop()
            elif state.get(name) == 1:
                state[name] = 2
                order.append(stack.pop())
            else:
                state[name] = 1
                stack += [
                    source
                    for source, _ in inputs[name]
                    if source not in state and by_name[source].op != "NextIteration"
                ]
    return order


def _branches(
    node: tf.compat.v1.NodeDef, sources: list[tuple[str, int]], by_name: dict, inputs: dict, taken: dict
) -> dict[str, frozenset[int]]:
    """Return the branches of a node: for each predicate, the values with which the node runs."""
    if node.op == "Merge" and sources:
        # It runs in each of the branches that meet here.
        options = [_through(source, by_name, inputs, taken) for source in sources]
        common = set.intersection(*(set(option) for option in options))
        return {name: frozenset.union(*(option[name] for option in options)) for name in common}
    found: dict[str, frozenset[int]] = {}
    for source in sources:
        for name, values in _through(source, by_name, inputs, taken).items():
            found[name] = found.get(name, values) & values
    return found


def _through(source: tuple[str, int], by_name: dict, inputs: dict, taken: dict) -> dict[str, frozenset[int]]:
    name, output = source
    found = dict(taken[name])
    if by_name[name].op == "Switch" and output >= 0:
        predicate = _parsed(by_name[name].input[1])[0]
        found[predicate] = found.get(predicate, frozenset((0, 1))) & {output}
    return found


def _exclude(first: dict[str, frozenset[int]], second: dict[str, frozenset[int]]) -> bool:
    """Return whether two nodes never both run."""
    return any(name in second and not values & second[name] for name, values in first.items())
