"""Starts launched runs for tests, and finds what their clients said."""

import json
import os
import pathlib
import subprocess
import sys

from tools.fault_runs import watched

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent


def run(*command: str, timeout: float = 900) -> subprocess.CompletedProcess:
    """A process of Python, to its end."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
    )


def launch(*arguments: str, bare: bool = True) -> subprocess.CompletedProcess:
    """A launched run, to its end.

    Args:
        arguments: Of `tfshard launch`.
        bare: By the same launcher in a process that does not import TensorFlow, which it does not need; else by the
            command line, which takes more flags.
    """
    command = watched.BARE_LAUNCH if bare else watched.LAUNCH
    return run(*command[1:], *arguments)


def said(done: subprocess.CompletedProcess, word: str) -> list[str]:
    """What stands behind a word, in each line that has it."""
    return [line.partition(word)[2].strip() for line in done.stdout.splitlines() if word in line]


def found(done: subprocess.CompletedProcess, num_clients: int) -> list[dict]:
    """The `FOUND` lines of each client, by name."""
    clients = [said(done, f"[client {client}] FOUND ") for client in range(num_clients)]
    return [dict(json.loads(line) for line in lines) for lines in clients]
