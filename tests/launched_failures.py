"""Scripts of launched runs that work first, and then end with an error; run by test_launched_failures.py."""

import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfshard
from tfshard import collectives
from tfshard.checkpoints import writer
from tfshard.devices import clients, startup

IMAGES = np.random.RandomState(0).rand(24, 8, 8, 3).astype("float32")


class Stopped(Exception):
    """A run was interrupted."""


def image_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = tfshard.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse", strategy=tfshard.ShardedStrategy())
    return model


def fit_augmented(directory=None, stop_after: int | None = None) -> list[float]:
    """Run the recipe of docs/checkpoints.md, and return the losses of its steps."""
    model = image_model()
    augment = keras.Sequential([keras.layers.RandomFlip("horizontal"), keras.layers.RandomRotation(0.2)])
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, np.arange(24.0))).shuffle(24, seed=0).batch(4)
    dataset = tfshard.random_map(
        dataset, lambda x, y: (augment(x, training=True), y), seed=1, num_parallel_calls=tf.data.AUTOTUNE
    )
    losses: list[float] = []

    def note(batch, logs):
        losses.append(float(logs["loss"]))
        if len(losses) == stop_after:
            raise Stopped

    callbacks: list = [keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    if directory is not None:
        callbacks.insert(0, tfshard.CheckpointCallback(directory, every_steps=2))
    try:
        model.fit(dataset.prefetch(2), epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    except Stopped:
        callbacks[0].manager.wait()
    return losses


def check_augmented_resume(directory: pathlib.Path) -> None:
    """Check that a run interrupted in its second epoch continues with the batches of an uninterrupted run."""
    whole = fit_augmented()
    assert len(set(whole)) == 12
    assert fit_augmented(directory, stop_after=9) == whole[:9]
    assert tfshard.CheckpointManager(directory).latest_step() == 8
    assert fit_augmented(directory) == whole[8:]


def model_first(directory: pathlib.Path) -> None:
    """Make a model before calling tfshard; then call functions on client 0 alone."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    started = tfshard.initialize(num_devices=4)
    print(
        f"STARTED {started.num_clients} clients, argv {sys.argv[1:]}, main {__name__}, path {sys.path[0]}", flush=True
    )
    try:
        tfshard.initialize(num_devices=6)
    except tfshard.errors.InitializationError as error:
        print(f"REFUSED {error}", flush=True)
    model = tfshard.as_distributed(model)
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy())
    assert model.layers[0].kernel.value.layout.storage[0] == "batch"
    losses = model.fit(np.ones((8, 4)), np.ones((8, 3)), epochs=2, verbose=0).history["loss"]
    print(f"TRAINED {losses}", flush=True)
    check_augmented_resume(directory / "augmented")
    print("RESUMED", flush=True)
    if collectives.rank() == 0:
        model.save(directory / "model.keras")
    model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)


def parts(directory: pathlib.Path) -> None:
    """Feed clients with one part of the batch different rows; then make the kernels of client 1 fail."""
    del directory
    layout_map = tfshard.LayoutMap({".*kernel": (None, "model"), ".*bias": ("model",)})
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(model=2, batch=2), layout_map, already_sharded=True)
    assert (strategy.input_shard.index, strategy.input_shard.count) == (0, 1)
    model = tfshard.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse", strategy=strategy)
    good, y = np.ones((8, 4), "float32"), np.zeros((8, 4), "float32")
    model.train_on_batch(good, y)
    weights = model.get_weights()
    try:
        model.train_on_batch(good + collectives.rank(), y)
    except tfshard.errors.StrategyError as error:
        print(f"DIFFERED {error}", flush=True)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])
    print(f"WENT ON {model.train_on_batch(good, y)}", flush=True)

    class Check(keras.layers.Layer):
        """Fails on NaN."""

        def call(self, x):
            return tf.debugging.check_numerics(x, "not a number in the batch")

    checked = tfshard.Sequential([keras.Input((4,)), Check(), keras.layers.Dense(3)])
    checked.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    bad = good.copy()
    bad[6] = np.nan  # The last rows belong to client 1.
    x = np.concatenate([good, bad, good])
    checked.fit(x, np.zeros((24, 3)), batch_size=8, shuffle=False, verbose=0)
    print("NOT NOTICED", flush=True)


def caught(directory: pathlib.Path) -> None:
    """Catch the error of a step that fails on all clients, and train again. As with NCCL, until the restart."""
    del directory
    if not int(os.environ["TFSHARD_RESTART"]):
        startup.uses_nccl = lambda device_type: True
    tfshard.initialize(num_devices=4)

    class Check(keras.layers.Layer):
        """Fails on NaN."""

        def call(self, x):
            return tf.debugging.check_numerics(x, "not a number in the batch")

    strategy, check = tfshard.ShardedStrategy(), Check()
    x, y = np.ones((8, 4), "float32"), np.zeros((8, 3), "float32")

    @tf.function
    def loop(batch):
        return strategy.run(check, args=(batch,))

    batches = tf.data.Dataset.from_tensor_slices(np.concatenate([x, x + np.nan, x])).batch(8)
    for batch in strategy.experimental_distribute_dataset(batches):
        try:
            loop(batch)
        except tf.errors.InvalidArgumentError:
            print(f"LOOP FAILED {os.environ['TFSHARD_RESTART']}", flush=True)
        except tfshard.errors.ClientError as error:
            print(f"LOOP REFUSED {error}", flush=True)
            clients.here()._last_failure = None

    model = tfshard.Sequential([keras.Input((4,)), Check(), keras.layers.Dense(3)])
    model.compile("sgd", "mse", strategy=strategy)
    model.train_on_batch(x, y)
    try:
        model.train_on_batch(x + np.nan, y)
    except tf.errors.InvalidArgumentError:
        print(f"FAILED {os.environ['TFSHARD_RESTART']}", flush=True)
    try:
        model.train_on_batch(x, y)
    except tfshard.errors.ClientError as error:
        print(f"REFUSED {error}", flush=True)
        model.get_weights()  # Is refused, too.
    print(f"WENT ON {os.environ['TFSHARD_RESTART']}", flush=True)


def last_save(directory: pathlib.Path) -> None:
    """End with an asynchronous save that fails on the last client."""
    tfshard.initialize(num_devices=4)
    model = tfshard.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy())
    manager = tfshard.CheckpointManager(directory)
    manager.save(model, 1)
    if clients.here().rank == clients.here().count - 1:

        def fail(writing, snapshot):
            raise OSError("no space left on the device")

        writer.Writing.run = fail  # type: ignore[method-assign]
    manager.save(model, 2, wait=False)
    print("END", flush=True)


def alone(directory: pathlib.Path) -> None:
    """Compile a model without a strategy."""
    del directory
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]).compile("sgd", "mse")


if __name__ == "__main__":
    globals()[sys.argv[1]](pathlib.Path(sys.argv[2]))
