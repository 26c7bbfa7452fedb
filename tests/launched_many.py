"""Train, gather and save with more than ten clients. TensorFlow does not order their tasks by number.

Launched: on meshes of all clients. Imported: by plain Keras on one device. With a number of devices as argument: in one
process with this many devices.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import keras
import numpy as np

import tfshard
from tfshard import collectives

# Samples of a batch: each data axis divides it.
BATCH, STEPS = 2 * 11 * 12 * 4, 3
RANDOM = np.random.RandomState(0)
X = RANDOM.randint(0, 64, (BATCH * STEPS, 3)).astype("int32")
Y = (X.sum(axis=1, keepdims=True) / 64).astype("float32")


@dataclasses.dataclass(frozen=True)
class Way:
    """A mesh, and how a model is trained on it.

    Attributes:
        axes: The axes of the mesh; None for plain Keras.
        options: The options of the strategy.
        parts: The number of pipeline stages; None without a pipeline.
    """

    axes: dict[str, int] | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: int | None = None


PLAIN = Way(None)
# By the number of clients with one device each. An ordinary run takes the first two ways with 11 clients.
WAYS = {
    11: {
        "flat": Way({"batch": 11}),
        "model": Way({"batch": 1, "model": 11}),
        "replicas": Way({"replica": 11, "batch": 1}),
        "table": Way({"batch": 11}, {"tables": "items/embeddings"}),
    },
    12: {
        "flat": Way({"batch": 12}),
        "stage 1": Way({"batch": 12}, {"zero_stage": 1}),
        "already sharded": Way({"batch": 12}, {"already_sharded": True}),
        "model inside": Way({"batch": 3, "model": 4}),
        "model outside": Way({"model": 4, "batch": 3}),
        "replicas": Way({"replica": 3, "batch": 4}),
        "replicas and model": Way({"replica": 2, "batch": 3, "model": 2}),
        "pipeline": Way({"pipeline": 2, "batch": 6}, parts=2),
        "pipeline inside": Way({"batch": 3, "model": 2, "pipeline": 2}, parts=2),
        "compressed": Way({"replica": 3, "batch": 4}, {"compression": "int8"}),
    },
    16: {
        "flat": Way({"batch": 16}),
        "model": Way({"batch": 4, "model": 4}),
        "replicas": Way({"replica": 4, "batch": 4}),
        "pipeline": Way({"pipeline": 4, "batch": 4}, parts=4),
    },
}
# Its gradients are rounded as in one process with as many devices.
COMPRESSED = "compressed"


def build() -> keras.Model:
    """Return a model with hidden dims that each model axis divides."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(64, 8, name="items")(inputs))
    for number in range(2):
        x = keras.layers.Dense(88, activation="tanh", name=f"up_{number}")(x)
        x = keras.layers.Dense(16, activation="tanh", name=f"down_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="head")(x), name="net")


def compiled(way: Way) -> keras.Model:
    model, optimizer = build(), keras.optimizers.SGD(0.05, momentum=0.5)
    if way.axes is None:
        model.compile(optimizer, "mse", jit_compile=False)
        return model
    layout_map = tfshard.LayoutMap()
    if way.axes.get("model", 1) > 1:
        layout_map.column("up_.*", optional=True)
        layout_map.row("down_.*", optional=True)
    layout_map.replicated(".*", optional=True)
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**way.axes), layout_map, **{"zero_stage": 3, "analyzer": None, **way.options}
    )
    if way.parts is not None:
        model = tfshard.pipeline(model, way.parts, microbatches=2)
    else:
        model = tfshard.as_distributed(model)
    model.compile(optimizer, "mse", strategy=strategy)
    return model


def fed(way: Way, model: keras.Model) -> dict[str, Any]:
    """Return the data arguments of `fit`: all rows, or this client's rows of each batch."""
    if not way.options.get("already_sharded"):
        return {"x": X, "y": Y, "batch_size": BATCH}
    part = model.distribute_strategy.input_shard
    size = BATCH // part.count
    rows = [np.arange(step * BATCH, (step + 1) * BATCH)[part.index * size :][:size] for step in range(STEPS)]
    taken = np.concatenate(rows)
    return {"x": X[taken], "y": Y[taken], "batch_size": size}


def train(way: Way, directory: pathlib.Path | None = None) -> dict[str, Any]:
    """Return the results of `fit` and `predict`, and the weights.

    With `directory`, saves a checkpoint, takes further steps, and restores it.
    """
    model = compiled(way)
    losses = model.fit(**fed(way, model), epochs=2, shuffle=False, verbose=0).history["loss"]
    variables = [*model.trainable_variables, *model.optimizer.variables]
    layouts = [getattr(variable.value, "layout", None) for variable in variables]
    found: dict[str, Any] = {
        "sharded": sum(any(layout.storage) for layout in layouts if layout is not None),
        "losses": losses,
        "weights": {weight.path: weight.numpy().tolist() for weight in model.trainable_variables},
    }
    if not way.options.get("already_sharded"):
        found["predict"] = model.predict(X[:BATCH], batch_size=BATCH, verbose=0)[:, 0].tolist()
    if directory is not None:
        manager = tfshard.CheckpointManager(directory)
        manager.save(model, 1)
        model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, shuffle=False, verbose=0)
        manager.restore(model)
        found["restored"] = {weight.path: weight.numpy().tolist() for weight in model.trainable_variables}
    return found


def gathered() -> dict[str, Any]:
    """Return the results of the clients' collectives."""
    rank, size = collectives.rank(), collectives.world_size()
    return {
        "all_gather": collectives.all_gather(np.array([rank])).tolist(),
        "reduce_scatter": collectives.reduce_scatter(np.arange(size) * 10).tolist(),
        "broadcast": collectives.broadcast(np.array([rank]), root=10).tolist(),
    }


def main(directory: pathlib.Path, names: list[str]) -> None:
    found: dict[str, Any] = {"gathered": gathered()}
    for name in names:
        way = WAYS[collectives.world_size()][name]
        found[name] = train(way, directory / "checkpoints" if name == "flat" else None)
    # Not to the output: TensorFlow may write into its lines.
    (directory / f"found {collectives.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        count = int(sys.argv[2])
        tfshard.initialize(num_devices=count, device_type="CPU")
        print("FOUND " + json.dumps(train(WAYS[count][sys.argv[3]])), flush=True)
    else:
        main(pathlib.Path(sys.argv[1]), sys.argv[2:])
