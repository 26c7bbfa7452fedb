"""profile_network: measures the time of each collective by message size, inside a host and between hosts."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.table
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, collectives, tables
from tfshard.command_line import SIZES
from tfshard.devices import clients, mesh, replicas, startup, transfer
from tfshard.errors import CollectiveError
from tfshard.layouts import gradient_reduction
from tfshard.planning import links
from tfshard.planning.links import Link, Links

_WARMUP = 2
# The number of collectives in one function, as in a step: they share the cost of the call.
_CHAIN = 4
# More bytes only lengthen the measurement.
LARGEST_OF_LINKS = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The time of one collective at one size.

    Attributes:
        kind: `"all_reduce"`, `"all_gather"`, `"reduce_scatter"` or `"broadcast"`; for a link `"all-reduce"`,
            `"all-gather"` or `"all-to-all"`.
        bytes: The size of the message: the full tensor, which is the result of a gather or the input of a scatter.
        seconds: The median of the repeats on the slowest client.
        devices: How many devices take part.
        over: For a link, its group: `"inside"`, `"between"` or `"across"` (`tfshard.planning.Links`).
    """

    kind: str
    bytes: int
    seconds: float
    devices: int
    over: str = ""

    @property
    def bandwidth(self) -> float:
        """Bytes of the message per second."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each device sends in a ring, which does not depend on the number of devices.

        As in NVIDIA's nccl-tests (doc/PERFORMANCE.md).
        """
        n = self.devices
        twice = 2 * (n - 1) / n
        factor = {"all_reduce": twice, "all-reduce": twice, "broadcast": 1.0}.get(self.kind, (n - 1) / n)
        return self.bandwidth * factor


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NetworkProfile:
    """The result of `profile_network`; `print` it, or use it as data.

    Attributes:
        devices: How many devices took part.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
        num_clients: The number of processes.
        measurements: The times of eager operations, by kind and size.
        devices_per_host: The number of devices of a host, for the distinction of links.
        in_steps: The times of operations in a function, as in a step, by kind, devices and size.
        encoding: The times to encode gradients, as in `tfshard.planning.Links`; CPU only.
    """

    devices: int
    device_type: str
    num_clients: int
    measurements: tuple[Measurement, ...]
    devices_per_host: int
    in_steps: tuple[Measurement, ...] = ()
    encoding: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def latency(self, kind: str) -> float:
        """Return the seconds of the smallest message of a kind."""
        return min((m for m in self.measurements if m.kind == kind), key=lambda m: m.bytes).seconds

    @property
    def links(self) -> Links:
        """A latency and a bandwidth for each kind of collective and of link, for `tfshard.advise` and plans."""
        found: dict[str, dict[str, Link]] = {}
        for over in links.GROUPS:
            # Each device of a host is in a different group between hosts, and all these groups run at once.
            at_once = self.devices_per_host if over == links.BETWEEN else 1
            rows = [m for m in self.in_steps if m.over == over]
            found[over] = {kind: _fitted([m for m in rows if m.kind == kind], at_once) for kind in links.KINDS if rows}
        return Links(
            devices_per_host=self.devices_per_host, device_type=self.device_type, encoding=self.encoding, **found
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data."""
        return {
            **dataclasses.asdict(self),
            **{
                name: [
                    {**dataclasses.asdict(m), "bandwidth": m.bandwidth, "bus_bandwidth": m.bus_bandwidth} for m in rows
                ]
                for name, rows in (("measurements", self.measurements), ("in_steps", self.in_steps))
            },
            "links": self.links.to_dict(),
        }

    def table(self) -> rich.table.Table:
        """Return the profile as a rich table."""
        where = f"{self.devices} {self.device_type} devices, {self.num_clients} processes"
        table = rich.table.Table(title=f"Collectives between {where}", box=rich.box.SIMPLE_HEAD)
        table.add_column("collective")
        for column in ("bytes", "latency (us)", "bandwidth (MB/s)", "bus bandwidth (MB/s)"):
            table.add_column(column, justify="right")
        for i, m in enumerate(self.measurements):
            if i and m.kind != self.measurements[i - 1].kind:
                table.add_section()
            table.add_row(
                m.kind, f"{m.bytes:,}", f"{1e6 * m.seconds:,.0f}", f"{m.bandwidth / 1e6:,.1f}",
                f"{m.bus_bandwidth / 1e6:,.1f}",
            )  # fmt: skip
        return table

    def links_table(self) -> rich.table.Table:
        """Return the links as a rich table."""
        hosts = self.devices // self.devices_per_host
        title = f"Links of {hosts} x {self.devices_per_host} {self.device_type} devices, in a step"
        table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD)
        table.add_column("collective")
        table.add_column("among")
        table.add_column("latency (us)", justify="right")
        table.add_column("bandwidth (MB/s)", justify="right")
        table.add_column("of each")
        among = {
            links.INSIDE: ("the devices of a host", "device"),
            links.BETWEEN: ("one device of each host", "host"),
            links.ACROSS: ("all devices", "host"),
        }
        for over, of_kinds in ((over, getattr(self.links, over)) for over in links.GROUPS):
            for kind, link in of_kinds.items():
                numbers = (f"{1e6 * link.latency:,.0f}", f"{link.bandwidth / 1e6:,.1f}")
                table.add_row(kind, among[over][0], *numbers, among[over][1])
        if self.encoding:
            table.add_section()
        for name, seconds in self.encoding.items():
            table.add_row(f"encoded for {name}", "", "", f"{1e-6 / seconds:,.1f}", "device")
        return table

    def __str__(self) -> str:
        return tables.as_text(self.table(), self.links_table())

    __repr__ = __str__

    def plot(self, path: str) -> None:
        """Draw latency and bandwidth over the size. Needs matplotlib (`pip install tfshard[plots]`).

        Args:
            path: The file to save; its ending gives the format.
        """
        import matplotlib.figure

        figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for kind in dict.fromkeys(m.kind for m in self.measurements):
            rows = [m for m in self.measurements if m.kind == kind]
            sizes = [m.bytes for m in rows]
            left.plot(sizes, [1e6 * m.seconds for m in rows], marker="o", label=kind)
            right.plot(sizes, [m.bus_bandwidth / 1e6 for m in rows], marker="o", label=kind)
        left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds", title="Latency")
        right.set(xscale="log", yscale="log", xlabel="bytes", ylabel="MB/s", title="Bus bandwidth")
        left.legend()
        figure.suptitle(f"{self.devices} {self.device_type} devices, {self.num_clients} processes")
        figure.savefig(path)


def profile_network(
    sizes: Sequence[int] = SIZES, repeats: int = 10, devices_per_host: int | None = None
) -> NetworkProfile:
    """Measure each collective between all devices (of all clients in a launched run), and each link.

    The times of collectives include the overhead of an eager DTensor operation. Links are measured in functions of
    several collectives: among the devices of a host (all hosts at once), among one device of each host (as many groups
    at once as a host has devices), and among all devices. `profile.links` holds the results for
    `tfshard.advise(links=)`. On CPU, the profile also measures how long devices take to encode gradients, with all
    devices at once (`tfshard.advise(compression=)`).

    Args:
        sizes: Bytes of the messages; rounded up to a multiple of 4 bytes for each device. Links are measured with at
            most 4 MiB.
        repeats: The number of measurements of each collective, after two warm-up runs.
        devices_per_host: The number of devices that count as a host. By default the devices of the clients that one
            launcher started; in a process that was not launched, all devices.

    Returns:
        The `NetworkProfile`.

    Raises:
        CollectiveError: A size or a number of repeats that is not a positive integer, or a `devices_per_host` that does
            not divide the number of devices.

    Example:

    >>> import tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> profile = tfshard.profile_network(sizes=[4096], repeats=2)
    >>> [(m.kind, m.bytes) for m in profile.measurements]
    [('all_reduce', 4096), ('all_gather', 4096), ('reduce_scatter', 4096), ('broadcast', 4096)]
    >>> profile.devices_per_host, sorted(profile.links.inside)
    (4, ['all-gather', 'all-reduce', 'all-to-all'])
    """
    for number in (*sizes, repeats):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise CollectiveError(
                f"Sizes and repeats must be positive integers. Received: sizes={list(sizes)}, repeats={repeats}"
            )
    started = startup.initialize()
    per_host = _devices_per_host(started, devices_per_host)
    axes = {collectives.AXIS: started.num_devices}
    over = mesh.create_mesh(**axes)
    transfer.meet(over)
    measured = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        for size in sizes:
            words = -(-size // (4 * over.size)) * over.size
            operation = _operation(kind, words, over)
            seconds = _measure(operation, f"{kind} of {4 * words} bytes", repeats)
            measured.append(Measurement(kind=kind, bytes=4 * words, seconds=seconds, devices=over.size))
    return NetworkProfile(
        devices=over.size,
        device_type=started.device_type,
        num_clients=started.num_clients,
        measurements=tuple(measured),
        devices_per_host=per_host,
        in_steps=tuple(_in_steps(sizes, repeats, started.num_devices, per_host)),
        encoding=_encoding(repeats, started.local_devices) if started.device_type == "CPU" else {},
    )


def _encoding(repeats: int, devices: int) -> dict[str, float]:
    """Return the seconds for a byte of a gradient, by the name of the encoding, while all devices encode and decode."""
    found = {}
    for name, reduction in gradient_reduction.measured().items():
        seconds = _measure(reduction.encoder(devices), f"gradients that are encoded for {name}", repeats)
        found[name] = seconds / gradient_reduction.MEASURED_BYTES
    return found


def _devices_per_host(started: startup.Runtime, given: int | None) -> int:
    """Return the number of devices that count as a host, checked."""
    if given is None:
        return clients_per_host() * started.local_devices
    if isinstance(given, bool) or not isinstance(given, int) or given < 1 or started.num_devices % given:
        raise CollectiveError(
            f"devices_per_host must be a positive integer that divides the {started.num_devices} devices. "
            f"Received: devices_per_host={given!r}"
        )
    return given


def clients_per_host() -> int:
    """Return the number of clients that each launcher started, equal on all hosts.

    Raises:
        CollectiveError: Hosts have different numbers of clients.
    """
    numbers = [int(number) for number in collectives.all_gather(np.array([clients.here().local_index]))]
    count = max(numbers) + 1
    if numbers != list(range(count)) * (len(numbers) // count):
        raise CollectiveError(
            "The hosts have different numbers of clients, so tfshard cannot tell which devices share a host: give "
            f"devices_per_host. Received: numbers of the clients on their hosts {numbers}"
        )
    return count


def _in_steps(sizes: Sequence[int], repeats: int, devices: int, per_host: int) -> list[Measurement]:
    """Measure each kind of collective in each kind of group."""
    hosts = devices // per_host
    counts = {
        links.INSIDE: per_host,
        links.BETWEEN: hosts if hosts > 1 else 1,
        links.ACROSS: devices if hosts > 1 else 1,
    }
    over_hosts = mesh.create_mesh(replica=hosts, batch=per_host)
    found = []
    for over, count in counts.items():
        for kind in links.KINDS if count > 1 else ():
            for size in sorted({min(size, LARGEST_OF_LINKS) for size in sizes}):
                words = -(-size // (4 * count)) * count
                chain = replicas.chain(kind, over, words, _CHAIN, over_hosts)
                seconds = _measure(chain, f"{kind} of {4 * words} bytes, {over}", repeats) / _CHAIN
                found.append(Measurement(kind=kind, bytes=4 * words, seconds=seconds, devices=count, over=over))
    return found


def _fitted(rows: Sequence[Measurement], at_once: int) -> Link:
    """Fit a latency and a bandwidth to measured times, by least squares of relative differences.

    The bandwidth comes from the three largest messages: a network lets small messages pass at once that it delays when
    many follow each other. The latency comes from all messages.

    Args:
        rows: The measurements of one kind, by size.
        at_once: How many groups used the link at the same time.
    """
    times = np.array([m.seconds for m in rows])
    sent = np.array([at_once * m.bytes * m.bus_bandwidth / m.bandwidth for m in rows])
    weighted = np.stack([1 / times, sent / times], 1)[-3:]
    (_, inverse), *_ = np.linalg.lstsq(weighted, np.ones(len(weighted)), rcond=None)
    if len(rows) == 1 or inverse <= 0:
        # Too few sizes to separate latency and bandwidth.
        inverse = times[-1] / sent[-1]
    latency = max(0.0, np.sum((1 - inverse * sent / times) / times) / np.sum(1 / times**2))
    return Link(latency=float(latency), bandwidth=float(1 / inverse))


def _operation(kind: str, words: int, over: dtensor.Mesh) -> Callable[[], tf.Tensor]:
    """Return a function that runs the collective on tensors that are already on the devices."""
    local = over.num_local_devices()
    if kind == "all_gather":
        layout = transfer.layout((collectives.AXIS, None), over)
        rows = np.zeros((1, words // over.size), np.int32)
        packed = dtensor.pack([tf.constant(rows)] * local, layout)
        return lambda: collectives.gather_packed(packed, over)
    # A broadcast is a sum of 64-bit integers with zeros.
    like = tf.zeros((-(-words // 2),), tf.int64) if kind == "broadcast" else tf.zeros((words,))
    packed = collectives.pack([like] * local, over)
    return lambda: collectives.reduce_packed(packed, "sum", over, scattered=kind == "reduce_scatter")


def _measure(operation: Callable[[], tf.Tensor], label: str, repeats: int) -> float:
    """Return the seconds of one run: the median of each client, and of these the slowest client's."""
    seconds = []
    with clients.here().operation(label, first=True):
        for _ in range(_WARMUP + repeats):
            _private.wait_for_devices()
            begin = time.perf_counter()
            result = operation()
            _private.wait_for_devices()
            seconds.append(time.perf_counter() - begin)
            del result
    return float(collectives.all_reduce(np.float64(statistics.median(seconds[_WARMUP:])), "max"))
