"""Small models of each family, with a batch and a single-device training for each; shared by several tests."""

import functools

import keras
import numpy as np
import pytest

import parity
import tfshard

keras_hub = pytest.importorskip("keras_hub")

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SMALL = {"vocabulary_size": 56, "num_layers": 1, "num_heads": 4, "hidden_dim": 8, "intermediate_dim": 16}
TOKENS = np.random.RandomState(0).randint(1, 56, (8, 8))
LABELS = np.random.RandomState(1).randint(0, 3, (8,))


def mlp(widths: tuple[int, ...] = (12, 16)) -> keras.Model:
    layers = [keras.layers.Dense(n, activation="tanh") for n in widths]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def odd() -> keras.Model:
    """Return a model with dims that 2 and 4 do not divide: shards are padded, and a model axis shards nothing."""
    return mlp((11, 13))


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(8, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(8, 3, strides=2),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


def attention() -> keras.Model:
    inputs = keras.Input((6, 10))
    x = keras.layers.LayerNormalization()(inputs)
    x = inputs + keras.layers.MultiHeadAttention(4, 5)(x, x, use_causal_mask=True)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(x)))


def with_logits(backbone: keras.Model) -> keras.Model:
    """Return a language model: logits from the token embedding, or from a separate table."""
    outputs = backbone.output
    if isinstance(outputs, dict):
        outputs = outputs.get("decoder_sequence_output", outputs.get("sequence_output"))
    return keras.Model(backbone.input, backbone.token_embedding(outputs, reverse=True))


def spread(model: keras.Model) -> keras.Model:
    """Enlarge KerasHub's initial weights: in a model of this size, gradients would be too small to move a weight."""
    for variable in (v for v in model.trainable_variables if len(v.shape) > 1):
        variable.assign(np.random.RandomState(sum(map(ord, variable.path))).normal(size=variable.shape) * 0.4)
    return model


def hub(family: str) -> keras.Model:
    models, common = keras_hub.models, {**SMALL, "max_sequence_length": 8, "dropout": 0.0}
    # Fewer key and value heads than the model axis of four devices.
    grouped = {**SMALL, "num_query_heads": 4, "num_key_value_heads": 2}
    del grouped["num_heads"]
    if family == "vit":
        sizes = {**SMALL, "mlp_dim": 16, "dropout_rate": 0.0, "attention_dropout": 0.0}
        del sizes["vocabulary_size"], sizes["intermediate_dim"]
        backbone = models.ViTBackbone(image_shape=(16, 16, 3), patch_size=4, **sizes)
        return spread(keras.Model(backbone.input, keras.layers.Dense(3, name="head")(backbone.output[:, 0])))
    backbone = {
        "bert": lambda: models.BertBackbone(**common, num_segments=2),
        "roberta": lambda: models.RobertaBackbone(**common),
        "gpt2": lambda: models.GPT2Backbone(**common),
        "opt": lambda: models.OPTBackbone(**common),
        "llama": lambda: models.LlamaBackbone(**grouped),
        "mistral": lambda: models.MistralBackbone(**grouped, sliding_window=4),
        "gemma": lambda: models.GemmaBackbone(**{**grouped, "num_key_value_heads": 1}, head_dim=4),
        "qwen": lambda: models.QwenBackbone(**grouped, tie_word_embeddings=True),
        "t5": lambda: models.T5Backbone(**SMALL, key_value_dim=4, dropout=0.0),
        "bart": lambda: models.BartBackbone(**common),
    }[family]
    return spread(with_logits(backbone()))


FAMILIES = ("bert", "roberta", "gpt2", "opt", "llama", "mistral", "gemma", "qwen", "t5", "bart", "vit")
BUILDERS = {
    "mlp": mlp,
    "odd": odd,
    "cnn": cnn,
    "attention": attention,
    **{f: functools.partial(hub, f) for f in FAMILIES},
}


def batches(name: str) -> list:
    rs = np.random.RandomState(2)
    if name in ("mlp", "odd"):
        return [(rs.randn(8, 7).astype("float32"), LABELS)]
    if name == "cnn":
        return [(rs.randn(8, 8, 8, 3).astype("float32"), LABELS)]
    if name == "attention":
        return [(rs.randn(8, 6, 10).astype("float32"), LABELS)]
    if name == "vit":
        return [(rs.randn(8, 16, 16, 3).astype("float32"), LABELS)]
    inputs = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
    if name == "bert":
        inputs["segment_ids"] = np.zeros_like(TOKENS)
    if name in ("t5", "bart"):
        inputs = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in inputs.items()}
    return [(inputs, TOKENS[:, ::-1].copy())]


TOLERANCE = 5e-6


def optimizer() -> keras.optimizers.Optimizer:
    # Epsilon is above the rounding of gradients that are zero in exact arithmetic (a key projection's bias, a layer
    # before a normalization): with 1e-7, Adam makes full steps of either sign, on any two machines.
    return keras.optimizers.Adam(1e-2, epsilon=1e-3)


def train(name: str, strategy: tfshard.ShardedStrategy | None = None) -> parity.Run:
    return parity.train(BUILDERS[name], batches(name), optimizer=optimizer, loss=LOSS, strategy=strategy, steps=5)


@functools.cache
def reference(name: str) -> parity.Run:
    """Train a model on one device: five steps, which move weights by about 0.04."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    initial = {v.path: np.array(v.numpy()) for v in BUILDERS[name]().weights}
    run = train(name)
    parity.assert_moved(run, initial, tolerance=TOLERANCE)
    return run
