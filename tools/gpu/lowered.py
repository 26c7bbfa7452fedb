"""Read a compiled step: collectives, their order, kernels, and copies between host and devices."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator

import tensorflow as tf
from tensorflow.core.framework import function_pb2, node_def_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import function_def_to_graph

from tools.gpu import kernels

_COLLECTIVE = "Collective"
_KINDS = {
    "CollectiveReduceV2": "all-reduce",
    "CollectiveGatherV2": "all-gather",
    "CollectiveReduceScatterV2": "reduce-scatter",
    "CollectiveAllToAllV2": "all-to-all",
}
# The operations that give and take a tensor, the name of the argument, and the dtype.
Copy = tuple[str, str, str, str]
Functions = dict[str, function_pb2.FunctionDef]


@dataclasses.dataclass
class Step:
    """The functions that a step runs on each device.

    Attributes:
        launches: The number of nodes that compute on the GPU.
        collectives: Kind, dtype and number of elements of each collective.
        unordered: The number of pairs of collectives that do not wait for each other.
        without_kernel: The nodes without a GPU kernel, by operation and dtypes.
        to_host: Copies from a device to the host, by producer, consumer, argument and dtype.
        to_device: Copies from the host to a device.
    """

    launches: int = 0
    collectives: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    unordered: int = 0
    without_kernel: collections.Counter[tuple[str, tuple[str, ...]]] = dataclasses.field(
        default_factory=collections.Counter
    )
    to_host: collections.Counter[Copy] = dataclasses.field(default_factory=collections.Counter)
    to_device: collections.Counter[Copy] = dataclasses.field(default_factory=collections.Counter)

    @property
    def not_of_nccl(self) -> set[tuple[str, str]]:
        """Kinds and dtypes of collectives in dtypes that NCCL does not have."""
        return {(kind, dtype) for kind, dtype, _ in self.collectives if dtype not in kernels.NCCL_DTYPES}

    def add(self, function: function_pb2.FunctionDef, known: Functions) -> None:
        """Add the nodes of a function, without those of functions that it calls."""
        nodes = _flat(function)
        placed = {node.name: kernels.place(node) for node in nodes}
        ops = {node.name: node.op for node in nodes}
        for node in nodes:
            place = placed[node.name]
            self.launches += place.launches and not kernels.launches_nothing(node)
            if not place.has_kernel:
                self.without_kernel[node.op, kernels.dtypes(node)] += 1
            if node.op in _KINDS:
                self.collectives.append((_KINDS[node.op], place.inputs[0].dtype, _elements(node, nodes)))
            for number, name in enumerate(each for each in node.input if not each.startswith("^")):
                producer, _, output = name.partition(":")
                taken, given = place.inputs[number], placed[producer].outputs[int(output or 0)]
                if taken.on_host != given.on_host:
                    copies = self.to_host if taken.on_host else self.to_device
                    copies[ops[producer], node.op, taken.name, taken.dtype] += 1
        self.unordered += unordered(nodes, known)


def functions() -> Functions:
    """Return all functions of the process, by name."""
    found = {}
    for name in context.context().list_function_names():
        with contextlib.suppress(tf.errors.NotFoundError):  # Python has freed it since.
            found[name] = context.context().get_function_def(name)
    return found


def read(names: Iterable[str], known: Functions) -> Step:
    """Read functions and the functions that they call.

    Args:
        names: The names of the functions.
        known: All functions, by name.
    """
    step = Step()
    for function in _reached(names, known):
        step.add(function, known)
    return step


def device_functions(known: Functions, before: Iterable[str]) -> list[str]:
    """Return the functions that DTensor runs on each device (`_func_...`), without those that existed `before`."""
    return [name for name in known.keys() - set(before) if name.startswith("_func_")]


def _flat(function: function_pb2.FunctionDef) -> list[node_def_pb2.NodeDef]:
    """Return the nodes of a function with inputs named as in a graph (`node:output`)."""
    graph, _ = function_def_to_graph.function_def_to_graph_def(function)
    return list(graph.node)


def _reached(names: Iterable[str], known: Functions) -> Iterator[function_pb2.FunctionDef]:
    """Yield functions, and the functions that they call."""
    waiting = list(dict.fromkeys(names))
    seen = set(waiting)
    while waiting:
        function = known[waiting.pop()]
        yield function
        new = {name for node in function.node_def for name in _called(node)} - seen
        seen |= new
        waiting += new


def _called(node: node_def_pb2.NodeDef) -> Iterator[str]:
    for attribute in node.attr.values():
        if attribute.func.name:
            yield attribute.func.name
        yield from (each.name for each in attribute.list.func)


def _elements(node: node_def_pb2.NodeDef, nodes: Iterable[node_def_pb2.NodeDef]) -> int:
    """Return the number of elements of a gather's result, or of a reduction's input; -1 if a shape is unknown.

    Only the node behind a gather that tfshard makes has its shape.
    """
    if node.op == "CollectiveGatherV2":
        found = [
            _size(node),
            *(_size(each) for each in nodes if _producer(each.input[0] if each.input else "") == node.name),
        ]
        return max(found)
    producer = _producer(node.input[0])
    return max(_size(each) for each in nodes if each.name == producer)


def _size(node: node_def_pb2.NodeDef) -> int:
    """Return the number of elements of a node's first output; -1 if the shape is unknown."""
    shapes = node.attr["_output_shapes"].list.shape
    if not shapes or shapes[0].unknown_rank or any(dim.size < 0 for dim in shapes[0].dim):
        return -1
    return math.prod(dim.size for dim in shapes[0].dim)


def unordered(nodes: list[node_def_pb2.NodeDef], known: Functions) -> int:
    """Return the number of pairs of collectives, or of calls with collectives, without a path between them."""
    bits = {}
    for node in nodes:
        called = (each for function in _reached(_called(node), known) for each in function.node_def)
        if any(each.op.startswith(_COLLECTIVE) for each in (node, *called)):
            bits[node.name] = 1 << len(bits)
    before: dict[str, int] = {}
    inputs = {node.name: [_producer(each) for each in node.input] for node in nodes}
    for name in _sorted(inputs):
        before[name] = 0
        for each in inputs[name]:
            before[name] |= before[each] | bits.get(each, 0)
    ordered = sum((before[name] & sum(bits.values())).bit_count() for name in bits)
    return math.comb(len(bits), 2) - ordered


def _producer(name: str) -> str:
    return name.removeprefix("^").partition(":")[0]


def _sorted(inputs: dict[str, list[str]]) -> list[str]:
    """Return names after those of their inputs."""
    order: dict[str, None] = {}
    for root in inputs:
        stack = [root]
        while stack:
            missing = [each for each in inputs[stack[-1]] if each not in order]
            if missing:
                stack += missing
            else:
                order[stack.pop()] = None
    return list(order)
