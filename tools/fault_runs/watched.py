"""Watch a launched run from outside: its output, its processes, and the ports on which they listen."""

import contextlib
import os
import pathlib
import queue
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

_HERE = pathlib.Path(__file__).parent
LAUNCH = (sys.executable, "-m", "tfshard", "launch")
CLIENT = str(_HERE / "client.py")
# The same launchers, without TensorFlow.
BARE_LAUNCH = (sys.executable, str(_HERE / "bare_launch.py"))
BARE_CLIENT = str(_HERE / "bare_client.py")
# An environment variable of every process of a run.
_MARK = "FAULTS_RUN"
# The seconds between two looks at the processes of a run.
_LOOK_SECONDS = 0.1
# A new process has its parent's environment for at most this many seconds.
_EXEC_SECONDS = 1.0
# Programs use ports below this number more often.
_FIRST_PORT = 10000
# The seconds within which the ports of ended processes must become free.
_GIVE_UP_SECONDS = 2.0


class Run:
    """A launched run that is being watched.

    Attributes:
        lines: The output of the launchers so far.
        times: The time at which each line came.
        launchers: The processes of the launchers, the leader first.
        pids: The process ids of the clients of the last start, by client.
        ports: The ports on which the launchers and clients listen, as printed or as seen from outside.
        random: The generator of random moments.
    """

    def __init__(
        self,
        *command: str,
        num_clients: int,
        launch: tuple[str, ...] = LAUNCH,
        environment: dict[str, str] | None = None,
        seed: str = "",
    ):
        self.lines: list[str] = []
        self.times: list[float] = []
        self.launchers: list[subprocess.Popen] = []
        self.pids: dict[int, int] = {}
        self.ports: set[int] = set()
        self.random = random.Random(seed)
        self._num_clients = num_clients
        self._command = launch
        self._mark = secrets.token_hex(8)
        self._new: queue.Queue[tuple[float, str]] = queue.Queue()
        self._readers: list[threading.Thread] = []
        # Processes of the run with their start times, and other processes with the time at which they were first seen.
        self._known: dict[int, int] = {}
        self._others: dict[int, float] = {}
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self.launch(*command, environment=environment)

    def launch(self, *command: str, environment: dict[str, str] | None = None) -> None:
        """Start a launcher."""
        launcher = subprocess.Popen(
            [*self._command, *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **(environment or {}), _MARK: self._mark},
        )  # fmt: skip
        self.launchers.append(launcher)
        reader = threading.Thread(target=self._read, args=(launcher,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, launcher: subprocess.Popen) -> None:
        assert launcher.stdout is not None
        with launcher.stdout:
            for line in launcher.stdout:
                self._new.put((time.monotonic(), line.rstrip("\n")))

    def _watch(self) -> None:
        """Record the ports of each process from its start, including ports that the process does not print."""
        while not self._closed.wait(_LOOK_SECONDS):
            for pid in self.living():
                self.ports |= listening_ports(pid)

    def take(self, timeout: float) -> str | None:
        """Return the next line of output, or None if no line comes within `timeout` seconds."""
        try:
            came, line = self._new.get(timeout=timeout)
        except queue.Empty:
            return None
        self.lines.append(line)
        self.times.append(came)
        if match := re.match(r"\[client +(\d+)\] pid (\d+), control port (\d+)", line):
            self.pids[int(match[1])] = int(match[2])
            self.ports.add(int(match[3]))
        if match := re.match(r"\[client +\d+\] port (\d+)", line):
            self.ports.add(int(match[1]))
        return line

    def wait_for(self, text: str, timeout: float = 240.0) -> None:
        """Wait for a line that matches. If `text` contains `CLIENT`, wait for such a line of every client."""
        clients = range(self._num_clients) if "CLIENT" in text else [0]
        needed = {text.replace("CLIENT", rf"\[client +{client}\]") for client in clients}
        deadline = time.monotonic() + timeout
        while needed:
            line = self.take(max(0.0, deadline - time.monotonic()))
            if line is None:
                raise AssertionError(f"There was no '{text}' within {timeout} s:\n{self.text}")
            needed = {pattern for pattern in needed if not re.search(pattern, line)}

    def living(self) -> set[int]:
        """Return the processes of the run that have not ended: launchers, clients, and their child processes."""
        now, listed = time.monotonic(), {int(name) for name in os.listdir("/proc") if name.isdigit()}
        with self._looking:
            self._others = {pid: since for pid, since in self._others.items() if pid in listed}
            for pid in listed - self._known.keys():
                if now - self._others.get(pid, now) > _EXEC_SECONDS:
                    continue
                with contextlib.suppress(OSError):
                    if self._is_marked(pid):
                        self._known[pid] = process_state(pid)[1]
                    else:
                        self._others.setdefault(pid, now)
            # A process that is ending has no environment any more, but still has its ports.
            states = {pid: process_state(pid) for pid in self._known.keys() & listed}
        return {pid for pid, (state, start) in states.items() if state not in "ZX" and start == self._known[pid]}

    def _is_marked(self, pid: int) -> bool:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{_MARK}={self._mark}".encode() in file.read().split(b"\0")

    def wait(self, timeout: float) -> float:
        """Wait until all processes of the run but stopped launchers have ended, and return the seconds."""
        begin = time.monotonic()
        while left := self._left():
            if time.monotonic() - begin > timeout:
                self.drain()
                raise AssertionError(f"Processes {left} had not ended after {timeout} s:\n{self.text}")
            time.sleep(_LOOK_SECONDS / 2)
        took = time.monotonic() - begin
        for launcher in self.launchers:
            if not is_stopped(launcher.pid):
                launcher.wait(timeout)
        self.drain()
        return took

    def _left(self) -> set[int]:
        return self.living() - {launcher.pid for launcher in self.launchers if is_stopped(launcher.pid)}

    def drain(self) -> None:
        """Take the remaining lines."""
        for reader in self._readers:
            reader.join(0.5)
        while self.take(0.0) is not None:
            pass

    def close(self) -> None:
        """End all processes that remain."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()
        self._closed.set()
        for thread in (*self._readers, self._watcher):
            thread.join(5.0)

    @property
    def text(self) -> str:
        return "\n".join(self.lines[-60:])

    @property
    def said(self) -> str:
        """The output of the launchers, without the clients' output."""
        return " ".join(line for line in self.lines if not line.startswith("[client"))

    def steps(self, client: int) -> list[tuple[int, str, int]]:
        """Return the steps of a client: number, loss, and number of clients."""
        pattern = rf"\[client +{client}\] step (\d+) loss (\S+) clients (\d+)"
        found = [re.match(pattern, line) for line in self.lines]
        return [(int(match[1]), match[2], int(match[3])) for match in found if match]

    def check_nothing_is_left(self, ports: int) -> None:
        """Check that no process of the run lives, that at least `ports` ports are known, and that none is held."""
        left = self._left()
        assert not left, f"Processes {left} are left:\n{self.text}"
        assert len(self.ports) >= ports, f"Of {ports} ports only {self.ports} are known:\n{self.text}"
        held = {port for port in self.ports if not is_given_up(port)}
        assert not held, f"No process of the run lives, and its ports {held} are still held:\n{self.text}"


def process_state(pid: int) -> tuple[str, int]:
    """Return the state of a process, `"X"` if the process is gone, and its start time in the kernel's ticks."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        # The main thread may end before other threads, which hold the files and ports.
        state = "R" if fields[0] == "Z" and len(os.listdir(f"/proc/{pid}/task")) > 1 else fields[0]
    except OSError:
        return "X", 0
    return state, int(fields[19])


def is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped the process."""
    return process_state(pid)[0] == "T"


def is_given_up(port: int) -> bool:
    """Return True if the ended processes no longer hold a port: the port is free, or another process has it."""
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while True:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                sock.bind(("", port))
                return True
        # Runs on the same machine get their ports from the same few thousand.
        if any(port in ports_of(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)


def free_port() -> int:
    """Return a port on which no process listens.

    The port is outside the range from which the system gives ports to connections: it could be taken before it is used.
    """
    first, last = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split())
    ports = [port for port in range(_FIRST_PORT, 2**16) if not first <= port <= last]
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port
    raise RuntimeError(f"All ports outside {first} to {last} are in use.")


_LISTENING = "0A"


def ports_of(pid: int, state: str = "") -> set[int]:
    """Return the TCP ports that a process holds, in one state of /proc/net/tcp or in any."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # The descriptor was closed meanwhile.
                link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if link.startswith("socket:["):
                    inodes.add(link[8:-1])
    ports: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if state in ("", row[3]) and row[9] in inodes}
    return ports


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    return ports_of(pid, _LISTENING)


@contextlib.contextmanager
def running(*command: str, **options) -> Iterator[Run]:
    """Yield a `Run`, and end all its processes afterwards."""
    run = Run(*command, **options)
    try:
        yield run
    finally:
        run.close()
