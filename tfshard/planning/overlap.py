"""How much of what a step sends is hidden behind what it computes, predicted from its graph and the links."""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Mapping

import tensorflow as tf

from tfshard.graph import flops
from tfshard.layouts.axes import MeshAxes
from tfshard.planning import variable_traffic
from tfshard.planning.links import Links
from tfshard.planning.step_graph import WITHOUT_WORK, Kind, StandIn, StepGraph

# An element that is written takes as long as so many operations of a product: about 50 GFLOP/s beside 10 GB/s to and
# from memory, of three numbers of four bytes for each. Only shares of the time are made of it.
_FLOPS_OF_ELEMENT = 60
# What an optimizer makes of each element: its slots, and the new value.
_ELEMENTS_OF_UPDATE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """A step over some links, on one device.

    Attributes:
        seconds: From its first operation to its last.
        collective_seconds: In which it sends.
        compute_seconds: In which it computes.
        hidden: The share of `collective_seconds` in which it also computes; None of a step without collectives.
    """

    seconds: float
    collective_seconds: float
    compute_seconds: float
    hidden: float | None

    def text(self) -> str:
        """It as a sentence."""
        hidden, computing = self.hidden or 0.0, 1e3 * self.compute_seconds
        return (
            f"Of the time in collectives {hidden:.0%} are hidden behind {computing:,.1f} ms of computing: a step takes "
            f"{1e3 * self.seconds:,.1f} ms."
        )


def overlap_of(graph: StepGraph, links: Links, mesh_shape: Mapping[str, int], compute_seconds: float) -> Overlap | None:
    """Runs a step on paper: one operation after the other, and beside them one collective after the other.

    Both in the order in which they can run. The time of computing is shared out among operations: by the products that
    they make (`training_flops`), and by the elements that they write.

    Args:
        graph: The step.
        links: The links between its devices.
        mesh_shape: Its mesh.
        compute_seconds: What a device takes to compute all of it.

    Returns:
        The overlap. None for a mesh with model axes: what is sent of activations is not in the graph.
    """
    mesh_axes = MeshAxes.of(mesh_shape)
    if mesh_axes.shards_by_several or mesh_axes.data_size == 1:
        return None
    weights = {each: _weight(each, graph) for each in graph.needed}
    unit = compute_seconds / (sum(weights.values()) or 1.0)

    def seconds(operation: tf.Operation) -> float:
        stand_in = graph.stand_ins.get(operation)
        if stand_in is not None and stand_in.is_collective:
            return sending_seconds(stand_in, links, mesh_axes)
        return unit * weights[operation]

    return run_on_paper(graph, seconds)


def sending_seconds(stand_in: StandIn, links: Links, mesh_axes: MeshAxes) -> float:
    """Seconds of a collective."""
    axis = mesh_axes.data
    assert axis is not None
    if stand_in.by_replicas:
        parts = variable_traffic.by_replicas("", stand_in.sent, 1, mesh_axes)
    else:
        kind = "all-gather" if stand_in.kind is Kind.GATHER else "reduce-scatter" if stand_in.is_cut else "all-reduce"
        parts = [variable_traffic.Collective(kind=kind, what="", axis=axis, count=1, bytes=stand_in.sent, formula="")]
    return sum(links.seconds(each, mesh_axes) or 0.0 for each in parts)


def _weight(operation: tf.Operation, graph: StepGraph) -> float:
    stand_in = graph.stand_ins.get(operation)
    if stand_in is not None:
        elements = stand_in.updated // operation.outputs[0].dtype.size
        return float(_FLOPS_OF_ELEMENT * elements * _ELEMENTS_OF_UPDATE)
    if operation.type in WITHOUT_WORK:
        return 0.0
    counts = [each.shape.num_elements() for each in operation.outputs if each.dtype not in (tf.resource, tf.variant)]
    return flops.flops_of(operation) + _FLOPS_OF_ELEMENT * sum(count or 0 for count in counts)


def run_on_paper(graph: StepGraph, seconds: Callable[[tf.Operation], float]) -> Overlap:
    """Runs the operations of a step one after the other, and beside them its collectives one after the other, each as
    soon as it can run.

    Args:
        graph: The step.
        seconds: What each operation takes.
    """
    waits = {each: len({tensor.op for tensor in inputs}) for each, inputs in graph.needed.items()}
    users: dict[tf.Operation, list[tf.Operation]] = collections.defaultdict(list)
    for operation, inputs in graph.needed.items():
        for made_by in dict.fromkeys(tensor.op for tensor in inputs):
            users[made_by].append(operation)
    # What can run, and what runs until when: of operations, and of collectives.
    ready: tuple[collections.deque[tf.Operation], ...] = (collections.deque(), collections.deque())
    busy = [0.0, 0.0]
    ends: list[tuple[float, int, int, tf.Operation]] = []
    numbers = itertools.count()
    running: list[tf.Operation | None] = [None, None]
    both = now = 0.0

    def add(operation: tf.Operation) -> None:
        stand_in = graph.stand_ins.get(operation)
        ready[stand_in is not None and stand_in.is_collective].append(operation)

    for operation in graph.operations:
        if operation in waits and not waits[operation]:
            add(operation)
    while True:
        for lane in (0, 1):
            if running[lane] is None and ready[lane]:
                running[lane] = operation = ready[lane].popleft()
                took = seconds(operation)
                busy[lane] += took
                heapq.heappush(ends, (now + took, next(numbers), lane, operation))
        if not ends:
            break
        end, _, lane, operation = heapq.heappop(ends)
        if running[0] is not None and running[1] is not None:
            both += end - now
        now, running[lane] = end, None
        for user in users[operation]:
            waits[user] -= 1
            if not waits[user]:
                add(user)
    computing, sending = busy
    return Overlap(
        seconds=now,
        collective_seconds=sending,
        compute_seconds=computing,
        hidden=both / sending if sending else None,
    )
