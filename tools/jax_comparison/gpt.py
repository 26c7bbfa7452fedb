"""A decoder-only transformer of plain Keras layers, the same under TensorFlow and JAX; and how it is trained and timed.

No import of a backend: keras is imported when it is configured.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

DEVICES = 4
HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model and of its batches."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    steps: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Config":
        return cls(**json.loads(text))


def build(config: Config):
    """GPT-2's architecture: norms first, learned positions, tied embeddings, no dropout."""
    import keras
    from keras import layers

    class Positions(layers.Layer):
        def build(self, shape):
            self.embeddings = self.add_weight(name="embeddings", shape=shape[1:], initializer="normal")

        def call(self, inputs):
            return inputs + self.embeddings

    tokens = keras.Input((config.sequence,), dtype="int32", name="tokens")
    embedding = layers.ReversibleEmbedding(config.vocabulary, config.width, name="token_embedding")
    x = Positions(name="positions")(embedding(tokens))
    for i in range(config.layers):
        y = layers.LayerNormalization(name=f"block_{i}_attention_norm")(x)
        attention = layers.MultiHeadAttention(config.heads, config.width // config.heads, name=f"block_{i}_attention")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"block_{i}_feedforward_norm")(x)
        y = layers.Dense(4 * config.width, activation="gelu", name=f"block_{i}_up")(y)
        x = x + layers.Dense(config.width, name=f"block_{i}_down")(y)
    x = layers.LayerNormalization(name="final_norm")(x)
    return keras.Model(tokens, embedding(x, reverse=True), name="gpt")


def data(config: Config):
    """Random tokens, and for each the one that follows: (x, y), each (steps * batch, sequence)."""
    import numpy as np

    tokens = np.random.RandomState(0).randint(0, config.vocabulary, (config.steps * config.batch, config.sequence + 1))
    return tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")


def compile_options() -> dict:
    """What every way compiles the model with."""
    import keras

    return {
        "optimizer": keras.optimizers.Adam(1e-3),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


def losses(model, config: Config) -> list[float]:
    """The loss of each batch, in one pass over the data."""
    x, y = data(config)
    rows = range(0, len(x), config.batch)
    return [float(model.train_on_batch(x[i : i + config.batch], y[i : i + config.batch])) for i in rows]


def run_on_jax(python: str, *arguments: str) -> dict:
    """Runs on_jax.py in JAX's environment and reads the JSON of its last line."""
    return run_child([python, str(HERE / "on_jax.py"), *arguments], KERAS_BACKEND="jax",
                     XLA_FLAGS=f"--xla_force_host_platform_device_count={DEVICES}")  # fmt: skip


def run_child(command: list[str], **environment: str) -> dict:
    """Runs a process and reads the JSON of its last line; its errors go to ours."""
    path = os.pathsep.join([str(HERE.parent / "bench"), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]), **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"Failed with exit status {done.returncode}: {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])
