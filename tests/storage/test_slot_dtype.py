"""Optimizer slots that rest in bfloat16: half the bytes, near the numbers of float32."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(32, 12)).astype("float32"), RS.normal(size=(32, 3)).astype("float32")
ANALYZERS = {"groups": tfshard.ParameterAnalyzer(), "alone": None}


def train(slot_dtype, optimizer, stage=3, analyzer=None, mesh=None, steps=20):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(16, activation="tanh")]
    model = tfshard.as_distributed(keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(3)]))
    layout_map = tfshard.LayoutMap()
    layout_map.whole(".*")
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**(mesh or {"batch": 4})), layout_map, zero_stage=stage, analyzer=analyzer,
        slot_dtype=slot_dtype,
    )  # fmt: skip
    model.compile(optimizer(), "mse", strategy=strategy)
    losses = [float(model.train_on_batch(X, Y)) for _ in range(steps)]
    return model, strategy, losses


def moments(model):
    return [each for each in model.optimizer.variables if each.value.dtype == tf.float32 and each.shape.rank]


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "adamw_ema": lambda: keras.optimizers.AdamW(1e-2, use_ema=True),
    "momentum": lambda: keras.optimizers.SGD(1e-1, momentum=0.9),
    "accumulation": lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
    "clipped": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1),
    "lion": lambda: keras.optimizers.Lion(1e-3),
}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("grouping", ANALYZERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_stays_near_float32(name, grouping, stage):
    options = dict(stage=stage, analyzer=ANALYZERS[grouping])
    _, _, expected = train(None, OPTIMIZERS[name], **options)
    model, strategy, losses = train("bfloat16", OPTIMIZERS[name], **options)
    stored = {each.path: each.value.buffer.dtype for each in model.optimizer.variables if len(each.shape)}
    exact = {path for path in stored if path.endswith(("gradient_accumulator", "_average"))}
    assert {dtype for path, dtype in stored.items() if path not in exact} == {tf.bfloat16}, "premise"
    assert {dtype for path, dtype in stored.items() if path in exact} <= {tf.float32}
    assert {each.value.dtype for each in model.trainable_variables} == {tf.float32}
    assert losses[0] == expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    plan, report = strategy.plan(model), strategy.report(model)
    assert plan.bytes_per_device("slot") == pytest.approx(report.bytes_per_device("slot"), abs=64)


def test_slots_take_half_the_bytes_and_survive_a_checkpoint(tmp_path):
    held = {}
    for dtype in (None, "bfloat16"):
        model, strategy, _ = train(dtype, OPTIMIZERS["adam"])
        held[dtype] = strategy.report(model).bytes_per_device("slot")
    assert held["bfloat16"] == pytest.approx(held[None] / 2, abs=16)
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    before = [np.array(each) for each in model.optimizer.variables]
    after = [float(model.train_on_batch(X, Y)) for _ in range(2)]
    manager.restore(model)
    for each, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(np.array(each), value, err_msg=each.path)
    assert [float(model.train_on_batch(X, Y)) for _ in range(2)] == after


def test_another_dtype_is_refused():
    for wrong in ("int8", "float16", 3):
        with pytest.raises(tfshard.errors.StrategyError, match="slot_dtype must be None, 'float32' or 'bfloat16'"):
            tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), slot_dtype=wrong)
