"""Check `axis-bandwidth`: the bandwidth of each collective at five sizes, over all devices and by mesh axis."""

from collections.abc import Sequence

from tfshard import tables
from tfshard.devices import startup
from tfshard.doctor.check_log import CheckLog, CheckRequest
from tfshard.measure import network_profile
from tfshard.planning import links

# Bytes of the messages. Links are measured with at most 4 MiB (`network_profile.LARGEST_OF_LINKS`).
SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20)
_REPEATS = 5
ALL = "All devices, each operation by itself: bus bandwidth in MB/s"
# A collective is slow if its bandwidth is less than the expected bandwidth divided by this number.
SLOW = 3.0


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Measure the collectives. With links in the request, a collective far slower than its link is a fault."""
    expected = links.Links.load(request.expected) if request.expected else None
    sizes = _inner_sizes(started, expected)
    for number, inner in enumerate(sizes):
        profile = network_profile.profile_network(SIZES, _REPEATS, inner)
        if number == 0:
            _log(log, ALL, profile.measurements)
        _log_axes(log, profile, first=number == 0)
        if expected is not None and inner == expected.devices_per_host:
            _compare(log, profile.links, expected)
    if expected is not None and expected.devices_per_host not in sizes:
        log.note(
            f"The expected links are those of hosts of {expected.devices_per_host} devices, which do not divide the "
            f"{started.num_devices} devices of this run: nothing is compared."
        )
    largest = [cell for cell in log.tables[ALL][0].values() if isinstance(cell, float)][-1]
    log.summarize(f"{log.tables[ALL][0]['collective']} over all devices: {largest:,.0f} MB/s")


def _inner_sizes(started: startup.Runtime, expected: links.Links | None) -> list[int]:
    """Return the sizes of the last mesh axis to measure: two devices, a process, a host, or all devices."""
    count = started.num_devices
    sizes = {2, started.local_devices, network_profile.clients_per_host() * started.local_devices}
    if expected is not None:
        sizes.add(expected.devices_per_host)
    return sorted(size for size in sizes if 1 < size < count and count % size == 0) or [count]


def _log_axes(log: CheckLog, profile: network_profile.NetworkProfile, *, first: bool) -> None:
    inner, outer = profile.devices_per_host, profile.devices // profile.devices_per_host
    titles = {
        links.INSIDE: f"In a step, over the last axis of a mesh of {outer} x {inner}: bus bandwidth in MB/s",
        links.BETWEEN: f"In a step, over the first axis of a mesh of {outer} x {inner}: bus bandwidth in MB/s",
        links.ACROSS: f"In a step, over all {profile.devices} devices: bus bandwidth in MB/s",
    }
    for over, title in titles.items():
        # All devices are the same devices on each mesh.
        if over != links.ACROSS or first:
            _log(log, title, [each for each in profile.in_steps if each.over == over])


def _log(log: CheckLog, title: str, measurements: Sequence[network_profile.Measurement]) -> None:
    """Add a row for each kind of collective, with a column for each size."""
    for kind in dict.fromkeys(each.kind for each in measurements):
        rows = [each for each in measurements if each.kind == kind]
        sizes = {tables.size(each.bytes): each.bus_bandwidth / 1e6 for each in rows}
        log.row(title, collective=kind, latency=f"{1e6 * rows[0].seconds:,.0f} us", **sizes)


def _compare(log: CheckLog, measured: links.Links, expected: links.Links) -> None:
    for over in links.GROUPS:
        for kind, link in getattr(measured, over).items():
            usual = getattr(expected, over).get(kind)
            if usual is not None and SLOW * link.bandwidth < usual.bandwidth:
                log.fault(
                    f"Slow link {over} hosts: {kind} has {link.bandwidth / 1e6:,.1f} MB/s, where "
                    f"{usual.bandwidth / 1e6:,.1f} MB/s are expected."
                )
