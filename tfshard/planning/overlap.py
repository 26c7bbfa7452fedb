"""Predict how much of a step's sending time its computation hides, from the graph of the step and the links."""

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

# Writing an element takes as long as this many operations of a product: about 50 GFLOP/s beside 10 GB/s to and from
# memory, with three numbers of four bytes for each. The constant only divides the time among operations.
_FLOPS_OF_ELEMENT = 60
# The elements that an optimizer writes for each element: its slots, and the new value.
_ELEMENTS_OF_UPDATE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """A step over some links, on one device.

    Attributes:
        seconds: The time from the first operation to the last.
        collective_seconds: The time in which the device sends.
        compute_seconds: The time in which the device computes.
        hidden: The share of `collective_seconds` in which the device also computes; None for a step without
            collectives.
    """

    seconds: float
    collective_seconds: float
    compute_seconds: float
    hidden: float | None

    def text(self) -> str:
        """It as a sentence."""
        hidden, computing = self.hidden or 0.0, 1e3 * self.compute_seconds
        return (
            f"{computing:,.1f} ms of computing hide {hidden:.0%} of the time in collectives: a step takes "
            f"{1e3 * self.seconds:,.1f} ms."
        )


def overlap_of(graph: StepGraph, links: Links, mesh_shape: Mapping[str, int], compute_seconds: float) -> Overlap | None:
    """Simulate a step: one operation after the other, and beside them one collective after the other.

    Operations and collectives run in the order in which they can run. The computing time is divided among operations by
    their products (`training_flops`), and by the elements that they write.

    Args:
        graph: The step.
        links: The links between its devices.
        mesh_shape: Its mesh.
        compute_seconds: The time in which a device computes the step.

    Returns:
        The overlap. None for a mesh with model axes: the graph lacks the collectives of activations.
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
    """Return the time of a collective."""
    axis = mesh_axes.data
    assert axis is not None
    if stand_in.by_replicas:
        parts = variable_traffic.by_replicas("", stand_in.sent, 1, mesh_axes)
    else:
        kind = "all-gather" if stand_in.kind is Kind.GATHER else "reduce-scatter" if stand_in.is_cut else "all-reduce"
        sent = stand_in.sent if stand_in.coded is None else stand_in.coded
        parts = [variable_traffic.Collective(kind=kind, what="", axis=axis, count=1, bytes=sent, formula="")]
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
    """Simulate a step: its operations run one after the other, and beside them its collectives one after the other,
    each as soon as it can run.

    Args:
        graph: The step.
        seconds: Returns the time of an operation.
    """
    waits = {each: len({tensor.op for tensor in inputs}) for each, inputs in graph.needed.items()}
    users: dict[tf.Operation, list[tf.Operation]] = collections.defaultdict(list)
    for operation, inputs in graph.needed.items():
        for made_by in dict.fromkeys(tensor.op for tensor in inputs):
            users[made_by].append(operation)
    # The operations and the collectives that can run, and the ends of the running ones.
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
