"""How fast devices reach each other, inside a host and between hosts, and what a plan's collectives take over that."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from tfshard.errors import StrategyError
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.compression import PowerSGD
from tfshard.planning.variable_traffic import Collective

ALL_GATHER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "all-reduce", "all-to-all"
KINDS = (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL)
REDUCE_SCATTER = "reduce-scatter"
INSIDE, BETWEEN, ACROSS = "inside", "between", "across"
GROUPS = (INSIDE, BETWEEN, ACROSS)
# The name of PowerSGD among what was measured of compressions, and with which rank it was.
POWER_SGD, MEASURED_RANK = "powersgd", 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What a collective takes by its bytes: `latency + sent / bandwidth` (Hockney 1994, as in `tfshard.presets`).

    Attributes:
        latency: Seconds of one that sends next to nothing.
        bandwidth: Bytes a second: inside a host of each device, between hosts of each host, all its devices together.
        hop: Seconds that each member of a group beyond two adds to the latency: what is sent goes round a ring. 0 where
            the latency was measured in groups of the size that is planned for.
    """

    latency: float
    bandwidth: float
    hop: float = 0.0

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0 and self.hop >= 0):
            raise StrategyError(
                "A link has a latency of 0 s or more, a positive bandwidth in bytes a second, a hop of 0 s or more. "
                f"Received: latency={self.latency!r}, bandwidth={self.bandwidth!r}, hop={self.hop!r}"
            )

    def seconds(self, sent: float, members: int = 2) -> float:
        """Of a collective of so many members that sends so many bytes over it."""
        return self.latency + self.hop * max(0, members - 2) + sent / self.bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links of some hosts: measured (`tfshard.profile_network`, `tfshard profile-network --save=FILE`), or given.

    Each has the kinds of collectives, `"all-gather"`, `"all-reduce"` and `"all-to-all"`, and a link for each.

    Attributes:
        devices_per_host: How many devices a host has; those of a host follow each other in a mesh.
        inside: Among the devices of a host.
        between: Among one device of each host, of as many groups at once as a host has devices. Empty where there is
            one host.
        across: Among all devices, in one ring; likewise.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
        encoding: Seconds in which a device encodes and decodes a byte of a float32 gradient, while all devices of its
            host do, by compression: `"bfloat16"`, `"int8"` and `"powersgd"`, which is one of rank 4. Empty where that
            is not known.

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
        """Links that are alike for all kinds of collectives.

        Args:
            devices_per_host: How many devices a host has.
            inside: Among those of a host; its bandwidth is a device's.
            between: Between hosts; its bandwidth is a host's. None for one host.
            device_type: `"CPU"`, `"GPU"` or `"TPU"`.
            encoding: As in the attribute; None where that is not known.

        Raises:
            StrategyError: A number of devices that is not a positive integer.
        """
        if isinstance(devices_per_host, bool) or not isinstance(devices_per_host, int) or devices_per_host < 1:
            raise StrategyError(
                f"devices_per_host must be a positive integer. Received: devices_per_host={devices_per_host!r}"
            )
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
        """Whether there are several hosts."""
        return bool(self.between)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes them to a file, as JSON."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Links":
        """Reads what `save` wrote.

        Raises:
            StrategyError: There is no such file, or it holds something else.
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
                # Files of before there was compression have none.
                encoding={str(name): float(seconds) for name, seconds in values.get("encoding", {}).items()},
                **groups,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StrategyError(
                "This file does not hold links: write it with 'tfshard profile-network --save=FILE', or Links.save. "
                f"Received: links={os.fspath(path)} ({type(error).__name__}: {error})"
            ) from None

    @classmethod
    def from_any(cls, links: "LinksLike") -> "Links":
        """Links as they are, or the file that they are in.

        Raises:
            StrategyError: Something else.
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
        """Raises `StrategyError` where so many devices are no whole number of hosts."""
        if devices > self.devices_per_host and devices % self.devices_per_host:
            raise StrategyError(
                f"The links are those of hosts of {self.devices_per_host} devices, so there can be so many devices, or "
                f"a multiple of that. Received: devices={devices}"
            )
        if devices > self.devices_per_host and not self.has_hosts:
            raise StrategyError(
                f"The links are those of one host of {self.devices_per_host} devices: nothing is known of those "
                "between hosts. Measure (tfshard launch --hosts=... --module tfshard profile-network --save=FILE) or "
                f"give them (tfshard.planning.Links.of). Received: devices={devices}"
            )

    def encode_seconds(self, compression: str | PowerSGD, gradient_bytes: int) -> float:
        """In which a device encodes and decodes gradients. PowerSGD of a higher rank than 4 takes in proportion to it.

        Args:
            compression: `"bfloat16"`, `"int8"` or a `tfshard.PowerSGD`.
            gradient_bytes: Of what a device compresses, in float32.

        Raises:
            StrategyError: That was not measured.
        """
        name = compression if isinstance(compression, str) else POWER_SGD
        if name not in self.encoding:
            raise StrategyError(
                f"These links do not say how long devices encode gradients for {name!r}. Measure again (tfshard "
                "profile-network --save=FILE), or give it (tfshard.planning.Links.of(encoding={...}), from "
                f"tfshard.measure.encode_seconds_per_byte). Received: encoding={dict(self.encoding)}"
            )
        more = max(1.0, compression.rank / MEASURED_RANK) if isinstance(compression, PowerSGD) else 1.0
        return more * gradient_bytes * self.encoding[name]

    def seconds(self, collective: Collective, mesh_shape: Mapping[str, int]) -> float | None:
        """What one collective of a plan takes by itself; None where its bytes are not known.

        A ring over n devices: each sends (n-1)/n of what a gather gives or an all-to-all takes, and twice that of what
        an all-reduce takes. Where groups of it are on several hosts, those of a host share its link.

        Args:
            collective: The collective; its `count` is not looked at.
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
        """What all collectives of a plan take, one after the other; None where bytes are not known.

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
    """The kind that a plan's collective is on the devices: a CPU's reduce-scatter is an all-reduce and a slice, and so
    is a gather on a mesh of several axes, of zeros and a piece, unless it is over the data axis."""
    if collective.kind == REDUCE_SCATTER and device_type == "CPU":
        return ALL_REDUCE
    if collective.kind == ALL_GATHER and mesh_axes.gathers_by_reduction(collective.axis):
        return ALL_REDUCE
    return collective.kind


def _members(collective: Collective, mesh_axes: MeshAxes) -> list[int]:
    """The devices of the first group of a collective, by their numbers in the mesh. What is gathered over the data axis
    is gathered in a replica; what DTensor adds up over it, over all devices."""
    axes = {collective.axis}
    if collective.axis == mesh_axes.data and collective.kind in (ALL_REDUCE, REDUCE_SCATTER):
        axes |= {mesh_axes.replica or collective.axis}
    grid = np.arange(math.prod(mesh_axes.values())).reshape(tuple(mesh_axes.given.values()))
    taken = tuple(slice(None) if name in axes else 0 for name in mesh_axes.given)
    return [int(number) for number in np.ravel(grid[taken])]
