"""Equal models, layers and optimizers are told apart: a class of a user may define equality.

Keras compiles only models with a hash. Custom loops take models without one.
"""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard import _private
from tfshard.contrib.pipeline.models import pipeline_of

layers = keras.layers
X = np.random.RandomState(0).normal(size=(16, 8)).astype("float32")
Y = np.random.RandomState(1).normal(size=(16, 4)).astype("float32")


class Equal:
    """All objects of a class with this one are equal."""

    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return 0


@keras.saving.register_keras_serializable("test_identity")
class EqualModel(Equal, keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up, self.down = EqualDense(16, activation="tanh", name="block0_up"), EqualDense(4, name="block0_down")

    def call(self, x):
        return self.down(self.up(x))


@keras.saving.register_keras_serializable("test_identity")
class EqualFunctional(Equal, keras.Model):
    pass


@keras.saving.register_keras_serializable("test_identity")
class EqualDense(Equal, layers.Dense):
    pass


@keras.saving.register_keras_serializable("test_identity")
class EqualAdam(Equal, keras.optimizers.Adam):
    tfshard_elementwise = True


class Unhashable(EqualModel):
    __hash__ = None


def functional():
    inputs = keras.Input((8,))
    hidden = layers.Dense(16, activation="tanh", name="block0_up")(inputs)
    return EqualFunctional(inputs, layers.Dense(4, name="block0_down")(hidden))


class CustomStep(EqualModel):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0]) - data[1]))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


MODELS = {"subclassed": EqualModel, "functional": functional, "custom step": CustomStep}


def strategy(**axes):
    return tfshard.ShardedStrategy(tfshard.create_mesh(**(axes or {"batch": 4})))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("build", MODELS)
def test_equal_models_train_as_on_one_device(build, tmp_path):
    def run(chosen=None):
        keras.utils.set_random_seed(0)
        models = [MODELS[build](), MODELS[build]()]
        assert models[0] == models[1], "premise"
        told = []
        for number, model in enumerate(models):
            more = {} if chosen is None else {"strategy": chosen}
            model.compile(EqualAdam(0.01), "mse", jit_compile=False, **more)
            told += model.fit(X, Y + number, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
            if chosen is not None and number == 0:
                assert chosen.recompute(model) == ["block0"]
                assert chosen.report(model).variables and chosen.plan(model)
            told += model.fit(X, Y + number, batch_size=8, shuffle=False, verbose=0).history["loss"]
            told += [model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0), *model.get_weights()]
        return models, told

    models, told = run(strategy())
    for ours, theirs in zip(told, run()[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for number, model in enumerate(models):
        model.save_weights(tmp_path / f"{number}.weights.h5")
    other = MODELS[build]()
    other(X)
    other.load_weights(tmp_path / "1.weights.h5")
    np.testing.assert_allclose(other.predict(X, verbose=0), models[1].predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("form", ["keras", "saved_model", "copy", "checkpoint"])
def test_a_model_with_an_equal_one_is_saved(form, tmp_path):
    model, other = functional(), functional()
    for each in (other, model):
        each.compile(EqualAdam(0.01), "mse", strategy=strategy())
        each.fit(X, Y, verbose=0)
    expected = model.predict(X, verbose=0)
    assert model == other and not np.allclose(other.predict(X, verbose=0), expected), "premise"
    if form == "keras":
        model.save(tmp_path / "model.keras")
        found = keras.saving.load_model(tmp_path / "model.keras", compile=False)(X)
    elif form == "saved_model":
        tf.saved_model.save(model, tmp_path / "model")
        found = tf.saved_model.load(tmp_path / "model").signatures["serving_default"](tf.constant(X))
        (found,) = found.values()
    elif form == "copy":
        found = keras.models.clone_model(model)
        found.set_weights(model.get_weights())
        found = found.predict(X, verbose=0)
    else:
        manager = tfshard.CheckpointManager(tmp_path / "checkpoints")
        manager.save(model, 1)
        model.set_weights([np.zeros_like(each) for each in model.get_weights()])
        manager.restore(model)
        found = model.predict(X, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_model_with_an_equal_one_moves_to_another_strategy():
    old = strategy()
    model, other = functional(), functional()
    other.compile("sgd", "mse", strategy=old)
    model.compile(EqualAdam(0.01), "mse", strategy=old)
    model.fit(X, Y, verbose=0)
    loss = model.evaluate(X, Y, verbose=0)
    model.compile(EqualAdam(0.01), "mse", strategy=strategy(batch=2))
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(loss, rel=1e-5)
    assert other.variables[0].value.mesh == old.mesh


def test_a_model_without_a_hash_is_built_under_a_scope_and_runs_in_a_custom_loop():
    keras.utils.set_random_seed(0)
    plain, loop = Unhashable(), EqualAdam(0.1)
    plain(X)

    def step(model, optimizer, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    expected = [float(step(plain, loop, X)) for _ in range(3)]
    chosen = strategy()
    keras.utils.set_random_seed(0)
    with chosen.scope():
        model, optimizer = Unhashable(), EqualAdam(0.1)
        model(X)
    compiled = tf.function(lambda x: step(model, optimizer, x))
    np.testing.assert_allclose([float(chosen.run(compiled, args=(X,))) for _ in range(3)], expected, rtol=1e-5)
    assert chosen.report(model).variables
    assert chosen.recompute(model) == ["block0"]
    again = tf.function(lambda x: step(model, optimizer, x))
    assert float(chosen.run(again, args=(X,))) == pytest.approx(float(step(plain, loop, X)), rel=1e-5)
    with pytest.raises(TypeError, match="unhashable"):
        hash(model)


def test_equal_pipelined_models_train_as_on_one_device():
    def run(chosen=None):
        keras.utils.set_random_seed(0)
        models, told = [functional(), functional()], []
        for number, model in enumerate(models):
            if chosen is not None:
                tfshard.pipeline(model, stages=["block0_down"], microbatches=2 * number + 2)
            model.compile(EqualAdam(0.01), "mse", jit_compile=False, **({} if chosen is None else {"strategy": chosen}))
        for number, model in enumerate(models):
            told += model.fit(X, Y + number, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
            told += [model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0), *model.get_weights()]
        return models, told

    models, told = run(strategy(pipeline=2, batch=2))
    assert [pipeline_of(model).microbatches for model in models] == [2, 4]
    for ours, theirs in zip(told, run()[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_function_that_a_strategy_has_run_is_freed():
    chosen = strategy()

    def run():
        with chosen.scope():
            model = keras.Sequential([keras.Input((8,)), layers.Dense(4, activation="gelu")])
        step = tf.function(lambda x: model(x))
        chosen.run(step, args=(X,))
        assert step in chosen.functions, "premise"
        return weakref.ref(model), weakref.ref(step)

    model, step = run()
    gc.collect()
    assert model() is None and step() is None and len(chosen.functions) == 0


def test_weak_collections_tell_equal_keys_apart_and_forget_them():
    one, other = Unhashable(), Unhashable()
    values, members = _private.WeakIdentityDict(), _private.WeakIdentitySet()
    values[one] = 1
    assert one in values and other not in values and values.get(other) is None and values.get(other, 5) == 5
    assert values.setdefault(other, 2) == 2 and values.setdefault(one, 3) == 1
    assert [id(each) for each in values] == [id(one), id(other)]
    members.update([one, other, one])
    assert len(members) == 2
    values[one] = 4
    assert values[one] == 4 and len(values) == 2
    reference = weakref.ref(one)
    del one
    gc.collect()
    assert reference() is None and len(values) == len(members) == 1
    (left,) = values
    assert left is other and left in members
    values.clear()
    assert other not in values
