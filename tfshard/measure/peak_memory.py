"""What is in memory at the peak of a step, read from the allocator's part of a trace."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from tfshard import _private


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes in use at the peak of a step, of all local devices together.

    Attributes:
        bytes: In use at the peak.
        before: In use when the step began: what rests, the batch, and whatever else the process holds.
        made: What the step had made by then and not freed, by what made it: `"all-gather"`, `"reduction"` (the buffers
            of reductions) and the names of operations, numbers left out, the largest first. Without what the allocator
            does not report.
    """

    bytes: int
    before: int
    made: dict[str, int]

    @property
    def added(self) -> int:
        """What the step adds to what was there before it."""
        return self.bytes - self.before


def peak_of(trace: Sequence[_private.TraceEvent]) -> PeakMemory | None:
    """The peak in a trace of a step; None where the allocator does not report, as without oneDNN on CPU."""
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
    )


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
