"""Vocabulary parallelism keeps tables, logits, losses and metrics sharded, and matches one device."""

import itertools
import pathlib
import tempfile

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from sweeps import each_value, table
from tfshard import _private
from tfshard.devices import transfer
from tfshard.operations import vocabulary

VOCABULARY, STEPS, WIDTH = 1024, 16, 16
MESHES = {"model4": {"model": 4}, "batch2_model2": {"batch": 2, "model": 2}}
RS = np.random.RandomState(0)
TOKENS = RS.randint(0, VOCABULARY, (8, STEPS))
LABELS = RS.randint(0, VOCABULARY, (8, STEPS))


def tied(softmax: bool = False) -> keras.Model:
    tokens = keras.Input((STEPS,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(VOCABULARY, WIDTH, name="table")
    x = keras.layers.LayerNormalization()(table(tokens))
    logits = table(x, reverse=True)
    return keras.Model(tokens, keras.layers.Softmax()(logits) if softmax else logits)


def untied() -> keras.Model:
    tokens = keras.Input((STEPS,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, name="table")(tokens)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY, name="head")(keras.layers.LayerNormalization()(x)))


def strategy(mesh: str, stage: int = 3) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), "auto", zero_stage=stage)


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-2, epsilon=1e-4)


ONE_HOT = np.eye(VOCABULARY, dtype="float32")[LABELS]
CASES = {
    "sparse tied": (tied, keras.losses.SparseCategoricalCrossentropy(from_logits=True), LABELS),
    "sparse untied": (untied, keras.losses.SparseCategoricalCrossentropy(from_logits=True), LABELS),
    "one-hot tied": (tied, keras.losses.CategoricalCrossentropy(from_logits=True), ONE_HOT),
    "label smoothing": (untied, keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), ONE_HOT),
    "probabilities": (lambda: tied(softmax=True), keras.losses.SparseCategoricalCrossentropy(), LABELS),
}


@pytest.mark.sweep(1)
@table("losses of vocabularies", ("case", "mesh"), itertools.product(CASES, MESHES), always=each_value(CASES, MESHES))
def test_losses_match_one_device(case, mesh):
    build, loss, labels = CASES[case]
    batches, settings = [(TOKENS, labels)], {"optimizer": adam, "loss": loss, "steps": 4}
    run = parity.train(build, batches, strategy=strategy(mesh), **settings)
    assert run.model.get_layer("table").embeddings.value.layout.compute == ("model", None)
    parity.assert_same(run, parity.train(build, batches, **settings), rtol=0, atol=2e-5)


def sparse_metrics() -> list:
    top = keras.metrics.SparseTopKCategoricalAccuracy
    return ["accuracy", top(k=5, name="top5"), keras_hub.metrics.Perplexity(from_logits=True, name="perplexity")]


def dense_metrics() -> list:
    return ["accuracy", keras.metrics.TopKCategoricalAccuracy(k=20, name="top20")]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["sparse", "one-hot"])
def test_metrics_match_one_device_and_gather_nothing(kind, mesh):
    # Rounded weights give equal logits: the first of several highest logits counts.
    metrics, labels = (sparse_metrics, LABELS) if kind == "sparse" else (dense_metrics, ONE_HOT)
    loss = (keras.losses.SparseCategoricalCrossentropy if kind == "sparse" else keras.losses.CategoricalCrossentropy)(
        from_logits=True
    )

    def build():
        keras.utils.set_random_seed(0)
        model = untied()
        rs = np.random.RandomState(1)
        model.set_weights([np.sign(rs.randn(*w.shape)) * (w.ndim > 1) + (w.ndim == 1) for w in model.get_weights()])
        return model

    reference, model = build(), tfshard.as_distributed(build())
    reference.compile("sgd", loss, metrics=metrics())
    model.compile("sgd", loss, metrics=metrics(), strategy=strategy(mesh))
    ours = model.evaluate(TOKENS, labels, batch_size=8, verbose=0, return_dict=True)
    theirs = reference.evaluate(TOKENS, labels, batch_size=8, verbose=0, return_dict=True)
    assert ours.keys() == theirs.keys()
    assert len(ours) == len(metrics()) + 1
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
    # These labels agree with the predictions more than by chance, which makes the metrics meaningful.
    predicted = np.argmax(reference.predict(TOKENS, verbose=0), -1)
    picked = np.where(RS.rand(*LABELS.shape) < 0.5, predicted, LABELS)
    picked = picked if kind == "sparse" else np.eye(VOCABULARY, dtype="float32")[picked]
    right = model.evaluate(TOKENS, picked, batch_size=8, verbose=0, return_dict=True)["accuracy"]
    assert 0.3 < right < 0.7
    expected = reference.evaluate(TOKENS, picked, batch_size=8, verbose=0, return_dict=True)["accuracy"]
    assert right == pytest.approx(expected)


def largest_allocation(model: keras.Model, batch: tuple) -> int:
    """Return the bytes of a step's largest tensor on any device, as far as a trace reports them (256 KiB and more)."""
    model.train_on_batch(*batch)
    with tempfile.TemporaryDirectory() as directory:
        with tf.profiler.experimental.Profile(directory, tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)):
            model.train_on_batch(*batch)
            model.get_weights()
        (file,) = pathlib.Path(directory).rglob("*.xplane.pb")
        trace = _private.read_trace(file.read_bytes())
    return max(e.stats["requested_bytes"] for e in trace if e.name == "MemoryAllocation")


def test_no_device_holds_or_sends_whole_logits():
    rows = 64
    tokens, labels = np.resize(TOKENS, (rows, STEPS)), np.resize(LABELS, (rows, STEPS))
    whole = rows * STEPS * VOCABULARY * 4
    model = tfshard.as_distributed(tied())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=sparse_metrics(), strategy=strategy("model4", stage=0))
    profile = tfshard.profile_step(model, (tokens, labels))
    assert profile.count("all-gather") == 0
    assert max(c.bytes or 0 for c in profile.collectives) < whole / 16
    # Premise: the trace reports a share of the logits.
    assert whole / 4 <= largest_allocation(model, (tokens, labels)) < whole / 2


def test_a_lookup_sends_its_result_and_not_the_table():
    model = tfshard.as_distributed(untied())
    model.compile("sgd", "mse", strategy=strategy("batch2_model2", stage=0))
    profile = tfshard.profile_step(model, (TOKENS, ONE_HOT))
    assert profile.count("all-gather") == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_mixed_precision_keeps_the_table_sharded(mesh):
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        model = tfshard.as_distributed(tied())
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(adam(), loss, strategy=strategy(mesh, stage=0))
    losses = [float(model.train_on_batch(TOKENS, LABELS)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert tfshard.profile_step(model, (TOKENS, LABELS)).count("all-gather") == 0


def test_ids_beyond_the_table_and_negative_ones_are_as_on_one_device():
    """Keras counts negative ids from the end."""
    tokens = TOKENS.copy()
    tokens[0, :4] = [-1, -VOCABULARY, 0, VOCABULARY - 1]
    model = tfshard.as_distributed(untied())
    expected = model.predict(tokens, verbose=0)
    model.compile("sgd", "mse", strategy=strategy("batch2_model2"))
    np.testing.assert_allclose(model.predict(tokens, verbose=0), expected, atol=1e-5)


@pytest.mark.slow
def test_a_remainder_batch_is_looked_up_whole():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    reference = untied()
    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(untied())
    reference.compile(parity.dense_gradients(adam()), loss, jit_compile=False)
    model.compile(adam(), loss, strategy=strategy("batch2_model2"))
    settings = {"batch_size": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    ours = model.fit(TOKENS, LABELS, **settings).history["loss"]
    np.testing.assert_allclose(ours, reference.fit(TOKENS, LABELS, **settings).history["loss"], rtol=1e-5)


def dense(x, kernel):
    return tf.nn.bias_add(tf.matmul(x[:, 0], kernel), tf.zeros(VOCABULARY))


def dense_of_sequences(x, kernel):
    return tf.nn.softmax(tf.tensordot(x, kernel, 1) + tf.zeros(VOCABULARY))


def tied_logits(x, table):
    return tf.cast(tf.matmul(x, tf.transpose(table)), tf.float32)


def einsum_dense(x, kernel):
    return tf.math.tanh(tf.einsum("abc,cd->abd", x, kernel))


@pytest.mark.parametrize("batch", [8, None])
@pytest.mark.parametrize("sharded", ["vocabulary", "width", "nothing"])
@pytest.mark.parametrize("head", [dense, dense_of_sequences, tied_logits, einsum_dense])
def test_whether_predictions_are_sharded_is_read_off_the_graph(head, sharded, batch):
    """The logits have the same size each time. Also works if the batch size is unknown."""
    mesh = tfshard.create_mesh(batch=2, model=2)
    dims = ["width", "vocabulary"] if head is not tied_logits else ["vocabulary", "width"]
    sizes = {"width": WIDTH, "vocabulary": VOCABULARY}
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, (batch, STEPS, WIDTH))
        stored = tf.compat.v1.placeholder(tf.float32, [sizes[dim] for dim in dims])
        kernel = transfer.relayout(stored, tuple("model" if dim == sharded else None for dim in dims), mesh)
        scores = head(x, kernel)
        assert scores.shape[-1] == VOCABULARY
        assert vocabulary.sharded_axis(scores) == ("model" if sharded == "vocabulary" else None)
