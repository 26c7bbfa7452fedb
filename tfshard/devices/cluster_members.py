"""Join the run of a cluster that started this process itself, without `tfshard launch`.

The process of member 0 starts the coordinator, a process without TensorFlow (launch/coordinator.py), which watches the
clients by their connections and heartbeats. The others connect to it. When a client is gone or stuck, the coordinator
tells the others, which end.
"""

import json
import os
import pathlib
import subprocess
import sys

from tfshard.clusters import ClusterRun
from tfshard.clusters.run_secret import LEAST_CHARACTERS, read_secret
from tfshard.command_line import TIMEOUTS
from tfshard.devices import clients, visible_gpus
from tfshard.devices.enrolment import enrolled_secret
from tfshard.devices.gpus import VISIBLE
from tfshard.errors import InitializationError

_COORDINATOR = pathlib.Path(__file__).parents[1] / "launch" / "coordinator_process.py"
# The coordinator of this process's run. It ends after the last client.
_started: list[subprocess.Popen[str]] = []


def join(run: ClusterRun) -> clients.Launched:
    """Connect this process to the coordinator of its run.

    Args:
        run: The run that the cluster started this process for.

    Raises:
        InitializationError: The secret is too short, a TFSHARD variable has no number, or the coordinator cannot start.
        LaunchError: The coordinator cannot be reached, or refuses this member.
    """
    startup = _seconds("startup_timeout")
    secret = read_secret(None)
    if secret is not None and len(secret) < LEAST_CHARACTERS:
        raise InitializationError(
            f"The secret of a run must have at least {LEAST_CHARACTERS} characters. Make one for each run: "
            f"openssl rand -hex 32. Received: {len(secret)} characters"
        )
    control = f"[{run.coordinator}]:{run.port}" if ":" in run.coordinator else f"{run.coordinator}:{run.port}"
    if run.index == 0:
        control, secret = _start_coordinator(run, secret, startup)
    elif secret is None:
        secret = enrolled_secret(control, run.index, run.identity, startup)
    port = _number("TFSHARD_CLIENT_PORT") or 0
    settings = clients.Settings(
        client_id=run.index,
        num_clients=run.num_members,
        local_index=run.local_index,
        num_local=run.num_local,
        restart=0,
        control=control,
        secret=secret,
        address="",
        devices_per_process=devices_per_process(),
        client_port=port + run.local_index if port else 0,
        first_step_timeout=_seconds("first_step_timeout"),
        seed=0,
    )
    client = clients.join(settings, wait=startup)
    # As in a client of a launcher. Child processes are no members.
    variables = settings.to_environment()
    del variables["TFSHARD_CONTROL"], variables["TFSHARD_SECRET"], variables["TFSHARD_SEED"]
    os.environ.update({**variables, clients.PID_VARIABLE: str(os.getpid())})
    return client


def devices_per_process() -> int | None:
    """Return TFSHARD_DEVICES_PER_PROCESS, or None if it is not set."""
    return _number("TFSHARD_DEVICES_PER_PROCESS")


def choose_gpus(run: ClusterRun) -> None:
    """Give this process GPUs of its own among the members on its machine. Call this before TensorFlow sees them.

    A CUDA_VISIBLE_DEVICES that the cluster sets for this process alone stays.
    """
    if run.num_local == 1 or (VISIBLE in os.environ and run.has_own_gpus):
        return
    os.environ.update(visible_gpus.divided(run.num_local, devices_per_process())[run.local_index])


def warn_of_hash_seed(run: ClusterRun) -> None:
    """Say that sets of names may have another order on each client, where Python's hashes are random."""
    if run.index == 0 and sys.flags.hash_randomization and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        print(
            "tfshard: set PYTHONHASHSEED=0 in the environment of all processes. Without it, code that iterates over a "
            "set of names does so in another order on each client, and clients must do the same steps in one order.",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _start_coordinator(run: ClusterRun, secret: str | None, startup: float) -> tuple[str, str]:
    """Start the coordinator's process. Returns the address of the control channel, and the run's secret."""
    options = {
        "host": run.coordinator,
        "port": run.port,
        "secret": secret,
        "num_clients": run.num_members,
        "identity": run.identity,
        "allow_public_address": os.environ.get("TFSHARD_ALLOW_PUBLIC_ADDRESS") == "1",
        # Members may start minutes apart.
        "timeouts": {
            "startup_timeout": startup,
            "registration_timeout": startup,
            "step_timeout": _seconds("step_timeout"),
        },
    }
    process = subprocess.Popen(
        [sys.executable, str(_COORDINATOR)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        # A ^C at the terminal reaches the clients, which tell the coordinator.
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(json.dumps(options))
        process.stdin.close()
        answer = json.loads(process.stdout.readline() or "{}")
    if "address" not in answer:
        process.wait()
        raise InitializationError(
            f"The coordinator of the run cannot start. {answer.get('error', 'Its process ended.')} "
            f"({run.system} names {run.coordinator}:{run.port}; TFSHARD_COORDINATOR=HOST:PORT on all members chooses "
            "another address or port.)"
        )
    _started.append(process)
    return answer["address"], answer["secret"]


def _seconds(name: str) -> float:
    variable = f"TFSHARD_{name.upper()}"
    text = os.environ.get(variable)
    try:
        value = TIMEOUTS[name] if text is None else float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise InitializationError(f"{variable} must be a positive number of seconds. Received: {text!r}")
    return value


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise InitializationError(f"{variable} must be a positive integer. Received: {text!r}")
    return int(text) if text else None
