"""Shuffled data keep the order of plain Keras: the losses of each epoch match for the same seed."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.training import datasets

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(32, 6)).astype("float32"), RS.normal(size=(32, 1)).astype("float32")
TOLERANCE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True` was passed, but will be ignored:UserWarning")


class Batches(keras.utils.PyDataset):
    """Each epoch has other values."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return X[rows] * (1 + self.epoch), Y[rows]

    def on_epoch_end(self):
        self.epoch += 1


def generator():
    for index in range(100):
        rows = slice(8 * (index % 4), 8 * (index % 4) + 8)
        yield X[rows] * (1 + index / 7), Y[rows]


def shuffled(**options) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(32, **options)


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "arrays by the batch, a part for validation": lambda: {
        "x": X, "y": Y, "batch_size": 8, "shuffle": "batch", "validation_split": 0.25
    },
    "tf.data": lambda: {"x": shuffled().batch(8)},
    "tf.data with a seed": lambda: {"x": shuffled(seed=3).batch(8)},
    "tf.data without an end": lambda: {"x": shuffled(seed=3).repeat().batch(8), "steps_per_epoch": 3},
    "PyDataset": lambda: {"x": Batches(), "shuffle": False},
    "PyDataset, shuffled": lambda: {"x": Batches(), "shuffle": True},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3},
}  # fmt: skip


def losses(kind: str, *, sharded: bool, rate: float = 0.05) -> list[float]:
    """Return the losses of three epochs of `fit`, and two more of a second `fit`. The first step builds the model."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    options = {"jit_compile": False}
    if sharded:
        model, options = tfshard.as_distributed(model), {}
        options["strategy"] = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"], **options)
    found = [model.fit(epochs=epochs, verbose=0, **DATA[kind]()).history for epochs in (3, 2)]
    assert all((type(v.value) is tfshard.storage.ShardedVariable) == sharded for v in model.trainable_variables)
    return [number for history in found for name in sorted(history) for number in history[name]]


@functools.cache
def plain(kind: str) -> list[float]:
    return losses(kind, sharded=False)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", DATA)
def test_fit_sees_the_batches_of_plain_keras(kind):
    np.testing.assert_allclose(losses(kind, sharded=True), plain(kind), rtol=TOLERANCE)


@pytest.mark.parametrize("kind", DATA)
def test_fit_sees_the_batches_of_plain_keras_if_they_are_copied_ahead(kind, monkeypatch):
    monkeypatch.setitem(datasets.PREFETCH, "CPU", 2)
    np.testing.assert_allclose(losses(kind, sharded=True), plain(kind), rtol=TOLERANCE)


def test_another_order_has_other_losses():
    """The test above would notice another order."""
    for kind, other in (("tf.data", "tf.data with a seed"), ("PyDataset", "PyDataset, shuffled")):
        assert np.max(np.abs(np.subtract(plain(kind), plain(other)))) > 100 * TOLERANCE * np.max(plain(kind))
