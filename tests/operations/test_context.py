"""A context axis splits sequences between devices, and training matches one device."""

import functools
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest

import families
import parity
import tfshard
from sweeps import table
from tfshard import measure
from tfshard.devices import batching
from tfshard.errors import MeshError, StrategyError, UnsupportedLayerError
from tfshard.layouts import MeshAxes
from tfshard.layouts.sequence_chunks import SequenceChunks
from tfshard.operations import context_parallel, layer_patch, online_softmax

RS = np.random.RandomState(0)
LENGTH, WORDS, WIDTH, BATCH = 16, 24, 16, 4
TOKENS, LABELS = RS.randint(1, WORDS, (BATCH, LENGTH)), RS.randint(0, WORDS, (BATCH, LENGTH))
WEIGHTS = RS.rand(BATCH, LENGTH).astype("float32") * (RS.rand(BATCH, LENGTH) > 0.3)
LOSS = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
ADAM = functools.partial(keras.optimizers.Adam, 1e-2, epsilon=1e-3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Split a full sequence into several blocks of attention."""
    monkeypatch.setattr(online_softmax, "BLOCK", 6)


class OwnPositions(keras.layers.Layer):
    """A user's embedding of positions."""

    supports_masking = True

    def build(self, shape):
        self.table = keras.layers.Embedding(LENGTH, shape[-1])
        self.table.build((None, None))
        self.built = True

    def call(self, x):
        return x + self.table(tfshard.sequence_positions(x))


FAMILIES = ("gpt2", "llama", "bert")


def gpt(
    *, length: int | None = LENGTH, mask_zero: bool = False, heads: int = 4, key_heads: int | None = None
) -> keras.Model:
    """Return a GPT of Keras's layers, with one block."""
    inputs = keras.Input((length,), dtype="int32")
    x = OwnPositions(name="positions")(keras.layers.Embedding(WORDS, WIDTH, mask_zero=mask_zero)(inputs))
    y = keras.layers.LayerNormalization()(x)
    if key_heads is None:
        layer = keras.layers.MultiHeadAttention(heads, 4, name="attention")
    else:
        layer = keras.layers.GroupQueryAttention(4, 4, key_heads, name="attention")
    x = x + layer(y, y, use_causal_mask=True)
    y = keras.layers.Dense(32, activation="gelu", name="up")(keras.layers.LayerNormalization()(x))
    x = keras.layers.Dropout(0.2)(x + keras.layers.Dense(WIDTH, name="down")(y))
    return keras.Model(inputs, keras.layers.Dense(WORDS, name="head")(x))


@functools.cache
def reference(build: Any, weighted: bool = False) -> parity.Run:
    batch = (TOKENS, LABELS, WEIGHTS) if weighted else (TOKENS, LABELS)
    return parity.train(build, [batch], optimizer=ADAM, loss=LOSS(), steps=2, eager=True)


def trained(build: Any, mesh: dict, *, weighted: bool = False, **options: Any) -> parity.Run:
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), **options)
    batch = (TOKENS, LABELS, WEIGHTS) if weighted else (TOKENS, LABELS)
    return parity.train(build, [batch], optimizer=ADAM, loss=LOSS(), steps=2, strategy=strategy)


def assert_same(run: parity.Run, expected: parity.Run) -> None:
    parity.assert_same(run, expected, rtol=2e-5, atol=2e-6)


# --- axes and chunks ---------------------------------------------------------------------------------


def test_context_axis_is_the_minor_part_of_the_data_axis():
    axes = MeshAxes.of({"replica": 2, "batch": 2, "context": 4, "model": 2})
    assert dict(axes) == {"batch": 16, "model": 2}
    assert (axes.contexts, axes.replicas, axes.shards, axes.sample_shards) == (4, 2, 8, 4)
    assert axes.given == {"replica": 2, "batch": 2, "context": 4, "model": 2}
    assert MeshAxes.of(axes.given, axes.roles) == axes


def test_mesh_keeps_the_context_axis_and_its_role():
    mesh = tfshard.create_mesh(batch=2, cp=2)
    axes = tfshard.ShardedStrategy(mesh, attention="flash").mesh_shape
    assert (list(mesh.dim_names), mesh.shape()) == (["batch"], [4])
    assert (axes.context, axes.contexts, axes.given) == ("cp", 2, {"batch": 2, "cp": 2})
    named = tfshard.create_mesh(batch=2, ring=2, roles={"ring": "context"})
    assert tfshard.ShardedStrategy(named).mesh_shape.context == "ring"


@pytest.mark.parametrize("axes", [{"context": 4}, {"batch": 1, "context": 2, "cp": 2}, {"pp": 2, "dp": 1, "cp": 2}])
def test_impossible_context_axes_are_refused(axes):
    with pytest.raises(MeshError, match="context axis"):
        MeshAxes.of(axes)


@pytest.mark.parametrize("batch", [4, 3])
def test_rows_of_chunks_go_back_to_sequences(batch):
    chunks = SequenceChunks(contexts=2, sample_shards=2)
    given = RS.rand(batch, 6, 3)
    rows = chunks.rows_of(given)
    assert rows.shape == (2 * batch, 3, 3)
    np.testing.assert_array_equal(chunks.sequences_of(rows), given)
    positions = np.broadcast_to(np.arange(6), (batch, 6))
    np.testing.assert_array_equal(chunks.positions(2 * batch, 3), chunks.rows_of(positions))
    numbers = np.arange(batch)
    np.testing.assert_array_equal(
        chunks.repeated(numbers), chunks.rows_of(np.broadcast_to(numbers[:, np.newaxis], (batch, 6)))[:, 0]
    )


# --- training ----------------------------------------------------------------------------------------

MESHES = {
    "context 4": {"batch": 1, "context": 4},
    "batch 2, context 2": {"batch": 2, "context": 2},
    "context 2, model 2": {"batch": 1, "context": 2, "model": 2},
}


@table(
    "context meshes", ("mesh", "stage"),
    [(mesh, stage) for mesh in MESHES for stage in range(4)],
    always=[("batch 2, context 2", 0), ("context 2, model 2", 3)],
)  # fmt: skip
def test_gpt_trains_as_on_one_device(mesh, stage):
    options = {"layout_map": "auto"} if "model" in mesh else {}
    run = trained(gpt, MESHES[mesh], zero_stage=stage, analyzer=None, **options)
    assert "model" not in mesh or parity.sharded_share(run.model, "model") > 0.3, "premise"
    if stage == 3:
        assert parity.sharded_share(run.model, "batch") > 0.9, "The devices of both axes store shards."
    assert_same(run, reference(gpt))


def test_sample_weights_predictions_and_metrics_count_tokens_as_on_one_device():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, context=2))
    build = functools.partial(gpt, mask_zero=True)
    tokens = TOKENS * (RS.rand(*TOKENS.shape) > 0.2)
    found = []
    for chosen in (None, strategy):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = build()
        if chosen is not None:
            model = tfshard.as_distributed(model)
        extra = {} if chosen is None else {"strategy": chosen}
        model.compile("sgd", LOSS(), weighted_metrics=["accuracy"], metrics=["accuracy"], jit_compile=False, **extra)
        history = model.fit(tokens, LABELS, sample_weight=WEIGHTS, batch_size=2, epochs=1, shuffle=False, verbose=0)
        results = model.evaluate(tokens, LABELS, sample_weight=WEIGHTS[:, :1] + 0.5, batch_size=3, verbose=0)
        found.append(([*(each[0] for each in history.history.values()), *results], model.predict(tokens, verbose=0)))
    (plain, predicted), (ours, our_predicted) = found
    np.testing.assert_allclose(ours, plain, rtol=2e-5)
    np.testing.assert_allclose(our_predicted, predicted, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_keys_train_as_on_one_device(key_heads):
    build = functools.partial(gpt, key_heads=key_heads, length=None)
    assert_same(trained(build, {"batch": 1, "context": 4}), reference(build))


@pytest.mark.parametrize("mesh", [{"batch": 2, "context": 2}, {"batch": 1, "context": 2, "model": 2}])
def test_gathered_keys_of_any_number_of_heads_train_as_on_one_device(mesh):
    build = functools.partial(gpt, heads=3 if "model" not in mesh else 2, mask_zero=True)
    options = {"layout_map": "auto"} if "model" in mesh else {}
    assert_same(trained(build, mesh, context_attention="gather", **options), reference(build))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_with_gathered_keys(family):
    assert_family_trains(family, {"batch": 1, "context": 4}, context_attention="gather")


@pytest.mark.slow
def test_microbatches_train_as_on_one_device():
    assert_same(trained(gpt, {"batch": 2, "context": 2}, microbatches=2), reference(gpt))


@pytest.mark.slow
def test_batch_that_the_batch_axis_does_not_divide_trains_as_on_one_device():
    run = parity.train(
        gpt, [(TOKENS[:3], LABELS[:3])], optimizer=ADAM, loss=LOSS(), steps=2,
        strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, context=2)),
    )  # fmt: skip
    alone = parity.train(gpt, [(TOKENS[:3], LABELS[:3])], optimizer=ADAM, loss=LOSS(), steps=2, eager=True)
    assert_same(run, alone)


@table("context families", "family", FAMILIES, always=["gpt2"])
def test_families_with_padding_train_as_on_one_device(family):
    assert_family_trains(family, {"batch": 2, "context": 2}, zero_stage=3)


def assert_family_trains(family: str, mesh: dict, **settings: Any) -> None:
    tokens = families.TOKENS[:4]
    mask = np.arange(8) < np.array([8, 5, 3, 7])[:, np.newaxis]
    x = {"token_ids": tokens, "padding_mask": mask}
    if family == "bert":
        x["segment_ids"] = np.zeros_like(tokens)
    data = [(x, tokens, mask.astype("float32"))]
    build = functools.partial(language_model, family)
    options = {"optimizer": ADAM, "loss": LOSS(), "steps": 2}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), **settings)
    run = parity.train(build, data, strategy=strategy, **options)
    parity.assert_same(run, parity.train(build, data, eager=True, **options), rtol=5e-5, atol=5e-6)


def language_model(family: str) -> keras.Model:
    common = {**families.SMALL, "max_sequence_length": 8, "dropout": 0.0}
    if family == "gpt2":
        backbone = keras_hub.models.GPT2Backbone(**common)
    elif family == "bert":
        backbone = keras_hub.models.BertBackbone(**common, num_segments=2)
    else:
        sizes = {key: value for key, value in families.SMALL.items() if key != "num_heads"}
        backbone = keras_hub.models.LlamaBackbone(**sizes, num_query_heads=4, num_key_value_heads=2)
    return families.spread(families.with_logits(backbone))


class ClippedDistances(keras.layers.Layer):
    """Attention by a mask of clipped positions, which look unclipped within the first chunk."""

    def build(self, shape):
        self.attention = keras.layers.MultiHeadAttention(4, 4, name="attention")
        self.attention.build(shape, shape)
        self.built = True

    def call(self, x):
        places = keras.ops.minimum(keras.ops.arange(x.shape[1]), 6)
        return self.attention(x, x, attention_mask=(places[:, None] - places[None, :] >= 0)[None])


def test_masks_of_clipped_positions_are_refused():
    inputs = keras.Input((LENGTH, WIDTH))
    model = tfshard.as_distributed(keras.Model(inputs, ClippedDistances()(inputs)))
    x = np.ones((2, LENGTH, WIDTH), "float32")
    with pytest.raises(UnsupportedLayerError, match="attention"):
        model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, context=4)))
        model.train_on_batch(x, x)


# --- what a step sends and stores ----------------------------------------------------------------------


def attending(**options: Any) -> keras.Model:
    inputs = keras.Input((LENGTH, WIDTH))
    return keras.Model(inputs, keras.layers.MultiHeadAttention(key_dim=4, **options, name="attention")(inputs, inputs))


@pytest.mark.parametrize("mesh", [{"batch": 1, "context": 4}, {"batch": 1, "context": 2, "model": 2}])
def test_step_sends_what_the_plan_says(mesh):
    options = {"layout_map": "auto"} if "model" in mesh else {}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), zero_stage=1, **options)
    model = tfshard.as_distributed(attending(num_heads=4))
    model.compile("sgd", "mse", strategy=strategy)
    # Allocations of 256 KiB and more are in the trace.
    x = RS.normal(size=(1024, LENGTH, WIDTH)).astype("float32")
    profile = tfshard.profile_step(model, (x, x))
    plan = strategy.plan(model, inputs=x)
    (sent,) = [each for each in plan.collectives if each.kind == "all-to-all"]
    local = x.nbytes // 4
    assert (sent.axis, sent.count, sent.bytes) == ("context", 8, local)
    assert (profile.count("all-to-all"), profile.bytes("all-to-all")) == (8, 8 * local)
    if "model" not in mesh:  # DTensor merges no all-reduces behind attention in blocks on a mesh of several axes.
        measure.assert_matches_plan(profile, plan)


def test_step_that_gathers_keys_sends_what_the_plan_says():
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(batch=1, context=4), zero_stage=1, context_attention="gather"
    )
    model = tfshard.as_distributed(attending(num_heads=3))
    model.compile("sgd", "mse", strategy=strategy)
    x = RS.normal(size=(1024, LENGTH, WIDTH)).astype("float32")
    profile, plan = tfshard.profile_step(model, (x, x)), strategy.plan(model, inputs=x)
    size = 1024 * LENGTH * 12 * 4
    sent = {(each.kind, each.count, each.bytes) for each in plan.collectives if each.axis == "context"}
    assert sent == {("all-gather", 4, size), ("all-to-all", 2, size)}
    measure.assert_matches_plan(profile, plan)


def test_plan_tells_the_gathers_of_masks():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, context=2), zero_stage=1)
    model = tfshard.as_distributed(gpt(mask_zero=True))
    model.compile("sgd", LOSS(), strategy=strategy)
    plan, profile = strategy.plan(model, inputs=TOKENS), tfshard.profile_step(model, (TOKENS, LABELS))
    gathers = [each for each in plan.collectives if each.kind == "all-gather" and each.axis == "context"]
    sent = [(each.count, each.bytes) for each in gathers]
    assert sent == [(2, 4 * BATCH * LENGTH // 2)], "The masks of queries and of keys."
    measure.assert_matches_plan(profile, plan)


# --- models that do not work ---------------------------------------------------------------------------


class Softmaxed(keras.layers.Layer):
    """Attention that a user wrote."""

    def call(self, x):
        return keras.ops.softmax(x @ keras.ops.transpose(x, (0, 2, 1))) @ x


class CountingPositions(keras.layers.Layer):
    def call(self, x):
        return x + keras.ops.cast(keras.ops.arange(keras.ops.shape(x)[1]), x.dtype)[:, None]


class ScaledByLength(keras.layers.Layer):
    def call(self, x):
        return x / keras.ops.shape(x)[1]


REFUSED = {
    "convolution": lambda: keras.layers.Conv1D(WIDTH, 3, padding="causal", name="culprit"),
    "pooling": lambda: keras.layers.MaxPooling1D(3, 1, "same", name="culprit"),
    "recurrence": lambda: keras.layers.LSTM(WIDTH, return_sequences=True, name="culprit"),
    "normalization": lambda: keras.layers.LayerNormalization(axis=[1, 2], name="culprit"),
    "dense": lambda: keras.layers.EinsumDense("abc,bd->adc", (LENGTH, WIDTH), name="culprit"),
    "reshape": lambda: keras.layers.Reshape((LENGTH // 2, 2 * WIDTH), name="culprit"),
    "attention": lambda: Softmaxed(name="culprit"),
    "positions": lambda: CountingPositions(name="culprit"),
    "length": lambda: ScaledByLength(name="culprit"),
    "whole features": lambda: keras.layers.SpatialDropout1D(0.5, name="culprit"),
    "regularizer": lambda: keras.layers.Dense(WIDTH, activity_regularizer="l2", name="culprit"),
    "global pooling": lambda: keras.layers.GlobalAveragePooling1D(keepdims=True, name="culprit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layer_that_combines_positions_is_refused_by_name(name):
    inputs = keras.Input((LENGTH, WIDTH))
    model = tfshard.as_distributed(keras.Model(inputs, keras.layers.Dense(4)(REFUSED[name]()(inputs))))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, context=4))
    with pytest.raises(UnsupportedLayerError, match="(?i)layer 'culprit'"):
        model.compile("sgd", "mse", strategy=strategy)


def test_layers_that_compute_each_position_by_itself_pass_the_check():
    inputs = keras.Input((LENGTH, WIDTH))
    x = keras.layers.EinsumDense("abc,cde->abde", (None, 2, 8), name="heads")(inputs)
    x = keras.layers.Reshape((-1, WIDTH))(x)
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.1)(keras.layers.UnitNormalization()(x)))
    x = keras.layers.Concatenate()([x, keras.ops.softmax(inputs), keras.ops.gelu(inputs)])
    model = keras.Model(inputs, keras.layers.Dense(WIDTH)(x))
    mesh = tfshard.create_mesh(batch=1, context=4)
    assert context_parallel.check(model, mesh)


def conditioned(shape: tuple[int, ...], *, name: str = "") -> keras.Model:
    """Return a model with an input that has no sequence, and a layer of `REFUSED`."""
    condition, inputs = keras.Input(shape), keras.Input((LENGTH, WIDTH))
    x = keras.layers.Reshape((1, WIDTH))(keras.layers.Dense(WIDTH)(condition))
    x = inputs + x
    x = keras.layers.MultiHeadAttention(4, 4, name="attention")(x, x)
    return keras.Model([condition, inputs], keras.layers.Dense(4)(REFUSED[name]()(x) if name else x))


@pytest.mark.parametrize("shape", [(1,), (1, 3)])
def test_model_with_an_input_without_a_sequence_is_checked(shape):
    mesh = tfshard.create_mesh(batch=1, context=4)
    assert context_parallel.check(conditioned(shape), mesh)
    for name in REFUSED.keys() - {"whole features", "regularizer"}:  # `install` refuses these.
        with pytest.raises(UnsupportedLayerError, match="(?i)layer 'culprit'"):
            context_parallel.check(conditioned(shape, name=name), mesh)


def test_model_whose_first_input_has_no_sequence_matches_one_device():
    batch = [RS.rand(BATCH, 1, 3), RS.rand(BATCH, LENGTH, WIDTH)], RS.rand(BATCH, LENGTH, 4)
    assert_trains_on_chunks(lambda: conditioned((1, 3)), batch)


def assert_trains_on_chunks(build: Any, batch: tuple) -> None:
    """Compare two steps with plain Keras on one device."""
    losses = []
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, context=2))):
        keras.utils.set_random_seed(0)
        model = build()
        if strategy is None:
            model.compile("sgd", "mse")
        else:
            model = tfshard.as_distributed(model)
            model.compile("sgd", "mse", strategy=strategy)
        losses.append([model.train_on_batch(*batch) for _ in range(2)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("width", [4, 1])
def test_draw_for_each_sample_is_shared_by_its_chunks(width):
    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        x = inputs + keras.layers.Dropout(0.5, noise_shape=(None, 1, 1), seed=1)(keras.layers.Dense(WIDTH)(inputs))
        return keras.Model(inputs, keras.layers.Dense(width)(x))

    assert_trains_on_chunks(build, (RS.rand(BATCH, LENGTH, WIDTH), RS.rand(BATCH, LENGTH, width)))


@pytest.mark.parametrize(
    "index, message",
    [
        ((slice(None), 0), "combines the positions of a sequence"),
        ((..., 0), "no dim behind the sequence"),
    ],
)
def test_output_without_a_sequence_or_a_width_is_refused(index, message):
    inputs = keras.Input((LENGTH, WIDTH))
    model = tfshard.as_distributed(keras.Model(inputs, keras.layers.Dense(4)(inputs)[index]))
    with pytest.raises(UnsupportedLayerError, match=message):
        model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, context=4)))


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"num_heads": 3}, "3 heads of queries"),
        ({"num_heads": 4, "dropout": 0.1}, "dropout"),
    ],
)
def test_attention_that_cannot_be_exchanged_is_refused(options, reason):
    model = tfshard.as_distributed(attending(**options))
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, context=4)))
    x = np.ones((2, LENGTH, WIDTH), "float32")
    with pytest.raises(UnsupportedLayerError, match=f"'attention' cannot attend across .*{reason}"):
        model.train_on_batch(x, x)


@pytest.mark.parametrize(
    "x, message",
    [
        (np.ones((2, 6, WIDTH)), "does not divide sequences of 6 positions"),
        ((np.ones((2, 8, WIDTH)), np.ones((2, 4, WIDTH))), "need the length of the first one, 8"),
        (np.ones(4), "no tensor of the batch has one"),
    ],
)
def test_batches_without_equal_sequences_are_refused(x, message):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, context=4))
    with pytest.raises(StrategyError, match=message):
        strategy.run(lambda *args: 0.0, args=x if isinstance(x, tuple) else (x,))


def test_first_tensor_of_a_batch_may_have_no_sequence():
    mesh = tfshard.create_mesh(batch=1, context=4)
    rows = batching._in_chunks([np.ones((2, 1)), np.ones((2, 8))], mesh)
    assert [each.shape for each in rows] == [(8, 1), (8, 2)]


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "math"},
        {"sequence_parallel": True},
        {"already_sharded": True},
        {"tables": ".*embeddings"},
        {"experts": True},
        {"compression": "int8"},
    ],
)
def test_settings_that_do_not_fit_a_context_axis_are_refused(options):
    (name,) = options
    with pytest.raises(StrategyError, match=f"{name}=.*does not work on a mesh with a context axis"):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, context=4), **options)


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"run_eagerly": True}])
def test_steps_that_cannot_exchange_chunks_are_refused(options):
    model = tfshard.as_distributed(attending(num_heads=4))
    x = np.ones((2, LENGTH, WIDTH), "float32")
    with pytest.raises((StrategyError, UnsupportedLayerError), match="context axis"):
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, context=4))
        model.compile("sgd", "mse", strategy=strategy, **options)
        model.train_on_batch(x, x)


def test_model_that_moves_to_another_mesh_loses_its_patches():
    model = tfshard.as_distributed(language_model("gpt2"))
    model.compile("sgd", LOSS(), strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, context=2)))
    assert layer_patch.POSITIONS in {patch.change for patch in layer_patch.patches_of(model)}, "premise"
    model.compile("sgd", LOSS(), strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    assert layer_patch.POSITIONS not in {patch.change for patch in layer_patch.patches_of(model)}
