"""The run that a cluster started this process for."""

import dataclasses
import zlib

from tfshard.command_line import DEFAULT_PORT as DEFAULT_PORT

# If several runs may share a machine, each run gets a port from this range, below the ports of outgoing connections.
_FIRST_PORT, _NUM_PORTS = 20000, 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """The members of a run, and this member.

    Attributes:
        system: The name of the system, such as `"SLURM"`.
        variables: The environment variables that the values come from.
        num_members: The number of members.
        index: The number of this member, from 0.
        coordinator: The name or address of member 0.
        port: The port of the control channel at that address.
        addresses: The name or address of each member. Empty if the system does not tell them: then each member is
            reached at the address from which it connects to the coordinator.
        local_index: The number of this member among the members on its machine, from 0.
        num_local: The number of members on this machine.
        job: A name of the run, equal on all members. Not secret.
        has_own_gpus: True if CUDA_VISIBLE_DEVICES, where it is set, holds the GPUs of this member alone.
        notes: Remarks for `tfshard doctor --cluster`, such as parameter servers that take no part.
    """

    system: str
    variables: tuple[str, ...]
    num_members: int
    index: int
    coordinator: str
    port: int
    addresses: tuple[str, ...] = ()
    local_index: int = 0
    num_local: int = 1
    job: str = ""
    has_own_gpus: bool = True
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The name or address of each member, or an empty text where it is not known."""
        return self.addresses or (self.coordinator, *[""] * (self.num_members - 1))

    @property
    def identity(self) -> dict[str, object]:
        """The facts that are equal on all members of the run. They keep two runs apart, and are not secret."""
        return {"system": self.system, "job": self.job, "members": self.num_members}


def port_of(job: str) -> int:
    """Return a port for a job, equal on all its members. Two jobs on a machine seldom get the same.

    >>> port_of("4711.0")
    22413
    """
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
