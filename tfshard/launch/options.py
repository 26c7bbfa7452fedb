"""What is launched, and what the launchers of a run have in common."""

import dataclasses
import os
import sys
import time

from tfshard.command_line import ALLOCATORS, TIMEOUTS
from tfshard.devices.allocators import environment_of_system_allocator
from tfshard.devices.clients import Settings
from tfshard.errors import LaunchError

# Without a heartbeat for so long, another launcher is gone.
HOST_SECONDS = 8.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What to launch; times in seconds.

    Attributes:
        command: The program and its arguments, the same for each client.
        num_processes: Clients on each host.
        devices_per_process: Devices of each client; None leaves it to the script.
        hosts: The names or addresses of the hosts, the same on all of them.
        host_index: Which of them this is.
        address: Where the launcher of the first host listens; by default the first host.
        port: Its port; 0 for any free one, on one host.
        client_port: The port of the first client's TensorFlow server on each host, the others follow; 0 for free ones.
        allow_public_address: Listen on a public address.
        secret: Shared by the launchers of several hosts.
        startup_timeout: From the start until every client has called `tfshard.initialize()`.
        registration_timeout: From the first client's call until the last one's.
        step_timeout: A step of training, and silence of a client.
        first_step_timeout: The first step, which is compiled.
        grace: From SIGTERM to SIGKILL.
        max_restarts: How often to restart all clients when one fails.
        elastic_min: Go on with so many clients when one cannot come back; None: with all of them only.
        allocator: The allocator of the clients' tensors on CPU: `"system"`, which returns freed memory, or
            `"tensorflow"`, which keeps freed memory and records in a trace what a step allocates.
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
    startup_timeout: float = TIMEOUTS["startup_timeout"]
    registration_timeout: float = TIMEOUTS["registration_timeout"]
    step_timeout: float = TIMEOUTS["step_timeout"]
    first_step_timeout: float = TIMEOUTS["first_step_timeout"]
    grace: float = TIMEOUTS["grace"]
    max_restarts: int = 0
    elastic_min: int | None = None
    allocator: str = ALLOCATORS[0]

    def __post_init__(self) -> None:
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
                f"host_index must be that of one of the {len(self.hosts)} hosts {self.hosts}. "
                f"Received: host_index={self.host_index}"
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
        if len(self.hosts) > 1 and len(self.secret or "") < 32:
            raise LaunchError(
                "Launchers of several hosts need a shared secret of at least 32 characters, in the environment "
                "variable TFSHARD_SECRET or in a file (--secret_file). Make one for each run: openssl rand -hex 32. "
                f"Received: {len(self.secret or '')} characters"
            )


def log(text: str) -> None:
    print(f"tfshard launch: {text}", file=sys.stderr, flush=True)


class Clock:
    """Seconds in which this process was running."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def tick(self) -> None:
        """To be called a few times a second."""
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, 0.5)


def client_environment(settings: Settings, allocator: str = ALLOCATORS[0]) -> dict[str, str]:
    """What a client's environment has in addition."""
    return {
        **settings.to_environment(),
        **(environment_of_system_allocator() if allocator == "system" else {}),
        # What it wrote before it was killed is not lost.
        "PYTHONUNBUFFERED": "1",
        # The order of a set of names may decide the order of operations, which has to be the same on all clients.
        # Without a line for each function that DTensor compiles, on each client.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    }


def shared_options(options: Launch) -> dict[str, object]:
    """What the launchers of all hosts must be given alike."""
    names = ("num_processes", "devices_per_process", "hosts")
    return {name: list(v) if isinstance(v := getattr(options, name), tuple) else v for name in names}
