"""The speed of links inside a host and between hosts, and the time of a plan's collectives over them."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from tfshard.errors import StrategyError
from tfshard.layouts import gradient_reduction, option_checks
from tfshard.layouts.axes import MeshAxes
from tfshard.planning.variable_traffic import Collective

ALL_GATHER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "all-reduce", "all-to-all"
KINDS = (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL)
REDUCE_SCATTER = "reduce-scatter"
INSIDE, BETWEEN, ACROSS = "inside", "between", "across"
GROUPS = (INSIDE, BETWEEN, ACROSS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The time of a collective by its bytes: `latency + sent / bandwidth` (Hockney 1994, as in `tfshard.presets`).

    Attributes:
        latency: Seconds of a collective that sends next to nothing.
        bandwidth: Bytes a second: inside a host for each device, between hosts for each host, all its devices together.
        hop: Seconds that each member of a group beyond two adds to the latency: data goes round a ring. 0 if the
            latency was measured in groups of the planned size.
    """

    latency: float
    bandwidth: float
    hop: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0 and self.hop >= 0):
            raise StrategyError(
                "A link needs a latency of 0 s or more, a positive bandwidth in bytes a second and a hop of 0 s or "
                f"more. Received: latency={self.latency!r}, bandwidth={self.bandwidth!r}, hop={self.hop!r}"
            )

    def seconds(self, sent: float, members: int = 2) -> float:
        """Return the time of a collective with some members that sends some bytes over the link."""
        return self.latency + self.hop * max(0, members - 2) + sent / self.bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links of some hosts: measured (`tfshard.profile_network`, `tfshard profile-network --save=FILE`), or given.

    Each attribute maps the kinds of collectives, `"all-gather"`, `"all-reduce"` and `"all-to-all"`, to a link.

    Attributes:
        devices_per_host: The number of devices of a host. The devices of a host follow each other in a mesh.
        inside: Links among the devices of a host.
        between: Links among one device of each host. As many groups as a host has devices use them at once. Empty with
            one host.
        across: Links among all devices, in one ring. Empty with one host.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
        encoding: Seconds in which a device encodes and decodes a byte of a float32 gradient while all devices of its
            host do so, by the name of the encoding: `"bfloat16"`, `"int8"` and `"powersgd"` (of rank 4). Empty if
            unknown.

    Example: hosts of four devices, with a network of 125 MB/s between them.

    >>> from tfshard.planning import Link, Links
    >>> fast, slow = Link(latency=1e-5, bandwidth=1e10), Link(latency=1e-4, bandwidth=1.25e8)
    >>> links = Links.of(devices_per_host=4, inside=fast, between=slow)
    >>> links.between["all-reduce"].seconds(1.25e8)
    1.0001
    """

    devices_per_host: int
    inside: Mapping[str, Link]
    between: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    across: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    device_type: str = "CPU"
    encoding: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *,
        devices_per_host: int,
        inside: Link,
        between: Link | None = None,
        device_type: str = "CPU",
        encoding: Mapping[str, float] | None = None,
    ) -> "Links":
        """Return links that are alike for all kinds of collectives.

        Args:
            devices_per_host: The number of devices of a host.
            inside: The link among the devices of a host. Its bandwidth is per device.
            between: The link between hosts. Its bandwidth is per host. None for one host.
            device_type: `"CPU"`, `"GPU"` or `"TPU"`.
            encoding: As in the attribute; None if unknown.

        Raises:
            StrategyError: The number of devices is not a positive integer.
        """
        option_checks.positive_integer("devices_per_host", devices_per_host)
        to_others = {} if between is None else dict.fromkeys(KINDS, between)
        return cls(
            devices_per_host=devices_per_host,
            inside=dict.fromkeys(KINDS, inside),
            between=to_others,
            across=to_others,
            device_type=device_type,
            encoding=encoding or {},
        )

    @property
    def has_hosts(self) -> bool:
        """True if the links connect several hosts."""
        return bool(self.between)

    def to_dict(self) -> dict[str, Any]:
        """Return the links as plain data."""
        return dataclasses.asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the links to a file, as JSON."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Links":
        """Read a file that `save` wrote.

        Raises:
            StrategyError: The file does not exist, or it holds something else.
        """
        try:
            text = pathlib.Path(path).read_text()
        except OSError as error:
            raise StrategyError(f"Links cannot be read: {error.strerror}. Received: links={os.fspath(path)}") from None
        try:
            values = json.loads(text)
            groups = {
                name: {kind: Link(**values[name][kind]) for kind in (KINDS if name == INSIDE or values[name] else ())}
                for name in GROUPS
            }
            return cls(
                devices_per_host=int(values["devices_per_host"]),
                device_type=str(values["device_type"]),
                # Old files have no encoding times.
                encoding={str(name): float(seconds) for name, seconds in values.get("encoding", {}).items()},
                **groups,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StrategyError(
                "The file does not contain links. Write it with 'tfshard profile-network --save=FILE', or "
                f"Links.save. Received: links={os.fspath(path)} ({type(error).__name__}: {error})"
            ) from None

    @classmethod
    def from_any(cls, links: "LinksLike") -> "Links":
        """Return links, read from their file if a path is given.

        Raises:
            StrategyError: The argument is not links or a path.
        """
        if isinstance(links, Links):
            return links
        if isinstance(links, (str, os.PathLike)):
            return cls.load(links)
        raise StrategyError(
            "links must be tfshard.planning.Links, or the path of a file that 'tfshard profile-network --save=FILE' "
            f"wrote. Received: links={links!r} (of type {type(links)})"
        )

    def check_devices(self, devices: int) -> None:
        """Raise `StrategyError` if the devices do not fill a number of hosts exactly."""
        if devices > self.devices_per_host and devices % self.devices_per_host:
            raise StrategyError(
                f"The links describe hosts of {self.devices_per_host} devices, so the number of devices must be a "
                f"multiple of {self.devices_per_host}. Received: devices={devices}"
            )
        if devices > self.devices_per_host and not self.has_hosts:
            raise StrategyError(
                f"The links describe one host of {self.devices_per_host} devices, and no links between hosts. "
                "Measure the links between hosts (tfshard launch --hosts=... --module tfshard profile-network "
                f"--save=FILE), or give them (tfshard.planning.Links.of). Received: devices={devices}"
            )

    def encode_seconds(self, compression: Any, gradient_bytes: int) -> float:
        """Return the time in which a device encodes and decodes gradients.

        Args:
            compression: As for `tfshard.ShardedStrategy`.
            gradient_bytes: Float32 bytes of the gradients that a device encodes.

        Raises:
            StrategyError: The compression is unknown, or the links have no time for it.
        """
        reduction = gradient_reduction.from_option(compression)
        if reduction is None:
            return 0.0
        name, factor = reduction.encoding
        if name not in self.encoding:
            raise StrategyError(
                f"These links do not say how long devices take to encode gradients for {name!r}. Measure again "
                "(tfshard profile-network --save=FILE), or give the time "
                "(tfshard.planning.Links.of(encoding={...}), from tfshard.measure.encode_seconds_per_byte). "
                f"Received: encoding={dict(self.encoding)}"
            )
        return factor * gradient_bytes * self.encoding[name]

    def seconds(self, collective: Collective, mesh_shape: Mapping[str, int]) -> float | None:
        """Return the time of one collective of a plan by its links alone; None if its bytes are unknown.

        In a ring over n devices, each device sends (n-1)/n of the result of a gather or of the input of an all-to-all.
        In an all-reduce, each device sends twice this share of the input. If a group spans several hosts, its devices
        on one host share the host's link.

        Args:
            collective: The collective. Its `count` is ignored.
            mesh_shape: The mesh of the plan.
        """
        mesh_axes = MeshAxes.of(mesh_shape)
        if collective.bytes is None:
            return None
        kind = _sent_as(collective, mesh_axes, self.device_type)
        members = _members(collective, mesh_axes)
        count = len(members)
        if count == 1:
            return 0.0
        share = (count - 1) / count * collective.bytes
        sent = 2 * share if kind == ALL_REDUCE else share
        kind = ALL_REDUCE if kind == REDUCE_SCATTER else kind
        on_hosts = [member // self.devices_per_host for member in members]
        if len(set(on_hosts)) == 1:
            return self.inside[kind].seconds(sent, count)
        self.check_devices(math.prod(mesh_axes.values()))
        together = max(on_hosts.count(host) for host in on_hosts)
        link = (self.between if together == 1 else self.across)[kind]
        return link.seconds(sent * (self.devices_per_host // together), count)

    def total_seconds(self, collectives: Iterable[Collective], mesh_shape: Mapping[str, int]) -> float | None:
        """Return the time of all collectives of a plan, one after the other; None if bytes are unknown.

        Args:
            collectives: `ShardingPlan.collectives`.
            mesh_shape: The mesh of the plan.
        """
        total = 0.0
        for each in collectives:
            seconds = self.seconds(each, mesh_shape)
            if seconds is None:
                return None
            total += each.count * seconds
        return total


LinksLike: TypeAlias = Links | str | os.PathLike[str]


def _sent_as(collective: Collective, mesh_axes: MeshAxes, device_type: str) -> str:
    """Return the kind of collective that the devices run for a plan's collective. On CPU, a reduce-scatter is an
    all-reduce and a slice. On a mesh of several axes, a gather is an all-reduce of zeros and a shard, unless it is over
    the data axis."""
    if collective.kind == REDUCE_SCATTER and device_type == "CPU":
        return ALL_REDUCE
    if collective.kind == ALL_GATHER and mesh_axes.gathers_by_reduction(collective.axis):
        return ALL_REDUCE
    return collective.kind


def _members(collective: Collective, mesh_axes: MeshAxes) -> list[int]:
    """Return the devices of the first group of a collective, by their numbers in the mesh. A gather over the data axis
    stays in a replica; a reduction over the data axis spans all devices."""
    axes = {collective.axis}
    if collective.axis == mesh_axes.data and collective.kind in (ALL_REDUCE, REDUCE_SCATTER):
        axes |= {mesh_axes.replica or collective.axis}
    if collective.axis == mesh_axes.data and mesh_axes.context is not None:
        axes.add(mesh_axes.context)  # ZeRO shards over the devices of both axes.
    grid = np.arange(math.prod(mesh_axes.values())).reshape(tuple(mesh_axes.given.values()))
    taken = tuple(slice(None) if name in axes else 0 for name in mesh_axes.given)
    return [int(number) for number in np.ravel(grid[taken])]
