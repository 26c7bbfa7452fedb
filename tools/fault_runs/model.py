"""Build the small model of `client.py` and its batches, which are the same in every run."""

import keras
import tensorflow as tf

# If compression is on, gradients of at least this many bytes are compressed: all except the last bias's gradient.
COMPRESSED_BYTES = 100


def batches(steps: int, wrong_from: int | None = None) -> tf.data.Dataset:
    """Return the batches of a run. From step `wrong_from` on, the batches are different."""
    last = steps if wrong_from is None else wrong_from

    def batch(step, number):
        seed = tf.where(step < last, number, number + 1_000_000)
        x = tf.random.stateless_normal((24, 16), tf.stack([seed, 0]))
        return x, tf.reduce_sum(x, axis=1, keepdims=True)

    # The order is fixed for all iterations: under a strategy, Keras iterates a dataset once before training.
    shuffled = tf.data.Dataset.range(steps).shuffle(64, seed=0, reshuffle_each_iteration=False)
    return shuffled.enumerate().map(batch)


def build(up: type[keras.layers.Dense] = keras.layers.Dense) -> keras.Sequential:
    """Return the model."""
    return keras.Sequential([keras.Input((16,)), up(32, "tanh", name="up"), keras.layers.Dense(1)], name="sequential")
