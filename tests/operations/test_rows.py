"""Operations, dilated convolutions and loops of recurrent layers on the local rows of each device."""

import functools
import importlib
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
from tfshard.operations import rows
from tfshard.operations.row_operations import ROW_OPERATIONS

RS = np.random.RandomState(0)
IMAGES = RS.uniform(0.1, 1.0, (8, 6, 7, 4)).astype("float32")
MATRICES = (RS.normal(size=(8, 5, 5)) * 0.3 + 3 * np.eye(5)).astype("float32")
MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}

raw = tf.raw_ops


def symmetric(m):
    return m + tf.linalg.matrix_transpose(m)


def colors(i):
    return i[..., :3]


# The tested operation types, and the function of (images, matrices).
CASES = {
    "average pooling": (("AvgPoolGrad",), lambda i, m: tf.nn.avg_pool2d(i, 2, 2, "SAME")),
    "average pooling of volumes": (("AvgPool3DGrad",), lambda i, m: tf.nn.avg_pool3d(i[..., None], 2, 2, "SAME")),
    "depthwise convolution": (
        ("DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter"),
        lambda i, m: tf.nn.depthwise_conv2d(i, tf.reshape(tf.reduce_sum(m, 0)[:3, :4], (3, 1, 4, 1)), [1] * 4, "SAME"),
    ),
    "patches": (
        ("ExtractImagePatches",),
        lambda i, m: tf.stop_gradient(tf.image.extract_patches(i, [1, 2, 2, 1], [1] * 4, [1] * 4, "VALID")),
    ),
    "patches of volumes": (
        ("ExtractVolumePatches",),
        lambda i, m: tf.stop_gradient(tf.extract_volume_patches(i[..., None], [1, 2, 2, 2, 1], [1] * 5, "VALID")),
    ),
    "space to depth": (("SpaceToDepth", "DepthToSpace"), lambda i, m: tf.nn.space_to_depth(i[:, :, :6], 2)),
    "depth to space": (("SpaceToDepth", "DepthToSpace"), lambda i, m: tf.nn.depth_to_space(i, 2)),
    "local response normalization": (("LRN", "LRNGrad"), lambda i, m: tf.nn.local_response_normalization(i)),
    "reverse": (("ReverseV2",), lambda i, m: tf.reverse(i, [1, -1])),
    "cumprod": (("Cumprod",), lambda i, m: tf.math.cumprod(i, axis=1)),
    "cumulative_logsumexp": (("CumulativeLogsumexp",), lambda i, m: tf.math.cumulative_logsumexp(i, axis=-1)),
    "roll": (("Roll",), lambda i, m: tf.roll(i, [1, 2], [1, 2])),
    "mirror padding": (
        ("MirrorPad", "MirrorPadGrad"),
        lambda i, m: tf.pad(i, [(0, 0), (1, 2), (2, 1), (0, 0)], "REFLECT"),
    ),
    "argmin": (("ArgMin",), lambda i, m: tf.argmin(i, 1)),
    "band_part": (("MatrixBandPart",), lambda i, m: tf.linalg.band_part(m, 1, 0)),
    "diag_part": (("MatrixDiagPartV3",), lambda i, m: tf.linalg.diag_part(m)),
    "diag": (("MatrixDiagV3",), lambda i, m: tf.linalg.diag(m)),
    "set_diag": (("MatrixSetDiagV3",), lambda i, m: tf.linalg.set_diag(m, i[:, :5, 0, 0])),
    "inverse": (("MatrixInverse",), lambda i, m: tf.linalg.inv(m)),
    "determinant": (("MatrixDeterminant",), lambda i, m: tf.linalg.det(m)),
    "log of the determinant": (("LogMatrixDeterminant",), lambda i, m: tf.linalg.slogdet(m)[1]),
    "cholesky": (("Cholesky",), lambda i, m: tf.linalg.cholesky(m @ tf.linalg.matrix_transpose(m))),
    "qr": (("Qr",), lambda i, m: tf.linalg.qr(m)[1]),
    "svd": (("Svd",), lambda i, m: tf.linalg.svd(m)[0]),
    "eigh": (("SelfAdjointEigV2",), lambda i, m: tf.linalg.eigh(symmetric(m))[0]),
    "eig": (("Eig",), lambda i, m: tf.abs(tf.linalg.eigvals(tf.stop_gradient(m)))),
    "lu": (("Lu",), lambda i, m: tf.linalg.lu(tf.stop_gradient(m))[0]),
    "logm": (("MatrixLogarithm",),
        lambda i, m: tf.abs(raw.MatrixLogarithm(input=tf.cast(tf.stop_gradient(m), "complex64")))),
    "sqrtm": (("MatrixSquareRoot",), lambda i, m: tf.linalg.sqrtm(m)),
    "solve": (("MatrixSolve",), lambda i, m: tf.linalg.solve(m, m[:, :, :2])),
    "triangular_solve": (("MatrixTriangularSolve",), lambda i, m: tf.linalg.triangular_solve(m, m[:, :, :2])),
    "lstsq": (("MatrixSolveLs",),
        lambda i, m: raw.MatrixSolveLs(matrix=m, rhs=m[..., :2], l2_regularizer=0.1, fast=True)),
    "banded_triangular_solve": (
        ("BandedTriangularSolve",),
        lambda i, m: raw.BandedTriangularSolve(matrix=m[:, :2], rhs=m[..., :2]),
    ),
    "bicubic": (("ResizeBicubic", "ResizeBicubicGrad"), lambda i, m: raw.ResizeBicubic(images=i, size=[9, 5])),
    "area": (("ResizeArea",), lambda i, m: tf.stop_gradient(raw.ResizeArea(images=i, size=[3, 3]))),
    "lanczos": (
        ("ScaleAndTranslate", "ScaleAndTranslateGrad"),
        lambda i, m: tf.image.resize(i, [4, 5], "lanczos3", antialias=True),
    ),
    "projection of each image": (
        ("ImageProjectiveTransformV3",),
        lambda i, m: raw.ImageProjectiveTransformV3(
            images=i, transforms=tf.tile([[1.0, 0.1, 0.5, 0.0, 1.0, -0.5, 0.0, 0.0]], (8, 1)), output_shape=[6, 7],
            fill_value=0.0, interpolation="BILINEAR",
        ),
    ),
    "projection": (
        ("ImageProjectiveTransformV2",),
        lambda i, m: raw.ImageProjectiveTransformV2(
            images=i, transforms=tf.constant([[1.0, 0.1, 0.5, 0.0, 1.0, -0.5, 0.0, 0.0]]), output_shape=[6, 7],
            interpolation="BILINEAR",
        ),
    ),
    "hsv": (("RGBToHSV", "HSVToRGB"),
        lambda i, m: tf.stop_gradient(tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(colors(i))))),
    "contrast": (("AdjustContrastv2",), lambda i, m: tf.stop_gradient(tf.image.adjust_contrast(i, 1.5))),
    "hue": (("AdjustHue",), lambda i, m: tf.stop_gradient(tf.image.adjust_hue(colors(i), 0.1))),
    "saturation": (("AdjustSaturation",), lambda i, m: tf.stop_gradient(tf.image.adjust_saturation(colors(i), 0.5))),
    "bucketize": (("Bucketize",), lambda i, m: raw.Bucketize(input=i, boundaries=[0.3, 0.6])),
}  # fmt: skip


def step(function, images, matrices):
    """Return results and gradients."""
    with tf.GradientTape() as tape:
        tape.watch([images, matrices])
        results = function(images, matrices)
        floats = [each for each in tf.nest.flatten(results) if each.dtype.is_floating]
        loss = tf.add_n([tf.reduce_sum(tf.square(each)) for each in floats]) if floats else 0.0 * tf.reduce_sum(images)
    return results, tape.gradient(loss, [images, matrices], unconnected_gradients="zero")


def test_every_operation_of_rows_is_tried_here():
    assert {op for ops, _ in CASES.values() for op in ops} == set(ROW_OPERATIONS)


def on_mesh(value: np.ndarray, mesh: dtensor.Mesh) -> tf.Tensor:
    return transfer.host_to_mesh(value, ("batch",) + (None,) * (value.ndim - 1), mesh)


@pytest.mark.sweep(4)
@table(
    "operations of rows", ("mesh", "name"), itertools.product(MESHES, CASES), sample=10,
    always=[("batch4", name) for name in CASES],
)  # fmt: skip
def test_an_operation_and_its_gradient_are_those_of_one_device(name: str, mesh: str):
    types, function = CASES[name]
    plain = tf.function(functools.partial(step, function))
    graph = plain.get_concrete_function(tf.constant(IMAGES), tf.constant(MATRICES)).graph
    assert set(types) <= {operation.type for operation in graph.get_operations()}
    expected = tf.nest.flatten(plain(tf.constant(IMAGES), tf.constant(MATRICES)))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    arguments = [on_mesh(value, strategy.mesh) for value in (IMAGES, MATRICES)]
    with strategy.extended.results_stay_sharded():
        found = tf.nest.flatten(strategy.run(tf.function(functools.partial(step, function)), args=tuple(arguments)))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(transfer.to_host(ours), theirs.numpy(), rtol=2e-5, atol=2e-6)
    assert dtensor.fetch_layout(found[0]).sharding_specs[0] == "batch", "premise: devices have their rows"


def test_what_is_no_multiple_of_the_devices_is_computed_whole():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    images = transfer.host_to_mesh(IMAGES[:5], (None,) * 4, strategy.mesh)
    found = strategy.run(tf.function(lambda images: tf.reverse(images, [1])), args=(images,))
    np.testing.assert_array_equal(found.numpy(), IMAGES[:5, ::-1])


def test_a_function_of_rows_has_to_give_rows():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)

    def run(images):
        return rows.local_map(lambda images: tf.reduce_sum(images, 0), [images], strategy.mesh)

    with pytest.raises(tfshard.errors.UnsupportedOperationError, match="as many rows as it gets"):
        strategy.run(tf.function(run), args=(on_mesh(IMAGES, strategy.mesh),))


def test_a_function_of_rows_draws_no_random_numbers():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)

    def noisy(images):
        return tf.while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, t + tf.random.stateless_normal(t.shape, [1, i])),
                             (0, images))[1]  # fmt: skip

    def run(images):
        return rows.local_map(noisy, [images], strategy.mesh)

    with pytest.raises(
        tfshard.errors.UnsupportedOperationError, match="all devices would draw the same.*StatelessRandom"
    ):
        strategy.run(tf.function(run), args=(on_mesh(IMAGES, strategy.mesh),))


# --- layers -------------------------------------------------------------------------------------------------


class Memory(keras.layers.Layer):
    """A user's cell with a matrix that looks at a tensor of the batch."""

    def __init__(self, units):
        super().__init__()
        self.units = self.state_size = self.output_size = units

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1] + self.units, self.units), name="kernel")

    def call(self, inputs, states):
        state = keras.ops.tanh(keras.ops.concatenate([inputs, states[0]], -1) @ self.kernel)
        return state, [state]


class LookingMemory(Memory):
    """A cell that looks at a per-sample tensor from outside the loop."""

    def call(self, inputs, states):
        return super().call(inputs + keras.ops.tanh(self.seen), states)


class Looking(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.loop = keras.layers.RNN(LookingMemory(4))

    def call(self, sequences):
        self.loop.cell.seen = keras.ops.mean(sequences, 1)
        return self.loop(sequences)


LAYERS = {
    "LSTM": lambda x: keras.layers.LSTM(4)(x),
    "LSTM, sequences": lambda x: keras.layers.LSTM(4, return_sequences=True)(x),
    "LSTM, state": lambda x: keras.layers.Concatenate()(keras.layers.LSTM(4, return_state=True)(x)),
    "LSTM, backwards": lambda x: keras.layers.LSTM(4, go_backwards=True)(x),
    "GRU": lambda x: keras.layers.GRU(4)(x),
    "GRU, reset before": lambda x: keras.layers.GRU(4, reset_after=False)(x),
    "SimpleRNN": lambda x: keras.layers.SimpleRNN(4)(x),
    "masked LSTM": lambda x: keras.layers.LSTM(4, return_sequences=True)(keras.layers.Masking(0.0)(x)),
    "masked LSTM, zeros": lambda x: keras.layers.RNN(
        keras.layers.LSTMCell(4), return_sequences=True, zero_output_for_mask=True
    )(keras.layers.Masking(0.0)(x)),
    "Bidirectional": lambda x: keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))(x),
    "cell of a user": lambda x: keras.layers.RNN(Memory(4))(x),
    "cell that looks at the batch": lambda x: Looking()(x),
    "stacked cells": lambda x: keras.layers.RNN([keras.layers.LSTMCell(4), keras.layers.GRUCell(3)])(x),
    "state from a layer": lambda x: keras.layers.GRU(4)(x, initial_state=keras.layers.Dense(4)(x[:, 0])),
    "two, one after the other": lambda x: keras.layers.LSTM(3)(keras.layers.LSTM(4, return_sequences=True)(x)),
    "dilated Conv1D": lambda x: keras.layers.Conv1D(4, 3, dilation_rate=2, padding="causal")(x),
    "dilated SeparableConv1D": lambda x: keras.layers.SeparableConv1D(4, 3, dilation_rate=2, padding="same")(x),
}


def build(name: str) -> keras.Model:
    inputs = keras.Input((6, 5))
    x = LAYERS[name](keras.layers.Dense(5, name="before")(inputs))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))


def batches() -> list:
    rs = np.random.RandomState(1)
    found = []
    for _ in range(2):
        x = rs.normal(size=(8, 6, 5)).astype("float32")
        found.append((x, rs.normal(size=(8, 2)).astype("float32")))
    return found


@functools.cache
def reference(name: str) -> parity.Run:
    return parity.train(
        lambda: build(name), batches(), optimizer=lambda: keras.optimizers.Adam(1e-2), loss="mse", steps=3
    )


@pytest.mark.sweep(1)
@table(
    "layers of rows", ("mesh", "name"), itertools.product(MESHES, LAYERS), sample=2,
    always=[("batch4", name) for name in LAYERS],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask attached to it:UserWarning")
def test_a_layer_trains_to_the_numbers_of_one_device(name: str, mesh: str):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), {".*": ()}, zero_stage=3)
    run = parity.train(
        lambda: build(name), batches(), optimizer=lambda: keras.optimizers.Adam(1e-2), loss="mse", steps=3,
        strategy=strategy,
    )  # fmt: skip
    assert "batch" in parity.shard_axes(run.model)
    parity.assert_same(run, reference(name), rtol=0.0, atol=1e-5)


@pytest.mark.slow
def test_a_loop_that_cudnn_would_do_is_done_by_tensorflow(monkeypatch):
    expected = {name: reference(name) for name in ("LSTM", "GRU", "Bidirectional")}
    monkeypatch.setattr(importlib.import_module("keras.src.backend.tensorflow.rnn"), "_is_gpu_available", lambda: True)
    plain = tf.function(build("LSTM")).get_concrete_function(tf.TensorSpec((8, 6, 5)))
    assert "CudnnRNNV3" in {operation.type for operation in plain.graph.get_operations()}, "premise"
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    for name, run in expected.items():
        ours = parity.train(
            lambda name=name: build(name), batches(), optimizer=lambda: keras.optimizers.Adam(1e-2), loss="mse",
            steps=3, strategy=strategy,
        )  # fmt: skip
        parity.assert_same(ours, run, rtol=0.0, atol=1e-5)
    inputs = keras.Input((6, 5))
    model = keras.Model(inputs, keras.layers.LSTM(4, use_cudnn=True)(inputs))
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    with pytest.raises(ValueError, match="use_cudnn=True was specified"):
        model.train_on_batch(batches()[0][0], np.zeros((8, 4), np.float32))
