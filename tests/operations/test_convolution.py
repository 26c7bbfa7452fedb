"""Convolutions with kernels sharded over a model axis match one device.

A pair of convolutions needs two all-reduces.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard.operations import convolution

MESHES = {"model4": {"model": 4}, "batch2_model2": {"batch": 2, "model": 2}}
RS = np.random.RandomState(0)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(
    ("size", "kernel", "strides", "dilation"),
    [
        ((9, 8), (3, 3), (1, 1), (1, 1)),
        ((9, 8), (3, 2), (2, 3), (1, 1)),
        ((9, 8), (2, 3), (1, 1), (2, 1)),
        ((5, 5), (1, 1), (2, 2), (1, 1)),
        ((4, 5, 6), (2, 3, 2), (1, 2, 1), (1, 1, 1)),
    ],
)
def test_sums_of_products_are_tensorflows_convolution(size, kernel, strides, dilation, padding):
    x = tf.constant(RS.randn(2, *size, 3), tf.float32)
    w = tf.constant(RS.randn(*kernel, 3, 4), tf.float32)

    @tf.function(jit_compile=False)
    def both():
        found = []
        for ours in (True, False):
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                if ours:
                    y = convolution.convolve(x, w, strides=strides, dilation=dilation, same=padding == "same")
                else:
                    y = tf.nn.convolution(x, w, strides=strides, padding=padding.upper(), dilations=dilation)
                loss = tf.reduce_sum(tf.sin(y))
            found.append((y, *tape.gradient(loss, [x, w])))
        return found

    for mine, reference in zip(*both(), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-4)


def residual() -> keras.Model:
    """Return a residual bottleneck: the pair's input is trained, and added to the pair's output."""
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(16, 3, padding="same", strides=2, name="stem")(inputs)
    y = keras.layers.Conv2D(32, 3, padding="same", use_bias=False, name="expand")(x)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization(name="norm")(y))
    y = keras.layers.Conv2D(16, 3, padding="same", name="contract")(y)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.LayerNormalization()(x + y))
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


def test_pairs_of_convolutions_are_recognised():
    found = tfshard.auto_layout_map(residual(), {"model": 4})
    assert found["expand"].kind == "column"
    assert found["contract"].kind == "row"
    assert found["norm/gamma"].axes == found["norm/moving_mean"].axes == ("model",)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_residual_network_matches_one_device(mesh, stage):
    batches = [(RS.randn(8, 8, 8, 3).astype("float32"), RS.randint(0, 3, 8))]
    settings = {
        "optimizer": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-4),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), "auto", zero_stage=stage)
    run = parity.train(residual, batches, strategy=strategy, **settings)
    assert run.model.get_layer("expand").kernel.value.layout.compute == (None, None, None, "model")
    parity.assert_same(run, parity.train(residual, batches, **settings), rtol=0, atol=2e-5)
    if mesh == "model4":
        profile = tfshard.profile_step(run.model, batches[0])
        # The forward pass has an all-reduce after the row kernel, the backward pass before the column kernel.
        assert len(profile.collectives) == profile.count("all-reduce") == 2


def test_outside_of_steps_and_without_a_layout_keras_convolves():
    model = tfshard.as_distributed(residual())
    x = RS.randn(2, 8, 8, 3).astype("float32")
    expected = np.array(model(x))
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(model=4), "auto"))
    np.testing.assert_allclose(model(x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5)


def generator(*parts: keras.layers.Layer) -> keras.Model:
    """Return a DCGAN generator.

    A Dense layer's columns become images, so the model axis shards the height of the images.
    """
    layers = [keras.Input((6,)), keras.layers.Dense(32, "tanh", name="wide"), keras.layers.Reshape((4, 4, 2)), *parts]
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(2, name="head")])


def images(*parts: keras.layers.Layer) -> keras.Model:
    layers = [keras.Input((6,)), keras.layers.Dense(32, name="first"), keras.layers.Reshape((4, 4, 2)), *parts]
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(2, name="head")])


def same(filters: int, name: str) -> keras.layers.Layer:
    return keras.layers.Conv2D(filters, 3, padding="same", name=name)


class Twice(keras.layers.Layer):
    def call(self, x):
        return keras.ops.tile(x, (1, 2, 1, 1))


class Skip(keras.layers.Layer):
    def call(self, x):
        return keras.ops.concatenate([x, 2 * x], axis=-1)


IMAGES = {
    "padded": lambda: generator(keras.layers.ZeroPadding2D(1)),
    "tiled": lambda: generator(Twice()),
    "column": lambda: generator(same(4, "column")),
    "row": lambda: generator(same(3, "row")),
    "upsampled to a row": lambda: generator(keras.layers.UpSampling2D(), same(1, "row")),
    "row behind a pooling": lambda: images(same(4, "column"), keras.layers.MaxPooling2D(), same(3, "row")),
    "row behind joined channels": lambda: images(Skip(), same(3, "row")),
    "dense row behind joined channels": lambda: images(Skip(), keras.layers.Dense(4, name="row")),
    "dense row behind joined features": lambda: images(
        keras.layers.Flatten(), Skip(), keras.layers.Activation("tanh"), keras.layers.Dense(4, name="row")
    ),
    "row behind a transposed convolution": lambda: images(
        keras.layers.Conv2DTranspose(4, 3, strides=2, padding="same"), keras.layers.LeakyReLU(), same(1, "row")
    ),
}


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")  # These layouts send more than pairs would.
@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("kind", IMAGES)
def test_images_of_sharded_columns_and_rows_match_one_device(kind, size):
    layout_map = tfshard.LayoutMap()
    for kind_of_rule, name in (("column", "wide"), ("column", "column"), ("row", "row")):
        getattr(layout_map, kind_of_rule)(f"(.*/)?{name}", axis="model", optional=True)
    layout_map.replicated("(?!(.*/)?(wide|column|row)/).*")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map, zero_stage=3)
    rs = np.random.RandomState(1)
    batches = [(rs.randn(size, 6).astype("float32"), rs.randn(size, 2).astype("float32")) for _ in range(2)]
    settings = {"optimizer": lambda: keras.optimizers.SGD(0.02), "loss": "mse"}
    run = parity.train(IMAGES[kind], batches, strategy=strategy, **settings)
    parity.assert_same(run, parity.train(IMAGES[kind], batches, **settings), rtol=1e-5, atol=2e-6)
