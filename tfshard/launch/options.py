"""The options of a launch, and helpers that all launchers share."""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Mapping

from tfshard.clusters.run_secret import LEAST_CHARACTERS
from tfshard.command_line import ALLOCATORS, TIMEOUTS
from tfshard.devices import visible_gpus
from tfshard.devices.allocators import environment_of_system_allocator
from tfshard.devices.clients import Settings
from tfshard.errors import LaunchError

# A launcher counts as lost after this time without a heartbeat.
HOST_SECONDS = 8.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """The options of a launch. Times are in seconds.

    Attributes:
        command: The program and its arguments, equal for all clients.
        num_processes: The number of clients on each host.
        devices_per_process: The number of devices of each client. None leaves the choice to the script.
        hosts: The names or addresses of the hosts, equal on all hosts.
        host_index: The index of this host.
        address: The address on which the first host's launcher listens. Default: the first host.
        port: The port of the first host's launcher. 0 picks a free port, with one host only.
        client_port: The port of the first client's TensorFlow server on each host. The other clients use the next
            ports. 0 picks free ports.
        allow_public_address: Allow a public address to listen on.
        secret: The secret that the launchers of several hosts share.
        identity: The facts that are equal on all launchers of a cluster's run (`ClusterRun.identity`). If `secret` is
            None, the leader then hands a secret to the other launchers. With None, several hosts need a `secret`.
        startup_timeout: The limit from the start until every client has called `tfshard.initialize()`.
        registration_timeout: The limit from the first client's call until the last client's call.
        step_timeout: The limit for a training step, and for a client's silence.
        first_step_timeout: The limit for the first step, which is compiled.
        grace: The time from SIGTERM to SIGKILL.
        max_restarts: How often to restart all clients after a failure.
        elastic_min: The minimum number of clients to continue with if a client cannot come back. None requires all
            clients.
        allocator: The allocator of the clients' CPU tensors: `"system"`, which returns freed memory, or `"tensorflow"`,
            which keeps freed memory and records in a trace what a step allocates.
    """

    command: tuple[str, ...]
    num_processes: int
    devices_per_process: int | None = None
    hosts: tuple[str, ...] = ("127.0.0.1",)
    host_index: int = 0
    address: str | None = None
    port: int = 0
    client_port: int = 0
    allow_public_address: bool = False
    secret: str | None = None
    identity: Mapping[str, object] | None = None
    startup_timeout: float = TIMEOUTS["startup_timeout"]
    registration_timeout: float = TIMEOUTS["registration_timeout"]
    step_timeout: float = TIMEOUTS["step_timeout"]
    first_step_timeout: float = TIMEOUTS["first_step_timeout"]
    grace: float = TIMEOUTS["grace"]
    max_restarts: int = 0
    elastic_min: int | None = None
    allocator: str = ALLOCATORS[0]

    def __post_init__(self) -> None:
        for name in ("num_processes", "devices_per_process"):
            count = getattr(self, name)
            if type(count) is not int and not (name == "devices_per_process" and count is None):
                raise LaunchError(f"{name} must be an integer. Received: {name}={count!r}")
        if self.num_processes < 1:
            raise LaunchError(f"num_processes must be at least 1. Received: num_processes={self.num_processes}")
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise LaunchError(
                f"devices_per_process must be at least 1. Received: devices_per_process={self.devices_per_process}"
            )
        for name in TIMEOUTS:
            if not getattr(self, name) > 0:
                raise LaunchError(f"{name} must be positive. Received: {name}={getattr(self, name)}")
        if self.allocator not in ALLOCATORS:
            raise LaunchError(f"Unknown allocator. Allocators: {ALLOCATORS}. Received: allocator={self.allocator!r}")
        if self.max_restarts < 0:
            raise LaunchError(f"max_restarts must not be negative. Received: max_restarts={self.max_restarts}")
        if not 0 <= self.host_index < len(self.hosts):
            raise LaunchError(
                f"host_index must be the index of one of the {len(self.hosts)} hosts {self.hosts}. Received: "
                f"host_index={self.host_index}"
            )
        everyone = self.num_processes * len(self.hosts)
        if self.elastic_min is not None and not 1 <= self.elastic_min <= everyone:
            raise LaunchError(
                f"elastic_min must be between 1 and the number of clients, {everyone}. "
                f"Received: elastic_min={self.elastic_min}"
            )
        for name in ("port", "client_port"):
            if not 0 <= getattr(self, name) < 1 << 16:
                raise LaunchError(f"{name} must be a port, or 0. Received: {name}={getattr(self, name)}")
        has_exchange = self.identity is not None and self.secret is None
        if len(self.hosts) > 1 and len(self.secret or "") < LEAST_CHARACTERS and not has_exchange:
            raise LaunchError(
                f"Launchers of several hosts need a shared secret of at least {LEAST_CHARACTERS} characters, in the "
                "environment variable TFSHARD_SECRET or in a file (--secret_file). Make one for each run: "
                "openssl rand -hex 32. "
                f"Received: {len(self.secret or '')} characters"
            )

    @functools.cached_property
    def gpus_of_clients(self) -> list[dict[str, str]]:
        """The variables that give each client of this host GPUs of its own."""
        return visible_gpus.divided(self.num_processes, self.devices_per_process)


def name_of_host(options: Launch, index: int) -> str:
    """Return the name of a host for messages. Some clusters tell only the name of the first."""
    return options.hosts[index] or f"of member {index}"


class _Log:
    """Prints what a launcher says, with the name of its program."""

    program = "tfshard launch"


def log(text: str) -> None:
    print(f"{_Log.program}: {text}", file=sys.stderr, flush=True)


def log_as(program: str) -> None:
    """Give the lines of `log` another program's name."""
    _Log.program = program


class Clock:
    """Counts the seconds in which this process was running."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def tick(self) -> None:
        """Update the time. Call this a few times a second."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, 0.5)


def client_environment(settings: Settings, options: Launch) -> dict[str, str]:
    """Return the environment variables that the launcher adds for a client of this host."""
    return {
        **settings.to_environment(),
        **(environment_of_system_allocator() if options.allocator == "system" else {}),
        **options.gpus_of_clients[settings.local_index],
        # Keep the output of a killed client.
        "PYTHONUNBUFFERED": "1",
        # Silence the line that DTensor logs for each compiled function on each client.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        # The iteration order of a set of names may decide the order of operations, which must match on all clients.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }


def shared_options(options: Launch) -> dict[str, object]:
    """Return the options that must be equal on all hosts."""
    names = ("num_processes", "devices_per_process", "hosts")
    return {name: list(v) if isinstance(v := getattr(options, name), tuple) else v for name in names}
