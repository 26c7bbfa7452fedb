"""The settings of a strategy on a mesh, and the models that are attached to the strategy."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.config import ShardingConfig, ZeroStage
from tfshard.layouts.groups import may_group
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.storage.variables import ShardedVariable


class StrategyBase:
    """The part of a strategy that modules below `strategy.py` use.

    Args:
        mesh: The mesh.
        config: The settings.

    Attributes:
        attached: The `AttachedModel` of each model of this strategy (`attached_model.attached`).
        moves: Number of times that variables moved to other storages. A function that was traced before such a move
            reads the old storages.
        detached: Number of models that moved to another strategy. Other models may have shared variables with them.
        pipelined_models: Models that a pipeline computes in stages on several meshes.
        stage_models: Pipeline stages on this mesh.
        has_births: True if variables were created under the strategy and their model is not attached yet.
        born_in_steps: Variables that were created while a step was traced, by id.
        functions: The step function for each `tf.function` of a user. Emptied when variables move.
    """

    def __init__(self, mesh: dtensor.Mesh, config: ShardingConfig):
        self.config = config
        self.mesh = mesh
        self.mesh_shape = axis_sizes(mesh)
        self.attached: _private.WeakIdentityDict[keras.Model, Any] = _private.WeakIdentityDict()
        self.moves = 0
        self.detached = 0
        self.functions: _private.WeakIdentityDict[Callable[..., object], Callable[..., object]] = (
            _private.WeakIdentityDict()
        )
        self.has_births = False
        self.born_in_steps: weakref.WeakValueDictionary[int, ShardedVariable] = weakref.WeakValueDictionary()
        self.pipelined_models: _private.WeakIdentitySet[keras.Model] = _private.WeakIdentitySet()
        self.stage_models: _private.WeakIdentitySet[keras.Model] = _private.WeakIdentitySet()

    @property
    def auto(self) -> bool:
        """True if tfshard finds a layout map for each model."""
        return self.config.layout_map is None

    @property
    def layout_map(self) -> LayoutMap:
        """The layout map that the user gave. It is empty without one, and with `layout_map="auto"`."""
        return LayoutMap() if self.config.layout_map is None else self.config.layout_map

    @property
    def zero_stage(self) -> ZeroStage:
        """The ZeRO stage, which is also its number."""
        return self.config.zero_stage

    def plan_variable(self, spec: VariableSpec) -> VariableLayout:
        """Return the layout of a variable outside of any model. No device is used."""
        layout = variable_layout.plan_variable(spec, self.config, mesh_shape=self.mesh_shape)
        reduction = self.config.reduction
        return layout if reduction is None else reduction.choose(layout, self.mesh_shape)

    def may_move(self, layout: VariableLayout) -> bool:
        """Return True if a variable may move once its model is known: into a group, or to its layout in `"auto"`."""
        policy, shard_params = self.config.analyzer, self.config.zero_stage.shard_params
        return self.auto or (policy is not None and may_group(policy, layout, shard_params=shard_params))

    def place(
        self,
        specs: Sequence[VariableSpec],
        layout_map: LayoutMap,
        stored: Sequence[VariableLayout | None] = (),
    ) -> ModelPlacement:
        """Place variables by the settings of the strategy.

        Args:
            specs: The variables.
            layout_map: The dims that the model axes shard.
            stored: The layouts of variables that do not move; None for other variables.
        """
        config = dataclasses.replace(self.config, layout_map=layout_map)
        return ModelPlacement.of(specs, config, mesh_shape=self.mesh_shape, stored=stored)

    def check_accepts(self, model: keras.Model) -> None:
        """Raise `StrategyError` if this strategy cannot take the model."""
