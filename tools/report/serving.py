"""Connect a process that trains with the process that asks it. Each question is a line, each answer a line of JSON.

The training process only works when it is asked, which lets two such processes alternate.
"""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

_TIMEOUT_SECONDS = 1800
_END_SECONDS = 20


class FailedError(Exception):
    """The process ended or timed out. The message is its last line of output that tells why."""


def serve(answers: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
    """Answer questions until the input ends. All other output goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(dict(answers[line.strip()]())), file=out, flush=True)


class Process:
    """A process that `serve`s until the context ends."""

    def __init__(self, command: list[str], environment: Mapping[str, str]):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=dict(environment),
        )

    def ask(self, question: str) -> dict[str, Any]:
        """Return the answer of the process.

        Raises:
            FailedError: The process ended or timed out.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(question, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise FailedError(self._last_words()) from None
        if not select.select([self._process.stdout], [], [], _TIMEOUT_SECONDS)[0]:
            raise FailedError(f"not done in {_TIMEOUT_SECONDS} s")
        answer = self._process.stdout.readline()
        if not answer:
            raise FailedError(self._last_words())
        found: dict[str, Any] = json.loads(answer)
        return found

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or ["it said nothing"]
        errors = [line for line in said if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        return (errors or said)[-1]

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
