"""tfshard: train a Keras 3 model on TensorFlow, sharded over a DTensor mesh, with one argument.

    model.compile(optimizer, loss, strategy=tfshard.ShardedStrategy(...))

Where to look:

    runtime       initialize: the one place that sets environment switches and starts DTensor
    mesh          create_mesh: axis names to a mesh
    layers        SketchedDense: a linear layer through random sketches
    layout_map    LayoutMap: path patterns to column, row and other layouts
    layouts       where each variable rests; pure Python
    placement     tensors to devices and back
    rewrites      operations that DTensor expands wrongly, exchanged for others
    variables     ShardedVariable: two layouts, deferred writes (why: its note)
    data          batches to the mesh
    support       checks on models before anything is done
    planning      ShardingPlan: what will be stored and sent; abstract_model
    analyzer      ParameterAnalyzer: which variables share a buffer; plan
    presets       analyzers for networks
    advice        advise: which mesh and stage fit
    strategy      ShardedStrategy: a tf.distribute strategy over the layers above
    report        what every device holds
    generation    KerasHub's generate() on a sharded model
    trainer       as_distributed, Model, Sequential
    clients       which client of how many this process is
    boxes         which part of which variable a device holds
    manifest      what a checkpoint holds, as JSON
    files         the files of a checkpoint
    training_state  every variable of a training run, by key
    pieces        pieces out of the devices' tensors, and back
    saving        a training run to a checkpoint (why it is whole or not there: its note)
    restoring     Checkpoint: compared before it is used
    checkpoint    CheckpointManager: a training run to disk and back, on any mesh
    resume        CheckpointCallback: fit that goes on where it was killed
    exporting     export, import_weights: Keras's own files
    cli           the command line: tfshard plan, tfshard doctor
    _private      every private TensorFlow and Keras name
"""

from tfshard import _private, layers, presets  # _private first: it checks the versions of TensorFlow and Keras.
from tfshard.advice import Advice, advise
from tfshard.analyzer import ParameterAnalyzer, plan
from tfshard.auto_layout import auto_layout_map
from tfshard.checkpoint import Checkpoint, CheckpointManager
from tfshard.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ConsistencyError,
    InitializationError,
    LayoutError,
    LayoutWarning,
    MeshError,
    PlanMismatchError,
    ShardingError,
    StrategyError,
    UnsupportedLayerError,
    UnsupportedOperationError,
)
from tfshard.exporting import export, import_weights
from tfshard.layout_map import LayoutMap
from tfshard.linter import Finding, lint
from tfshard.mesh import create_mesh
from tfshard.planning import Collective, ShardingPlan, abstract_model
from tfshard.profiling import StepProfile, assert_matches_plan, profile_step
from tfshard.report import Report
from tfshard.resume import CheckpointCallback
from tfshard.runtime import Runtime, initialize
from tfshard.strategy import ShardedStrategy
from tfshard.trainer import Model, Sequential, as_distributed
from tfshard.variables import ShardedVariable

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Checkpoint",
    "CheckpointCallback",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "ConsistencyError",
    "Collective",
    "InitializationError",
    "LayoutError",
    "LayoutMap",
    "LayoutWarning",
    "Finding",
    "MeshError",
    "Model",
    "PlanMismatchError",
    "ParameterAnalyzer",
    "Report",
    "Runtime",
    "Sequential",
    "ShardedStrategy",
    "ShardedVariable",
    "ShardingError",
    "ShardingPlan",
    "StrategyError",
    "UnsupportedLayerError",
    "UnsupportedOperationError",
    "StepProfile",
    "abstract_model",
    "advise",
    "as_distributed",
    "assert_matches_plan",
    "auto_layout_map",
    "create_mesh",
    "export",
    "import_weights",
    "initialize",
    "lint",
    "layers",
    "profile_step",
    "plan",
    "presets",
]

del _private
