"""`find_batch_size` finds the largest batch that trains, and leaves the model as it was."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.errors import DeviceMemoryError, StrategyError
from tfshard.training import batch_sizes

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(6, 12).astype("float32"), RANDOM.randn(6, 4).astype("float32")


class Limited(keras.Sequential):
    """A model that is out of memory, after a step, on batches of more than 13 rows."""

    def train_on_batch(self, x, *args, **kwargs):
        result = super().train_on_batch(x, *args, **kwargs)
        if len(x) > 13:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor with shape[9]")
        return result


def build() -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    return Limited([keras.Input((12,)), keras.layers.Dense(4096), keras.layers.Dropout(0.5), keras.layers.Dense(4)])


def state(model: keras.Model) -> list[bytes]:
    found = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(each.numpy()).tobytes() for each in found]


KINDS = {
    "plain": lambda: None,
    "int8 slots": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), slot_dtype="int8"),
    "microbatches": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=2), zero_stage=1, microbatches=2),
    "auto": lambda: "auto",
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("kind", "expected"), [("plain", 13), ("int8 slots", 12), ("microbatches", 12), ("auto", 12)])
def test_the_largest_batch_is_found_and_the_state_has_the_same_bits(kind, expected, capfd):
    model = build()
    model.compile("adam", "mse", metrics=["mae"], strategy=KINDS[kind]())
    model.train_on_batch(X[:4], Y[:4])
    model.evaluate(X[:4], Y[:4], verbose=0)  # Metrics have values.
    before, drawn = state(model), (random.getstate(), np.random.get_state()[1].tobytes())
    assert tfshard.find_batch_size(model, X, Y, max_batch_size=64) == expected
    assert state(model) == before
    assert drawn == (random.getstate(), np.random.get_state()[1].tobytes())
    lines = capfd.readouterr().err.splitlines()
    assert any("batch size 16: out of memory (OOM when allocating" in line for line in lines)
    assert any(f"the largest batch size that trains is {expected}" in line for line in lines)
    model.train_on_batch(X[:4], Y[:4])


def test_a_model_that_was_never_trained_trains_afterwards_as_one_that_was_not_tried():
    losses = []
    for tries in (True, False):
        model = build()
        model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
        if tries:
            assert tfshard.find_batch_size(model, X, Y, max_batch_size=4) == 4
        losses.append([float(model.train_on_batch(X[:4], Y[:4])) for _ in range(2)])
    assert losses[0] == losses[1]


def test_on_cpu_a_batch_that_takes_more_than_the_limit_is_too_large(capfd):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096, activation="relu")])
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = np.ones((1, 64), "float32"), np.ones((1, 4096), "float32")
    model.train_on_batch(x, y)
    held = batch_sizes._resident_bytes("VmRSS")
    # A row has some tensors of 16 KiB: 1,024 rows take about 60 MiB.
    found = tfshard.find_batch_size(model, x, y, max_batch_size=8192, steps=1, memory_limit=held + (150 << 20))
    assert 64 <= found < 8192
    text = capfd.readouterr().err
    assert "trains, with" in text and ("not tried" in text or "took" in text)


def test_bad_arguments_are_refused_with_the_choices():
    model = build()
    with pytest.raises(StrategyError, match="compile it first"):
        tfshard.find_batch_size(model, X, Y)
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    with pytest.raises(StrategyError, match="max_batch_size must be a positive integer"):
        tfshard.find_batch_size(model, X, Y, max_batch_size=0)
    with pytest.raises(StrategyError, match="a multiple of 4. Received: max_batch_size=3"):
        tfshard.find_batch_size(model, X, Y, max_batch_size=3)
    with pytest.raises(StrategyError, match="at least one sample"):
        tfshard.find_batch_size(model, X[:0], Y[:0])
    with pytest.raises(StrategyError, match="equally many samples. Received: arrays of .*2, "):
        tfshard.find_batch_size(model, X, Y[:2])
    for data in (tf.data.Dataset.from_tensor_slices((X, Y)).batch(4), [1.0, 2.0], np.float32(1)):
        with pytest.raises(StrategyError, match="repeats the rows of arrays.*such as one batch of a dataset"):
            tfshard.find_batch_size(model, data)
    with pytest.raises(StrategyError, match="memory_limit must be a positive number of bytes"):
        tfshard.find_batch_size(model, X, Y, memory_limit="much")


def test_a_model_whose_smallest_batch_does_not_train_is_an_error_with_the_reason():
    class Hungry(keras.Sequential):
        def train_on_batch(self, *args, **kwargs):
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    model = Hungry([keras.Input((12,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    with pytest.raises(DeviceMemoryError, match=r"smallest batch of 1 samples: A batch of 1 out of memory"):
        tfshard.find_batch_size(model, X, Y)
