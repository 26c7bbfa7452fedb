"""Files, clones, copies and exports of a strategy's model are plain Keras, and the model continues to train sharded."""

import contextlib
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from surface import LOSS, X, Y, assert_same_history, build, compiled, strategy


def test_keras_file_and_weights_go_both_ways(tmp_path):
    model = compiled(True)
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert type(plain) is keras.Sequential
    np.testing.assert_allclose(plain.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-5)
    other = build()
    other.load_weights(tmp_path / "model.weights.h5")
    for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # Reversed: a model from a plain file, including its optimizer, continues to train sharded.
    resumed = tfshard.as_distributed(keras.models.load_model(tmp_path / "model.keras"))
    resumed.compile(resumed.optimizer, LOSS, metrics=["accuracy"], strategy=strategy())
    plain.compile(plain.optimizer, LOSS, metrics=["accuracy"], jit_compile=False)
    fits = [m.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0) for m in (resumed, plain, model)]
    assert_same_history(fits[0], fits[1])
    assert_same_history(fits[2], fits[1])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["sequential", "functional, tensor-parallel", "subclassed"])
def test_an_export_serves_what_predict_gives(kind, tmp_path):
    class Custom(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

    if kind == "functional, tensor-parallel":
        inputs = keras.Input(X.shape[1:])
        hidden = keras.layers.Dense(8, "relu", name="up")(inputs)
        model = tfshard.Model(inputs, keras.layers.Dense(3, name="down")(hidden))
        chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), "auto")
    else:
        model = tfshard.as_distributed(build() if kind == "sequential" else Custom())
        chosen = strategy()
    model.compile("adam", LOSS, strategy=chosen)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert {"batch", *chosen.mesh_shape} == parity.shard_axes(model)
    expected = model.predict(X, verbose=0)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(tmp_path / "served")
    np.testing.assert_allclose(served.serve(X), expected, atol=1e-5)
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["Sequential", "functional"])
def test_a_clone_is_sharded_under_the_strategy_and_trains_as_one_of_a_plain_model(kind):
    def clone(chosen):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        model = build() if kind == "Sequential" else keras.Model(inputs, build()(inputs))
        tfshard.as_distributed(model).compile(
            keras.optimizers.Adam(1e-2), LOSS, metrics=["accuracy"], strategy=chosen, jit_compile=False
        )
        model.train_on_batch(X[:8], Y[:8])
        keras.utils.set_random_seed(1)
        copy = keras.models.clone_model(model)
        assert copy.optimizer is not model.optimizer
        assert not np.allclose(copy.get_weights()[0], model.get_weights()[0])
        return copy, copy.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)

    (model, result), (reference, expected) = clone(strategy()), clone(None)
    assert parity.shard_axes(model) == {"batch"}
    assert all(isinstance(v.value, tfshard.storage.ShardedVariable) for v in model.weights + model.optimizer.variables)
    assert_same_history(result, expected)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_a_clone_in_another_scope_is_sharded_under_that_strategy_and_both_train_on():
    def both(chosen, other):
        keras.utils.set_random_seed(0)
        model = build()
        options = {} if chosen is None else {"strategy": chosen}
        model.compile(keras.optimizers.Adam(1e-2), LOSS, **options)
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        with contextlib.nullcontext() if other is None else other.scope():
            copy = keras.models.clone_model(model)
            copy.set_weights(model.get_weights())
        if other is not None:
            assert {v.value.mesh for v in copy.weights} == {other.mesh} != {v.value.mesh for v in model.weights}
        return copy, [m.fit(X, Y, batch_size=8, shuffle=False, verbose=0) for m in (copy, model, copy)]

    wide = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map="auto")
    (model, results), (reference, expected) = both(strategy(), wide), both(None, None)
    for result, plain in zip(results, expected, strict=True):
        assert_same_history(result, plain)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_what_is_pickled_and_saved_for_serving_is_a_plain_model(tmp_path):
    model = compiled(True)
    model.fit(X, Y, batch_size=8, verbose=0)
    expected = model.predict(X, verbose=0)
    plain = pickle.loads(pickle.dumps(model))
    assert type(plain) is keras.Sequential
    assert int(plain.optimizer.iterations) == int(model.optimizer.iterations) == 4
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, atol=1e-6)
    tf.saved_model.save(model, tmp_path / "saved")
    (served,) = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"](tf.constant(X)).values()
    np.testing.assert_allclose(served, expected, atol=1e-6)
    # The model continues to train sharded.
    assert parity.shard_axes(model) == {"batch"}
    fits = [m.fit(X, Y, batch_size=8, shuffle=False, verbose=0) for m in (model, plain)]
    assert_same_history(*fits)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, input_signature=[tf.TensorSpec((None, 6))])
    with pytest.raises(
        tfshard.errors.StrategyError, match=r"is sharded, but a SavedModel holds full.*model.export\(path\)"
    ):
        archive.write_out(tmp_path / "archive", verbose=False)
    # TensorFlow's converter hides the error.
    with pytest.warns(UserWarning, match="is sharded.*TFLiteConverter.from_saved_model"), pytest.raises(TypeError):
        tf.lite.TFLiteConverter.from_keras_model(model).convert()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("by", ["save", "write", "manager"])
def test_an_asynchronous_checkpoint_has_the_values_of_its_step(by, tmp_path):
    model = compiled(True)
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    saved = model.get_weights()
    checkpoint, options = tf.train.Checkpoint(model=model), tf.train.CheckpointOptions(enable_async=True)
    save = {
        "save": lambda: checkpoint.save(str(tmp_path / "ckpt"), options),
        "write": lambda: checkpoint.write(str(tmp_path / "ckpt"), options=options),
        "manager": lambda: tf.train.CheckpointManager(checkpoint, str(tmp_path), 2).save(options=options),
    }[by]
    with pytest.warns(UserWarning, match="enable_async=True has no effect"):
        path = save()
    assert tf.train.load_checkpoint(path)  # The checkpoint is complete.
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    checkpoint.sync()
    plain = build()
    tf.train.Checkpoint(model=plain).read(path).expect_partial()
    for weight, value in zip(plain.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(weight, value)
    checkpoint.read(path)
    for weight, value in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(weight, value)
