"""Joined, cut or reordered rows of a batch match one device, with any operation after them.

Convolutions of batches that every device holds match, too.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import parity
import tfshard
from sweeps import table
from tfshard.devices import transfer

RS = np.random.RandomState(0)
X = RS.normal(size=(16, 6)).astype("float32")
IMAGES = RS.normal(size=(8, 6, 6, 4)).astype("float32")
MATRIX = RS.normal(size=(6, 6)).astype("float32")
KERNEL = RS.normal(size=(2, 2, 1, 4)).astype("float32")
MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}


def patches(x):
    images = tf.reshape(x, (16, 3, 2, 1))
    return tf.reshape(tf.image.extract_patches(images, [1, 2, 2, 1], [1] * 4, [1] * 4, "VALID"), (32, 4))


# (16, 6) to (n, 6).
JOINS = {
    "concat of two": lambda x: tf.concat([x, -x], 0),
    "concat of three": lambda x: tf.concat([x, -x, x * x], 0),
    "concat of unequal parts": lambda x: tf.concat([x[:3], x, x[:1]], 0),
    "concat with constants": lambda x: tf.concat([x, tf.ones((4, 6))], 0),
    "concat that no axis divides": lambda x: tf.concat([tf.ones((1, 6)), x], 0),
    "concatenate": lambda x: keras.ops.concatenate([x, 2 * x], axis=0),
    "append": lambda x: keras.ops.append(x, 2 * x, axis=0),
    "vstack": lambda x: keras.ops.vstack([x, 2 * x]),
    "stack of views": lambda x: tf.reshape(tf.stack([x, -x]), (-1, 6)),
    "stack of pairs": lambda x: tf.reshape(tf.stack([x, -x], 1), (-1, 6)),
    "one of a stack": lambda x: tf.stack([x, -x])[1],
    "unstack of a stack": lambda x: tf.unstack(tf.stack([x, -x]))[1],
    "stack of rows": lambda x: tf.stack(tf.unstack(x)[::-1]),
    "split": lambda x: tf.multiply(*tf.split(x, 2)),
    "split by sizes": lambda x: tf.split(x, [3, 13])[1],
    "split of a concat": lambda x: tf.add(*tf.split(tf.concat([x, -x * x], 0), 2)),
    "first half": lambda x: x[:8],
    "every second": lambda x: x[::2] + x[1::2],
    "all but the first": lambda x: x[1:],
    "backwards": lambda x: x[::-1],
    "the first": lambda x: x[:1],
    "next to the first": lambda x: x[0][None] + x,
    "slice": lambda x: keras.ops.slice(x, (4, 0), (8, 6)),
    "repeat": lambda x: tf.repeat(x, 2, axis=0),
    "repeat by a list": lambda x: tf.repeat(x, [1, 2, 0, 3] * 4, axis=0),
    "tile": lambda x: tf.tile(x, [3, 1]),
    "reverse": lambda x: tf.reverse(x, [0, 1]),
    "roll": lambda x: tf.roll(x, 1, 0),
    "pad that no axis divides": lambda x: tf.pad(x, [[1, 0], [0, 0]]),
    "pad": lambda x: tf.pad(x, [[1, 3], [0, 0]]),
    "reflected pad": lambda x: tf.pad(x, [[2, 2], [0, 0]], "REFLECT"),
    "gather of numbers": lambda x: tf.gather(x, [3, 1, 15, 2, 3, 3, 0, 8]),
    "gather by values": lambda x: 0.3 * x + 0.7 * tf.gather(x, tf.argsort(x[:, 0])),
    "gather_nd": lambda x: tf.gather_nd(x, [[3], [2], [1], [0]]),
    "take": lambda x: keras.ops.take(x, np.arange(15, -1, -1), axis=0),
    "time before the batch": lambda x: tf.reshape(tf.transpose(tf.reshape(x, (16, 2, 3)), (1, 0, 2)), (16, 6)),
    "time into the batch": lambda x: tf.reshape(tf.tanh(tf.reshape(x, (32, 3)) @ tf.ones((3, 3))), (16, 6)),
    "pairs of rows": lambda x: tf.reshape(x, (8, 12)) @ (tf.ones((12, 6)) / 12),
    "halves by a reshape": lambda x: tf.reshape(x, (2, 8, 6))[1],
    "threes by a reshape": lambda x: tf.reshape(x, (3, 32)) @ (tf.ones((32, 6)) / 32),
    "patches": lambda x: patches(x) @ tf.ones((4, 6)),
    "differences of all": lambda x: tf.reshape(x[:, None] - x[None], (256, 6)),
    "distances": lambda x: tf.reduce_mean(tf.abs(x[:, None] - x[None]), 0),
    "cumulative sum": lambda x: tf.cumsum(x, 0),
    "sort": lambda x: tf.sort(x, 0),
    "meshgrid": lambda x: tf.reshape(tf.stack(tf.meshgrid(x[:, 0], x[:, 1]), -1), (256, 2)) @ tf.ones((2, 6)),
}


def normalized(t):
    mean, variance = tf.nn.moments(t, list(range(t.shape.rank - 1)))
    return tf.nn.batch_normalization(t, mean, variance, None, None, 1e-3)


def convolved(t, kernel):
    return tf.nn.conv2d(tf.reshape(t, (-1, 3, 2, 1)), kernel, 1, "SAME")


def attention(t, matrix):
    query, key, value = (tf.reshape(t @ (matrix * scale), (-1, 3, 1, 2)) for scale in (1.0, 2.0, 3.0))
    return keras.ops.dot_product_attention(query, key, value)


def loop(t, matrix):
    states = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ matrix + t)), (0, tf.zeros_like(t)))
    return states[1]


# Functions of (rows, matrix, kernel).
AFTERS = {
    "nothing": lambda t, m, k: t,
    "dense": lambda t, m, k: t @ m,
    "batch normalization": lambda t, m, k: normalized(tf.nn.relu(t @ m)),
    "convolution": lambda t, m, k: normalized(convolved(t, k)),
    "depthwise convolution": lambda t, m, k: tf.nn.depthwise_conv2d(
        tf.reshape(t, (-1, 1, 3, 2)), tf.reshape(k, (1, 2, 2, 4)), [1] * 4, "SAME"
    ),
    "attention": lambda t, m, k: attention(t, m),
    "loop": lambda t, m, k: loop(t, m),
    "layer normalization": lambda t, m, k: keras.ops.layer_normalization(t),
    "cumprod": lambda t, m, k: tf.math.cumprod(t, 1),
    "cumsum of rows": lambda t, m, k: tf.cumsum(t, 0),
    "top_k": lambda t, m, k: tf.math.top_k(t, 3)[0],
    "softmax": lambda t, m, k: tf.nn.softmax(t @ m),
    "cross entropy": lambda t, m, k: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(t.shape[0]) % 6, t @ m),
    "contrast": lambda t, m, k: tf.nn.log_softmax((t @ m) @ tf.transpose(t @ m)),
    "average pooling": lambda t, m, k: tf.nn.avg_pool2d(tf.reshape(t, (-1, 3, 2, 1)), 2, 1, "VALID"),
}


def assert_matches(function, batch: np.ndarray, others: list[np.ndarray], mesh: str) -> list[tf.Tensor]:
    """Compare the results and gradients of a step with one device, and return the results on the mesh."""

    def step(batch, *others):
        with tf.GradientTape() as tape:
            tape.watch([batch, *others])
            result = function(batch, *others)
            loss = tf.reduce_sum(tf.sin(1.3 * result + 0.4))
        gradients = tape.gradient(loss, [batch, *others], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [result, *(tf.convert_to_tensor(each) for each in gradients)]

    expected = [np.asarray(each) for each in step(tf.constant(batch), *map(tf.constant, others))]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    sharded = transfer.host_to_mesh(batch, ("batch", *(None,) * (batch.ndim - 1)), strategy.mesh)
    assert dtensor.fetch_layout(sharded).num_shards(0) == MESHES[mesh]["batch"], "premise"
    arguments = [sharded, *(transfer.host_to_mesh(each, (None,) * each.ndim, strategy.mesh) for each in others)]
    with strategy.extended.results_stay_sharded():
        found = strategy.run(tf.function(step), args=tuple(arguments))
    for ours, theirs in zip(found, expected, strict=True):
        far = 1e-4 * max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(transfer.to_host(ours), theirs, rtol=1e-4, atol=far)
    return found


@pytest.mark.sweep(3)
@table(
    "joined rows", ("join", "after", "mesh"),
    # DTensor refuses one (docs/limits.md).
    [
        case for case in itertools.product(JOINS, AFTERS, MESHES)
        if case != ("distances", "top_k", "batch2_model2")
    ],
    always=[("concat of two", "batch normalization", "batch4"), ("unstack of a stack", "top_k", "batch4"),
            ("sort", "convolution", "batch4"), ("repeat by a list", "top_k", "batch2_model2"),
            ("distances", "contrast", "batch2_model2"), ("stack of views", "loop", "batch2_model2"),
            ("halves by a reshape", "convolution", "batch2_model2")],
    sample=12,
)  # fmt: skip
def test_rows_that_are_moved_match_one_device(join: str, after: str, mesh: str):
    def function(x, matrix, kernel):
        return AFTERS[after](JOINS[join](tf.tanh(x @ matrix)), matrix, kernel)

    assert_matches(function, X, [MATRIX, KERNEL], mesh)


@pytest.mark.parametrize("mesh", MESHES)
def test_rows_repeated_by_values_match_one_device(mesh: str):
    def function(x, matrix):
        return tf.repeat(tf.tanh(x @ matrix), tf.where(x[:, 0] > 0, 2, 0), axis=0) @ matrix

    assert_matches(function, X, [MATRIX], mesh)


@pytest.mark.parametrize("join", ["concat of two", "first half", "backwards", "gather by values", "stack of views"])
def test_what_follows_joined_rows_is_shared_out(join: str):
    found = assert_matches(lambda x, matrix: tf.nn.relu(JOINS[join](x) @ matrix), X, [MATRIX], "batch4")
    assert dtensor.fetch_layout(found[0]).num_shards(0) == 4


class Twice(keras.Model):
    """Two views of each sample through one network, as in SimCLR (Chen et al. 2020)."""

    def __init__(self, layers):
        super().__init__()
        self.net = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            first, second = tf.split(self.net(tf.concat([data[0], -data[0]], 0), training=True), 2)
            loss = tf.reduce_mean(tf.square(first - second * second + 0.1))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


NETWORKS = {
    "BatchNormalization": lambda: [keras.layers.Dense(16), keras.layers.BatchNormalization()],
    "DepthwiseConv1D": lambda: [
        keras.layers.Reshape((3, 2)), keras.layers.DepthwiseConv1D(2), keras.layers.Flatten()
    ],
    "LSTM": lambda: [keras.layers.Reshape((3, 2)), keras.layers.LSTM(4)],
    "GRU": lambda: [keras.layers.Reshape((3, 2)), keras.layers.GRU(4)],
}  # fmt: skip


@pytest.mark.sweep(1)
@table("networks of joined rows", "name", NETWORKS, always=["BatchNormalization"], sample=1)
def test_training_on_two_views_matches_one_device(name: str):
    runs = []
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)):
        keras.utils.set_random_seed(0)
        model = Twice(NETWORKS[name]())
        if strategy is None:
            model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
        else:
            tfshard.as_distributed(model).compile(keras.optimizers.SGD(0.1), strategy=strategy)
        losses = [float(model.train_on_batch(X, return_dict=True)["loss"]) for _ in range(2)]
        runs.append((losses, [np.asarray(each) for each in model.get_weights()]))
    assert parity.shard_axes(model) == {"batch"}, "premise"
    np.testing.assert_allclose(runs[1][0], runs[0][0], rtol=1e-5)
    for ours, theirs in zip(runs[1][1], runs[0][1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# Functions of images that every device holds.
WHOLE = {
    "flipped": lambda i: tf.reverse(i, [0]),
    "gathered": lambda i: tf.gather(i, tf.argsort(i[:, 0, 0, 0])),
    "cropped": lambda i: tf.image.crop_and_resize(i, [[0.1, 0.1, 0.9, 0.9]] * 8, tf.range(8), (6, 6)),
    "as they are": lambda i: i,
}


def of_volumes(images):
    return tf.reshape(images, (8, 3, 2, 6, 4))


def of_lines(images):
    return tf.reshape(images, (8, 36, 4))


def channels_first(images):
    return tf.transpose(images, (0, 3, 1, 2))


ops = keras.ops
# The shapes of kernels, and the function of (images, *kernels).
CONVOLUTIONS = {
    "1D": ([(3, 4, 5)], lambda i, k: ops.conv(of_lines(i), k)),
    "1D with strides": ([(3, 4, 5)], lambda i, k: ops.conv(of_lines(i), k, strides=2, padding="same")),
    "2D": ([(3, 3, 4, 5)], lambda i, k: ops.conv(i, k)),
    "2D with strides": ([(3, 3, 4, 5)], lambda i, k: ops.conv(i, k, strides=2, padding="same")),
    "2D, dilated": ([(2, 2, 4, 5)], lambda i, k: ops.conv(i, k, dilation_rate=2)),
    "2D in groups": ([(3, 3, 2, 4)], lambda i, k: ops.conv(i, k)),
    "2D, channels first": ([(3, 3, 4, 5)], lambda i, k: ops.conv(channels_first(i), k, data_format="channels_first")),
    "3D": ([(2, 2, 2, 4, 5)], lambda i, k: ops.conv(of_volumes(i), k)),
    "2D, transposed": ([(2, 2, 5, 4)], lambda i, k: ops.conv_transpose(i, k, strides=2)),
    "3D, transposed": ([(2, 2, 2, 5, 4)], lambda i, k: ops.conv_transpose(of_volumes(i), k, strides=2)),
    "1D, transposed": ([(2, 5, 4)], lambda i, k: ops.conv_transpose(of_lines(i), k, strides=2)),
    "depthwise": ([(3, 3, 4, 2)], lambda i, k: ops.depthwise_conv(i, k)),
    "depthwise with strides": ([(3, 3, 4, 1)], lambda i, k: ops.depthwise_conv(i, k, strides=2, padding="same")),
    "depthwise, 1D": ([(3, 4, 2)], lambda i, k: ops.depthwise_conv(of_lines(i), k)),
    "separable": ([(3, 3, 4, 1), (1, 1, 4, 5)], lambda i, k, p: ops.separable_conv(i, k, p)),
    "separable, 1D": ([(3, 4, 1), (1, 4, 5)], lambda i, k, p: ops.separable_conv(of_lines(i), k, p)),
    "max pooling": ([(4,)], lambda i, k: ops.max_pool(i * k, 2)),
    "max pooling of volumes": ([(4,)], lambda i, k: ops.max_pool(of_volumes(i) * k, (1, 2, 2))),
    "average pooling": ([(4,)], lambda i, k: ops.average_pool(i * k, 3, strides=2, padding="same")),
    "average pooling of volumes": ([(4,)], lambda i, k: ops.average_pool(of_volumes(i) * k, 2)),
    "resizing": ([(4,)], lambda i, k: ops.image.resize(i * k, (4, 9))),
    "resizing to the nearest": ([(4,)], lambda i, k: ops.image.resize(i * k, (4, 9), interpolation="nearest")),
    "bicubic resizing": ([(4,)], lambda i, k: ops.image.resize(i * k, (4, 9), interpolation="bicubic")),
}  # fmt: skip


@pytest.mark.sweep(1)
@table(
    "convolutions of whole batches", ("convolution", "whole", "mesh"), itertools.product(CONVOLUTIONS, WHOLE, MESHES),
    always=[("2D", "flipped", "batch4"), ("3D", "gathered", "batch4"), ("separable", "as they are", "batch2_model2")],
    sample=8,
)  # fmt: skip
def test_convolutions_of_batches_that_every_device_holds_match_one_device(convolution: str, whole: str, mesh: str):
    shapes, function = CONVOLUTIONS[convolution]
    kernels = [RS.normal(size=shape).astype("float32") for shape in shapes]
    assert_matches(lambda i, *kernels: normalized(function(WHOLE[whole](i), *kernels)), IMAGES, kernels, mesh)


def test_a_convolution_of_a_replicated_batch_is_shared_out():
    kernel = RS.normal(size=(3, 3, 4, 5)).astype("float32")
    found = assert_matches(lambda i, k: keras.ops.conv(tf.reverse(i, [0]), k), IMAGES, [kernel], "batch4")
    assert dtensor.fetch_layout(found[0]).num_shards(0) == 4
