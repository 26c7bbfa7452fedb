"""ModelPlacement: where each variable of a model goes, and each slot of its optimizer. Decided once, used by all.

`plan` predicts from it, `lint` judges it, `ShardedStrategy` brings the variables there, and a report is compared with
it. Pure Python over specs: nothing here touches a device.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from tfshard.errors import LayoutError
from tfshard.layouts import compressed_form, variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.compression import Compression
from tfshard.layouts.embedding_tables import EmbeddingTables
from tfshard.layouts.groups import GroupPolicy
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.slot_dtypes import OWN, SlotDtypes
from tfshard.layouts.variable_layout import VariableLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPlacement:
    """Where the variables of a model go.

    Attributes:
        mesh_shape: Axis name to size.
        zero_stage: 0 to 3.
        layout_map: Which dims the model axes shard.
        variables: The layout of each variable, groups included, in the order of the model's layers.
        faults: What the layout map says that cannot be done, by the variable's place in `variables`. Such a variable
            is laid out as if no rule named it.
    """

    mesh_shape: MeshAxes
    zero_stage: int
    layout_map: LayoutMap
    variables: tuple[VariableLayout, ...]
    faults: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        specs: Iterable[VariableSpec],
        *,
        mesh_shape: Mapping[str, int],
        zero_stage: int,
        layout_map: LayoutMap | None = None,
        groups: GroupPolicy | None = None,
        resting: Sequence[VariableLayout | None] = (),
        slot_dtypes: SlotDtypes = OWN,
        slots_on_host: bool = False,
        compression: Compression = None,
        tables: EmbeddingTables | None = None,
    ) -> "ModelPlacement":
        """Decides where the variables of a model go.

        Args:
            specs: The variables, each once, in the order of the model's layers.
            mesh_shape: Axis name to size.
            zero_stage: 0 to 3.
            layout_map: Which dims the model axes shard; by default none.
            groups: Which small variables share a buffer; None for none.
            resting: For each variable, where it rests already, if it does. One that is in a group stays there if its
                rule allows it: another model may have it too, and functions that read it go on.
            slot_dtypes: In which dtype the moments of float32 variables rest.
            slots_on_host: Whether moments that are updated in shards rest on the host.
            compression: What is done with gradients before devices add them up.
            tables: Which variables are embedding tables.

        Raises:
            LayoutError: The layout map names an axis that the mesh does not have.
            StrategyError: An unknown stage; a variable that is to be an embedding table cannot be one.
        """
        variable_layout.check_stage(zero_stage)
        axes = MeshAxes.of(mesh_shape)
        layout_map = LayoutMap() if layout_map is None else layout_map
        layout_map.check_axes(axes)
        alone: list[VariableLayout] = []
        faults: dict[int, str] = {}
        for number, spec in enumerate(specs):
            try:
                layout = variable_layout.plan_variable(
                    spec,
                    layout_map=layout_map,
                    mesh_shape=mesh_shape,
                    zero_stage=zero_stage,
                    slot_dtypes=slot_dtypes,
                    slots_on_host=slots_on_host,
                    tables=tables,
                )
            except LayoutError as error:
                faults[number] = str(error)
                layout = variable_layout.plan_variable(
                    spec, layout_map=LayoutMap(), mesh_shape=mesh_shape, zero_stage=zero_stage
                )
            alone.append(layout)
        variables = tuple(alone)
        if groups is not None:
            variables = _grouped(groups, alone, list(resting) or [None] * len(alone), mesh_shape)
        variables = tuple(compressed_form.chosen(layout, compression, axes) for layout in variables)
        return cls(
            mesh_shape=axes,
            zero_stage=zero_stage,
            layout_map=layout_map,
            variables=variables,
            faults=faults,
        )

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
        return slot_layout(spec, owner, mesh_shape=self.mesh_shape, zero_stage=self.zero_stage)

    @functools.cached_property
    def _trained(self) -> dict[str, VariableLayout]:
        return {layout.spec.path: layout for layout in self.variables if layout.spec.trainable}


def follows(spec: VariableSpec, parameter: VariableLayout) -> bool:
    """Whether a slot rests as its parameter is updated, in a buffer of its group if it has one: if it has its shape."""
    return parameter.spec.shape == spec.shape


def _accumulates(spec: VariableSpec) -> bool:
    """Whether a slot holds the sum of gradients (Keras's `gradient_accumulation_steps`)."""
    return spec.path.endswith("gradient_accumulator")


def slot_layout(
    spec: VariableSpec, parameter: VariableLayout | None, *, mesh_shape: Mapping[str, int], zero_stage: int
) -> VariableLayout:
    """Where a variable of an optimizer goes: after its parameter, or by itself, which no rule of a layout map names.

    The accumulated gradient of a variable that stands alone is read in the layout of the gradient to which it is added.
    Read whole, it would be gathered in each step, as the buffer of a group is.

    Args:
        spec: The slot.
        parameter: The layout of the parameter that it belongs to, if it does.
        mesh_shape: Axis name to size.
        zero_stage: 0 to 3.
    """
    if parameter is not None and follows(spec, parameter):
        slot = parameter.slot(spec)
        is_read_alone = _accumulates(spec) and not parameter.grouped
        return dataclasses.replace(slot, compute=parameter.gradient) if is_read_alone else slot
    return variable_layout.plan_variable(
        spec, layout_map=LayoutMap(), mesh_shape=mesh_shape, zero_stage=zero_stage, slot=True
    )


def _grouped(
    groups: GroupPolicy,
    alone: Sequence[VariableLayout],
    resting: Sequence[VariableLayout | None],
    mesh_shape: Mapping[str, int],
) -> tuple[VariableLayout, ...]:
    """The layouts with groups for those variables that are in none yet.

    Args:
        groups: Makes them.
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
            [layout for layout, stays in zip(alone, settled, strict=True) if stays is None], mesh_shape=mesh_shape
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
