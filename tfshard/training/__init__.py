"""How does Keras reach us?

Read `models` first, where `compile(strategy=...)` is, then `strategy`.

    models        `as_distributed`, `Model`, `Sequential`
    strategy      `ShardedStrategy`, a Placer and an Adopter: what a step runs, and what is known of a model
    hooks         what tf.distribute and Keras call on a strategy
    step_functions  what Keras calls for a step, by the shapes of batches
    microbatches  a training step that takes its batch in parts
    readiness     a model checked before a step, and made ready for it
    adoption      `Adopter`: models, with their optimizers and metrics, brought to the mesh
    placements    `Placer`: where the variables of a model go
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
