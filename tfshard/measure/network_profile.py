"""profile_network: how long each collective takes, by the size of its message."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import rich.box
import rich.table
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, collectives, tables
from tfshard.devices import clients, mesh, startup, transfer
from tfshard.errors import CollectiveError

SIZES = tuple(1 << power for power in range(10, 25, 2))
_WARMUP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective at one size.

    Attributes:
        kind: `"all_reduce"`, `"all_gather"`, `"reduce_scatter"` or `"broadcast"`.
        bytes: Of the message: the whole tensor, what a gather gives, what a scatter takes.
        seconds: The median of the repeats, of the slowest client.
        devices: How many take part.
    """

    kind: str
    bytes: int
    seconds: float
    devices: int

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
        factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(self.kind, (n - 1) / n)
        return self.bandwidth * factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """The result of `profile_network`; `print` it, or use it as data.

    Attributes:
        devices: How many devices took part.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
        num_clients: How many processes they belong to.
        measurements: By kind and size.
    """

    devices: int
    device_type: str
    num_clients: int
    measurements: tuple[Measurement, ...]

    def latency(self, kind: str) -> float:
        """Seconds of the smallest message of a kind."""
        return min((m for m in self.measurements if m.kind == kind), key=lambda m: m.bytes).seconds

    def to_dict(self) -> dict[str, Any]:
        """The profile as plain data."""
        rows = [
            {**dataclasses.asdict(m), "bandwidth": m.bandwidth, "bus_bandwidth": m.bus_bandwidth}
            for m in self.measurements
        ]
        return {**dataclasses.asdict(self), "measurements": rows}

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

    def __str__(self) -> str:
        return tables.as_text(self.table())

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


def profile_network(sizes: Sequence[int] = SIZES, repeats: int = 10) -> NetworkProfile:
    """Measures each collective between all devices, in a launched run between those of all clients.

    The times include what one eager DTensor operation costs, as a step that consists of it would.

    Args:
        sizes: Bytes of the messages; rounded up to a multiple of 4 bytes for each device.
        repeats: How often each is measured, after two that are not.

    Returns:
        The `NetworkProfile`.

    Raises:
        CollectiveError: A size or a number of repeats that is not a positive integer.

    Example:

    >>> import tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> profile = tfshard.profile_network(sizes=[4096], repeats=2)
    >>> [(m.kind, m.bytes) for m in profile.measurements]
    [('all_reduce', 4096), ('all_gather', 4096), ('reduce_scatter', 4096), ('broadcast', 4096)]
    """
    for number in (*sizes, repeats):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise CollectiveError(
                f"Sizes and repeats must be positive integers. Received: sizes={list(sizes)}, repeats={repeats}"
            )
    started = startup.initialize()
    axes = {collectives.AXIS: started.num_devices}
    over = mesh.create_mesh(**axes)
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
    )


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
