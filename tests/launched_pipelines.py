"""Train pipelines in several clients over meshes of all kinds, and report the results."""

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard.contrib.pipeline.models import pipeline_of
from tfshard.devices import between_meshes, instances, mesh, messages, transfer

RANDOM = np.random.RandomState(0)
STEPS = 3
X = RANDOM.randint(0, 32, (16 * STEPS, 6)).astype("int32")
Y = RANDOM.randint(0, 32, (16 * STEPS, 6))

# Axes, stages and schedule, by name. With two clients of two devices: each pipeline rank is a client; each client has a
# device of each rank; each client has two ranks; a client has two stages of each rank.
MESHES = {
    "a client each": ({"pipeline": 2, "batch": 2}, 2, "1f1b"),
    "across clients": ({"batch": 2, "pipeline": 2}, 2, "gpipe"),
    "two in each client": ({"pipeline": 4}, 4, "1f1b"),
    "interleaved": ({"pipeline": 2, "model": 2}, 4, "interleaved"),
}


def build() -> keras.Model:
    """Return a model with a table that is also the last matrix: the table is on two pipeline ranks.

    Constants of functional models, such as the factors, are eager tensors, on each pipeline stage.
    """
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(32, 16, name="table")
    x = table(inputs)
    for number in range(5):
        x = keras.layers.Dense(16, activation="tanh", name=f"dense_{number}")(keras.ops.multiply(x, tf.constant(1.1)))
    x = keras.layers.LayerNormalization(name="norm")(x)
    return keras.Model(inputs, table(x, reverse=True), name="net")


def compiled(where: tuple[dict[str, int], int, str] | None) -> keras.Model:
    model = build()
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=0.5)
    loss, metrics = keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"]
    if where is None:
        model.compile(optimizer, loss, metrics=metrics, jit_compile=False)
        return model
    axes, stages, schedule = where
    model = tfshard.pipeline(model, stages, microbatches=4, schedule=schedule)
    layout_map = tfshard.LayoutMap()
    if "model" in axes:
        layout_map.column("dense_.*/kernel", optional=True)
    layout_map.replicated(".*", optional=True)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map)
    model.compile(optimizer, loss, metrics=metrics, strategy=strategy)
    return model


def found_of(model: keras.Model) -> dict:
    """Return the results of fit, evaluate and predict, and the weights."""
    history = model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    return {
        "fit": {name: values[-1] for name, values in history.history.items()},
        "evaluate": model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True),
        "predict": model.predict(X[:20], batch_size=16, verbose=0)[:, 0].tolist(),
        "weights": {variable.path: variable.numpy().tolist() for variable in model.variables},
    }


# The dtypes that clients can send each other. NaN bits arrive, too.
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "int8", "uint8", "uint16", "bool")


def sent_and_received() -> dict[str, bool]:
    """Return for each dtype whether a tensor keeps its bytes on the way to another mesh and back."""
    meshes = mesh.rank_meshes(tfshard.create_mesh(pipeline=2, batch=2))
    found = {}
    for dtype in DTYPES:
        # Each byte is different; some form NaNs.
        value = np.arange(48, dtype="uint8") % 2 if dtype == "bool" else 255 - np.arange(48, dtype="uint8")
        rows = value.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(2, -1)
        there = between_meshes.handed_over(transfer.host_to_mesh(rows, ("batch", None), meshes[0]), meshes[1])
        back = between_meshes.handed_over(there, meshes[0])
        messages.wait_until_sent()
        assert dtensor.fetch_layout(back).mesh == meshes[0]
        for name, tensor in (("there", there), ("back", back)):
            found[f"{dtype} {name}"] = transfer.to_host(tensor).tobytes() == rows.tobytes()
    scalar = between_meshes.handed_over(transfer.host_to_mesh(np.float32(7), (), meshes[0]), meshes[1])
    found["a scalar"] = float(transfer.to_host(scalar)) == 7
    messages.wait_until_sent()
    return found


def flat_loss() -> float:
    """Return the loss of a step on a mesh of all clients, after the clients compiled different functions."""
    model = tfshard.as_distributed(build())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), strategy=strategy)
    return float(model.train_on_batch(X[:16], Y[:16]))


def numbers_of_collectives() -> list[list[int]]:
    """Return each client's number for its next collective, when one client has compiled five more functions.

    Returns the numbers before and after `count_alike`.
    """
    if tfshard.collectives.rank() == 0:
        instances._compile_unused(5)
    before = messages.of_all(instances._compile_unused(1))
    instances.count_alike()
    return [before, messages.of_all(instances._compile_unused(1))]


def main(directory: pathlib.Path, names: list[str]) -> None:
    def tell(name: str, found: object) -> None:
        """Write to a file: TensorFlow's messages may break a long line of the output."""
        (directory / f"found {tfshard.collectives.rank()} {name}.json").write_text(json.dumps(found))

    tell("messages", sent_and_received())
    for name in names:
        model = compiled(MESHES[name])
        found = found_of(model)
        model.distribute_strategy.check_consistency(model)
        here = [
            sum(len(each.value.storage.local_tensors()) for each in rank.variables) / len(rank.variables)
            for rank in pipeline_of(model).ranks
        ]
        measured = tfshard.pipelining.measured(model)
        found |= {"devices": here, "bubble": measured.bubble, "in flight": measured.in_flight}
        found["stored"] = [report.bytes_per_device() for report in tfshard.pipelining.reports(model)]
        tfshard.CheckpointManager(directory / name).save(model, STEPS)
        tfshard.export(model, str(directory / f"{name}.keras"))
        tell(name, found)
    callbacks = [tfshard.callbacks.Telemetry(profile_every=2), keras.callbacks.LearningRateScheduler(lambda epoch: 0.0)]
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks).history
    told = {name: history[name][-1] for name in ("samples_per_second", "collective_seconds", "device_bytes")}
    tell("telemetry", told)
    tell("flat", flat_loss())
    tell("numbers", numbers_of_collectives())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
