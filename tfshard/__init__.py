"""tfshard: train a Keras 3 model on TensorFlow, sharded over a DTensor mesh, with one argument.

    model.compile(optimizer, loss, strategy=tfshard.ShardedStrategy(...))

Each subpackage depends only on the subpackages above it. docs/design.md introduces them:

    _private       the private names of TensorFlow and Keras that tfshard uses
    clusters       the run that a cluster started this process for
    layouts        the placement of each value: pure Python, without devices
    devices        tensors to devices and back, and the clients of a run
    storage        stored variables: local shards, reads and writes
    graph          the structure and computation of a Keras model
    launch         the processes of a run, from start to end
    operations     operations and op rewrites that DTensor lacks
    planning       plans: stored bytes, sent bytes and problems
    measure        measured memory and communication
    training       the strategy: the interface to Keras
    callbacks      measurements during training
    verifying      comparison with single-device Keras
    checkpoints    saving and resuming runs

In addition, `errors`, `layers`, `presets` and `collectives` serve users, and `tables`, `command_line` and `cli` the
command line.
"""

__version__ = "0.2.0"

import logging as _logging

from tfshard import command_line

# Programs decide what is printed (docs/troubleshooting.md).
_logging.getLogger(__name__).addHandler(_logging.NullHandler())

# `tfshard COMMAND --help` and `tfshard --version` answer without importing TensorFlow, which takes seconds.
if not command_line.is_answered_alone():
    # Import _private first, because it checks the versions of TensorFlow and Keras.
    from tfshard import _private, callbacks, collectives, errors, layers, measure, pipelining, planning, presets
    from tfshard.checkpoints import (
        CheckpointCallback,
        CheckpointManager,
        export,
        export_to_transformers,
        import_weights,
    )
    from tfshard.contrib import compression as _compression
    from tfshard.contrib import simulate as _simulate
    from tfshard.contrib.compression import PowerSGD
    from tfshard.contrib.embedding_tables import EmbeddingTables
    from tfshard.contrib.pipeline import pipeline
    from tfshard.contrib.simulate import calibrate, simulate
    from tfshard.devices import create_mesh, initialize, shutdown
    from tfshard.errors import ShardingError
    from tfshard.graph import abstract_model, auto_layout_map
    from tfshard.launch.spawning import spawn
    from tfshard.layouts import LayoutMap
    from tfshard.measure import profile_network, profile_step
    from tfshard.operations.contexts import sequence_positions
    from tfshard.operations.local_map import local_map, psum
    from tfshard.planning import ParameterAnalyzer, advise, lint, plan
    from tfshard.training import (
        Model,
        Sequential,
        ShardedStrategy,
        as_distributed,
        find_batch_size,
        keras_distribution,
        random_map,
        strategy_of,
    )
    from tfshard.verifying import verify

    # Names that were in tfshard.planning until 0.2.
    vars(planning).update({name: vars(_simulate)[name] for name in ("Prediction", "Simulation", "simulate")})

    # Public names of extensions in the subpackages where users look for them.
    for _home, _names in (
        (planning, ("CompressionGain", "compression_pays")),
        (measure, ("encode_seconds_per_byte",)),
    ):
        vars(_home).update({name: vars(_compression)[name] for name in _names})
        vars(_home)["__all__"] += _names

    del _private, _simulate, _compression, _home, _names

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
    "export_to_transformers",
    "find_batch_size",
    "import_weights",
    "initialize",
    "keras_distribution",
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
    "sequence_positions",
    "shutdown",
    "simulate",
    "spawn",
    "strategy_of",
    "verify",
]
