"""Graph: the variables of a Keras model, and the operations that it computes.

Nothing here runs a model or touches a device: a model is inspected, or called once on placeholders. Read `inventory`
for the variables, `model_graph` for the operations.

    inventory         the variables of a model, and the optimizers that train it
    model_specs       the specs of variables and slots from which a plan is made; `abstract_model`
    model_graph       a model's forward pass as TensorFlow operations, without allocation
    batches           checks that a training step can take a batch
    adapters          how a step calls layers with LoRA
    dim_rules         one rule for each type of operation: how a sharded dim passes through it
    token_flow        which operations combine the positions of a sequence
    auto_layout       which dims of which kernels to shard
    traced_loss       the loss that a step differentiates, on labels of which only shapes are known
    flops             how many floating-point operations a step takes
"""

from tfshard.graph.auto_layout import auto_layout_map
from tfshard.graph.model_specs import abstract_model

__all__ = ["abstract_model", "auto_layout_map"]
