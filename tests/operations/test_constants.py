"""Eager tensors that layers keep, or that functional models hold, are constants of a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(8, 4, 8)).astype("float32"), RS.normal(size=(8, 4, 3)).astype("float32")


class Scaled(keras.layers.Layer):
    """Multiplies features by a tensor that was made outside of the step, and adds another."""

    def __init__(self, size: int):
        super().__init__()
        self.factor = tf.constant(RS.uniform(1, 2, size).astype("float32"))
        self.added = tf.constant(RS.normal(size=(1, 4, size)).astype("float32"))

    def call(self, x):
        return x * self.factor + self.added


def model_of(size: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    RS.seed(1)
    inputs = keras.Input((4, 8))
    x = keras.layers.Normalization(mean=RS.normal(size=8), variance=RS.uniform(1, 2, 8))(inputs)
    x = Scaled(size)(keras.layers.Dense(size, "tanh")(x))
    x = keras.ops.multiply(x, tf.constant(RS.uniform(1, 2, (1, 1, size)).astype("float32")))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


@pytest.mark.parametrize("size", [8, 200], ids=["small", "large"])
@pytest.mark.parametrize("mesh", [{"batch": 4}, {"batch": 2, "model": 2}], ids=str)
def test_steps_with_tensors_from_outside_match_one_device(size, mesh):
    plain, model = model_of(size), tfshard.as_distributed(model_of(size))
    plain.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    layout_map = "auto" if "model" in mesh else None
    model.compile(
        keras.optimizers.SGD(0.1), "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), layout_map)
    )
    for _ in range(3):
        np.testing.assert_allclose(model.train_on_batch(X, Y), plain.train_on_batch(X, Y), rtol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-4, atol=1e-5)
