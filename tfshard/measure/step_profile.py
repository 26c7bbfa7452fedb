"""profile_step: the collectives of one training step, their bytes and times, read from a trace of the step.

# Note: who traces in a launched run

Only client 0 traces, and sends its events to the other clients. TensorFlow's trace recorder may write to freed memory
if an activity begins in one thread and ends in another. Then the client dies at the end of the trace or later, or
events are missing. (`TraceMeRecorder::Consume` of traceme_recorder.cc keeps pointers to ends of activities that wait
for their begins. The vector of a thread's records grows meanwhile, which copies its elements.) A step has one such
activity, `CollectiveExecutor::CompleteParams`: a client asks client 0, the leader of the groups of collectives, about
each collective, and a gRPC thread takes the answer. Client 0 asks nobody, so there the activity begins and ends in one
thread.
"""

import collections
import contextlib
import dataclasses
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import rich.box
import rich.table
import tensorflow as tf

from tfshard import _private, collectives, tables
from tfshard.devices import allocators, clients, startup, transfer
from tfshard.errors import PlanMismatchError, StrategyError
from tfshard.graph import batches, inventory
from tfshard.layouts.axes import MeshAxes, axis_sizes
from tfshard.measure.peak_memory import PeakMemory, peak_of
from tfshard.measure.timeline import Timeline, timeline_of
from tfshard.storage.variables import ShardedVariable

if TYPE_CHECKING:
    from tfshard.layouts.planner import ShardingPlan

# TensorFlow's oneDNN allocator does not report smaller allocations (mkl_cpu_allocator.h). A gather allocates its
# result, a ring reduction a buffer for each device.
SMALL_BYTES = 256 << 10
_KINDS = {
    "CollectiveGatherV2": "all-gather",
    "CollectiveReduceV2": "all-reduce",
    "CollectiveReduceScatterV2": "reduce-scatter",
    "CollectiveAllToAllV2": "all-to-all",
}
_RINGS = ("CollectiveReduceV2", "CollectiveReduceScatterV2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfiledCollective:
    """A collective operation of the step.

    Attributes:
        kind: `"all-gather"`, `"all-reduce"`, ... On CPU, a reduce-scatter is an all-reduce and a local slice. On a mesh
            of several axes, an all-gather is an all-reduce of zero-padded shards, except over the data axis.
        name: TensorFlow's name of the operation, which tells its place in the model.
        group_size: How many devices take part in each run.
        count: How often each device took part.
        bytes: Bytes of the full tensor on one device: the result of a gather, the input of a reduction. None if the
            trace does not tell: it tells bytes on CPU, through oneDNN's allocator, for shards above `SMALL_BYTES`.
        seconds: Time from start to end, including the wait for other devices; the mean of the devices.
    """

    kind: str
    name: str
    group_size: int
    count: int
    bytes: int | None
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A collective on one device: begin and end in seconds from the first collective of the step."""

    lane: int
    kind: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StepProfile:
    """The result of `tfshard.profile_step`; `print` it, or use it as data.

    Attributes:
        mesh: Axis name to size.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
        collectives: The collective operations, the largest first.
        seconds: Wall time of the step, tracing included.
        variable_bytes: Bytes of parameters, state and slots that each local device stores, by device.
        spans: The begin and end of each collective.
        peak: The memory at the peak of the step; None if the allocator does not report. On CPU, oneDNN's allocator
            reports. The system's allocator, the default of clients of a launched run, does not.
        timeline: The work of each device in time; None if the trace does not tell: it does on CPU.
    """

    mesh: MeshAxes
    device_type: str
    collectives: tuple[ProfiledCollective, ...]
    seconds: float
    variable_bytes: dict[str, int]
    spans: tuple[Span, ...]
    peak: PeakMemory | None = None
    timeline: Timeline | None = dataclasses.field(default=None, repr=False)

    def count(self, kind: str | None = None) -> int:
        """Return how many collectives a device took part in, of one kind or of all."""
        return sum(c.count for c in self.collectives if kind in (None, c.kind))

    def bytes(self, kind: str | None = None) -> int:
        """Return the bytes of the collectives' tensors on one device, of one kind or all, as far as known."""
        return sum((c.bytes or 0) * c.count for c in self.collectives if kind in (None, c.kind))

    def untold_bytes(self, kind: str | None = None) -> int:
        """Return the most bytes that collectives with unknown bytes may have sent (on CPU with oneDNN's allocator).

        With the system's allocator, the trace tells no bytes at all, and nothing bounds them (`peak` is None).
        """
        untold = [c for c in self.collectives if kind in (None, c.kind) and c.bytes is None]
        return sum(c.count * SMALL_BYTES * (1 if c.kind == "all-gather" else c.group_size) for c in untold)

    def collective_seconds(self) -> float:
        """Return the time that a device spent in collectives; overlapping collectives count twice."""
        return sum(c.seconds for c in self.collectives)

    @property
    def hidden(self) -> float | None:
        """The share of collective time in which the same device also computes (`Timeline.hidden`); None if unknown."""
        return None if self.timeline is None else self.timeline.hidden

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data, with only the numbers of the timeline."""
        numbers = None if self.timeline is None else self.timeline.to_dict()
        values = dataclasses.asdict(dataclasses.replace(self, timeline=None))
        return {**values, "mesh": MeshAxes.of(self.mesh).given, "timeline": numbers}

    def table(self) -> rich.table.Table:
        """Return the profile as a rich table."""
        axes = tables.mesh(self.mesh.given)
        title = f"One step on {axes}, {1e3 * self.seconds:.0f} ms"
        if self.peak is not None:
            title += f", {tables.size(self.peak.added)} more in memory at its peak"
        if self.hidden is not None:
            title += f", {self.hidden:.0%} of collectives hidden"
        table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD)
        table.add_column("collective")
        table.add_column("operation", overflow="fold")
        for column in ("devices", "count", "bytes", "ms"):
            table.add_column(column, justify="right")
        for c in self.collectives:
            bytes_ = "?" if c.bytes is None else tables.size(c.bytes)
            table.add_row(c.kind, c.name, str(c.group_size), str(c.count), bytes_, f"{1e3 * c.seconds:.2f}")
        table.add_section()
        table.add_row("all", "", "", str(self.count()), "", f"{1e3 * self.collective_seconds():.2f}", style="bold")
        return table

    def __str__(self) -> str:
        return tables.as_text(self.table())

    __repr__ = __str__

    def plot(self, path: str) -> None:
        """Draw the collectives on a timeline, a lane for each thread. Needs matplotlib (`pip install tfshard[plots]`).

        Args:
            path: The file to save; its ending gives the format.
        """
        import matplotlib.figure

        figure = matplotlib.figure.Figure(figsize=(10, 3), layout="constrained")
        axes = figure.subplots()
        lanes = sorted({span.lane for span in self.spans})
        for color, kind in enumerate(sorted({span.kind for span in self.spans})):
            for i, span in enumerate(s for s in self.spans if s.kind == kind):
                axes.barh(
                    lanes.index(span.lane), 1e3 * (span.end - span.begin), left=1e3 * span.begin, color=f"C{color}",
                    label=kind if i == 0 else None,
                )  # fmt: skip
        axes.set(xlabel="milliseconds", ylabel="thread", yticks=[], title="Collectives of one step")
        if self.spans:
            axes.legend()
        figure.savefig(path)


# Steps before the measured step; odd, so that an optimizer that accumulates two gradients updates in the measured step.
_WARMUP = 3


def profile_step(model: keras.Model, batch: Any) -> StepProfile:
    """Train four steps on a batch and return the collectives of the last step.

    The steps are real steps: weights, slots and metrics change as in `fit`, and a custom `train_step` gets its
    arguments as in `fit`. The first step compiles; in the second step, TensorFlow instantiates the step's functions
    again. In a launched run, all clients call this function. All get the collectives, times and peak of client 0's
    devices; `seconds` and `variable_bytes` are local to each client.

    Args:
        model: A model compiled under a ShardedStrategy.
        batch: An element of a dataset for `fit`: `x`, or a tuple `(x, y)` or `(x, y, sample_weight)`. Several inputs
            are a list or a dict.

    Returns:
        The `StepProfile`.

    Raises:
        StrategyError: The model is not compiled under a ShardedStrategy; the batch is a tuple of another length, has no
            targets for the compiled loss, or is a dataset.

    Example: one gather and one reduction for the full model.

    >>> import keras, numpy as np, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    >>> model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    >>> profile = tfshard.profile_step(model, (np.ones((8, 8)), np.ones((8, 4))))
    >>> profile.count("all-gather"), profile.count("all-reduce")
    (1, 1)
    """
    strategy = _private.distribute_strategy(model) if isinstance(model, keras.Model) else None
    mesh = getattr(strategy, "mesh", None)
    if mesh is None or not model.compiled:
        raise StrategyError(
            "profile_step takes a model that is compiled under a ShardedStrategy. "
            f"Received: model={model!r} (compiled: {getattr(model, 'compiled', False)}, strategy: {strategy!r})"
        )
    step = _step_of(model, batch)
    for _ in range(_WARMUP):
        step()
    with traced() as trace:
        begin = time.perf_counter()
        step()
        # The loss is ready before the variables are written; reading the variables waits for the writes.
        held = _variable_bytes(model)
        seconds = time.perf_counter() - begin
    local = len(mesh.local_devices())
    events = _from_client_0(trace).events()
    sent, spans = _collectives(events, local)
    return StepProfile(
        mesh=axis_sizes(mesh),
        device_type=mesh.device_type().upper(),
        collectives=sent,
        seconds=seconds,
        variable_bytes=held,
        spans=spans,
        peak=peak_of(events, local),
        timeline=timeline_of(events, frozenset(_KINDS)),
    )


def _step_of(model: keras.Model, batch: Any) -> Callable[[], None]:
    """Return a function that trains one step on a batch.

    `train_on_batch` would give `train_step` three values; `fit` gives it as many values as the batch has.
    """
    parts = batch if isinstance(batch, tuple) else (batch,)
    batches.check("profile_step", model, batch, lists_are_inputs=True)
    if not 1 <= len(parts) <= 3:
        raise StrategyError(
            "profile_step takes a batch that is x, (x, y) or (x, y, sample_weight); several inputs are a list or a "
            f"dict. Received: a tuple of {len(parts)}"
        )
    data = keras.utils.pack_x_y_sample_weight(*parts)
    _private.symbolic_build(model, data)
    model.make_train_function()

    def step() -> None:
        model.reset_metrics()
        model.train_function(iter([data]))

    return step


@dataclasses.dataclass
class ProfileTrace:
    """The trace of some operations.

    Attributes:
        written: The output of TensorFlow's profiler; empty until the operations have ended.
    """

    written: bytes = b""

    def events(self) -> list[_private.TraceEvent]:
        """Return the events, in time order."""
        return _private.read_trace(self.written)


@contextlib.contextmanager
def traced() -> Iterator[ProfileTrace]:
    """Trace the operations in this context; in a launched run only on client 0 (see the note above).

    Raises:
        tf.errors.AlreadyExistsError: Another profiler is running.
    """
    trace = ProfileTrace()
    if clients.here().rank != 0:
        yield trace
        return
    with tempfile.TemporaryDirectory() as directory:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0)
        with tf.profiler.experimental.Profile(directory, options):
            yield trace
        (file,) = pathlib.Path(directory).rglob("*.xplane.pb")
        trace.written = file.read_bytes()


def _from_client_0(trace: ProfileTrace) -> ProfileTrace:
    """Return client 0's trace, on all clients."""
    written = np.zeros(int(collectives.broadcast(len(trace.written))), np.uint8)
    if trace.written:
        written[:] = np.frombuffer(trace.written, np.uint8)
    return ProfileTrace(collectives.broadcast(written).tobytes())


def collective_wall_seconds(trace: list[_private.TraceEvent], devices: int) -> float:
    """Return the seconds in which at least one collective ran on any device, including the wait for other devices.

    The trace must be a trace of `devices` devices.
    """
    _, spans = _collectives(trace, devices)
    seconds, end = 0.0, 0.0
    for span in sorted(spans, key=lambda each: each.begin):
        seconds += max(0.0, span.end - max(span.begin, end))
        end = max(end, span.end)
    return seconds


def _sharded_variables(model: keras.Model) -> list[ShardedVariable]:
    variables = [variable for variable, _ in inventory.owned_variables(model)] + inventory.optimizer_variables(model)
    current = [_private.backend_variable(variable) for variable in variables]
    found = [variable for variable in current if isinstance(variable, ShardedVariable)]
    return [*found, *(kept for variable in found for kept in variable.kept.values())]


def _variable_bytes(model: keras.Model) -> dict[str, int]:
    held: dict[str, int] = collections.defaultdict(int)
    storages = {id(v.storage): v.storage for v in _sharded_variables(model)}.values()
    for storage in (each for each in storages if not each.is_stored_on_host):
        for device, bytes_ in transfer.local_bytes(storage.buffer.value()).items():
            held[device.rpartition("device:")[2]] += bytes_
    return dict(held)


def _collectives(
    trace: list[_private.TraceEvent], devices: int
) -> tuple[tuple[ProfiledCollective, ...], tuple[Span, ...]]:
    """Return the collectives in a trace of `devices` devices."""
    group_sizes = {e.stats["group_key"]: e.stats["group_size"] for e in trace if "group_size" in e.stats}
    runs: dict[tuple[str, str], list[_private.TraceEvent]] = collections.defaultdict(list)
    for event in trace:
        name, _, operation = event.name.rpartition(":")
        if operation in _KINDS and "collective" in event.stats:
            runs[operation, name].append(event)
    sent = _bytes_of_gathers(trace)
    chunks = [e for e in trace if e.name == "MemoryAllocation" and "TempChunk" in e.stats.get("tf_op", "")]
    spans, result = [], []
    first = min((event.begin for events in runs.values() for event in events), default=0)
    for (operation, name), events in runs.items():
        size = group_sizes[events[0].stats["group_key"]]
        total = _bytes_of_ring(chunks, events, size) if operation in _RINGS else sent.get(name)
        count = math.ceil(len(events) / devices)
        result.append(
            ProfiledCollective(
                kind=_KINDS[operation],
                name=name.rpartition("StatefulPartitionedCall/")[2],
                group_size=size,
                count=count,
                bytes=None if not total else total // (devices * count),
                seconds=sum(event.end - event.begin for event in events) / devices,
            )
        )
        spans += [Span(lane=e.lane, kind=_KINDS[operation], begin=e.begin - first, end=e.end - first) for e in events]
    return tuple(sorted(result, key=lambda c: (-(c.bytes or 0), c.name))), tuple(spans)


def _bytes_of_gathers(trace: list[_private.TraceEvent]) -> dict[str, int]:
    """Return the bytes that each operation allocated for its output, over all devices."""
    allocated: dict[str, int] = collections.defaultdict(int)
    for event in trace:
        if event.name == "MemoryAllocation" and event.stats.get("region_type") == "output":
            allocated[event.stats.get("tf_op", "")] += event.stats["requested_bytes"]
    return allocated


def _bytes_of_ring(chunks: list[_private.TraceEvent], events: list[_private.TraceEvent], group_size: int) -> int | None:
    """Return the bytes of a ring reduction's tensors, over all devices.

    Each device allocates a buffer for each chunk of the tensor except its local chunk. A group of g devices therefore
    allocates the tensor g - 1 times (TensorFlow's ring_reducer.cc).
    """
    total = sum(
        chunk.stats["requested_bytes"]
        for run in events
        for chunk in chunks
        if chunk.lane == run.lane and run.begin <= chunk.begin <= run.end
    )
    return total * group_size // (group_size - 1) or None


def assert_matches_plan(profile: StepProfile, plan: "ShardingPlan") -> None:
    """Check that a step sent the planned collectives: the count and the bytes of each kind.

    On CPU, and on GPUs without NCCL, a reduce-scatter is an all-reduce. On meshes of several axes, an all-gather is an
    all-reduce, too, except over the data axis. Reductions of losses and metrics join the reductions of gradients; the
    plan does not count their few bytes (`SCALAR_BYTES` of slack). Bytes that the trace does not tell are bounded
    (`StepProfile.untold_bytes`). Bytes of activations are compared only if the plan was made with `inputs`. DTensor may
    merge independent collectives, so fewer than planned are allowed. If a plan gives an upper bound of the bytes
    (`Collective.at_most`), fewer bytes are allowed.

    Args:
        profile: A result of `tfshard.profile_step`.
        plan: A `ShardingPlan` of the same model, from `strategy.plan`.

    Raises:
        StrategyError: The profile does not tell bytes, because the process uses the system's allocator on CPU.
        PlanMismatchError: The plan and the profile differ; the message shows both.
    """
    if profile.device_type == "CPU" and (allocators.uses_system_allocator() or not _private.has_onednn()):
        raise StrategyError(
            "The profile does not contain bytes: TensorFlow's oneDNN allocator records them, and this process uses "
            "the system's allocator. Before Python starts, set TF_ENABLE_ONEDNN_OPTS=1 and unset "
            f"TF_ONEDNN_USE_SYSTEM_ALLOCATOR. Launch clients with --allocator=tensorflow. Received: {profile}"
        )
    if profile.mesh != plan.mesh:
        raise PlanMismatchError(
            f"The profile and the plan are for different meshes. Plan: {plan.mesh}. Received: {profile.mesh}"
        )
    planned: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    open_ended, merging, gathered = set(), collections.Counter[str](), collections.Counter[str]()
    less = collections.Counter[str]()
    reduction = [] if startup.scatters_what_it_reduces(profile.device_type) else ["reduce-scatter"]
    for collective in plan.collectives:
        by_reduction = reduction + ["all-gather"] * plan.mesh.gathers_by_reduction(collective.axis)
        kind = "all-reduce" if collective.kind in by_reduction else collective.kind
        planned[kind][0] += collective.count
        planned[kind][1] += collective.count * (collective.bytes or 0)
        if collective.bytes is None:
            open_ended.add(kind)
        if collective.at_most:
            less[kind] += collective.count * (collective.bytes or 0)
        if collective.kind == "all-gather" and kind == "all-reduce":
            # All-gathers by reduction merge like all-reduces; small integers are sent as 64 bits.
            gathered[kind] += collective.count * (collective.bytes or 0)
            merging[kind] += collective.count
        elif collective.merges:
            merging[kind] += collective.count
    lines = []
    for kind in sorted({*planned, *(c.kind for c in profile.collectives)}):
        count, bytes_ = planned[kind]
        sent, sent_bytes = profile.count(kind), profile.bytes(kind)
        fits = bytes_ - less[kind] - profile.untold_bytes(kind) <= sent_bytes
        fits = fits and (kind in open_ended or sent_bytes <= bytes_ + gathered[kind] + SCALAR_BYTES)
        counted = count - merging[kind] <= sent <= count
        if not counted or (profile.device_type != "TPU" and not fits):
            lines.append(f"- {kind}: planned {count} of {bytes_:,} bytes. Received: {sent} of {sent_bytes:,} bytes")
    if lines:
        raise PlanMismatchError(
            "The collectives of the step differ from the plan:\n" + "\n".join(lines) + f"\n{profile}"
        )


# The bytes that losses and metrics may add to the all-reduce of the gradients.
SCALAR_BYTES = 4096
