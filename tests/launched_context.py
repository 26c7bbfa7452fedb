"""Clients that share sequences; run by test_launched_context.py."""

import json
import sys

import keras
import numpy as np

import tfshard

LENGTH, WORDS = 8, 16
TOKENS = np.random.RandomState(0).randint(0, WORDS, (4, LENGTH))


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 16)(inputs)
    x += keras.layers.Dropout(0.3)(keras.layers.MultiHeadAttention(4, 4)(x, x, use_causal_mask=True))
    return keras.Model(inputs, keras.layers.Dense(WORDS)(x))


def train(strategy: tfshard.ShardedStrategy | None = None) -> dict:
    """Return the losses of some steps, and predictions."""
    model, options = build(), {"jit_compile": False}
    if strategy is not None:
        model, options = tfshard.as_distributed(model), {"strategy": strategy}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, **options)
    losses = [float(model.train_on_batch(TOKENS, TOKENS)) for _ in range(3)]
    return {"losses": losses, "predictions": model.predict(TOKENS, verbose=0).tolist()}


if __name__ == "__main__":
    axes = json.loads(sys.argv[1])
    found = train(tfshard.ShardedStrategy(tfshard.create_mesh(**axes), zero_stage=3))
    print("FOUND " + json.dumps(["context", found]), flush=True)
