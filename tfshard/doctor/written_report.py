"""Write the outcomes of all checks to a folder, as Markdown and as JSON."""

import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfshard.doctor.check_list import PlannedCheck
from tfshard.doctor.check_log import Cell
from tfshard.doctor.environment import versions
from tfshard.doctor.outcome import Outcome

MARKDOWN, JSON = "report.md", "report.json"


class DoctorReport:
    """The report of a run. Its files are up to date after each check.

    Attributes:
        outcomes: The outcomes so far.
    """

    def __init__(self, folder: pathlib.Path, command: str):
        """Begin a report.

        Args:
            folder: The folder, which exists.
            command: The command line of the run.
        """
        self.outcomes: list[Outcome] = []
        self._folder = folder
        self._head = {"command": command, "begun": time.strftime("%Y-%m-%d %H:%M:%S %z"), **versions()}
        self._waiting: list[PlannedCheck] = []

    def expect(self, checks: Sequence[PlannedCheck]) -> None:
        """Note the checks that are still to run."""
        self._waiting = list(checks)
        self._write()

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of a check."""
        self.outcomes.append(outcome)
        self._waiting = [each for each in self._waiting if each.name != outcome.check.name]
        self._write()

    def summary(self) -> str:
        """Return one line for each check."""
        return "\n".join(each.line() for each in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            **self._head,
            "checks": [each.to_dict() for each in self.outcomes],
            "not run": [each.name for each in self._waiting],
        }

    def markdown(self) -> str:
        """Return the report as Markdown."""
        parts = ["# tfshard doctor", "", *(f"- {name}: {value}" for name, value in self._head.items()), ""]
        rows = [
            {
                "check": each.check.name, "result": each.state.value, "seconds": each.seconds,
                "found": "; ".join(each.faults) or each.log.headline,
            }
            for each in self.outcomes
        ]  # fmt: skip
        rows += [{"check": each.name, "result": "not run", "seconds": "", "found": ""} for each in self._waiting]
        parts += [*_table(rows), ""]
        for each in self.outcomes:
            parts += _section(each)
        return "\n".join(parts)

    def _write(self) -> None:
        for name, text in ((MARKDOWN, self.markdown()), (JSON, json.dumps(self.to_dict(), indent=1) + "\n")):
            new = self._folder / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            os.replace(new, self._folder / name)


def _section(outcome: Outcome) -> list[str]:
    parts = [f"## {outcome.check.name}: {outcome.check.title}", ""]
    parts += [f"- **{outcome.state.value}** {_one_line(fault)}" for fault in outcome.faults]
    parts += [""] if outcome.faults else []
    for title, rows in outcome.log.tables.items():
        parts += [f"{title}:", "", *_table(rows), ""]
    for note in outcome.log.notes:
        parts += ["```", note, "```", ""] if "\n" in note else [note, ""]
    for client, text in outcome.stacks.items():
        parts += [f"Stacks of client {client}:", "", "```", text.strip(), "```", ""]
    if outcome.output:
        parts += ["The end of the output:", "", "```", outcome.output, "```", ""]
    return parts


def _table(rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """Return the lines of a table. Rows may lack columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([_cell(row.get(name)) for name in names] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}"
    return _one_line(str(value)).replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())
