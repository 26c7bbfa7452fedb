"""Brings faults about in launched runs, and checks that each ends everywhere in time, with an error that names it.

    python tools/faults.py                              # each fault three times, on two clients
    python tools/faults.py --runs=20
    python tools/faults.py --only=kill_1,stop --num_processes=4
    python tools/faults.py --calm_minutes=10            # no fault, both cores loaded: no false alarm
    python tools/faults.py --recoveries=5               # a kill, and how long it takes until training goes on

After each run no process of it is left and no port is held. Nothing else may be run beside it on a small machine: the
limits are seconds of wall time.
"""

import contextlib
import dataclasses
import os
import pathlib
import queue
import random
import re
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
_CALM_MINUTES = flags.DEFINE_float("calm_minutes", 0.0, "Train for so long without a fault, with all cores loaded.")
_RECOVERIES = flags.DEFINE_integer("recoveries", 0, "How often to kill a client of a run that is then restarted.")

CLIENT = str(pathlib.Path(__file__).with_name("fault_client.py"))
STEP_TIMEOUT = 8
REGISTRATION_TIMEOUT = 6
# A client that died ends all others within this, in seconds.
DEATH_LIMIT = 15
# A stuck one within its timeout and this.
MARGIN = 10


class Run:
    """A launched run that is being watched.

    Attributes:
        lines: What its launchers have written so far.
        pids: The process ids of its clients, by client, of the last start.
        ports: The ports of its launchers and clients.
    """

    def __init__(self, *command: str, environment: dict[str, str] | None = None):
        self.lines: list[str] = []
        self.pids: dict[int, int] = {}
        self.all_pids: set[int] = set()
        self.ports: set[int] = set()
        self._new: queue.Queue[str] = queue.Queue()
        self.launchers: list[subprocess.Popen] = []
        self._readers: list[threading.Thread] = []
        self.launch(*command, environment=environment)

    def launch(self, *command: str, environment: dict[str, str] | None = None) -> None:
        """Starts a launcher."""
        launcher = subprocess.Popen(
            [sys.executable, "-m", "tfshard", "launch", *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **(environment or {})},
        )  # fmt: skip
        self.launchers.append(launcher)
        reader = threading.Thread(target=self._read, args=(launcher,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, launcher: subprocess.Popen) -> None:
        assert launcher.stdout is not None
        with launcher.stdout:
            for line in launcher.stdout:
                self._new.put(line.rstrip("\n"))

    def _take(self, timeout: float) -> str | None:
        try:
            line = self._new.get(timeout=timeout)
        except queue.Empty:
            return None
        self.lines.append(line)
        match = re.match(r"\[client +(\d+)\] pid (\d+)", line)
        if match:
            self.pids[int(match.group(1))] = int(match.group(2))
            self.all_pids.add(int(match.group(2)))
        if re.search(r" step [12] ", line):
            for pid in (*self.pids.values(), *(launcher.pid for launcher in self.launchers)):
                self.ports |= listening_ports(pid)
        return line

    def wait_for(self, text: str, timeout: float = 240.0) -> None:
        """Until a line matches, on all clients if it says so with `CLIENT`."""
        patterns = [text.replace("CLIENT", rf"\[client +{c}\]") for c in range(16)] if "CLIENT" in text else [text]
        needed = {p for p in patterns[: max(1, len(self.pids))]}
        deadline = time.monotonic() + timeout
        while needed:
            line = self._take(max(0.0, deadline - time.monotonic()))
            if line is None:
                raise AssertionError(f"There was no '{text}' within {timeout} s:\n{self.text}")
            needed = {pattern for pattern in needed if not re.search(pattern, line)}

    def wait(self, timeout: float) -> float:
        """Until all launchers have ended; returns the seconds it took."""
        begin = time.monotonic()
        for launcher in self.launchers:
            if is_stopped(launcher.pid):
                continue
            try:
                launcher.wait(max(0.0, timeout - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                self.drain()
                raise AssertionError(f"The run had not ended after {timeout} s:\n{self.text}") from None
        took = time.monotonic() - begin
        self.drain()
        return took

    def drain(self) -> None:
        """Takes the lines that are still on their way."""
        while self._take(0.5) is not None:
            pass

    def close(self) -> None:
        """Ends whatever is left."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        for pid in filter(is_client, self.all_pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(5.0)

    @property
    def text(self) -> str:
        return "\n".join(self.lines[-60:])

    def check_nothing_is_left(self) -> None:
        """No process of the run lives and none of its ports is held."""
        alive = [pid for pid in self.all_pids if is_client(pid)]
        assert not alive, f"Processes {alive} are left:\n{self.text}"
        for port in self.ports:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("", port))


def is_client(pid: int) -> bool:
    """Whether a process is a client of this program that has not ended; ids are given to others after that."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return CLIENT in file.read() and _state(pid) != "Z"
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    try:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return set()
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            rows = [line.split() for line in file.readlines()[1:]]
            ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}
    return ports


@contextlib.contextmanager
def running(*command: str, environment: dict[str, str] | None = None) -> Iterator[Run]:
    """A run, of which nothing is left afterwards."""
    run = Run(*command, environment=environment)
    try:
        yield run
    finally:
        run.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and what has to follow.

    Attributes:
        flags: Of the client.
        launch_flags: Of the launcher.
        bring_about: What is done to the run from outside; it returns when the fault has happened.
        limit: Within how many seconds everything has ended.
        cause: What the launcher's message has to match; `N` is the number of the client.
        code: The exit code, of the first host's launcher.
        hosts: How many launchers there are, each of which stands for a host.
    """

    cause: str
    flags: tuple[str, ...] = ()
    launch_flags: tuple[str, ...] = ()
    bring_about: Callable[[Run], None] = lambda run: run.wait_for("CLIENT pid")
    limit: float = DEATH_LIMIT
    code: int = 1
    hosts: int = 1


def _in_training(run: Run) -> None:
    run.wait_for("CLIENT pid")
    run.wait_for(f"CLIENT step {random.randint(2, 30)} ")
    time.sleep(random.random() * 0.2)


def _signal_client(client: int, number: int) -> Callable[[Run], None]:
    def bring_about(run: Run) -> None:
        _in_training(run)
        os.kill(run.pids[client], number)

    return bring_about


def _kill_launcher(run: Run) -> None:
    _in_training(run)
    run.launchers[0].kill()


def _interrupt_launcher(run: Run) -> None:
    _in_training(run)
    run.launchers[0].send_signal(signal.SIGTERM)


def _after_step_5(run: Run) -> None:
    run.wait_for("CLIENT pid")
    run.wait_for(r"\[client 1\] step 5 ")


def _registered(run: Run) -> None:
    run.wait_for("CLIENT pid")


def _signal_launcher(host: int, number: int) -> Callable[[Run], None]:
    def bring_about(run: Run) -> None:
        _in_training(run)
        run.launchers[host].send_signal(number)

    return bring_about


_TAKEN = socket.socket()


def _taken_port() -> int:
    """A port on which this process listens."""
    if not _TAKEN.getsockname()[1]:
        _TAKEN.bind(("", 0))
        _TAKEN.listen()
    return _TAKEN.getsockname()[1]


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
        ),
        "client_port": Fault(
            launch_flags=("--client_port=TAKEN",),
            cause=r"Client 0 cannot have port \d+ for its TensorFlow server: Address already in use",
            limit=_IMPORTS + DEATH_LIMIT,
        ),
        "duplicate": Fault(
            flags=("--fault=duplicate",),
            cause=r"Two processes call themselves client \d+: process \d+ on .* and process \d+ on",
            limit=_IMPORTS + DEATH_LIMIT,
        ),
        "never": Fault(
            flags=("--fault=never",),
            cause=rf"Clients \(1,\) did not call tfshard.initialize\(\) within {REGISTRATION_TIMEOUT} s after",
            limit=_IMPORTS + REGISTRATION_TIMEOUT + MARGIN,
        ),
        "gone": Fault(
            flags=("--fault=gone",),
            cause=r"Client 1 ended with exit code 7, before it called tfshard.initialize\(\)",
            limit=_IMPORTS + DEATH_LIMIT,
            code=7,
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
            cause=r"Client 1 was killed by signal 11 \(SIGSEGV\) after training step 5",
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
        "kill_launcher": Fault(bring_about=_kill_launcher, cause="", code=-9),
        "interrupt": Fault(bring_about=_interrupt_launcher, cause="Ended by SIGTERM", code=143),
    }


def run_fault(fault: Fault, num_processes: int, *flags_: str) -> float:
    """Brings a fault about and checks what follows; returns the seconds from the fault to the end."""
    taken = str(_taken_port()) if any("TAKEN" in flag for flag in fault.launch_flags) else ""
    launch_flags = [flag.replace("TAKEN", taken) for flag in fault.launch_flags]
    command = [
        f"--step_timeout={STEP_TIMEOUT}", f"--registration_timeout={REGISTRATION_TIMEOUT}", *launch_flags,
    ]  # fmt: skip
    environment = {"TFSHARD_SECRET": os.urandom(32).hex()}
    if fault.hosts == 1:
        command.append(f"--num_processes={num_processes}")
    else:
        names = ",".join(f"127.0.0.{host + 1}" for host in range(fault.hosts))
        command += [f"--hosts={names}", f"--port={free_port()}"]
    program = [CLIENT, *fault.flags, *flags_]
    first = [*command, *(["--host_index=0"] if fault.hosts > 1 else []), *program]
    with running(*first, environment=environment) as run:
        for host in range(1, fault.hosts):
            run.launch(*command, f"--host_index={host}", *program, environment=environment)
        fault.bring_about(run)
        took = run.wait(fault.limit)
        end = time.monotonic() + DEATH_LIMIT
        while any(is_client(pid) for pid in run.all_pids) and time.monotonic() < end:
            time.sleep(0.1)
        run.check_nothing_is_left()
        assert run.launchers[0].returncode == fault.code, (run.launchers[0].returncode, run.text)
        said = " ".join(line for line in run.lines if not re.match(r"\[client", line))
        assert re.search(fault.cause, said), f"The cause is not named ({fault.cause}):\n{run.text}"
    return took


def run_calm(minutes: float, num_processes: int) -> None:
    """Trains with all cores loaded; nothing may be taken for a fault."""
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with running(
            f"--num_processes={num_processes}", f"--step_timeout={STEP_TIMEOUT}",
            f"--registration_timeout={REGISTRATION_TIMEOUT * 10}", CLIENT,
        ) as run:  # fmt: skip
            run.wait_for("step 1 ")
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                run._take(1.0)
                assert run.launchers[0].poll() is None, run.text
            run.launchers[0].send_signal(signal.SIGTERM)
            run.wait(DEATH_LIMIT)
            run.check_nothing_is_left()
            print(f"calm: {minutes} min, last line: {[line for line in run.lines if ' step ' in line][-1]}")
    finally:
        for process in load:
            process.kill()
            process.wait()


def run_recovery(num_processes: int) -> tuple[float, int]:
    """Kills a client; returns the seconds until the next step after the restart, and how many steps are done again."""
    every_steps = 5
    with tempfile.TemporaryDirectory() as state:
        command = [f"--num_processes={num_processes}", "--max_restarts=1", CLIENT, f"--state={state}"]
        with running(*command, f"--every_steps={every_steps}", "--async_save") as run:
            _in_training(run)
            os.kill(run.pids[1], signal.SIGKILL)
            begin = time.monotonic()
            run.wait_for("restart 1 of 1")
            before = run.text
            run.wait_for(r"\[client 0\] resumes after step ")
            resumed = re.search(r"resumes after step (\w+)", run.lines[-1])
            run.wait_for(r"\[client 0\] step ")
            took = time.monotonic() - begin
            run.launchers[0].send_signal(signal.SIGTERM)
            run.wait(DEATH_LIMIT)
            run.check_nothing_is_left()
    assert resumed is not None
    done = max(int(step) for step in re.findall(r"\[client 0\] step (\d+) ", before))
    again = done - (int(resumed.group(1)) if resumed.group(1) != "None" else 0)
    assert 0 <= again <= 2 * every_steps, (done, resumed.group(0))
    return took, again


def main(argv: list[str]) -> None:
    del argv
    if _RECOVERIES.value:
        found = [run_recovery(_NUM_PROCESSES.value) for _ in range(_RECOVERIES.value)]
        text = ", ".join(f"{seconds:.1f} s ({again} steps again)" for seconds, again in found)
        print(f"recovery, from the kill to the next step: {text}")
        return
    if _CALM_MINUTES.value:
        run_calm(_CALM_MINUTES.value, _NUM_PROCESSES.value)
        return
    failed = 0
    for name, fault in faults(_NUM_PROCESSES.value).items():
        if _ONLY.value and name not in _ONLY.value:
            continue
        times = []
        for _ in range(_RUNS.value):
            try:
                times.append(run_fault(fault, _NUM_PROCESSES.value))
            except AssertionError as error:
                failed += 1
                print(f"{name}: FAILED: {error}", flush=True)
        limits = f"limit {fault.limit:.0f}"
        print(f"{name}: {len(times)} of {_RUNS.value} ended well, in seconds: "
              f"{', '.join(f'{t:.1f}' for t in times)} ({limits})", flush=True)  # fmt: skip
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory():
        app.run(main)
