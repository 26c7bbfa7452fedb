"""PeakMemory: the memory at the peak of a step, read from the allocator events of a trace."""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Sequence

from tfshard import _private, tables


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PeakMemory:
    """Bytes in use at the peak of a step, on all local devices together.

    Attributes:
        bytes: Bytes in use at the peak.
        before: Bytes in use when the step began: stored variables, the batch, and everything else in the process.
        made: The allocations of the step that are live at the peak, by origin, the largest first: `"all-gather"`,
            `"reduction"` (the buffers of reductions) and the names of operations without numbers. Allocations that the
            allocator does not report are missing.
        device_added: The requested bytes that the step adds on one device, at the peak of the device with the largest
            addition. The other attributes count allocated bytes: up to twice as many for one request.
    """

    bytes: int
    before: int
    made: dict[str, int]
    device_added: int

    @property
    def added(self) -> int:
        """The bytes that the step adds to `before`."""
        return self.bytes - self.before

    def __str__(self) -> str:
        made = ", ".join(f"{name} {tables.size(number)}" for name, number in self.made.items())
        added = f"{tables.size(self.added)} added to {tables.size(self.before)} on all local devices"
        return f"{added}, {tables.size(self.device_added)} on one of them" + (f": {made}" if made else "")

    __repr__ = __str__


def peak_of(trace: Sequence[_private.TraceEvent], devices: int) -> PeakMemory | None:
    """Return the peak in a trace of a step; None if the allocator does not report, as on CPU without oneDNN.

    Args:
        trace: All events, in time order.
        devices: The number of local devices.
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
    first_change = (
        first.stats["allocation_bytes"] if first.name == "MemoryAllocation" else -first.stats["allocation_bytes"]
    )
    return PeakMemory(
        bytes=highest.stats["bytes_allocated"],
        before=first.stats["bytes_allocated"] - first_change,
        made=dict(sorted(made.items(), key=lambda item: -item[1])),
        device_added=_added_on_a_device(trace, events, devices),
    )


def _added_on_a_device(
    trace: Sequence[_private.TraceEvent], events: Sequence[_private.TraceEvent], devices: int
) -> int:
    """Return the largest number of bytes that a step adds on one device.

    TensorFlow runs an executor for each device. An allocation during an operation of an executor belongs to the
    executor's device. The buffers of a reduction are allocated in separate threads, in the order in which the devices
    started the reduction.
    """
    device_of = _EventDevices(trace, devices)
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


class _EventDevices:
    """Finds the device, by number, of an event."""

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
        return self._nobody  # No executor, such as for the host's part of a batch.


_REDUCTION = "CollectiveReduceV2"


def _follow(event: _private.TraceEvent, live: dict[int, tuple[str, int]]) -> None:
    if event.name == "MemoryAllocation":
        live[event.stats["addr"]] = _made_by(event.stats.get("tf_op", "")), event.stats["allocation_bytes"]
    else:
        live.pop(event.stats["addr"], None)


def _made_by(operation: str) -> str:
    """Return the origin of an allocation by an operation."""
    if "TempChunk" in operation:
        return "reduction"
    if "AllGather" in operation:
        return "all-gather"
    parts = [part.rstrip("0123456789").rstrip("_") for part in operation.split("/")[-2:]]
    return "/".join(parts) or "unnamed"
