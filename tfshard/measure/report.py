"""What every device holds, measured on the devices' own tensors."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import keras
import rich.table
from tensorflow.experimental import dtensor

from tfshard import _private, tables
from tfshard.devices import transfer
from tfshard.errors import StrategyError, warn
from tfshard.graph import inventory, model_specs
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.config import ZeroStage
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import Axes
from tfshard.storage.variables import ShardedVariable


class Strategy(Protocol):
    """What a report takes of a `ShardedStrategy`, whose wing is below this one."""

    mesh: dtensor.Mesh

    @property
    def mesh_shape(self) -> MeshAxes:
        """The axes of its mesh."""

    @property
    def zero_stage(self) -> int:
        """0 to 3."""

    def placement_of(self, model: keras.Model) -> ModelPlacement:
        """Where the variables of a built model go."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableReport:
    """One variable: what it is and what each device holds of it.

    Attributes:
        path: The Keras path.
        kind: `"parameter"`, `"state"` (not trained) or `"slot"`, also of what the compression of gradients keeps.
        shape: Of the whole variable.
        dtype: Its name.
        compute_layout: The mesh axis of each dim when it is read.
        storage_layout: The mesh axis of each dim of the stored tensor (of the padded one, if padded).
        storage_shape: The shape of the stored tensor; the padded one, or that of the group's buffer.
        group: The number of the group whose buffer it shares, or None.
        gradient_layout: The mesh axis of each dim of its gradient as the optimizer got it, in the last step that was
            traced or ran eagerly. None before that, and without a gradient.
        gradient_bytes_per_device: Bytes of the gradient in that layout on one device, or None.
        shards: Into how many different pieces it is cut.
        bytes_whole: Bytes of the whole variable.
        bytes_per_device: Bytes that the fullest device of this process holds, read from the device's tensor; of a
            group's tensor, this variable's part. 0 of what rests on the host.
        host_bytes_per_device: Likewise, that the host holds for it.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    compute_layout: Axes
    storage_layout: Axes
    storage_shape: tuple[int, ...]
    shards: int
    bytes_whole: int
    bytes_per_device: int
    group: int | None = None
    gradient_layout: Axes | None = None
    gradient_bytes_per_device: int | None = None
    host_bytes_per_device: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """The result of `strategy.report(model)`; `print` it, or use it as data.

    Attributes:
        mesh: Axis name to size.
        world_size: Number of devices.
        zero_stage: 0 to 3.
        gradients_reduce_scattered: Whether each device keeps its shard of a gradient only (stages 2 and 3), at least of
            variables that stand alone and are cut along one of their dims: those of groups are reduced whole. Measured,
            by the layouts in which the optimizer got them in the last step that was traced or ran eagerly; None
            before that.
        variables: A `VariableReport` for each variable.
        misplaced: The paths of variables of the model that are not where its placement has them. None, unless something
            is wrong, or a variable has come since the last step.
        notes: Sentences that say what the numbers do not have, such as the slots of a model that is not compiled.
    """

    mesh: dict[str, int]
    world_size: int
    zero_stage: int
    gradients_reduce_scattered: bool | None
    variables: tuple[VariableReport, ...]
    misplaced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_model(cls, model: keras.Model, strategy: Strategy, parts: Sequence[keras.Model] | None = None) -> "Report":
        """Measures a model that is built or compiled under `strategy`.

        Args:
            model: The model.
            strategy: Its strategy, or that of one rank of a pipeline.
            parts: Of a pipeline: the parts of the model that the rank has.
        """
        rows: list[VariableReport | None] = []
        trained = {id(variable) for variable in model.trainable_variables}
        owned_by = [each for part in parts or [model] for each in inventory.owned_variables(part)]
        for variable, _ in dict((id(each), (each, layer)) for each, layer in owned_by).values():
            kind = "parameter" if id(variable) in trained else "state"
            rows.append(_measure(variable, kind, strategy.mesh_shape))
        slots = inventory.optimizer_variables(model)
        if parts is not None:
            slots = [each for each in slots if _is_on(each, strategy.mesh)]
        rows += [_measure(variable, "slot", strategy.mesh_shape) for variable in slots]
        owned = [_private.backend_variable(variable) for variable, _ in owned_by]
        for current in owned:
            for kept in current.kept.values() if isinstance(current, ShardedVariable) else ():
                rows.append(dataclasses.replace(_measured(kept, kept.path, "slot", strategy.mesh_shape), bytes_whole=0))
        placed = [layout for part in parts or [model] for layout in strategy.placement_of(part).variables]
        misplaced = tuple(
            layout.spec.path
            for current, layout in zip(owned, placed, strict=True)
            if not (isinstance(current, ShardedVariable) and current.layout == layout)
        )
        return cls(
            mesh=strategy.mesh_shape.given,
            world_size=math.prod(strategy.mesh_shape.values()),
            zero_stage=strategy.zero_stage,
            gradients_reduce_scattered=_scattered([row for row in rows if row is not None], strategy.mesh_shape.data),
            variables=tuple(row for row in rows if row is not None),
            misplaced=misplaced,
            notes=_notes(model, misplaced),
        )

    def bytes_per_device(self, kind: str | None = None) -> int:
        """Bytes that the fullest device of this process holds, of one kind of variable or of all."""
        return sum(row.bytes_per_device for row in self.variables if kind in (None, row.kind))

    def host_bytes_per_device(self) -> int:
        """Bytes of slots that the host holds for the fullest device of this process (`offload="slots"`)."""
        return sum(row.host_bytes_per_device for row in self.variables)

    def bytes_on_one_device(self, kind: str | None = None) -> int:
        """Bytes that a single device would hold without sharding."""
        return sum(row.bytes_whole for row in self.variables if kind in (None, row.kind))

    @property
    def gradient_bytes_per_device(self) -> int | None:
        """Bytes on one device of the gradients as the optimizer got them (`VariableReport.gradient_layout`).

        No sum of `bytes_per_device` has them: they do not rest between steps. None before the first step.
        """
        found = [row.gradient_bytes_per_device for row in self.variables if row.kind == "parameter"]
        known = [bytes_ for bytes_ in found if bytes_ is not None]
        return sum(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: JSON types only, apart from tuples."""
        totals: dict[str, dict[str, int | None]] = {
            kind: {
                "bytes_per_device": self.bytes_per_device(kind),
                "bytes_on_one_device": self.bytes_on_one_device(kind),
            }
            for kind in ("parameter", "state", "slot")
        }
        totals["gradient"] = {
            "bytes_per_device": self.gradient_bytes_per_device,
            "bytes_on_one_device": self.bytes_on_one_device("parameter"),
        }
        totals["all"] = {
            "bytes_per_device": self.bytes_per_device(),
            "bytes_on_one_device": self.bytes_on_one_device(),
        }
        return {**dataclasses.asdict(self), "totals": totals}

    def tables(self, *, detail: bool = False) -> tuple[rich.table.Table, rich.table.Table]:
        """The report as rich tables: the totals, and what rests where.

        Args:
            detail: A row for each variable, slots too. By default those that are alike share one, without slots.
        """
        if detail:
            rows = [tables.Row.of(variable) for variable in self.variables]
            return self._totals_table(), tables.variables("Variables", rows)
        stored = [variable for variable in self.variables if variable.kind != "slot"]
        rows = tables.fold_variables(stored, variable_layout.WHOLE_BELOW_BYTES)
        return self._totals_table(), tables.variables(tables.FOLDED, rows)

    def table(self) -> rich.table.Table:
        """A row for each variable, as a rich table. Use `tables`: this one will not be in the next version."""
        warn(
            "Report.table() is now Report.tables(), which gives the totals and what rests where. The old name will not "
            "be in the next version.",
            DeprecationWarning,
        )
        return self.tables(detail=True)[1]

    def text(self, *, detail: bool = False) -> str:
        """What `print` shows: the totals, and what rests where.

        Args:
            detail: A row for each variable, slots too. By default those that are alike share one, without slots.
        """
        return tables.as_text(*self.tables(detail=detail), *self._sentences())

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def summary(self) -> str:
        """The totals, and a row for each block of the model with the sums of its variables, slots apart.

        A block is what the first name of the variables' paths says, behind the names that all of them share.
        """
        rows = [tables.Row.of(variable) for variable in self.variables if variable.kind != "slot"]
        blocks = tables.variables("Blocks of the model", tables.blocks(rows), head="block", columns=())
        return tables.as_text(self._totals_table(), blocks, *self._sentences())

    def _totals_table(self) -> rich.table.Table:
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        title = f"{self.world_size} devices ({axes}), ZeRO stage {self.zero_stage}"
        labels = (
            ("parameter", "parameters"),
            ("state", "untrained weights"),
            ("slot", "optimizer slots"),
            (None, "all"),
        )
        rows: list[tuple[str, int, int | None]] = [
            (label, self.bytes_on_one_device(kind), self.bytes_per_device(kind)) for kind, label in labels
        ]
        gradients = (
            "gradients until the update",
            self.bytes_on_one_device("parameter"),
            self.gradient_bytes_per_device,
        )
        on_host = [("slots on the host, for each device", 0, self.host_bytes_per_device())]
        return tables.totals(title, [*rows, gradients, *(on_host if self.host_bytes_per_device() else [])])

    def _sentences(self) -> tuple[str, ...]:
        """Return the sentences below the tables: how a step reduces gradients, and the notes."""
        return (self._reduced_text(), *self.notes)

    def _reduced_text(self) -> str:
        """Say how a step reduces gradients."""
        if self.gradients_reduce_scattered is None:
            return "Gradients are measured in the first training step: none has run yet."
        if self.gradients_reduce_scattered:
            return "A step reduce-scatters gradients: each device holds its shard of a gradient until the update."
        grouped = all(row.group is not None for row in self.variables if row.kind == "parameter")
        if grouped and ZeroStage.from_number(self.zero_stage).shard_grads:
            return (
                "All variables are small and share groups: a step all-reduces the gradient of a group, and each device "
                "updates its shard."
            )
        return "A step all-reduces gradients: each device holds full gradients until the update."


# How many variables a note names.
_NAMED = 5


def check_is_measurable(model: keras.Model, method: str) -> None:
    """Raise `StrategyError` for a model of which no variable is on a mesh.

    Args:
        model: The model.
        method: The method of the strategy that was called, for the message.
    """
    owned = [variable for variable, _ in inventory.owned_variables(model)]
    if not owned:
        model_specs.check_built(model)
    elif not any(isinstance(_private.backend_variable(variable), ShardedVariable) for variable in owned):
        raise StrategyError(
            f"strategy.{method} measures variables on the devices, and no variable of model '{model.name}' is there. "
            "Compile the model with strategy=..., or build it under strategy.scope(). strategy.plan(model, "
            f"optimizer='adam') says what would be stored. Received: model={model!r}, compiled={model.compiled}"
        )


def _notes(model: keras.Model, misplaced: Sequence[str]) -> tuple[str, ...]:
    """Say what a report of a model does not have."""
    if not model.compiled and not inventory.optimizer_variables(model):
        return (
            f"Model '{model.name}' is not compiled, so there are no optimizer slots yet. strategy.plan(model, "
            "optimizer='adam') predicts them.",
        )
    notes = []
    if any(not optimizer.built for optimizer in inventory.optimizers_of(model)):
        notes.append("The optimizer makes its slots in the first training step. strategy.plan(model) predicts them.")
    if misplaced:
        names = ", ".join(f"'{path}'" for path in misplaced[:_NAMED])
        more = f" and {len(misplaced) - _NAMED} others" if len(misplaced) > _NAMED else ""
        notes.append(f"Not where the strategy places them, until the next step: {names}{more}.")
    return tuple(notes)


def _is_on(variable: keras.Variable, mesh: dtensor.Mesh) -> bool:
    current = _private.backend_variable(variable)
    return isinstance(current, ShardedVariable) and current.mesh == mesh


def _measure(variable: keras.Variable, kind: str, mesh_shape: MeshAxes) -> VariableReport | None:
    current = _private.backend_variable(variable)
    return _measured(current, variable.path, kind, mesh_shape) if isinstance(current, ShardedVariable) else None


def _measured(current: ShardedVariable, path: str, kind: str, mesh_shape: MeshAxes) -> VariableReport:
    layout = current.layout
    # Slots are given gradients too: those that accumulate them.
    gradient = current.gradient_layout if kind == "parameter" else None
    return VariableReport(
        path=path,
        kind=kind,
        shape=layout.spec.shape,
        dtype=layout.spec.dtype,
        compute_layout=layout.compute,
        storage_layout=layout.storage,
        storage_shape=layout.storage_shape,
        shards=_shards(layout.storage, mesh_shape),
        bytes_whole=variable_layout.spec_bytes(layout.spec),
        bytes_per_device=0 if current.storage.rests_on_host else _bytes_at_rest(current),
        host_bytes_per_device=_bytes_at_rest(current) if current.storage.rests_on_host else 0,
        group=layout.group,
        gradient_layout=gradient,
        gradient_bytes_per_device=None
        if gradient is None
        else variable_layout.spec_bytes(layout.spec) // _shards(gradient, mesh_shape),
    )


def _shards(axes: Axes, mesh_shape: MeshAxes) -> int:
    """Into how many different pieces a layout cuts."""
    return math.prod(mesh_shape[axis] for axis in axes if axis is not None)


def _scattered(rows: Sequence[VariableReport], data: str | None) -> bool | None:
    """Whether gradients came to the optimizer in shards; None where none was seen."""
    seen = [row.gradient_layout for row in rows if row.gradient_layout is not None]
    return any(data in axes for axes in seen) if seen else None


def _bytes_at_rest(variable: ShardedVariable) -> int:
    """Bytes of the fullest device's piece of the buffer; of a group's buffer, this member's part."""
    buffer = variable.buffer
    # Devices of other clients have a piece of the same shape.
    one = math.prod(transfer.piece_shape(tuple(buffer.shape), buffer.layout)) * buffer.dtype.size
    piece = max(transfer.local_bytes(buffer.value()).values(), default=one)
    return variable.storage.format.share(piece, variable.member)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncGroup:
    """Variables whose gradients are reduced together: a group, or one variable by itself.

    Attributes:
        members: Their paths.
        bytes: Of their gradients, whole.
    """

    members: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncStats:
    """The result of `strategy.sync_stats(model)`: what is synchronized in each step.

    Attributes:
        variables: How many variables have gradients.
        bytes: Of all gradients, whole.
        groups: The groups, and the variables that stand alone.
    """

    variables: int
    bytes: int
    groups: tuple[SyncGroup, ...]

    @classmethod
    def from_model(cls, model: keras.Model) -> "SyncStats":
        """Counts the trained variables of a model that is under a strategy."""
        members: dict[int, list[ShardedVariable]] = {}
        for variable in model.trainable_variables:
            current = _private.backend_variable(variable)
            if isinstance(current, ShardedVariable):
                members.setdefault(id(current.storage), []).append(current)
        groups = tuple(
            SyncGroup(
                members=tuple(v.path for v in group),
                bytes=sum(variable_layout.spec_bytes(v.layout.spec) for v in group),
            )
            for group in members.values()
        )
        return cls(
            variables=sum(len(group.members) for group in groups),
            bytes=sum(group.bytes for group in groups),
            groups=groups,
        )
