"""Sparse batches, which become dense on their way to the mesh, and batches with None for an optional input.

Also how datasets are iterated.
"""

import keras
import numpy as np
import tensorflow as tf

import parity
import tfshard
from tfshard.training import datasets

RS = np.random.RandomState(0)
DENSE = np.where(RS.uniform(size=(16, 12)) > 0.7, RS.normal(size=(16, 12)), 0.0).astype("float32")
TARGETS = RS.normal(size=(16, 3)).astype("float32")


def test_a_model_fits_evaluates_and_predicts_sparse_batches_as_on_one_device():
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(DENSE), TARGETS)).batch(8)
    assert isinstance(next(iter(data))[0], tf.SparseTensor), "premise: batches are sparse"
    runs = []
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((12,), sparse=True)
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(8, activation="tanh")(inputs)))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        if strategy is None:
            model.compile(parity.dense_gradients(optimizer), "mse", jit_compile=False)
        else:
            tfshard.as_distributed(model).compile(optimizer, "mse", strategy=strategy)
        losses = model.fit(data, epochs=2, shuffle=False, verbose=0).history["loss"]
        runs.append((losses, model.evaluate(data, verbose=0), model.predict(data.map(lambda x, y: x), verbose=0)))
        if strategy is not None:
            assert tfshard.verify(model, next(iter(data))).ok
    for ours, theirs in zip(*reversed(runs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_generator_that_yields_none_for_an_optional_input_trains_as_on_one_device():
    class Shift(keras.layers.Layer):
        def call(self, x, shift=None):
            return x if shift is None else x + shift

    def data():
        for start in (0, 8):
            yield {"x": DENSE[start : start + 8], "shift": None}, TARGETS[start : start + 8]

    runs = []
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        x, shift = keras.Input((12,), name="x"), keras.Input((12,), name="shift", optional=True)
        model = keras.Model({"x": x, "shift": shift}, keras.layers.Dense(3)(Shift(name="add")(x, shift)))
        if strategy is None:
            model.compile("sgd", "mse", jit_compile=False)
        else:
            tfshard.as_distributed(model).compile("sgd", "mse", strategy=strategy)
        runs.append(model.fit(data(), steps_per_epoch=2, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-5)


def test_what_keras_makes_of_arrays_does_not_tune_itself_and_what_is_given_does(monkeypatch):
    """An iterator that tunes itself may sleep when it is deleted (benchmarks/LOG.md, "Ends of epochs")."""
    made = []
    create = datasets.ShardedDataset.__init__
    monkeypatch.setattr(
        datasets.ShardedDataset, "__init__", lambda self, host, *rest: (made.append(host), create(self, host, *rest))[1]
    )
    model = tfshard.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    x, y = np.ones((8, 6), "float32"), np.ones((8, 1), "float32")

    def tuned(call, *args, **options) -> list[bool | None]:
        made.clear()
        call(*args, verbose=0, **options)
        return [each.options().autotune.enabled for each in made]

    for shuffle in (True, False, "batch"):
        assert tuned(model.fit, x, y, batch_size=4, shuffle=shuffle, validation_data=(x, y)) == [False, False]
    assert tuned(model.evaluate, x, y, batch_size=4) == [False]
    assert tuned(model.predict, x, batch_size=4) == [False]
    given = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).prefetch(tf.data.AUTOTUNE)
    assert tuned(model.fit, given, shuffle=False, validation_data=given) == [None, None]
    wanted = tf.data.Options()
    wanted.autotune.enabled = True
    assert tuned(model.fit, given.with_options(wanted), shuffle=False) == [True]
