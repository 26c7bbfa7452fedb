"""Blocks that XLA compiles train as plain Keras on one device; what is not by samples is not compiled, and named."""

import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from sweeps import table
from tfshard import _private
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import compiled_blocks, compiled_updates, local_traces, programs
from tfshard.storage import steps
from tfshard.training import models

RS = np.random.RandomState(0)
WIDTH, LENGTH, WORDS = 16, 6, 24
TOKENS = RS.randint(1, WORDS, (8, LENGTH))
LABELS = RS.randint(0, 4, (8,))
SEQUENCES = RS.normal(size=(8, LENGTH, WIDTH)).astype("float32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ADAM = functools.partial(keras.optimizers.Adam, 1e-2, epsilon=1e-3)


class Attention(keras.layers.Layer):
    """A transformer layer."""

    def __init__(self, dropout: float = 0.0, **options: Any):
        super().__init__(**options)
        self.supports_masking = True
        self.norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(2, WIDTH // 2, dropout=dropout, seed=1)
        self.up, self.down = keras.layers.Dense(32, activation="gelu"), keras.layers.Dense(WIDTH)
        self.dropout = keras.layers.Dropout(dropout, seed=2)

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 32))
        self.built = True

    def call(self, x, training=False):
        x = x + self.attention(self.norm(x), x, use_causal_mask=True, training=training)
        return x + self.dropout(self.down(self.up(x)), training=training)


def transformer(dropout: float = 0.0, blocks: int = 2, mask_zero: bool = False) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH, mask_zero=mask_zero)(inputs)
    for number in range(blocks):
        x = Attention(dropout, name=f"layer_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(x)))


def of_sequences(make: Callable[[], keras.layers.Layer]) -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    return keras.Model(inputs, keras.layers.Dense(4)(make()(make()(inputs))[:, 0]))


def train(
    build: Callable[[], keras.Model],
    strategy: tfshard.ShardedStrategy | None = None,
    *,
    x: Any = TOKENS,
    y: Any = LABELS,
    optimizer: Callable[[], keras.optimizers.Optimizer] = ADAM,
    prepare: Callable[[keras.Model], object] = lambda model: None,
    steps: int = 4,
    **options: Any,
) -> parity.Run:
    """Train on one device, or with compiled blocks under a strategy."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    if strategy is None:
        prepare(model)
        model.compile(parity.dense_gradients(optimizer()), LOSS, jit_compile=False, run_eagerly=True, **options)
    else:
        model = tfshard.as_distributed(model)
        model.compile(optimizer(), LOSS, jit_compile=True, strategy=strategy, **options)
        prepare(model)
    losses = [float(model.train_on_batch(x, y)) for _ in range(steps)]
    return parity.Run(model=model, losses=losses)


def reasons(model: keras.Model) -> dict[str, str]:
    """Return why each block is not compiled, by the path of the block; empty texts for compiled blocks."""
    return {each.path: each.reason for each in compiled_blocks.compiled_blocks(model)}


def assert_compiled(model: keras.Model, blocks: int = 2) -> None:
    found = compiled_blocks.compiled_blocks(model)
    assert [(each.programs, each.reason) for each in found] == [(2, "")] * blocks, "premise: the blocks are compiled"


@dataclasses.dataclass(frozen=True)
class Setting:
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: {"batch": 4})
    stage: int = 3
    dropout: float = 0.0
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    x: Any = None
    tolerance: float = 2e-5


SETTINGS = {
    "stage 0": Setting(stage=0),
    "stage 1": Setting(stage=1),
    "stage 2": Setting(stage=2),
    "stage 3": Setting(),
    "no groups": Setting(strategy={"analyzer": None}),
    "one device": Setting(mesh={"batch": 1}),
    "replicas": Setting(mesh={"replica": 2, "batch": 2}),
    "replicas, no groups": Setting(mesh={"replica": 2, "batch": 2}, strategy={"analyzer": None}),
    "dropout": Setting(dropout=0.3),
    "dropout, replicas": Setting(dropout=0.3, mesh={"replica": 2, "batch": 2}),
    "a batch that the axis does not divide": Setting(x=slice(7), dropout=0.3),
    "microbatches": Setting(strategy={"microbatches": 2}, dropout=0.3),
    "reduced once": Setting(strategy={"microbatches": 2, "reduce_once": True}),
    "accumulated": Setting(
        more={"optimizer": functools.partial(keras.optimizers.Adam, 1e-2, epsilon=1e-3, gradient_accumulation_steps=2)}
    ),
    "clipped": Setting(more={"optimizer": functools.partial(keras.optimizers.SGD, 0.1, global_clipnorm=0.1)}),
    "prefetch": Setting(strategy={"prefetch": 2, "analyzer": None}),
    "kept gathered": Setting(strategy={"reshard_after_forward": False}),
}


@table("settings of compiled blocks", "name", SETTINGS, always=["no groups", "dropout"])
def test_compiled_blocks_train_as_on_one_device(name: str):
    setting = SETTINGS[name]
    rows = slice(None) if setting.x is None else setting.x
    build = functools.partial(transformer, setting.dropout)
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**setting.mesh), zero_stage=setting.stage, **setting.strategy
    )
    sharded = train(build, strategy, x=TOKENS[rows], y=LABELS[rows], **setting.more)
    assert_compiled(sharded.model)
    expected = train(build, x=TOKENS[rows], y=LABELS[rows], **setting.more)
    assert max(expected.losses) - min(expected.losses) > 1e-2, "premise: it learns"
    parity.assert_same(sharded, expected, rtol=setting.tolerance, atol=setting.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("keep_products", [False, True])
def test_recomputed_blocks_are_compiled_and_keep_less(keep_products: bool):
    def recompute(model: keras.Model) -> None:
        if hasattr(model, "distribute_strategy") and isinstance(model.distribute_strategy, tfshard.ShardedStrategy):
            model.distribute_strategy.recompute(model, keep_products=keep_products)

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    sharded = train(functools.partial(transformer, 0.3), strategy, prepare=recompute)
    assert_compiled(sharded.model)
    expected = train(functools.partial(transformer, 0.3))
    parity.assert_same(sharded, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_adapters_are_compiled():
    def build():
        model = transformer()
        for layer in model.layers:
            if isinstance(layer, Attention):
                layer.up.enable_lora(2)
                layer.down.enable_lora(2)
        return model

    sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    assert_compiled(sharded.model)
    assert sum("lora" in variable.path for variable in sharded.model.trainable_variables) == 8, "premise"
    parity.assert_same(sharded, train(build), rtol=2e-5, atol=2e-5)


def test_masks_go_in_and_come_out():
    tokens = np.where(np.arange(LENGTH) < RS.randint(2, LENGTH, (8, 1)), TOKENS, 0)
    build = functools.partial(transformer, mask_zero=True)
    sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), x=tokens)
    assert_compiled(sharded.model)
    expected = train(build, x=tokens)
    assert not np.allclose(expected.losses, train(transformer, x=tokens).losses), "premise: the mask matters"
    parity.assert_same(sharded, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_trains_nearly_as_on_one_device(policy: str):
    try:
        keras.config.set_dtype_policy(policy)
        sharded = train(transformer, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
        expected = train(transformer)
    finally:
        keras.config.set_dtype_policy("float32")
    assert_compiled(sharded.model)
    np.testing.assert_allclose(sharded.losses, expected.losses, rtol=2e-2)


def test_evaluation_and_prediction_run_the_forward_program_alone():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    sharded, expected = train(functools.partial(transformer, 0.3), strategy), train(functools.partial(transformer, 0.3))
    np.testing.assert_allclose(sharded.model.predict(TOKENS, verbose=0), expected.model.predict(TOKENS, verbose=0),
                               rtol=1e-3, atol=1e-4)  # fmt: skip
    assert {each.programs for each in compiled_blocks.compiled_blocks(sharded.model)} == {1}
    np.testing.assert_allclose(sharded.model.evaluate(TOKENS, LABELS, verbose=0),
                               expected.model.evaluate(TOKENS, LABELS, verbose=0), rtol=1e-4)  # fmt: skip


def test_equal_blocks_share_their_programs(monkeypatch):
    made: list[bytes] = []
    lowered = _private.stablehlo
    monkeypatch.setattr(_private, "stablehlo", lambda *given: made.append(lowered(*given)) or made[-1])
    compiled_blocks._pairs.clear()
    compiled_updates._programs.clear()
    sharded = train(functools.partial(transformer, blocks=4), tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    assert_compiled(sharded.model, 4)
    assert len(made) - len(compiled_updates._programs) == 2
    assert "XLA compiles 4 of 4 blocks." in str(sharded.model.distribute_strategy.report(sharded.model))


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize(("number", "kind", "program"), [(3, "gradient", "backward"), (2, "layer", "forward")])
def test_verify_names_a_wrong_block(monkeypatch, number: int, kind: str, program: str):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    sgd = functools.partial(keras.optimizers.SGD, 0.1)
    model = train(functools.partial(transformer, 0.3), strategy, optimizer=sgd, steps=1).model
    found = tfshard.verify(model, (TOKENS, LABELS))
    assert found.ok, found
    assert "layers and random numbers inside compiled blocks" in " ".join(found.not_compared)
    right, calls = programs.Program.call, []

    def wrong(program, inputs):
        if steps.current().graph not in [graph for graph, _ in calls]:
            calls.append((steps.current().graph, []))
        calls[-1][1].append(program)
        factor = 1.01 if len(calls[-1][1]) == number else 1.0
        return [each * factor for each in right(program, inputs)]

    monkeypatch.setattr(programs.Program, "call", wrong)
    first = tfshard.verify(model, (TOKENS, LABELS)).differences[0]
    assert first.kind == kind and "layer_1" in first.place
    assert f"the {program} pass of compiled layer 'layer_1' (Attention)" in str(first.operation)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_sends_what_a_step_without_programs_sends(stage: int):
    profiles = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(0)
        model = tfshard.as_distributed(transformer())
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage, analyzer=None)
        model.compile("sgd", LOSS, jit_compile=jit_compile, strategy=strategy)
        profiles.append(tfshard.profile_step(model, (TOKENS, LABELS)))
    assert_compiled(model)
    for kind in ("reduce-scatter", "all-to-all"):
        assert profiles[1].count(kind) == profiles[0].count(kind)
    # DTensor merges some reductions of a step without programs.
    assert profiles[1].count("all-reduce") <= 1.1 * profiles[0].count("all-reduce")
    # A block takes all its weights at once, and some of them are gathered again for its backward pass.
    assert profiles[1].count("all-gather") <= 1.5 * profiles[0].count("all-gather")


class OfNumber(keras.layers.Layer):
    """A layer with a kernel, and a number that is no weight."""

    def __init__(self, number: float, operation: Callable[..., Any], **options: Any):
        super().__init__(**options)
        self.number, self.operation = number, operation
        self.dense, self.other = keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH)

    def build(self, shape):
        self.dense.build(shape)
        self.other.build(shape)
        self.built = True

    def call(self, x):
        return self.operation(self, self.other(keras.ops.tanh(self.dense(x))))


def with_gradient_times(number: float, x: tf.Tensor) -> tf.Tensor:
    return tf.custom_gradient(lambda x: (tf.identity(x), lambda upstream: number * upstream))(x)


ALIKE = {
    "another number": lambda layer, x: x * layer.number,
    "another gradient": lambda layer, x: with_gradient_times(layer.number, x),
}


@pytest.mark.parametrize("name", ALIKE)
def test_blocks_that_are_only_alike_have_programs_of_their_own(name: str):
    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x = OfNumber(0.5, ALIKE[name])(OfNumber(2.0, ALIKE[name])(inputs))
        return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))

    sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), x=SEQUENCES)
    assert_compiled(sharded.model)
    parity.assert_same(sharded, train(build, x=SEQUENCES), rtol=2e-5, atol=2e-5)


def test_blocks_that_are_equal_for_these_samples_only_are_told_apart():
    """Two samples a device: `x / 2` is by samples, and `x / x.shape[0]` is not."""

    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x = OfNumber(0.0, lambda layer, x: x / 2)(inputs)
        x = OfNumber(0.0, lambda layer, x: x / (x.shape[0] or 2))(x)
        return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))

    compiled_blocks.forget_warnings()
    with pytest.warns(UserWarning, match="depends on the size of the batch"):
        sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), x=SEQUENCES, steps=2)
    assert [bool(reason) for reason in reasons(sharded.model).values()] == [False, True]
    parity.assert_same(sharded, train(build, x=SEQUENCES, steps=2), rtol=2e-5, atol=2e-5)


def test_a_second_derivative_of_a_compiled_block_is_refused():
    class Penalized(keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(data[0])
                    loss = tf.reduce_mean(self(data[0], training=True))
                loss += tf.reduce_mean(inner.gradient(loss, data[0]) ** 2)
            self.optimizer.apply(outer.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    inputs = keras.Input((LENGTH, WIDTH))
    by_two = lambda layer, x: keras.ops.tanh(2 * x)  # noqa: E731
    model = Penalized(inputs, keras.layers.Dense(4)(OfNumber(0.0, by_two)(OfNumber(0.0, by_two)(inputs))[:, 0]))
    model = tfshard.as_distributed(model)
    model.compile("sgd", jit_compile=True, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    with pytest.raises(UnsupportedOperationError, match=r"Compiled block 'of_number.*' has no second derivative"):
        model.train_on_batch(SEQUENCES, LABELS)


def test_a_result_that_no_sample_has_part_in_has_its_gradient_once():
    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x, kernels = inputs, []
        for _ in range(2):
            x, kernel = OfNumber(1.0, lambda layer, x: (x, 2.0 * layer.dense.kernel))(x)
            kernels.append(kernel)
        return keras.Model(inputs, keras.layers.Dense(4)(keras.ops.matmul(x[:, 0], kernels[0] + kernels[1])))

    sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), x=SEQUENCES)
    assert_compiled(sharded.model)
    parity.assert_same(sharded, train(build, x=SEQUENCES), rtol=2e-5, atol=2e-5)


# --- blocks that are not by samples


class OfBatch(keras.layers.Layer):
    """A layer with two kernels, perhaps another layer, and an operation on its outputs."""

    def __init__(
        self, operation: Callable[..., Any], more: Callable[[], keras.layers.Layer] | None = None, **options: Any
    ):
        super().__init__(**options)
        self.operation = operation
        self.dense, self.other = keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH)
        self.more = None if more is None else more()

    def build(self, shape):
        self.dense.build(shape)
        self.other.build(shape)
        if self.more is not None:
            self.more.build(shape)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.built = True

    def call(self, x):
        return self.operation(self, self.other(keras.ops.tanh(self.dense(x))))


def adds_loss(layer, x):
    layer.add_loss(1e-2 * keras.ops.mean(x**2))
    return x


def asserts(layer, x):
    tf.debugging.assert_less(tf.reduce_sum(layer.dense.kernel), 1e9)
    return x


def counts(layer, x):
    layer.count.assign(keras.ops.mean(x))
    return x


_counts = itertools.count()


def counted(layer, x):
    return x + keras.ops.full((WIDTH,), 1e-7 * next(_counts))


def fails(layer, x):
    if x.shape[0] == 2:
        raise ValueError("too few rows")
    return x


NOT_BY_SAMPLES = {
    "the mean of the batch": (lambda layer, x: x - keras.ops.mean(x, 0, keepdims=True), "needs all samples"),
    "running sums over the batch": (lambda layer, x: x + keras.ops.cumsum(x, 0), "needs all samples"),
    "the size of the batch": (lambda layer, x: x / (x.shape[0] or 8), "depends on the size of the batch"),
    "the shape of the batch": (
        lambda layer, x: x / keras.ops.cast(tf.shape(x)[0], "float32"), "depends on the size of the batch"
    ),
    "samples with samples": (
        lambda layer, x: x + keras.ops.mean(keras.ops.abs(x[:, None] - x[None]), 1), "samples with other samples"
    ),
    "rows in another order": (lambda layer, x: keras.ops.flip(x, 0), "ReverseV2"),
    "rows after rows": (lambda layer, x: x + keras.ops.roll(x, 1, 0), "needs all samples|Roll|ConcatV2"),
    "a number for each row": (
        lambda layer, x: x * keras.ops.arange(x.shape[0] or 8, dtype="float32")[:, None, None],
        "depends on the size of the batch|samples with other samples",
    ),
    "a constant of all samples": (
        lambda layer, x: x * keras.ops.ones((8, 1, 1)) if x.shape[0] else x, "fails with the samples of one"
    ),
    "a loss": (adds_loss, "adds a loss"),
    "a row of a number of rows": (
        lambda layer, x: x + layer.other.kernel[x.shape[0] or 0], "depends on the size of the batch"
    ),
    "side effects": (asserts, "has side effects|fails with the samples"),
    "a custom gradient of the batch": (
        lambda layer, x: tf.custom_gradient(lambda x: (tf.identity(x), lambda up: up / (1 + tf.norm(up))))(x),
        "needs all samples",
    ),
    "a custom gradient of the size of the batch": (
        lambda layer, x: tf.custom_gradient(lambda x: (tf.identity(x), lambda up: up / (x.shape[0] or 8)))(x),
        "depends on the size of the batch",
    ),
    "a statistic": (counts, "writes values that depend on the samples to variable .*/count"),
    "a loop": (
        lambda layer, x: tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * 0.9), (0, x))[1],
        r"no rule for loops in a block: .* \(StatelessWhile, test_compiled_blocks.py:\d+, in <lambda>\)",
    ),
    "a map": (lambda layer, x: keras.ops.map(lambda row: row * 0.9, x), "no rule for loops in a block"),
    "a branch": (
        lambda layer, x: tf.cond(tf.reduce_sum(layer.dense.kernel) > 0, lambda: 2.0 * x, lambda: 0.5 * x),
        "no rule for branches in a block",
    ),
    "a branch that reads a weight of its own": (
        lambda layer, x: keras.ops.cond(keras.ops.sum(x) > 0, lambda: layer.more(x), lambda: 2.0 * x),
        "no rule for branches in a block",
        lambda: keras.layers.Dense(WIDTH),
    ),
    "a branch by number": (
        lambda layer, x: keras.ops.switch(1, [lambda x: 2.0 * x, lambda x: 0.5 * x], x), "no rule for branches"
    ),
    "a function": (lambda layer, x: tf.function(lambda x: 0.5 * x)(x), "no rule for calls of a tf.function"),
    "a recurrence": (
        lambda layer, x: layer.more(x), "no rule for loops", lambda: keras.layers.GRU(WIDTH, return_sequences=True)
    ),
    "sorting": (
        lambda layer, x: keras.ops.sort(x, -1),
        r"no rule for TensorFlow operation TopKV2, test_compiled_blocks.py:\d+, in <lambda>",
    ),
    "a Python counter": (counted, r"something else each time it is traced.*\(Const, test_compiled_blocks.py:\d+"),
    "an error": (fails, "fails with the samples of one device .*too few rows"),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", NOT_BY_SAMPLES)
def test_what_is_not_by_samples_is_not_compiled_and_trains_as_on_one_device(name: str):
    operation, message, *more = NOT_BY_SAMPLES[name]
    build = functools.partial(of_sequences, lambda: OfBatch(operation, *more))
    with pytest.warns(UserWarning, match=f"(?s)is not compiled.*({message})"):
        compiled_blocks.forget_warnings()
        sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), x=SEQUENCES, steps=2)
    found = reasons(sharded.model)
    assert len(found) == 2 and all(found.values()), "premise: no block is compiled"
    report = " ".join(str(sharded.model.distribute_strategy.report(sharded.model)).split())
    assert "XLA compiles 0 of 2 blocks." in report
    assert all(f"Block '{path}' is not compiled" in report for path in found)
    expected = train(build, x=SEQUENCES, steps=2)
    parity.assert_same(sharded, expected, rtol=2e-5, atol=2e-5)


AFTER = {
    "a loop": lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, 0.9 * x), (0, x))[1],
    "a map": lambda x: keras.ops.map(lambda row: 0.9 * row, x),
    "a branch": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: 0.9 * x, lambda: 0.5 * x),
    "a sort": lambda x: keras.ops.sort(x, -1),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", AFTER)
def test_blocks_after_operations_without_a_rule_compute_the_samples_of_one_device(monkeypatch, name: str):
    def build() -> keras.Model:
        inputs = keras.Input((LENGTH, WIDTH))
        x = keras.layers.Lambda(AFTER[name], output_shape=(LENGTH, WIDTH))(inputs)
        x = OfBatch(lambda layer, x: x)(OfBatch(lambda layer, x: x)(x))
        return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))

    def trace(function, arguments, shapes, layers):
        sizes.append(shapes[0][0])
        return right(function, arguments, shapes, layers)

    sizes, right = [], local_traces.trace
    monkeypatch.setattr(local_traces, "trace", trace)
    sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), x=SEQUENCES, steps=2)
    assert_compiled(sharded.model)
    assert sizes and len(SEQUENCES) not in sizes and len(SEQUENCES) // 4 in sizes
    parity.assert_same(sharded, train(build, x=SEQUENCES, steps=2), rtol=2e-5, atol=2e-5)


def test_batch_statistics_are_not_compiled():
    build = functools.partial(of_sequences, lambda: OfBatch(lambda layer, x: x, name=None))
    assert_compiled(train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), x=SEQUENCES).model)

    class Normalized(OfBatch):
        def build(self, shape):
            super().build(shape)
            self.norm = keras.layers.BatchNormalization()
            self.norm.build(shape)

        def call(self, x, training=False):
            return self.norm(self.other(self.dense(x)), training=training)

    build = functools.partial(of_sequences, lambda: Normalized(None))
    with pytest.warns(UserWarning, match="is not compiled: .*of layer '.*' \\(BatchNormalization\\)"):
        sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), x=SEQUENCES)
    found = reasons(sharded.model)
    assert len(found) == 2 and all(f"variable '{path}/" in reason for path, reason in found.items())
    parity.assert_same(sharded, train(build, x=SEQUENCES), rtol=1e-4, atol=1e-4)


def test_a_model_without_blocks_warns():
    model = tfshard.as_distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]))
    with pytest.warns(UserWarning, match="has no blocks to compile") as found:
        model.compile("sgd", "mse", jit_compile=True, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
        model.fit(np.ones((8, 4)), np.ones((8, 4)), batch_size=4, verbose=0)
    assert len(found) == 1


class Lookup(keras.layers.Layer):
    """A layer of many operations that looks up rows of its own table."""

    def build(self, shape):
        self.table = self.add_weight(shape=(WORDS, WIDTH), initializer="glorot_uniform", name="table")
        self.built = True

    def call(self, ids):
        found = keras.ops.take(self.table, ids, axis=0)
        for _ in range(8):
            found = keras.ops.tanh(found)
        return found


LOOKUPS = {
    "tables": ({"batch": 4}, {"tables": tfshard.EmbeddingTables(".*(embeddings|table)")}),
    "automatic layouts": ({"batch": 2, "model": 2}, {"layout_map": "auto"}),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_layers_that_look_up_rows_are_left_out(name: str):
    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(WORDS, WIDTH)(inputs) + Lookup()(inputs)
        return keras.Model(inputs, keras.layers.Dense(4)(Attention()(Attention()(x))[:, 0]))

    mesh, options = LOOKUPS[name]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), **options)
    model = train(build, strategy, optimizer=functools.partial(keras.optimizers.SGD, 0.1), steps=1).model
    assert all(each.programs for each in compiled_blocks.compiled_blocks(model)), "premise: the blocks are compiled"
    assert compiled_blocks.other_layers(model) == []


def test_a_custom_loop_compiles_a_model_that_is_compiled_first():
    """The report names the compiled optimizer, which the loop does not use."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    keras.utils.set_random_seed(0)
    model, strategy = tfshard.as_distributed(transformer()), tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile("adam", LOSS, jit_compile=True, strategy=strategy)
    with strategy.scope():
        optimizer = ADAM()
    run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    data = tf.data.Dataset.from_tensor_slices((TOKENS, LABELS)).batch(8).repeat(3)
    losses = [float(run(*batch)) for batch in strategy.experimental_distribute_dataset(data)]
    assert_compiled(model)
    np.testing.assert_allclose(losses, train(transformer, steps=3).losses, rtol=2e-5)
    notes = strategy.report(model).notes
    assert "Optimizer 'adam' has no slots: it has updated no variable yet." in notes
    assert "first training step" not in " ".join(notes)


def test_single_layers_of_several_operations_are_compiled():
    """A normalization is, and a Dense layer or an embedding is not."""

    def build() -> keras.Model:
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(WORDS, WIDTH)(inputs)
        x = keras.layers.LayerNormalization(name="norm")(Attention(name="layer_1")(Attention(name="layer_0")(x)))
        return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))

    sharded = train(build, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    assert_compiled(sharded.model)
    others = compiled_blocks.other_layers(sharded.model)
    assert [(each.path, each.programs) for each in others] == [("norm", 2)]
    assert "XLA compiles 1 of 1 other layers." in str(sharded.model.distribute_strategy.report(sharded.model))
    parity.assert_same(sharded, train(build), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_blocks_of_patterns_are_compiled():
    """The first of two equal blocks is computed again. Both are compiled, and a single layer with sublayers, too."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    sharded = train(transformer, strategy, prepare=lambda model: strategy.recompute(model, "layer_0"))
    assert_compiled(sharded.model)
    parity.assert_same(sharded, train(transformer), rtol=2e-5, atol=2e-5)
    only = functools.partial(transformer, blocks=1)
    with pytest.warns(UserWarning, match="has no blocks to compile"):
        model = train(only, strategy, prepare=lambda model: strategy.recompute(model, "layer_0")).model
    assert_compiled(model, blocks=1)


@pytest.mark.parametrize("device_type, expected", [("CPU", False), ("GPU", True)])
def test_auto_compiles_on_gpus(monkeypatch: pytest.MonkeyPatch, device_type: str, expected: bool):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    monkeypatch.setattr(type(strategy.mesh), "device_type", lambda mesh: device_type)
    assert models._compiles_by_itself(strategy, {}) is expected
    assert not models._compiles_by_itself(strategy, {"run_eagerly": True})


@pytest.mark.slow
@pytest.mark.parametrize("positional", [False, True])
def test_a_model_born_in_a_scope_takes_jit_compile(positional: bool):
    keras.utils.set_random_seed(0)
    with tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)).scope():
        model = transformer()
        if positional:
            model.compile("sgd", LOSS, None, None, None, False, 1, True)
        else:
            model.compile("sgd", LOSS, jit_compile=True)
    model.fit(TOKENS, LABELS, verbose=0)
    assert_compiled(model)


def test_the_graphs_of_steps_are_freed_with_their_model():
    graphs: list[weakref.ref] = []

    def noting(layer, x):
        outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
        if outer is not None:
            graphs.append(weakref.ref(outer))
        return x

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = train(functools.partial(of_sequences, lambda: OfNumber(0.0, noting)), strategy, x=SEQUENCES, steps=1).model
    assert_compiled(model)
    assert any(isinstance(each(), tf.Graph) for each in graphs), "premise: the step's graph was seen"
    del model, strategy
    keras.backend.clear_session()
    gc.collect()
    assert not any(each() for each in graphs)


def test_compiled_again_without_it_nothing_is_compiled():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = train(transformer, strategy).model
    assert_compiled(model)
    assert model.get_compile_config()["jit_compile"] is True, "saved and cloned models take it along"
    model.compile(ADAM(), LOSS, strategy=strategy)
    assert model.get_compile_config()["jit_compile"] is not True
    model.train_on_batch(TOKENS, LABELS)
    assert compiled_blocks.compiled_blocks(model) == []
