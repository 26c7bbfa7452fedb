"""Check `device-pairs`: the bandwidth of messages between pairs of devices. A slow link stands out.

Between two GPUs of a process, the check measures a copy from one to the other: a message would have the
process's host memory, which is one device, at both ends.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from tfshard import _private, collectives
from tfshard.devices import clients, mesh, messages, startup
from tfshard.doctor import environment
from tfshard.doctor.check_log import CheckLog, CheckRequest
from tfshard.measure import network_profile

# A link is slow if its bandwidth is less than the upper quartile of the links of the same kind, divided by this number.
SLOW = 3.0
# Up to this many devices, every pair is measured. With more, rings of neighbours are.
_ALL_PAIRS = 16
_BYTES = 1 << 20
_REPEATS = 7
# Kinds of links, from near to far.
_KINDS = ("within a process", "between processes of a host", "between hosts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairBandwidth:
    """The measured bandwidth between two devices.

    Attributes:
        first: The number of a device in the run.
        second: The number of the other device.
        kind: `"within a process"`, `"between processes of a host"` or `"between hosts"`.
        bandwidth: Bytes per second, there and back.
    """

    first: int
    second: int
    kind: str
    bandwidth: float


def pairs_of(devices: int, strides: Iterable[int]) -> list[tuple[int, int]]:
    """Return the pairs to measure: all, or the neighbours in rings if there are many devices.

    Args:
        devices: The number of devices.
        strides: The distances of neighbours in the rings.

    >>> pairs_of(3, (1,))
    [(0, 1), (0, 2), (1, 2)]
    >>> len(pairs_of(64, (1, 8)))
    128
    """
    if devices <= _ALL_PAIRS:
        return list(itertools.combinations(range(devices), 2))
    rings = (tuple(sorted((each, (each + stride) % devices))) for stride in strides for each in range(devices))
    return sorted({(first, second) for first, second in rings if first != second})


def slow_pairs(measured: Sequence[PairBandwidth]) -> dict[PairBandwidth, float]:
    """Return the slow pairs, each with the upper quartile of the bandwidths of its kind.

    >>> def pair(first, second, bandwidth):
    ...     return PairBandwidth(first=first, second=second, kind="between hosts", bandwidth=bandwidth)
    >>> [(each.first, each.second) for each in slow_pairs([pair(0, 1, 9.0), pair(0, 2, 1.0), pair(1, 2, 8.0)])]
    [(0, 2)]
    """
    usual = {
        kind: float(np.quantile([each.bandwidth for each in measured if each.kind == kind], 0.75))
        for kind in {each.kind for each in measured}
    }
    return {each: usual[each.kind] for each in measured if SLOW * each.bandwidth < usual[each.kind]}


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Measure each pair. A link far slower than others of its kind is a fault."""
    del request
    per_host = network_profile.clients_per_host() * started.local_devices
    pairs = pairs_of(started.num_devices, (1, started.local_devices, per_host))
    seconds = _measure(pairs, started)
    measured = _bandwidths(pairs, seconds, started.local_devices, per_host)
    doubtful = [(each.first, each.second) for each in slow_pairs(measured)]
    if doubtful:
        # Something else may have used the link. The better time counts.
        seconds.update({pair: min(seconds[pair], again) for pair, again in _measure(doubtful, started).items()})
        measured = _bandwidths(pairs, seconds, started.local_devices, per_host)
    for each in measured:
        log.row("Pairs", devices=f"{each.first}-{each.second}", link=each.kind, **{"MB/s": each.bandwidth / 1e6})
    slow = slow_pairs(measured)
    for each, usual in slow.items():
        log.fault(
            f"Slow link {each.kind} between {environment.device_text((each.first, each.second), started)}: "
            f"{each.bandwidth / 1e6:,.1f} MB/s, where a quarter of such links have more than {usual / 1e6:,.1f} MB/s."
        )
    for text in _in_common(slow, measured, started):
        log.note(text)
    log.summarize(", ".join(f"{_median(measured, kind):,.0f} MB/s {kind}" for kind in _KINDS if _has(measured, kind)))


def _has(measured: Sequence[PairBandwidth], kind: str) -> bool:
    return any(each.kind == kind for each in measured)


def _median(measured: Sequence[PairBandwidth], kind: str) -> float:
    return float(np.median([each.bandwidth for each in measured if each.kind == kind])) / 1e6


def _in_common(slow: Iterable[PairBandwidth], measured: Sequence[PairBandwidth], started: startup.Runtime) -> list[str]:
    """Say which devices have only slow links of a kind."""
    of_device: dict[tuple[int, str], list[bool]] = collections.defaultdict(list)
    chosen = set(slow)
    for each in measured:
        for device in (each.first, each.second):
            of_device[device, each.kind].append(each in chosen)
    return [
        f"All links {kind} of {environment.device_text((device,), started)} are slow."
        for (device, kind), found in sorted(of_device.items())
        if len(found) > 1 and all(found)
    ]


def _bandwidths(
    pairs: Sequence[tuple[int, int]], seconds: dict[tuple[int, int], float], per_client: int, per_host: int
) -> list[PairBandwidth]:
    found = []
    for first, second in pairs:
        distance = (first // per_client != second // per_client) + (first // per_host != second // per_host)
        bandwidth = 2 * _BYTES / seconds[first, second]
        found.append(PairBandwidth(first=first, second=second, kind=_KINDS[distance], bandwidth=bandwidth))
    return found


def _measure(pairs: Sequence[tuple[int, int]], started: startup.Runtime) -> dict[tuple[int, int], float]:
    """Return the seconds of a message there and back, for each pair. All clients call this and get equal results."""
    per_client, here = started.local_devices, clients.here()
    names = messages.devices_of(mesh.create_mesh(**{collectives.AXIS: started.num_devices}))
    found = np.zeros(len(pairs))
    for number, (first, second) in enumerate(pairs):
        # Measure one pair at a time, so that nothing else uses the links.
        here.barrier(f"messages between devices {first} and {second}")
        ends = (first // per_client == here.rank, second // per_client == here.rank)
        if any(ends):
            found[number] = _round_trip(names[first], names[second], ends)
    # A client outside of a pair has zero.
    seconds = collectives.all_reduce(found, "max")
    return {pair: float(each) for pair, each in zip(pairs, seconds, strict=True)}


def _round_trip(first: str, second: str, ends: tuple[bool, bool]) -> float:
    """Send a message from a device to another and back, or copy. Returns the seconds of the fastest of some runs.

    Args:
        first: The name of the first device.
        second: The name of the second device.
        ends: True for each of the two devices that belongs to this client.
    """
    shape, seconds = (_BYTES // 4,), []
    with tf.device(first if ends[0] else second):
        value = tf.zeros(shape)
    is_copied = all(ends) and _is_gpu(first) and _is_gpu(second)
    for _ in range(_REPEATS + 1):
        _private.wait_for_devices()
        begin = time.perf_counter()
        if is_copied:
            _copy_there_and_back(value, first, second)
        else:
            _send_there_and_back(value, first, second, ends)
        _private.wait_for_devices()
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def _is_gpu(device: str) -> bool:
    return bool(tf.DeviceSpec.from_string(device).device_type == "GPU")


def _send_there_and_back(value: tf.Tensor, first: str, second: str, ends: tuple[bool, bool]) -> None:
    if ends[0]:
        messages.send(value, first, second)
    if ends[1]:
        messages.send(messages.received(value.shape, value.dtype, first, second), second, first)
    if ends[0]:
        _wait_for(messages.received(value.shape, value.dtype, second, first))
    messages.wait_until_sent()


def _copy_there_and_back(value: tf.Tensor, first: str, second: str) -> tf.Tensor:
    """Copy a tensor of the first device to the second and back. Returns when the last copy has arrived."""
    for device in (second, first):
        with tf.device(device):
            value = tf.identity(value)
    _wait_for(value)
    return value


def _wait_for(value: tf.Tensor) -> None:
    """Wait until a tensor is on its device. Copies to GPUs run behind Python: the host reads one element."""
    value[-1].numpy()
