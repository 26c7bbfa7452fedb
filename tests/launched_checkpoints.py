"""A client that saves checkpoints and files in a folder of all clients; run by test_launched_checkpoints.py."""

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfshard

SAVES = 6


def build() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])


def main(directory: pathlib.Path) -> None:
    """Save after each epoch, and report whether each save contains the values of the model."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))
    model = build()
    model.compile(keras.optimizers.Adam(0.01), "mse", strategy=strategy)
    kernel = model.layers[0].kernel.value
    assert kernel.layout.storage == ("batch", None), "premise: it is sharded"
    x = np.random.RandomState(0).randn(16, 6).astype("float32")
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), str(directory / "tf"), max_to_keep=2)
    same, paths = [], []
    for number in range(SAVES):
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        weights = model.get_weights()
        # A thread would save it later on each client, so it is saved at once.
        paths.append(manager.save(options=tf.train.CheckpointOptions(enable_async=number % 2 == 1)))
        plain = build()
        tf.train.Checkpoint(model=plain).restore(paths[-1]).expect_partial()
        keras.saving.save_model(model, directory / f"{number}.keras")
        loaded = keras.saving.load_model(directory / f"{number}.keras")
        for each in (plain, loaded):
            same.append(all(map(np.array_equal, each.get_weights(), weights)))
        tfshard.collectives.barrier()
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    manager.checkpoint.restore(manager.latest_checkpoint)
    same.append(all(map(np.array_equal, model.get_weights(), weights)))
    files = sorted(path.name for path in (directory / "tf").iterdir())
    for _ in range(2):
        saving = tfshard.CheckpointCallback(directory / "run", every_epochs=1)
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[saving])
    print("FOUND " + json.dumps(["saves", {"same": same, "paths": paths, "files": files}]), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
