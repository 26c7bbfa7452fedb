"""Products of 8-bit integers are exact for any sharding of their operands, and gather no kernel.

Products of samples with samples match one device.
"""

import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from sweeps import table
from tfshard.devices import transfer
from tfshard.graph import dim_rules

RS = np.random.RandomState(0)
ROWS = RS.randint(-128, 128, (8, 4, 2048)).astype("int8")
KERNEL = RS.randint(-128, 128, (2048, 8)).astype("int8")
# A sum that float32 would round.
ROWS[0, 0], KERNEL[:, 0] = 127, 127
ROWS[0, 0, 0] = 126

MESHES = {"batch": {"batch": 4}, "batch x model": {"batch": 2, "model": 2}, "model": {"model": 4}}
# The layouts of both operands and of the result.
WAYS = {
    "whole kernel": (None, (None, None), None),
    "column": (None, (None, "model"), "model"),
    "row": ("model", ("model", None), None),
}


@table(
    "products of integers", ("mesh", "way", "transposed"),
    [(mesh, way, transposed) for mesh, way, transposed in itertools.product(MESHES, WAYS, (False, True))
     if "model" in mesh or way == "whole kernel"],
    sample=1, always=[("batch", "whole kernel", False), ("batch x model", "column", True),
                      ("batch x model", "row", False), ("model", "column", False)],
)  # fmt: skip
def test_a_product_of_integers_is_that_of_one_device(mesh: str, way: str, transposed: bool):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    batch = "batch" if "batch" in mesh else None
    of_rows, of_kernel, of_result = WAYS[way]
    if transposed:
        of_kernel = of_kernel[::-1]
    rows = transfer.host_to_mesh(ROWS, (batch, None, of_rows), strategy.mesh)
    kernel = transfer.host_to_mesh(KERNEL.T if transposed else KERNEL, of_kernel, strategy.mesh)

    def product(rows, kernel):
        return tf.matmul(rows, kernel, transpose_b=transposed, output_type=tf.int32)

    with strategy.extended.results_stay_sharded():
        found = strategy.run(tf.function(product), args=(rows, kernel))
    expected = ROWS.astype("int64") @ KERNEL.astype("int64")
    assert int(np.float32(expected.max())) != expected.max(), "premise"
    assert found.dtype == tf.int32
    np.testing.assert_array_equal(transfer.to_host(found), expected)
    assert transfer.axes_of(dtensor.fetch_layout(found)) == (batch, None, of_result)


class Contrastive(keras.Model):
    """Pictures and texts, each compared with the full batch, as in CLIP's training."""

    def __init__(self, product: str):
        super().__init__()
        dense = keras.layers.Dense
        self.pictures = keras.Sequential([keras.Input((6, 6, 2)), keras.layers.Conv2D(4, 3), keras.layers.Flatten()])
        self.pictures.add(dense(16, "relu", name="picture_up"))
        self.pictures.add(dense(8, name="picture_down"))
        # DTensor's layouts fail at the products with CELU. A GELU computes its derivative with it, and would not fail.
        self.texts = keras.Sequential(
            [keras.Input((5,)), dense(16, "celu", name="text_up"), dense(8, name="text_down")]
        )
        self.product = product
        self.seen = [keras.metrics.Mean(name="loss")]
        self.seen += [keras.metrics.SparseCategoricalAccuracy(name=name) for name in ("pictures_right", "texts_right")]

    def call(self, inputs):
        pictures, texts = self.pictures(inputs[0]), self.texts(inputs[1])
        pictures, texts = keras.ops.normalize(pictures), keras.ops.normalize(texts)
        if self.product == "einsum":
            return 5 * keras.ops.einsum("nd,md->nm", pictures, texts)
        if self.product == "views":  # The numbers of samples differ.
            return 5 * keras.ops.matmul(pictures, keras.ops.transpose(keras.ops.concatenate([texts, -texts], 0)))
        return 5 * keras.ops.matmul(pictures, keras.ops.transpose(texts))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            scores = self(data[0])
            count = keras.ops.shape(scores)[0]
            numbers, both = keras.ops.arange(count), [scores, keras.ops.transpose(scores)[:count]]
            loss = keras.losses.sparse_categorical_crossentropy
            value = sum(keras.ops.mean(loss(numbers, each, from_logits=True)) for each in both)
        self.optimizer.apply(tape.gradient(value, self.trainable_weights), self.trainable_weights)
        self.seen[0].update_state(value)
        for metric, each in zip(self.seen[1:], both, strict=True):
            metric.update_state(numbers, each)
        return {metric.name: metric.result() for metric in self.seen}

    @property
    def metrics(self):
        return self.seen


SAMPLES = (RS.normal(size=(16, 6, 6, 2)).astype("float32"), RS.normal(size=(16, 5)).astype("float32"))
TENSOR = {
    r".*_up/kernel": (None, "model"),
    r".*_up/bias": ("model",),
    r".*_down/kernel": ("model", None),
    r".*conv2d/kernel": (),
}
IN_BATCH = [("matmul", {"batch": 4}), ("einsum", {"batch": 4}), ("views", {"batch": 4}),
            ("matmul", {"batch": 2, "model": 2}), ("matmul", {"replica": 2, "batch": 2})]  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("product", "mesh"), IN_BATCH)
def test_a_loss_of_samples_with_samples_trains_as_on_one_device(product: str, mesh: dict[str, int]):
    histories = []
    for sharded in (False, True):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model, options = Contrastive(product), {"jit_compile": False}
        model([samples[:8] for samples in SAMPLES])
        if sharded:
            model = tfshard.as_distributed(model)
            options = {
                "strategy": tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), TENSOR if "model" in mesh else None)
            }
        model.compile(keras.optimizers.Adam(0.01), **options)
        data = tf.data.Dataset.from_tensor_slices((SAMPLES,)).batch(8)
        histories.append(model.fit(data, epochs=2, shuffle=False, verbose=0).history)
    kernel = model.texts.layers[0].kernel.value.layout
    assert kernel.compute == ((None, "model") if "model" in mesh else (None, None)), "premise"
    for name, expected in histories[0].items():
        np.testing.assert_allclose(histories[1][name], expected, rtol=1e-5, err_msg=name)
    assert abs(np.subtract(*histories[0]["loss"])) > 1e-2, "premise: it learns"


def nearest(_, y_pred):
    """A loss of samples with samples: the mean distance of each sample from all samples."""
    return tf.reduce_mean(each_with_each(y_pred), 1)


def scores(_, y_pred):
    """A loss of samples with samples: the mean score of each sample with all samples."""
    return tf.reduce_mean(tf.matmul(y_pred, y_pred, transpose_b=True), 1)


@pytest.mark.parametrize("loss", [nearest, scores])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_of_samples_with_samples_warns_in_microbatches_where_it_is_another(loss, microbatches):
    x, losses = SAMPLES[1][:8], []
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2), microbatches=microbatches)
    for sharded in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
        if sharded:
            model = tfshard.as_distributed(model)
        model.compile("sgd", loss, **({"strategy": strategy} if sharded else {"jit_compile": False}))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses.append(model.train_on_batch(x, x))
    texts = [str(each.message) for each in told]
    assert any("compares samples with each other" in text for text in texts) == (microbatches == 2), texts
    assert np.isclose(*losses, rtol=1e-5) == (microbatches == 1)


def distances(x):
    squares = tf.reduce_sum(x * x, 1)
    return squares[:, None] - 2 * x @ tf.transpose(x) + squares[None]


def each_with_each(x):
    return tf.reduce_sum(tf.abs(x[:, None] - x[None]), -1)


# Functions of (samples, kernel).
PRODUCTS = {
    "m @ m": lambda x, m: x @ (m @ m),
    "m @ m @ m": lambda x, m: x @ (m @ m @ m),
    "transposed first": lambda x, m: x @ tf.matmul(m, m, transpose_a=True),
    "transposed second": lambda x, m: x @ tf.matmul(m, m, transpose_b=True),
    "orthogonal regularizer": lambda x, m: keras.regularizers.OrthogonalRegularizer(0.1)(m) + x[0, 0],
    "keras.ops.dot": lambda x, m: x @ keras.ops.dot(m, m),
    "einsum": lambda x, m: x @ tf.einsum("ij,jk->ik", m, m),
    "tensordot": lambda x, m: x @ tf.tensordot(m, m, 1),
    "of a stack": lambda x, m: x @ (tf.stack([m, m]) @ tf.stack([m, m]))[0],
    "expm": lambda x, m: x @ tf.linalg.expm(m * 0.1),
    "distances by products": lambda x, m: tf.nn.log_softmax(-distances(x)),
    "distances by differences": lambda x, m: tf.nn.log_softmax(-each_with_each(x @ m)),
    "distances beside products": lambda x, m: tf.nn.softmax(-distances(x)) * each_with_each(x) @ (x @ m),
    "hard negatives": lambda x, m: tf.nn.relu(1 + each_with_each(x @ m) - tf.reduce_min(each_with_each(x), 1)[:, None]),
}
SQUARE = (RS.normal(size=(6, 6)) * 0.4).astype("float32")
POINTS = RS.normal(size=(16, 6)).astype("float32")


def assert_matches(function, axes):
    """Compare a function of samples and a kernel, and its gradients, with one device."""

    @tf.autograph.experimental.do_not_convert
    def step(x, m, read=lambda m: m):
        with tf.GradientTape() as tape:
            tape.watch([x, m])
            kernel = read(m)
            result = function(tf.tanh(x @ kernel), kernel)
            loss = tf.reduce_mean(tf.sin(result))
        return [result, *tape.gradient(loss, [x, m])]

    expected = tf.function(step)(tf.constant(POINTS), tf.constant(SQUARE))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), zero_stage=0)
    given = (
        transfer.host_to_mesh(POINTS, ("batch", None), strategy.mesh),
        transfer.host_to_mesh(SQUARE, axes, strategy.mesh),
    )
    # With the kernel read as a variable.
    found = strategy.run(
        tf.function(lambda x, m: step(x, m, lambda m: transfer.relayout(m, axes, strategy.mesh)), autograph=False),
        args=given,
    )
    for ours, theirs in zip(found, expected, strict=True):
        far = 1e-5 * max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(transfer.to_host(ours), theirs, rtol=1e-4, atol=far)


@table(
    "products of a tensor with itself", ("name", "axes"),
    # DTensor refuses one gradient after a row kernel (docs/limits.md).
    [
        case
        for case in itertools.product(PRODUCTS, [(None, "model"), ("model", None), (None, None)])
        if case != ("distances by differences", ("model", None))
    ],
    always=[("m @ m", ("model", None)), ("distances by products", (None, "model"))], sample=4,
)  # fmt: skip
def test_a_product_of_a_kernel_or_samples_with_themselves_matches_one_device(name, axes):
    assert_matches(PRODUCTS[name], axes)


SEGMENTS = np.array([0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 5, 5, 5, 5])
OF_SEGMENTS = ["segment_max", "segment_min", "segment_prod", "segment_mean", "unsorted_segment_max",
               "unsorted_segment_min", "unsorted_segment_prod", "unsorted_segment_mean"]  # fmt: skip


@table(
    "segments of samples behind a sharded kernel", ("name", "axes"),
    itertools.product(OF_SEGMENTS, [(None, "model"), ("model", None)]),
    always=[("unsorted_segment_max", (None, "model"))], sample=1,
)  # fmt: skip
def test_segments_of_samples_behind_a_sharded_kernel_match_one_device(name, axes):
    count = [6] if name.startswith("unsorted") else []
    assert_matches(lambda x, m: getattr(tf.math, name)(x, SEGMENTS, *count) @ m, axes)


def advances_of_a_trace(blocks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often a trace of residual blocks follows a dim through an operation."""
    found = 0

    def advance(*args):
        nonlocal found
        found += 1
        return real(*args)

    real = dim_rules.advance
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)

    @tf.function
    def step(x):
        for _ in range(blocks):
            mean = tf.reduce_mean(x, -1, keepdims=True)
            x = x + tf.matmul(tf.nn.softmax(x - mean) * tf.ones([8]), tf.ones([8, 8]))
        return x

    with monkeypatch.context() as patch:
        patch.setattr(dim_rules, "advance", advance)
        strategy.run(step, args=(tf.ones([16, 4, 8]),))
    return found


def test_a_trace_follows_each_dim_back_once(monkeypatch):
    # A trace that follows each operation back to the inputs takes the square of the number of blocks.
    few, many = (advances_of_a_trace(blocks, monkeypatch) for blocks in (4, 32))
    assert few > 0, "premise"
    assert many <= 9 * few, (few, many)
