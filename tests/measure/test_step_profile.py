"""`profile_step` accepts each form of batch that a dataset for `fit` can hold."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")
WEIGHTS = np.linspace(0.5, 2.0, 8).astype("float32")


def one(data):
    return data, None, None


def pair(data):
    x, y = data  # As in Keras's guide to custom trainers; three values are an error here.
    return x, y, None


def three(data):
    x, y, weights = data
    return x, y, weights


BATCHES = {
    "x": (one, X),
    "a dict": (lambda data: (data, data["y"], None), {"x": X, "y": Y}),
    "x and y": (pair, (X, Y)),
    "x, y and None": (pair, (X, Y, None)),
    "weighted": (three, (X, Y, WEIGHTS)),
    "several inputs": (lambda data: (data[0], data[1], None), ((X, X), Y)),
}


def compiled(base, parts, **strategy):
    class Model(base):
        def __init__(self):
            super().__init__()
            self.first, self.last = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)

        def call(self, x):
            if isinstance(x, dict):
                x = x["x"]
            return self.last(self.first(sum(x) if isinstance(x, tuple | list) else x))

        def train_step(self, data):
            x, y, weights = parts(data)
            with tf.GradientTape() as tape:
                predicted = self(x)
                errors = tf.reduce_mean((predicted - (0.0 if y is None else y)) ** 2, axis=-1)
                loss = tf.reduce_mean(errors * (1.0 if weights is None else weights))
            variables = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, [each.value for each in variables]), variables)
            return {"loss": loss}

    keras.utils.set_random_seed(3)
    model = Model()
    model(X)
    model.compile(keras.optimizers.Adam(0.01), **strategy)
    return model


@pytest.mark.sweep(1)
@pytest.mark.parametrize("form", BATCHES)
def test_a_train_step_of_ones_own_is_given_what_fit_gives_it(form):
    parts, batch = BATCHES[form]
    plain = compiled(keras.Model, parts, jit_compile=False)
    sharded = compiled(tfshard.Model, parts, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    plain.fit(
        tf.data.Dataset.from_tensors(batch if form != "x, y and None" else batch[:2]).repeat(4),
        shuffle=False,
        verbose=0,
    )
    profile = tfshard.profile_step(sharded, batch)
    assert profile.count("all-gather") > 0, "premise: the weights are sharded"
    assert sharded.optimizer.iterations.numpy() == 4
    for ours, theirs in zip(sharded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_a_batch_of_four_is_refused():
    model = compiled(tfshard.Model, pair, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    before = model.get_weights()
    with pytest.raises(tfshard.errors.StrategyError, match="a tuple of 4"):
        tfshard.profile_step(model, (X, Y, WEIGHTS, None))
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
