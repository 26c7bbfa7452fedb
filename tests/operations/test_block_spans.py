"""Compiled blocks whose weights are neighbors in a group match plain Keras on one device."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard import _private
from tfshard.operations import block_spans, compiled_blocks

RS = np.random.RandomState(0)
X = RS.normal(size=(8, 12)).astype("float32")
Y = RS.normal(size=(8, 3)).astype("float32")
ADAM = functools.partial(keras.optimizers.Adam, 1e-2, epsilon=1e-3)


class Block(keras.layers.Layer):
    def build(self, shape):
        self.norm = keras.layers.LayerNormalization()
        self.up, self.down = keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(12)
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 16))

    def call(self, x):
        return x + self.down(self.up(self.norm(x)))


class Penalty(keras.Model):
    """A model with a penalty on weights of its blocks. The loss reads them before or after the blocks do."""

    first = False

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return loss if self.first else loss + self.penalty()

    def penalty(self) -> Any:
        return sum(keras.ops.sum(keras.ops.square(layer.up.kernel)) for layer in self.blocks()) / 10

    def blocks(self) -> list[Block]:
        return [layer for layer in self.layers if isinstance(layer, Block)]


class PenaltyFirst(Penalty):
    first = True

    def call(self, *args, **kwargs):
        penalty = self.penalty()
        return super().call(*args, **kwargs) + penalty


class LatePenalty(Penalty):
    """A model with a penalty on weights of its blocks in a branch of the loss."""

    def penalty(self) -> Any:
        late = super().penalty
        return tf.cond(tf.greater(self.optimizer.iterations, 1), late, lambda: 0.0)


class Stopped(keras.layers.Layer):
    """A block with a weight that has no gradient."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.block = Block()
        self.block.build(shape)

    def call(self, x):
        return self.block(x) * keras.ops.stop_gradient(self.scale)


def with_stopped() -> keras.Model:
    inputs = keras.Input((12,))
    x = inputs
    for number in range(3):
        x = Stopped(name=f"layer_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def build(model: type[keras.Model] = keras.Model, *, frozen: str = "") -> keras.Model:
    inputs = keras.Input((12,))
    x = inputs
    for number in range(3):
        x = Block(name=f"layer_{number}")(x)
    made = model(inputs, keras.layers.Dense(3)(x))
    for layer in made.layers:
        if frozen and isinstance(layer, Block):
            getattr(layer, frozen).trainable = False
    return made


def train(
    make: Callable[[], keras.Model],
    strategy: tfshard.ShardedStrategy | None = None,
    optimizer: Callable[[], keras.optimizers.Optimizer] = ADAM,
    **options: Any,
) -> parity.Run:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = make()
    if strategy is None:
        model.compile(optimizer(), "mse", jit_compile=False, **options)
    else:
        model = tfshard.as_distributed(model)
        model.compile(optimizer(), "mse", jit_compile=True, strategy=strategy, **options)
    losses = [float(model.train_on_batch(X, Y)) for _ in range(4)]
    return parity.Run(model=model, losses=losses)


@pytest.fixture
def spans(monkeypatch) -> list[block_spans.WeightSpan]:
    """The spans that blocks find."""
    found: list[block_spans.WeightSpan] = []
    find = block_spans.find

    def noted(*args: Any) -> list[block_spans.WeightSpan]:
        made = find(*args)
        found.extend(made)
        return made

    monkeypatch.setattr(block_spans, "find", noted)
    return found


def excluding() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.AdamW(1e-2, epsilon=1e-3, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    return optimizer


CASES: dict[str, tuple[Callable[[], keras.Model], dict[str, Any]]] = {
    "all weights": (build, {}),
    "a weight that the loss reads, too": (functools.partial(build, Penalty), {}),
    "a weight that is read alone before": (functools.partial(build, PenaltyFirst), {}),
    "a weight that the loss reads in a branch": (functools.partial(build, LatePenalty), {}),
    "frozen weights between": (functools.partial(build, frozen="up"), {}),
    "a frozen norm": (functools.partial(build, frozen="norm"), {}),
    "no decay of some weights": (build, {"optimizer": excluding}),
    "each gradient clipped": (build, {"optimizer": functools.partial(ADAM, clipnorm=0.05)}),
    "all gradients clipped": (build, {"optimizer": functools.partial(ADAM, global_clipnorm=0.05)}),
    "a scaled loss": (build, {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(ADAM(), initial_scale=8.0)}),
    "averages": (build, {"optimizer": functools.partial(ADAM, use_ema=True, ema_overwrite_frequency=2)}),
    "several steps": (build, {"steps_per_execution": 2}),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_weights_of_a_group_train_as_on_one_device(name: str, stage: int, spans: list[block_spans.WeightSpan]):
    make, options = CASES[name]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage)
    sharded = train(make, strategy, **options)
    assert spans and all(len(each.variables) > 1 for each in spans), "premise: weights lie side by side"
    found = compiled_blocks.compiled_blocks(sharded.model)
    assert [each.programs for each in found] == [2, 2, 2], "premise: compiled"
    expected = train(make, **options)
    assert max(expected.losses) - min(expected.losses) > 1e-3, "premise: it learns"
    parity.assert_same(sharded, expected, rtol=2e-5, atol=2e-6)


def test_a_step_has_few_operations_for_each_weight():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    counts = []
    for blocks in (1, 2):
        keras.backend.clear_session()
        inputs = keras.Input((12,))
        x = inputs
        for number in range(1 + blocks):
            x = Block(name=f"layer_{number}")(x)
        model = keras.Model(inputs, keras.layers.Dense(3)(x))
        model.compile("sgd", "mse", jit_compile=True, strategy=strategy)
        graphs: list[tf.Graph] = []
        with _noted_graphs(graphs):
            model.train_on_batch(X, Y)
        counts.append(max(len(each.get_operations()) for each in graphs))
    assert counts[1] - counts[0] < 6 * 20, "the operations of a block with 6 weights"


def _noted_graphs(graphs: list[tf.Graph]) -> Any:
    call = compiled_blocks.CompiledCall.__call__

    def noted(self, *args, **kwargs):
        graphs.append(tf.compat.v1.get_default_graph())
        return call(self, *args, **kwargs)

    return mock.patch.object(compiled_blocks.CompiledCall, "__call__", noted)


def test_gradients_of_a_custom_loop_match_one_device():
    keras.utils.set_random_seed(0)
    model = build()
    before = [np.array(each) for each in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(X) - Y))
    expected = tape.gradient(loss, [each.value for each in model.trainable_variables])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile("sgd", "mse", jit_compile=True, strategy=strategy)
    for each, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(each, value, err_msg="premise: the same weights")

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        return tape.gradient(loss, [_private.backend_variable(each) for each in model.trainable_variables])

    found = strategy.run(gradients, args=(tf.constant(X), tf.constant(Y)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
def test_weights_without_a_gradient_do_not_decay():
    decaying = functools.partial(keras.optimizers.AdamW, 1e-2, epsilon=1e-3, weight_decay=0.5)
    sharded = train(with_stopped, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), decaying)
    assert all(each.programs for each in compiled_blocks.compiled_blocks(sharded.model)), "premise"
    parity.assert_same(sharded, train(with_stopped, None, decaying), rtol=2e-5, atol=2e-6)


def loop(model: keras.Model, optimizer: keras.optimizers.Optimizer, how: str) -> Callable[..., Any]:
    variables = model.trainable_variables

    def watched(x, y):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([_private.backend_variable(each) for each in variables])
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, [_private.backend_variable(each) for each in variables]), variables)
        return loss

    def twice(x, y):
        norm = tf.reduce_sum(tf.square(tf.convert_to_tensor(variables[2])))  # Read alone before the blocks.
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
                loss += tf.reduce_sum(tf.square(tf.convert_to_tensor(variables[2]))) / 10
            optimizer.apply(tape.gradient(loss, [_private.backend_variable(each) for each in variables]), variables)
        return loss + 0 * norm

    return {"watched": watched, "twice": twice}[how]


@pytest.mark.parametrize("how", ["watched", "twice"])
def test_custom_loops_match_one_device(how: str, spans: list[block_spans.WeightSpan]):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    found = []
    for is_sharded in (True, False):
        keras.utils.set_random_seed(0)
        model = build()
        if is_sharded:
            model.compile("sgd", "mse", jit_compile=True, strategy=strategy)
        with strategy.scope() if is_sharded else contextlib.nullcontext():
            optimizer = ADAM()
            optimizer.build(model.trainable_variables)
        step = tf.function(loop(model, optimizer, how), autograph=False)
        for _ in range(3):
            args = tf.constant(X), tf.constant(Y)
            loss = strategy.run(step, args=args) if is_sharded else step(*args)
        found.append([np.array(loss), *(np.array(each) for each in model.weights)])
    assert spans, "premise: weights lie side by side"
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_frozen_weights_have_no_gradient_in_programs(monkeypatch):
    counts: list[int] = []
    lower = compiled_blocks.programs.lower

    def counted(inputs, outputs, *args, **options):
        counts.append(len(outputs))
        return lower(inputs, outputs, *args, **options)

    monkeypatch.setattr(compiled_blocks.programs, "lower", counted)
    compiled_blocks._pairs.clear()
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None)
    run = train(functools.partial(build, frozen="up"), strategy)
    assert [each.programs for each in compiled_blocks.compiled_blocks(run.model)] == [2, 2, 2], "premise"
    # The backward program, which all blocks share: the gradients of norm and down, two weights each, and of the input.
    assert counts[1] == 5, counts


@pytest.mark.parametrize("by", ["weights", "inputs"])
def test_tf_gradients_through_a_compiled_block_is_refused(by: str):
    model = build()
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile("sgd", "mse", jit_compile=True, strategy=strategy)

    @tf.function(autograph=False)
    def gradients(x):
        loss = tf.reduce_mean(model(x, training=True))
        return tf.gradients(loss, [each.value for each in model.trainable_variables] if by == "weights" else [x])

    with pytest.raises(tfshard.errors.UnsupportedOperationError, match="Use a tf.GradientTape"):
        strategy.run(gradients, args=(tf.constant(X),))
