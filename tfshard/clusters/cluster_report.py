"""What `tfshard doctor --cluster` prints: the variables, the choice, addresses and ports. Starts no device."""

import contextlib
import functools
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping

from tfshard.clusters import finding, run_secret, variables
from tfshard.clusters.cluster_run import ClusterRun
from tfshard.errors import ShardingError

_SECONDS = 3.0


def report(environment: Mapping[str, str] | None = None, seconds: float = _SECONDS) -> tuple[list[str], int]:
    """Return the lines of the report, and the exit code: 1 if no run can start with these variables.

    Args:
        environment: The environment variables. By default those of this process.
        seconds: The longest time for a name or a connection.
    """
    environment = os.environ if environment is None else environment
    lines: list[str] = []
    try:
        found = finding.findings(environment)
    except ShardingError as error:
        return [f"error        {error}"], 1
    for each in found:
        if each.state == "not set":
            given = variables.present(environment, each.system.names)
            left = f" (set: {', '.join(given)})" if given else ""
            lines.append(f"{each.system.name:12} not set{left}")
            continue
        run = each.run
        says = f"member {run.index} of {run.num_members}" if run is not None else "cannot be read"
        names = run.variables if run is not None else variables.present(environment, each.system.names)
        lines.append(f"{each.system.name:12} {says}, by {', '.join(names)}: {each.state}")
        if each.error and each.state != "chosen":
            lines.append(f"{'':12} {each.error}")
    chosen = next((each for each in found if each.state == "chosen"), None)
    if chosen is None:
        return [*lines, "run          none: this process runs alone"], 0
    if chosen.error or chosen.run is None:
        return [*lines, f"error        {chosen.error}"], 1
    if chosen.run.num_members == 1:
        return [*lines, f"run          one member ({chosen.system.title}): this process runs alone"], 0
    more, code = _describe(chosen.run, environment, seconds)
    return lines + more, code


def _describe(run: ClusterRun, environment: Mapping[str, str], seconds: float) -> tuple[list[str], int]:
    lines = [
        f"run          {run.system}: member {run.index} of {run.num_members} (counted from 0), on this machine member "
        f"{run.local_index} of {run.num_local}",
        f"coordinator  {run.coordinator}:{run.port}",
        *(f"note         {note}" for note in run.notes),
    ]
    code = 0
    try:
        secret = run_secret.read_secret(None, environment)
    except ShardingError as error:
        lines, code, secret = [*lines, f"error        {error}"], 1, ""
    if secret is None:
        lines.append("secret       none: the coordinator sends each member one, encrypted (tfshard docs security)")
    elif secret:
        lines.append(f"secret       {len(secret)} characters")
        if len(secret) < run_secret.LEAST_CHARACTERS:
            lines.append(f"error        The secret needs at least {run_secret.LEAST_CHARACTERS} characters.")
            code = 1
    for name in dict.fromkeys((run.coordinator, *run.addresses)):
        answer = _within(seconds, functools.partial(_resolved, name))
        lines.append(f"address      {name}: {answer or f'no answer within {seconds:.0f} s'}")
        code = code if answer and not answer.startswith("FAILED") else 1
    state = _within(seconds + 1, lambda: _reached(run, seconds))
    lines.append(f"port         {run.coordinator}:{run.port}: {state or f'no answer within {seconds:.0f} s'}")
    return lines, code if state and not state.startswith("FAILED") else 1


def _within(seconds: float, ask: Callable[[], str]) -> str | None:
    """Return an answer, or None if it takes longer. Asking for a name has no limit of its own."""
    answers: queue.Queue[str] = queue.Queue()
    # Not a thread pool: Python would wait for its thread at the end of the program.
    threading.Thread(target=lambda: answers.put(ask()), name="tfshard-report", daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return None


def _resolved(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except UnicodeError:
        return "FAILED: this is no name of a machine"
    except OSError as error:
        return f"FAILED: {error.strerror or error}"
    return ", ".join(dict.fromkeys(str(each[4][0]) for each in found))


def _reached(run: ClusterRun, seconds: float) -> str:
    try:
        with contextlib.closing(socket.create_connection((run.coordinator, run.port), timeout=seconds)):
            return "a program listens there: the coordinator of this run, or of another one"
    except ConnectionRefusedError:
        pass
    except UnicodeError:
        return "FAILED: this is no name of a machine"
    except OSError as error:
        return f"FAILED: {error.strerror or error}. A firewall or network policy may be in the way"
    if run.index:
        return "reached. Nothing listens yet: the coordinator does once member 0 runs"
    try:
        family, _, _, _, address = socket.getaddrinfo(run.coordinator, run.port, proto=socket.IPPROTO_TCP)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        return f"FAILED: this member is the coordinator, and cannot listen there: {error.strerror}"
    return "free. This member is the coordinator, and can listen there"
