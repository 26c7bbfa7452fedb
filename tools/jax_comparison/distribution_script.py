"""Train small models under distributions of `keras.distribution`: the same code on JAX and on TensorFlow with tfshard.

distributions.py starts this program, with KERAS_BACKEND set. It prints JSON. Only `_start` and `_axes` differ.
"""

import json
import os

from absl import app

DEVICES = 8
ROWS, BATCH, LENGTH, VOCABULARY, WIDTH = 32, 16, 8, 64, 32


def _start() -> None:
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        import tfshard

        tfshard.initialize(num_devices=DEVICES, device_type="CPU")


def _axes(variable) -> list:
    """Return the axis that shards each dim of a stored variable."""
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        layout = variable.value.layout
        # A group is a buffer, in which each variable has its compute layout.
        return list(layout.compute if layout.flat is not None else layout.storage)
    return list(variable.value.sharding.spec)


def mlp():
    import keras
    from keras import layers

    inputs = keras.Input((WIDTH,))
    x = layers.Dense(64, activation="gelu", name="up")(inputs)
    return keras.Model(inputs, layers.Dense(WIDTH, name="down")(x))


def transformer():
    import keras
    from keras import layers

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(inputs)
    attended = layers.MultiHeadAttention(4, WIDTH // 4, name="attention")(x, x, use_causal_mask=True)
    x = layers.LayerNormalization(name="norm")(x + attended)
    x = x + layers.Dense(WIDTH, name="down")(layers.Dense(4 * WIDTH, activation="gelu", name="up")(x))
    return keras.Model(inputs, layers.Dense(VOCABULARY, name="head")(x))


def convolutions():
    import keras
    from keras import layers

    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, padding="same", activation="relu", name="conv")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(8, name="head")(layers.Flatten()(x)))


RULES = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
    "tokens/embeddings": ("model", None),
    "attention/(query|key|value)/kernel": (None, "model", None),
    "attention/attention_output/kernel": ("model", None, None),
    "conv/kernel": (None, None, None, "model"),
    "conv/bias": ("model",),
}
# Variables are stored sharded over the data axis, too, as with FSDP.
OVER_DATA = {
    "up/kernel": ("data", "model"),
    "down/kernel": ("model", "data"),
    "head/kernel": ("data", "model"),
    "tokens/embeddings": ("model", "data"),
    "attention/(query|key|value)/kernel": ("data", "model", None),
}
OUTPUTS = {"up/output": ("data", None, "model"), "down/output": ("data", None, None)}

# The model, the shape of the mesh (None: DataParallel) and the rules of the layout map.
CASES = {
    "mlp, DataParallel": (mlp, None, {}),
    "mlp, data=2 model=4": (mlp, (2, 4), RULES),
    "mlp, data=2 model=4, stored over both": (mlp, (2, 4), OVER_DATA),
    "transformer, DataParallel": (transformer, None, {}),
    "transformer, data=2 model=4": (transformer, (2, 4), RULES),
    "transformer, data=4 model=2, stored over both": (transformer, (4, 2), OVER_DATA),
    "transformer, data=2 model=4, outputs of layers": (transformer, (2, 4), {**RULES, **OUTPUTS}),
    "convolutions, data=2 model=4": (convolutions, (2, 4), RULES),
}


def batches(build) -> tuple:
    import numpy as np

    rs = np.random.RandomState(1)
    if build is transformer:
        tokens = rs.randint(0, VOCABULARY, (ROWS, LENGTH))
        return tokens, np.roll(tokens, -1, 1)
    x = rs.normal(size=(ROWS, WIDTH) if build is mlp else (ROWS, 8, 8, 3)).astype("float32")
    return x, rs.normal(size=(ROWS, WIDTH if build is mlp else 8)).astype("float32")


def distribution_of(shape, rules):
    import keras

    if shape is None:
        return keras.distribution.DataParallel()
    mesh = keras.distribution.DeviceMesh(shape, ["data", "model"], keras.distribution.list_devices())
    layout_map = keras.distribution.LayoutMap(mesh)
    for pattern, axes in rules.items():
        layout_map[pattern] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def run(build, shape, rules) -> dict:
    import keras
    import numpy as np

    keras.backend.clear_session()
    keras.distribution.set_distribution(distribution_of(shape, rules))
    model = build()
    rs = np.random.RandomState(0)
    model.set_weights([rs.normal(size=w.shape).astype("float32") * 0.1 + ("norm" in w.path) for w in model.weights])
    loss = "mse" if build is not transformer else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    x, y = batches(build)
    losses = model.fit(x, y, batch_size=BATCH, epochs=5, shuffle=False, verbose=0).history["loss"]
    losses.append(float(model.evaluate(x, y, batch_size=BATCH, verbose=0)))
    weights = {w.path: float(np.abs(np.asarray(keras.ops.convert_to_numpy(w))).sum()) for w in model.weights}
    axes = {w.path: _axes(w) for w in model.weights}
    sharded = {path: found for path, found in axes.items() if any(found)}
    keras.distribution.set_distribution(None)
    return {"losses": losses, "weights": weights, "sharded": sharded}


def main(argv: list[str]) -> None:
    del argv
    _start()
    import keras

    found = {name: run(*case) for name, case in CASES.items()}
    print(json.dumps({"keras": keras.__version__, "backend": keras.backend.backend(), "cases": found}))


if __name__ == "__main__":
    app.run(main)
