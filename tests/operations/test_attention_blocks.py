"""Attention in blocks gives the results and gradients of Keras's full scores, and its steps train as one device."""

import dataclasses
import functools
import itertools
from typing import Any
from unittest import mock

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import families
import parity
import tfshard
from sweeps import table
from tfshard import _private
from tfshard.errors import StrategyError, UnsupportedOperationError
from tfshard.operations import attention, block_masks, compiled_blocks, layer_patch, online_softmax
from tfshard.operations.online_softmax import Attention

RS = np.random.RandomState(0)
WIDTH, LENGTH, WORDS = 16, 10, 24
TOKENS = RS.randint(0, WORDS, (8, LENGTH))
LABELS = RS.randint(0, 4, (8,))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ADAM = functools.partial(keras.optimizers.Adam, 1e-2, epsilon=1e-3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Take several blocks of short sequences; the last ones are not full."""
    monkeypatch.setattr(online_softmax, "BLOCK", 4)


def drawn(*shape: int) -> tf.Tensor:
    return tf.constant(RS.normal(size=shape).astype("float32"))


# --- attention alone ---------------------------------------------------------------------------------


def full_scores(kind: Attention, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, mask: Any) -> tf.Tensor:
    """Compute attention with the functions of Keras."""
    key, value = (tf.repeat(each, query.shape[2] // each.shape[2], axis=2) for each in (key, value))
    if kind.empty == "mean":
        return keras.ops.dot_product_attention(
            query, key, value, mask=mask, scale=kind.scale, is_causal=kind.is_causal, flash_attention=False
        )
    scores = tf.cast(tf.einsum("btnh,bsnh->bnts", query, key), tf.float32) * kind.scale
    if kind.soft_cap is not None:
        scores = tf.tanh(scores / kind.soft_cap) * kind.soft_cap
    if kind.is_causal:
        causal = tf.linalg.band_part(tf.ones(scores.shape[2:], "bool"), -1, 0)[None, None]
        mask = causal if mask is None else causal & mask
    shares = keras.layers.Softmax(dtype="float32")(scores, mask=mask)
    return tf.einsum("bnts,bsnh->btnh", tf.cast(shares, value.dtype), value)


CASES = {
    f"{queries}x{keys}, {heads} of {key_heads}, {'causal ' * causal}{masked}, cap {cap}, {empty}": (
        queries, keys, heads, key_heads, causal, masked, cap, empty,
    )
    for queries, keys, (heads, key_heads), causal, masked, cap, empty in itertools.product(
        (7, 8), (8, 5), ((2, 2), (4, 2), (4, 1)), (False, True), ("no mask", "padded", "square"), (None, 2.0),
        ("mean", "zero"),
    )
    if not (cap and empty == "mean")
}  # fmt: skip


@table(
    "attention in blocks",
    "name",
    CASES,
    always=["7x5, 4 of 2, causal square, cap 2.0, zero", "8x8, 2 of 2, causal square, cap None, mean"],
    sample=3,
)
def test_results_and_gradients_are_those_of_full_scores(name: str):
    queries, keys, heads, key_heads, causal, masked, cap, empty = CASES[name]
    query, key, value = drawn(2, queries, heads, 8), drawn(2, keys, key_heads, 8), drawn(2, keys, key_heads, 6)
    weights, mask = drawn(2, queries, heads, 6), None
    if masked != "no mask":
        mask = RS.rand(2, 1, queries if masked == "square" else 1, keys) > 0.4
        # One query, or one sample, may attend to no key.
        mask[1, :, -1] = False
    kind = Attention(scale=0.8, is_causal=causal, soft_cap=cap, empty=empty, block=3)
    assert queries > kind.block < keys, "premise: several blocks"

    @tf.function(autograph=False)
    def in_blocks(*given: tf.Tensor) -> list[tf.Tensor]:
        parts, masked_kind = [], kind
        if mask is not None:
            by_block, parts = block_masks.mask_of(tf.constant(mask), (2, heads, queries, keys))
            masked_kind = dataclasses.replace(kind, mask=by_block)
        return differentiated(lambda *given: online_softmax.attend(masked_kind, *given, parts), given, weights)

    ours = in_blocks(query, key, value)
    theirs = differentiated(lambda *given: full_scores(kind, *given, mask), (query, key, value), weights)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-5)


def differentiated(function: Any, given: Any, weights: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(given)
        result = function(*given)
        loss = tf.reduce_sum(tf.cast(result, tf.float32) * weights)
    return [result, *tape.gradient(loss, given)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_sums_have_the_precision_of_keras(dtype: str):
    given = [tf.cast(drawn(2, 9, 2, 8), dtype) for _ in range(3)]
    weights, kind = drawn(2, 9, 2, 8), Attention(scale=0.5, is_causal=True, block=4)
    in_blocks = tf.function(functools.partial(online_softmax.attend, kind), autograph=False)
    ours = differentiated(in_blocks, given, weights)
    exact = [tf.cast(each, tf.float64) for each in given]
    best = differentiated(lambda *given: full_scores(kind, *given, None), exact, weights)
    theirs = differentiated(lambda *given: full_scores(kind, *given, None), given, weights)
    assert all(each.dtype == dtype for each in ours)
    for our, their, exact_one in zip(ours, theirs, best, strict=True):
        error, of_keras = (np.abs(np.asarray(each, "float64") - exact_one).max() for each in (our, their))
        assert error <= 2 * of_keras + 1e-12


def test_a_second_derivative_is_refused():
    given, kind = [drawn(1, 9, 2, 8) for _ in range(3)], Attention(scale=0.5)

    @tf.function(autograph=False)
    def second(query: tf.Tensor) -> Any:
        return tf.hessians(tf.reduce_sum(online_softmax.attend(kind, query, *given[1:]) ** 2), query)

    with pytest.raises(UnsupportedOperationError, match="no second derivative. Use ShardedStrategy"):
        second(given[0])


# --- masks -------------------------------------------------------------------------------------------

PADDING = RS.rand(2, 9) > 0.3
MASKS = {
    "causal of Keras": lambda padding: keras.layers.MultiHeadAttention(1, 1)._compute_attention_mask(
        tf.zeros([2, 9, 4]), tf.zeros([2, 9, 4]), query_mask=padding, value_mask=padding, use_causal_mask=True
    )[:, None],
    "causal of KerasHub": lambda padding: keras.ops.minimum(
        keras_hub.src.layers.modeling.transformer_layer_utils.compute_causal_mask(2, 9, 9),
        keras.ops.cast(padding[:, None], "int32"),
    )[:, None],
    "a band": lambda padding: tf.linalg.band_part(tf.ones([9, 9], "bool"), 3, 3)[None] & padding[:, None, :],
    "by values": lambda padding: tf.constant(RS.rand(2, 1, 9, 9) > 0.5),
}


@pytest.mark.parametrize("name", MASKS)
def test_blocks_of_a_mask_are_computed_from_its_parts(name: str):
    sizes: list[list[int]] = []

    @tf.function(autograph=False)
    def made(padding: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mask = MASKS[name](padding)
        if mask.shape.rank == 3:
            mask = mask[:, None]
        by_block, parts = block_masks.mask_of(mask, (2, 3, 9, 9))
        sizes.extend(each.shape.as_list() for each in parts)

        def block(i: int, j: int) -> tf.Tensor:
            found = by_block.block(parts, (tf.constant(i), tf.constant(j)), (3, 3))
            return tf.broadcast_to(found, [2, 1, 3, 3])

        rows = [tf.concat([block(i, j) for j in (0, 3, 6)], 3) for i in (0, 3, 6)]
        return tf.cast(mask, tf.bool), tf.concat(rows, 2)

    mask, blocks = made(tf.constant(PADDING))
    assert 0 < np.mean(mask) < 1, "premise"
    np.testing.assert_array_equal(np.broadcast_to(mask, blocks.shape), blocks)
    is_square = any(size[2] > 1 and size[3] > 1 for size in sizes)
    assert is_square == (name == "by values"), "no part has an element for each pair"


# --- models ------------------------------------------------------------------------------------------


class Block(keras.layers.Layer):
    def __init__(self, dropout: float = 0.0, scores: bool = False, key_heads: int | None = None, **options: Any):
        super().__init__(**options)
        self.supports_masking = True
        self.norm, self.up = keras.layers.LayerNormalization(), keras.layers.Dense(WIDTH, activation="gelu")
        self.attention = keras.layers.MultiHeadAttention(4, 4, dropout=dropout, seed=1)
        if key_heads is not None:
            self.attention = keras.layers.GroupQueryAttention(4, 4, key_heads)
        self.scores = scores

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.built = True

    def call(self, x, training=False):
        made = self.attention(
            self.norm(x), x, use_causal_mask=True, training=training, return_attention_scores=self.scores
        )
        return x + self.up(x + (made[0] if self.scores else made))


def transformer(mask_zero: bool = False, **options: Any) -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH, mask_zero=mask_zero)(inputs)
    for number in range(2):
        x = Block(name=f"layer_{number}", **options)(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0] + x[:, -1]))


def grouped() -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(inputs)
    x = x + keras.layers.GroupQueryAttention(4, 4, 2)(x, x, use_causal_mask=True)
    return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0] + x[:, -1]))


@dataclasses.dataclass(frozen=True)
class Setting:
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: {"batch": 4})
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    build: Any = transformer
    compiled: bool = False
    recompute: bool = False
    rows: int = 8


# The model axis shards the heads of the queries only.
HEADS = {".*query/kernel": (None, "model"), ".*output/kernel": ("model",), ".*": ()}
SETTINGS = {
    "stage 3": Setting(),
    "stage 0": Setting(strategy={"zero_stage": 0}),
    "stage 1": Setting(strategy={"zero_stage": 1}),
    "stage 2": Setting(strategy={"zero_stage": 2}),
    "padded": Setting(build=functools.partial(transformer, mask_zero=True)),
    "grouped queries": Setting(build=grouped),
    "a model axis": Setting(mesh={"batch": 2, "model": 2}, strategy={"layout_map": "auto"}),
    "a model axis, grouped queries": Setting(
        mesh={"batch": 1, "model": 4},
        strategy={"layout_map": HEADS},
        build=grouped,
    ),
    "replicas": Setting(mesh={"replica": 2, "batch": 2}),
    "microbatches": Setting(strategy={"microbatches": 2}),
    "recomputed": Setting(recompute=True),
    "a batch that the axis does not divide": Setting(rows=7),
    "compiled": Setting(compiled=True, build=functools.partial(transformer, mask_zero=True)),
    "compiled, microbatches": Setting(compiled=True, strategy={"microbatches": 2}),
    "compiled, recomputed": Setting(compiled=True, recompute=True),
    "compiled, replicas": Setting(compiled=True, mesh={"replica": 2, "batch": 2}),
    "compiled, a model axis": Setting(
        compiled=True,
        mesh={"batch": 2, "model": 2},
        strategy={"layout_map": "auto"},
        build=functools.partial(transformer, mask_zero=True),
    ),
    "compiled, a model axis, recomputed": Setting(
        compiled=True, mesh={"batch": 2, "model": 2}, strategy={"layout_map": "auto", "zero_stage": 0}, recompute=True
    ),
    "compiled, a model axis, sequence parallel": Setting(
        compiled=True, mesh={"batch": 1, "model": 4}, strategy={"layout_map": "auto", "sequence_parallel": True}
    ),
    "compiled, a model axis, one head of keys": Setting(
        compiled=True,
        mesh={"batch": 2, "model": 2},
        strategy={"layout_map": "auto"},
        build=functools.partial(transformer, key_heads=1),
    ),
}


def trained(build: Any, strategy: tfshard.ShardedStrategy, setting: Setting, data: Any, steps: int = 3) -> parity.Run:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(build())
    model.compile(ADAM(), LOSS, strategy=strategy, jit_compile=setting.compiled)
    if setting.recompute:
        strategy.recompute(model)
    return parity.Run(model=model, losses=[float(model.train_on_batch(*data)) for _ in range(steps)])


@table("settings of attention in blocks", "name", SETTINGS, always=["stage 3"])
def test_attention_in_blocks_trains_as_on_one_device(name: str):
    setting = SETTINGS[name]
    data = TOKENS[: setting.rows], LABELS[: setting.rows]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**setting.mesh), attention="flash", **setting.strategy)
    run = trained(setting.build, strategy, setting, data)
    assert [each.reason for each in attention.attention_runs(run.model)] == [""] * (1 if "grouped" in name else 2)
    if setting.compiled:
        assert all(each.programs for each in compiled_blocks.compiled_blocks(run.model)), "premise"
    expected = parity.train(setting.build, [data], optimizer=ADAM, loss=LOSS, steps=3, eager=True)
    parity.assert_same(run, expected, rtol=2e-5, atol=2e-6)


IN_BLOCKS = ("gpt2", "opt", "llama", "mistral", "gemma", "qwen", "bert", "bart")


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_families_train_as_on_one_device(name: str):
    run = families.train(name, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), attention="flash"))
    found = attention.attention_runs(run.model)
    assert found and not any(each.reason for each in found), "premise"
    tolerance = families.TOLERANCE
    parity.assert_same(run, families.reference(name), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_gemma_with_a_soft_cap_trains_as_on_one_device():
    def build() -> keras.Model:
        backbone = keras_hub.models.GemmaBackbone(
            vocabulary_size=56, num_layers=1, num_query_heads=4, num_key_value_heads=2, hidden_dim=8,
            intermediate_dim=16, head_dim=4, attention_logit_soft_cap=2.0, use_sliding_window_attention=True,
            sliding_window_size=3,
        )  # fmt: skip
        return families.spread(families.with_logits(backbone))

    data = families.batches("gemma")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), attention="flash")
    options = {"optimizer": families.optimizer, "loss": families.LOSS, "steps": 3}
    run = parity.train(build, data, strategy=strategy, **options)
    assert [each.reason for each in attention.attention_runs(run.model)] == [""], "premise"
    parity.assert_same(run, parity.train(build, data, eager=True, **options), rtol=5e-6, atol=5e-6)


REASONS = {
    "dropout": (functools.partial(transformer, dropout=0.3), "flash", "it has dropout on its attention weights"),
    "scores": (functools.partial(transformer, scores=True), "flash", "its attention scores are asked for"),
    "math": (transformer, "math", "the strategy has attention='math'"),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", REASONS)
def test_report_says_why_attention_is_not_in_blocks(name: str):
    build, choice, reason = REASONS[name]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), attention=choice)
    model = trained(build, strategy, Setting(), (TOKENS, LABELS), steps=1).model
    first, *others = [each for each in strategy.report(model).notes if "ttention" in each]
    assert first == "0 of 2 attention layers compute in blocks of queries and keys."
    assert len(others) == 2 and all(each.endswith(f"is not in blocks: {reason}.") for each in others)


@pytest.mark.slow
def test_auto_computes_in_blocks_from_a_number_of_pairs(monkeypatch):
    for least, in_blocks in ((LENGTH * LENGTH + 1, False), (LENGTH * LENGTH, True)):
        monkeypatch.setattr(attention, "LEAST_PAIRS", least)
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
        model = trained(functools.partial(transformer), strategy, Setting(), (TOKENS, LABELS), steps=1).model
        assert [each.reason == "" for each in attention.attention_runs(model)] == [in_blocks] * 2
        assert len([each for each in strategy.report(model).notes if "ttention" in each]) == in_blocks


@pytest.mark.slow
def test_models_without_a_strategy_compute_as_before():
    original = _private.keras_backend_nn.dot_product_attention
    with mock.patch.object(online_softmax, "attend", wraps=online_softmax.attend) as attend:
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), attention="flash")
        trained(transformer, strategy, Setting(), (TOKENS, LABELS), steps=1)
        assert attend.called, "premise"
        attend.reset_mock()
        plain = transformer()
        plain.compile("sgd", LOSS, jit_compile=False)
        plain.train_on_batch(TOKENS, LABELS)
        assert not attend.called
    assert not [patch for patch in layer_patch.patches_of(plain) if patch.change is layer_patch.ATTENTION]
    assert _private.keras_backend_nn.dot_product_attention is original


def test_an_unknown_choice_is_refused():
    with pytest.raises(StrategyError, match=r"attention must be one of \('auto', 'flash', 'math'\). Received: .*fast"):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), attention="fast")
