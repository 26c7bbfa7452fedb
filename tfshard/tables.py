"""What is printed: sizes, tables of totals and of variables, and like variables folded into one row."""

import dataclasses
import io
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

import rich.box
import rich.console
import rich.table

# Of every text; also of a terminal that is wider.
WIDTH = 120

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def as_text(*parts: rich.console.RenderableType) -> str:
    """Rich tables and lines of text, printed at most 120 characters wide.

    >>> as_text("A line.", "Another.")
    'A line.\\nAnother.\\n'
    """
    out = io.StringIO()
    console = rich.console.Console(file=out, width=WIDTH)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines()) + "\n"


def size(bytes_: int) -> str:
    """Bytes for a reader, in the largest unit of which there is one.

    >>> [size(bytes_) for bytes_ in (0, 612, 40 << 10, 100 << 20, 3 << 30)]
    ['0 B', '612 B', '40.0 KiB', '100.0 MiB', '3.00 GiB']
    """
    unit = min(max(bytes_.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    digits = 0 if unit == 0 else 1 if unit < 3 else 2
    return f"{bytes_ / (1 << 10 * unit):,.{digits}f} {_UNITS[unit]}"


def short_size(bytes_: int) -> str:
    """Bytes in three digits and the largest unit of which there is one, for tables with many columns.

    >>> [short_size(bytes_) for bytes_ in (0, 612, 40 << 10, 100 << 20, 3 << 30)]
    ['0 B', '612 B', '40.0 KiB', '100 MiB', '3.00 GiB']
    """
    unit = min(max(bytes_.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    number = bytes_ / (1 << 10 * unit)
    digits = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:,.{digits}f} {_UNITS[unit]}"


def milliseconds(seconds: float) -> str:
    """A time in milliseconds for a reader; with two digits where it is less than one.

    >>> [milliseconds(seconds) for seconds in (1.2345, 0.0123, 0.00012)]
    ['1,234.5', '12.3', '0.12']
    """
    return f"{1e3 * seconds:,.1f}" if seconds >= 1e-3 else f"{1e3 * seconds:.2g}"


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGTP]?)(I?)B?")


def parse_size(name: str, given: object) -> int:
    """Return the bytes that a positive integer or a text such as `"16GiB"` stands for.

    Args:
        name: What the size is called, for the message.
        given: The size. K, M, G, T and P count in thousands, Ki, Mi, Gi, Ti and Pi in 1024.

    Raises:
        ValueError: It is neither.

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


def layout(axes: Sequence[str | None]) -> str:
    """The mesh axis of each dim.

    >>> layout(("batch", None))
    '(batch, -)'
    """
    return str(tuple(axes)).replace("'", "").replace("None", "-")


# --- rows -------------------------------------------------------------------------------------------------------------


class Stored(Protocol):
    """A variable as a plan or a report has it; their docstrings say what the attributes are."""

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
    """A variable, or several that are alike.

    Attributes:
        name: Its path, or the pattern of their paths.
        kind: What tells it from others with the same cells; not shown.
        cells: What is shown between name and bytes, of each of them.
        bytes_whole: Bytes that one device would hold without sharding, of all of them.
        bytes_per_device: Bytes that the fullest device holds, of all of them; None where others count them.
        count: How many variables they are.
    """

    name: str
    kind: Hashable = None
    cells: tuple[str, ...] = ()
    bytes_whole: int
    bytes_per_device: int | None
    count: int = 1

    @classmethod
    def of(cls, variable: Stored) -> "Row":
        """The row of one variable; its cells are those of `COLUMNS`."""
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


# The heads of a row's cells.
COLUMNS = ("shape", "dtype", "storage layout")


def fold_variables(variables: Sequence[Stored], small: int) -> list[Row]:
    """The rows of variables, folded; untrained ones of fewer than `small` bytes share one, the last."""
    apart = [each.kind == "state" and each.bytes_whole < small for each in variables]
    rows = fold([Row.of(each) for each, alone in zip(variables, apart, strict=True) if not alone])
    rest = [Row.of(each) for each, alone in zip(variables, apart, strict=True) if alone]
    if rest:
        rows.append(total(f"{len(rest)} small untrained variables", rest, cells=("",) * len(COLUMNS)))
    return rows


def total(name: str, rows: Sequence[Row], *, kind: Hashable = None, cells: tuple[str, ...] = ()) -> Row:
    """The sums of rows, as a row."""
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
    """Rows that differ in nothing but numbers in their names, as one row with their count and the sums of their bytes.

    Rows of another kind or with other cells stay apart. Keras gives the first layer of a class no number: `dense` is
    taken for one of `dense_1`, `dense_2`, where there are such. Where several numbers vary, a row stands for every
    combination of those that its pattern lists.

    Returns:
        The rows, each where the first that it stands for was.

    >>> paths = [f"block_{i}/{name}" for i in range(12) for name in ("dense", "dense_1", "dense_2")]
    >>> [row] = fold([Row(name=path, bytes_whole=8, bytes_per_device=2) for path in paths])
    >>> row.name, row.count, row.bytes_whole
    ('block_{0..11}/dense{,_1,_2}', 36, 288)
    """
    numbered = {part.rpartition("_")[0] for row in rows for part in row.name.split("/") if _LAST_NUMBER.search(part)}
    alike: dict[Hashable, list[_Numbered]] = {}
    for index, row in enumerate(rows):
        texts, numbers = _split(row.name, numbered)
        # `block_3` is no sibling of `block3`.
        styles = tuple(number.isdecimal() for number in numbers)
        alike.setdefault((texts, styles, row.kind, row.cells), []).append(_Numbered(index, texts, numbers, row))
    parts = [part for members in alike.values() for part in _combinations(members)]
    return [_joined(part) for part in sorted(parts, key=lambda part: part[0].index)]


def blocks(rows: Sequence[Row]) -> list[Row]:
    """The sums of rows by the first name of their paths, behind the names that all of them share.

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
    """A row whose name is `texts` with `numbers` between them; its place is `index`."""

    index: int
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    row: Row


def _split(name: str, numbered: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`a/block_3/up` to `("a/block", "/up")` and `("_3",)`; the number that a name in `numbered` lacks is empty."""
    texts, numbers = [""], []
    for i, part in enumerate(name.split("/")):
        pieces = [*_NUMBER.split(part), *(("", "") if part in numbered else ())]
        texts[-1] += "/" * bool(i) + pieces[0]
        texts += pieces[2::2]
        numbers += pieces[1::2]
    return tuple(texts), tuple(numbers)


def _combinations(members: list[_Numbered]) -> list[list[_Numbered]]:
    """The members as one part if they are all combinations of their numbers, else parts with one number that varies."""
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
    """`{"_0", "_1", "_2", "_5"}` to `_{0..2,5}`; one value to itself; with the empty one among them `{,_1..2}`."""
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
FOLDED = "Variables (those that are alike in one row; detail=True: each)"

# --- tables -----------------------------------------------------------------------------------------------------------


_BYTES = ("on one device", "per device")


def totals(title: str, rows: Iterable[tuple[str, int, int | None]]) -> rich.table.Table:
    """A table of sums: of what, bytes on one device without sharding, bytes that the fullest device holds.

    None stands for what was not measured.
    """
    table = plain(title)
    # The title would be broken where the columns end.
    table.add_column("", min_width=max(len(title) - sum(len(name) + _GAP for name in _BYTES), 0))
    for column in _BYTES:
        table.add_column(column, justify="right", no_wrap=True)
    for label, whole, held in rows:
        table.add_row(f"total {label}", size(whole), "not measured" if held is None else size(held))
    return table


def variables(
    title: str, rows: Sequence[Row], *, head: str = "variable", columns: Sequence[str] = COLUMNS
) -> rich.table.Table:
    """A table of variables.

    Args:
        title: Above it.
        rows: A line each.
        head: Of the names.
        columns: The heads of the cells.
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


# Between two columns.
_GAP = 2


def plain(title: str) -> rich.table.Table:
    """An empty table."""
    box = rich.box.SIMPLE_HEAD
    return rich.table.Table(title=title, title_justify="left", box=box, padding=(0, _GAP - 1, 0, 0), pad_edge=False)


def _broken(name: str, width: int) -> str:
    """A name in lines of at most `width` characters, broken behind a part of its path, or else of a word.

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
