"""Printed output: sizes, tables of totals and of variables, and similar variables folded into one row."""

import dataclasses
import io
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol

import rich.box
import rich.console
import rich.table

# The width of every text, even on a wider terminal.
WIDTH = 120

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def as_text(*parts: rich.console.RenderableType) -> str:
    """Print rich tables and lines of text, at most 120 characters wide, and return the text.

    >>> as_text("A line.", "Another.")
    'A line.\\nAnother.\\n'
    """
    out = io.StringIO()
    console = rich.console.Console(file=out, width=WIDTH)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines()) + "\n"


def size(bytes_: int) -> str:
    """Format bytes in the largest unit that gives at least 1.

    >>> [size(bytes_) for bytes_ in (0, 612, 40 << 10, 100 << 20, 3 << 30)]
    ['0 B', '612 B', '40.0 KiB', '100.0 MiB', '3.00 GiB']
    """
    unit = min(max(bytes_.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    digits = 0 if unit == 0 else 1 if unit < 3 else 2
    return f"{bytes_ / (1 << 10 * unit):,.{digits}f} {_UNITS[unit]}"


def short_size(bytes_: int) -> str:
    """Format bytes in three digits and the largest unit that gives at least 1, for tables with many columns.

    >>> [short_size(bytes_) for bytes_ in (0, 612, 40 << 10, 100 << 20, 3 << 30)]
    ['0 B', '612 B', '40.0 KiB', '100 MiB', '3.00 GiB']
    """
    unit = min(max(bytes_.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    number = bytes_ / (1 << 10 * unit)
    digits = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:,.{digits}f} {_UNITS[unit]}"


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, with two digits below one millisecond.

    >>> [milliseconds(seconds) for seconds in (1.2345, 0.0123, 0.00012)]
    ['1,234.5', '12.3', '0.12']
    """
    return f"{1e3 * seconds:,.1f}" if seconds >= 1e-3 else f"{1e3 * seconds:.2g}"


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGTP]?)(I?)B?")


def parse_size(name: str, given: object) -> int:
    """Return the bytes of a positive integer or of a text such as `"16GiB"`.

    Args:
        name: The name of the size, for the message.
        given: The size. K, M, G, T and P are powers of 1000; Ki, Mi, Gi, Ti and Pi are powers of 1024.

    Raises:
        ValueError: Another type, another text, or a number that is not positive.

    >>> parse_size("memory", "16GiB") == 16 * 2**30, parse_size("memory", "80GB"), parse_size("memory", 612)
    (True, 80000000000, 612)
    """
    found = _SIZE.fullmatch(given.strip().upper()) if isinstance(given, str) else None
    bytes_ = 0
    if found is not None and (found[2] or not found[3]):
        bytes_ = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGTP".index(found[2] or " "))
    elif isinstance(given, int) and not isinstance(given, bool):
        bytes_ = given
    if bytes_ < 1:
        raise ValueError(
            f"{name} must be a positive number of bytes, such as '16GiB', '80GB' or 17179869184. "
            f"Received: {name}={given!r}"
        )
    return bytes_


def mesh(sizes: Mapping[str, int]) -> str:
    """Return the axes of a mesh with their sizes as text.

    >>> mesh({"batch": 2, "model": 2})
    'batch=2 x model=2'
    """
    return " x ".join(f"{axis}={count}" for axis, count in sizes.items())


def layout(axes: Sequence[str | None]) -> str:
    """Format the mesh axis of each dim.

    >>> layout(("batch", None))
    '(batch, -)'
    """
    return str(tuple(axes)).replace("'", "").replace("None", "-")


# --- rows -------------------------------------------------------------------------------------------------------------


class Stored(Protocol):
    """A variable in a plan or a report, which document the attributes."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def storage_layout(self) -> tuple[str | None, ...]: ...
    @property
    def storage_shape(self) -> tuple[int, ...]: ...
    @property
    def group(self) -> int | None: ...
    @property
    def bytes_whole(self) -> int: ...
    @property
    def bytes_per_device(self) -> int | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row for one variable, or for several similar variables.

    Attributes:
        name: The path, or the pattern of the paths.
        kind: Distinguishes rows with equal cells; not shown.
        cells: The cells between name and bytes, equal for all variables of the row.
        bytes_whole: Bytes of all variables of the row on one device without sharding.
        bytes_per_device: Bytes of all variables of the row on the fullest device; None if other rows count them.
        count: The number of variables.
    """

    name: str
    kind: Hashable = None
    cells: tuple[str, ...] = ()
    bytes_whole: int
    bytes_per_device: int | None
    count: int = 1

    @classmethod
    def of(cls, variable: Stored) -> "Row":
        """Return the row of one variable, with the cells in `COLUMNS`."""
        place = layout(variable.storage_layout)
        if variable.group is not None:
            place += f" group {variable.group}"
        elif variable.storage_shape != variable.shape:
            place += f" padded to {variable.storage_shape}"
        return cls(
            name=variable.path,
            kind=variable.kind,
            cells=(str(variable.shape), variable.dtype, place),
            bytes_whole=variable.bytes_whole,
            bytes_per_device=variable.bytes_per_device,
        )


# The headers of a row's cells.
COLUMNS = ("shape", "dtype", "storage layout")


def fold_variables(variables: Sequence[Stored], small: int) -> list[Row]:
    """Return the folded rows of variables. Untrained variables below `small` bytes share one row, the last."""
    apart = [each.kind == "state" and each.bytes_whole < small for each in variables]
    rows = fold([Row.of(each) for each, alone in zip(variables, apart, strict=True) if not alone])
    rest = [Row.of(each) for each, alone in zip(variables, apart, strict=True) if alone]
    if rest:
        rows.append(total(f"{len(rest)} small untrained variables", rest, cells=("",) * len(COLUMNS)))
    return rows


def total(name: str, rows: Sequence[Row], *, kind: Hashable = None, cells: tuple[str, ...] = ()) -> Row:
    """Return the sum of rows as a row."""
    held = [row.bytes_per_device for row in rows]
    return Row(
        name=name,
        kind=kind,
        cells=cells,
        bytes_whole=sum(row.bytes_whole for row in rows),
        bytes_per_device=None if None in held else sum(bytes_ or 0 for bytes_ in held),
        count=sum(row.count for row in rows),
    )


def fold(rows: Sequence[Row]) -> list[Row]:
    """Fold rows with names that differ only in numbers into one row, with their count and the sums of their bytes.

    Rows with different kinds or cells are not folded together. Keras gives the first layer of a class no number:
    `dense` folds with `dense_1` and `dense_2`, if these exist. If several numbers vary, a row stands for every
    combination of the numbers in its pattern.

    Returns:
        The rows, each at the position of its first member.

    >>> paths = [f"block_{i}/{name}" for i in range(12) for name in ("dense", "dense_1", "dense_2")]
    >>> [row] = fold([Row(name=path, bytes_whole=8, bytes_per_device=2) for path in paths])
    >>> row.name, row.count, row.bytes_whole
    ('block_{0..11}/dense{,_1,_2}', 36, 288)
    """
    numbered = {part.rpartition("_")[0] for row in rows for part in row.name.split("/") if _LAST_NUMBER.search(part)}
    alike: dict[Hashable, list[_Numbered]] = {}
    for index, row in enumerate(rows):
        texts, numbers = _split(row.name, numbered)
        # `block_3` and `block3` are not siblings.
        styles = tuple(number.isdecimal() for number in numbers)
        alike.setdefault((texts, styles, row.kind, row.cells), []).append(_Numbered(index, texts, numbers, row))
    parts = [part for members in alike.values() for part in _combinations(members)]
    return [_joined(part) for part in sorted(parts, key=lambda part: part[0].index)]


def blocks(rows: Sequence[Row]) -> list[Row]:
    """Return the sums of rows by the first name of their paths, after the names that all paths share.

    >>> paths = ("net/embedding/table", "net/block_0/kernel", "net/block_0/bias", "net/block_1/kernel")
    >>> [(row.name, row.count) for row in blocks([Row(name=path, bytes_whole=8, bytes_per_device=2) for path in paths])]
    [('embedding', 1), ('block_0', 2), ('block_1', 1)]
    """
    names = [row.name.split("/") for row in rows]
    shared = 0
    while all(len(name) > shared + 2 for name in names) and len({name[shared] for name in names}) == 1:
        shared += 1
    found: dict[str, list[Row]] = {}
    for name, row in zip(names, rows, strict=True):
        found.setdefault(name[shared], []).append(row)
    return [total(name, of_block) for name, of_block in found.items()]


_LAST_NUMBER = re.compile(r"_\d+$")
_NUMBER = re.compile(r"(_\d+$|\d+)")


@dataclasses.dataclass(frozen=True)
class _Numbered:
    """A row with its position, and its name split into `texts` with `numbers` between them."""

    index: int
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    row: Row


def _split(name: str, numbered: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split `a/block_3/up` into `("a/block", "/up")` and `("_3",)`.

    A name in `numbered` without a number gets an empty number.
    """
    texts, numbers = [""], []
    for i, part in enumerate(name.split("/")):
        texts_and_numbers = [*_NUMBER.split(part), *(("", "") if part in numbered else ())]
        texts[-1] += "/" * bool(i) + texts_and_numbers[0]
        texts += texts_and_numbers[2::2]
        numbers += texts_and_numbers[1::2]
    return tuple(texts), tuple(numbers)


def _combinations(members: list[_Numbered]) -> list[list[_Numbered]]:
    """Return one list if the members are all combinations of their numbers, else lists in which one number varies."""
    found = {member.numbers for member in members}
    combinations = 1
    for values in zip(*found, strict=True):
        combinations *= len(set(values))
    if combinations == len(found):
        return [members]
    by_position: list[dict[tuple[str, ...], list[_Numbered]]] = []
    for position in range(len(members[0].numbers)):
        parts: dict[tuple[str, ...], list[_Numbered]] = {}
        for member in members:
            others = member.numbers[:position] + member.numbers[position + 1 :]
            parts.setdefault(others, []).append(member)
        by_position.append(parts)
    return list(min(by_position, key=len).values())


def _joined(members: list[_Numbered]) -> Row:
    first = members[0]
    name = first.texts[0]
    for text, values in zip(first.texts[1:], zip(*(member.numbers for member in members), strict=True), strict=True):
        name += _span(set(values)) + text
    return total(name, [member.row for member in members], kind=first.row.kind, cells=first.row.cells)


def _span(values: set[str]) -> str:
    """Format `{"_0", "_1", "_2", "_5"}` as `_{0..2,5}`, a single value unchanged, an empty value first: `{,_1..2}`."""
    if len(values) == 1:
        return next(iter(values))
    runs: list[list[str]] = []
    for value in sorted(values - {""}, key=lambda value: int(value.strip("_"))):
        digits = value.strip("_")
        if runs and int(digits) == int(runs[-1][-1]) + 1:
            runs[-1].append(digits)
        else:
            runs.append([digits])
    spans = [part for run in runs for part in ([f"{run[0]}..{run[-1]}"] if len(run) > 2 else run)]
    if "" in values:
        return "{," + ",".join(f"_{part}" for part in spans) + "}"
    return "_" * next(iter(values)).startswith("_") + "{" + ",".join(spans) + "}"


# The title of a table of folded rows.
FOLDED = "Variables (equal ones in one row; detail=True: one row each)"

# --- tables -----------------------------------------------------------------------------------------------------------


_BYTES = ("on one device", "per device")


def totals(title: str, rows: Iterable[tuple[str, int, int | None]]) -> rich.table.Table:
    """Return a table of sums: label, bytes on one device without sharding, bytes on the fullest device.

    None stands for a value that was not measured.
    """
    table = plain(title)
    # Otherwise rich would break the title at the end of the columns.
    table.add_column("", min_width=max(len(title) - sum(len(name) + _GAP for name in _BYTES), 0))
    for column in _BYTES:
        table.add_column(column, justify="right", no_wrap=True)
    for label, full, held in rows:
        table.add_row(f"total {label}", size(full), "not measured" if held is None else size(held))
    return table


def variables(
    title: str, rows: Sequence[Row], *, head: str = "variable", columns: Sequence[str] = COLUMNS
) -> rich.table.Table:
    """Return a table of variables.

    Args:
        title: The title above the table.
        rows: The rows, a line each.
        head: The header of the names.
        columns: The headers of the cells.
    """
    heads = (head, "count", *columns, "on one\ndevice", "per\ndevice")
    lines = [
        (
            row.name,
            f"{row.count:,}",
            *row.cells,
            size(row.bytes_whole),
            "" if row.bytes_per_device is None else size(row.bytes_per_device),
        )
        for row in rows
    ]
    table = plain(title)
    for name in heads:
        right = name in ("count", *heads[-2:])
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    parts = list(zip(heads, *lines, strict=True))[1:]
    others = sum(max(len(line) for cell in column for line in cell.split("\n")) for column in parts)
    left = max(WIDTH - others - _GAP * len(heads), 30)
    for name, *cells in lines:
        table.add_row(_broken(name, left), *cells)
    return table


# The space between two columns.
_GAP = 2


def plain(title: str) -> rich.table.Table:
    """Return an empty table."""
    box = rich.box.SIMPLE_HEAD
    return rich.table.Table(title=title, title_justify="left", box=box, padding=(0, _GAP - 1, 0, 0), pad_edge=False)


def _broken(name: str, width: int) -> str:
    """Break a name into lines of at most `width` characters, after a part of its path, or else after a word.

    >>> print(_broken("transformer_layer_0/self_attention/kernel", 25))
    transformer_layer_0/
      self_attention/kernel
    """
    lines = []
    while len(name) > width:
        cut = max(name.rfind("/", 2, width), name.rfind(" ", 2, width)) + 1 or name.rfind("_", 2, width) + 1 or width
        lines.append(name[:cut].rstrip(" "))
        name = "  " + name[cut:]
    return "\n".join([*lines, name])
