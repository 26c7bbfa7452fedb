"""List the faults of launched runs, with the cause and the expected result of each fault."""

import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable

from tools.fault_runs.watched import Run

STEP_TIMEOUT = 8
REGISTRATION_TIMEOUT = 6
# After a client died, all other clients end within this many seconds.
DEATH_LIMIT = 15
# A stuck client ends within its timeout plus this many seconds.
MARGIN = 10
# The time from the start of Python to tfshard.initialize(), which imports TensorFlow.
_IMPORTS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and its expected result.

    Attributes:
        cause: A pattern that the launcher's message matches.
        flags: The flags of the client.
        launch_flags: The flags of the launcher.
        bring_about: Acts on the run from outside, and returns after the fault has happened.
        limit: The number of seconds within which all processes end.
        code: The exit code of the first host's launcher.
        hosts: The number of launchers. Each launcher stands for a host.
        servers: True if the clients' servers are up before the fault. Then their ports must be known, too.
        listens: True if the launcher listens before the fault.
        check: Checks the run at the end.
        bare: True if the fault can happen to clients without TensorFlow.
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


def in_training(run: Run) -> None:
    run.wait_for("CLIENT pid")
    run.wait_for(f"CLIENT step {run.random.randint(2, 30)} ")
    time.sleep(run.random.random() * 0.2)


def _has_begun(run: Run) -> None:
    """Wait for the first client. A fault during the start may end a client before it prints anything."""
    run.wait_for(r"\[client +\d+\] pid")


def _signal_client(client: int, number: int) -> Callable[[Run], None]:
    def bring_about(run: Run) -> None:
        in_training(run)
        os.kill(run.pids[client], number)

    return bring_about


def _signal_launcher(host: int, number: int) -> Callable[[Run], None]:
    def bring_about(run: Run) -> None:
        in_training(run)
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
    """Return a check for a kill in the save after step 4: the run resumes from the last commit, one of `steps`."""

    def check(run: Run) -> None:
        resumed = [re.search(r"resumes after step (\w+)", line) for line in run.lines if "[client 0] resumes" in line]
        first, step = (match[1] for match in resumed if match)
        assert first == "None" and int(step) in steps, run.text
        found = run.steps(0)
        assert [number for number, _, _ in found] == [1, 2, 3, 4, *range(int(step) + 1, 7)], run.text
        # A repeated step has the same loss to the last digit.
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
        # The run restarts, and trains to the end.
        limit=2 * _IMPORTS + DEATH_LIMIT,
        code=0,
        check=_goes_on_from(*resumes),
        bare=False,
    )  # fmt: skip


def faults(num_processes: int) -> dict[str, Fault]:
    """Return all faults by name."""
    found = {}
    for client in range(num_processes):
        found[f"kill_{client}"] = Fault(
            bring_about=_signal_client(client, signal.SIGKILL),
            cause=rf"Client {client} was killed by signal 9 \(SIGKILL\) (in|after) training step \d+",
            code=137,
        )
    for client in (0, num_processes - 1):
        found[f"hybrid_kill_{client}"] = Fault(
            flags=(f"--replicas={num_processes}",),
            launch_flags=("--devices_per_process=2",),
            bring_about=_signal_client(client, signal.SIGKILL),
            cause=rf"Client {client} was killed by signal 9 \(SIGKILL\) (in|after) training step \d+",
            code=137,
            bare=False,
        )
        found[f"pipeline_kill_{client}"] = Fault(
            flags=("--pipeline=2",),
            launch_flags=("--devices_per_process=2",),
            bring_about=_signal_client(client, signal.SIGKILL),
            cause=rf"Client {client} was killed by signal 9 \(SIGKILL\) (in|after) training step \d+",
            code=137,
            bare=False,
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
        # The other client may commit the checkpoint.
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
            cause=r"Clients \(1,\) did not reach training step 6 within \d+ s: stuck.*after training step 5",
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
            bring_about=_has_begun,
            cause=r"Client \d cannot use port \d+ for its TensorFlow server: Address already in use",
            limit=_IMPORTS + DEATH_LIMIT,
            servers=False,
        ),
        "duplicate": Fault(
            flags=("--fault=duplicate",),
            bring_about=_has_begun,
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
            bring_about=_has_begun,
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
            cause=r"reached .* while client \d was in .*every client must do the same operations in the same order",
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
            cause="The launcher of host 0 closed its connection: this launcher stops all clients of its host",
            code=-9,
        ),
        "kill_launcher": Fault(bring_about=_signal_launcher(0, signal.SIGKILL), cause="", code=-9),
        # Only the kernel ends a client that has not joined.
        "kill_launcher_early": Fault(
            flags=("--fault=never",), bring_about=_kill_launcher_early, cause="", code=-9, servers=False,
        ),
        "interrupt": Fault(
            bring_about=_signal_launcher(0, signal.SIGTERM), cause="Ended by SIGTERM", code=143,
        ),
    }  # fmt: skip
