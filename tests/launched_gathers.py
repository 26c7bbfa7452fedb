"""Train with gathers in codes: launched, or imported in one process."""

import json

import keras
import numpy as np

import tfshard

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(16, 64)).astype("float32"), RANDOM.normal(size=(16, 8)).astype("float32")
MESHES = {"flat": {"batch": 4}, "hybrid": {"replica": 2, "batch": 2}}


def trained(name: str) -> dict:
    """Return the losses of a training, and sums of the weights."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(96, activation="tanh", name=f"hidden_{i}") for i in range(2)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(8, name="head")], name="net")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[name]), gather_dtype="int8")
    tfshard.as_distributed(model).compile("adam", "mse", strategy=strategy)
    losses = [float(model.train_on_batch(X, Y)) for _ in range(4)]
    codes = sorted(each.path for each in model.weights if each.value.storage.format.codes)
    return {"losses": losses, "codes": codes, "weights": [float(np.sum(each.numpy())) for each in model.weights]}


if __name__ == "__main__":
    for name in MESHES:
        print(f"FOUND {json.dumps([name, trained(name)])}", flush=True)
