"""Build the models of the report and their batches, for Keras on any backend. on_torch.py builds the same sizes.

This module imports no backend: it imports keras after keras is configured.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the report.

    Attributes:
        kind: `"gpt"`, `"bert"`, `"resnet"`, `"efficientnet"`, `"lstm"` or `"moe"`.
        batch: The samples of a step, over all devices.
        layers: The number of blocks.
        width: The width of the residual stream, or of a recurrent layer.
        heads: The number of attention heads.
        vocabulary: The number of tokens, or of image classes.
        length: The tokens of a sample, or the side of an image in pixels.
        steps: The steps of an epoch.
    """

    kind: str
    batch: int
    layers: int = 0
    width: int = 0
    heads: int = 0
    vocabulary: int = 0
    length: int = 0
    steps: int = 6


MODELS = {
    "gpt 5M": Model(kind="gpt", batch=16, layers=4, width=256, heads=4, vocabulary=8000, length=128, steps=4),
    "gpt narrow": Model(kind="gpt", batch=8, layers=12, width=128, heads=4, vocabulary=1500, length=128),
    "gpt 25M": Model(kind="gpt", batch=8, layers=7, width=512, heads=8, vocabulary=8000, length=128, steps=3),
    "gpt 110M": Model(kind="gpt", batch=4, layers=12, width=768, heads=12, vocabulary=32000, length=128, steps=3),
    "bert": Model(kind="bert", batch=16, layers=4, width=256, heads=4, vocabulary=8000, length=128, steps=4),
    "resnet50": Model(kind="resnet", batch=16, vocabulary=100, length=64, steps=4),
    "efficientnet": Model(kind="efficientnet", batch=16, vocabulary=100, length=64),
    "lstm": Model(kind="lstm", batch=32, layers=2, width=256, vocabulary=8000, length=64),
    "moe": Model(kind="moe", batch=8, layers=2, width=256, heads=4, vocabulary=4000, length=64),
}
# The values of the growth cases: memory and time by devices, by depth and by width.
DEPTHS = (6, 12, 24, 48)
WIDTHS = (128, 256, 512, 1024)
DEVICES = (1, 2, 4, 8)

EXPERTS, CHOSEN = 4, 2


def deeper(layers: int) -> Model:
    """Return a GPT of width 128 with `layers` blocks."""
    return Model(kind="gpt", batch=8, layers=layers, width=128, heads=4, vocabulary=1500, length=64)


def wider(width: int) -> Model:
    """Return a GPT of four blocks with this width."""
    return Model(kind="gpt", batch=8, layers=4, width=width, heads=4, vocabulary=1500, length=64)


def tiny(model: Model) -> Model:
    """Return a tiny model of the same kind. Training it loads what a process loads once for each kind."""
    return dataclasses.replace(
        model, layers=1, width=16 * (model.heads or 1), vocabulary=64, length=min(model.length, 32)
    )


def data(model: Model, steps: int) -> tuple[Any, Any]:
    """Return random samples and labels for `steps` steps."""
    import numpy as np

    rs, count = np.random.RandomState(0), steps * model.batch
    if model.kind in ("resnet", "efficientnet"):
        images = rs.normal(size=(count, model.length, model.length, 3)).astype("float32")
        return images, rs.randint(0, model.vocabulary, count).astype("int32")
    tokens = rs.randint(0, model.vocabulary, (count, model.length + 1)).astype("int32")
    if model.kind == "lstm":
        return tokens[:, :-1], tokens[:, 0] % 2
    return tokens[:, :-1], tokens[:, 1:]


def build(model: Model) -> Any:
    """Return the Keras model, without dropout."""
    import keras

    keras.utils.set_random_seed(0)
    if model.kind in ("resnet", "efficientnet"):
        applications = {"resnet": keras.applications.ResNet50, "efficientnet": keras.applications.EfficientNetB0}
        return applications[model.kind](
            weights=None, input_shape=(model.length, model.length, 3), classes=model.vocabulary,
            classifier_activation=None,
        )  # fmt: skip
    if model.kind == "lstm":
        tokens = keras.Input((model.length,), dtype="int32")
        x = keras.layers.Embedding(model.vocabulary, model.width)(tokens)
        for number in range(model.layers):
            x = keras.layers.LSTM(model.width, return_sequences=number < model.layers - 1)(x)
        return keras.Model(tokens, keras.layers.Dense(2)(x))
    if model.kind == "moe":
        import keras_hub

        backbone = keras_hub.models.MixtralBackbone(
            vocabulary_size=model.vocabulary, num_layers=model.layers, num_query_heads=model.heads,
            hidden_dim=model.width, intermediate_dim=2 * model.width, num_key_value_heads=model.heads,
            num_experts=EXPERTS, top_k=CHOSEN,
        )  # fmt: skip
        return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
    return _transformer(model)


def _transformer(model: Model) -> Any:
    """Return a pre-norm transformer with learned positions and a shared embedding table. A causal one equals GPT-2."""
    import keras
    from keras import layers

    class Positions(layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.embeddings = self.add_weight(name="embeddings", shape=shape[1:], initializer="normal")

        def call(self, inputs: Any) -> Any:
            return inputs + self.embeddings

    class Block(layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.attention_norm = layers.LayerNormalization()
            self.attention = layers.MultiHeadAttention(model.heads, model.width // model.heads)
            self.feedforward_norm = layers.LayerNormalization()
            self.up = layers.Dense(4 * model.width, activation="gelu")
            self.down = layers.Dense(model.width)
            for layer in (self.attention_norm, self.feedforward_norm, self.up):
                layer.build(shape)
            self.attention.build(shape, shape)
            self.down.build((*shape[:-1], 4 * model.width))

        def call(self, inputs: Any) -> Any:
            y = self.attention_norm(inputs)
            x = inputs + self.attention(y, y, use_causal_mask=model.kind == "gpt")
            return x + self.down(self.up(self.feedforward_norm(x)))

    tokens = keras.Input((model.length,), dtype="int32", name="tokens")
    embedding = layers.ReversibleEmbedding(model.vocabulary, model.width, name="token_embedding")
    x = Positions(name="positions")(embedding(tokens))
    for i in range(model.layers):
        x = Block(name=f"block_{i}")(x)
    x = layers.LayerNormalization(name="final_norm")(x)
    return keras.Model(tokens, embedding(x, reverse=True), name=model.kind)


def options() -> dict[str, Any]:
    """Return the arguments of `compile`, which are the same in every way."""
    import keras

    return {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


def inputs_of(model: Model, tokens: Any) -> Any:
    """Return the inputs of the Keras model."""
    import numpy as np

    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)} if model.kind == "moe" else tokens
