"""What is in memory at the peak of a step, read from the allocator's part of a trace."""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Sequence

from tfshard import _private, tables


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PeakMemory:
    """Bytes in use at the peak of a step, of all local devices together.

    Attributes:
        bytes: In use at the peak.
        before: In use when the step began: what rests, the batch, and whatever else the process holds.
        made: What the step had made by then and not freed, by what made it: `"all-gather"`, `"reduction"` (the buffers
            of reductions) and the names of operations, numbers left out, the largest first. Without what the allocator
            does not report.
        device_added: What the step adds on one device, at the peak of that one to which it adds most: bytes that were
            asked for. The others above are what the allocator gave for it: up to twice as much for one request.
    """

    bytes: int
    before: int
    made: dict[str, int]
    device_added: int

    @property
    def added(self) -> int:
        """What the step adds to what was there before it."""
        return self.bytes - self.before

    def __str__(self) -> str:
        made = ", ".join(f"{name} {tables.size(number)}" for name, number in self.made.items())
        added = f"{tables.size(self.added)} added to {tables.size(self.before)} on all local devices"
        return f"{added}, {tables.size(self.device_added)} on one of them" + (f": {made}" if made else "")

    __repr__ = __str__


def peak_of(trace: Sequence[_private.TraceEvent], devices: int) -> PeakMemory | None:
    """The peak in a trace of a step; None where the allocator does not report, as without oneDNN on CPU.

    Args:
        trace: All events, in time.
        devices: How many local ones there are.
    """
    events = [each for each in trace if each.name in ("MemoryAllocation", "MemoryDeallocation")]
    if not events:
        return None
    highest = max(events, key=lambda each: each.stats["bytes_allocated"])
    live: dict[int, tuple[str, int]] = {}
    for event in itertools.takewhile(lambda each: each is not highest, events):
        _follow(event, live)
    _follow(highest, live)
    made: dict[str, int] = collections.defaultdict(int)
    for name, bytes_ in live.values():
        made[name] += bytes_
    first = events[0]
    own = first.stats["allocation_bytes"] if first.name == "MemoryAllocation" else -first.stats["allocation_bytes"]
    return PeakMemory(
        bytes=highest.stats["bytes_allocated"],
        before=first.stats["bytes_allocated"] - own,
        made=dict(sorted(made.items(), key=lambda item: -item[1])),
        device_added=_added_on_a_device(trace, events, devices),
    )


def _added_on_a_device(
    trace: Sequence[_private.TraceEvent], events: Sequence[_private.TraceEvent], devices: int
) -> int:
    """The most that a step adds on one device.

    TensorFlow runs an executor for each device; what is allocated while it runs an operation is that device's. The
    buffers of a reduction are allocated in threads of their own, in the order in which the devices started it.
    """
    device_of = _Executors(trace, devices)
    owner: dict[int, tuple[int, int]] = {}
    used: dict[int, int] = collections.defaultdict(int)
    most: dict[int, int] = collections.defaultdict(int)
    for event in events:
        bytes_ = event.stats.get("requested_bytes") or event.stats["allocation_bytes"]
        if event.name == "MemoryAllocation":
            device = device_of(event)
            owner[event.stats["addr"]] = device, bytes_
            used[device] += bytes_
            most[device] = max(most[device], used[device])
        else:
            device, bytes_ = owner.pop(event.stats["addr"], None) or (device_of(event), bytes_)
            used[device] -= bytes_
    return max((most[device] for device in range(devices)), default=0)


class _Executors:
    """Tells on which device, by number, something happened."""

    def __init__(self, trace: Sequence[_private.TraceEvent], devices: int):
        runs = [each for each in trace if each.name == "ExecutorState::Process"]
        # Other executors run a few small functions.
        largest = collections.Counter(each.stats.get("_c") for each in runs).most_common(devices)
        number = {executor: number for number, (executor, _) in enumerate(largest)}
        self._nobody = devices
        # By thread: begin, end and device.
        self._spans: dict[int, list[tuple[float, float, int]]] = collections.defaultdict(list)
        for each in runs:
            if each.stats.get("_c") in number:
                self._spans[each.lane].append((each.begin, each.end, number[each.stats["_c"]]))
        started: dict[str, list[int]] = collections.defaultdict(list)
        for each in trace:
            if each.name == "ExecutorState::ProcessAsync::Start" and each.stats["kernel_type"] == _REDUCTION:
                started[each.stats["name"]].append(self(each))
        for each in trace:
            name, _, kind = each.name.rpartition(":")
            if kind == _REDUCTION and "collective" in each.stats and started[name]:
                self._spans[each.lane].append((each.begin, each.end, started[name].pop(0)))
        for spans in self._spans.values():
            spans.sort()

    def __call__(self, event: _private.TraceEvent) -> int:
        spans = self._spans[event.lane]
        place = bisect.bisect_right(spans, (event.begin, float("inf"), 0)) - 1
        if place >= 0 and event.begin <= spans[place][1]:
            return spans[place][2]
        return self._nobody  # Such as the host's part of a batch.


_REDUCTION = "CollectiveReduceV2"


def _follow(event: _private.TraceEvent, live: dict[int, tuple[str, int]]) -> None:
    if event.name == "MemoryAllocation":
        live[event.stats["addr"]] = _made_by(event.stats.get("tf_op", "")), event.stats["allocation_bytes"]
    else:
        live.pop(event.stats["addr"], None)


def _made_by(operation: str) -> str:
    """What to call an allocation by an operation."""
    if "TempChunk" in operation:
        return "reduction"
    if "AllGather" in operation:
        return "all-gather"
    parts = [part.rstrip("0123456789").rstrip("_") for part in operation.split("/")[-2:]]
    return "/".join(parts) or "unnamed"
