"""A training script that can be stopped: run in full, or in two parts."""

import dataclasses
import zlib

import keras
import numpy as np
import tensorflow as tf

import tfshard
from tfshard.checkpoints import training_state

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(44, 13)).astype("float32"), RS.normal(size=(44, 3)).astype("float32")


class Batches(keras.utils.PyDataset):
    """The first `count` batches of 8 of arrays."""

    def __init__(self, x, y, count: int):
        super().__init__()
        self.arrays, self.count = (x, y), count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return tuple(array[8 * index : 8 * index + 8] for array in self.arrays)


class Stopped(Exception):
    """The script was interrupted."""


class Steps(keras.callbacks.Callback):
    """Record the loss after each step, and interrupt the script after some steps."""

    def __init__(self, stop_after: int | None):
        super().__init__()
        self.stop_after = stop_after
        self.losses: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        if len(self.losses) == self.stop_after:
            raise Stopped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a script: values by key, and losses. `history` is None if the script was interrupted."""

    model: keras.Model
    values: dict[str, np.ndarray]
    losses: list[float]
    history: dict | None


def values(model: keras.Model) -> dict[str, np.ndarray]:
    """Return every variable of a training run, by its key in a checkpoint."""
    found = training_state.collect(model)
    return {variable.key: np.array(variable.value.numpy()) for variable in found if variable.value is not None}


def drawn(model: keras.Model, number: int) -> dict[str, np.ndarray]:
    """Return the values number `number` of all variables of a training run by key, the same in any layout."""
    found = {}
    for each in training_state.collect(model):
        random = np.random.RandomState(zlib.crc32(f"{number} {each.key}".encode()))
        found[each.key] = np.asarray(1000 * random.uniform(size=each.shape)).astype(each.dtype)
    return found


def fill(model: keras.Model, number: int) -> None:
    """Set all variables of a training run to the values number `number`."""
    given = drawn(model, number)
    for each in training_state.collect(model):
        each.value.assign(given[each.key])


def assert_same_bits(ours: dict, expected: dict) -> None:
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert value.dtype == ours[key].dtype, key
        np.testing.assert_array_equal(ours[key], value, err_msg=key, strict=True)


def build() -> keras.Model:
    return tfshard.Sequential(
        [
            keras.Input((13,)),
            keras.layers.Dense(17, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )


def dataset(kind: str):
    """Return arguments of `fit` for data of a kind."""
    samples = tf.data.Dataset.from_tensor_slices((X, Y))
    if kind == "arrays":
        return {"x": X, "y": Y, "batch_size": 8}
    if kind == "tf.data":
        return {"x": samples.shuffle(30, seed=7).batch(8).prefetch(2), "shuffle": False}
    if kind == "tf.data in one order":
        # In every epoch, and for all iterators.
        return {"x": samples.shuffle(30, seed=7, reshuffle_each_iteration=False).batch(8).prefetch(2), "shuffle": False}
    if kind == "tf.data of unknown length":
        return {"x": samples.filter(lambda x, y: x[0] > -1e9).shuffle(30, seed=7).batch(8), "shuffle": False}
    assert kind == "tf.data with steps_per_epoch"
    return {"x": samples.shuffle(30, seed=7).repeat().batch(8), "steps_per_epoch": 4, "shuffle": False}


def script(
    kind: str, directory=None, *, stop_after=None, epochs: int = 2, every_steps: int = 2,
    strategy=lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), **options,
) -> Run:  # fmt: skip
    """Train from the start, or from the last checkpoint in the directory."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    model = build()
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"], strategy=strategy())
    steps = Steps(stop_after)
    callbacks: list = [steps]
    if directory is not None:
        saving = tfshard.CheckpointCallback(directory, every_steps=every_steps, **options)
        callbacks.insert(0, saving)
    history = None
    try:
        history = model.fit(**dataset(kind), epochs=epochs, verbose=0, callbacks=callbacks).history
    except Stopped:
        saving.manager.wait()
    return Run(model=model, values=values(model), losses=steps.losses, history=history)


def compiled(
    stage: int = 3, grouped: bool = True, seed: int = 0, optimizer=None, even: bool = False, **axes: int
) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model, layout_map = build(), tfshard.LayoutMap()
    if even:
        # The model axis must divide the dims that it shards.
        hidden = [keras.layers.Dense(16, name="wide"), keras.layers.Dropout(0.5)]
        model = tfshard.Sequential([keras.Input((13,)), *hidden, keras.layers.Dense(3, name="narrow")])
    if "model" in axes:
        layout_map.column(".*wide")
        layout_map.row(".*narrow")
    options = {} if grouped else {"analyzer": None}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**(axes or {"batch": 4})), layout_map, stage, **options)
    model.compile(optimizer or keras.optimizers.Adam(1e-2), "mse", strategy=strategy)
    return model


def filled(number: int = 1, **kwargs) -> keras.Model:
    """Return a model with slots and values as after training, without the time for it."""
    model = compiled(**kwargs)
    training_state.build_optimizer(model)
    fill(model, number)
    return model


def assert_unchanged(model: keras.Model, expected: dict) -> None:
    """Assert that the expected values are unchanged. Keras may have built the optimizer since."""
    found = values(model)
    assert_same_bits({key: found[key] for key in expected}, expected)


def without_metrics(found: dict) -> dict:
    return {key: value for key, value in found.items() if not key.startswith("metric/")}
