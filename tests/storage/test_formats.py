"""A way of storing is one class: parameters in that of slots, bfloat16."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.storage.formats import FlatInBfloat16, StorageFormat, Whole, WholeInBfloat16


def in_bfloat16(layout, mesh):
    if layout.spec.dtype != "float32":
        return Whole(layout, mesh)
    return WholeInBfloat16(layout, mesh) if layout.flat is None else FlatInBfloat16(layout, layout.flat, mesh)


@pytest.mark.parametrize(
    ("options", "found"),
    [({"zero_stage": 1}, {FlatInBfloat16}), ({"zero_stage": 3, "analyzer": None}, {WholeInBfloat16, FlatInBfloat16})],
    ids=["group", "alone"],
)
def test_a_format_that_stores_bfloat16_is_one_class(options, found, monkeypatch, tmp_path):
    monkeypatch.setattr(StorageFormat, "of", staticmethod(in_bfloat16))
    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(
        keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    )
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options)
    model.compile(keras.optimizers.Adam(0.01), "mse", strategy=strategy)
    x, y = np.random.default_rng(0).normal(size=(2, 8, 12)).astype(np.float32), np.zeros((8, 3), np.float32)
    losses = [model.train_on_batch(x[0], y) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    stored = [v.value for v in model.trainable_variables]
    assert {type(v.storage.format) for v in stored} == found
    for variable in stored:
        assert variable.buffer.dtype == tf.bfloat16 and variable.dtype == tf.float32
        assert np.array_equal(variable.numpy(), tf.cast(tf.cast(variable.numpy(), tf.bfloat16), tf.float32))
    tf.debugging.assert_near(tf.function(model)(x[0]), model.predict(x[0], verbose=0), atol=1e-5)
    values = [v.numpy() for v in stored]
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    model.train_on_batch(x[1], y)
    manager.restore(model)
    for variable, value in zip(stored, values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
