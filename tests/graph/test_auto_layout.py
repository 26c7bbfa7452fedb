"""auto_layout_map finds layouts in a model's computation."""

import itertools
import re

import keras
import keras_hub
import numpy as np
import pytest

import parity
import tfshard
from sweeps import each_value, table
from tfshard.graph import auto_layout, dim_rules, model_graph

MESHES = {"model4": {"model": 4}, "batch2_model2": {"batch": 2, "model": 2}}


def rules(model, mesh=None) -> dict:
    """Map each pattern to its kind or axes."""
    found = tfshard.auto_layout_map(model, mesh or {"model": 4})
    return {p: rule.axes if rule.kind == "axes" else rule.kind for p, rule in found.items()}


def block(x: keras.KerasTensor, kind: str, i: int) -> keras.KerasTensor:
    """Return a feed-forward or attention block as users write it of Dense and EinsumDense."""
    normed = keras.layers.LayerNormalization(name=f"norm_{i}")(x)
    if kind == "dense":
        y = keras.layers.Dense(64, activation="gelu", name=f"expand_{i}")(normed)
        return x + keras.layers.Dense(16, name=f"contract_{i}")(y)
    if kind == "gated":
        gate = keras.layers.Dense(64, activation="silu", name=f"gate_{i}")(normed)
        y = gate * keras.layers.Dense(64, name=f"linear_{i}")(normed)
        return x + keras.layers.Dense(16, name=f"contract_{i}")(y)
    if kind == "einsum":
        y = keras.layers.EinsumDense("btd,df->btf", (None, 64), bias_axes="f", name=f"first_{i}")(normed)
        y = keras.layers.Activation("relu")(y)
        return x + keras.layers.EinsumDense("btf,fd->btd", (None, 16), bias_axes="d", name=f"second_{i}")(y)
    heads = [
        keras.ops.reshape(keras.layers.Dense(16, name=f"{name}_{i}")(normed), (-1, 6, 4, 4)) for name in ("q", "k", "v")
    ]
    scores = keras.ops.softmax(keras.ops.einsum("bqhd,bkhd->bhqk", heads[0], heads[1]) / 2.0)
    mixed = keras.ops.reshape(keras.ops.einsum("bhqk,bkhd->bqhd", scores, heads[2]), (-1, 6, 16))
    return x + keras.layers.Dense(16, name=f"mix_{i}")(mixed)


def written_by_hand(kind: str):
    def build() -> keras.Model:
        x = inputs = keras.Input((6, 16))
        for i in range(2):
            x = block(x, kind, i)
        return keras.Model(inputs, keras.layers.Dense(3, name="head")(keras.layers.Flatten()(x)))

    return build


EXPECTED = {
    "dense": {r"expand_\d+": "column", r"contract_\d+": "row"},
    "gated": {r"gate_\d+": "column", r"linear_\d+": "column", r"contract_\d+": "row"},
    "einsum": {r"first_\d+": "column", r"second_\d+": "row"},
    "attention": {r"q_\d+": "column", r"k_\d+": "column", r"v_\d+": "column", r"mix_\d+": "row"},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_blocks_written_by_hand_are_recognised_by_what_they_compute(kind):
    found = rules(written_by_hand(kind)())
    assert {p: rule for p, rule in found.items() if rule in ("column", "row")} == EXPECTED[kind]


@pytest.mark.sweep(1)
@table(
    "blocks written by hand", ("kind", "mesh"), itertools.product(EXPECTED, MESHES), always=each_value(EXPECTED, MESHES)
)
def test_blocks_written_by_hand_match_one_device(kind, mesh):
    rs = np.random.RandomState(0)
    batches = [(rs.randn(8, 6, 16).astype("float32"), rs.randn(8, 3).astype("float32"))]
    settings = {"optimizer": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-4), "loss": "mse", "steps": 5}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), "auto", zero_stage=3)
    run = parity.train(written_by_hand(kind), batches, strategy=strategy, **settings)
    assert "model" in parity.shard_axes(run.model)
    parity.assert_same(run, parity.train(written_by_hand(kind), batches, **settings), rtol=0, atol=2e-5)


def test_names_do_not_matter():
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(64, activation="relu", name="attention_output")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(16, name="query")(hidden))
    assert rules(model) == {"attention_output": "column", "query": "row"}


def test_a_chain_of_layers_alternates():
    x = inputs = keras.Input((32,))
    for i in range(4):
        x = keras.layers.Dense(32, activation="relu", name=f"d{'abcd'[i]}")(x)
    assert rules(keras.Model(inputs, x)) == {"da": "column", "db": "row", "dc": "column", "dd": "row"}


def test_what_a_normalization_needs_whole_stays_whole_and_the_map_says_why():
    inputs = keras.Input((32,))
    x = keras.layers.Dense(32, name="first")(inputs)
    x = keras.layers.LayerNormalization()(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="head")(x))
    found = tfshard.auto_layout_map(model, {"model": 4})
    assert found["first/kernel"].axes == ()
    assert "needs all of the sharded dim" in found["first/kernel"].reason
    assert "replicated (" in repr(found)
    # With an explicit entry, compile does not warn.
    model = tfshard.as_distributed(model)
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(model=4), found))


def gpt2(**changes) -> keras.Model:
    sizes = {"vocabulary_size": 64, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "intermediate_dim": 32}
    backbone = keras_hub.models.GPT2Backbone(**{**sizes, **changes}, max_sequence_length=8, dropout=0.0)
    return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))


def test_gpt2_is_sharded_as_megatron_does():
    found = rules(gpt2())
    attention, layer = r"transformer_layer_\d+/self_attention", r"transformer_layer_\d+"
    assert found == {
        "token_embedding/embeddings": ("model",),
        f"{attention}/query": "column",
        f"{attention}/key": "column",
        f"{attention}/value": "column",
        f"{attention}/attention_output": "row",
        f"{layer}/feedforward_intermediate_dense": "column",
        f"{layer}/feedforward_output_dense": "row",
    } | {p: axes for p, axes in found.items() if axes == ()}


def test_fewer_key_and_value_heads_than_devices_stay_whole():
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=32, num_layers=1, num_query_heads=4, num_key_value_heads=2, hidden_dim=16, intermediate_dim=16
    )
    four, two = tfshard.auto_layout_map(backbone, {"model": 4}), tfshard.auto_layout_map(backbone, {"model": 2})
    attention = r"transformer_layer_0/self_attention"
    assert four[f"{attention}/query"].kind == "column"
    assert four[f"{attention}/key/kernel"].axes == ()
    assert "dim 1 of size 2 is not divisible by 4" in four[f"{attention}/key/kernel"].reason
    assert two[f"{attention}/key"].kind == two[f"{attention}/value"].kind == "column"


def test_parameters_of_a_transformer_are_shared_out_evenly():
    model = tfshard.abstract_model(lambda: gpt2(hidden_dim=256, intermediate_dim=1024, vocabulary_size=8192))
    plan = tfshard.plan(model, {"model": 4}, "auto", zero_stage=0)
    # Counted by hand: the table; query, key and value with biases, the output projection, and the two feed-forward
    # kernels.
    layer = 3 * (256 * 256 + 256) + 256 * 256 + (256 * 1024 + 1024) + 1024 * 256
    sharded = 8192 * 256 + 2 * layer
    # Biases of row layers, two normalizations per layer and one at the end, and eight positions.
    whole = 2 * (2 * 256 + 2 * 2 * 256) + 2 * 256 + 8 * 256
    assert plan.bytes_on_one_device("parameter") == 4 * (sharded + whole)
    assert plan.bytes_per_device("parameter") == 4 * (sharded // 4 + whole)
    assert whole < 0.01 * sharded, "evenly"


def test_the_map_can_be_changed_and_used():
    found = tfshard.auto_layout_map(gpt2(), {"batch": 2, "model": 2})
    pattern = next(p for p in found if p.endswith("feedforward_intermediate_dense"))
    del found[pattern]
    found.column(pattern)
    model = tfshard.as_distributed(gpt2())
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), found))
    assert "model" in parity.shard_axes(model)


def test_without_a_model_axis_the_map_is_empty():
    assert len(tfshard.auto_layout_map(gpt2(), {"batch": 4})) == 0
    assert len(tfshard.auto_layout_map(gpt2(), {"batch": 4, "model": 1})) == 0


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.up = keras.layers.Dense(16, activation="relu", name="up")
        self.down = keras.layers.Dense(4, name="down")

    def call(self, inputs):
        return self.down(self.up(inputs["x"] if isinstance(inputs, dict) else inputs))


def test_a_model_that_its_first_step_builds_is_sharded_then():
    model = tfshard.as_distributed(Subclassed())
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), "auto"))
    assert not model.built
    model.fit(np.ones((8, 6), "float32"), np.ones((8, 4), "float32"), batch_size=4, verbose=0)
    assert model.up.kernel.value.layout.compute == (None, "model")
    assert model.down.kernel.value.layout.compute == ("model", None)


def test_a_model_born_in_scope_is_sharded_at_the_end_of_it():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), "auto")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = gpt2()
        model.compile("adam", "mse")
    assert model.get_layer("token_embedding").embeddings.value.layout.compute == ("model", None)
    keras.utils.set_random_seed(0)
    for ours, theirs in zip(model.get_weights(), gpt2().get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_unknown_inputs_are_an_error_that_asks_for_an_example():
    model = Subclassed()
    with pytest.raises(
        tfshard.errors.LayoutError, match=r"is not built.*keras.Input, or call model.build\(input_shape\)"
    ):
        tfshard.auto_layout_map(model, {"model": 4})
    example = {"x": np.ones((2, 6), "float32")}
    model(example)
    with pytest.raises(tfshard.errors.LayoutError, match="Give an example: inputs="):
        tfshard.auto_layout_map(model, {"model": 4})
    assert tfshard.auto_layout_map(model, {"model": 4}, inputs=example)[re.escape(model.up.path)].kind == "column"


def test_several_axes_besides_batch_are_ambiguous():
    with pytest.raises(tfshard.errors.LayoutError, match="Name one axis 'model'"):
        tfshard.auto_layout_map(gpt2(), {"rows": 2, "columns": 2})
    assert len(tfshard.auto_layout_map(gpt2(), {"batch": 2, "tensor": 2})) > 0


def test_tracing_allocates_nothing_and_reads_no_value():
    model = tfshard.abstract_model(gpt2)
    graph = model_graph.trace(model)
    assert len(graph.variables) == len(model.variables)
    assert auto_layout.choose(graph, 4)[0]["token_embedding/embeddings"] == 0


@pytest.mark.parametrize(
    ("before", "after", "dim", "devices", "to"),
    [
        ((2, 6, 16), (2, 6, 4, 4), 2, 4, 2),
        ((2, 6, 4, 4), (2, 6, 16), 2, 4, 2),
        ((2, 6, 4, 4), (2, 6, 16), 3, 4, None),
        ((2, 6, 16), (12, 16), 2, 4, 1),
        ((12, 16), (2, 6, 16), 1, 4, 2),
        ((2, 6, 16), (2, 6, 2, 8), 2, 4, None),
        ((2, 16), (2, 1, 16), 1, 4, 2),
        ((4, 6), (24,), 0, 4, 0),
        ((4, 6), (6, 4), 0, 2, None),
    ],
)
def test_reshape_keeps_a_sharded_dim_only_in_front(before, after, dim, devices, to):
    import tensorflow as tf

    with tf.Graph().as_default():
        tensor = tf.reshape(tf.zeros(before), after)
    outcome = dim_rules.advance(tensor.op, 0, dim, devices)
    assert (outcome.outputs[0][1] if isinstance(outcome, dim_rules.Flow) else None) == to


@pytest.mark.parametrize(("dtype", "to"), [("int32", 1), ("float16", None)])
def test_a_bitcast_keeps_a_sharded_dim_if_elements_keep_their_size(dtype, to):
    import tensorflow as tf

    with tf.Graph().as_default():
        tensor = tf.bitcast(tf.zeros((4, 6)), dtype)
    outcome = dim_rules.advance(tensor.op, 0, 1, 2)
    assert (outcome.outputs[0][1] if isinstance(outcome, dim_rules.Flow) else None) == to


# --- The communication of a step -------------------------------------------------------------------------

WIDTH, LENGTH, BATCH, LAYERS, VOCABULARY = 128, 128, 32, 2, 2048
HUB = {"vocabulary_size": VOCABULARY, "num_layers": LAYERS, "hidden_dim": WIDTH, "intermediate_dim": 512}


def language_model(family: str) -> keras.Model:
    models = keras_hub.models
    backbone = {
        "gpt2": lambda: models.GPT2Backbone(**HUB, num_heads=4, max_sequence_length=LENGTH, dropout=0.0),
        "llama": lambda: models.LlamaBackbone(**HUB, num_query_heads=4, num_key_value_heads=2),
        "bart": lambda: models.BartBackbone(**HUB, num_heads=4, max_sequence_length=LENGTH, dropout=0.0),
    }[family]()
    outputs = backbone.output["decoder_sequence_output"] if family == "bart" else backbone.output
    return keras.Model(backbone.input, backbone.token_embedding(outputs, reverse=True))


def batch_of(family: str) -> tuple:
    # Large enough for a trace to report the bytes of each activation: 256 KiB and more in a ring's chunk.
    tokens = np.random.RandomState(0).randint(0, VOCABULARY, (BATCH, LENGTH))
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    if family == "bart":
        inputs = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in inputs.items()}
    return inputs, tokens


@pytest.mark.sweep(1)
@table(
    "activations by trace", ("family", "mesh", "stage"),
    [("gpt2", "model4", 0), ("gpt2", "batch2_model2", 3), ("llama", "model4", 3), ("bart", "model4", 0)],
    always=[("gpt2", "batch2_model2", 3), ("llama", "model4", 3)],
)  # fmt: skip
def test_a_step_sends_the_activations_that_were_planned(family, mesh, stage):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), "auto", zero_stage=stage)
    model = tfshard.as_distributed(language_model(family))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], strategy=strategy)
    batch = batch_of(family)
    plan, profile = strategy.plan(model, inputs=batch[0]), tfshard.profile_step(model, batch)
    tfshard.measure.assert_matches_plan(profile, plan)
    if len(MESHES[mesh]) == 1:  # On several axes, gathers are all-reduces.
        planned = sum(c.count * c.bytes for c in plan.collectives if c.kind != "all-gather")
        assert profile.bytes("all-reduce") == pytest.approx(planned, rel=0.05)
    if (family, mesh) == ("gpt2", "model4"):
        # Megatron's count, with loss and metrics in the remainder; and no collective is as large as the full logits.
        assert len(profile.collectives) == profile.count("all-reduce") <= 4 * LAYERS + 6
        assert max(c.bytes or 0 for c in profile.collectives) < BATCH * LENGTH * VOCABULARY * 4 / 8


def odd(strategy: tfshard.ShardedStrategy) -> keras.Model:
    model = tfshard.Sequential([keras.Input((6,)), keras.layers.Dense(7, name="up"), keras.layers.Dense(3)])
    model.compile("sgd", "mse", strategy=strategy)
    return model


def test_auto_that_finds_nothing_to_shard_is_an_error_as_a_written_map_is():
    mesh = tfshard.create_mesh(batch=2, model=2)
    text = "found nothing to shard over it.*Leave the axis out of the mesh.*layout_map={'.*': .*up/kernel': dim 0"
    with pytest.raises(tfshard.errors.LayoutError, match="'model'.*" + text):
        odd(tfshard.ShardedStrategy(mesh, "auto"))
    # The same holds for a model that its first step builds.
    late = tfshard.Sequential([keras.layers.Dense(7, name="up"), keras.layers.Dense(3)])
    late.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(mesh, "auto"))
    late.build((None, 6))
    with pytest.raises(tfshard.errors.LayoutError, match=text):
        late.fit(np.ones((8, 6)), np.ones((8, 3)), verbose=0)
    (finding,) = tfshard.lint(odd(tfshard.ShardedStrategy(mesh, {".*": ()})), mesh, "auto")
    assert (finding.kind, finding.is_error, finding.where) == ("left whole", True, "axis 'model'")
    # Without a model axis nothing needs a layout.
    odd(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), "auto"))


class Distilled(keras.Model):
    """keras.io's knowledge distillation: only the loss reads the teacher."""

    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.student = keras.Sequential(
            [keras.Input((8, 8, 3)), keras.layers.Flatten(), dense(16, "relu", name="up"), dense(6, name="down")]
        )
        conv = [keras.layers.Conv2D(8, 3, name=name, padding="same") for name in ("first", "second")]
        pool = keras.layers.MaxPooling2D(2, 1, "same")
        self.teacher = keras.Sequential(
            [keras.Input((8, 8, 3)), conv[0], pool, conv[1], keras.layers.Flatten(), dense(6, name="head")]
        )

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        theirs, ours = keras.ops.softmax(self.teacher(x, training=False)), keras.ops.softmax(y_pred)
        hard = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return keras.ops.mean(hard + keras.losses.kl_divergence(theirs, ours))


def test_what_only_a_loss_reads_stays_whole_and_trains_as_on_one_device():
    x, y = np.random.RandomState(0).normal(size=(16, 8, 8, 3)).astype("float32"), np.arange(16) % 6
    found = []
    for sharded in (False, True):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = Distilled()
        options = {"jit_compile": False}
        if sharded:
            model = tfshard.as_distributed(model)
            options = {"strategy": tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), "auto")}
        model.compile(keras.optimizers.Adam(0.01), **options)
        found.append(model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"])
    axes = {each.path: each.value.layout.compute for each in model.trainable_variables}
    assert axes["sequential/up/kernel"] == (None, "model"), "premise: what the call reads is sharded"
    assert all(not any(each) for path, each in axes.items() if path.startswith("sequential_1"))
    assert "the model's call does not read it" in str(tfshard.auto_layout_map(model, {"model": 2}))
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_the_shape_of_a_broadcast_has_no_sharded_dim():
    import tensorflow as tf

    with tf.Graph().as_default():
        operation = tf.broadcast_to(tf.zeros(()), tf.stack([tf.random.uniform([], 1, 9, tf.int32), 6])).op
        operation.outputs[0].set_shape((4, 6))
    assert dim_rules.sources(operation, 0, 0) == ()
