"""The outcome of a check, from its log, its exit code, its output and its stacks."""

import dataclasses
import enum
import pathlib
import re
from typing import Any

from tfshard.doctor import failing_steps
from tfshard.doctor.check_list import PlannedCheck
from tfshard.doctor.check_log import CheckLog
from tfshard.doctor.check_process import stacks_file

OUTPUT_FILE = "output.txt"
_TAIL_LINES = 40
# The beginning of what faulthandler writes at the time limit.
_AT_LIMIT = "Timeout ("
# Messages that report a hanging client.
_STUCK = re.compile(r"^(?:tfshard launch: |.*ClientError: )(.*(?:: stuck|is stuck|did not come).*)$", re.MULTILINE)
_LAUNCHER = re.compile(r"^tfshard launch: (.*)$", re.MULTILINE)
_SKIPPED = re.compile(rf"{re.escape(failing_steps.SKIPPED)}.*")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class CheckState(enum.Enum):
    """How a check ended."""

    OK = "ok"
    FAULT = "FAULT"  # It found a fault.
    FAILED = "FAILED"  # Its processes failed.
    HUNG = "HUNG"
    ELSEWHERE = "on other hosts"
    SKIPPED = "skipped"  # These devices cannot run it.
    INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a check.

    Attributes:
        check: The check.
        state: How the check ended.
        seconds: How long the check took.
        log: The log of the check.
        faults: One text for each fault.
        stacks: The stacks that clients of this host wrote, by client, if the check did not end well.
        output: The end of the output, if the check did not end well.
    """

    check: PlannedCheck
    state: CheckState
    seconds: float = 0.0
    log: CheckLog = dataclasses.field(default_factory=CheckLog)
    faults: tuple[str, ...] = ()
    stacks: dict[int, str] = dataclasses.field(default_factory=dict)
    output: str = ""

    @property
    def is_bad(self) -> bool:
        """True if something is wrong, or the check did not end."""
        return self.state not in (CheckState.OK, CheckState.ELSEWHERE, CheckState.SKIPPED)

    def line(self) -> str:
        """Return the outcome as one line."""
        text = self.faults[0].partition("\n")[0] if self.faults else self.log.headline
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return f"{self.check.name:28} {self.state.value:14} {self.seconds:5.0f} s  {text}{more}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        return {
            "check": self.check.name,
            "title": self.check.title,
            "state": self.state.value,
            "seconds": round(self.seconds, 1),
            **self.log.to_dict(),
            "faults": list(self.faults),
            "stacks": {str(client): text for client, text in self.stacks.items()},
            "output": self.output,
        }


def outcome_of(check: PlannedCheck, folder: pathlib.Path, code: int | None, seconds: float, clients: int) -> Outcome:
    """Return the outcome of a check after its processes have ended.

    Args:
        check: The check.
        folder: The folder of the check.
        code: The exit code. None if this process ended the check at its time limit.
        seconds: How long the check took.
        clients: The number of clients in the run.
    """
    log, output = CheckLog.read(folder), _text(folder / OUTPUT_FILE)
    stacks = {client: text for client in range(clients) if (text := _text(folder / stacks_file(client)))}
    stuck = [match.strip() for match in _STUCK.findall(output)]
    if code is None or stuck or any(_AT_LIMIT in text for text in stacks.values()):
        return Outcome(
            check=check, state=CheckState.HUNG, seconds=seconds, log=log, stacks=stacks, output=_tail(output),
            faults=(*log.faults, *_hung(check, stuck, stacks)),
        )  # fmt: skip
    faults = list(log.faults)
    if check.ends_with and code == 0 and (skipped := _SKIPPED.search(output)):
        log.summarize(skipped[0])
        return Outcome(check=check, state=CheckState.SKIPPED, seconds=seconds, log=log)
    # A launched run of one client goes on after a failed step, and logs the next step.
    ends_with = check.ends_with if clients > 1 else None
    if ends_with:
        if code == 0:
            faults.append(f"The step did not end the run: {check.title}.")
        elif not _has_error(output, *ends_with):
            faults.append(f"The run ended with another error than {_error_text(check)}: {check.title}.")
    elif code:
        said = [*_LAUNCHER.findall(output), *output.strip().splitlines()[-1:]]
        faults.append(f"The check ended with exit code {code}. {said[0] if said else ''}".strip())
        return Outcome(
            check=check, state=CheckState.FAILED, seconds=seconds, log=log, faults=tuple(faults), stacks=stacks,
            output=_tail(output),
        )  # fmt: skip
    if ends_with and not faults:
        log.summarize(f"the run ended within {seconds:.0f} s: {_error_text(check)}")
    state = CheckState.FAULT if faults else CheckState.OK
    return Outcome(
        check=check, state=state, seconds=seconds, log=log, faults=tuple(faults), output=_tail(output) if faults else ""
    )


def _has_error(output: str, error: str, words: str) -> bool:
    """Return whether the output has an error of this type with these words in its message."""
    return bool(re.search(rf"\b{re.escape(error)}: .*{re.escape(words)}", output, re.DOTALL))


def _error_text(check: PlannedCheck) -> str:
    return "{}: '... {} ...'".format(*check.ends_with or ("", ""))


def _hung(check: PlannedCheck, stuck: list[str], stacks: dict[int, str]) -> list[str]:
    """Say who hung and where."""
    said = stuck[:1] or [f"{check.name} did not end within its time limit."]
    return said + [f"Client {client} was at {frame}." for client, text in stacks.items() if (frame := _where(text))]


def _where(stacks: str) -> str:
    """Return the innermost frame of the main thread, which faulthandler writes last."""
    last = stacks.strip().split("\n\n")[-1]
    found = _FRAME.search(last)
    return f'"{found[1]}", line {found[2]}, in {found[3]}' if found else ""


def _text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_TAIL_LINES:])
