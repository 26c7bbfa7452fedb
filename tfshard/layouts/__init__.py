"""Where does each value go? Pure Python over names, shapes and sizes: no device is touched.

A *layout* says which axis of the mesh shards which dim. Read `variable_layout` first: it decides one variable;
`placement` decides a whole model, once.

    axes               names, sizes and roles of the axes of a mesh
    layout_map         path patterns to axes, columns and rows
    config             every setting of a strategy: `ShardingConfig`, `ZeroStage`, and the policies
    variable_layout    a variable's spec to its `VariableLayout`; `FlatForm`, the padded form
    shard_rows         an array with a row for each shard
    compression        what is done with gradients before devices add them up; `PowerSGD`
    compressed_form    how the gradient of a variable is compressed, what that keeps, what it sends
    slot_dtypes        in which dtype the optimizer slots of each variable rest
    embedding_tables   `EmbeddingTables`: which tables are read and updated by rows
    groups             which small variables share a buffer
    placement          `ModelPlacement`: where each variable of a model goes, and each slot
    boxes              which part of which variable a device holds, as boxes of the variable's own shape
"""

from tfshard.layouts.axes import MeshAxes, Role
from tfshard.layouts.compression import PowerSGD
from tfshard.layouts.config import GroupPolicy, ReshardPolicy, ShardingConfig, ZeroStage
from tfshard.layouts.embedding_tables import EmbeddingTables
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout, plan_variable

__all__ = [
    "EmbeddingTables",
    "GroupPolicy",
    "LayoutMap",
    "MeshAxes",
    "ModelPlacement",
    "PowerSGD",
    "ReshardPolicy",
    "Role",
    "ShardingConfig",
    "VariableLayout",
    "VariableSpec",
    "ZeroStage",
    "plan_variable",
]
