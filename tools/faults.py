"""Cause faults in launched runs, and check that each ends all processes in time, with an error that names the fault.

    python -m tools.faults                              # each fault three times, on two clients
    python -m tools.faults --runs=20
    python -m tools.faults --only=kill_1,stop --num_processes=4
    python -m tools.faults --bare                       # clients without TensorFlow: seconds for all of them
    python -m tools.faults --calm_minutes=10            # no fault, both cores loaded: no false alarm
    python -m tools.faults --recoveries=5               # a kill, and the time until training continues

A time goes from the fault to the end of the last process of the run, launchers and clients. After that, no process
holds any of the run's ports. Random moments come from `--seed`, which is printed. Run nothing else at the same time on
a small machine: the limits are seconds of wall time.
"""

import collections
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from tools.fault_runs.table import DEATH_LIMIT, REGISTRATION_TIMEOUT, STEP_TIMEOUT, faults, in_training
from tools.fault_runs.watched import BARE_CLIENT, BARE_LAUNCH, CLIENT, LAUNCH, Run, free_port, running

_RUNS = flags.DEFINE_integer("runs", 3, "How many times to run each fault.", 1)
_ONLY = flags.DEFINE_list("only", [], "Names of the faults to run; by default all.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 2, "Number of clients.", 2)
_BARE = flags.DEFINE_boolean("bare", False, "Run launchers and clients without TensorFlow.")
_SEED = flags.DEFINE_string("seed", None, "Seed of the random moments. By default a new seed in each run.")
_CALM_MINUTES = flags.DEFINE_float(
    "calm_minutes", 0.0, "Train for this number of minutes without a fault, with all cores loaded."
)
_RECOVERIES = flags.DEFINE_integer("recoveries", 0, "How many times to kill a client of a run that is then restarted.")


def run_fault(name: str, num_processes: int, *, seed: str, bare: bool = False) -> float:
    """Cause a fault, and check the result.

    Args:
        name: The name of the fault.
        num_processes: The number of clients on a single host. With several hosts, each host has one client.
        seed: The seed of random moments.
        bare: True for launchers and clients without TensorFlow.

    Returns:
        The seconds from the fault to the end of the run's last process.

    Raises:
        AssertionError: The result is not as expected.
    """
    fault = faults(num_processes)[name]
    assert fault.bare or not bare, f"The fault {name} needs TensorFlow."
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
    """Train with all cores loaded. Nothing may be taken for a fault, and all clients must continue and end together."""
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
    """Check that all clients did the same steps without a pause or a launcher message, and print their rate."""
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
    """Kill a client. Returns the seconds until the next step after the restart, and the number of repeated steps."""
    every_steps = 5
    with tempfile.TemporaryDirectory() as state:
        command = [f"--num_processes={num_processes}", "--max_restarts=1", CLIENT, f"--state={state}"]
        command += [f"--every_steps={every_steps}", "--async_save"]
        with running(*command, num_clients=num_processes, seed=seed) as run:
            in_training(run)
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
