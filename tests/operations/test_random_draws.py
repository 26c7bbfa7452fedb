"""`tf.random`'s generators in a step draw from their distribution, differently each time, seeded by Keras's seed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.devices import transfer

COUNT = 8192
DRAWS = {
    "normal": (lambda x: tf.random.normal(tf.shape(x), 1.0, 2.0), lambda v: (v.mean(), v.std()), (1.0, 2.0)),
    "uniform": (lambda x: tf.random.uniform(x.shape, -1.0, 3.0), lambda v: (v.mean(), v.min(), v.max()), (1, -1, 3)),
    "integers": (
        lambda x: tf.cast(tf.random.uniform(x.shape, 2, 6, tf.int32), tf.float32),
        lambda v: (v.mean(), v.min(), v.max()), (3.5, 2, 5),
    ),
    "truncated": (lambda x: tf.random.truncated_normal(x.shape), lambda v: (v.mean(), v.min(), v.max()), (0, -2, 2)),
    "seeded": (lambda x: tf.random.normal(x.shape, seed=7), lambda v: (v.mean(), v.std()), (0.0, 1.0)),
}  # fmt: skip
X = np.zeros((8, COUNT // 8), "float32")


def drawn(draw, sizes, steps=2):
    """Return the full numbers that each step drew."""
    keras.utils.set_random_seed(3)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**sizes))
    function = tf.function(lambda x: strategy.run(draw, args=(x,)))
    placed = transfer.host_to_mesh(X, ("batch", None), strategy.mesh)
    found = [function(placed) for _ in range(steps)]
    assert all(transfer.is_dtensor(each) for each in found), "premise"
    return [transfer.to_host(each) for each in found]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sizes", [{"batch": 4}, {"batch": 2, "model": 2}], ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_a_step_draws_numbers_of_the_distribution_others_each_time_and_the_same_by_seed(name, sizes):
    draw, told, expected = DRAWS[name]
    first, second = drawn(draw, sizes)
    np.testing.assert_allclose(told(first), expected, atol=0.1)
    assert np.mean(first == second) < 0.5
    rows = [row.tobytes() for row in first]
    assert len(set(rows)) == len(rows), "no device draws what another one does"
    np.testing.assert_array_equal(drawn(draw, sizes), [first, second])


def test_two_draws_of_a_step_are_not_the_same():
    both = drawn(lambda x: tf.random.normal(x.shape) - tf.random.normal(x.shape), {"batch": 4}, steps=1)[0]
    assert both.std() > 1.3


def test_a_model_that_draws_trains():
    class Sampling(keras.layers.Layer):
        def call(self, inputs):
            return inputs + 0.1 * tf.random.normal(shape=tf.shape(inputs))

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), Sampling(), keras.layers.Dense(4), keras.layers.Dense(1)])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), "auto")
    tfshard.as_distributed(model).compile(keras.optimizers.SGD(0.1), "mse", strategy=strategy)
    x = np.random.RandomState(0).normal(size=(64, 4)).astype("float32")
    losses = model.fit(x, x[:, :1], batch_size=16, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.3 * losses[0]
    strategy.check_consistency(model)
