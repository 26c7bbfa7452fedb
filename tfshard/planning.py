"""What will be stored where, and what each step will send, told before anything is allocated.

Nothing here touches a device. A plan is made from variable specs, so it works for meshes larger than this machine,
and with `abstract_model` for models larger than its memory.
"""

import collections
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import rich.box
import rich.table
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, layouts, runtime, support, tables
from tfshard.errors import LayoutError, MeshError, StrategyError
from tfshard.layout_map import LayoutMap, VariableSpec
from tfshard.layouts import Axes, VariableLayout
from tfshard.mesh import BATCH_AXIS, axis_sizes

KINDS = ("parameter", "state", "gradient", "slot")


# --- What is planned: specs of variables and slots ---------------------------------------------------


def abstract_model(build: Callable[[], keras.Model]) -> keras.Model:
    """Builds a model whose variables have shapes and dtypes, and no values: for planning only.

    Inside `build` Keras variables are not allocated, so a model of any size takes little memory and time. Nothing
    can be done with the values afterwards: reading one, as calling or training the model does, is an error.

    Args:
        build: Makes and returns a built model: a functional one, or one on which `build` was called. It must make
            the layers itself, and not load weights or call `keras.utils.clear_session()`.

    Returns:
        The model.

    Raises:
        StrategyError: `build` did not return a built Keras model, or variables of the model were allocated.

    Example: a layer of 400 GB.

    >>> import keras, tfshard
    >>> def build():
    ...     return keras.Sequential([keras.Input((100_000,)), keras.layers.Dense(1_000_000)])
    >>> model = tfshard.abstract_model(build)
    >>> f"{model.count_params():,}"
    '100,001,000,000'
    """
    with _private.abstract_scope(_refuse_value):
        model = build()
    _check_built(model)
    allocated = [v.path for v in model.variables if _private.backend_variable(v) is not None]
    if allocated:
        raise StrategyError(
            "The function given to abstract_model must make all layers itself, and not call "
            f"keras.utils.clear_session(). Variables of model '{model.name}' that were allocated: {allocated[:3]}. "
            f"Received: build={build!r}"
        )
    return model


def _refuse_value(path: str, shape: Any, dtype: Any = None) -> Any:
    raise StrategyError(
        f"Variable '{path}' has no value: its model was made by tfshard.abstract_model, for planning only. Build the "
        f"model outside of abstract_model to call or train it. Received: a read of '{path}' of shape={tuple(shape)}"
    )


def _check_built(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise StrategyError(
            f"A plan needs a keras.Model or a list of VariableSpec. Received: {model!r} (of type {type(model)})"
        )
    if not model.built:
        raise StrategyError(
            f"Model '{model.name}' is not built, so its variables are not known. Give it a keras.Input, or call "
            f"model.build(input_shape). Received: model={model!r}"
        )


def specs_of(model_or_specs: Any) -> tuple[VariableSpec, ...]:
    """The variables of a built model, in the order of its layers; a list of specs as it is."""
    if not isinstance(model_or_specs, keras.Model) and isinstance(model_or_specs, Iterable):
        specs = tuple(model_or_specs)
        if all(isinstance(spec, VariableSpec) for spec in specs):
            return specs
    _check_built(model_or_specs)
    return tuple(
        VariableSpec(
            path=variable.path,
            shape=tuple(variable.shape),
            dtype=variable.dtype,
            trainable=variable.trainable,
            layer=layer,
        )
        for variable, layer in support.owned_variables(model_or_specs)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """An optimizer variable.

    Attributes:
        spec: Its name (as path), shape and dtype.
        reference: The path of the parameter of the same shape that it belongs to, or None.
        name: Its name without the parameter's, such as `"momentum"`.
    """

    spec: VariableSpec
    reference: str | None
    name: str


def slots_of(optimizer: Any, specs: Iterable[VariableSpec]) -> tuple[SlotSpec, ...]:
    """The variables that an optimizer will have for these parameters.

    Nothing is assumed of the optimizer: a copy of it is built in a TensorFlow graph, where nothing is allocated, for
    stand-ins of the same paths, shapes and dtypes, and what it adds is looked at. The count of steps and the learning
    rate are among it.

    Args:
        optimizer: A `keras.optimizers.Optimizer`, its name, or None for no slots.
        specs: The model's variables; those that are not trained are passed over.

    Raises:
        StrategyError: Keras does not know the optimizer.
    """
    if optimizer is None:
        return ()
    try:
        optimizer = keras.optimizers.get(optimizer)
    except ValueError:
        raise StrategyError(
            "optimizer must be a keras.optimizers.Optimizer, the name of one such as 'adam', or None. "
            f"Received: optimizer={optimizer!r}"
        ) from None
    config = optimizer.get_config()
    trained = [spec for spec in specs if spec.trainable]
    with tf.Graph().as_default():
        copy = type(optimizer).from_config(config)
        copy.build([_private.stand_in(spec.path, spec.shape, spec.dtype) for spec in trained])
    shapes = {spec.path.replace("/", "_"): spec for spec in trained}
    slots = []
    for part in _private.optimizer_chain(copy):
        for variable in _private.optimizer_own_variables(part):
            prefix = _private.slot_owner(variable.name, shapes)
            spec = VariableSpec(path=variable.name, shape=tuple(variable.shape), dtype=variable.dtype, trainable=False)
            reference = shapes[prefix] if prefix is not None and shapes[prefix].shape == spec.shape else None
            slots.append(
                SlotSpec(
                    spec=spec,
                    reference=reference.path if reference else None,
                    name=variable.name[len(prefix) + 1 :] if prefix else variable.name,
                )
            )
    return tuple(slots)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Axis name to size, of a DTensor mesh or of a mapping."""
    if isinstance(mesh, dtensor.Mesh):
        return axis_sizes(mesh)
    valid = isinstance(mesh, Mapping) and bool(mesh)
    if not valid or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in mesh.values()):
        raise MeshError(
            "A mesh to plan for is a mesh from tfshard.create_mesh(), or a mapping from axis name to a positive "
            f"integer such as {{'batch': 64, 'model': 8}}. Received: mesh={mesh!r}"
        )
    return dict(mesh)


def plan_layouts(
    specs: Iterable[VariableSpec], *, mesh_shape: Mapping[str, int], layout_map: Any, zero_stage: int
) -> tuple[VariableLayout, ...]:
    """The layout of each variable by itself, before groups.

    Raises:
        LayoutError: The layout map does not fit the mesh or the variables, or a pattern matches none.
        StrategyError: An unknown stage.
    """
    layouts.check_stage(zero_stage)
    specs = tuple(specs)
    layout_map = LayoutMap.from_any(layout_map)
    layout_map.check_axes(mesh_shape)
    planned = tuple(
        layouts.plan_variable(spec, layout_map=layout_map, mesh_shape=mesh_shape, zero_stage=zero_stage)
        for spec in specs
    )
    layouts.check_patterns(layout_map, specs)
    return planned


# --- The plan ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedVariable:
    """One variable or slot.

    Attributes:
        path: The Keras path; of a slot, its name.
        kind: `"parameter"`, `"state"` (not trained) or `"slot"`.
        shape: Of the whole variable.
        dtype: Its name.
        compute_layout: The mesh axis of each dim when the forward pass reads it.
        storage_layout: The mesh axis of each dim of the stored tensor; of the group's buffer for a member.
        storage_shape: The shape of the stored tensor; differs from `shape` when padded or in a group.
        group: The index of its group, or None.
        bytes_whole: Bytes of the whole variable.
        bytes_per_device: Bytes that the fullest device holds; None for a member, whose bytes its group counts.
        gradient_bytes_per_device: Likewise, of its gradient as it waits for the update; 0 without one.
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
        index: Its number.
        kind: `"parameter"` or `"state"`.
        dtype: Of all members.
        members: Their places, in order.
        storage_layout: The mesh axis of each dim of the stored buffer.
        storage_shape: The shape of the buffer: model axes, rows, columns.
        padding: Elements of one model shard that no member uses.
        slots: The names of the slots, each a buffer of the same shape.
        bytes_whole: Bytes of the members, without padding.
        bytes_gathered: Bytes of the buffer on one device once it is gathered over the batch axis.
        bytes_per_device: Bytes of the stored buffer on one device.
        gradient_bytes_per_device: Bytes of the gradients as they wait for the update.
        slot_bytes_per_device: Bytes of all slots.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """What the devices send each other in a step.

    Attributes:
        kind: `"all-gather"`, `"reduce-scatter"` or `"all-reduce"`.
        what: The path of the variable, `"group 3"`, or `"float32 gradients"`.
        axis: The mesh axis over which it runs.
        count: How often in a step.
        bytes: Of the whole tensor on one device: what a gather gives, what a reduction takes. None for activations
            when no `inputs` were given to plan for: they depend on the batch.
        formula: How `bytes` comes about.
        merges: Whether DTensor may merge it with others that do not depend on it: `count` is then the most there are.
    """

    kind: str
    what: str
    axis: str
    count: int
    bytes: int | None
    formula: str
    merges: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """What will be stored where and what a step will send; `print` it, or use it as data.

    Attributes:
        mesh: Axis name to size.
        zero_stage: 0 to 3.
        groups: The groups.
        variables: Each variable of the model once, in the order of its layers.
        slots: Each optimizer variable.
        collectives: What a step sends: `predict_collectives` for variables, `activations.predict` for activations.
        unknown: Why what is sent of activations could not be predicted; empty when it was.
    """

    mesh: dict[str, int]
    zero_stage: int
    groups: tuple[PlannedGroup, ...]
    variables: tuple[PlannedVariable, ...]
    slots: tuple[PlannedVariable, ...]
    collectives: tuple[Collective, ...]
    unknown: str = ""

    @classmethod
    def from_layouts(
        cls,
        planned: Sequence[VariableLayout],
        *,
        slots: Sequence[SlotSpec] = (),
        mesh_shape: Mapping[str, int],
        zero_stage: int,
        activations: Sequence[Collective] = (),
        unknown: str = "",
        uses: Mapping[str, int] | None = None,
    ) -> "ShardingPlan":
        """The plan of variables whose layouts, groups included, are decided.

        A slot of its parameter's shape rests as the parameter is updated, in a group's buffer if the parameter is a
        member. Other slots are laid out by themselves.

        Args:
            planned: The layout of each variable.
            slots: The optimizer's variables.
            mesh_shape: Axis name to size.
            zero_stage: 0 to 3.
            activations: What a step sends of activations.
            unknown: Why that is not known.
            uses: How often the forward pass uses a variable, by path, where that is known.
        """
        by_path = {layout.spec.path: layout for layout in planned if layout.spec.trainable}
        slot_layouts = [_slot_layout(slot, by_path, mesh_shape, zero_stage) for slot in slots]
        slot_names: dict[int, dict[str, None]] = collections.defaultdict(dict)
        for slot, layout in zip(slots, slot_layouts, strict=True):
            if layout.group is not None:
                slot_names[layout.group][slot.name] = None
        members: dict[int, list[VariableLayout]] = collections.defaultdict(list)
        for layout in planned:
            if layout.group is not None:
                members[layout.group].append(layout)
        return cls(
            mesh=dict(mesh_shape),
            zero_stage=zero_stage,
            groups=tuple(
                _planned_group(index, members[index], tuple(slot_names[index]), mesh_shape) for index in sorted(members)
            ),
            variables=tuple(_planned_variable(layout, mesh_shape) for layout in planned),
            slots=tuple(_planned_variable(layout, mesh_shape, slot=True) for layout in slot_layouts),
            collectives=(
                *predict_collectives(planned, mesh_shape=mesh_shape, zero_stage=zero_stage, uses=uses),
                *activations,
            ),
            unknown=unknown,
        )

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    def bytes_per_device(self, kind: str | None = None) -> int:
        """Bytes that the fullest device holds of `"parameter"`, `"state"`, `"gradient"`, `"slot"`, or of all."""
        if kind is None:
            return sum(self.bytes_per_device(each) for each in KINDS)
        _check_kind(kind)
        if kind == "gradient":
            rows: Iterable[Any] = (*self.variables, *self.groups)
            return sum(row.gradient_bytes_per_device or 0 for row in rows)
        if kind == "slot":
            return sum(s.bytes_per_device or 0 for s in self.slots) + sum(g.slot_bytes_per_device for g in self.groups)
        rows = (*self.variables, *self.groups)
        return sum(row.bytes_per_device or 0 for row in rows if row.kind == kind)

    def bytes_on_one_device(self, kind: str | None = None) -> int:
        """Bytes that a single device would hold without sharding."""
        if kind is None:
            return sum(self.bytes_on_one_device(each) for each in KINDS)
        _check_kind(kind)
        if kind == "slot":
            return sum(slot.bytes_whole for slot in self.slots)
        kind = "parameter" if kind == "gradient" else kind
        return sum(variable.bytes_whole for variable in self.variables if variable.kind == kind)

    def collective_count(self) -> int:
        """How many collectives a step has."""
        return sum(collective.count for collective in self.collectives)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: JSON types only, apart from tuples."""
        totals = {
            kind or "all": {
                "bytes_per_device": self.bytes_per_device(kind),
                "bytes_on_one_device": self.bytes_on_one_device(kind),
            }
            for kind in (*KINDS, None)
        }
        return {**dataclasses.asdict(self), "world_size": self.world_size, "totals": totals}

    def to_json(self, indent: int | None = None) -> str:
        """The plan as a JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_keras_layout_map(self, device_mesh: Any = None) -> keras.distribution.LayoutMap:
        """The compute layouts as a `keras.distribution.LayoutMap`, for `keras.distribution.ModelParallel` on JAX.

        It has an entry for each variable that a model axis shards, with its path as the pattern: Keras matches the
        whole path, with `re.fullmatch`. What the stage shards over the batch axis is not in it. Under `ModelParallel`
        slots are sharded like their parameters. The object can be pickled, and loaded where Keras runs on JAX.

        Args:
            device_mesh: A `keras.distribution.DeviceMesh` with the plan's axes. By default one of the plan's shape,
                after an axis `batch` of size 1 if the plan has none, since `ModelParallel` shards data over one of
                the axes; its devices are named as JAX names them: `cpu:0`, `cpu:1`, ...

        Returns:
            The layout map. `ModelParallel(layout_map=..., batch_dim_name="batch")` takes it.

        Raises:
            LayoutError: `device_mesh` is no DeviceMesh, or lacks an axis of the plan that shards a variable.

        Example:

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
            shape = self.mesh if BATCH_AXIS in self.mesh else {BATCH_AXIS: 1, **self.mesh}
            started = runtime.current()
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

    def tables(self) -> tuple[rich.table.Table, rich.table.Table]:
        """The plan as two rich tables: what rests where, and what a step sends."""
        return self._storage_table(), self._collectives_table()

    def __str__(self) -> str:
        notes = [f"Not predicted: {self.unknown}"] if self.unknown else []
        return tables.as_text(*self.tables(), *notes)

    def _storage_table(self) -> rich.table.Table:
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        table = rich.table.Table(
            title=f"Plan for {self.world_size} devices ({axes}), ZeRO stage {self.zero_stage}", box=rich.box.SIMPLE_HEAD
        )
        for column in ("variable", "stored shape", "dtype", "storage layout"):
            table.add_column(column, overflow="fold")
        table.add_column("on one device", justify="right", no_wrap=True)
        table.add_column("bytes/device", justify="right", no_wrap=True)
        for group in self.groups:
            name = f"group {group.index}: {len(group.members)} variables from {group.members[0].path}"
            _add_row(table, name, group, group.bytes_per_device)
        small: list[PlannedVariable] = []
        for variable in self.variables:
            if variable.kind == "state" and variable.bytes_whole < layouts.WHOLE_BELOW_BYTES and variable.group is None:
                small.append(variable)
            elif variable.bytes_per_device is not None:
                _add_row(table, variable.path, variable, variable.bytes_per_device)
        if small:
            whole, held = sum(v.bytes_whole for v in small), sum(v.bytes_per_device or 0 for v in small)
            table.add_row(f"{len(small)} small untrained variables", "", "", "", f"{whole:,}", f"{held:,}")
        table.add_section()
        labels = ("parameters", "untrained state", "gradients until the update", "optimizer slots", "all")
        for kind, label in zip((*KINDS, None), labels, strict=True):
            numbers = f"{self.bytes_on_one_device(kind):,}", f"{self.bytes_per_device(kind):,}"
            table.add_row(f"total {label}", "", "", "", *numbers, style="bold")
        return table

    def _collectives_table(self) -> rich.table.Table:
        table = rich.table.Table(title="Collectives of a step, predicted", box=rich.box.SIMPLE_HEAD)
        for column in ("kind", "axis", "formula"):
            table.add_column(column, overflow="fold")
        table.add_column("count", justify="right")
        table.add_column("bytes", justify="right")
        sums: dict[tuple[str, str, str], list[int]] = {}
        for each in self.collectives:
            total = sums.setdefault((each.kind, each.axis, each.formula), [0, 0])
            total[0] += each.count
            total[1] += each.count * (each.bytes or 0)
        for key, (count, bytes_) in sums.items():
            table.add_row(*key, f"{count:,}", f"{bytes_:,}")
        table.add_section()
        total_bytes = sum(each.count * (each.bytes or 0) for each in self.collectives)
        table.add_row("total", "", "", f"{self.collective_count():,}", f"{total_bytes:,}", style="bold")
        return table


def predict_collectives(
    planned: Sequence[VariableLayout],
    *,
    mesh_shape: Mapping[str, int],
    zero_stage: int,
    uses: Mapping[str, int] | None = None,
) -> tuple[Collective, ...]:
    """What a training step sends over the batch axis.

    Stage 3 gathers each group and each variable that rests sharded once, for the forward pass; the
    backward pass uses the same tensor. Stages 1 and 2 gather what was updated shard by shard. From stage 1 on the
    gradient of a variable that stands alone and is cut along one of its dims is reduce-scattered (on CPU an all-reduce
    and a local slice). All other gradients of one dtype are merged by DTensor in one all-reduce, which the loss and the
    metrics join.

    Not predicted: what a custom step reduces besides, and batch statistics.

    Args:
        planned: The layout of each variable, groups included.
        mesh_shape: Axis name to size.
        zero_stage: 0 to 3.
        uses: How often the forward pass uses a variable, by path. By default what a functional model tells of its
            layers.
    """
    if mesh_shape.get(BATCH_AXIS, 1) == 1:
        return ()
    found = functools.partial(Collective, axis=BATCH_AXIS)
    units = _units(planned)
    collectives = []
    for layout in units:
        if _is_gathered(layout, zero_stage):
            what = "buffer" if layout.flat is not None else "variable"
            collectives.append(
                found(
                    kind="all-gather",
                    what=_unit_name(layout),
                    count=1,
                    bytes=_gathered_bytes(layout, mesh_shape),
                    formula=f"bytes({what}) over batch, {'forward' if zero_stage == 3 else 'after the update'}",
                )
            )
    merged: dict[str, list[int]] = {"float32": []}
    for layout in planned:
        if not layout.spec.trainable:
            continue
        bytes_ = _device_bytes(layout.spec.shape, layout.compute, mesh_shape, layout.spec.dtype)
        scattered, together = _contributions(layout, uses or {})
        if scattered:
            collectives.append(
                found(
                    kind="reduce-scatter",
                    what=layout.spec.path,
                    count=scattered,
                    bytes=bytes_,
                    formula="bytes(gradient) over batch, for each use of the layer",
                )
            )
        merged.setdefault(layout.spec.dtype, []).append(together * bytes_)
    for dtype, parts in merged.items():
        scalars = ", with loss and metrics" if dtype == "float32" else ""
        collectives.append(
            found(
                kind="all-reduce",
                what=f"{dtype} gradients",
                count=1,
                bytes=sum(parts),
                formula=f"bytes(all other {dtype} gradients) over batch{scalars}",
            )
        )
    return tuple(collectives)


def _contributions(layout: VariableLayout, known_uses: Mapping[str, int]) -> tuple[int, int]:
    """How many parts of a variable's gradient are reduce-scattered, and how many join the merged all-reduce.

    Each use of a layer in a functional model adds a part, which DTensor reduces by itself. The part of an embedding
    lookup is summed by rows first, so with tied embeddings one of two is fused with its scatter. At stage 1 the parts
    are added up before the scatter, so that more than one are not fused.
    """
    uses = known_uses.get(layout.spec.path) or max(1, len(_private.layer_uses(layout.spec.layer)))
    if not layout.update_sharded or layout.sharded is None or (uses > 1 and not layout.reduce_scatter):
        return 0, uses
    if isinstance(layout.spec.layer, keras.layers.Embedding) and layout.compute[0] is not None:
        return 0, uses  # vocabulary.lookup rearranges what it reduced, and adds the tied logits' part to it.
    if uses > 1 and isinstance(layout.spec.layer, keras.layers.Embedding):
        return 1, uses - 1
    return uses, 0


def gathered_bytes(planned: Sequence[VariableLayout], *, mesh_shape: Mapping[str, int], zero_stage: int) -> int:
    """Bytes on one device of all that a step gathers over the batch axis."""
    if mesh_shape.get(BATCH_AXIS, 1) == 1:
        return 0
    return sum(_gathered_bytes(each, mesh_shape) for each in _units(planned) if _is_gathered(each, zero_stage))


def updated_bytes(planned: Sequence[VariableLayout], *, mesh_shape: Mapping[str, int]) -> int:
    """Bytes on one device of the parameters in the layouts in which they are updated."""
    updated = [each.slot(each.spec) for each in _units(planned) if each.spec.trainable]
    return sum(_device_bytes(each.storage_shape, each.storage, mesh_shape, each.spec.dtype) for each in updated)


def _is_gathered(layout: VariableLayout, zero_stage: int) -> bool:
    """Whether a step gathers it: at stage 3 to read it, at stages 1 and 2 after the update."""
    return layout.splits and (
        layout.store_sharded if zero_stage == 3 else layout.update_sharded and layout.spec.trainable
    )


def _units(planned: Sequence[VariableLayout]) -> list[VariableLayout]:
    """What is communicated as one: variables that stand alone, and of each group its first member."""
    return [layout for layout in planned if layout.group is None or layout.member == 0]


def _unit_name(layout: VariableLayout) -> str:
    return layout.spec.path if layout.group is None else f"group {layout.group}"


def _device_bytes(shape: tuple[int, ...], axes: Axes, mesh_shape: Mapping[str, int], dtype: str) -> int:
    """Bytes that one device holds of a tensor in a layout."""
    elements = math.prod(shape) // math.prod(mesh_shape[axis] for axis in axes if axis is not None)
    return elements * layouts.itemsize(dtype)


def _gathered_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int]) -> int:
    """Bytes of a variable, or of its buffer, on one device once it is gathered over the batch axis."""
    if layout.flat is not None:
        return _device_bytes(layout.flat.buffer_shape, layout.flat.gathered_axes, mesh_shape, layout.spec.dtype)
    return _device_bytes(layout.spec.shape, layout.compute, mesh_shape, layout.spec.dtype)


def _gradient_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int], *, scattered: bool) -> int:
    """Bytes of a gradient on one device, as a shard or as it comes out of the backward pass."""
    if scattered and layout.splits:
        shape, axes = layout.spec.shape, layout.sharded
        if layout.flat is not None:
            shape, axes = layout.flat.buffer_shape, layout.flat.buffer_axes
        assert axes is not None
        return _device_bytes(shape, axes, mesh_shape, layout.spec.dtype)
    if layout.grouped:
        return _gathered_bytes(layout, mesh_shape)
    return _device_bytes(layout.spec.shape, layout.compute, mesh_shape, layout.spec.dtype)


def _slot_layout(
    slot: SlotSpec, by_path: Mapping[str, VariableLayout], mesh_shape: Mapping[str, int], zero_stage: int
) -> VariableLayout:
    # Accumulators of a group's members stand alone: strategy.create_slot.
    alone = slot.reference is not None and by_path[slot.reference].grouped and slot.name == "gradient_accumulator"
    if slot.reference is not None and not alone:
        return by_path[slot.reference].slot(slot.spec)
    return layouts.plan_variable(
        slot.spec, layout_map=LayoutMap(), mesh_shape=mesh_shape, zero_stage=zero_stage, slot=True
    )


def _planned_variable(layout: VariableLayout, mesh_shape: Mapping[str, int], *, slot: bool = False) -> PlannedVariable:
    spec = layout.spec
    member = layout.group is not None
    kind = "slot" if slot else "parameter" if spec.trainable else "state"
    gradient = 0
    if kind == "parameter":
        gradient = _gradient_bytes(layout, mesh_shape, scattered=layout.reduce_scatter)
    return PlannedVariable(
        path=spec.path,
        kind=kind,
        shape=spec.shape,
        dtype=spec.dtype,
        compute_layout=layout.compute,
        storage_layout=layout.storage,
        storage_shape=layout.storage_shape,
        group=layout.group,
        bytes_whole=math.prod(spec.shape) * layouts.itemsize(spec.dtype),
        bytes_per_device=None
        if member
        else _device_bytes(layout.storage_shape, layout.storage, mesh_shape, spec.dtype),
        gradient_bytes_per_device=None if member else gradient,
    )


def _planned_group(
    index: int, members: Sequence[VariableLayout], slots: tuple[str, ...], mesh_shape: Mapping[str, int]
) -> PlannedGroup:
    first = members[0]
    form, spec = first.flat, first.spec
    assert form is not None and len(form.members) == len(members), index
    resting = first.slot(spec)
    used = sum(member.elements for member in form.members)
    slot_bytes = _device_bytes(resting.storage_shape, resting.storage, mesh_shape, spec.dtype)
    gradient_bytes = _gradient_bytes(first, mesh_shape, scattered=first.reduce_scatter) if spec.trainable else 0
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
        bytes_whole=sum(math.prod(layout.spec.shape) for layout in members) * layouts.itemsize(spec.dtype),
        bytes_gathered=_gathered_bytes(first, mesh_shape),
        bytes_per_device=_device_bytes(first.storage_shape, first.storage, mesh_shape, spec.dtype),
        gradient_bytes_per_device=gradient_bytes,
        slot_bytes_per_device=len(slots) * slot_bytes,
    )


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise StrategyError(f"Unknown kind of variable. Kinds: {KINDS}. Received: kind={kind!r}")


def _add_row(table: rich.table.Table, name: str, row: PlannedVariable | PlannedGroup, bytes_: int) -> None:
    layout = str(row.storage_layout).replace("'", "").replace("None", "-")
    table.add_row(name, str(row.storage_shape), row.dtype, layout, f"{row.bytes_whole:,}", f"{bytes_:,}")
