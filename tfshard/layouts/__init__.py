"""Layouts: which mesh axis shards which dim of each variable. Pure Python over names, shapes and sizes.

No module here touches a device. Read `variable_layout` first: it decides the layout of one variable. `placement`
decides the layouts of a model, once.

    axes               names, sizes and roles of the axes of a mesh
    layout_map         path patterns to axes, columns and rows
    variable_kind      `VariableKind`: an extension point for variables that no device reads in full
    option_checks      checks that several options share
    config             every setting of a strategy: `ShardingConfig`, `ZeroStage`, and the policies
    variable_layout    a variable's spec to its `VariableLayout`; `FlatForm`, the padded form
    shard_rows         an array with a row for each shard
    gradient_reduction `GradientReduction`: the extension point for reductions that DTensor does not have
    dtype_rules        dtypes that users choose by patterns of paths
    slot_dtypes        the dtype in which the optimizer slots of each variable are stored
    gather_dtypes      the dtype in which a step gathers the shards of each parameter
    groups             which small variables share a buffer
    placement          `ModelPlacement`: the layout of each variable of a model, and of each slot
    network_sizes      the sizes of groups for a network
    parameter_analyzer `ParameterAnalyzer`: the policy of groups that users choose
    planner            the seam: the one module of the runtime that calls `tfshard.planning`, late
    sequence_chunks    how a context axis splits the sequences of a batch
    boxes              the local shards of a device, as boxes of the variables' shapes
"""

from tfshard.layouts.axes import MeshAxes, Role
from tfshard.layouts.config import GroupPolicy, ReshardPolicy, ShardingConfig, ZeroStage
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.parameter_analyzer import ParameterAnalyzer
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout, plan_variable

__all__ = [
    "GroupPolicy",
    "LayoutMap",
    "MeshAxes",
    "ModelPlacement",
    "ParameterAnalyzer",
    "ReshardPolicy",
    "Role",
    "ShardingConfig",
    "VariableLayout",
    "VariableSpec",
    "ZeroStage",
    "plan_variable",
]
