"""ModelPlacement: the layout of each variable of a model, and of each optimizer slot. Decided once, used by all.

`plan` predicts from the placement, `lint` judges it, `ShardedStrategy` moves the variables to it, and a report is
compared with it. Pure Python over specs: nothing here touches a device.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from tfshard.errors import LayoutError
from tfshard.layouts import groups, variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.config import GroupPolicy, ShardingConfig
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.variable_kind import VariableKind
from tfshard.layouts.variable_layout import VariableLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlacement:
    """The layouts of the variables of a model.

    Attributes:
        mesh_shape: Axis name to size.
        config: The settings, with the layout map of this model.
        variables: The layout of each variable, groups included, in the order of the model's layers.
        faults: The rules of the layout map that are impossible, as messages, by the variable's index in `variables`.
            A variable with a fault is laid out as if no rule named it.
    """

    mesh_shape: MeshAxes
    config: ShardingConfig
    variables: tuple[VariableLayout, ...]
    faults: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        specs: Iterable[VariableSpec],
        config: ShardingConfig,
        *,
        mesh_shape: Mapping[str, int],
        stored: Sequence[VariableLayout | None] = (),
    ) -> "ModelPlacement":
        """Decide the layouts of the variables of a model.

        Args:
            specs: The variables, each once, in the order of the model's layers.
            config: The settings. If `config.layout_map` is None, no model axis shards a variable.
            mesh_shape: Axis name to size.
            stored: For each variable, its layout if the mesh stores the variable already. A grouped variable stays in
                its group if its rule allows it: another model may share the variable, and functions that read the
                variable stay valid.

        Raises:
            LayoutError: The layout map names an axis that the mesh does not have.
            StrategyError: A variable cannot be of the kind that `config.kinds` gives it.
        """
        axes = MeshAxes.of(mesh_shape)
        if config.layout_map is None:
            config = dataclasses.replace(config, layout_map=LayoutMap())
        config.check_mesh(axes)
        alone: list[VariableLayout] = []
        faults: dict[int, str] = {}
        for number, spec in enumerate(specs):
            try:
                layout = variable_layout.plan_variable(spec, config, mesh_shape=mesh_shape)
            except LayoutError as error:
                faults[number] = str(error)
                layout = variable_layout.plan_variable(spec, _by_stage(config), mesh_shape=mesh_shape)
            alone.append(layout)
        variables = tuple(alone)
        if config.analyzer is not None:
            variables = _grouped(config.analyzer, alone, list(stored) or [None] * len(alone), mesh_shape)
        if config.reduction is not None:
            variables = tuple(config.reduction.choose(layout, axes) for layout in variables)
        return cls(mesh_shape=axes, config=config, variables=variables, faults=faults)

    @property
    def layout_map(self) -> LayoutMap:
        """The dims that model axes shard."""
        assert self.config.layout_map is not None
        return self.config.layout_map

    @property
    def specs(self) -> tuple[VariableSpec, ...]:
        """The specs of the variables."""
        return tuple(layout.spec for layout in self.variables)

    def check(self) -> "ModelPlacement":
        """Return this placement if the layout map fits.

        Raises:
            LayoutError: A rule is impossible, or a pattern that is not optional matches no variable.
        """
        self.check_faults()
        variable_layout.check_patterns(self.layout_map, self.specs)
        return self

    def check_faults(self) -> None:
        """Raise `LayoutError` with the first fault, if the layout map has faults."""
        for text in self.faults.values():
            raise LayoutError(text)

    def groups(self) -> dict[int, list[VariableLayout]]:
        """Return the members of each group by its number, in the order of the model's layers."""
        found: dict[int, list[VariableLayout]] = {}
        for layout in self.variables:
            if layout.group is not None:
                found.setdefault(layout.group, []).append(layout)
        return dict(sorted(found.items()))

    def kinds(self) -> dict[VariableKind, list[VariableLayout]]:
        """Return the variables of each kind, in the order of the model's layers."""
        found: dict[VariableKind, list[VariableLayout]] = {}
        for layout in self.variables:
            if layout.kind is not None:
                found.setdefault(layout.kind, []).append(layout)
        return found

    def has_complete_groups(self) -> bool:
        """Return True if every group consists of variables of this model."""
        return all(
            layout.flat is not None and len(layout.flat.members) == len(members)
            for members in self.groups().values()
            for layout in members
        )

    def slot(self, spec: VariableSpec, parameter: str | None) -> VariableLayout:
        """Return the layout of a slot.

        Args:
            spec: The slot.
            parameter: The path of the slot's trained variable, or None.
        """
        owner = None if parameter is None else self._trained[parameter]
        return slot_layout(spec, owner, self.config, mesh_shape=self.mesh_shape)

    @functools.cached_property
    def _trained(self) -> dict[str, VariableLayout]:
        return {layout.spec.path: layout for layout in self.variables if layout.spec.trainable}


def follows(spec: VariableSpec, parameter: VariableLayout) -> bool:
    """Return True if a slot is stored like its parameter is updated, which needs equal shapes.

    If the parameter is in a group, a buffer of the group stores the slot.
    """
    return parameter.spec.shape == spec.shape


def _accumulates(spec: VariableSpec) -> bool:
    """Return True if a slot holds the sum of gradients (Keras's `gradient_accumulation_steps`)."""
    return spec.path.endswith("gradient_accumulator")


def _by_stage(config: ShardingConfig) -> ShardingConfig:
    """Return the settings of a variable that only the ZeRO stage shards."""
    return ShardingConfig(layout_map=None, zero_stage=config.zero_stage)


def slot_layout(
    spec: VariableSpec, parameter: VariableLayout | None, config: ShardingConfig, *, mesh_shape: Mapping[str, int]
) -> VariableLayout:
    """Return the layout of an optimizer variable: like its parameter, or alone, without a rule of the layout map.

    If the parameter is not grouped, a step reads its accumulated gradient in the layout of the gradient that is added.
    With the compute layout, every step would gather the accumulated gradient, as it does for the buffer of a group.

    Args:
        spec: The slot.
        parameter: The layout of the slot's parameter, or None.
        config: The settings.
        mesh_shape: Axis name to size.
    """
    if parameter is not None and follows(spec, parameter):
        slot = parameter.slot(spec)
        is_read_alone = _accumulates(spec) and not parameter.grouped
        return dataclasses.replace(slot, compute=parameter.gradient) if is_read_alone else slot
    return variable_layout.plan_variable(spec, _by_stage(config), mesh_shape=mesh_shape, slot=True)


def _grouped(
    policy: GroupPolicy,
    alone: Sequence[VariableLayout],
    stored: Sequence[VariableLayout | None],
    mesh_shape: Mapping[str, int],
) -> tuple[VariableLayout, ...]:
    """Group the variables that are in no group yet, and return all layouts.

    Args:
        policy: The sizes of variables and groups.
        alone: The layout of each variable alone.
        stored: The layout in which the mesh stores each variable, or None.
        mesh_shape: Axis name to size.
    """
    kept = [
        before if before is not None and before.grouped and _allows(layout, before) else None
        for layout, before in zip(alone, stored, strict=True)
    ]
    found = iter(
        groups.group(
            policy,
            [layout for layout, stays in zip(alone, kept, strict=True) if stays is None],
            mesh_shape=mesh_shape,
        )
    )
    first = 1 + max((stays.group for stays in kept if stays is not None and stays.group is not None), default=-1)
    placed = []
    for stays in kept:
        layout = stays or next(found)
        if stays is None and layout.group is not None:
            layout = dataclasses.replace(layout, group=first + layout.group)
        placed.append(layout)
    return tuple(placed)


def _allows(alone: VariableLayout, before: VariableLayout) -> bool:
    """Return True if a variable may stay in its group: its spec and its compute layout are unchanged."""
    return (before.spec, before.compute) == (alone.spec, alone.compute)
