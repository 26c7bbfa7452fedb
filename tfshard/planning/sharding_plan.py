"""Predict the storage of each device, and the traffic of each step, before anything is allocated.

Nothing here touches a device. A plan is made from variable specs, so it works for meshes larger than this machine,
and with `abstract_model` for models larger than its memory.
"""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import rich.table

from tfshard import tables
from tfshard.devices import startup
from tfshard.errors import LayoutError, StrategyError
from tfshard.graph.model_specs import SlotSpec
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import BATCH_AXIS, MeshAxes
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import Axes, VariableLayout
from tfshard.planning import variable_traffic
from tfshard.planning.links import Links
from tfshard.planning.overlap import Overlap
from tfshard.planning.peak import PARTS, Peak
from tfshard.planning.variable_traffic import Collective

KINDS = ("parameter", "state", "gradient", "slot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedVariable:
    """A variable or a slot.

    Attributes:
        path: The Keras path of a variable, or the name of a slot.
        kind: `"parameter"`, `"state"` (not trained) or `"slot"`.
        shape: The full shape.
        dtype: The name of its dtype.
        compute_layout: The mesh axis of each dim when the forward pass reads the variable.
        storage_layout: The mesh axis of each dim of the stored tensor; of the group's buffer for a member.
        storage_shape: The shape of the stored tensor; differs from `shape` when padded or in a group.
        group: The number of its group, or None.
        bytes_whole: Bytes of the full variable.
        bytes_per_device: Bytes that the fullest device holds. None for a member: its group counts the bytes.
        gradient_bytes_per_device: Bytes that the fullest device holds of its gradient while it waits for the update; 0
            without a gradient.
        host_bytes_per_device: Bytes that the host holds for each device; None for a member.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    compute_layout: Axes
    storage_layout: Axes
    storage_shape: tuple[int, ...]
    group: int | None
    bytes_whole: int
    bytes_per_device: int | None
    gradient_bytes_per_device: int | None
    host_bytes_per_device: int | None = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedMember:
    """A variable's place in a group: `elements` of each model shard of the buffer, from `offset` on."""

    path: str
    offset: int
    elements: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """Small variables in one buffer.

    Attributes:
        index: The number of the group.
        kind: `"parameter"` or `"state"`.
        dtype: The dtype of all members.
        members: The places of the members in the buffer, in order.
        storage_layout: The mesh axis of each dim of the stored buffer.
        storage_shape: The shape of the buffer: model axes, rows, columns.
        padding: Elements of one model shard that no member uses.
        slots: The names of the slots, each a buffer of the same shape.
        bytes_whole: Bytes of the members, without padding.
        bytes_gathered: Bytes of the buffer on one device once it is gathered over the batch axis.
        bytes_per_device: Bytes of the stored buffer on one device.
        gradient_bytes_per_device: Bytes of the gradients as they wait for the update.
        slot_bytes_per_device: Bytes of all slots that are stored on the device.
        slot_host_bytes_per_device: Bytes of the slots that are stored on the host, for each device.
    """

    index: int
    kind: str
    dtype: str
    members: tuple[PlannedMember, ...]
    storage_layout: Axes
    storage_shape: tuple[int, ...]
    padding: int
    slots: tuple[str, ...]
    bytes_whole: int
    bytes_gathered: int
    bytes_per_device: int
    gradient_bytes_per_device: int
    slot_bytes_per_device: int
    slot_host_bytes_per_device: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ShardingPlan:
    """The storage and the traffic of a step; `print` it, or use it as data.

    Attributes:
        mesh: Axis name to size.
        zero_stage: 0 to 3.
        groups: The groups.
        variables: Each variable of the model once, in the order of its layers.
        slots: The optimizer variables, and the state that reductions of gradients keep between steps.
        collectives: The collectives of a step: `variable_traffic` predicts them for variables, `activation_traffic` for
            activations.
        unknown: Why the traffic of activations could not be predicted; empty if it was.
        refused: The faults that `compile` or the first step would refuse in the model, with the remedies
            (`tfshard.lint`).
        peak: The memory of a device at the peak of a step; None if the plan was made without `inputs`.
        collective_seconds: The time of the collectives one after the other, over the plan's links. None without links,
            or if bytes are unknown.
        overlap: How much of this time the computation of a step hides; None if the computing time is unknown.
    """

    mesh: MeshAxes
    zero_stage: int
    groups: tuple[PlannedGroup, ...]
    variables: tuple[PlannedVariable, ...]
    slots: tuple[PlannedVariable, ...]
    collectives: tuple[Collective, ...]
    unknown: str = ""
    refused: tuple[str, ...] = ()
    peak: Peak | None = None
    collective_seconds: float | None = None
    overlap: Overlap | None = None

    @classmethod
    def from_placement(
        cls,
        placement: ModelPlacement,
        *,
        slots: Sequence[SlotSpec] = (),
        activations: Sequence[Collective] = (),
        unknown: str = "",
        uses: Mapping[str, int] | None = None,
        gathers: Mapping[str, variable_traffic.Gathers] | None = None,
        reductions: variable_traffic.Reductions = variable_traffic.PLAIN,
        refused: Sequence[str] = (),
    ) -> "ShardingPlan":
        """Return the plan of a finished placement.

        Args:
            placement: The layouts of the model's variables.
            slots: The optimizer's variables.
            activations: The collectives of activations.
            unknown: Why the collectives of activations are unknown.
            uses: How often the forward pass uses a variable, by path, if known.
            gathers: How a step of stage 3 gathers a variable or a group, by its name.
            reductions: How a step reduces gradients.
            refused: The faults that `compile` would refuse.
        """
        mesh_shape = placement.mesh_shape
        slot_layouts = [placement.slot(slot.spec, slot.reference) for slot in slots]
        slot_names: dict[int, dict[str, None]] = collections.defaultdict(dict)
        for slot, layout in zip(slots, slot_layouts, strict=True):
            if layout.group is not None:
                slot_names[layout.group][slot.name] = None
        sent = variable_traffic.predict_collectives(
            placement.variables,
            placement.config,
            mesh_shape=mesh_shape,
            uses=uses,
            gathers=gathers,
            reductions=reductions,
        )
        return cls(
            mesh=MeshAxes.of(mesh_shape),
            zero_stage=placement.config.zero_stage.value,
            groups=tuple(
                _planned_group(index, members, tuple(slot_names[index]), mesh_shape)
                for index, members in placement.groups().items()
            ),
            variables=tuple(_planned_variable(layout, mesh_shape) for layout in placement.variables),
            slots=(
                *(_planned_variable(layout, mesh_shape, slot=True) for layout in slot_layouts),
                *_planned_reduction_state(placement),
            ),
            collectives=(*sent, *activations),
            unknown=unknown,
            refused=tuple(refused),
        )

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    def bytes_per_device(self, kind: str | None = None) -> int:
        """Return the bytes that the fullest device holds of `"parameter"`, `"state"`, `"gradient"`, `"slot"`, or of
        all."""
        if kind is None:
            return sum(self.bytes_per_device(each) for each in KINDS)
        _check_kind(kind)
        rows: tuple[PlannedVariable | PlannedGroup, ...] = (*self.variables, *self.groups)
        if kind == "gradient":
            return sum(row.gradient_bytes_per_device or 0 for row in rows)
        if kind == "slot":
            return sum(s.bytes_per_device or 0 for s in self.slots) + sum(g.slot_bytes_per_device for g in self.groups)
        return sum(row.bytes_per_device or 0 for row in rows if row.kind == kind)

    def host_bytes_per_device(self) -> int:
        """Return the bytes of slots that the host holds for each device (`offload="slots"`)."""
        slots = sum(slot.host_bytes_per_device or 0 for slot in self.slots)
        return slots + sum(group.slot_host_bytes_per_device for group in self.groups)

    def bytes_on_one_device(self, kind: str | None = None) -> int:
        """Return the bytes that a single device would hold without sharding."""
        if kind is None:
            return sum(self.bytes_on_one_device(each) for each in KINDS)
        _check_kind(kind)
        if kind == "slot":
            return sum(slot.bytes_whole for slot in self.slots)
        kind = "parameter" if kind == "gradient" else kind
        return sum(variable.bytes_whole for variable in self.variables if variable.kind == kind)

    def over(self, links: Links) -> "ShardingPlan":
        """Return the plan with the time of its collectives over some links.

        Raises:
            StrategyError: The devices of the plan do not fill a number of the links' hosts exactly.
        """
        links.check_devices(self.world_size)
        return dataclasses.replace(self, collective_seconds=links.total_seconds(self.collectives, self.mesh))

    def collective_count(self) -> int:
        """Return the number of collectives in a step."""
        return sum(collective.count for collective in self.collectives)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data: JSON types only, apart from tuples."""
        totals = {
            kind or "all": {
                "bytes_per_device": self.bytes_per_device(kind),
                "bytes_on_one_device": self.bytes_on_one_device(kind),
            }
            for kind in (*KINDS, None)
        }
        return {
            **dataclasses.asdict(self),
            "mesh": MeshAxes.of(self.mesh).given,
            "world_size": self.world_size,
            "totals": totals,
        }

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as a JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def resting_bytes(self) -> int:
        """Return the bytes of parameters, untrained state and slots that the fullest device holds between steps."""
        return sum(self.bytes_per_device(kind) for kind in ("parameter", "state", "slot"))

    def to_keras_layout_map(
        self, device_mesh: keras.distribution.DeviceMesh | None = None
    ) -> keras.distribution.LayoutMap:
        """Return the compute layouts as a `keras.distribution.LayoutMap`, for `keras.distribution.ModelParallel` on
        JAX.

        It has an entry for each variable that a model axis shards. The pattern is the variable's path: Keras matches
        the full path, with `re.fullmatch`. Sharding over the batch axis (the ZeRO stage) is not included. Under
        `ModelParallel` slots are sharded like their parameters. You can pickle the object, and load it where Keras runs
        on JAX.

        Args:
            device_mesh: A `keras.distribution.DeviceMesh` with the plan's axes. By default a mesh of the plan's shape.
                If the plan has no axis `batch`, the mesh gets one of size 1 in front, since `ModelParallel` shards data
                over one of the axes. Its devices have the names of JAX: `cpu:0`, `cpu:1`, ...

        Returns:
            The layout map. `ModelParallel(layout_map=..., batch_dim_name="batch")` takes it.

        Raises:
            LayoutError: `device_mesh` is not a DeviceMesh, or lacks an axis of the plan that shards a variable.

        >>> import keras, tfshard
        >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="up")], name="mlp")
        >>> layout_map = tfshard.LayoutMap({".*/up/kernel": (None, "model")})
        >>> plan = tfshard.plan(model, {"model": 4}, layout_map, zero_stage=0)
        >>> keras_map = plan.to_keras_layout_map()
        >>> {path: layout.axes for path, layout in keras_map.items()}
        {'mlp/up/kernel': (None, 'model')}
        >>> keras_map.device_mesh
        <DeviceMesh shape=(1, 4), axis_names=('batch', 'model')>
        """
        if device_mesh is None:
            shape = {BATCH_AXIS: 1, **self.mesh} if self.mesh.data is None else self.mesh
            started = startup.current()
            kind = started.device_type.lower() if started is not None else "cpu"
            devices = [f"{kind}:{i}" for i in range(self.world_size)]
            device_mesh = keras.distribution.DeviceMesh(tuple(shape.values()), tuple(shape), devices)
        if not isinstance(device_mesh, keras.distribution.DeviceMesh):
            raise LayoutError(
                f"device_mesh must be a keras.distribution.DeviceMesh, or None. Received: device_mesh={device_mesh!r} "
                f"(of type {type(device_mesh)})"
            )
        layout_map = keras.distribution.LayoutMap(device_mesh)
        for variable in self.variables:
            axes = variable.compute_layout
            missing = [axis for axis in axes if axis is not None and axis not in device_mesh.axis_names]
            if missing:
                raise LayoutError(
                    f"Variable '{variable.path}' is sharded over axis '{missing[0]}', which is not in the DeviceMesh. "
                    f"Axes of the plan: {tuple(self.mesh)}. Received: axis_names={tuple(device_mesh.axis_names)}"
                )
            if any(axes):
                layout_map[re.escape(variable.path)] = axes
        return layout_map

    def tables(self, *, detail: bool = False) -> tuple[rich.table.Table, ...]:
        """Return the plan as rich tables: the totals, the storage, the traffic of a step, and its peak if it is known.

        Args:
            detail: True for a row for each variable, slot and collective. By default equal ones share a row.
        """
        axes = tables.mesh(self.mesh.given)
        title = f"Plan for {self.world_size} devices ({axes}), ZeRO stage {self.zero_stage}"
        labels = ("parameters", "untrained weights", "gradients until the update", "optimizer slots", "all")
        totals = [
            (label, self.bytes_on_one_device(kind), self.bytes_per_device(kind))
            for kind, label in zip((*KINDS, None), labels, strict=True)
        ]
        if self.host_bytes_per_device():
            totals.append(("slots on the host, for each device", 0, self.host_bytes_per_device()))
        parts = [tables.totals(title, totals), self._storage_table(detail), self._collectives_table(detail)]
        return tuple(parts if self.peak is None else [*parts, _peak_table(self.peak)])

    def text(self, *, detail: bool = False) -> str:
        """Return the text that `print` shows: the totals, the storage, the traffic of a step, and the faults that
        `compile` would refuse.

        Args:
            detail: True for a row for each variable, slot and collective. By default equal ones share a row.
        """
        notes = []
        if not self.slots:
            notes.append(
                "No optimizer slots are planned. If the model is not compiled, give optimizer='adam', or "
                "another optimizer."
            )
        if self.collective_seconds is not None:
            notes.append(
                f"Over these links, one after the other, the collectives take {1e3 * self.collective_seconds:,.1f} ms."
            )
        if self.overlap is not None and self.overlap.hidden is not None:
            notes.append(self.overlap.text())
        notes += [f"Not predicted: {self.unknown}"] if self.unknown else []
        notes += [f"This model cannot be trained with this plan: {refused}" for refused in self.refused]
        return tables.as_text(*self.tables(detail=detail), *notes)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _storage_table(self, detail: bool) -> rich.table.Table:
        groups = [_group_row(group) for group in self.groups]
        if detail:
            each = [tables.Row.of(variable) for variable in (*self.variables, *self.slots)]
            return tables.variables("Variables", [*groups, *each])
        alone = [variable for variable in self.variables if variable.group is None]
        folded = tables.fold_variables(alone, variable_layout.REPLICATED_BELOW_BYTES)
        return tables.variables(tables.FOLDED, [*groups, *folded])

    def _collectives_table(self, detail: bool) -> rich.table.Table:
        heads = ("kind", "what", "axis", "formula") if detail else ("kind", "axis", "formula")
        alike: dict[tuple[str, ...], list[Collective]] = {}
        for number, each in enumerate(self.collectives):
            alone = (each.kind, each.what, each.axis, each.formula, str(number))
            alike.setdefault(alone if detail else (each.kind, each.axis, each.formula), []).append(each)
        table = tables.plain("Collectives of a step, predicted")
        for head in heads:
            table.add_column(head, overflow="fold")
        for head in ("count", "bytes"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_row("total", *[""] * (len(heads) - 1), *_sums(self.collectives))
        for cells, members in alike.items():
            table.add_row(*cells[: len(heads)], *_sums(members))
        return table


def _planned_variable(layout: VariableLayout, mesh_shape: Mapping[str, int], *, slot: bool = False) -> PlannedVariable:
    spec = layout.spec
    member = layout.group is not None
    kind = "slot" if slot else "parameter" if spec.trainable else "state"
    gradient = 0
    if kind == "parameter":
        gradient = variable_traffic.gradient_bytes(layout, mesh_shape, scattered=layout.reduce_scatter)
    stored_bytes = variable_traffic.resting_bytes(layout, mesh_shape)
    return PlannedVariable(
        path=spec.path,
        kind=kind,
        shape=spec.shape,
        dtype=spec.dtype,
        compute_layout=layout.compute,
        storage_layout=layout.storage,
        storage_shape=layout.storage_shape,
        group=layout.group,
        bytes_whole=variable_layout.spec_bytes(spec),
        bytes_per_device=None if member else 0 if layout.on_host else stored_bytes,
        gradient_bytes_per_device=None if member else gradient,
        host_bytes_per_device=None if member else stored_bytes if layout.on_host else 0,
    )


def _planned_reduction_state(placement: ModelPlacement) -> Iterator[PlannedVariable]:
    """Yield the state that reductions of gradients keep between steps, which one device would not have."""
    for layout in placement.variables:
        state = {} if layout.reduction is None else layout.reduction.state(layout, placement.mesh_shape)
        for kept in state.values():
            yield dataclasses.replace(_planned_variable(kept, placement.mesh_shape, slot=True), bytes_whole=0)


def _planned_group(
    index: int, members: Sequence[VariableLayout], slots: tuple[str, ...], mesh_shape: Mapping[str, int]
) -> PlannedGroup:
    first = members[0]
    form, spec = first.flat, first.spec
    assert form is not None and len(form.members) == len(members), index
    used = sum(member.elements for member in form.members)
    slot_layouts = [first.slot(dataclasses.replace(spec, path=f"{spec.path}_{name}")) for name in slots]
    slot_bytes = {
        on_host: sum(
            variable_traffic.resting_bytes(each, mesh_shape) for each in slot_layouts if each.on_host == on_host
        )
        for on_host in (False, True)
    }
    gradient_bytes = (
        variable_traffic.gradient_bytes(first, mesh_shape, scattered=first.reduce_scatter) if spec.trainable else 0
    )
    return PlannedGroup(
        index=index,
        kind="parameter" if spec.trainable else "state",
        dtype=spec.dtype,
        members=tuple(
            PlannedMember(path=layout.spec.path, offset=place.offset, elements=place.elements)
            for layout, place in zip(members, form.members, strict=True)
        ),
        storage_layout=first.storage,
        storage_shape=first.storage_shape,
        padding=form.rows * form.columns - used,
        slots=slots,
        bytes_whole=sum(variable_layout.spec_bytes(layout.spec) for layout in members),
        bytes_gathered=variable_traffic.whole_bytes(first, mesh_shape),
        bytes_per_device=variable_traffic.device_bytes(first.storage_shape, first.storage, mesh_shape, spec.dtype),
        gradient_bytes_per_device=gradient_bytes,
        slot_bytes_per_device=slot_bytes[False],
        slot_host_bytes_per_device=slot_bytes[True],
    )


def _peak_table(peak: Peak) -> rich.table.Table:
    table = tables.plain("Peak of a step")
    table.add_column("part")
    table.add_column("per device", justify="right", no_wrap=True)
    for name in PARTS:
        table.add_row(name.removesuffix("_bytes"), tables.size(getattr(peak, name)))
    table.add_row("all", tables.size(peak.peak_bytes))
    if peak.overlap_bytes:
        table.add_row("at times", "+ " + tables.size(peak.overlap_bytes))
    table.add_row("resident, in a client on CPU", tables.size(peak.resident_bytes()))
    return table


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise StrategyError(f"Unknown kind of variable. Kinds: {KINDS}. Received: kind={kind!r}")


def _sums(collectives_: Sequence[Collective]) -> tuple[str, str]:
    """Return the number of collectives and their bytes, with a question mark if some bytes depend on the batch."""
    count = sum(each.count for each in collectives_)
    known = [each.count * each.bytes for each in collectives_ if each.bytes is not None]
    parts = [tables.size(sum(known))] if known or not collectives_ else []
    return f"{count:,}", " + ".join([*parts, *["?"] * (len(known) < len(collectives_))])


def _group_row(group: PlannedGroup) -> tables.Row:
    return tables.Row(
        name=f"group {group.index}: {len(group.members)} variables from {group.members[0].path}",
        kind=group.kind,
        cells=(str(group.storage_shape), group.dtype, tables.layout(group.storage_layout)),
        bytes_whole=group.bytes_whole,
        bytes_per_device=group.bytes_per_device,
        count=len(group.members),
    )
