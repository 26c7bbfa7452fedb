"""Train a mixture of experts in clients that send each other tokens."""

import json
import sys

import keras
import numpy as np

import tfshard

RANDOM = np.random.RandomState(0)
STEPS = 3
X = RANDOM.normal(size=(8 * STEPS, 6, 8)).astype("float32")
Y = RANDOM.normal(size=(8 * STEPS, 6, 1)).astype("float32")


def compiled(strategy: tfshard.ShardedStrategy | None) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6, 8))
    x = keras.layers.Dense(8)(inputs)
    x = x + tfshard.layers.MixtureOfExperts(4, 16, name="mixture", capacity_factor=1.0, load_balancing=0.1)(x)
    model = keras.Model(inputs, keras.layers.Dense(1, name="score")(x), name="net")
    if strategy is None:
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    else:
        tfshard.as_distributed(model).compile(keras.optimizers.Adam(0.01), "mse", strategy=strategy)
    return model


def main(devices: int) -> None:
    model = compiled(tfshard.ShardedStrategy(tfshard.create_mesh(batch=devices), experts=True))
    assert model.get_layer("mixture").expert_up_kernel.value.layout.storage == ("batch", None, None)
    losses = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    weights = {variable.path: variable.numpy().tolist() for variable in model.variables}
    print("FOUND", json.dumps(["weights", weights]), flush=True)
    print("FOUND", json.dumps(["losses", losses]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
