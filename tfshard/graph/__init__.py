"""What does a Keras model consist of and compute?

Nothing here runs a model or touches a device: a model is looked at, or called once on placeholders. Read `inventory`
for what it consists of, `model_graph` for what it computes.

    inventory         its variables, and the optimizers that train it
    model_specs       the specs of variables and slots that a plan is made from; `abstract_model`
    model_graph       a model's forward pass as TensorFlow operations, nothing allocated
    batches           whether a batch is one that a training step takes
    adapters          how a step calls layers with LoRA
    dim_rules         one rule for each type of operation: what becomes of a sharded dim in it
    auto_layout       which dims of which kernels to shard
"""

from tfshard.graph.auto_layout import auto_layout_map
from tfshard.graph.model_specs import abstract_model

__all__ = ["abstract_model", "auto_layout_map"]
