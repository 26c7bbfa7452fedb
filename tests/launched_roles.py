"""A client that asks for different roles than the others, then trains on axes of other names; run by test_axes.py."""

import json

import keras
import numpy as np

import tfshard

ROLES = {"outer": "data", "inner": "tensor"}


def train(*, devices: int | None = None) -> list[float]:
    """Return the losses of some steps."""
    tfshard.initialize(num_devices=devices, device_type="CPU")
    keras.utils.set_random_seed(0)
    layout_map = tfshard.LayoutMap({"up/kernel": (None, "inner"), "down/kernel": ("inner", None)})
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(outer=2, inner=2, roles=ROLES), layout_map)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh", name="up")(inputs)
    model = tfshard.as_distributed(keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden)))
    model.compile("adam", "mse", strategy=strategy)
    assert set(model.get_layer("up").kernel.value.layout.storage) == {"inner", "outer", None}  # In a group.
    x = np.random.RandomState(0).randn(8, 6).astype("float32")
    return [float(model.train_on_batch(x, x[:, :3])) for _ in range(3)]


if __name__ == "__main__":
    tfshard.initialize(device_type="CPU")
    refused = ""
    try:
        tfshard.create_mesh(outer=2, inner=2, roles=ROLES if tfshard.collectives.rank() else None)
    except tfshard.errors.MeshError as error:
        refused = str(error)
    print("FOUND " + json.dumps({"refused": refused, "losses": train()}), flush=True)
