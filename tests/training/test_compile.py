"""`compile(strategy=)` of models as they come, without `as_distributed`: the numbers of one device."""

import keras
import numpy as np
import pytest

import parity
import tfshard

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
    """As KerasHub's tasks are compiled: with an argument of its own, and those of Keras handed on."""

    def compile(self, optimizer="auto", *, temperature=1.0, **kwargs):
        self.temperature = temperature
        super().compile(optimizer=keras.optimizers.Adam(1e-2) if optimizer == "auto" else optimizer, **kwargs)


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
        history = model.fit(X, Y, batch_size=8, epochs=3, validation_split=0.5, verbose=0)
        losses[is_sharded] = history.history
        found[is_sharded] = [*model.get_weights(), model.predict(X, verbose=0), *model.evaluate(X, Y, verbose=0)]
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
    with pytest.raises(tfshard.errors.StrategyError, match="jit_compile"):
        model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), jit_compile=True)
    model.compile("adam", "mse")
    assert np.isfinite(model.train_on_batch(X, Y))
