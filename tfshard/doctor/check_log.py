"""CheckLog: the results of one check. Each result goes to a file at once."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeAlias

Cell: TypeAlias = str | int | float | None
# The file of a check, in the check's folder.
LOG_FILE = "log.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """The request for a check's processes.

    Attributes:
        function: The name of the check's function in `check_process.FUNCTIONS`.
        folder: The folder for the check's files. It exists.
        seconds: The time limit of the check.
        num_devices: The number of devices to start. None for all, and in a launched run.
        meshes: Axis names to sizes, of each mesh to check.
        case: The part of the check to run. Empty for all parts.
        expected: The file with the bandwidths that the user expects (`tfshard.planning.Links`), or None.
        baseline: The folder of the check to compare with, or None.
    """

    function: str
    folder: str
    seconds: float
    num_devices: int | None = None
    meshes: tuple[dict[str, int], ...] = ()
    case: str = ""
    expected: str | None = None
    baseline: str | None = None

    def to_json(self) -> str:
        """Return the request as text, for a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CheckRequest":
        """Return the request of a command line."""
        values = json.loads(text)
        return cls(**{**values, "meshes": tuple(values["meshes"])})


class CheckLog:
    """The tables, notes and faults of a check.

    Attributes:
        headline: The main result in a few words, for the summary.
        tables: The rows of each table, by its title.
        notes: Remarks, which are not faults.
        faults: One text for each fault.
    """

    def __init__(self, path: pathlib.Path | None = None):
        """Begin an empty log.

        Args:
            path: The file to keep up to date. None keeps the log in memory.
        """
        self.headline = ""
        self.tables: dict[str, list[dict[str, Cell]]] = {}
        self.notes: list[str] = []
        self.faults: list[str] = []
        self._path = path
        self._write()

    @classmethod
    def read(cls, folder: pathlib.Path) -> "CheckLog":
        """Return the log of a check's folder, or an empty log if the check has written none."""
        log, path = cls(), folder / LOG_FILE
        if path.exists():
            values: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            log.headline, log.tables = values["headline"], values["tables"]
            log.notes, log.faults = values["notes"], values["faults"]
        return log

    def row(self, title: str, **cells: Cell) -> None:
        """Add a row to the table with this title."""
        self.tables.setdefault(title, []).append(cells)
        self._write()

    def note(self, text: str) -> None:
        """Add a note."""
        self.notes.append(text)
        self._write()

    def fault(self, text: str) -> None:
        """Add a fault, unless the log has it."""
        if text not in self.faults:
            self.faults.append(text)
            self._write()

    def summarize(self, headline: str) -> None:
        """Set the headline."""
        self.headline = headline
        self._write()

    def to_dict(self) -> dict[str, Any]:
        """Return the log as plain data."""
        return {"headline": self.headline, "tables": self.tables, "notes": self.notes, "faults": self.faults}

    def _write(self) -> None:
        if self._path is None:
            return
        # Replace the file at once, because the process may end at any time.
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
        os.replace(new, self._path)


def mesh_text(axes: Mapping[str, int]) -> str:
    """Return a mesh as text.

    >>> mesh_text({"batch": 2, "model": 2})
    'batch=2 model=2'
    """
    return " ".join(f"{name}={size}" for name, size in axes.items())
