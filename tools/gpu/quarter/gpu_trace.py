"""Read from a profiler trace what a GPU did in a step: kernels, copies, and how much of the copies is hidden.

On CPU devices, the profile of tfshard tells how much of the collectives is hidden.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

Interval = tuple[float, float]


def of_step(model: Any, batch: Any) -> dict[str, Any]:
    """Train steps on a batch, trace the last one, and return its figures."""
    import tfshard
    from tfshard.measure import step_profile

    profile = tfshard.profile_step(model, batch)
    found = {"collectives": profile.count(), "traced_ms": round(1e3 * profile.seconds, 2)}
    if profile.hidden is not None:
        found["collectives_hidden"] = round(profile.hidden, 3)
    if profile.device_type == "GPU":
        with step_profile.traced() as trace:
            model.train_on_batch(*batch)
        found |= of_gpu(trace.written)
    return found


def of_gpu(written: bytes) -> dict[str, Any]:
    """Return the figures of the first GPU with kernels in a trace."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for plane in xplane_pb2.XSpace.FromString(written).planes:
        lines = [each for each in plane.lines if each.name.startswith("Stream")]
        if not plane.name.startswith("/device:GPU") or not lines:
            continue
        events = {
            line.name: [
                (
                    plane.event_metadata[event.metadata_id].name,
                    1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps,
                    1e-12 * event.duration_ps,
                )
                for event in line.events
            ]
            for line in lines
        }
        return figures(events)
    return {"trace": "no kernels in the trace"}


def figures(streams: dict[str, list[tuple[str, float, float]]]) -> dict[str, Any]:
    """Return the figures of a GPU's streams: lists of (name, begin, seconds)."""
    kernels, copies, kinds = [], [], collections.Counter[str]()
    for name, begin, seconds in (event for events in streams.values() for event in events):
        is_copy = name.lower().startswith(("memcpy", "memset"))
        (copies if is_copy else kernels).append((begin, begin + seconds))
        kinds[name.split()[0] if is_copy else "kernel"] += 1
    if not kernels:
        return {"trace": "no kernels in the trace"}
    computing, copying = union(kernels), union(copies)
    begin, end = computing[0][0], computing[-1][1]
    return {
        "gpu_events": dict(kinds),
        "streams": {name: len(events) for name, events in streams.items() if events},
        "kernel_us": round(1e6 * sum(b - a for a, b in kernels) / len(kernels), 1),
        "computing_ms": round(1e3 * length(computing), 2),
        "copying_ms": round(1e3 * length(copying), 2),
        "copies_hidden": round(common_length(computing, copying) / length(copying), 3) if copying else None,
        "idle_ms": round(1e3 * (end - begin - length(computing)), 2),
    }


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals in order.

    >>> union([(2, 3), (0, 1), (0.5, 1.5)])
    [(0, 1.5), (2, 3)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def common_length(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the length of the intersection of two unions.

    >>> common_length([(0, 2), (4, 6)], [(1, 5)])
    2
    """
    found, i, j = 0, 0, 0
    while i < len(first) and j < len(second):
        found += max(0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found
