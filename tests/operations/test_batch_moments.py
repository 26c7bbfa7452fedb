"""Batch normalization by the local moments of each device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.devices import transfer

RS = np.random.RandomState(0)


def image_batch(shape: tuple[int, ...]) -> np.ndarray:
    # Far from zero: a variance from the mean of squares would lose four of the seven digits.
    return RS.normal(70.0, 1.0, shape).astype("float32")


def normalized(x, scale, offset, *, axes, axis=-1, keepdims=False):
    mean, variance = keras.ops.moments(x, axes, keepdims=keepdims)
    return mean, variance, keras.ops.batch_normalization(x, mean, variance, axis, offset, scale)


CASES = {
    "images": ((8, 5, 6, 3), 3, dict(axes=[0, 1, 2])),
    "channels first": ((8, 3, 5, 6), 3, dict(axes=(0, 2, 3), axis=1)),
    "vectors": ((8, 4), 4, dict(axes=[0])),
    "volumes, one channel": ((4, 2, 3, 2, 1), 1, dict(axes=[0, 1, 2, 3])),
    "negative axes": ((8, 5, 3), 3, dict(axes=[0, -2])),
}


def step(name, *, second_order=False, of=(True, True)):
    _, channels, options = CASES[name]

    def gradients(x, scale, offset):
        given = scale if of[0] else None, offset if of[1] else None
        with tf.GradientTape() as tape:
            tape.watch([x, scale, offset])
            mean, variance, result = normalized(x, *given, **options)
            loss = tf.reduce_sum(
                tf.sin(result) * tf.reshape(tf.range(float(result.shape[1])), [-1] + [1] * (len(x.shape) - 2))
            )
        found = tape.gradient(loss, [x, scale, offset], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return mean, variance, result, *found

    def of_gradients(x, scale, offset):
        with tf.GradientTape() as tape:
            tape.watch([x, scale])
            found = gradients(x, scale, offset)
            penalty = tf.reduce_sum(found[3] ** 2) + tf.reduce_sum(found[4] ** 2)
        return tape.gradient(penalty, [x, scale])

    def call(x):
        scale, offset = tf.range(1.0, channels + 1), -tf.range(1.0, channels + 1)
        return tuple((of_gradients if second_order else gradients)(x, scale, offset))

    return tf.function(call)


def both(name, **options):
    x = image_batch(CASES[name][0])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    placed = transfer.host_to_mesh(x, ("batch",) + (None,) * (x.ndim - 1), strategy.mesh)
    found = strategy.run(step(name, **options), args=(placed,))
    return [transfer.to_host(each) for each in found], step(name, **options)(tf.constant(x)), x


@pytest.mark.sweep(3)
@pytest.mark.parametrize("of", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", CASES)
def test_normalization_and_its_gradients_are_those_of_one_device(name, of):
    ours, plain, x = both(name, of=of)
    assert np.abs(plain[3]).max() > 0.1, "premise: the gradient is not zero"
    for our, their in zip(ours, plain, strict=True):
        assert our.shape == their.shape
        np.testing.assert_allclose(our, their, rtol=2e-4, atol=2e-4 * np.abs(their).max() + 1e-5)
    dims = tuple(axis % x.ndim for axis in CASES[name][2]["axes"])
    np.testing.assert_allclose(ours[1], x.astype("float64").var(dims), rtol=3e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["images", "channels first"])
def test_second_derivatives_are_those_of_one_device(name):
    ours, plain, _ = both(name, second_order=True)
    for our, their in zip(ours, plain, strict=True):
        assert np.abs(their).max() > 1
        np.testing.assert_allclose(our, their, rtol=2e-3, atol=1e-3 * np.abs(their).max())


def test_a_layer_takes_a_gather_forward_and_an_all_reduce_backward():
    keras.utils.set_random_seed(0)
    counts = []
    for layers in (1, 3):
        norms = [keras.layers.BatchNormalization() for _ in range(layers)]
        model = keras.Sequential([keras.Input((6,)), *norms, keras.layers.Dense(4, use_bias=False)])
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0, analyzer=None)
        tfshard.as_distributed(model).compile("sgd", "mse", strategy=strategy)
        profile = tfshard.profile_step(model, (image_batch((8, 6)), np.zeros((8, 4), "float32")))
        counts.append((profile.count("all-gather"), profile.count("all-reduce")))
    assert counts[1] == (counts[0][0] + 2, counts[0][1] + 2)


def test_statistics_of_other_dims_and_of_meshes_that_shard_channels_are_tensorflows():
    x = image_batch((8, 6))
    for sizes, axes in (({"batch": 4}, [1]), ({"batch": 2, "model": 2}, [0])):
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**sizes), zero_stage=0)
        placed = transfer.host_to_mesh(x, ("batch", None), strategy.mesh)
        mean, variance = strategy.run(tf.function(lambda t, axes=axes: tf.nn.moments(t, axes)), args=(placed,))
        np.testing.assert_allclose(transfer.to_host(mean), x.mean(axes[0]), rtol=1e-5)
        np.testing.assert_allclose(transfer.to_host(variance), x.var(axes[0]), rtol=1e-3)
