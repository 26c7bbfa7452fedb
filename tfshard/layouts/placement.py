"""ModelPlacement: where each variable of a model goes, and each slot of its optimizer. Decided once, used by all.

`plan` predicts from it, `lint` judges it, `ShardedStrategy` brings the variables there, and a report is compared with
it. Pure Python over specs: nothing here touches a device.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from tfshard.errors import LayoutError
from tfshard.layouts import compressed_form, groups, variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.config import GroupPolicy, ShardingConfig
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.variable_layout import VariableLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlacement:
    """Where the variables of a model go.

    Attributes:
        mesh_shape: Axis name to size.
        config: The settings, with the layout map of this model.
        variables: The layout of each variable, groups included, in the order of the model's layers.
        faults: What the layout map says that cannot be done, by the variable's place in `variables`. Such a variable
            is laid out as if no rule named it.
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
        resting: Sequence[VariableLayout | None] = (),
    ) -> "ModelPlacement":
        """Decide where the variables of a model go.

        Args:
            specs: The variables, each once, in the order of the model's layers.
            config: The settings. If `config.layout_map` is None, no model axis shards a variable.
            mesh_shape: Axis name to size.
            resting: For each variable, its layout if it is stored on the mesh already. A variable in a group stays
                there if its rule allows it: another model may share the variable, and functions that read it stay
                valid.

        Raises:
            LayoutError: The layout map names an axis that the mesh does not have.
            StrategyError: A variable that `config.tables` names cannot be an embedding table.
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
            variables = _grouped(config.analyzer, alone, list(resting) or [None] * len(alone), mesh_shape)
        variables = tuple(compressed_form.chosen(layout, config.compression, axes) for layout in variables)
        return cls(mesh_shape=axes, config=config, variables=variables, faults=faults)

    @property
    def layout_map(self) -> LayoutMap:
        """The dims that model axes shard."""
        assert self.config.layout_map is not None
        return self.config.layout_map

    @property
    def specs(self) -> tuple[VariableSpec, ...]:
        """The variables."""
        return tuple(layout.spec for layout in self.variables)

    def check(self) -> "ModelPlacement":
        """This placement, if the layout map fits.

        Raises:
            LayoutError: It says what cannot be done, or a pattern that is not optional matches no variable.
        """
        self.check_faults()
        variable_layout.check_patterns(self.layout_map, self.specs)
        return self

    def check_faults(self) -> None:
        """Raises `LayoutError` if the layout map says what cannot be done: with the first such fault."""
        for text in self.faults.values():
            raise LayoutError(text)

    def groups(self) -> dict[int, list[VariableLayout]]:
        """The members of each group, in the order of the model's layers, by its number."""
        found: dict[int, list[VariableLayout]] = {}
        for layout in self.variables:
            if layout.group is not None:
                found.setdefault(layout.group, []).append(layout)
        return dict(sorted(found.items()))

    def has_whole_groups(self) -> bool:
        """Whether every group consists of variables of this model."""
        return all(
            layout.flat is not None and len(layout.flat.members) == len(members)
            for members in self.groups().values()
            for layout in members
        )

    def slot(self, spec: VariableSpec, parameter: str | None) -> VariableLayout:
        """Where a slot goes.

        Args:
            spec: The slot.
            parameter: The path of the trained variable that it belongs to, or None.
        """
        owner = None if parameter is None else self._trained[parameter]
        return slot_layout(spec, owner, self.config, mesh_shape=self.mesh_shape)

    @functools.cached_property
    def _trained(self) -> dict[str, VariableLayout]:
        return {layout.spec.path: layout for layout in self.variables if layout.spec.trainable}


def follows(spec: VariableSpec, parameter: VariableLayout) -> bool:
    """Whether a slot rests as its parameter is updated, in a buffer of its group if it has one: if it has its shape."""
    return parameter.spec.shape == spec.shape


def _accumulates(spec: VariableSpec) -> bool:
    """Whether a slot holds the sum of gradients (Keras's `gradient_accumulation_steps`)."""
    return spec.path.endswith("gradient_accumulator")


def _by_stage(config: ShardingConfig) -> ShardingConfig:
    """Return the settings of a variable that only the ZeRO stage shards."""
    return ShardingConfig(layout_map=None, zero_stage=config.zero_stage)


def slot_layout(
    spec: VariableSpec, parameter: VariableLayout | None, config: ShardingConfig, *, mesh_shape: Mapping[str, int]
) -> VariableLayout:
    """Where a variable of an optimizer goes: after its parameter, or by itself, which no rule of a layout map names.

    The accumulated gradient of a variable that stands alone is read in the layout of the gradient to which it is added.
    Read whole, it would be gathered in each step, as the buffer of a group is.

    Args:
        spec: The slot.
        parameter: The layout of the parameter that it belongs to, if it does.
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
    resting: Sequence[VariableLayout | None],
    mesh_shape: Mapping[str, int],
) -> tuple[VariableLayout, ...]:
    """The layouts with groups for those variables that are in none yet.

    Args:
        policy: The sizes of variables and groups.
        alone: The layout of each variable by itself.
        resting: Where it rests now, if it does.
        mesh_shape: Axis name to size.
    """
    settled = [
        rests if rests is not None and rests.grouped and _allows(layout, rests) else None
        for layout, rests in zip(alone, resting, strict=True)
    ]
    found = iter(
        groups.group(
            policy,
            [layout for layout, stays in zip(alone, settled, strict=True) if stays is None],
            mesh_shape=mesh_shape,
        )
    )
    first = 1 + max((stays.group for stays in settled if stays is not None and stays.group is not None), default=-1)
    placed = []
    for stays in settled:
        layout = stays or next(found)
        if stays is None and layout.group is not None:
            layout = dataclasses.replace(layout, group=first + layout.group)
        placed.append(layout)
    return tuple(placed)


def _allows(alone: VariableLayout, rests: VariableLayout) -> bool:
    """Whether a variable may stay in its group: it is still the same, and read as its rule says."""
    return (rests.spec, rests.compute) == (alone.spec, alone.compute)
