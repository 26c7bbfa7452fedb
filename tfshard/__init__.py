"""tfshard: train a Keras 3 model on TensorFlow, sharded over a DTensor mesh, with one argument.

    model.compile(optimizer, loss, strategy=tfshard.ShardedStrategy(...))

Its wings, each on those above it; docs/design.md leads through them:

    _private       which private names of TensorFlow and Keras do we stand on?
    layouts        where does each value go? Pure Python, no device
    devices        how do tensors get to devices and back, and who else is there?
    storage        how does a variable rest, how is it read and written?
    graph          what does a Keras model consist of and compute?
    launch         how do the processes of a run begin and end together?
    operations     what can DTensor not do by itself?
    planning       what will be stored and sent, and what is wrong with it?
    measure        what was really stored and sent?
    training       how does Keras reach us?
    callbacks      what does a run measure while it trains?
    verifying      are the numbers those of one device?
    calibration    what do devices take for the work of a step?
    checkpoints    how does a run survive?

and beside them `errors`, `layers`, `presets`, `collectives`, for users, `tables`, `command_line` and `cli`.
"""

__version__ = "0.2.0"

from tfshard import command_line

# `tfshard COMMAND --help` and `tfshard --version` answer without TensorFlow, whose import takes seconds.
if not command_line.is_answered_alone():
    # _private first: it checks the versions of TensorFlow and Keras.
    from tfshard import _private, callbacks, collectives, errors, layers, measure, pipelining, planning, presets
    from tfshard.calibration import calibrate
    from tfshard.checkpoints import CheckpointCallback, CheckpointManager, export, import_weights
    from tfshard.contrib.pipeline import pipeline
    from tfshard.devices import create_mesh, initialize
    from tfshard.errors import ShardingError
    from tfshard.graph import abstract_model, auto_layout_map
    from tfshard.layouts import EmbeddingTables, LayoutMap, PowerSGD
    from tfshard.measure import profile_network, profile_step
    from tfshard.operations.local_map import local_map, psum
    from tfshard.planning import ParameterAnalyzer, advise, lint, plan, simulate
    from tfshard.training import Model, Sequential, ShardedStrategy, as_distributed, random_map
    from tfshard.verifying import verify

    del _private

__all__ = [
    "CheckpointCallback",
    "CheckpointManager",
    "EmbeddingTables",
    "LayoutMap",
    "Model",
    "ParameterAnalyzer",
    "PowerSGD",
    "Sequential",
    "ShardedStrategy",
    "ShardingError",
    "abstract_model",
    "advise",
    "as_distributed",
    "auto_layout_map",
    "calibrate",
    "callbacks",
    "collectives",
    "create_mesh",
    "errors",
    "export",
    "import_weights",
    "initialize",
    "layers",
    "lint",
    "local_map",
    "measure",
    "pipeline",
    "pipelining",
    "plan",
    "planning",
    "presets",
    "profile_network",
    "profile_step",
    "psum",
    "random_map",
    "simulate",
    "verify",
]
