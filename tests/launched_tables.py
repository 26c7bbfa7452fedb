"""Train an embedding table in clients.

A client is killed, or loses its host, and the run resumes from a checkpoint.
"""

import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np

import tfshard
from tfshard.devices import clients

RANDOM = np.random.RandomState(0)
STEPS = 6
X = RANDOM.randint(0, 33, (8 * STEPS, 3)).astype("int32")
Y = RANDOM.normal(size=(8 * STEPS, 1)).astype("float32")


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(33, 4, name="items")(inputs))
    return keras.Model(inputs, keras.layers.Dense(1, name="score")(x), name="net")


def compiled(strategy: tfshard.ShardedStrategy | None) -> keras.Model:
    model = build()
    optimizer = keras.optimizers.Adagrad(0.1)
    if strategy is None:
        model.compile(optimizer, "mse", jit_compile=False)
    else:
        tfshard.as_distributed(model).compile(optimizer, "mse", strategy=strategy)
    return model


class Killed(keras.callbacks.Callback):
    """End client 1 once, before a step in which the other client then waits for it."""

    def __init__(self, directory: pathlib.Path):
        super().__init__()
        self.mark = directory / "killed"

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 4 and clients.here().rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(keras.callbacks.Callback):
    """Make each step take a second, to leave time to pull a cable."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {batch + 1} done", flush=True)
        time.sleep(1)


def main(directory: pathlib.Path, what: str, devices: int) -> None:
    model = compiled(tfshard.ShardedStrategy(tfshard.create_mesh(batch=devices), tables=".*items/embeddings"))
    assert model.get_layer("items").embeddings.value.layout.kind is not None
    callbacks = [tfshard.CheckpointCallback(directory / "checkpoints", every_steps=1)]
    callbacks += {"killed": [Killed(directory)], "slow": [Slow()]}[what]
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    weights = {variable.path: variable.numpy().tolist() for variable in model.variables}
    print("FOUND", json.dumps(["weights", weights]), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
