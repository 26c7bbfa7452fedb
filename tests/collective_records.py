"""Run steps in every way, for tests that read TensorFlow's log of collectives.

With `TF_CPP_VMODULE=collective_ops=1`, TensorFlow logs a line for each collective that runs, and another line if it
keeps a record of the collective for the step. `BEGIN` and `END` in the same stream mark the lines of each way. Each
way warms up before `BEGIN`: DTensor compiles a step up to twice, and a compiled step runs once before its collectives
are renamed.
"""

import os
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfshard

RS = np.random.RandomState(0)
# Batches of 8, 8 and 5: the last batch is replicated.
X, Y = RS.normal(size=(21, 8)).astype("float32"), RS.randint(0, 4, 21).astype("int32")
IDS = RS.randint(0, 33, (21, 3)).astype("int32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ARRAYS = {"x": X, "y": Y, "batch_size": 8, "shuffle": False, "verbose": 0}


def mlp() -> keras.Model:
    hidden = [keras.layers.Dense(16, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(4)])


def embedding() -> keras.Model:
    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(33, 4, name="items")(inputs)
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Flatten()(x)))


def recurrent() -> keras.Model:
    inputs = keras.Input((8,))
    x = keras.layers.GRU(16, return_sequences=True)(keras.layers.Reshape((4, 2))(inputs))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.LSTM(16)(x)))


def said(word: str, way: str) -> None:
    os.write(2, f"\n{word} {way}\n".encode())


def twice(way: str, run: Callable[[], object]) -> None:
    """Call `run` twice to warm up, and once more between `BEGIN` and `END`."""
    run()
    run()
    said("BEGIN", way)
    run()
    said("END", way)


def compiled(build: Callable[[], keras.Model], mesh: dict[str, int], **options) -> keras.Model:
    keras.utils.set_random_seed(0)
    of_model = {key: options.pop(key) for key in ("run_eagerly", "steps_per_execution") if key in options}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), analyzer=None, **options)
    model = tfshard.as_distributed(build())
    model.compile("adam", LOSS, metrics=["accuracy"], strategy=strategy, **of_model)
    return model


# Model, mesh and options of a strategy or of `compile`.
COMPILED = {
    "stage 3": (mlp, {"batch": 4}, {}),
    "stage 0": (mlp, {"batch": 4}, {"zero_stage": 0}),
    "a model axis": (mlp, {"batch": 2, "model": 2}, {"layout_map": "auto"}),
    "replicas": (mlp, {"replica": 2, "batch": 2}, {}),
    "microbatches": (mlp, {"batch": 4}, {"microbatches": 2}),
    "several steps an execution": (mlp, {"batch": 4}, {"steps_per_execution": 2}),
    "eager steps": (mlp, {"batch": 4}, {"run_eagerly": True}),
    "loops": (recurrent, {"batch": 2, "model": 2}, {"layout_map": "auto", "microbatches": 2}),
    "tables": (embedding, {"batch": 4}, {"tables": tfshard.EmbeddingTables(".*items/embeddings")}),
}


def with_keras(way: str) -> None:
    build, mesh, options = COMPILED[way]
    model = compiled(build, mesh, **options)
    arrays = ARRAYS | {"x": IDS} if build is embedding else ARRAYS
    twice(f"{way}: fit", lambda: model.fit(**arrays))
    twice(f"{way}: evaluate", lambda: model.evaluate(arrays["x"], Y, batch_size=8, verbose=0))
    twice(f"{way}: predict", lambda: model.predict(arrays["x"], batch_size=8, verbose=0))


def pipeline(mesh: dict[str, int]) -> None:
    keras.utils.set_random_seed(0)
    model = tfshard.pipeline(mlp(), 2, microbatches=2)
    model.compile("adam", LOSS, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(**mesh)))
    rows = {"x": X[:16], "y": Y[:16], "batch_size": 8, "shuffle": False, "verbose": 0}
    twice("pipeline: fit", lambda: model.fit(**rows))
    twice("pipeline: evaluate", lambda: model.evaluate(X[:16], Y[:16], batch_size=8, verbose=0))


def custom(way: str) -> None:
    """Run a custom loop: `strategy.run` in eager code with a plain or compiled step, or inside a function."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), analyzer=None)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.Adam()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    given = strategy.experimental_distribute_dataset(dataset)
    if way == "run of a function":
        compiled_step = tf.function(step)
        run = lambda batch: strategy.run(compiled_step, args=batch)  # noqa: E731
    elif way == "eager run":
        run = lambda batch: strategy.run(step, args=batch)  # noqa: E731
    else:
        in_function = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
        run = lambda batch: in_function(*batch)  # noqa: E731
    if way == "run in a function, of one batch":
        batch = next(iter(given))
        twice(way, lambda: [run(batch) for _ in range(3)])
    else:
        twice(way, lambda: [run(batch) for batch in given])


CUSTOM = ("run of a function", "eager run", "run in a function", "run in a function, of one batch")


def collectives() -> None:
    twice("all_reduce", lambda: tfshard.all_reduce(X))
    twice("all_gather", lambda: tfshard.all_gather(X))
    twice("broadcast", lambda: tfshard.broadcast(X))


if __name__ == "__main__":
    chosen = sys.argv[1:]
    is_launched = "TFSHARD_CLIENT_ID" in os.environ
    tfshard.initialize(**({} if is_launched else {"num_devices": 4, "device_type": "CPU"}))
    for way in COMPILED:
        if way in chosen:
            with_keras(way)
    if "pipeline" in chosen:
        pipeline({"pipeline": 2, "batch": 2})
    for way in CUSTOM:
        if way in chosen:
            custom(way)
    if "collectives" in chosen:
        collectives()
