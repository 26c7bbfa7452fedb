"""Train a tiny model in a run that a cluster started. Imported, on one device."""

import json
import sys

import keras
import numpy as np

import parity
import tfshard

STEPS = 2
RANDOM = np.random.RandomState(0)
BATCH = RANDOM.randn(4, 6).astype("float32"), RANDOM.randn(4, 2).astype("float32")


def build() -> keras.Sequential:
    """Return the model. Its initial values come from a seed, so they are equal everywhere."""
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])


def losses(model: keras.Model) -> list[float]:
    """Return the loss of each step."""
    return [float(model.train_on_batch(*BATCH)) for _ in range(STEPS)]


def plain() -> list[float]:
    """Return the losses of plain Keras."""
    model = build()
    model.compile(parity.dense_gradients(keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    return losses(model)


def train(mode: str = "") -> dict:
    """Return the client, the number of clients, the losses, and the layout of a kernel."""
    started = tfshard.initialize(num_devices=2, device_type="CPU")
    model = tfshard.as_distributed(build())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))
    model.compile(keras.optimizers.Adam(0.1), "mse", strategy=strategy)
    if mode == "raise" and started.client_id == 1:
        raise ValueError("the script's own error")
    if mode == "exit" and started.client_id == 1:
        import os

        os._exit(3)
    if mode == "hang" and started.client_id == 1:
        import time

        time.sleep(1000)
    found = losses(model)
    kernel = str(model.layers[0].kernel.layout.spec) if hasattr(model.layers[0].kernel, "layout") else ""
    return {"client": started.client_id, "clients": started.num_clients, "losses": found, "kernel": kernel}


if __name__ == "__main__":
    print(f"FOUND {json.dumps(train(*sys.argv[1:]))}", flush=True)
