"""The events of a profiler trace."""

import dataclasses
from typing import Any

from tensorflow.tsl.profiler.protobuf import xplane_pb2 as _xplane_pb2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceEvent:
    """An event of a profiler trace; times in seconds."""

    name: str
    lane: int
    begin: float
    end: float
    stats: dict[str, Any]


def read_trace(written: bytes) -> list[TraceEvent]:
    """Return the events of a profiler file, sorted by time (`tensorflow.tsl.profiler.protobuf.xplane_pb2`)."""
    space = _xplane_pb2.XSpace.FromString(written)
    events = []
    for plane in space.planes:
        names = {key: value.name for key, value in plane.event_metadata.items()}
        stat_names = {key: value.name for key, value in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                stats = {}
                for stat in event.stats:
                    kind = stat.WhichOneof("value")
                    value = stat_names[stat.ref_value] if kind == "ref_value" else getattr(stat, kind)
                    stats[stat_names[stat.metadata_id]] = value
                begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                end = begin + 1e-12 * event.duration_ps
                events.append(
                    TraceEvent(name=names[event.metadata_id], lane=line.id, begin=begin, end=end, stats=stats)
                )
    return sorted(events, key=lambda event: event.begin)
