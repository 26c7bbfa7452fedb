"""Patches on objects of a user's model are applied once, listed, undone, and not inherited by copies."""

import copy
import pathlib
import pickle
import re

import keras
import numpy as np
import pytest

import tfshard
from tfshard.operations import layer_patch
from tfshard.operations.layer_patch import CONVOLUTION, METRIC_UPDATE, SEQUENCE, TABLE_READ

ROOT = pathlib.Path(__file__).parents[2]
TOKENS = np.random.RandomState(0).randint(0, 256, (8, 8))


def language_model() -> keras.Model:
    tokens = keras.Input((8,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(256, 16, name="table")
    x = keras.layers.Dense(64, activation="relu", name="up")(table(tokens))
    return keras.Model(tokens, table(keras.layers.Dense(16, name="down")(x), reverse=True))


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def strategy(**options) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(model=4), "auto", **options)


def compiled(metrics=("accuracy",), **options) -> keras.Model:
    model = tfshard.as_distributed(language_model())
    model.compile("sgd", loss(), metrics=list(metrics), strategy=strategy(**options))
    model.train_on_batch(TOKENS, TOKENS)
    return model


def changes(model: keras.Model) -> list:
    return sorted((patch.change.attribute, patch.owner.name) for patch in layer_patch.patches_of(model))


def test_the_list_is_the_table_of_the_design():
    table = (ROOT / "docs" / "design.md").read_text().partition("| on | attribute |")[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table.splitlines()[2:]]
    assert rows == [(c.of, f"`{c.attribute}`", c.why, f"`{c.module}`") for c in layer_patch.CHANGES]


def test_no_other_module_sets_attributes_of_what_is_not_its_own():
    """The package's top-level modules assign no patched attribute of foreign objects, and no instance dictionary."""
    attributes = "|".join({change.attribute for change in layer_patch.CHANGES})
    assigned = re.compile(rf"(\.({attributes}) = )|(vars\([a-z_.]+\)\[.*\] = )|(object\.__setattr__)")
    for path in sorted((ROOT / "tfshard").glob("*.py")):
        if path.stem in ("layer_patch", "subject"):  # `subject` puts plain variables in the place of sharded variables.
            continue
        for line in path.read_text().splitlines():
            assert not assigned.search(line) or "self." in line.partition("=")[0], f"{path.name}: {line}"


def test_a_compiled_model_has_patches_where_the_list_says():
    model = compiled(sequence_parallel=True)
    assert changes(model) == [("call", "down"), ("call", "table"), ("call", "up"), ("sparse_read", "embeddings"),
                              ("sparse_read", "kernel"), ("update_state", "accuracy")]  # fmt: skip
    found = {patch.change for patch in layer_patch.patches_of(model)}
    assert found == {TABLE_READ, METRIC_UPDATE, SEQUENCE}
    for patch in layer_patch.patches_of(model):
        assert getattr(patch.owner, patch.change.attribute) is patch


def test_compiling_again_patches_once():
    model = compiled(sequence_parallel=True)
    before = layer_patch.patches_of(model)
    model.compile("adam", loss(), metrics=["accuracy"], strategy=tfshard.training.models._current_strategy(model))
    model.train_on_batch(TOKENS, TOKENS)
    again = layer_patch.patches_of(model)
    assert changes(model) == sorted((p.change.attribute, p.owner.name) for p in before)
    of_layers = [patch for patch in before if patch.change is not METRIC_UPDATE]
    assert all(any(patch is kept for kept in again) for patch in of_layers)


def test_undo_leaves_the_model_as_keras_made_it_and_the_next_compile_patches_again():
    model = compiled(sequence_parallel=True)
    attributes = {id(patch.owner): (patch.owner, patch.change.attribute) for patch in layer_patch.patches_of(model)}
    layer_patch.undo(model)
    assert layer_patch.patches_of(model) == []
    for owner, attribute in attributes.values():
        assert attribute not in vars(owner)
    expected = model.predict(TOKENS, verbose=0)
    model.compile("sgd", loss(), metrics=["accuracy"], strategy=tfshard.training.models._current_strategy(model))
    model.train_on_batch(TOKENS, TOKENS)
    assert {SEQUENCE, TABLE_READ, METRIC_UPDATE} == {patch.change for patch in layer_patch.patches_of(model)}
    assert expected.shape == (8, 8, 256)


def metric_by_function() -> keras.Metric:
    # Its config holds its function.
    return keras.metrics.MeanMetricWrapper(keras.metrics.sparse_categorical_accuracy, name="by_function")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("how", ["clone", "pickle", "deepcopy", "file"])
def test_copies_have_no_patches(how, tmp_path):
    model = compiled(metrics=["accuracy", metric_by_function()], sequence_parallel=True)
    assert ("update_state", "by_function") in changes(model)
    if how == "clone":
        model.compiled = False  # A clone of a compiled model would be compiled, and sharded, too.
        other = keras.models.clone_model(model)
    elif how == "file":
        model.save(tmp_path / "model.keras")
        other = keras.saving.load_model(tmp_path / "model.keras")
        assert other.compiled
    else:
        other = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    assert layer_patch.patches_of(other) == []
    if other.compiled:
        assert np.isfinite(other.evaluate(TOKENS, TOKENS, verbose=0)).all()


def test_convolutions_are_patched_once_and_taken_back():
    inputs = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(16, 3, padding="same", activation="relu", name="first")(inputs)
    model = tfshard.as_distributed(keras.Model(inputs, keras.layers.Conv2D(4, 3, padding="same", name="second")(x)))
    model.compile("sgd", "mse", strategy=strategy())
    assert {(patch.change, patch.owner.name) for patch in layer_patch.patches_of(model)} == {
        (CONVOLUTION, "first"), (CONVOLUTION, "second")}  # fmt: skip
    layer_patch.undo(model)
    assert "convolution_op" not in vars(model.get_layer("first"))


def test_a_patch_on_a_patch_is_taken_back_in_any_order():
    layer = keras.layers.Dense(2)
    outer = layer_patch.Change(of="a layer", attribute="call", why="for this test", module="here")

    def doubled(call):
        return lambda *args: 2 * call(*args)

    x = np.ones((1, 3), "float32")
    expected = np.asarray(layer(x))
    with layer_patch.applied(SEQUENCE, layer, doubled):
        layer_patch.apply(outer, layer, doubled)
        assert [patch.change for patch in layer_patch.patches_on(layer)] == [outer, SEQUENCE]
        np.testing.assert_allclose(layer(x), 4 * expected)
    assert [patch.change for patch in layer_patch.patches_on(layer)] == [outer]
    model = keras.Sequential([layer])
    layer_patch.undo(model)
    np.testing.assert_allclose(layer(x), expected)


def test_a_metric_of_whole_predictions_sends_nothing_though_something_of_their_size_is_sharded():
    """The predictions have 64 classes, and so has the sharded hidden layer."""
    layout_map = tfshard.LayoutMap()
    layout_map.column("up")
    layout_map.row("down")
    layout_map.replicated("head/.*")
    counts = {}
    for metrics in ([], ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=5)]):
        inputs = keras.Input((16,))
        x = keras.layers.Dense(64, activation="relu", name="up")(inputs)
        x = keras.layers.Dense(16, name="down")(x)
        model = tfshard.as_distributed(keras.Model(inputs, keras.layers.Dense(64, name="head")(x)))
        on_four = tfshard.ShardedStrategy(tfshard.create_mesh(model=4), layout_map, zero_stage=0)
        model.compile("sgd", loss(), metrics=metrics, strategy=on_four)
        batch = np.ones((8, 16), "float32"), np.arange(8)
        counts[len(metrics)] = [(c.kind, c.bytes) for c in tfshard.profile_step(model, batch).collectives]
        assert model.get_layer("up").kernel.value.layout.compute == (None, "model")
    # Premise: both metrics have the patch.
    assert sum(patch.change is METRIC_UPDATE for patch in layer_patch.patches_of(model)) == 2
    assert counts[2] == counts[0]
