"""A process that trains, and the one that asks it: each question is a line, each answer a line of JSON.

The process answers nothing that it is not asked, so that two of them can train in turn.
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
    """The process ended, or took too long; with the last line that it said of why."""


def serve(answers: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
    """Answers questions until there are no more. What else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(dict(answers[line.strip()]())), file=out, flush=True)


class Process:
    """A process that `serve`s, for as long as the context lasts."""

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
        """Its answer.

        Raises:
            FailedError: It has none.
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
