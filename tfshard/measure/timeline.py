"""Operations and collectives of a step in time, by device; how much of the collectives is hidden behind operations."""

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

# Of TensorFlow's executor: operations run in it, on whichever thread (core/common_runtime/executor.cc).
_EXECUTOR = "ExecutorState::Process"
_FUNCTION = "FunctionRun"
# Where a collective operation begins, in an executor; and where another thread goes on with it, twice handed on.
_STARTED = "CollectiveOpV2Kernel::Run"
_RESOLVED = "CollectiveExecutor::CompleteParamsAsync::Done"
_HANDED_ON = "BaseCollectiveExecutor::ExecuteAsync"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """An operation or a collective of one device; times in seconds from the first one of the step.

    Attributes:
        name: TensorFlow's name of the operation.
        kind: The type of the operation.
        lane: The thread that it ran on.
        begin: When it began. A collective begins when its device is ready to send.
        end: When it ended.
        met: Of a collective, when the last device of this process had come to it; of an operation its begin.
    """

    name: str
    kind: str
    lane: int
    begin: float
    end: float
    met: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTimeline:
    """What one device did.

    Attributes:
        operations: Those that compute, by their begin.
        collectives: Likewise.
    """

    operations: tuple[Work, ...]
    collectives: tuple[Work, ...]

    @property
    def computing(self) -> list[Interval]:
        """When at least one operation ran."""
        return _union((each.begin, each.end) for each in self.operations)

    @property
    def communicating(self) -> list[Interval]:
        """When at least one collective was under way, waiting for other devices included."""
        return _union((each.begin, each.end) for each in self.collectives)

    @property
    def waiting(self) -> list[Interval]:
        """When collectives were under way, and none of them had all devices of this process."""
        met = _union((each.met, each.end) for each in self.collectives)
        return _without(self.communicating, met)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """What each device of this process did in a step.

    Attributes:
        devices: In the order in which they began.
    """

    devices: tuple[DeviceTimeline, ...]

    @property
    def hidden(self) -> float | None:
        """The share of the time in collectives in which the same device also computes, over all devices.

        A device's time in collectives is that in which at least one is under way, from when the device is ready to send
        to when it has its result, waiting for other devices included; its time of computing that in which at least one
        other operation runs. None of a step without collectives.
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
        """Of it, the time in which a device waits for another one of this process, and computes nothing. Waiting for
        devices of other processes cannot be told from sending."""
        return self._mean(_without(each.waiting, each.computing) for each in self.devices)

    @property
    def computing_seconds(self) -> float:
        """A device's time of computing: the mean of the devices."""
        return self._mean(each.computing for each in self.devices)

    @property
    def seconds(self) -> float:
        """From the first operation to the end of the last."""
        ends = [work.end for each in self.devices for work in (*each.operations, *each.collectives)]
        return max(ends, default=0.0)

    def _mean(self, intervals: Iterable[list[Interval]]) -> float:
        return sum(map(_length, intervals)) / max(1, len(self.devices))

    def to_dict(self) -> dict[str, Any]:
        """The numbers, as plain data."""
        names = ("hidden", "collective_seconds", "waiting_seconds", "computing_seconds", "seconds")
        return {name: getattr(self, name) for name in names}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing show.

        Each device is a process there, with a row for each thread that computed, and rows of collectives.
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
    """The timeline of a step that ran as a function; None where the trace does not tell devices apart (GPU, TPU).

    Args:
        trace: Its events.
        collectives: The types of collective operations.
    """
    executors = _Executors(trace)
    computed: dict[int, list[Work]] = collections.defaultdict(list)
    sent: dict[int, list[Work]] = collections.defaultdict(list)
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
            work = Work(
                name=name, kind=operation, lane=each.lane, begin=each.begin, end=each.end, met=min(met[key], each.end)
            )
            if device is not None:
                sent[device].append(work)
        elif is_operation(each) and (device := executors.of(each)) is not None:
            computed[device].append(
                Work(name=name, kind=operation, lane=each.lane, begin=each.begin, end=each.end, met=each.begin)
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
    """Whether an event is a kernel's time, its name `name:type`; collectives are other events besides."""
    return ":" in event.name and "::" not in event.name and not event.stats


def _since(first: float, work: Work) -> Work:
    return dataclasses.replace(work, begin=work.begin - first, end=work.end - first, met=work.met - first)


class _Nested:
    """Events of one kind, of which those of a thread do not overlap but in each other; asked what they are around."""

    def __init__(self, events: Iterable[_private.TraceEvent]):
        self._of_lane: dict[int, list[_private.TraceEvent]] = collections.defaultdict(list)
        for each in sorted(events, key=lambda each: (each.begin, -each.end)):
            self._of_lane[each.lane].append(each)

    def around(self, event: _private.TraceEvent) -> _private.TraceEvent | None:
        """The innermost of them that an event of the same thread is in."""
        found = self._of_lane.get(event.lane, [])
        number = bisect.bisect_right(found, event.begin, key=lambda each: each.begin) - 1
        while number >= 0:
            if found[number].end >= event.end and found[number] is not event:
                return found[number]
            number -= 1
        return None


class _Executors:
    """By which executor each event was: there is one for each device, and one for each function that it calls."""

    def __init__(self, trace: Sequence[_private.TraceEvent]):
        self._processes = _Nested(each for each in trace if each.name == _EXECUTOR)
        # The executor that called a function, by the function's.
        self._callers: dict[int, int] = {}
        for each in trace:
            if each.name == _FUNCTION and (outer := self._processes.around(each)) is not None:
                self._callers[each.stats["_p"]] = outer.stats["_c"]

    def of(self, event: _private.TraceEvent) -> int | None:
        """The outermost executor that an event is in."""
        outer = self._processes.around(event)
        if outer is None:
            return None
        executor: int = outer.stats["_c"]
        while executor in self._callers:
            executor = self._callers[executor]
        return executor


# --- intervals ---------------------------------------------------------------------------------------


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, as intervals that follow each other."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _common(ours: Sequence[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """The time that is in both, each as `_union` gives it."""
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
    """The time that is in the first and not in the second, each as `_union` gives it."""
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


def _rows(works: Iterable[Work]) -> list[tuple[int, Work]]:
    """Each in the first row in which it overlaps with none."""
    ends: list[float] = []
    found = []
    for each in sorted(works, key=lambda each: each.begin):
        row = next((number for number, end in enumerate(ends) if end <= each.begin), len(ends))
        ends[row : row + 1] = [each.end]
        found.append((row, each))
    return found
