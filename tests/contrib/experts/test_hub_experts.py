"""KerasHub's mixtures of experts with shared experts match plain KerasHub on one device."""

import keras
import keras_hub
import numpy as np
import pytest

import parity
import tfshard
from tfshard.contrib.experts import hub_experts
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import layer_patch

SIZES = {
    "vocabulary_size": 20, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 2, "hidden_dim": 8,
    "intermediate_dim": 16, "top_k": 2, "num_experts": 4,
}  # fmt: skip
BACKBONES = {
    "Mixtral": {**SIZES, "sliding_window": 4},
    "GptOss": {**SIZES, "head_dim": 4, "sliding_window": 4},
    "QwenMoe": {**SIZES, "moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 16},
    "Qwen3Moe": {**SIZES, "moe_intermediate_dim": 8, "head_dim": 4},
    "Qwen3_5Moe": {
        **{name: size for name, size in SIZES.items() if name != "intermediate_dim"},
        "moe_intermediate_dim": 8,
        "head_dim": 8,
        "shared_expert_intermediate_size": 8,
        "layer_types": ["full_attention"],
    },
}
TOKENS = np.random.RandomState(0).randint(1, 20, (2, 4, 6))
BATCHES = [({"token_ids": ids, "padding_mask": np.ones_like(ids)}, np.roll(ids, -1, axis=1)) for ids in TOKENS]


def build(family: str) -> keras.Model:
    backbone = getattr(keras_hub.models, f"{family}Backbone")(**BACKBONES[family])
    return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))


def strategy(**options) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), experts=True, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [3, 0])
@pytest.mark.parametrize("family", BACKBONES)
def test_shared_experts_of_keras_hub_match_one_device(family, stage):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    training = {"optimizer": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3), "loss": loss, "steps": 2}
    reference = parity.train(lambda: build(family), BATCHES, **training)
    run = parity.train(lambda: build(family), BATCHES, strategy=strategy(zero_stage=stage), **training)
    shared = [variable for variable in run.model.trainable_variables if variable.value.layout.kind is not None]
    assert len(shared) >= 2 and {variable.value.layout.storage[0] for variable in shared} == {"batch"}, "premise"
    assert run.model.losses == [] or len(run.model.losses) == 1
    np.testing.assert_allclose(run.losses, reference.losses, rtol=1e-6)
    for path, expected in reference.weights.items():
        np.testing.assert_allclose(run.weights[path], expected, rtol=0, atol=1e-6, err_msg=path)
    patches = [patch for patch in layer_patch.patches_of(run.model) if patch.change is hub_experts.ROUTED]
    assert len(patches) == 1
    plan = tfshard.plan(build(family), {"batch": 4}, experts=True, inputs=BATCHES[0][0])
    sent = [each for each in plan.collectives if each.kind == "all-to-all"]
    assert [(each.count, each.bytes) for each in sent] == [(4, 4 * (2 * 6) * 8 * 4)]


def test_another_use_of_the_results_of_all_experts_is_refused():
    made = build("Mixtral")
    bank = next(layer for layer in made._flatten_layers() if type(layer).__name__ == "MixtralMoeExperts")
    results = hub_experts.RoutedResults(bank, bank.call, keras.ops.ones((3, 8)), 2)
    with pytest.raises(UnsupportedOperationError, match="of shape \\(4, 3, 2\\) of layer 'experts'"):
        results * keras.ops.ones((4, 3, 2))
    with pytest.raises(UnsupportedOperationError, match="a use of the results of all experts of layer 'experts'"):
        keras.ops.sum(results, axis=0)
