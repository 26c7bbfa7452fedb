"""Measure what it costs to bring batches of images to the devices, in a loop over a sharded dataset.

    python tools/bench/input.py
    PYTHONPATH=../before python tools/bench/input.py

The ways: "on the mesh" trains on one batch that is on the mesh already; "taken" brings each batch to the mesh when the
step takes it; "ahead" lets a thread do so while the step before runs. The dataset repeats one batch in memory, so that
reading costs nothing. A round runs all ways in turn, a few steps each, in one process. A ratio compares the medians of
two ways in one round; the table has the median, the least and the most of all rounds. The model is one convolution, so
a step is short.
"""

import statistics
import time

import common
from absl import app, flags

_BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Images of a batch.")
_PIXELS = flags.DEFINE_integer("pixels", 224, "Rows and columns of an image.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 4, "Timed steps of a way in a round, after one that is not timed.")


def build():
    """Return a strategy and a function that trains on a batch."""
    import keras
    import tensorflow as tf

    import tfshard

    common.start()
    keras.utils.set_random_seed(0)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((_PIXELS.value, _PIXELS.value, 3)),
                keras.layers.Conv2D(8, 7, strides=4, activation="relu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)

    def step(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(labels, model(images), from_logits=True)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def train(batch):
        return strategy.run(step, args=(batch,))

    return strategy, train


def main(argv):
    del argv
    import numpy as np
    import tensorflow as tf

    strategy, train = build()
    images = np.random.RandomState(0).normal(size=(_BATCH_SIZE.value, _PIXELS.value, _PIXELS.value, 3))
    batch = images.astype("float32"), np.arange(_BATCH_SIZE.value) % 10
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    ahead = tf.distribute.InputOptions(experimental_per_replica_buffer_size=1)
    on_mesh = next(iter(strategy.experimental_distribute_dataset(dataset)))
    ways = {
        "on the mesh": lambda: iter(lambda: on_mesh, None),
        "taken": lambda: iter(strategy.experimental_distribute_dataset(dataset)),
        "ahead": lambda: iter(strategy.experimental_distribute_dataset(dataset, ahead)),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + _ROUNDS.value):  # The first round compiles.
        for way, batches in ways.items():
            iterator, ends = batches(), []
            for _ in range(2 + _STEPS.value):
                float(train(next(iterator)))
                ends.append(time.perf_counter())
            if number:
                times[way].append(statistics.median(common.step_times(ends[1:])))
            del iterator
    print(f"{common.origin()}, batches of {batch[0].nbytes / 1e6:.0f} MB, {_ROUNDS.value} rounds")
    print(f"{'way':>12} {'step, ms':>24} {'step / on the mesh':>24}")
    for way, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["on the mesh"], strict=True)]
        print(f"{way:>12} {common.spread([1e3 * each for each in seconds], '.0f'):>24} {common.spread(ratios):>24}")


if __name__ == "__main__":
    app.run(main)
