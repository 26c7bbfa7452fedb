"""Compiled blocks on meshes with a model axis train as plain Keras on one device."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import parity
import tfshard
from sweeps import table
from tfshard import _private
from tfshard.operations import compiled_blocks
from tfshard.storage.variables import ShardedVariable

RS = np.random.RandomState(0)
WIDTH, LENGTH, WORDS = 16, 8, 24
TOKENS = RS.randint(1, WORDS, (8, LENGTH))
LABELS = RS.randint(0, 4, (8,))
SEQUENCES = RS.normal(size=(8, LENGTH, WIDTH)).astype("float32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ADAM = functools.partial(keras.optimizers.Adam, 1e-2, epsilon=1e-3)


class Transformer(keras.layers.Layer):
    """A transformer layer with causal attention and dropout. `silu` has a gradient of its own."""

    def __init__(self, dropout: float = 0.0, **options: Any):
        super().__init__(**options)
        self.before, self.norm = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(4, WIDTH // 4, dropout=dropout, seed=1)
        self.up, self.down = keras.layers.Dense(32, activation="silu"), keras.layers.Dense(WIDTH)
        self.dropout = keras.layers.Dropout(dropout, seed=2)
        self.inner_dropout = keras.layers.Dropout(dropout, seed=3)

    def build(self, shape):
        self.before.build(shape)
        self.attention.build(shape, shape)
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 32))
        self.built = True

    def call(self, x, training=False):
        normed = self.before(x)
        x = x + self.attention(normed, normed, use_causal_mask=True, training=training)
        inner = self.inner_dropout(self.up(self.norm(x)), training=training)
        return x + self.dropout(self.down(inner), training=training)


class Pair(keras.layers.Layer):
    """A pair of Dense layers, with an operation between them."""

    def __init__(self, between: Callable[..., Any], **options: Any):
        super().__init__(**options)
        self.between = between
        self.up, self.down = keras.layers.Dense(32, name="up"), keras.layers.Dense(WIDTH, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 32))
        self.built = True

    def call(self, x):
        return x + self.down(self.between(self.up(x)))


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
    optimizer: Callable[[], keras.optimizers.Optimizer] = ADAM,
    prepare: Callable[[keras.Model], object] = lambda model: None,
    steps: int = 2,
) -> parity.Run:
    """Train on one device, or with compiled blocks under a strategy."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    if strategy is None:
        model.compile(parity.dense_gradients(optimizer()), LOSS, jit_compile=False, run_eagerly=True)
    else:
        model = tfshard.as_distributed(model)
        model.compile(optimizer(), LOSS, jit_compile=True, strategy=strategy)
        prepare(model)
    losses = [float(model.train_on_batch(x, y)) for _ in range(steps)]
    return parity.Run(model=model, losses=losses)


def sharded_over(model: keras.Model, axis: str = "model") -> list[str]:
    """Return the paths of the variables that an axis shards where they are read."""
    variables = [(each.path, _private.backend_variable(each)) for each in model.weights]
    return [path for path, each in variables if isinstance(each, ShardedVariable) and axis in each.layout.compute]


def assert_compiled(model: keras.Model, programs: int, blocks: int = 2) -> None:
    found = compiled_blocks.compiled_blocks(model)
    assert [(each.programs, each.reason) for each in found] == [(programs, "")] * blocks


def sharded_kernels(model: keras.Model) -> list[str]:
    return [path for path in sharded_over(model) if path.startswith("layer_") and path.endswith("kernel")]


@dataclasses.dataclass(frozen=True)
class Setting:
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: {"batch": 2, "model": 2})
    stage: int = 0
    dropout: float = 0.3
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    recompute: dict[str, bool] | None = None
    rows: int = 8


SETTINGS = {
    "batch=2 x model=2, stage 0": Setting(),
    "batch=2 x model=2, stage 3": Setting(stage=3),
    "batch=2 x model=2, stage 3, no groups": Setting(stage=3, strategy={"analyzer": None}),
    "model=2": Setting({"model": 2}),
    "model=4, stage 3": Setting({"model": 4}, stage=3),
    "no dropout": Setting(dropout=0.0),
    "sequence": Setting(strategy={"sequence_parallel": True}),
    "sequence, stage 3": Setting(stage=3, strategy={"sequence_parallel": True}),
    "sequence, model=4": Setting({"model": 4}, strategy={"sequence_parallel": True}),
    "replicas": Setting({"replica": 2, "batch": 1, "model": 2}, stage=3),
    "microbatches": Setting(stage=3, strategy={"microbatches": 2}),
    "recomputed": Setting(stage=3, recompute={}),
    "recomputed but for products": Setting(stage=3, recompute={"keep_products": True}),
    "a batch that the axis does not divide": Setting(rows=7),
}


@table(
    "settings of compiled blocks with a model axis", "name", SETTINGS,
    always=["batch=2 x model=2, stage 3"],
)  # fmt: skip
def test_blocks_train_as_on_one_device(name: str):
    setting = SETTINGS[name]
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**setting.mesh), layout_map="auto", zero_stage=setting.stage, **setting.strategy
    )

    def prepare(model: keras.Model) -> None:
        if setting.recompute is not None:
            strategy.recompute(model, **setting.recompute)

    build = functools.partial(model_of, functools.partial(Transformer, setting.dropout))
    x, y = TOKENS[: setting.rows], LABELS[: setting.rows]
    sharded = train(build, strategy, x=x, y=y, prepare=prepare)
    assert len(sharded_kernels(sharded.model)) == 12, "premise: the model axis shards the kernels of the blocks"
    # Two sharded pieces, and what lies between them.
    assert_compiled(sharded.model, programs=10)
    expected = train(build, x=x, y=y)
    assert max(expected.losses) - min(expected.losses) > 1e-2, "premise: it learns"
    parity.assert_same(sharded, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_sends_what_a_step_without_programs_sends(stage: int, sequence: bool):
    counts = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        model = tfshard.as_distributed(model_of(Transformer))
        strategy = tfshard.ShardedStrategy(
            tfshard.create_mesh(batch=2, model=2), "auto", zero_stage=stage, analyzer=None, sequence_parallel=sequence
        )
        model.compile("sgd", LOSS, jit_compile=jit_compile, strategy=strategy)
        profile = tfshard.profile_step(model, (TOKENS, LABELS))
        counts.append({kind: profile.count(kind) for kind in ("all-reduce", "reduce-scatter", "all-gather")})
    assert_compiled(model, programs=10)
    plain, compiled = counts
    assert plain["all-reduce"] > 0, "premise: the step reduces"
    assert compiled["all-reduce"] + compiled["reduce-scatter"] <= plain["all-reduce"] + plain["reduce-scatter"]
    # A block takes all its weights at once, and some of them are gathered again for its backward pass.
    assert compiled["all-gather"] <= 1.5 * plain["all-gather"]


def pairs_of(between: Callable[..., Any]) -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    x = Pair(between, name="layer_1")(Pair(between, name="layer_0")(inputs))
    return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))


COLUMN_AND_ROW = tfshard.LayoutMap()
COLUMN_AND_ROW.column(".*up")
COLUMN_AND_ROW.row(".*down")
COLUMN_AND_ROW.replicated(".*dense.*")

# Operations between a column and a row layer, and the number of programs of a block. Zero: not compiled.
BETWEEN: dict[str, tuple[Callable[..., Any], int, str]] = {
    "positions": (lambda x: x * keras.ops.arange(LENGTH, dtype="float32")[:, None] / 8, 4, ""),
    "heads": (lambda x: keras.ops.reshape(keras.ops.reshape(x, (-1, LENGTH, 4, 8)) * 2, (-1, LENGTH, 32)), 4, ""),
    "a softmax over the sharded dim": (keras.ops.softmax, 0, "needs all of the sharded dim"),
    "a mean over the sharded dim": (
        lambda x: x - keras.ops.mean(x, -1, keepdims=True), 0, "needs all of the sharded dim"
    ),
    "running sums over the sharded dim": (lambda x: keras.ops.cumsum(x, -1), 0, "needs all of the sharded dim"),
    "a half of the sharded dim": (
        lambda x: keras.ops.concatenate([x[..., 16:], x[..., :16]], -1), 0, "needs all of the sharded dim"
    ),
    "different constants": (
        lambda x: x * keras.ops.arange(32, dtype="float32") / 8, 0, "need different parts of constant"
    ),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")
@pytest.mark.parametrize("name", BETWEEN)
def test_what_cannot_be_sharded_is_not_compiled_and_trains_as_on_one_device(name: str):
    between, programs, message = BETWEEN[name]
    build = functools.partial(pairs_of, between)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), COLUMN_AND_ROW)
    compiled_blocks.forget_warnings()
    with pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext():
        sharded = train(build, strategy, x=SEQUENCES)
    assert len(sharded_kernels(sharded.model)) == 4, "premise: the model axis shards the kernels of the blocks"
    found = compiled_blocks.compiled_blocks(sharded.model)
    assert [each.programs for each in found] == [programs] * 2
    assert all(message in each.reason for each in found)
    parity.assert_same(sharded, train(build, x=SEQUENCES), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_blocks_whose_weights_are_replicated_run_as_one_piece():
    layout_map = tfshard.LayoutMap({"dense/kernel": (None, "model"), "dense/bias": ("model",)})
    layout_map.replicated("layer_.*")
    build = functools.partial(pairs_of, keras.ops.tanh)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map)
    sharded = train(build, strategy, x=SEQUENCES)
    assert sharded_over(sharded.model) and not sharded_kernels(sharded.model), "premise"
    assert_compiled(sharded.model, programs=2)
    parity.assert_same(sharded, train(build, x=SEQUENCES), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_verify_compares_blocks_with_a_model_axis():
    sgd = functools.partial(keras.optimizers.SGD, 0.1)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map="auto")
    model = train(functools.partial(model_of, functools.partial(Transformer, 0.3)), strategy, optimizer=sgd).model
    assert_compiled(model, programs=10)
    found = tfshard.verify(model, (TOKENS, LABELS))
    assert found.ok, found
