"""What verify returns."""

import dataclasses
from typing import Literal

import rich.box
import rich.table

from tfshard import tables
from tfshard.errors import VerificationError
from tfshard.verifying.operation_check import Number, Operation


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Difference:
    """Something that the sharded step does otherwise than one device.

    Attributes:
        kind: `"batch"`, `"replicas"`, `"layout"`, `"failure"`, `"random"`, `"layer"`, `"loss"`, `"gradient"`,
            `"update"` or `"metric"`.
        place: The layer, variable, metric or operation.
        message: What differs, in words, with both numbers.
        sharded: One number of the sharded step, the one that differs most; None where it is not about numbers.
        one_device: The same number on one device.
        index: Where in the tensor.
        error: How much they differ, of the largest number of the tensor.
        operation: The operation that is to blame, for the first difference in numbers; None if none was found.
    """

    kind: str
    place: str
    message: str
    sharded: Number = None
    one_device: Number = None
    index: tuple[int, ...] = ()
    error: float | None = None
    operation: Operation | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f"\n    {self.operation}" if self.operation is not None else "")

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Compared:
    """What was compared of one kind.

    Attributes:
        kind: As in `Difference`.
        count: How many tensors.
        differing: How many of them differ by more than the tolerance.
        error: The largest error of those, or of all if none does.
        place: Where that is.
    """

    kind: str
    count: int
    differing: int
    error: float
    place: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.differing} of {self.count} differ, by at most {self.error:.1e} at {self.place}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Verification:
    """The result of `tfshard.verify`; `print` it, or use it as data.

    Attributes:
        model: The model's name.
        mesh: Axis name to size.
        zero_stage: 0 to 3.
        tolerance: How much values may differ, of the largest number of their tensor.
        compared: What was compared, a row for each kind.
        differences: What differs, in the order of the step: the first is where to look.
        not_compared: What could not be compared, and why.
    """

    model: str
    mesh: dict[str, int]
    zero_stage: int
    tolerance: float
    compared: tuple[Compared, ...]
    differences: tuple[Difference, ...]
    not_compared: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the step was compared and nothing differs."""
        return not self.differences and bool(self.compared)

    def raise_if_different(self) -> "Verification":
        """Itself, if nothing differs.

        Raises:
            VerificationError: With the differences.
        """
        if not self.ok:
            raise VerificationError(str(self))
        return self

    def table(self) -> rich.table.Table:
        """What was compared, as a rich table."""
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        table = rich.table.Table(
            title=f"Model '{self.model}' on {axes}, ZeRO stage {self.zero_stage}, against one device "
            f"(tolerance {self.tolerance:.0e})",
            box=rich.box.SIMPLE_HEAD,
        )
        columns: tuple[tuple[str, Literal["left", "right"]], ...] = (
            ("compared", "left"),
            ("tensors", "right"),
            ("differing", "right"),
            ("largest error", "right"),
            ("at", "left"),
        )
        for column, justify in columns:
            table.add_column(column, justify=justify, overflow="fold")
        for row in self.compared:
            table.add_row(row.kind, str(row.count), str(row.differing), f"{row.error:.1e}", row.place)
        return table

    def __str__(self) -> str:
        lines = []
        if self.differences:
            first, *others = self.differences
            lines += ["DIFFERENT. First:", f"  {first}"]
            lines += ["Then:"] * bool(others) + [f"  {difference}" for difference in others[:_SHOWN]]
            lines += [f"  and {len(others) - _SHOWN} more"] * (len(others) > _SHOWN)
        else:
            lines.append("The same as on one device." if self.ok else "NOTHING WAS COMPARED.")
        lines += ["Not compared:"] * bool(self.not_compared) + [f"  {text}" for text in self.not_compared]
        return tables.as_text(*([self.table()] if self.compared else []), "\n".join(lines))

    __repr__ = __str__


# How many differences behind the first are printed.
_SHOWN = 8
