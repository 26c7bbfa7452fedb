"""How does Keras reach us?

Read `models` first, where `compile(strategy=...)` is, then `strategy`.

    models        `as_distributed`, `Model`, `Sequential`
    mesh_step     `MeshStep`: the step functions that Keras calls
    strategy      `ShardedStrategy`: what a user calls
    strategy_base `StrategyBase`: the settings of a strategy on a mesh, and its models
    attached_model  `AttachedModel`: a model whose variables a strategy shards
    attached_variables  variables of optimizers and metrics
    births        models that are built under `strategy.scope()`
    hooks         the methods that tf.distribute and Keras call on a strategy
    step_functions  the step functions of a model, by the shapes of batches
    microbatches  a training step that takes its batch in microbatches
    readiness     checks on the process and on the arguments of a step
    reshard       variables brought to their places, and moved
    watching      callbacks that are told what each step is run on
    output_losses how much a batch counts in the metrics of several outputs' losses
    failures      a step that failed: where it came from, and what it left behind
    written_once  files that the clients of a launched run write together
    datasets      datasets whose batches are on the mesh; the position in them
    pipelines     random Keras layers in an input pipeline
    generation    KerasHub's `generate()` on a sharded model
"""

from tfshard.training.models import Model, Sequential, as_distributed
from tfshard.training.pipelines import random_map
from tfshard.training.strategy import ShardedStrategy

__all__ = ["Model", "Sequential", "ShardedStrategy", "as_distributed", "random_map"]
