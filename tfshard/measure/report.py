"""Report: what every device stores, measured on the local tensors of the devices."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import rich.table
from tensorflow.experimental import dtensor

from tfshard import _private, tables
from tfshard.devices import transfer
from tfshard.errors import StrategyError, warn
from tfshard.graph import inventory, model_specs
from tfshard.layouts import variable_kind, variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.config import ZeroStage
from tfshard.layouts.gradient_reduction import OPTION_NAME
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import attention, compiled_blocks, compiled_updates, projection_heads
from tfshard.storage.variables import ShardedVariable


class Strategy(Protocol):
    """The members of a `ShardedStrategy` that a report uses. The strategy's subpackage is below this one."""

    mesh: dtensor.Mesh

    @property
    def mesh_shape(self) -> MeshAxes:
        """The axes of the mesh."""

    @property
    def zero_stage(self) -> ZeroStage:
        """The ZeRO stage."""

    def placement_of(self, model: keras.Model) -> ModelPlacement:
        """Return the placement of the variables of a built model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableReport:
    """A variable and its bytes on each device.

    Attributes:
        path: The Keras path.
        kind: `"parameter"`, `"state"` (not trained) or `"slot"`. The state of a `GradientReduction` counts as slots.
        shape: The shape of the full variable.
        dtype: The name of the dtype.
        compute_layout: The mesh axis of each dim when a step reads the variable.
        storage_layout: The mesh axis of each dim of the stored tensor (the padded tensor, if padded).
        storage_shape: The shape of the stored tensor; of the padded tensor, or of the group's buffer.
        group: The number of the group with which the variable shares a buffer, or None.
        gradient_layout: The mesh axis of each dim of the gradient that the optimizer got in the last traced or eager
            step; None before the first step, and without a gradient.
        gradient_bytes_per_device: Bytes of the gradient in that layout on one device, or None.
        shards: The number of different shards.
        bytes_whole: Bytes of the full variable.
        bytes_per_device: Bytes that the fullest device of this process stores, read from the device's tensor; for a
            group, this variable's share. 0 for a variable that is stored on the host.
        host_bytes_per_device: Bytes that the host stores for that device.
        reduced_by: The option that reduces the gradient by a `GradientReduction` or a `VariableKind`, such as
            `"compression='int8'"`; None if DTensor reduces the gradient. A slot names the option that keeps it.
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
    reduced_by: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """The result of `strategy.report(model)`; `print` it, or use it as data.

    Attributes:
        mesh: Axis name to size.
        world_size: Number of devices.
        zero_stage: The ZeRO stage, which is also its number.
        gradients_reduce_scattered: True if each device keeps only its local shard of a gradient (stages 2 and 3), for
            at least one variable. Ungrouped variables with a sharded dim have such gradients; gradients of groups are
            reduced in full. Measured by the layouts of gradients in the last traced or eager step; None before the
            first.
        variables: A `VariableReport` for each variable.
        misplaced: The paths of variables that are not at their placement. Empty, unless something is wrong, or a
            variable has been added since the last step.
        notes: Sentences about missing numbers, such as the slots of a model that is not compiled, and about blocks that
            XLA compiles.
    """

    mesh: dict[str, int]
    world_size: int
    zero_stage: ZeroStage
    gradients_reduce_scattered: bool | None
    variables: tuple[VariableReport, ...]
    misplaced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def from_model(cls, model: keras.Model, strategy: Strategy, parts: Sequence[keras.Model] | None = None) -> "Report":
        """Measure a model that is built or compiled under `strategy`.

        Args:
            model: The model.
            strategy: The strategy of the model, or of one rank of a pipeline.
            parts: For a pipeline: the stages of the model on the rank.
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
        for current in (each for each in owned if isinstance(each, ShardedVariable)):
            for kept in current.kept.values():
                state = _measured(kept, kept.path, "slot", strategy.mesh_shape)
                rows.append(dataclasses.replace(state, bytes_whole=0, reduced_by=_reduced_by(current.layout)))
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
        """Return the bytes that the fullest device of this process stores, of one kind of variable or of all."""
        return sum(row.bytes_per_device for row in self.variables if kind in (None, row.kind))

    def host_bytes_per_device(self) -> int:
        """Return the bytes of slots that the host stores for the fullest device of this process (`offload="slots"`)."""
        return sum(row.host_bytes_per_device for row in self.variables)

    def bytes_on_one_device(self, kind: str | None = None) -> int:
        """Return the bytes that a single device would store without sharding."""
        return sum(row.bytes_whole for row in self.variables if kind in (None, row.kind))

    @property
    def gradient_bytes_per_device(self) -> int | None:
        """Bytes on one device of the gradients that the optimizer got (`VariableReport.gradient_layout`).

        No sum of `bytes_per_device` includes gradients: a step frees them. None before the first step.
        """
        found = [row.gradient_bytes_per_device for row in self.variables if row.kind == "parameter"]
        known = [bytes_ for bytes_ in found if bytes_ is not None]
        return sum(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data: JSON types only, apart from tuples."""
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
        return {**dataclasses.asdict(self), "zero_stage": self.zero_stage.value, "totals": totals}

    def tables(self, *, detail: bool = False) -> tuple[rich.table.Table, rich.table.Table]:
        """Return the report as rich tables: the totals, and the stored variables.

        Args:
            detail: True: a row for each variable, slots included. False: similar variables share a row, without slots.
        """
        if detail:
            rows = [tables.Row.of(variable) for variable in self.variables]
            return self._totals_table(), tables.variables("Variables", rows)
        stored = [variable for variable in self.variables if variable.kind != "slot"]
        rows = tables.fold_variables(stored, variable_layout.REPLICATED_BELOW_BYTES)
        return self._totals_table(), tables.variables(tables.FOLDED, rows)

    def table(self) -> rich.table.Table:
        """Return a rich table with a row for each variable. Deprecated; use `tables`, as the next version drops it."""
        warn(
            "Report.table() is now Report.tables(), which gives the totals and where each variable is stored. The "
            "next version removes the old name.",
            DeprecationWarning,
        )
        return self.tables(detail=True)[1]

    def text(self, *, detail: bool = False) -> str:
        """Return the text that `print` shows: the totals, and the stored variables.

        Args:
            detail: True: a row for each variable, slots included. False: similar variables share a row, without slots.
        """
        return tables.as_text(*self.tables(detail=detail), *self._sentences())

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def summary(self) -> str:
        """Return the totals, and a row for each block of the model with the sums of its variables, without slots.

        The first name in a variable's path, after the names that all paths share, is the variable's block.
        """
        rows = [tables.Row.of(variable) for variable in self.variables if variable.kind != "slot"]
        blocks = tables.variables("Blocks of the model", tables.blocks(rows), head="block", columns=())
        return tables.as_text(self._totals_table(), blocks, *self._sentences())

    def _totals_table(self) -> rich.table.Table:
        axes = tables.mesh(self.mesh)
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
        more = [
            ("slots on the host, for each device", 0, self.host_bytes_per_device()),
            ("reduction state (in the slots)", 0, self._state_bytes_per_device()),
        ]
        return tables.totals(title, [*rows, gradients, *(row for row in more if row[2])])

    def _state_bytes_per_device(self) -> int:
        """Return the bytes on one device of the state of reductions, which counts as slots."""
        return sum(row.bytes_per_device for row in self.variables if row.kind == "slot" and row.reduced_by)

    def _sentences(self) -> tuple[str, ...]:
        """Return the sentences below the tables: how a step reduces gradients, and the notes."""
        return (self._reduced_text(), *self.notes)

    def _reduced_text(self) -> str:
        """Return sentences about how a step reduces gradients: first by options, then by DTensor."""
        parameters = [row for row in self.variables if row.kind == "parameter"]
        counts = collections.Counter(row.reduced_by for row in parameters)
        usual = [row for row in parameters if row.reduced_by is None]
        sentences = []
        for option, count in counts.items():
            text = f"the gradients of {count} {'variable' if count == 1 else 'variables'}"
            if option is not None and variable_kind.keeps_gradients(option.removesuffix("=")):
                sentences.append(f"With {option}, {text} stay on the devices that store the variables.")
            elif option is not None:
                sentences.append(f"{option} reduces {text}.")
        if usual or not sentences:
            sentences.append(self._usually_reduced_text(usual, "other " if sentences else ""))
        return " ".join(sentences)

    def _usually_reduced_text(self, rows: Sequence[VariableReport], other: str) -> str:
        """Return a sentence about how DTensor reduces gradients.

        Args:
            rows: The parameters with gradients that DTensor reduces.
            other: `"other "` if an option reduces the gradients of more parameters, or an empty text.
        """
        layouts = [row.gradient_layout for row in rows if row.gradient_layout is not None]
        if not layouts:
            return f"{other}gradients are measured in the first training step: no step has run yet.".capitalize()
        named, full = ("the other gradients", "them in full") if other else ("gradients", "full gradients")
        if self.gradients_reduce_scattered and any(map(any, layouts)):
            return f"A step reduce-scatters {named}: each device holds its shard of a gradient until the update."
        if self.zero_stage.shard_grads and all(row.group is not None for row in rows):
            return (
                f"All {other}variables are small and share groups: a step all-reduces the gradient of a group, and "
                "each device updates its shard."
            )
        return f"A step all-reduces {named}: each device holds {full} until the update."


# The number of variables that a note names.
_NAMED = 5


def check_is_measurable(model: keras.Model, method: str) -> None:
    """Raise `StrategyError` if no variable of a model is on a mesh.

    Args:
        model: The model.
        method: The called method of the strategy, for the message.
    """
    owned = [variable for variable, _ in inventory.owned_variables(model)]
    if not owned:
        model_specs.check_built(model)
    elif not any(isinstance(_private.backend_variable(variable), ShardedVariable) for variable in owned):
        raise StrategyError(
            f"strategy.{method} measures variables on the devices, but no variable of model '{model.name}' is on "
            "them. Compile the model with strategy=..., or build it under strategy.scope(). strategy.plan(model, "
            f"optimizer='adam') predicts the storage. Received: model={model!r}, compiled={model.compiled}"
        )


def _notes(model: keras.Model, misplaced: Sequence[str]) -> tuple[str, ...]:
    """Return sentences about numbers that the report of a model lacks."""
    if not model.compiled and not inventory.optimizer_variables(model):
        return (
            f"Model '{model.name}' is not compiled, so it has no optimizer slots yet. strategy.plan(model, "
            "optimizer='adam') predicts them.",
        )
    notes = []
    optimizers = inventory.optimizers_of(model)
    unused = [optimizer for optimizer in optimizers if not optimizer.built]
    if len(unused) < len(optimizers):
        notes += [f"Optimizer '{each.name}' has no slots: it has updated no variable yet." for each in unused]
    elif unused:
        notes.append("The optimizer creates its slots in the first training step. strategy.plan(model) predicts them.")
    if misplaced:
        names = ", ".join(f"'{path}'" for path in misplaced[:_NAMED])
        more = f" and {len(misplaced) - _NAMED} others" if len(misplaced) > _NAMED else ""
        notes.append(f"The next step moves these variables to the layouts of the strategy: {names}{more}.")
    notes += _compiled_notes(model)
    notes += _attention_notes(model)
    notes += [str(each) for each in projection_heads.chunked_heads(model)]
    return tuple(notes)


def _compiled_notes(model: keras.Model) -> list[str]:
    """Return sentences about the blocks that ran as XLA programs in the last traced step, and about the others."""
    notes = []
    for kind, found in (
        ("block", compiled_blocks.compiled_blocks(model)),
        ("other layer", compiled_blocks.other_layers(model)),
    ):
        if found:
            compiled = sum(each.programs > 0 for each in found)
            notes.append(f"XLA compiles {compiled} of {len(found)} {kind}s.")
        reasons = [(each.path, each.reason) for each in found if not each.programs]
        notes += [f"{kind.capitalize()} '{path}' is not compiled: {reason}." for path, reason in reasons]
    return notes + [note for optimizer in inventory.model_optimizers(model) for note in _update_notes(optimizer)]


def _update_notes(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Return sentences about the updates that ran as XLA programs, and about the first other update of each reason."""
    found = compiled_updates.compiled_updates(optimizer)
    if not found:
        return []
    compiled = sum(each.is_compiled for each in found)
    notes = [f"XLA compiles {compiled} of {len(found)} updates of optimizer '{optimizer.name}'."]
    others: dict[str, list[str]] = {}
    for each in found:
        if not each.is_compiled:
            others.setdefault(each.reason, []).append(each.name)
    for reason, names in others.items():
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        notes.append(f"The update of '{names[0]}'{more} is not compiled: {reason}.")
    return notes


def _attention_notes(model: keras.Model) -> list[str]:
    """Return sentences about the attention layers that computed in blocks in the last traced step, and the others.

    Layers with sequences that are too short for `attention="auto"` are no news.
    """
    found = [each for each in attention.attention_runs(model) if not each.is_short]
    if not found:
        return []
    in_blocks = sum(not each.reason for each in found)
    others = [f"Attention of '{each.path}' is not in blocks: {each.reason}." for each in found if each.reason]
    return [f"{in_blocks} of {len(found)} attention layers compute in blocks of queries and keys.", *others]


def _is_on(variable: keras.Variable, mesh: dtensor.Mesh) -> bool:
    current = _private.backend_variable(variable)
    return isinstance(current, ShardedVariable) and current.mesh == mesh


def _measure(variable: keras.Variable, kind: str, mesh_shape: MeshAxes) -> VariableReport | None:
    current = _private.backend_variable(variable)
    return _measured(current, variable.path, kind, mesh_shape) if isinstance(current, ShardedVariable) else None


def _measured(current: ShardedVariable, path: str, kind: str, mesh_shape: MeshAxes) -> VariableReport:
    layout = current.layout
    # Accumulator slots receive gradients, too.
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
        bytes_per_device=0 if current.storage.is_stored_on_host else _stored_bytes(current),
        host_bytes_per_device=_stored_bytes(current) if current.storage.is_stored_on_host else 0,
        group=layout.group,
        gradient_layout=gradient,
        gradient_bytes_per_device=None
        if gradient is None
        else variable_layout.spec_bytes(layout.spec) // _shards(gradient, mesh_shape),
        reduced_by=_reduced_by(layout) if kind == "parameter" else None,
    )


def _reduced_by(layout: variable_layout.VariableLayout) -> str | None:
    """Return the option that reduces the gradient of a variable; None if DTensor reduces the gradient."""
    if layout.kind is not None:
        return f"{layout.kind.option_name}="
    return None if layout.reduction is None else f"{OPTION_NAME}={layout.reduction.option!r}"


def _shards(axes: Axes, mesh_shape: MeshAxes) -> int:
    """Return the number of different shards of a layout."""
    return math.prod(mesh_shape[axis] for axis in axes if axis is not None)


def _scattered(rows: Sequence[VariableReport], data: str | None) -> bool | None:
    """Return True if a gradient came to the optimizer in shards; None if no gradient was seen."""
    seen = [row.gradient_layout for row in rows if row.gradient_layout is not None]
    return any(data in axes for axes in seen) if seen else None


def _stored_bytes(variable: ShardedVariable) -> int:
    """Return the bytes of the fullest device's local shard of the buffer; for a group, this member's share."""
    buffer = variable.buffer
    # Local shards on other clients have the same shape.
    one = math.prod(transfer.shard_shape(tuple(buffer.shape), buffer.layout)) * buffer.dtype.size
    shard_bytes = max(transfer.local_bytes(buffer.value()).values(), default=one)
    return variable.storage.format.share(shard_bytes, variable.member)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncGroup:
    """Variables with gradients that a step reduces together: a group, or one ungrouped variable.

    Attributes:
        members: The paths of the variables.
        bytes: Bytes of the full gradients.
    """

    members: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncStats:
    """The result of `strategy.sync_stats(model)`: the gradients that each step reduces.

    Attributes:
        variables: How many variables have gradients.
        bytes: Bytes of all full gradients.
        groups: The groups, and the ungrouped variables.
    """

    variables: int
    bytes: int
    groups: tuple[SyncGroup, ...]

    @classmethod
    def from_model(cls, model: keras.Model) -> "SyncStats":
        """Count the trained variables of a model that is under a strategy."""
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


# Extension point: functions that return the reports of a model whose variables an extension stores; empty for others.
REPORTERS: list[Callable[[keras.Model], Sequence[Report]]] = []


def reports_of(model: keras.Model) -> list[Report]:
    """Return the reports that extensions make of a model. The list is empty for a model of `ShardedStrategy` alone."""
    return [report for make in REPORTERS for report in make(model)]
