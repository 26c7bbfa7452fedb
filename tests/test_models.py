"""Whole models: ten Adam steps under the strategy give the numbers of one device."""

import functools

import keras
import keras_hub
import numpy as np
import pytest

import parity
import tfshard

MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SMALL = {"vocabulary_size": 54, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
TOKENS = np.random.RandomState(0).randint(1, 54, (8, 6))
LABELS = np.random.RandomState(1).randint(0, 3, (8,))


def mlp() -> keras.Model:
    """No dim of it divides by 4."""
    layers = [keras.layers.Dense(n, activation="tanh") for n in (11, 13)]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(8, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(6, 3, strides=2),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


def attention() -> keras.Model:
    inputs = keras.Input((6, 10))
    x = keras.layers.LayerNormalization()(inputs)
    x = inputs + keras.layers.MultiHeadAttention(2, 5)(x, x, use_causal_mask=True)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(x)))


def with_head(backbone: keras.Model) -> keras.Model:
    outputs = backbone.output
    if isinstance(outputs, dict):
        outputs = outputs["sequence_output"]
    return keras.Model(backbone.input, keras.layers.Dense(3, name="head")(outputs[:, 0]))


def hub(family: str) -> keras.Model:
    models = keras_hub.models
    if family == "bert":
        return with_head(models.BertBackbone(**SMALL, max_sequence_length=8, num_segments=2, dropout=0.0))
    if family == "roberta":
        return with_head(models.RobertaBackbone(**SMALL, max_sequence_length=8, dropout=0.0))
    if family == "gpt2":
        return with_head(models.GPT2Backbone(**SMALL, max_sequence_length=8, dropout=0.0))
    if family == "opt":
        return with_head(models.OPTBackbone(**SMALL, max_sequence_length=8, dropout=0.0))
    # Tied: an output matrix that the head does not use would have no gradient.
    sizes = {**SMALL, "num_query_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    del sizes["num_heads"]
    return with_head(models.LlamaBackbone(**sizes))


FAMILIES = ("bert", "roberta", "gpt2", "opt", "llama")
BUILDERS = {"mlp": mlp, "cnn": cnn, "attention": attention, **{f: functools.partial(hub, f) for f in FAMILIES}}


def batches(name: str) -> list:
    rs = np.random.RandomState(2)
    if name == "mlp":
        return [(rs.randn(8, 7).astype("float32"), LABELS)]
    if name == "cnn":
        return [(rs.randn(8, 8, 8, 3).astype("float32"), LABELS)]
    if name == "attention":
        return [(rs.randn(8, 6, 10).astype("float32"), LABELS)]
    inputs = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
    if name == "bert":
        inputs["segment_ids"] = np.zeros_like(TOKENS)
    return [(inputs, LABELS)]


def optimizer() -> keras.optimizers.Optimizer:
    # Epsilon above the rounding of gradients that are zero in exact arithmetic (a key projection's bias, what comes
    # before a normalization): at 1e-7 Adam makes full steps of either sign of them, on any two machines.
    return keras.optimizers.Adam(1e-3, epsilon=1e-4)


@functools.cache
def reference(name: str) -> parity.Run:
    return parity.train(BUILDERS[name], batches(name), optimizer=optimizer, loss=LOSS)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", BUILDERS)
def test_model_matches_one_device(name, mesh, stage):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=stage)
    run = parity.train(BUILDERS[name], batches(name), optimizer=optimizer, loss=LOSS, strategy=strategy)
    assert parity.shard_axes(run.model) == ({"batch"} if stage == 3 else set())
    parity.assert_same(run, reference(name), rtol=0.0, atol=2e-5)


def test_kerashub_task_with_its_own_compile():
    backbone = keras_hub.models.GPT2Backbone(**SMALL, max_sequence_length=8, dropout=0.0)
    task = tfshard.as_distributed(keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None))
    assert isinstance(task, keras_hub.models.GPT2CausalLM)
    inputs = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
    task.compile(strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    losses = task.fit(inputs, TOKENS, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_keras_layout_map_from_a_backbone_is_accepted(stage):
    def build():
        return hub("llama")

    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), devices=[f"cpu:{i}" for i in range(4)])
    layout_map = keras_hub.models.LlamaBackbone.get_layout_map(mesh)
    own = tfshard.LayoutMap()
    for pattern, layout in layout_map.items():
        # One key/value head cannot be shared by two devices; the output's pattern is not in an untied backbone.
        heads = "attention.*(key|value)" not in pattern
        own.add(pattern, tuple(layout.axes) if heads else (None,), optional=True)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), own, zero_stage=stage)
    run = parity.train(build, batches("llama"), optimizer=optimizer, loss=LOSS, strategy=strategy)
    assert "model" in parity.shard_axes(run.model)
    parity.assert_same(run, reference("llama"), rtol=0.0, atol=2e-5)
