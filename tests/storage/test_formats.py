"""A storage format is one class, which slots and parameters share.

On GPUs, which lack int32 variables, int32 is stored as int64.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.storage import formats
from tfshard.storage.formats import FlatInBfloat16, StorageFormat, Unpacked, UnpackedInBfloat16


def in_bfloat16(layout, mesh):
    if layout.spec.dtype != "float32":
        return Unpacked(layout, mesh)
    return UnpackedInBfloat16(layout, mesh) if layout.flat is None else FlatInBfloat16(layout, layout.flat, mesh)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"zero_stage": 1}, {FlatInBfloat16}),
        ({"zero_stage": 3, "analyzer": None}, {UnpackedInBfloat16, FlatInBfloat16}),
    ],
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


class Counting(keras.layers.Layer):
    """Adds to its input how often each column was positive, and the number of rows it was called with."""

    def build(self, shape):
        self.seen = self.add_weight(shape=shape[1:], dtype="int32", initializer="zeros", trainable=False)
        self.rows = self.add_weight(shape=(), dtype="int32", initializer="ones", trainable=False)

    def call(self, x):
        self.seen.assign_add(keras.ops.sum(keras.ops.cast(x > 0, "int32"), 0))
        self.rows.assign(self.rows + keras.ops.shape(x)[0])
        return x + 0.01 * keras.ops.cast(self.seen, "float32") / keras.ops.cast(self.rows, "float32")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{"zero_stage": 1}, {}, {"analyzer": None}], ids=["stage1", "group", "alone"])
def test_integers_that_devices_have_no_variables_of_rest_in_longer_ones(options, monkeypatch, tmp_path):
    monkeypatch.setattr(formats, "_has_int32", lambda mesh: False)
    x, y = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32), np.zeros((8, 3), np.float32)

    def train(strategy):
        keras.utils.set_random_seed(0)
        # Adafactor has int32 slots, too.
        layers = [keras.layers.Dense(16, "relu"), Counting(name="counting"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((12,)), *layers])
        extra = {} if strategy is None else {"strategy": strategy}
        model.compile(keras.optimizers.Adafactor(0.1), "mse", jit_compile=False, **extra)
        losses = [float(model.train_on_batch(x, y)) for _ in range(4)]
        return model, losses, model.predict(x, verbose=0), model.get_layer("counting")

    expected, losses, predicted, counted = train(None)
    model, ours, outputs, counting = train(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options))
    assert counting.seen.value.buffer.dtype == counting.rows.value.buffer.dtype == tf.int64, "premise"
    assert counting.seen.value.dtype == tf.int32 and counting.rows.numpy().dtype == np.int32
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    np.testing.assert_allclose(outputs, predicted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(counting.seen.numpy(), counted.seen.numpy())
    # A function outside steps reads and writes, too.
    np.testing.assert_allclose(tf.function(model)(x), tf.function(expected)(x), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(counting.seen.numpy(), counted.seen.numpy())
    assert int(counting.rows.numpy()) == int(counted.rows.numpy()) > 0
    seen = counting.seen.numpy()
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    counting.seen.assign(np.zeros(16, np.int32))
    model.train_on_batch(x, y)
    manager.restore(model)
    np.testing.assert_array_equal(counting.seen.numpy(), seen)
    model.save_weights(tmp_path / "model.weights.h5")
    expected.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(counted.seen.numpy(), seen)
