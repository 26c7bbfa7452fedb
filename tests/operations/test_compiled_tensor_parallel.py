"""Compiled blocks on meshes with a model axis train as plain Keras on one device."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import parity
import tfshard
from tfshard import _private
from tfshard.operations import compiled_blocks
from tfshard.storage.variables import ShardedVariable

RS = np.random.RandomState(0)
WIDTH, LENGTH, WORDS = 16, 8, 24
TOKENS = RS.randint(1, WORDS, (8, LENGTH))
LABELS = RS.randint(0, 4, (8,))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ADAM = functools.partial(keras.optimizers.Adam, 1e-2, epsilon=1e-3)


class FeedForward(keras.layers.Layer):
    """A normalization, and a pair of Dense layers with a residual."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.norm = keras.layers.LayerNormalization()
        self.up, self.down = keras.layers.Dense(32, activation="gelu"), keras.layers.Dense(WIDTH)

    def build(self, shape):
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 32))
        self.built = True

    def call(self, x):
        return x + self.down(self.up(self.norm(x)))


class Transformer(FeedForward):
    """A transformer layer with causal attention and dropout."""

    def __init__(self, dropout: float = 0.0, **options: Any):
        super().__init__(**options)
        self.before = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(4, WIDTH // 4, dropout=dropout, seed=1)
        self.dropout = keras.layers.Dropout(dropout, seed=2)
        self.inner_dropout = keras.layers.Dropout(dropout, seed=3)

    def build(self, shape):
        super().build(shape)
        self.before.build(shape)
        self.attention.build(shape, shape)

    def call(self, x, training=False):
        normed = self.before(x)
        x = x + self.attention(normed, normed, use_causal_mask=True, training=training)
        inner = self.inner_dropout(self.up(self.norm(x)), training=training)
        return x + self.dropout(self.down(inner), training=training)


def model_of(make: Callable[..., keras.layers.Layer]) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(inputs)
    for number in range(2):
        x = make(name=f"layer_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(x)))


def train(
    build: Callable[[], keras.Model],
    strategy: tfshard.ShardedStrategy | None = None,
    *,
    x: Any = TOKENS,
    y: Any = LABELS,
    loss: Any = LOSS,
    optimizer: Callable[[], keras.optimizers.Optimizer] = ADAM,
    jit_compile: bool = True,
    steps: int = 3,
) -> parity.Run:
    """Train on one device, or with compiled blocks under a strategy."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    if strategy is None:
        model.compile(parity.dense_gradients(optimizer()), loss, jit_compile=False, run_eagerly=True)
    else:
        model = tfshard.as_distributed(model)
        model.compile(optimizer(), loss, jit_compile=jit_compile, strategy=strategy)
    losses = [float(model.train_on_batch(x, y)) for _ in range(steps)]
    return parity.Run(model=model, losses=losses)


def sharded_over(model: keras.Model, axis: str = "model") -> list[str]:
    """Return the paths of the variables that an axis shards where they are read."""
    variables = [(each.path, _private.backend_variable(each)) for each in model.weights]
    return [path for path, each in variables if isinstance(each, ShardedVariable) and axis in each.layout.compute]


def assert_compiled(model: keras.Model, programs: int, blocks: int = 2) -> None:
    found = compiled_blocks.compiled_blocks(model)
    assert [(each.programs, each.reason) for each in found] == [(programs, "")] * blocks


MESHES = {"batch=2 x model=2": {"batch": 2, "model": 2}, "model=4": {"model": 4}, "model=2": {"model": 2}}


@pytest.mark.parametrize("name", MESHES)
def test_feed_forward_blocks_train_as_on_one_device(name: str):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[name]), layout_map="auto", zero_stage=0)
    build = functools.partial(model_of, FeedForward)
    sharded = train(build, strategy)
    kernels = [path for path in sharded_over(sharded.model) if path.endswith("kernel")]
    assert len(kernels) >= 4, "premise: the model axis shards the kernels of the blocks"
    assert_compiled(sharded.model, programs=6)
    expected = train(build)
    assert max(expected.losses) - min(expected.losses) > 1e-2, "premise: it learns"
    parity.assert_same(sharded, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MESHES)
def test_transformer_blocks_train_as_on_one_device(name: str, dropout: float, stage: int):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[name]), layout_map="auto", zero_stage=stage)
    build = functools.partial(model_of, functools.partial(Transformer, dropout))
    sharded = train(build, strategy)
    kernels = [path for path in sharded_over(sharded.model) if path.endswith("kernel")]
    assert len(kernels) >= 12, "premise: the model axis shards the kernels of the blocks"
    assert_compiled(sharded.model, programs=10)
    expected = train(build)
    assert max(expected.losses) - min(expected.losses) > 1e-2, "premise: it learns"
    parity.assert_same(sharded, expected, rtol=2e-5, atol=2e-5)
