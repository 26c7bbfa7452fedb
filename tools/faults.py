"""Brings faults about in launched runs, and checks that each ends everywhere in time, with an error that names it.

    python tools/faults.py                              # each fault three times, on two clients
    python tools/faults.py --runs=20
    python tools/faults.py --only=kill_1,stop --num_processes=4
    python tools/faults.py --bare                       # clients without TensorFlow: seconds for all of them
    python tools/faults.py --calm_minutes=10            # no fault, both cores loaded: no false alarm
    python tools/faults.py --recoveries=5               # a kill, and how long it takes until training goes on

A time goes from the fault to the end of the last process of the run, launchers and clients; after it no port of theirs
is held. Random moments come from `--seed`, which is printed. Nothing else may be run beside it on a small machine: the
limits are seconds of wall time.
"""

import collections
import contextlib
import dataclasses
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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from absl import app, flags

_RUNS = flags.DEFINE_integer("runs", 3, "How often to run each fault.", 1)
_ONLY = flags.DEFINE_list("only", [], "Names of the faults to run; by default all.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 2, "Clients.", 2)
_BARE = flags.DEFINE_boolean("bare", False, "Launchers and clients without TensorFlow.")
_SEED = flags.DEFINE_string("seed", None, "Of the random moments; by default another one each time.")
_CALM_MINUTES = flags.DEFINE_float("calm_minutes", 0.0, "Train for so long without a fault, with all cores loaded.")
_RECOVERIES = flags.DEFINE_integer("recoveries", 0, "How often to kill a client of a run that is then restarted.")

_HERE = pathlib.Path(__file__).parent / "fault_runs"
LAUNCH = (sys.executable, "-m", "tfshard", "launch")
CLIENT = str(_HERE / "client.py")
# The same launchers, and clients that tell them the same, without TensorFlow.
BARE_LAUNCH = (sys.executable, str(_HERE / "bare_launch.py"))
BARE_CLIENT = str(_HERE / "bare_client.py")
STEP_TIMEOUT = 8
REGISTRATION_TIMEOUT = 6
# A client that died ends all others within this, in seconds.
DEATH_LIMIT = 15
# A stuck one within its timeout and this.
MARGIN = 10
# In the environment of every process of a run.
_MARK = "FAULTS_RUN"
# How often the processes of a run are looked at.
_LOOK_SECONDS = 0.1
# A new process has the environment of its parent for no longer.
_EXEC_SECONDS = 1.0


class Run:
    """A launched run that is being watched.

    Attributes:
        lines: What its launchers have written so far.
        times: When each of them came.
        launchers: The processes of its launchers, the leader first.
        pids: The process ids of its clients, by client, of the last start.
        ports: On which its launchers and clients said that they listen, or were seen to.
        random: What its random moments are drawn from.
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
        # Processes of the run by their time of start, and those that are none of it by when they were first seen.
        self._known: dict[int, int] = {}
        self._others: dict[int, float] = {}
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self.launch(*command, environment=environment)

    def launch(self, *command: str, environment: dict[str, str] | None = None) -> None:
        """Starts a launcher."""
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
        """Notes ports from the moment when a process is there, also those of which it says nothing."""
        while not self._closed.wait(_LOOK_SECONDS):
            for pid in self.living():
                self.ports |= listening_ports(pid)

    def take(self, timeout: float) -> str | None:
        """The next line, None when there is none for so many seconds."""
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
        """Until a line matches, on all clients if it says so with `CLIENT`."""
        clients = range(self._num_clients) if "CLIENT" in text else [0]
        needed = {text.replace("CLIENT", rf"\[client +{client}\]") for client in clients}
        deadline = time.monotonic() + timeout
        while needed:
            line = self.take(max(0.0, deadline - time.monotonic()))
            if line is None:
                raise AssertionError(f"There was no '{text}' within {timeout} s:\n{self.text}")
            needed = {pattern for pattern in needed if not re.search(pattern, line)}

    def living(self) -> set[int]:
        """The processes of the run that have not ended: launchers, clients, and what these have started."""
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
            # One that is ending has no environment any more, and still has its ports.
            states = {pid: process_state(pid) for pid in self._known.keys() & listed}
        return {pid for pid, (state, start) in states.items() if state not in "ZX" and start == self._known[pid]}

    def _is_marked(self, pid: int) -> bool:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{_MARK}={self._mark}".encode() in file.read().split(b"\0")

    def wait(self, timeout: float) -> float:
        """Until all of its processes have ended, but launchers that are stopped; returns the seconds it took."""
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
        """Takes the lines that are still on their way."""
        for reader in self._readers:
            reader.join(0.5)
        while self.take(0.0) is not None:
            pass

    def close(self) -> None:
        """Ends whatever is left."""
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
        """What the launchers themselves said."""
        return " ".join(line for line in self.lines if not line.startswith("[client"))

    def steps(self, client: int) -> list[tuple[int, str, int]]:
        """The steps of a client: number, loss, and how many clients there were."""
        pattern = rf"\[client +{client}\] step (\d+) loss (\S+) clients (\d+)"
        found = [re.match(pattern, line) for line in self.lines]
        return [(int(match[1]), match[2], int(match[3])) for match in found if match]

    def check_nothing_is_left(self, ports: int) -> None:
        """No process of the run lives, and of its ports, of which so many are known at least, none is held."""
        left = self._left()
        assert not left, f"Processes {left} are left:\n{self.text}"
        assert len(self.ports) >= ports, f"Of {ports} ports only {self.ports} are known:\n{self.text}"
        for port in self.ports:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("", port))


def process_state(pid: int) -> tuple[str, int]:
    """The state of a process, `"X"` when it is gone, and when it was started, in the kernel's ticks."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        # Its main thread may end before the others, which have the files and ports.
        state = "R" if fields[0] == "Z" and len(os.listdir(f"/proc/{pid}/task")) > 1 else fields[0]
    except OSError:
        return "X", 0
    return state, int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    return process_state(pid)[0] == "T"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # It was closed meanwhile.
                link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if link.startswith("socket:["):
                    inodes.add(link[8:-1])
    ports: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}
    return ports


@contextlib.contextmanager
def running(*command: str, **options) -> Iterator[Run]:
    """A `Run`, of which nothing is left afterwards."""
    run = Run(*command, **options)
    try:
        yield run
    finally:
        run.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and what has to follow.

    Attributes:
        cause: What the launcher's message has to match.
        flags: Of the client.
        launch_flags: Of the launcher.
        bring_about: What is done to the run from outside; it returns when the fault has happened.
        limit: Within how many seconds everything has ended.
        code: The exit code, of the first host's launcher.
        hosts: How many launchers there are, each of which stands for a host.
        servers: Whether the clients' servers were up before: then their ports have to be known, too.
        listens: Whether the launcher's own was.
        check: What else has to be so at the end.
        bare: Whether clients without TensorFlow can have it.
    """

    cause: str
    flags: tuple[str, ...] = ()
    launch_flags: tuple[str, ...] = ()
    bring_about: Callable[[Run], None] = lambda run: run.wait_for("CLIENT pid")
    limit: float = DEATH_LIMIT
    code: int = 1
    hosts: int = 1
    servers: bool = True
    listens: bool = True
    check: Callable[[Run], None] = lambda run: None
    bare: bool = True


def _in_training(run: Run) -> None:
    run.wait_for("CLIENT pid")
    run.wait_for(f"CLIENT step {run.random.randint(2, 30)} ")
    time.sleep(run.random.random() * 0.2)


def _signal_client(client: int, number: int) -> Callable[[Run], None]:
    def bring_about(run: Run) -> None:
        _in_training(run)
        os.kill(run.pids[client], number)

    return bring_about


def _signal_launcher(host: int, number: int) -> Callable[[Run], None]:
    def bring_about(run: Run) -> None:
        _in_training(run)
        run.launchers[host].send_signal(number)

    return bring_about


def _kill_launcher_early(run: Run) -> None:
    run.wait_for("CLIENT pid")
    run.launchers[0].kill()


def _after_step_5(run: Run) -> None:
    run.wait_for("CLIENT pid")
    run.wait_for(r"\[client +1\] step 5 ")


def _kill_compiling(run: Run) -> None:
    run.wait_for(r"\[client +1\] begins")
    time.sleep(run.random.random() * 0.5)
    os.kill(run.pids[1], signal.SIGKILL)


def _goes_on_from(*steps: int) -> Callable[[Run], None]:
    """Checks what follows a kill in the save after step 4: the values of the last commit, which was one of these."""

    def check(run: Run) -> None:
        resumed = [re.search(r"resumes after step (\w+)", line) for line in run.lines if "[client 0] resumes" in line]
        first, step = (match[1] for match in resumed if match)
        assert first == "None" and int(step) in steps, run.text
        found = run.steps(0)
        assert [number for number, _, _ in found] == [1, 2, 3, 4, *range(int(step) + 1, 7)], run.text
        # A step that is done again has the same loss to the last digit.
        before = {number: loss for number, loss, _ in found[:4]}
        again = {number: loss for number, loss, _ in found[4:]}
        assert all(before[number] == again[number] for number in before.keys() & again.keys()), run.text

    return check


def _in_save(point: str, client: int, *resumes: int) -> Fault:
    return Fault(
        flags=(
            f"--fault={point}", f"--client={client}", "--at_step=4", "--state=STATE", "--every_steps=2", "--steps=6",
        ),
        launch_flags=("--max_restarts=1",),
        bring_about=lambda run: run.wait_for(r"restart 1 of 1"),
        cause=rf"Client {client} was killed by signal 9 \(SIGKILL\)",
        # It starts again, and trains to the end.
        limit=2 * _IMPORTS + DEATH_LIMIT,
        code=0,
        check=_goes_on_from(*resumes),
        bare=False,
    )  # fmt: skip


# The time from the start of Python to tfshard.initialize(), which imports TensorFlow.
_IMPORTS = 30


def faults(num_processes: int) -> dict[str, Fault]:
    """All faults, by name."""
    found = {}
    for client in range(num_processes):
        found[f"kill_{client}"] = Fault(
            bring_about=_signal_client(client, signal.SIGKILL),
            cause=rf"Client {client} was killed by signal 9 \(SIGKILL\) (in|after) training step \d+",
            code=137,
        )
    return found | {
        "kill_importing": Fault(
            flags=("--fault=kill_importing",),
            bring_about=lambda run: run.wait_for(r"\[client +1\] pid"),
            cause=r"Client 1 was killed by signal 9 \(SIGKILL\), before it called tfshard.initialize\(\)",
            code=137,
            servers=False,
        ),
        "kill_registered": Fault(
            flags=("--fault=kill_registered",),
            cause=r"Client 1 was killed by signal 9 \(SIGKILL\)\.",
            limit=_IMPORTS + DEATH_LIMIT,
            code=137,
            servers=False,
        ),
        "kill_starting": Fault(
            flags=("--fault=kill_starting",),
            cause=r"Client 1 was killed by signal 9 \(SIGKILL\) in the start of DTensor\.",
            limit=_IMPORTS + DEATH_LIMIT,
            code=137,
            servers=False,
        ),
        "kill_agreeing": Fault(
            flags=("--fault=kill_agreeing",),
            cause=r"Client 1 was killed by signal 9 \(SIGKILL\) in the start of DTensor\.",
            limit=_IMPORTS + DEATH_LIMIT,
            code=137,
            servers=False,
        ),
        "kill_tracing": Fault(
            flags=("--fault=kill_tracing",),
            bring_about=lambda run: run.wait_for(r"\[client +1\] begins"),
            cause=r"Client 1 was killed by signal 9 \(SIGKILL\) in training step 1\.",
            code=137,
            bare=False,
        ),
        "kill_compiling": Fault(
            bring_about=_kill_compiling,
            cause=r"Client 1 was killed by signal 9 \(SIGKILL\)( (in|after) \w.*)?\.",
            code=137,
            bare=False,
        ),
        "save_pieces": _in_save("save_pieces", 1, 2),
        "save_written": _in_save("save_written", 1, 2),
        # The other one may commit what was written.
        "save_published": _in_save("save_published", 1, 2, 4),
        "save_gathered": _in_save("save_gathered", 0, 2),
        "save_committed": _in_save("save_committed", 0, 4),
        "stop": Fault(
            bring_about=_signal_client(1, signal.SIGSTOP),
            cause=r"[Cc]lients? \(?1,?\)? .*(stuck|training step).*process is stopped \(SIGSTOP\)",
            limit=STEP_TIMEOUT + MARGIN,
        ),
        "loop": Fault(
            flags=("--fault=loop",),
            bring_about=_after_step_5,
            cause=r"Clients \(1,\) did not come to training step 6 within \d+ s: stuck.*after training step 5",
            limit=STEP_TIMEOUT + MARGIN,
        ),
        "mesh": Fault(
            flags=("--fault=mesh",),
            cause=r"MeshError: The clients differ in the mesh. axes: client 0 has .*, client 1 has ",
            limit=_IMPORTS + DEATH_LIMIT,
        ),
        "control_port": Fault(
            launch_flags=("--port=TAKEN",),
            bring_about=lambda run: None,
            cause=r"cannot listen on 127.0.0.1:\d+: Address already in use",
            limit=_IMPORTS,
            code=2,
            servers=False,
            listens=False,
        ),
        "client_port": Fault(
            launch_flags=("--client_port=TAKEN",),
            cause=r"Client \d cannot have port \d+ for its TensorFlow server: Address already in use",
            limit=_IMPORTS + DEATH_LIMIT,
            servers=False,
        ),
        "duplicate": Fault(
            flags=("--fault=duplicate",),
            cause=r"Two processes call themselves client \d+: process \d+ on .* and process \d+ on",
            limit=_IMPORTS + DEATH_LIMIT,
            servers=False,
        ),
        "never": Fault(
            flags=("--fault=never",),
            cause=rf"Clients \(1,\) did not call tfshard.initialize\(\) within {REGISTRATION_TIMEOUT} s after",
            limit=_IMPORTS + REGISTRATION_TIMEOUT + MARGIN,
            servers=False,
        ),
        "gone": Fault(
            flags=("--fault=gone",),
            cause=r"Client 1 ended with exit code 7, before it called tfshard.initialize\(\)",
            limit=_IMPORTS + DEATH_LIMIT,
            code=7,
            servers=False,
        ),
        "seed": Fault(
            flags=("--fault=seed",),
            cause=r"StrategyError: The clients differ in the initial values of model .*sequential/up/kernel",
            limit=_IMPORTS + DEATH_LIMIT,
        ),
        "batches": Fault(
            flags=("--fault=batches",),
            bring_about=_after_step_5,
            cause=r"Clients \d and \d were given different batches in training step 6",
        ),
        "raise": Fault(
            flags=("--fault=raise",),
            bring_about=_after_step_5,
            cause=r"Client 1 failed after training step 5:",
        ),
        "exit": Fault(
            flags=("--fault=exit",),
            bring_about=_after_step_5,
            cause=r"Client 1 ended its script, with exit code 0, while client 0 was in training step 6",
        ),
        "exit3": Fault(
            flags=("--fault=exit3",),
            bring_about=_after_step_5,
            cause=r"Client 1 ended with exit code 3 after training step 5",
            code=3,
        ),
        "segfault": Fault(
            flags=("--fault=segfault",),
            bring_about=_after_step_5,
            cause=r"Client 1 was killed by signal 11 \(SIGSEGV\) (in|after) training step 5",
            code=139,
        ),
        "alone": Fault(
            flags=("--fault=alone",),
            bring_about=_after_step_5,
            cause=r"has come to .* while client \d was in .*every client has to do the same in the same order",
        ),
        "hosts_kill_0": Fault(
            hosts=2,
            bring_about=_signal_client(0, signal.SIGKILL),
            cause=r"Client 0 was killed by signal 9 \(SIGKILL\) (in|after) training step \d+.*Client 0 was killed",
            code=137,
        ),
        "hosts_kill_1": Fault(
            hosts=2,
            bring_about=_signal_client(1, signal.SIGKILL),
            cause=r"Client 1 was killed by signal 9 \(SIGKILL\) (in|after) training step \d+.*Client 1 was killed",
            code=137,
        ),
        "hosts_stop": Fault(
            hosts=2,
            bring_about=_signal_client(1, signal.SIGSTOP),
            cause=r"[Cc]lients? \(?1,?\)? .*(stuck|training step)",
            limit=STEP_TIMEOUT + MARGIN,
        ),
        "hosts_kill_launcher_1": Fault(
            hosts=2,
            bring_about=_signal_launcher(1, signal.SIGKILL),
            cause=r"The launcher of host 1 \(127.0.0.2\), with clients \(1,\), closed its connection",
        ),
        "hosts_stop_launcher_1": Fault(
            hosts=2,
            bring_about=_signal_launcher(1, signal.SIGSTOP),
            cause=r"The launcher of host 1 \(127.0.0.2\), with clients \(1,\), sent no heartbeat for 8 s",
        ),
        "hosts_kill_launcher_0": Fault(
            hosts=2,
            bring_about=_signal_launcher(0, signal.SIGKILL),
            cause="The launcher of host 0 closed its connection: all clients of this host are ended",
            code=-9,
        ),
        "kill_launcher": Fault(bring_about=_signal_launcher(0, signal.SIGKILL), cause="", code=-9),
        # Nothing but the kernel ends a client that has not joined.
        "kill_launcher_early": Fault(
            flags=("--fault=never",), bring_about=_kill_launcher_early, cause="", code=-9, servers=False,
        ),
        "interrupt": Fault(
            bring_about=_signal_launcher(0, signal.SIGTERM), cause="Ended by SIGTERM", code=143,
        ),
    }  # fmt: skip


def run_fault(name: str, num_processes: int, *, seed: str, bare: bool = False) -> float:
    """Brings a fault about and checks what follows.

    Args:
        name: Of the fault.
        num_processes: Clients, if there is one host; else one on each.
        seed: Of its random moments.
        bare: Launchers and clients without TensorFlow.

    Returns:
        The seconds from the fault until the last process of the run had ended.

    Raises:
        AssertionError: Something else followed.
    """
    fault = faults(num_processes)[name]
    assert fault.bare or not bare, f"Without TensorFlow there is no fault {name}."
    command = [f"--step_timeout={STEP_TIMEOUT}", f"--registration_timeout={REGISTRATION_TIMEOUT}"]
    environment = {"TFSHARD_SECRET": os.urandom(32).hex()}
    if fault.hosts == 1:
        command.append(f"--num_processes={num_processes}")
    else:
        names = ",".join(f"127.0.0.{host + 1}" for host in range(fault.hosts))
        command += [f"--hosts={names}", f"--port={free_port()}", "--num_processes=1"]
    clients = num_processes if fault.hosts == 1 else fault.hosts
    ports = fault.listens + clients * fault.servers
    with tempfile.TemporaryDirectory() as state, socket.create_server(("", 0)) as taken:
        command += [flag.replace("TAKEN", str(taken.getsockname()[1])) for flag in fault.launch_flags]
        program = [BARE_CLIENT if bare else CLIENT, *(flag.replace("STATE", state) for flag in fault.flags)]
        first = [*command, *(["--host_index=0"] if fault.hosts > 1 else []), *program]
        launch = BARE_LAUNCH if bare else LAUNCH
        with running(*first, launch=launch, environment=environment, num_clients=clients, seed=seed) as run:
            for host in range(1, fault.hosts):
                run.launch(*command, f"--host_index={host}", *program, environment=environment)
            fault.bring_about(run)
            took = run.wait(fault.limit)
            run.check_nothing_is_left(ports)
            assert run.launchers[0].returncode == fault.code, (run.launchers[0].returncode, run.text)
            assert re.search(fault.cause, run.said), f"The cause is not named ({fault.cause}):\n{run.text}"
            fault.check(run)
    return took


def run_calm(minutes: float, num_processes: int) -> None:
    """Trains with all cores loaded; nothing may be taken for a fault, and all clients go on, and end, together."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with running(
            f"--num_processes={num_processes}", f"--step_timeout={STEP_TIMEOUT}",
            f"--registration_timeout={REGISTRATION_TIMEOUT * 10}", CLIENT, f"--seconds={60 * minutes}",
            num_clients=num_processes,
        ) as run:  # fmt: skip
            run.wait_for("CLIENT begins")
            run.wait(60 * minutes + 120)
            run.check_nothing_is_left(1 + num_processes)
            check_calm(run, num_processes)
    finally:
        for process in load:
            process.kill()
            process.wait()


def check_calm(run: Run, num_processes: int) -> None:
    """All clients did the same steps without a pause, and the launcher had nothing to say; prints their rate."""
    assert run.launchers[0].returncode == 0, (run.launchers[0].returncode, run.text)
    assert "tfshard launch:" not in run.said, run.said
    assert [line for line in run.lines if re.match(r"\[client +0\] (pid|begins)", line)][1:] == ["[client 0] begins"]
    last = len(run.steps(0))
    for client in range(num_processes):
        assert [step for step, _, _ in run.steps(client)] == list(range(1, last + 1)), f"client {client}:\n{run.text}"
        came = [
            time
            for time, line in zip(run.times, run.lines, strict=True)
            if re.match(rf"\[client +{client}\] step", line)
        ]
        longest = max(later - earlier for earlier, later in zip(came, came[1:], strict=False))
        assert longest < STEP_TIMEOUT, f"Client {client} paused for {longest:.1f} s."
        middle = (came[0] + came[-1]) / 2
        halves = collections.Counter(time < middle for time in came)
        first, second = (halves[half] / (middle - came[0]) for half in (True, False))
        assert second > first / 2, f"Client {client} slowed down from {first:.0f} to {second:.0f} steps/s."
        print(
            f"calm: client {client}, {last} steps in {came[-1] - came[0]:.0f} s, {first:.0f} steps/s and then "
            f"{second:.0f}, the longest pause {longest:.2f} s"
        )


def run_recovery(num_processes: int, seed: str) -> tuple[float, int]:
    """Kills a client; returns the seconds until the next step after the restart, and how many steps are done again."""
    every_steps = 5
    with tempfile.TemporaryDirectory() as state:
        command = [f"--num_processes={num_processes}", "--max_restarts=1", CLIENT, f"--state={state}"]
        command += [f"--every_steps={every_steps}", "--async_save"]
        with running(*command, num_clients=num_processes, seed=seed) as run:
            _in_training(run)
            os.kill(run.pids[1], signal.SIGKILL)
            begin = time.monotonic()
            run.wait_for("restart 1 of 1")
            done = max(step for step, _, _ in run.steps(0))
            run.wait_for(r"\[client +0\] resumes after step ")
            resumed = re.search(r"resumes after step (\w+)", run.lines[-1])
            run.wait_for(r"\[client +0\] step ")
            took = time.monotonic() - begin
            run.launchers[0].send_signal(signal.SIGTERM)
            run.wait(DEATH_LIMIT)
            run.check_nothing_is_left(1 + num_processes)
    assert resumed is not None
    again = done - (int(resumed.group(1)) if resumed.group(1) != "None" else 0)
    assert 0 <= again <= 2 * every_steps, (done, resumed.group(0))
    return took, again


def main(argv: list[str]) -> None:
    del argv
    seed, processes = _SEED.value or secrets.token_hex(4), _NUM_PROCESSES.value
    print(f"The same moments again: --seed={seed}", flush=True)
    if _RECOVERIES.value:
        found = [run_recovery(processes, f"{seed} {number}") for number in range(_RECOVERIES.value)]
        text = ", ".join(f"{seconds:.1f} s ({again} steps again)" for seconds, again in found)
        print(f"recovery, from the kill to the next step: {text}")
        return
    if _CALM_MINUTES.value:
        run_calm(_CALM_MINUTES.value, processes)
        return
    table = faults(processes)
    unknown = [name for name in _ONLY.value if name not in table]
    if unknown:
        raise app.UsageError(f"Unknown faults. Faults: {list(table)}. Received: only={unknown}")
    failed = 0
    for name, fault in table.items():
        if (_ONLY.value and name not in _ONLY.value) or (_BARE.value and not fault.bare):
            continue
        times = []
        for number in range(_RUNS.value):
            try:
                times.append(run_fault(name, processes, seed=f"{seed} {name} {number}", bare=_BARE.value))
            except (AssertionError, OSError) as error:
                failed += 1
                print(f"{name}: FAILED: {error}", flush=True)
        limits = f"limit {fault.limit:.0f}"
        print(f"{name}: {len(times)} of {_RUNS.value} ended well, in seconds: "
              f"{', '.join(f'{t:.1f}' for t in times)} ({limits})", flush=True)  # fmt: skip
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    app.run(main)
