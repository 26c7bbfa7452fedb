"""The Keras side of the package: strategies, `compile(strategy=...)` and step functions.

Start with `models`, which defines `compile(strategy=...)`. Then read `strategy`.

    models        `as_distributed`, `Model`, `Sequential`
    step_functions  `MeshStep`, which Keras calls, and the traced functions by the shapes of batches
    padding       batches of several shapes, padded to one shape
    automatic     `strategy="auto"`: the choice of a strategy for the first batch
    batch_sizes   `find_batch_size`: the largest batch size that trains
    strategy      `ShardedStrategy`: the public strategy class
    strategy_base `StrategyBase`: the settings of a strategy on a mesh, and its models
    attached_model  `AttachedModel`: a model with variables that a strategy shards
    attached_variables  variables of optimizers and metrics
    decisions     logs what was decided for a model
    distributions  `keras.distribution`: the strategy of a Keras distribution
    births        models that are built under `strategy.scope()`
    gradient_copies  checks that devices computed the same gradients
    hooks         the methods that tf.distribute and Keras call on a strategy
    microbatches  a training step that takes its batch in microbatches
    readiness     checks on the process and on the arguments of a step
    reduction_state  the state that reductions of gradients keep between steps
    reshard       moves variables to the mesh and from layout to layout
    watching      tells callbacks which batches each step runs on
    output_losses weights of batches in the loss metrics of models with several outputs
    failures      errors of failed steps: the operation, and the variables that may have changed
    written_once  files that the clients of a launched run write together
    datasets      datasets with batches on the mesh; saved positions in them
    read_ahead    a thread that reads items ahead of their use
    pipelines     random Keras layers in an input pipeline
    generation    KerasHub's `generate()` on a sharded model
"""

from tfshard.training.batch_sizes import find_batch_size
from tfshard.training.distributions import keras_distribution, strategy_of
from tfshard.training.models import Model, Sequential, as_distributed
from tfshard.training.pipelines import random_map
from tfshard.training.strategy import ShardedStrategy

__all__ = [
    "Model",
    "Sequential",
    "ShardedStrategy",
    "as_distributed",
    "find_batch_size",
    "keras_distribution",
    "random_map",
    "strategy_of",
]
