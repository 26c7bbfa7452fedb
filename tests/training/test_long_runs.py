"""Rounds of training, compiling and saving leave no object behind. tools/bench/long_runs.py measures the memory."""

import gc
import itertools
from collections import Counter
from collections.abc import Callable

import keras
import numpy as np
import pytest

import tfshard
from tfshard import _private
from tfshard._private import functions

L = keras.layers

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(16, 8).astype("float32"), RANDOM.randn(16, 1).astype("float32")
ROUNDS = 3


def added(run: Callable[[], object]) -> dict[str, int]:
    """Return what `ROUNDS` calls add, in objects by type and functions of TensorFlow, if each call adds one or more."""

    def counts() -> Counter[str]:
        for _ in range(2):  # The first frees graphs, and the second what their functions held.
            gc.collect()
        found = Counter(f"{type(each).__module__}.{type(each).__name__}" for each in gc.get_objects())
        return found + Counter({"functions": _private.function_count()})

    for _ in range(ROUNDS):
        run()
    before = counts()
    for _ in range(ROUNDS):
        run()
    return {name: count for name, count in (counts() - before).items() if count >= ROUNDS}


def compiled(*layers: keras.layers.Layer) -> keras.Model:
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    model = keras.Sequential([keras.Input((8,)), *layers, L.Dense(1)])
    model.compile("adam", "mse", strategy=strategy)
    return model


def test_what_is_added_is_found():
    kept: list = []
    found = added(lambda: kept.append(keras.Variable(0.0)))
    assert found["keras.src.backend.Variable"] == ROUNDS


def test_epochs_with_validation_add_no_object():
    model = compiled(L.Dense(8, activation="relu"))
    assert added(lambda: model.fit(X, Y, batch_size=8, validation_data=(X, Y), verbose=0)) == {}


def test_batches_of_known_shapes_add_no_object():
    model = compiled(L.Dense(8, activation="relu"))
    sizes = (4, 8, 3, 5, 6, 7)
    assert added(lambda: [model.train_on_batch(X[:size], Y[:size]) for size in sizes]) == {}


def test_models_that_are_dropped_leave_no_object():
    assert added(lambda: compiled(L.Dense(8, activation="relu")).fit(X, Y, batch_size=8, verbose=0)) == {}


def test_the_loops_of_dropped_models_are_removed_from_tensorflow():
    bodies = []

    def run():
        compiled(L.Reshape((4, 2)), L.GRU(2)).train_on_batch(X, Y)
        bodies.append(sum(map(len, functions._added_again.values())))

    found = added(run)
    assert bodies[-1] > 0, "premise: the compiled step has loop bodies under new names"
    assert "functions" not in found


def test_the_seeds_of_dropped_models_share_a_program():
    def run():
        model = compiled(L.Dense(4), L.Dropout(0.5))
        assert model.layers[1].seed_generator.state.numpy().any(), "premise: each model has another seed"

    assert "functions" not in added(run)


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_add_no_object(tmp_path, wait):
    model = compiled(L.Dense(8, activation="relu"))
    manager, steps = tfshard.CheckpointManager(tmp_path, keep=2), itertools.count()

    def run():
        model.train_on_batch(X, Y)
        manager.save(model, next(steps), wait=wait)
        manager.wait()

    assert added(run) == {}


def test_restoring_adds_no_object(tmp_path):
    model = compiled(L.Dense(8, activation="relu"))
    manager = tfshard.CheckpointManager(tmp_path)
    model.train_on_batch(X, Y)
    manager.save(model, 0)

    def run():
        manager.restore(model)
        model.train_on_batch(X, Y)

    assert added(run) == {}
