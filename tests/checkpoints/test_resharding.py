"""Checkpoints restore bit for bit on any mesh, at any stage and in any groups."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sweeps
import tfshard
from resuming import X, Y, assert_same_bits, build, compiled, drawn, fill, filled, values
from tfshard.checkpoints import files, manifest

LAYOUTS = [
    {"batch": 1, "stage": 0},
    {"batch": 2, "stage": 1},
    {"batch": 4, "stage": 3},
    {"batch": 4, "stage": 3, "grouped": False},
    {"batch": 4, "stage": 0},
    {"batch": 4, "stage": 1, "grouped": False},
    {"batch": 2, "stage": 3},
    {"replica": 2, "batch": 2, "stage": 3},
    {"replica": 2, "batch": 2, "stage": 1, "grouped": False},
]
MESHES = [
    {"replica": 2, "batch": 2},
    {"batch": 1},
    {"batch": 2},
    {"batch": 4},
    {"batch": 2, "model": 2},
    {"batch": 1, "model": 4},
]
EVEN_LAYOUTS = [
    {"even": True, "stage": stage, "grouped": grouped, **axes}
    for axes in MESHES
    for stage in (0, 1, 3)
    for grouped in (True, False)
]


def name_of(layout: dict) -> str:
    axes = ",".join(f"{axis}={layout[axis]}" for axis in ("replica", "batch", "model") if axis in layout)
    how = ",whole dims" * layout.get("even", False) + ",no groups" * (not layout.get("grouped", True))
    return f"{axes},stage {layout['stage']}{how}"


BY_NAME = {name_of(layout): layout for layout in [*LAYOUTS, *EVEN_LAYOUTS]}


def cycle(layouts: list[dict], step: int) -> list[tuple[str, str]]:
    """Pair each layout with another: each is saved once and restored once."""
    return [(name_of(each), name_of(layouts[(i + step) % len(layouts)])) for i, each in enumerate(layouts)]


PAIRS = [
    (name_of(source), name_of(target))
    for layouts in (LAYOUTS, EVEN_LAYOUTS)
    for target, source in itertools.product(layouts, layouts)
]


@functools.cache
def of_layout(name: str) -> keras.Model:
    return filled(**BY_NAME[name])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns the checkpoints of a model in a layout."""

    @functools.cache
    def save(name: str) -> tfshard.CheckpointManager:
        manager = tfshard.CheckpointManager(tmp_path_factory.mktemp("layout"))
        fill(of_layout(name), 1)
        manager.save(of_layout(name), 6)
        return manager

    return save


@pytest.mark.sweep(2)
@sweeps.table(
    "checkpoints from layout to layout", ("source", "target"), PAIRS,
    always=[*cycle(LAYOUTS, 1), *cycle(EVEN_LAYOUTS, 7)], sample=6,
)  # fmt: skip
def test_a_layout_restores_bit_for_bit_in_another_slots_included(source, target, saved):
    manager, model = saved(source), of_layout(target)
    for name in (source, target):
        axes = {axis for v in of_layout(name).optimizer.variables for axis in getattr(v.value, "layout", v).storage}
        assert BY_NAME[name]["batch"] == 1 or ("batch" in axes) == (BY_NAME[name]["stage"] > 0)
        assert ("model" in axes) == ("model" in BY_NAME[name])
    fill(model, 2)
    assert manager.restore(model).step == 6
    expected = drawn(model, 1)
    assert any(key.endswith("velocity") for key in expected)
    assert_same_bits(values(model), expected)


def test_the_next_steps_on_any_mesh_have_the_losses_and_weights_of_one_device(tmp_path):
    """Plain Keras trains, saves and continues. A model restored on a mesh continues with the same numbers."""

    def make(stage=0, **axes):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(17, activation="tanh"), keras.layers.Dense(3)]
        model = (tfshard.Sequential if axes else keras.Sequential)([keras.Input((13,)), *layers])
        options = {}
        if axes:
            options["strategy"] = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), {".*": ()}, zero_stage=stage)
        model.compile(keras.optimizers.Adam(1e-2), "mse", **options)
        return model

    def go_on(model):
        losses = [float(model.train_on_batch(X[:8], Y[:8])) for _ in range(3)]
        return losses, values(model)

    plain = make()
    plain.train_on_batch(X[8:16], Y[8:16])
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(plain, 1)
    before = values(plain)
    losses, after = go_on(plain)
    assert losses[0] > losses[1] + 1e-2 > losses[2] + 2e-2
    weights = [key for key in after if key.endswith(("kernel", "bias", "momentum", "velocity"))]
    assert len(weights) == 12
    for stage, axes in ((1, {"batch": 2}), (3, {"batch": 4}), (3, {"batch": 2, "model": 2})):
        model = make(stage, **axes)
        manager.restore(model)
        assert any("batch" in variable.value.layout.storage for variable in model.optimizer.variables[2:])
        ours, found = go_on(model)
        np.testing.assert_allclose(ours, losses, rtol=2e-5)
        for key in weights:
            np.testing.assert_allclose(found[key], after[key], rtol=1e-4, atol=2e-6, err_msg=key)
            assert np.abs(after[key] - before[key]).max() > 1e-4, key


def test_pieces_are_written_once_and_tensorflow_reads_whole_variables(tmp_path):
    model = filled(stage=3)
    path = tfshard.CheckpointManager(tmp_path).save(model, 6)
    found = manifest.decode((path / files.MANIFEST).read_bytes(), "here")
    assert any(len(variable.shards) > 1 for variable in found.variables.values())
    held = sum(value.nbytes for value in values(model).values())
    assert sum(file.bytes for name, file in found.files.items() if "data-" in name) == held
    reader = tf.train.load_checkpoint(str(path / "data"))
    for key, value in values(model).items():
        np.testing.assert_array_equal(reader.get_tensor(key), value)


def test_a_model_that_is_not_sharded_saves_and_restores_too(tmp_path):
    model = filled()
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    keras.backend.clear_session()
    plain = build()
    plain.compile(keras.optimizers.Adam(1e-2), "mse")
    manager.restore(plain)
    assert_same_bits(values(plain), values(model))
    manager.save(plain, 2)
    other = compiled(batch=2, seed=4)
    manager.restore(other)
    assert_same_bits(values(other), values(model))


def test_a_model_without_optimizer_takes_the_weights(tmp_path):
    model = filled()
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    other = build()
    manager.restore(other)
    for ours, expected in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, expected)
