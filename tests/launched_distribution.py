"""A client that trains by code of keras.distribution, with a dataset that Keras shards; test_keras_distribution_api.py
runs it."""

import json

import keras
import numpy as np
import tensorflow as tf

import tfshard  # Only imported: Keras starts the client.


def batches() -> tf.data.Dataset:
    rs = np.random.RandomState(0)
    x, y = rs.normal(size=(16, 6)).astype("float32"), rs.normal(size=(16, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


def train() -> list[float]:
    """Return the losses of some epochs, under the distribution of the caller."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh", name="up")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4, name="down")(hidden))
    model.compile("adam", "mse")
    return model.fit(batches(), epochs=3, shuffle=False, verbose=0).history["loss"]


def distribution() -> keras.distribution.ModelParallel:
    mesh = keras.distribution.DeviceMesh((2, 2), ["data", "model"], keras.distribution.list_devices())
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["up/kernel"] = ("data", "model")
    layout_map["down/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")


if __name__ == "__main__":
    keras.distribution.initialize()
    devices = keras.distribution.list_devices()
    chosen = distribution()
    keras.distribution.set_distribution(chosen)
    rows = [len(x) for x, _ in chosen.distribute_dataset(batches())]
    found = {
        "devices": devices, "rows": rows, "losses": train(), "shard": chosen.data_shard_id,
        "clients": [chosen.num_processes, tfshard.collectives.rank()],
    }  # fmt: skip
    try:
        keras.distribution.initialize(num_processes=3)
    except tfshard.errors.InitializationError as error:
        found["refused"] = str(error)
    print("FOUND " + json.dumps(found), flush=True)
