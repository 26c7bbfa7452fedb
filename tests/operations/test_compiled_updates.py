"""Compiled updates of optimizers train as plain Keras on one device; what is not elementwise is not compiled."""

import dataclasses
import functools
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
from tfshard.operations import compiled_updates

# The models are small.
pytestmark = pytest.mark.filterwarnings("ignore:Model '.*' has no blocks to compile")

RS = np.random.RandomState(0)
X = RS.normal(size=(8, 12)).astype("float32")
Y = RS.normal(size=(8, 3)).astype("float32")
OPTIMIZERS = keras.optimizers


def build(use_bias: bool = True) -> keras.Model:
    inputs = keras.Input((12,))
    x = keras.layers.Dense(40, activation="gelu", use_bias=use_bias)(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, use_bias=use_bias)(x))


def train(
    optimizer: Callable[[], keras.optimizers.Optimizer],
    strategy: tfshard.ShardedStrategy | None = None,
    *,
    steps: int = 4,
    x: Any = X,
    jit_compile: bool = True,
    use_bias: bool = True,
    **options: Any,
) -> parity.Run:
    """Train on one device, or with compiled updates under a strategy."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build(use_bias)
    if strategy is None:
        model.compile(optimizer(), "mse", jit_compile=False, run_eagerly=True)
    else:
        model = tfshard.as_distributed(model)
        model.compile(optimizer(), "mse", jit_compile=jit_compile, strategy=strategy, **options)
    losses = [float(model.train_on_batch(x, Y)) for _ in range(steps)]
    return parity.Run(model=model, losses=losses)


def reasons(run: parity.Run) -> list[str]:
    """Return why each update is not compiled; an empty text for a compiled update."""
    return [each.reason for each in compiled_updates.compiled_updates(run.model.optimizer)]


def assert_compiled(run: parity.Run, updates: int) -> None:
    assert reasons(run) == [""] * updates, "premise: the updates are compiled"


def sharded(**options: Any) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options)


class Declared(keras.optimizers.SGD):
    """An optimizer that says that it is elementwise."""

    tfshard_elementwise = True


class ByCount(Declared):
    """Divides by the number of elements of the variable."""

    def update_step(self, gradient, variable, learning_rate):
        count = tf.cast(tf.size(tf.convert_to_tensor(gradient)), gradient.dtype)
        self.assign_sub(variable, gradient * learning_rate * 480.0 / count)


class Normed(keras.optimizers.SGD):
    """Divides by the norm of the gradient."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate / (tf.norm(gradient) + 1.0))


class Rolled(keras.optimizers.SGD):
    """Takes each element of the gradient from another place."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, tf.reverse(gradient, [0]) * learning_rate)


class Centered(keras.optimizers.SGD):
    """Adds a constant that differs from row to row."""

    def update_step(self, gradient, variable, learning_rate):
        rows = np.arange(gradient.shape[0], dtype="float32").reshape(-1, *[1] * (gradient.shape.rank - 1))
        self.assign_sub(variable, gradient * learning_rate + 1e-3 * tf.broadcast_to(rows, gradient.shape))


def scheduled() -> keras.optimizers.Optimizer:
    return OPTIMIZERS.Adam(OPTIMIZERS.schedules.ExponentialDecay(1e-2, 2, 0.5))


TABLE: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: OPTIMIZERS.SGD(0.1),
    "momentum": lambda: OPTIMIZERS.SGD(0.1, momentum=0.9),
    "nesterov": lambda: OPTIMIZERS.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: OPTIMIZERS.Adam(1e-2),
    "amsgrad": lambda: OPTIMIZERS.Adam(1e-2, amsgrad=True),
    "adamw": lambda: OPTIMIZERS.AdamW(1e-2, weight_decay=0.1),
    "rmsprop": lambda: OPTIMIZERS.RMSprop(1e-2, momentum=0.5, centered=True),
    "adagrad": lambda: OPTIMIZERS.Adagrad(0.1),
    "adadelta": lambda: OPTIMIZERS.Adadelta(1.0),
    "adamax": lambda: OPTIMIZERS.Adamax(1e-2),
    "nadam": lambda: OPTIMIZERS.Nadam(1e-2),
    "lion": lambda: OPTIMIZERS.Lion(1e-3),
    "ftrl": lambda: OPTIMIZERS.Ftrl(0.1, l1_regularization_strength=1e-3),
    "schedule": scheduled,
    "clipvalue": lambda: OPTIMIZERS.Adam(1e-2, clipvalue=0.1),
    "clipnorm": lambda: OPTIMIZERS.Adam(1e-2, clipnorm=0.1),
    "global_clipnorm": lambda: OPTIMIZERS.Adam(1e-2, global_clipnorm=0.1),
    "ema": lambda: OPTIMIZERS.Adam(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "loss scale": lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam(1e-2), 8.0, dynamic_growth_steps=2),
}
CASES = [(name, grouped) for name in TABLE for grouped in (True, False)]


@table("optimizers of compiled updates", ("name", "grouped"), CASES,
       always=[("adamw", True), ("adam", False), ("rmsprop", True)])  # fmt: skip
def test_compiled_updates_match_one_device(name: str, grouped: bool):
    run = train(TABLE[name], sharded(**({} if grouped else {"analyzer": None})))
    assert_compiled(run, 1 if grouped else 4)
    assert parity.shard_axes(run.model) == {"batch"}, "premise: the variables are sharded"
    expected = train(TABLE[name])
    assert max(expected.losses) - min(expected.losses) > 1e-2, "premise: it learns"
    parity.assert_same(run, expected, rtol=2e-5, atol=2e-6)


@dataclasses.dataclass(frozen=True)
class Setting:
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: {"batch": 4})
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Callable[[], keras.optimizers.Optimizer] = TABLE["adamw"]
    updates: int = 1
    tolerance: float = 2e-5


ACCUMULATED = functools.partial(
    OPTIMIZERS.AdamW, 1e-2, weight_decay=0.1, use_ema=True, gradient_accumulation_steps=2, clipnorm=0.5
)
ALONE = {"analyzer": None}
SETTINGS = {
    "stage 0": Setting(strategy={"zero_stage": 0}),
    "stage 1": Setting(strategy={"zero_stage": 1}),
    "stage 2": Setting(strategy={"zero_stage": 2}),
    "stage 1, no groups": Setting(strategy={"zero_stage": 1, **ALONE}, updates=4),
    "stage 2, no groups": Setting(strategy={"zero_stage": 2, **ALONE}, updates=4),
    "replicas": Setting(mesh={"replica": 2, "batch": 2}),
    "replicas, no groups": Setting(mesh={"replica": 2, "batch": 2}, strategy=ALONE, updates=4),
    "a model axis": Setting(mesh={"batch": 2, "model": 2}, strategy={"layout_map": "auto"}, updates=2),
    "one device": Setting(mesh={"batch": 1}),
    # The updates of the sums of gradients, and of the variables.
    "accumulated": Setting(optimizer=ACCUMULATED, updates=2),
    "accumulated, no groups": Setting(optimizer=ACCUMULATED, strategy=ALONE, updates=8),
    "microbatches": Setting(strategy={"microbatches": 2}),
    "int8 slots": Setting(strategy={"slot_dtype": "int8"}, tolerance=5e-2),
    "bfloat16 slots": Setting(strategy={"slot_dtype": "bfloat16"}, tolerance=5e-2),
    "kept gathered": Setting(strategy={"reshard_after_forward": False}),
}


@table("settings of compiled updates", "name", SETTINGS, always=["accumulated", "stage 1"])
def test_compiled_updates_match_one_device_in_all_settings(name: str):
    setting = SETTINGS[name]
    run = train(setting.optimizer, tfshard.ShardedStrategy(tfshard.create_mesh(**setting.mesh), **setting.strategy))
    assert_compiled(run, setting.updates)
    expected = train(setting.optimizer)
    slots = setting.tolerance < 1e-3
    parity.assert_same(run, expected, rtol=setting.tolerance, atol=setting.tolerance, slots=slots)


def test_a_step_with_an_overflow_changes_nothing():
    wrong = np.where(np.arange(X.size).reshape(X.shape) == X.size - 3, np.inf, X).astype("float32")
    run = train(TABLE["loss scale"], sharded())
    assert_compiled(run, 1)
    before, optimizer = run.weights, run.model.optimizer
    scale = float(optimizer.dynamic_scale)
    run.model.train_on_batch(wrong, Y)
    assert float(optimizer.dynamic_scale) == scale / 2, "premise: the step is skipped"
    for path, value in run.weights.items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


NOT_ELEMENTWISE: dict[str, tuple[Callable[[], keras.optimizers.Optimizer], str]] = {
    "lamb": (lambda: OPTIMIZERS.Lamb(1e-2), "is not elementwise"),
    "adafactor": (lambda: OPTIMIZERS.Adafactor(1e-2), "is not elementwise"),
    "a norm": (lambda: Normed(0.1), "is not elementwise"),
    "other places": (lambda: Rolled(0.1), "(ReverseV2) is not elementwise"),
    "rows that differ": (lambda: Centered(0.1), "elements of another kind"),
}


@table("updates that are not elementwise", "name", NOT_ELEMENTWISE, always=["other places", "rows that differ"])
def test_what_is_not_elementwise_is_not_compiled_and_trains_as_on_one_device(name: str):
    optimizer, reason = NOT_ELEMENTWISE[name]
    run = train(optimizer, sharded(analyzer=None))
    # A bias has a flat buffer, which only elementwise optimizers update.
    assert any(reason in each for each in reasons(run)) and "" not in reasons(run), reasons(run)
    assert "is not compiled: operation" in str(run.model.distribute_strategy.report(run.model))
    parity.assert_same(run, train(optimizer), rtol=2e-5, atol=2e-6)


def test_an_update_sees_the_shape_of_the_full_variable():
    run = train(lambda: ByCount(0.1), sharded(analyzer=None), use_bias=False)
    assert_compiled(run, 2)
    expected = train(lambda: ByCount(0.1), use_bias=False)
    assert max(expected.losses) - min(expected.losses) > 1e-2, "premise: it learns"
    parity.assert_same(run, expected, rtol=2e-5, atol=2e-6)


def test_equal_updates_share_a_program_and_the_report_counts_them(monkeypatch):
    made: list[bytes] = []
    lowered = _private.stablehlo
    monkeypatch.setattr(_private, "stablehlo", lambda *given: made.append(lowered(*given)) or made[-1])
    compiled_updates._programs.clear()
    keras.backend.clear_session()
    inputs = x = keras.Input((16,))
    for _ in range(3):
        x = keras.layers.Dense(16)(x)
    model = tfshard.as_distributed(keras.Model(inputs, x))
    model.compile("adam", "mse", jit_compile=True, strategy=sharded(analyzer=None))
    model.train_on_batch(np.ones((8, 16), "float32"), np.ones((8, 16), "float32"))
    assert len(made) == 2, "one program for kernels, and one for biases"
    assert "XLA compiles 6 of 6 updates of optimizer 'adam'." in str(model.distribute_strategy.report(model))


def test_updates_are_compiled_only_with_jit_compile():
    run = train(TABLE["adam"], sharded(), steps=1, jit_compile=False)
    assert compiled_updates.compiled_updates(run.model.optimizer) == []


@pytest.mark.slow
def test_a_custom_loop_has_compiled_updates():
    strategy = sharded()
    run = train(TABLE["adam"], strategy, steps=0)
    model = run.model

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = [float(strategy.run(step, args=(tf.constant(X), tf.constant(Y)))) for _ in range(4)]
    assert_compiled(run, 1)
    np.testing.assert_allclose(losses, train(TABLE["adam"]).losses, rtol=2e-5)


@pytest.mark.slow
def test_several_steps_in_one_execution_have_compiled_updates():
    rows = np.concatenate([X] * 4), np.concatenate([Y] * 4)
    run = train(TABLE["adam"], sharded(), steps=0, steps_per_execution=2)
    run.model.fit(*rows, batch_size=8, shuffle=False, verbose=0)
    assert_compiled(run, 1)
    expected = train(TABLE["adam"])
    for path, value in run.weights.items():
        np.testing.assert_allclose(value, expected.weights[path], rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.slow
def test_verify_covers_steps_with_compiled_updates():
    run = train(TABLE["adam"], sharded())
    assert_compiled(run, 1)
    assert tfshard.verify(run.model, (X, Y)).ok
