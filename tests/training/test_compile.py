"""`compile(strategy=)` works on models without `as_distributed`, and matches one device."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard.devices import clients
from tfshard.training import models

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(16, 6)).astype("float32"), RS.normal(size=(16, 3)).astype("float32")


def sequential():
    return keras.Sequential([keras.layers.Dense(40, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(3)])


def functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(40, "tanh")(inputs)))


class Plain(keras.Model):
    def __init__(self):
        super().__init__()
        self.up, self.down = keras.layers.Dense(40, "relu"), keras.layers.Dense(3)

    def call(self, inputs):
        return self.down(self.up(inputs))


class OwnCompile(Plain):
    """Compiled like KerasHub's tasks: takes an additional argument, and passes Keras's arguments on."""

    def compile(self, optimizer="auto", *, temperature=1.0, **kwargs):
        self.temperature = temperature
        super().compile(optimizer=keras.optimizers.Adam(1e-2) if optimizer == "auto" else optimizer, **kwargs)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", [sequential, functional, Plain, OwnCompile])
def test_a_model_that_was_only_compiled_trains_as_on_one_device(make):
    losses, found = {}, {}
    for is_sharded in (False, True):
        keras.utils.set_random_seed(1)
        model = make()
        options = {"loss": "mse", "metrics": ["mae"]} | ({"temperature": 2.0} if make is OwnCompile else {})
        if is_sharded:
            options["strategy"] = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None)
        model.compile("auto" if make is OwnCompile else keras.optimizers.Adam(1e-2), **options)
        assert getattr(model, "temperature", 2.0) == 2.0
        history = model.fit(X, Y, batch_size=8, epochs=2, validation_split=0.5, verbose=0)
        losses[is_sharded] = history.history
        # Batches of 8, as in the fit: evaluate then compiles nothing.
        measured = model.predict(X, batch_size=8, verbose=0), *model.evaluate(X, Y, batch_size=8, verbose=0)
        found[is_sharded] = [*model.get_weights(), *measured]
    assert isinstance(model, make) if isinstance(make, type) else True
    assert parity.sharded_share(model, "batch") > 0.5, "premise"
    for name, values in losses[False].items():
        assert losses[True][name] == pytest.approx(values, rel=1e-5), name
    for one, other in zip(found[False], found[True], strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


def test_plain_keras_is_as_it_was(tmp_path):
    """Saved, loaded and compiled again, without a strategy."""
    model = functional()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    assert type(model).__mro__[0].__module__.startswith("keras.")
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    assert again.compiled and again.optimizer.iterations == model.optimizer.iterations
    assert np.array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))


def test_what_is_no_strategy_is_refused():
    model = functional()
    with pytest.raises(tfshard.errors.StrategyError, match="must be a tfshard.ShardedStrategy"):
        model.compile("adam", "mse", strategy="ddp")
    model.compile("adam", "mse")
    assert np.isfinite(model.train_on_batch(X, Y))


# --- Classes that override `compile` ---------------------------------------------------------------------


class GanCompile(keras.Model):
    """A GAN's pattern: `compile` takes only the arguments it knows."""

    def __init__(self):
        super().__init__()
        self.net = keras.layers.Dense(3)

    def call(self, x):
        return self.net(x)

    def compile(self, net_optimizer, factor=1.0):
        super().compile(loss="mse")
        self.net_optimizer, self.factor = net_optimizer, factor

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.factor * tf.reduce_mean(tf.square(self(x) - y))
        self.net_optimizer.apply(tape.gradient(loss, self.net.trainable_variables), self.net.trainable_variables)
        return {"loss": loss}


class Derived(GanCompile):
    """Inherits `compile`."""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("cls", [GanCompile, Derived])
def test_a_compile_that_knows_no_strategy_takes_one(cls):
    x, y = np.random.RandomState(0).randn(16, 4).astype("float32"), np.ones((16, 3), "float32")

    def train(**strategy):
        keras.utils.set_random_seed(0)
        model = cls()
        model.compile(keras.optimizers.SGD(0.1), factor=0.5, **strategy)
        return model, model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]

    _, plain = train()
    model, ours = train(strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    assert isinstance(model, cls) and model.factor == 0.5
    assert isinstance(model.net.kernel.value, tf.Variable) and model.net.kernel.value.layout.storage[0] == "batch"
    np.testing.assert_allclose(ours, plain, rtol=1e-5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        model.compile(keras.optimizers.SGD(0.1), nonsense=1)


def test_a_model_of_mirrored_strategy_is_told_how_to_bring_its_weights():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(tfshard.errors.StrategyError, match=r"under another strategy, MirroredStrategy,.*set_weights"):
        model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))


def test_only_client_0_prints_progress_unless_asked():
    fit = keras.Model.fit
    assert models._quiet(fit, (), {}) == {}, "premise: this is client 0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "here", lambda: types.SimpleNamespace(rank=1))
        assert models._quiet(fit, (), {}) == {"verbose": 0}
        assert models._quiet(fit, (), {"verbose": 1}) == {"verbose": 1}
        assert models._quiet(fit, (None, None, 8, 1, 2), {}) == {}
        assert models._quiet(keras.Model.predict, (None,), {"verbose": "auto"}) == {"verbose": 0}
