"""Train, measure, predict and save in every way: launched, on a mesh of all clients; imported, on one device.

Both use the same code for the model. `Sharded` compiles the model with a strategy, and `Plain` as Keras does:
test_launched_fit.py compares the results with plain Keras.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterable

import keras
import numpy as np
import tensorflow as tf

import parity
import tfshard
from resuming import Batches
from tfshard.checkpoints import training_state
from tfshard.devices import clients
from tfshard.training import datasets

RANDOM = np.random.RandomState(0)
# Batches of 8, 8 and 5: the last batch is replicated.
X, Y = RANDOM.randn(21, 8).astype("float32"), RANDOM.randint(0, 3, 21)
ARRAYS = {"x": X, "y": Y, "batch_size": 8}
# Mesh and stage. The clients' devices are numbered consecutively, the last axis first.
MESHES = {
    "batch, stage 3": ({"batch": 4}, 3),
    "batch, stage 1": ({"batch": 4}, 1),
    "batch, stage 0": ({"batch": 4}, 0),
    "model within a client, stage 3": ({"batch": 2, "model": 2}, 3),
    "model across clients, stage 2": ({"model": 2, "batch": 2}, 2),
}
# All measurements are made on this mesh.
WHOLE = "batch, stage 3"


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Plain:
    """Training on one device, without a strategy."""

    strategy: tfshard.ShardedStrategy | None = None

    def compile(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, **options) -> keras.Model:
        model.compile(
            parity.dense_gradients(optimizer), loss(), metrics=["accuracy"],
            **{"jit_compile": False, **options},
        )  # fmt: skip
        return model


@dataclasses.dataclass(frozen=True)
class Sharded(Plain):
    """A mesh of all clients."""

    strategy: tfshard.ShardedStrategy

    @classmethod
    def on(cls, name: str) -> "Sharded":
        axes, stage = MESHES[name]
        layout_map = tfshard.LayoutMap()
        if "model" in axes:
            layout_map.column(".*/up")
            layout_map.row(".*/down")
        layout_map.replicated(".*", optional=True)
        return cls(tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map, zero_stage=stage))

    def compile(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, **options) -> keras.Model:
        model = tfshard.as_distributed(model)
        model.compile(optimizer, loss(), metrics=["accuracy"], strategy=self.strategy, **options)
        return model


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(12, "tanh", name="up"),
            # Without a bias, which the normalization would remove: its gradient would be rounding, and so would Adam's
            # step.
            keras.layers.Dense(8, use_bias=False, name="down"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3, name="head"),
        ],
        name="net",
    )


def compiled(where: Plain) -> keras.Model:
    return where.compile(build(), keras.optimizers.Adam(1e-2))


def kernels(model: keras.Model) -> list[str]:
    """Return how the kernels are stored, if they are on a mesh."""
    layouts = [getattr(weight.value, "layout", None) for weight in model.trainable_weights if len(weight.shape) == 2]
    return [str(layout.storage) for layout in layouts if layout is not None]


def values(model: keras.Model) -> list:
    return [weight.tolist() for weight in model.get_weights()]


def fitted(model: keras.Model, **how) -> dict:
    """Run `fit`, and return its history, the weights before and after, and how the kernels are stored."""
    start = values(model)
    history = model.fit(**{"epochs": 2, "verbose": 0, "shuffle": False, **how}).history
    return {"kernels": kernels(model), "start": start, "history": history, "weights": values(model)}


# --- on each mesh -------------------------------------------------------------------------------------


def train(where: Plain, whole: bool = True) -> dict:
    """Run a shuffled fit. Returns all measurements during and after it, or only the predictions for one batch."""
    model = compiled(where)
    if not whole:
        return {**fitted(model, **ARRAYS, shuffle=True), "predict": model.predict_on_batch(X[:5]).tolist()}
    found = fitted(model, **ARRAYS, shuffle=True, validation_data=(X, Y))
    found["evaluate"] = model.evaluate(X, Y, verbose=0, batch_size=8)
    found["predict"] = model.predict(X, verbose=0, batch_size=8).tolist()
    return found


# --- ways ---------------------------------------------------------------------------------------------


class Subclassed(keras.Model):
    """A model without a graph of layers."""

    def __init__(self):
        super().__init__()
        self.up, self.head = keras.layers.Dense(12, "relu"), keras.layers.Dense(3)

    def call(self, inputs):
        return self.head(self.up(inputs))


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])


def generator():
    batches = Batches(X, Y, 2)
    yield from (batches[index] for index in range(2))


def _way(build=dense, optimizer=None, fits=({},), **options) -> Callable[[Plain], dict]:
    """Return a function that trains a model by several `fit`s. Functions may make the arguments of a `fit`."""

    def run(where: Plain) -> dict:
        keras.utils.set_random_seed(1)
        model = where.compile(build(), optimizer() if optimizer else keras.optimizers.Adam(1e-2), **options)
        ways = [fitted(model, **{**ARRAYS, **(how() if callable(how) else how)}) for how in fits]
        return {**ways[-1], "start": ways[0]["start"], "history": [way["history"] for way in ways]}

    return run


def _only(**how) -> dict:
    """Return arguments of `fit` that replace the arrays."""
    return {"y": None, "batch_size": None, **how}


def callbacks() -> list:
    return [
        keras.callbacks.EarlyStopping("loss", patience=1),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
    ]


def tf_data(where: Plain) -> dict:
    """Train on a shuffled dataset, then on single batches outside `fit`."""
    keras.utils.set_random_seed(1)
    model = where.compile(dense(), keras.optimizers.Adam(1e-2))
    # Under any strategy, Keras looks into a dataset before it trains: reshuffling would change the epochs.
    shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(21, seed=3, reshuffle_each_iteration=False)
    found = fitted(model, x=shuffled.batch(8))
    found["on_batch"] = [model.train_on_batch(X[:5], Y[:5]), model.predict_on_batch(X[:5]).tolist()]
    return found


def loop(where: Plain) -> dict:
    """Run a custom training loop with the step compiled inside `run` and outside it."""
    strategy = where.strategy or tf.distribute.get_strategy()
    with strategy.scope():
        keras.utils.set_random_seed(2)
        model = dense()
        optimizer = keras.optimizers.Adam(1e-2)
    start = values(model)

    def step(x, y):
        with tf.GradientTape() as tape:
            per_sample = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            value = tf.reduce_mean(per_sample)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    function = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    losses = [float(function(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    traced = tf.function(step)
    losses += [float(strategy.run(traced, args=batch)) for batch in dataset.take(2)]
    return {"kernels": kernels(model), "start": start, "losses": losses, "weights": values(model)}


def _adam(**options) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.Adam(1e-2, **options)


CLASS_WEIGHT = {0: 1.0, 1: 2.0, 2: 0.5}
SAMPLE_WEIGHT = np.linspace(0, 1, len(Y))
WAYS = {
    "accumulated, from a generator and a PyDataset, weighted by class and by sample": _way(
        optimizer=_adam(gradient_accumulation_steps=2),
        fits=(
            lambda: _only(x=generator(), epochs=1, steps_per_epoch=2),
            _only(x=Batches(X, Y, 2), class_weight=CLASS_WEIGHT),
            {"sample_weight": SAMPLE_WEIGHT},
        ),
    ),
    "accumulated gradients": _way(optimizer=_adam(gradient_accumulation_steps=2)),
    "averaged weights": _way(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True, momentum=0.9)),
    "class and sample weights": _way(fits=({"class_weight": CLASS_WEIGHT}, {"sample_weight": SAMPLE_WEIGHT})),
    "generator, PyDataset": _way(
        fits=(lambda: _only(x=generator(), epochs=1, steps_per_epoch=2), _only(x=Batches(X, Y, 2)))
    ),
    "tf.data": tf_data,
    "subclassed": _way(Subclassed),
    "two steps in one": _way(steps_per_execution=2),
    "eager": _way(run_eagerly=True),
    "validation split, callbacks": _way(fits=(lambda: {"validation_split": 0.4, "callbacks": callbacks()},)),
    "loop": loop,
}


def rows_of_part(part: tfshard.devices.InputShard) -> tf.data.Dataset:
    """Return a part's rows of two global batches of 8."""
    rows = np.concatenate([np.split(np.arange(i, i + 8), part.count)[part.index] for i in range(0, 16, 8)])
    return tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(8 // part.count)


def part_of_each(where: Plain) -> dict:
    """Feed each client its part of the rows, and one device all rows."""
    part = where.strategy.input_shard if where.strategy else tfshard.devices.InputShard(index=0, count=1)
    model = compiled(where)
    found = fitted(model, x=rows_of_part(part))
    return {**found, "predict": model.predict(rows_of_part(part), verbose=0).tolist()}


# --- without a counterpart on one device --------------------------------------------------------------------


def files(where: Sharded, directory: pathlib.Path) -> str:
    """Check that plain Keras reads the jointly written files with the same values."""
    model = compiled(where)
    checkpoint = keras.callbacks.ModelCheckpoint(str(directory / "best.keras"), monitor="loss", save_best_only=True)
    model.fit(**ARRAYS, shuffle=False, verbose=0, callbacks=[checkpoint])
    model.save(directory / "model.keras")
    model.save_weights(directory / "model.weights.h5")
    expected = model.predict(X, verbose=0)
    for name in ("model.keras", "best.keras"):
        loaded = keras.models.load_model(directory / name)
        np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, atol=1e-5, err_msg=name)
    plain = build()
    plain.load_weights(directory / "model.weights.h5")
    assert_same_weights(plain, model)
    model.export(directory / "served", verbose=False)
    served = tf.saved_model.load(directory / "served")
    np.testing.assert_allclose(served.serve(X), expected, atol=1e-5)
    other = compiled(Sharded.on("batch, stage 1"))
    for name in ("export.keras", "export.weights.h5"):
        tfshard.export(model, directory / name)
        other.set_weights([0 * weight for weight in other.get_weights()])
        tfshard.import_weights(other, directory / name)
        assert_same_weights(other, model)
    where.strategy.check_consistency(model)
    return str(where.strategy.report(model).bytes_per_device())


def assert_same_weights(ours: keras.Model, theirs: keras.Model) -> None:
    for value, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


def checkpoints(where: Sharded, directory: pathlib.Path) -> list:
    """Save and restore, also at another stage. Returns the values that the last checkpoint must hold."""
    model = compiled(where)
    model.train_on_batch(X[:8], Y[:8])
    manager = tfshard.CheckpointManager(directory)
    manager.save(model, 1, wait=False)
    manager.save(model, 2)
    assert manager.steps() == [1, 2]
    other = compiled(Sharded.on("batch, stage 1"))
    theirs = training_state.collect(model, metrics=False)
    for step in (1, 2):
        manager.restore(other, step)
        for ours, expected in zip(training_state.collect(other, metrics=False), theirs, strict=True):
            assert ours.key == expected.key
            np.testing.assert_array_equal(ours.value.numpy(), expected.value.numpy(), err_msg=ours.key)
    return values(model)


def resumed_parts(where: Sharded, directory: pathlib.Path) -> list[float]:
    """Resume each client in its part of the data. Returns the losses after that."""
    for epochs in (1, 2):
        saving = tfshard.CheckpointCallback(directory, every_steps=1)
        how = {"epochs": epochs, "verbose": 0, "shuffle": False, "callbacks": [saving]}
        history = compiled(where).fit(rows_of_part(where.strategy.input_shard), **how).history
    assert saving.manager.open().position.clients == clients.here().count
    return history["loss"]


def masks(strategy: tfshard.ShardedStrategy) -> dict:
    """Return a random layer's output for ones in two steps, and the weights of a trained model with this layer."""
    keras.utils.set_random_seed(4)
    model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", strategy=strategy)
    dropout = model.layers[0]
    dropped = tf.function(lambda x: dropout(x, training=True))
    ones = np.ones((8, 8), "float32")
    steps = [np.array(strategy.run(dropped, args=(ones,))) for _ in range(2)]
    return {
        "rows": [step.tolist() for step in steps],
        "losses": [float(model.train_on_batch(ones, ones[:, :1])) for _ in range(3)],
    }


def main(options: dict) -> Iterable[tuple[str, object]]:
    """Yield a client's results by name, as far as the options ask for them."""
    started = tfshard.initialize(device_type="CPU")
    directory = pathlib.Path(options["directory"])
    first = Sharded.on("batch, stage 3")
    yield "clients", [started.num_clients, len(first.strategy.mesh.local_devices())]
    for name in options["meshes"]:
        yield name, train(Sharded.on(name), whole=name == WHOLE)
    for name in options.get("ways", ()):
        yield name, WAYS[name](first)
    if options.get("files"):
        yield "files", files(first, directory)
        yield "masks", masks(first.strategy)
        parts = Sharded(tfshard.ShardedStrategy(first.strategy.mesh, already_sharded=True))
        yield "parts", part_of_each(parts)
        yield "resumed", resumed_parts(parts, directory / "parts")
        datasets.PREFETCH["CPU"] = 1
        yield "copied ahead", [part_of_each(parts), resumed_parts(parts, directory / "ahead")]
        datasets.PREFETCH["CPU"] = 0
        yield "checkpoint", checkpoints(Sharded.on("model across clients, stage 2"), directory / "checkpoints")


if __name__ == "__main__":
    for name, found in main(json.loads(sys.argv[1])):
        print(f"FOUND {json.dumps([name, found], default=float)}", flush=True)
