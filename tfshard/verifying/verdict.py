"""Verification: the result of `verify`."""

import dataclasses
from typing import Literal

import rich.box
import rich.table

from tfshard import tables
from tfshard.errors import VerificationError
from tfshard.verifying.operation_check import Number, Operation


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Difference:
    """A difference between the sharded step and the step on one device.

    Attributes:
        kind: `"batch"`, `"replicas"`, `"layout"`, `"failure"`, `"random"`, `"layer"`, `"loss"`, `"gradient"`,
            `"update"` or `"metric"`.
        place: The layer, variable, metric or operation.
        message: A description of the difference, with both numbers.
        sharded: The number of the sharded step that differs most; None if the difference is not in numbers.
        one_device: The same number on one device.
        index: The index of the number in the tensor.
        error: The difference, relative to the largest number of the tensor.
        operation: The faulty operation, for the first difference in numbers; None if none was found.
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
    """The comparison of all values of one kind.

    Attributes:
        kind: As in `Difference`.
        count: The number of tensors.
        differing: How many tensors differ by more than the tolerance.
        error: The largest error of the differing tensors, or of all tensors if none differs.
        place: The place of the largest error.
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
        tolerance: The tolerance of values, relative to the largest number of their tensor.
        compared: The comparisons, a row for each kind.
        differences: The differences, in the order of the step: look at the first.
        not_compared: The values that could not be compared, with the reasons.
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
        """True if the step was compared and nothing differs."""
        return not self.differences and bool(self.compared)

    def raise_if_different(self) -> "Verification":
        """Return this object if nothing differs.

        Raises:
            VerificationError: The differences.
        """
        if not self.ok:
            raise VerificationError(str(self).lstrip())
        return self

    def table(self) -> rich.table.Table:
        """Return the comparisons as a rich table."""
        axes = tables.mesh(self.mesh)
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


# The number of differences that are printed after the first.
_SHOWN = 8
