"""KerasHub's mixtures of experts match one device in two steps, with gradients through top_k."""

import keras
import keras_hub
import numpy as np
import pytest

import parity
import tfshard

SIZES = {
    "vocabulary_size": 20, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 2, "hidden_dim": 8,
    "intermediate_dim": 16, "top_k": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_dim": 8}
BACKBONES = {
    "Mixtral": {**SIZES, "num_experts": 3, "sliding_window": 4},
    "GptOss": {**SIZES, "num_experts": 3, "head_dim": 4, "sliding_window": 4},
    "QwenMoe": {**SIZES, **EXPERTS, "shared_expert_intermediate_dim": 16},
    "Qwen3Moe": {**SIZES, **EXPERTS, "head_dim": 4},
}
TOKENS = np.random.RandomState(0).randint(1, 20, (2, 4, 6))
BATCHES = [({"token_ids": ids, "padding_mask": np.ones_like(ids)}, np.roll(ids, -1, axis=1)) for ids in TOKENS]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", BACKBONES)
def test_a_mixture_of_experts_trains_with_the_numbers_of_one_device(family: str):
    def build() -> keras.Model:
        backbone = getattr(keras_hub.models, f"{family}Backbone")(**BACKBONES[family])
        return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    training = {"optimizer": lambda: keras.optimizers.SGD(0.1), "loss": loss, "steps": 2}
    reference = parity.train(build, BATCHES, **training)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    run = parity.train(build, BATCHES, strategy=strategy, **training)
    assert parity.shard_axes(run.model) == {"batch"}
    start = parity.train(build, BATCHES, **{**training, "steps": 0})
    routers = [path for path in start.weights if "router" in path or "gate" in path]
    assert any(not np.array_equal(reference.weights[path], start.weights[path]) for path in routers)
    np.testing.assert_allclose(run.losses, reference.losses, rtol=1e-5)
    for path, expected in reference.weights.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(run.weights[path], expected, rtol=1e-5, atol=1e-5 * scale, err_msg=path)
