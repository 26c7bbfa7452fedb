"""Timeline: operations and collectives of a step in time, by device, and how much of the collectives is hidden."""

import bisect
import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from tfshard import _private

Interval = tuple[float, float]

# TensorFlow's executor runs operations on any thread (core/common_runtime/executor.cc).
_EXECUTOR = "ExecutorState::Process"
_FUNCTION = "FunctionRun"
# The start of a collective operation in an executor, and its two handovers to other threads.
_STARTED = "CollectiveOpV2Kernel::Run"
_RESOLVED = "CollectiveExecutor::CompleteParamsAsync::Done"
_HANDED_ON = "BaseCollectiveExecutor::ExecuteAsync"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedWork:
    """An operation or a collective of one device; times in seconds from the first work of the step.

    Attributes:
        name: TensorFlow's name of the operation.
        kind: The type of the operation.
        lane: The thread of the operation.
        begin: The begin. A collective begins when its device is ready to send.
        end: The end.
        met: For a collective, when the last device of this process joined; for an operation, its begin.
    """

    name: str
    kind: str
    lane: int
    begin: float
    end: float
    met: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTimeline:
    """The work of one device.

    Attributes:
        operations: The computing operations.
        collectives: The collectives.
    """

    operations: tuple[TimedWork, ...]
    collectives: tuple[TimedWork, ...]

    @property
    def computing(self) -> list[Interval]:
        """The intervals in which at least one operation ran."""
        return _union((each.begin, each.end) for each in self.operations)

    @property
    def communicating(self) -> list[Interval]:
        """The intervals in which at least one collective was in progress, including the wait for other devices."""
        return _union((each.begin, each.end) for each in self.collectives)

    @property
    def waiting(self) -> list[Interval]:
        """The intervals in which collectives were in progress, none of them joined yet by all local devices."""
        met = _union((each.met, each.end) for each in self.collectives)
        return _without(self.communicating, met)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """The work of each device of this process in a step.

    Attributes:
        devices: The devices, in the order of their first work.
    """

    devices: tuple[DeviceTimeline, ...]

    @property
    def hidden(self) -> float | None:
        """The share of collective time in which the same device also computes, over all devices.

        A device's collective time is the time in which at least one collective is in progress. A collective is in
        progress from when the device is ready to send until it has the result, including the wait for other devices. A
        device's compute time is the time in which at least one other operation runs. None for a step without
        collectives.
        """
        sending = sum(_length(each.communicating) for each in self.devices)
        both = sum(_length(_common(each.communicating, each.computing)) for each in self.devices)
        return both / sending if sending else None

    @property
    def collective_seconds(self) -> float:
        """A device's time in collectives: the mean of the devices."""
        return self._mean(each.communicating for each in self.devices)

    @property
    def waiting_seconds(self) -> float:
        """The part of `collective_seconds` in which a device computes nothing and waits for a local device.

        Waiting for devices of other processes looks like sending.
        """
        return self._mean(_without(each.waiting, each.computing) for each in self.devices)

    @property
    def computing_seconds(self) -> float:
        """A device's compute time: the mean of the devices."""
        return self._mean(each.computing for each in self.devices)

    @property
    def seconds(self) -> float:
        """The time from the first operation or collective to the end of the last."""
        ends = [work.end for each in self.devices for work in (*each.operations, *each.collectives)]
        return max(ends, default=0.0)

    def _mean(self, intervals: Iterable[list[Interval]]) -> float:
        return sum(map(_length, intervals)) / max(1, len(self.devices))

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        names = ("hidden", "collective_seconds", "waiting_seconds", "computing_seconds", "seconds")
        return {name: getattr(self, name) for name in names}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a Chrome trace for https://ui.perfetto.dev and chrome://tracing.

        The trace shows each device as a process, with a row for each thread that computed, and rows of collectives.
        """
        events: list[dict[str, Any]] = []
        for number, device in enumerate(self.devices):
            lanes = {lane: row for row, lane in enumerate(dict.fromkeys(each.lane for each in device.operations))}
            rows = [(lanes[each.lane], each) for each in device.operations]
            rows += [(len(lanes) + row, each) for row, each in _rows(device.collectives)]
            names = {row: "operations" if row < len(lanes) else "collectives" for row, _ in rows}
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"device {number}"}})
            events += [
                {"ph": "M", "name": "thread_name", "pid": number, "tid": row, "args": {"name": name}}
                for row, name in sorted(names.items())
            ]
            events += [
                {
                    "ph": "X", "pid": number, "tid": row, "name": each.kind, "cat": names[row],
                    "ts": 1e6 * each.begin, "dur": 1e6 * (each.end - each.begin), "args": {"operation": each.name},
                }
                for row, each in rows
            ]  # fmt: skip
        pathlib.Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def timeline_of(trace: Sequence[_private.TraceEvent], collectives: frozenset[str]) -> Timeline | None:
    """Return the timeline of a step that ran as a function; None if the trace does not tell devices apart (GPU, TPU).

    Args:
        trace: The events.
        collectives: The types of collective operations.
    """
    executors = _Executors(trace)
    computed: dict[int, list[TimedWork]] = collections.defaultdict(list)
    sent: dict[int, list[TimedWork]] = collections.defaultdict(list)
    started = {each.stats["_p"]: executors.of(each) for each in trace if each.name == _STARTED}
    resolved = _Nested(each for each in trace if each.name == _RESOLVED)
    handed_on = {}
    for each in trace:
        if each.name == _HANDED_ON and (outer := resolved.around(each)) is not None:
            handed_on[each.stats["_p"]] = started.get(outer.stats["_c"])
    met: dict[Any, float] = {}
    for each in trace:
        if each.name.rpartition(":")[2] in collectives and "collective" in each.stats:
            key = each.stats["group_key"], each.stats["instance_key"]
            met[key] = max(met.get(key, each.begin), each.begin)
    for each in trace:
        name, _, operation = each.name.rpartition(":")
        if operation in collectives and "collective" in each.stats:
            device = handed_on.get(each.stats.get("_c"))
            key = each.stats["group_key"], each.stats["instance_key"]
            work = TimedWork(
                name=name, kind=operation, lane=each.lane, begin=each.begin, end=each.end, met=min(met[key], each.end)
            )
            if device is not None:
                sent[device].append(work)
        elif is_operation(each) and (device := executors.of(each)) is not None:
            computed[device].append(
                TimedWork(name=name, kind=operation, lane=each.lane, begin=each.begin, end=each.end, met=each.begin)
            )
    devices = [device for device in computed if device in sent] if sent else list(computed)
    if not devices:
        return None
    first = min(work.begin for device in devices for work in (*computed[device], *sent[device]))
    return Timeline(
        devices=tuple(
            DeviceTimeline(
                operations=tuple(_since(first, each) for each in computed[device]),
                collectives=tuple(_since(first, each) for each in sent[device]),
            )
            for device in devices
        )
    )


def is_operation(event: _private.TraceEvent) -> bool:
    """Return True if an event is the run of a kernel, with a name like `name:type`. Collectives have other events."""
    return ":" in event.name and "::" not in event.name and not event.stats


def _since(first: float, work: TimedWork) -> TimedWork:
    return dataclasses.replace(work, begin=work.begin - first, end=work.end - first, met=work.met - first)


class _Nested:
    """Finds enclosing events among events of one kind, which on each thread are disjoint or nested."""

    def __init__(self, events: Iterable[_private.TraceEvent]):
        self._of_lane: dict[int, list[_private.TraceEvent]] = collections.defaultdict(list)
        for each in sorted(events, key=lambda each: (each.begin, -each.end)):
            self._of_lane[each.lane].append(each)

    def around(self, event: _private.TraceEvent) -> _private.TraceEvent | None:
        """Return the innermost event of the same thread that encloses `event`."""
        found = self._of_lane.get(event.lane, [])
        number = bisect.bisect_right(found, event.begin, key=lambda each: each.begin) - 1
        while number >= 0:
            if found[number].end >= event.end and found[number] is not event:
                return found[number]
            number -= 1
        return None


class _Executors:
    """Finds the executor of each event: each device has an executor, and so has each function that the device calls."""

    def __init__(self, trace: Sequence[_private.TraceEvent]):
        self._processes = _Nested(each for each in trace if each.name == _EXECUTOR)
        # The executor of a function to the executor that called the function.
        self._callers: dict[int, int] = {}
        for each in trace:
            if each.name == _FUNCTION and (outer := self._processes.around(each)) is not None:
                self._callers[each.stats["_p"]] = outer.stats["_c"]

    def of(self, event: _private.TraceEvent) -> int | None:
        """Return the outermost executor of an event."""
        outer = self._processes.around(event)
        if outer is None:
            return None
        executor: int = outer.stats["_c"]
        while executor in self._callers:
            executor = self._callers[executor]
        return executor


# --- intervals ---------------------------------------------------------------------------------------


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted, disjoint intervals."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(ours: Sequence[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two results of `_union`."""
    found, number = [], 0
    for begin, end in ours:
        while number < len(theirs) and theirs[number][1] <= begin:
            number += 1
        at = number
        while at < len(theirs) and theirs[at][0] < end:
            found.append((max(begin, theirs[at][0]), min(end, theirs[at][1])))
            at += 1
    return found


def _without(ours: Sequence[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """Return the first result of `_union` without the second."""
    found = []
    for begin, end in ours:
        for other, until in _common([(begin, end)], theirs):
            if other > begin:
                found.append((begin, other))
            begin = until
        if end > begin:
            found.append((begin, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _rows(works: Iterable[TimedWork]) -> list[tuple[int, TimedWork]]:
    """Assign each work to the first row without an overlap."""
    ends: list[float] = []
    found = []
    for each in sorted(works, key=lambda each: each.begin):
        row = next((number for number, end in enumerate(ends) if end <= each.begin), len(ends))
        ends[row : row + 1] = [each.end]
        found.append((row, each))
    return found
