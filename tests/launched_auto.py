"""Clients with different memory choose one strategy; run by test_launched_auto.py."""

import json

import keras
import numpy as np

import tfshard
from tfshard.planning import known_machines


def train(*, devices: int | None = None, memory: str) -> dict:
    """Return the losses of some steps, and the strategy."""
    tfshard.initialize(num_devices=devices, device_type="CPU", memory_per_device=memory)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(192, activation="gelu", name=f"up{number}") for number in range(4)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    model.compile("adam", "mse", strategy="auto")
    x = np.random.RandomState(0).randn(8, 6).astype("float32")
    losses = [float(model.train_on_batch(x, x[:, :3])) for _ in range(3)]
    return {"losses": losses, "strategy": repr(model.distribute_strategy)}


if __name__ == "__main__":
    known_machines.here = lambda: None  # Choose in the order of `advise`.
    tfshard.initialize(device_type="CPU")
    print("FOUND " + json.dumps(["auto", train(memory=("1GiB", "2.7MiB")[tfshard.collectives.rank()])]), flush=True)
