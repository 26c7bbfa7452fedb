"""Where the variables of a model go under a strategy: its layout map, its plan for one variable, its placement."""

import dataclasses
import weakref
from collections.abc import Sequence

import keras
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.graph import auto_layout, inventory
from tfshard.layouts import compressed_form, variable_layout
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.config import GroupPolicy, ShardingConfig
from tfshard.layouts.groups import may_group
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning import linter
from tfshard.storage.variables import ShardedVariable


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Basis:
    """What the placement of a model is made from. It is made anew when one of these is another.

    Attributes:
        specs: The variables. Whether their layers are others, the ids say.
        layers: The ids of the layers of the variables.
        layout_map: The entries of the model's layout map.
        groups: What makes the groups, if the model may have some.
    """

    specs: list[VariableSpec]
    layers: list[int]
    layout_map: list[tuple[str, object]]
    groups: GroupPolicy | None


class Placer:
    """The part of a strategy that says where the variables of a model go. It changes none.

    Args:
        mesh: The mesh.
        config: The settings.
    """

    def __init__(self, mesh: dtensor.Mesh, config: ShardingConfig):
        self.config = config
        self.mesh = mesh
        self.mesh_shape = axis_sizes(mesh)
        self._checked: weakref.WeakSet[keras.Model] = weakref.WeakSet()
        self._placements: weakref.WeakKeyDictionary[keras.Model, tuple[_Basis, ModelPlacement]] = (
            weakref.WeakKeyDictionary()
        )
        self._found_maps: weakref.WeakKeyDictionary[keras.Model, LayoutMap] = weakref.WeakKeyDictionary()

    @property
    def auto(self) -> bool:
        """True if tfshard finds a layout map for each model."""
        return self.config.layout_map is None

    @property
    def layout_map(self) -> LayoutMap:
        """The layout map that the user gave. It is empty without one, and with `layout_map="auto"`."""
        return LayoutMap() if self.config.layout_map is None else self.config.layout_map

    @property
    def zero_stage(self) -> int:
        """The number of the ZeRO stage."""
        return self.config.zero_stage.number

    def plan_variable(self, spec: VariableSpec) -> VariableLayout:
        """Return the layout of a variable by itself under this strategy. No device is used."""
        layout = variable_layout.plan_variable(spec, self.config, mesh_shape=self.mesh_shape)
        return compressed_form.chosen(layout, self.config.compression, self.mesh_shape)

    def layout_map_for(self, model: keras.Model) -> LayoutMap:
        """The layout map of a model: with `layout_map="auto"` the one found for it, empty until it is built."""
        if not self.auto or not model.built:
            return self.layout_map
        if model not in self._found_maps:
            found = auto_layout.auto_layout_map(model, self.mesh)
            tables = self.config.tables
            self._found_maps[model] = found if tables is None else tables.take_out_of(found)
        return self._found_maps[model]

    def may_move(self, layout: VariableLayout) -> bool:
        """Whether a variable may go elsewhere once its model is known: into a group, or to where `"auto"` has it."""
        policy, shard_params = self.config.analyzer, self.config.zero_stage.shard_params
        return self.auto or (policy is not None and may_group(policy, layout, shard_params=shard_params))

    def placement_of(self, model: keras.Model) -> ModelPlacement:
        """Where the variables of a built model go, groups included.

        Made once, and anew when the model's variables, its layout map or its right to groups have changed.
        """
        return self._placement(model)

    def _placement(self, model: keras.Model, *, anew: bool = False) -> ModelPlacement:
        """Args:
        model: The model.
        anew: Whether what is sharded already goes elsewhere, too: another strategy put it where it is.
        """
        owned = inventory.owned_variables(model)
        specs, resting = [], []
        for variable, layer in owned:
            current = _private.backend_variable(variable)
            spec, rests = inventory.variable_spec(variable, layer), None
            if isinstance(current, ShardedVariable) and not anew:
                # What it was born with. Variables of a model that its first step built were made outside of its name
                # scopes, and one that is frozen stays where it is.
                rests = current.layout
                spec = dataclasses.replace(rests.spec, path=variable.path, layer=layer)
            specs.append(spec)
            resting.append(rests)
        layout_map = self.layout_map_for(model)
        basis = _Basis(
            specs=specs,
            layers=[id(layer) for _, layer in owned],
            layout_map=list(layout_map.items()),
            groups=self.config.analyzer,
        )
        made = self._placements.get(model)
        if made is not None and made[0] == basis and _still_holds(made[1], resting):
            # The number of microbatches may have changed since.
            config = dataclasses.replace(self.config, layout_map=layout_map)
            return _with_layers(dataclasses.replace(made[1], config=config), owned)
        placement = self.place(specs, layout_map, resting)
        # Without the layers: they would keep the model, and with it this entry.
        self._placements[model] = (
            dataclasses.replace(basis, specs=[dataclasses.replace(spec, layer=None) for spec in specs]),
            _with_layers(placement, [(variable, None) for variable, _ in owned]),
        )
        return placement

    def place(
        self,
        specs: Sequence[VariableSpec],
        layout_map: LayoutMap,
        resting: Sequence[VariableLayout | None] = (),
    ) -> ModelPlacement:
        """Place variables by all settings of the strategy.

        Args:
            specs: The variables.
            layout_map: Which of their dims the model axes shard.
            resting: The layouts of those that stay where they are; None for others.
        """
        config = dataclasses.replace(self.config, layout_map=layout_map)
        return ModelPlacement.of(specs, config, mesh_shape=self.mesh_shape, resting=resting)

    def check_layouts(self, model: keras.Model) -> None:
        """Looks the layout map over for a built model, once (`tfshard.lint`).

        Raises:
            LayoutError: It does not fit the model, or leaves a large matrix whole that it does not mention. With
                `layout_map="auto"`: it found nothing to shard over a model axis.
        """
        if model.built and self.config.tables is not None and model not in self._checked:
            self.config.tables.check_used([spec.path for spec in self.placement_of(model).specs])
        if model.built and model not in self._checked:
            (linter.check_found if self.auto else linter.check)(model, self.placement_of(model))
            self._checked.add(model)


def _still_holds(placement: ModelPlacement, resting: list[VariableLayout | None]) -> bool:
    """Whether the variables that are in groups are in those of the placement."""
    pairs = zip(placement.variables, resting, strict=True)
    return all(rests is None or not rests.grouped or rests == layout for layout, rests in pairs)


def _with_layers(placement: ModelPlacement, owned: list[tuple[keras.Variable, keras.Layer | None]]) -> ModelPlacement:
    """A placement whose specs have the layers of the variables."""
    variables = tuple(
        dataclasses.replace(layout, spec=dataclasses.replace(layout.spec, layer=layer))
        for layout, (_, layer) in zip(placement.variables, owned, strict=True)
    )
    return dataclasses.replace(placement, variables=variables)
