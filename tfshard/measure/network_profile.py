"""profile_network: how long each collective takes, by the size of its message, inside a host and between hosts."""

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
from tfshard.layouts.compression import CODES, PowerSGD
from tfshard.measure import encoding
from tfshard.planning import links
from tfshard.planning.links import Link, Links

_WARMUP = 2
# Collectives that follow each other in one function, as in a step: what it costs to call it is shared out.
_CHAIN = 4
# With more bytes only the time of the measurement grows.
LARGEST_OF_LINKS = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective at one size.

    Attributes:
        kind: `"all_reduce"`, `"all_gather"`, `"reduce_scatter"` or `"broadcast"`; of a link `"all-reduce"`,
            `"all-gather"` or `"all-to-all"`.
        bytes: Of the message: the whole tensor, what a gather gives, what a scatter takes.
        seconds: The median of the repeats, of the slowest client.
        devices: How many take part.
        over: Of a link, among which: `"inside"`, `"between"` or `"across"` (`tfshard.planning.Links`).
    """

    kind: str
    bytes: int
    seconds: float
    devices: int
    over: str = ""

    @property
    def bandwidth(self) -> float:
        """Bytes of the message a second."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that each device sends in a ring, which does not depend on their number.

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
        num_clients: How many processes they belong to.
        measurements: By kind and size, of eager operations.
        devices_per_host: How many devices a host has, as far as links are told apart.
        in_steps: By kind, devices and size, of operations in a function, as those of a step.
        encoding: Of compressed gradients, as in `tfshard.planning.Links`; CPU only.
    """

    devices: int
    device_type: str
    num_clients: int
    measurements: tuple[Measurement, ...]
    devices_per_host: int
    in_steps: tuple[Measurement, ...] = ()
    encoding: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def latency(self, kind: str) -> float:
        """Seconds of the smallest message of a kind."""
        return min((m for m in self.measurements if m.kind == kind), key=lambda m: m.bytes).seconds

    @property
    def links(self) -> Links:
        """What `tfshard.advise` and plans take: a latency and a bandwidth for each kind of collective and of link."""
        found: dict[str, dict[str, Link]] = {}
        for over in links.GROUPS:
            # A host's devices each have a group between hosts, at once; all devices are one.
            at_once = self.devices_per_host if over == links.BETWEEN else 1
            rows = [m for m in self.in_steps if m.over == over]
            found[over] = {kind: _fitted([m for m in rows if m.kind == kind], at_once) for kind in links.KINDS if rows}
        return Links(
            devices_per_host=self.devices_per_host, device_type=self.device_type, encoding=self.encoding, **found
        )

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain data."""
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
        """The profile as a rich table."""
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
        """The links as a rich table."""
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
        """Draws latency and bandwidth over the size. Needs matplotlib (`pip install tfshard[plots]`).

        Args:
            path: Where to save the picture; its ending gives the format.
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
    """Measures each collective between all devices, in a launched run between those of all clients, and each link.

    The times of the former include what one eager DTensor operation costs, as a step that consists of it would. Links
    are measured in functions of some collectives: among the devices of a host (all hosts at once), among one device of
    each host (as many groups at once as a host has devices), and among all devices. What `profile.links` has of them
    is for `tfshard.advise(links=)`. On CPU it is measured besides how long devices take to compress gradients, all of
    them at once (`tfshard.advise(compression=)`).

    Args:
        sizes: Bytes of the messages; rounded up to a multiple of 4 bytes for each device. Links are measured with those
            of at most 4 MiB.
        repeats: How often each is measured, after two that are not.
        devices_per_host: How many devices are taken for a host. By default those of a launcher's clients; in a process
            that was not launched all.

    Returns:
        The `NetworkProfile`.

    Raises:
        CollectiveError: A size or a number of repeats that is not a positive integer, or hosts that the devices do not
            make up.

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
    """Seconds in which a device encodes and decodes a byte of a gradient, by compression, while all devices do."""
    found = {}
    for name in (*CODES, links.POWER_SGD):
        how = name if name in CODES else PowerSGD(rank=links.MEASURED_RANK)
        seconds = _measure(encoding.encoder(how, devices), f"gradients that are encoded for {name}", repeats)
        found[name] = seconds / encoding.GRADIENT_BYTES
    return found


def _devices_per_host(started: startup.Runtime, given: int | None) -> int:
    """How many devices are taken for a host, checked."""
    if given is None:
        return clients_per_host() * started.local_devices
    if isinstance(given, bool) or not isinstance(given, int) or given < 1 or started.num_devices % given:
        raise CollectiveError(
            f"devices_per_host must be a positive integer that divides the {started.num_devices} devices. "
            f"Received: devices_per_host={given!r}"
        )
    return given


def clients_per_host() -> int:
    """How many clients of the run a launcher started, which is to say, a host has. The same on all clients.

    Raises:
        CollectiveError: Hosts have different numbers of clients.
    """
    numbers = [int(number) for number in collectives.all_gather(np.array([clients.here().local_index]))]
    count = max(numbers) + 1
    if numbers != list(range(count)) * (len(numbers) // count):
        raise CollectiveError(
            "Hosts with different numbers of clients: give devices_per_host, by which devices are to be told apart. "
            f"Received: numbers of the clients on their hosts {numbers}"
        )
    return count


def _in_steps(sizes: Sequence[int], repeats: int, devices: int, per_host: int) -> list[Measurement]:
    """Each kind of collective among each kind of group that there is."""
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
    """The latency and the bandwidth of measured times: least squares of relative differences.

    The bandwidth is that of the three largest messages, since a network lets small ones pass at once that it holds up
    when many follow each other; the latency is of all.

    Args:
        rows: Of one kind, by size.
        at_once: How many groups used the link at the same time.
    """
    times = np.array([m.seconds for m in rows])
    sent = np.array([at_once * m.bytes * m.bus_bandwidth / m.bandwidth for m in rows])
    weighted = np.stack([1 / times, sent / times], 1)[-3:]
    (_, inverse), *_ = np.linalg.lstsq(weighted, np.ones(len(weighted)), rcond=None)
    if len(rows) == 1 or inverse <= 0:
        # Too few sizes to tell them apart.
        inverse = times[-1] / sent[-1]
    latency = max(0.0, np.sum((1 - inverse * sent / times) / times) / np.sum(1 / times**2))
    return Link(latency=float(latency), bandwidth=float(1 / inverse))


def _operation(kind: str, words: int, over: dtensor.Mesh) -> Callable[[], tf.Tensor]:
    """The collective, ready to run on tensors that are on the devices already."""
    local = over.num_local_devices()
    if kind == "all_gather":
        layout = transfer.layout((collectives.AXIS, None), over)
        rows = np.zeros((1, words // over.size), np.int32)
        packed = dtensor.pack([tf.constant(rows)] * local, layout)
        return lambda: collectives.gather_packed(packed, over)
    # A broadcast is a sum of integers of 64 bits with zeros.
    like = tf.zeros((-(-words // 2),), tf.int64) if kind == "broadcast" else tf.zeros((words,))
    packed = collectives.pack([like] * local, over)
    return lambda: collectives.reduce_packed(packed, "sum", over, scattered=kind == "reduce_scatter")


def _measure(operation: Callable[[], tf.Tensor], label: str, repeats: int) -> float:
    """Seconds of one run: the median of this client's, of the slowest client."""
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
