"""Create hosts on one Linux machine: network namespaces on a bridge, with links of one rate.

    host 0 [eth0] ---- [port0  bridge  port1] ---- [eth0] host 1

The bridge has a separate namespace, which keeps all interfaces out of the machine's network. Deleting a namespace also
deletes its links. Both ends of a link are shaped (tc-tbf), which limits the rate in both directions. With a delay,
a process carries the packets of each link (`delayed_links`). The names contain the id and the start time of their
process: runs do not collide, and the remains of a dead run can be recognized.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

from tools.fault_runs.watched import process_state
from tools.host_runs import delayed_links

INTERFACE = "eth0"
_NAME = re.compile(r"tfshard-(\d+)-(\d+)-\d+-(?:switch|host\d+)")
RATE = re.compile(r"([1-9]\d*)([kmg]bit)")
_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# The burst of a link: the bytes of this many seconds at the rate, but at least a segment of TCP.
_BURST_SECONDS = 0.001
_LEAST_BURST_BYTES = 1 << 16
# A link drops a packet that waits longer.
_QUEUE = "50ms"
MAX_HOSTS = 254
_numbers = itertools.count()


class NetworkError(Exception):
    """This machine cannot create such a network, or `ip` or `tc` failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The traffic of a host's interface, as the kernel counts it.

    Attributes:
        sent: The bytes sent, with headers. A packet may have up to 64 KiB and one header, because the kernel counts
            packets before a network card cuts them (TSO).
        received: The bytes received, with headers.
        packets: The number of packets sent.
    """

    sent: int
    received: int
    packets: int

    def since(self, before: "Traffic") -> "Traffic":
        """Return the traffic since an earlier count."""
        return Traffic(
            sent=self.sent - before.sent,
            received=self.received - before.received,
            packets=self.packets - before.packets,
        )


def own_traffic() -> Traffic:
    """Return the traffic so far of the host on which this process runs."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file.readlines()[2:])
    # Each line has the counts of received data, then of sent data: bytes, packets and six other counts.
    counts = [int(word) for word in {name.strip(): counts for name, counts in lines.items()}[INTERFACE].split()]
    return Traffic(sent=counts[8], received=counts[0], packets=counts[9])


def bits_per_second(rate: str) -> int:
    """Parse a rate such as `"1gbit"`.

    >>> bits_per_second("100mbit")
    100000000
    """
    match = RATE.fullmatch(rate)
    assert match is not None, rate
    return int(match[1]) * _BITS[match[2]]


class Network:
    """Hosts with links of one rate. `connected` creates a network and removes it.

    Attributes:
        addresses: The addresses of the hosts, all private.
    """

    def __init__(self, num_hosts: int, rate: str, delay: float = 0.0):
        """Create the namespaces and the links.

        Args:
            num_hosts: The number of hosts, 1 to 254.
            rate: The rate of each link and direction, such as `"1gbit"`.
            delay: The seconds that a packet takes from one host to another. The rate must be at most 1 Gbit/s then.

        Raises:
            NetworkError: The network cannot be created. Nothing of the network is left.
        """
        assert 1 <= num_hosts <= MAX_HOSTS, num_hosts
        run = f"tfshard-{os.getpid()}-{process_state(os.getpid())[1]}-{next(_numbers)}"
        self.addresses = tuple(f"10.77.0.{host + 1}" for host in range(num_hosts))
        self._switch = f"{run}-switch"
        self._hosts = tuple(f"{run}-host{host}" for host in range(num_hosts))
        burst = max(_LEAST_BURST_BYTES, int(bits_per_second(rate) * _BURST_SECONDS / 8))
        self._carriers: list[subprocess.Popen[str]] = []
        _check_machine()
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for host in range(num_hosts):
                self._connect(host, rate, burst, delay)
        except NetworkError:
            self.close()
            raise
        self._begin = [self._counted(host) for host in range(num_hosts)]

    def _connect(self, host: int, rate: str, burst: int, delay: float) -> None:
        name, port = self._hosts[host], f"port{host}"
        _ip("netns", "add", name)
        if delay:
            # A packet passes two links, one of each host.
            self._carry(name, port, delay / 2)
        else:
            _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", port, "master", "bridge")
        for namespace, interface in ((name, INTERFACE), (self._switch, port)):
            _tc(
                "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, "burst", str(burst),
                "latency", _QUEUE,
            )  # fmt: skip
            # IPv6 would send packets of its protocol on the link.
            _ip("-n", namespace, "link", "set", interface, "addrgenmode", "none")
        _ip("-n", name, "address", "add", f"{self.addresses[host]}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", INTERFACE, "up")
        self.set_link(host, up=True)

    def _carry(self, name: str, port: str, delay: float) -> None:
        """Create a link whose packets a process carries, each after a delay."""
        carrier = subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", sys.executable, "-m", delayed_links.__name__, name, INTERFACE,
             self._switch, port, str(delay)),
            cwd=pathlib.Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._carriers.append(carrier)
        assert carrier.stdout is not None and carrier.stderr is not None
        if carrier.stdout.readline() != "ready\n":
            raise NetworkError(f"A link cannot be delayed: {carrier.stderr.read().strip().splitlines()[-1:]}")
        for namespace, interface in ((name, INTERFACE), (self._switch, port)):
            _ip("-n", namespace, "link", "set", interface, "mtu", str(delayed_links.MTU))

    def on(self, host: int, *command: str) -> tuple[str, ...]:
        """Return the command that runs `command` on a host. The process ends with its parent."""
        return ("ip", "netns", "exec", self._hosts[host], "setpriv", "--pdeathsig", "KILL", *command)

    def set_link(self, host: int, *, up: bool) -> None:
        """Connect or disconnect a host's link. The host keeps its address, but a disconnected link carries nothing."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "up" if up else "down")

    def traffic(self, host: int) -> Traffic:
        """Return the traffic of a host since the network was created."""
        return self._counted(host).since(self._begin[host])

    def _counted(self, host: int) -> Traffic:
        (link,) = json.loads(_ip("-n", self._hosts[host], "-s", "-j", "link", "show", "dev", INTERFACE))
        sent, received = link["stats64"]["tx"], link["stats64"]["rx"]
        return Traffic(sent=sent["bytes"], received=received["bytes"], packets=sent["packets"])

    def close(self) -> None:
        """End the processes on all hosts, and remove the hosts."""
        for carrier in self._carriers:
            carrier.kill()
            carrier.communicate()
        _remove({*self._hosts, self._switch} & set(_names()))


@contextlib.contextmanager
def connected(num_hosts: int, rate: str, delay: float = 0.0) -> Iterator[Network]:
    """Yield a `Network`, and remove it afterwards."""
    network = Network(num_hosts, rate, delay)
    try:
        yield network
    finally:
        network.close()


def missing() -> str | None:
    """Return why this machine cannot create such a network, or None if it can."""
    try:
        Network(1, "1gbit").close()
    except NetworkError as error:
        return str(error)
    return None


def clean() -> list[str]:
    """Remove the namespaces of dead runs, and end the processes in them. Returns the names of the namespaces.

    Raises:
        NetworkError: This machine cannot create such networks, or `ip` failed.
    """
    _check_machine()
    left = [name for name in _names() if (match := _NAME.fullmatch(name)) and not _lives(int(match[1]), int(match[2]))]
    _remove(left)
    return left


def _lives(pid: int, started: int) -> bool:
    state, since = process_state(pid)
    return state not in "ZX" and since == started


def _names() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _remove(names: "set[str] | list[str]") -> None:
    for name in names:
        for pid in _ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in names:
        _ip("netns", "delete", name)


def _check_machine() -> None:
    if sys.platform != "linux":
        raise NetworkError(f"Network namespaces need Linux. Received: {sys.platform}")
    if os.geteuid():
        raise NetworkError(f"Only root can make network namespaces: use sudo. Received: user {os.geteuid()}")
    for program in ("ip", "tc", "setpriv"):
        if shutil.which(program) is None:
            raise NetworkError(f"Program '{program}' is not installed: install iproute2 and util-linux.")


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _tc(*arguments: str) -> str:
    return _run("tc", *arguments)


def _run(*command: str) -> str:
    """Run a command, and return its output. A ^C at the terminal does not reach the command, which cleanup needs."""
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NetworkError(f"'{' '.join(command)}' failed: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout
