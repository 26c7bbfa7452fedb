"""LoRA, alone and on quantized layers, trains like one device on every mesh."""

import functools
import itertools

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from sweeps import table
from tfshard.layouts import variable_layout

RS = np.random.RandomState(0)
TOKENS, LABELS = RS.randint(0, 32, (2, 16, 6))
X = RS.normal(size=(8, 1024)).astype("float32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MESHES = {"batch": {"batch": 4}, "batch x model": {"batch": 2, "model": 2}, "model": {"model": 4}}

# The changes of each layer, in this order.
WAYS = {
    "LoRA": ("lora",),
    "LoRA, then int8": ("lora", "int8"),
    "int8, then LoRA": ("int8", "lora"),
    "int4, then LoRA": ("int4", "lora"),
}


@pytest.fixture(autouse=True)
def small_kernels_are_sharded(monkeypatch):
    """Shard small kernels, as in a large model."""
    monkeypatch.setattr(variable_layout, "REPLICATED_BELOW_BYTES", 64)


def prepared(model: keras.Model, way: str) -> keras.Model:
    for layer in model.layers:
        if isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)):
            for what in WAYS[way]:
                layer.enable_lora(4) if what == "lora" else layer.quantize(what)
    return model


def network(way: str) -> keras.Model:
    """Return two blocks, with kernels of two and of three dims, and logits."""
    layers = keras.layers
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(32, 16, name="embed")(inputs)
    hidden = layers.Dense(32, activation="gelu", name="up")(x)
    x = layers.LayerNormalization(name="norm")(layers.add([x, layers.Dense(16, name="down")(hidden)]))
    heads = layers.EinsumDense("abc,cde->abde", (None, 4, 8), name="heads")(x)
    x = layers.add([x, layers.EinsumDense("abcd,cde->abe", (None, 16), bias_axes="e", name="out")(heads)])
    return prepared(keras.Model(inputs, layers.Dense(32, name="logits")(x)), way)


def train(build, strategy: tfshard.ShardedStrategy | None, batch=(TOKENS, LABELS), **options) -> parity.Run:
    return parity.train(
        build, [batch], optimizer=lambda: keras.optimizers.Adam(3e-3), loss=LOSS, strategy=strategy, steps=4, **options
    )  # fmt: skip


@functools.cache
def one_device(way: str) -> parity.Run:
    return train(functools.partial(network, way), None)


def strategy(mesh: str, stage: int = 3, way: str = "", **options) -> tfshard.ShardedStrategy:
    layout_map = "auto" if "model" in mesh else None
    if "int4" in way and layout_map:
        layout_map = {".*": ()}
    return tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=stage, **options)


def kernels(model: keras.Model) -> list[keras.Variable]:
    names = ("kernel", "embeddings")
    found = [v for v in model.non_trainable_variables if v.name in names]
    assert len(found) == 6, "premise: all kernels are frozen"
    return found


def assert_same(run: parity.Run, reference: parity.Run) -> None:
    losses = reference.losses
    assert losses[0] - losses[-1] > 1e-2, "premise: it learns"
    np.testing.assert_allclose(run.losses, losses, rtol=1e-5)
    for path, weight in reference.weights.items():
        ours = run.weights[path]
        assert ours.dtype == weight.dtype, path
        # A single rounding that differs, in thousands of activations, shows in the trained weights.
        exact = weight.dtype == np.int8
        np.testing.assert_allclose(ours, weight, rtol=0, atol=0 if exact else 5e-5, err_msg=path)


@pytest.mark.sweep(1)
@table(
    "LoRA", ("way", "mesh", "stage"), itertools.product(WAYS, MESHES, (0, 1, 2, 3)), sample=1,
    always=[("LoRA", "batch", 3), ("LoRA", "batch x model", 3), ("LoRA", "model", 0), ("LoRA, then int8", "batch", 3),
            ("int8, then LoRA", "batch x model", 3), ("int8, then LoRA", "model", 3), ("LoRA, then int8", "batch", 1),
            ("int4, then LoRA", "batch", 3), ("int4, then LoRA", "batch x model", 3)],
)  # fmt: skip
def test_adapters_train_to_the_numbers_of_one_device(way, mesh, stage):
    run = train(functools.partial(network, way), strategy(mesh, stage, way))
    sharded = {axis for v in kernels(run.model) for axis in v.value.layout.storage} - {None}
    expected = set() if "int4" in way or "model" not in mesh else {"model"}
    assert sharded == expected | ({"batch"} if stage == 3 and "batch" in mesh else set()), "premise"
    assert_same(run, one_device(way))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["batch", "batch x model"])
def test_an_eager_step_reads_integers_that_rest_as_words(mesh):
    run = train(functools.partial(network, "LoRA, then int8"), strategy(mesh), eager=True)
    words = [v.value for v in kernels(run.model)]
    assert {v.buffer.dtype for v in words} == {tf.int64} and {v.dtype for v in words} == {tf.int8}, "premise"
    assert_same(run, one_device("LoRA, then int8"))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["LoRA", "LoRA, then int8"])
def test_what_is_frozen_has_no_gradient_and_no_slot(way):
    chosen = strategy("batch")
    model = train(functools.partial(network, way), chosen).model
    plan, report = chosen.plan(model, inputs=(TOKENS,)), chosen.report(model)
    frozen = sum(int(np.prod(v.shape)) * v.value.dtype.size for v in model.non_trainable_variables)
    trained = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    assert frozen > trained / 4, "premise"
    for each in (plan, report):
        assert each.bytes_on_one_device("parameter") == trained
        assert each.bytes_on_one_device("slot") - 2 * trained in range(64), "counters besides"
    assert plan.bytes_on_one_device("gradient") == trained
    with_gradient = {each.path for each in report.variables if each.gradient_layout is not None}
    assert with_gradient == {v.path for v in model.trainable_variables}
    of_kernel = {each.what for each in plan.collectives if "kernel" in each.what and "lora" not in each.what}
    assert {each.kind for each in plan.collectives if each.what in of_kernel} <= {"all-gather"}


def wide(way: str) -> keras.Model:
    inputs = x = keras.Input((1024,))
    for number in range(2):
        x = keras.layers.Dense(1024, activation="gelu", name=f"dense_{number}")(x)
    return prepared(keras.Model(inputs, x), way)


def profiled(way: str) -> tuple[tfshard.measure.StepProfile, tfshard.planning.ShardingPlan]:
    keras.backend.clear_session()
    model, chosen = tfshard.as_distributed(wide(way)), strategy("batch")
    model.compile("adam", "mse", strategy=chosen)
    return tfshard.profile_step(model, (X, X)), chosen.plan(model, inputs=X)


def test_integers_are_gathered_in_a_quarter_of_the_bytes_and_no_kernel_is_reduced():
    sent = {}
    for way in ("LoRA", "LoRA, then int8"):
        profile, plan = profiled(way)
        tfshard.measure.assert_matches_plan(profile, plan)
        large = [each for each in profile.collectives if each.bytes]  # The trace leaves small collectives out.
        assert {each.kind for each in large} == {"all-gather"}, "no gradient of a kernel is reduced"
        sent[way] = {each.bytes for each in large}
    assert sent["LoRA"] == {4 << 20}, "premise: a kernel each"
    assert sent["LoRA, then int8"] == {1 << 20}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["batch x model", "model"])
def test_a_checkpoint_of_integers_is_restored_on_another_mesh_and_trained_on(target, tmp_path):
    way = "LoRA, then int8"
    model = train(functools.partial(network, way), strategy("batch")).model
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 4)
    weights, losses = model.get_weights(), [float(model.train_on_batch(TOKENS, LABELS)) for _ in range(2)]
    keras.backend.clear_session()
    other = tfshard.as_distributed(network(way))
    other.compile(keras.optimizers.Adam(3e-3), LOSS, strategy=strategy(target))
    manager.restore(other)
    for ours, theirs in zip(other.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert {v.value.layout.storage for v in kernels(other)} != {v.value.layout.storage for v in kernels(model)}, (
        "premise"
    )
    np.testing.assert_allclose([float(other.train_on_batch(TOKENS, LABELS)) for _ in range(2)], losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["LoRA", "LoRA, then int8", "int4, then LoRA"])
@pytest.mark.parametrize("mesh", ["batch", "batch x model"])
def test_plain_keras_loads_the_merged_model_with_the_predictions_of_one_device(way, mesh, tmp_path):
    run, reference = train(functools.partial(network, way), strategy(mesh, way=way)), one_device(way)
    merged = {}
    for name, model in {"sharded": run.model, "plain": reference.model}.items():
        model.save(tmp_path / f"{name}.keras")
        merged[name] = keras.models.load_model(tmp_path / f"{name}.keras", compile=False)
        assert not isinstance(merged[name], tfshard.Model)
    assert np.abs(merged["plain"].layers[1].embeddings - network(way).layers[1].embeddings).max() > 0, "premise"
    assert all(not np.any(v) for v in merged["sharded"].weights if "lora" in v.path)
    expected, found = (merged[name].predict(TOKENS, verbose=0) for name in ("plain", "sharded"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 if way == "LoRA" else 2e-2)
    exported = tfshard.export(run.model, tmp_path / "exported.keras")
    np.testing.assert_array_equal(keras.models.load_model(exported).predict(TOKENS, verbose=0), found)
    run.model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    found = served.serve(TOKENS.astype("int32"))
    np.testing.assert_allclose(found, run.model.predict(TOKENS, verbose=0), rtol=0, atol=1e-5)


BACKBONES = {
    "gpt2": lambda: keras_hub.models.GPT2Backbone(
        vocabulary_size=32, num_layers=1, num_heads=4, hidden_dim=16, intermediate_dim=32, max_sequence_length=8,
        dropout=0.0,
    ),
    "gemma": lambda: keras_hub.models.GemmaBackbone(
        vocabulary_size=32, num_layers=1, num_query_heads=4, num_key_value_heads=4, hidden_dim=16,
        intermediate_dim=32, head_dim=4,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "mode"),
    [("gpt2", "batch", "int8"), ("gpt2", "model", None), ("gemma", "batch x model", "int8"), ("gemma", "batch", None)],
)
def test_a_backbone_with_adapters_trains_to_the_numbers_of_one_device(family, mesh, mode):
    def build() -> keras.Model:
        backbone = BACKBONES[family]()
        if mode is not None:
            with pytest.warns(UserWarning, match="does not have a `quantize` method"):
                backbone.quantize(mode)
        backbone.enable_lora(4)
        return keras.Model(backbone.input, keras.layers.Dense(32, name="head")(backbone.output))

    batch = ({"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}, LABELS)
    run, reference = train(build, strategy(mesh), batch), train(build, None, batch)
    trained = {v.path.rpartition("/")[2] for v in run.model.trainable_variables}
    assert {"lora_kernel_a", "lora_kernel_b"} < trained and "embeddings" not in trained, "premise"
    assert_same(run, reference)


@pytest.mark.slow
def test_blocks_of_adapted_layers_are_recomputed():
    way, runs = "LoRA, then int8", {}
    for recomputed in (False, True):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = tfshard.as_distributed(network(way))
        chosen = strategy("batch")
        if recomputed:
            chosen.recompute(model, blocks=["up", "heads"])
        model.compile(keras.optimizers.Adam(3e-3), LOSS, strategy=chosen)
        runs[recomputed] = [float(model.train_on_batch(TOKENS, LABELS)) for _ in range(3)]
    np.testing.assert_allclose(runs[True], runs[False], rtol=1e-6)


def test_advice_counts_integers_as_bytes_and_trains_adapters_only():
    inputs = tf.TensorSpec((8, 1024), tf.float32)
    needed = {}
    for way in ("LoRA", "LoRA, then int8"):
        advice = tfshard.advise(wide(way), devices=4, memory_per_device=1 << 30, batch=8, inputs=inputs)
        needed[way] = {each.zero_stage: each.stored_bytes for each in advice.candidates if not each.recompute}
    assert {0, 3} <= set(needed["LoRA"]), "premise"
    saved = {stage: needed["LoRA"][stage] - needed["LoRA, then int8"][stage] for stage in (0, 3)}
    bytes_ = 2 * 3 * 1024 * 1024 - 2 * 4 * 1024  # Three of four bytes of each element, minus the added scales.
    assert saved == {0: bytes_, 3: bytes_ // 4}
