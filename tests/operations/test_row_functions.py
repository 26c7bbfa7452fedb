"""TensorFlow functions that each device calls with its local rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.devices import transfer

RS = np.random.RandomState(0)
LOGITS = RS.normal(size=(8, 7, 5)).astype("float32")
LABELS = RS.randint(1, 5, (8, 3)).astype("int32")
LABEL_LENGTHS = np.array([3, 2, 1, 3, 3, 2, 3, 1], "int32")
LENGTHS = np.array([7, 6, 7, 5, 7, 7, 6, 4], "int32")

LOSSES = {
    "keras.ops": lambda logits, labels: keras.ops.ctc_loss(labels, logits, LABEL_LENGTHS, LENGTHS),
    "time major": lambda logits, labels: tf.nn.ctc_loss(
        labels, tf.transpose(logits, [1, 0, 2]), tf.constant(LABEL_LENGTHS), tf.constant(LENGTHS), blank_index=0
    ),
    "keras.losses": lambda logits, labels: keras.losses.CTC(reduction="none")(labels, logits),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("sizes", [{"batch": 4}, {"batch": 2, "model": 2}], ids=["batch4", "batch2_model2"])
@pytest.mark.parametrize("name", LOSSES)
def test_ctc_and_its_gradient_are_those_of_one_device(name, sizes):
    def step(logits, labels):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = LOSSES[name](logits, labels)
        return loss, tape.gradient(loss, logits)

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**sizes), zero_stage=0)
    placed = [
        transfer.host_to_mesh(each, ("batch",) + (None,) * (each.ndim - 1), strategy.mesh) for each in (LOGITS, LABELS)
    ]
    assert tf.experimental.dtensor.fetch_layout(placed[0]).num_shards(0) == sizes["batch"]
    expected = tf.function(step)(tf.constant(LOGITS), tf.constant(LABELS))
    assert np.abs(expected[1]).max() > 0.1, "premise: the gradient is not zero"
    found = strategy.run(tf.function(step), args=tuple(placed))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(transfer.to_host(ours), theirs, rtol=2e-5, atol=1e-6)


IMAGE = RS.normal(size=(8, 9, 7, 4)).astype("float32")
SEQUENCE = RS.normal(size=(8, 9, 4)).astype("float32")
CONVOLUTIONS = {
    "convolution": (
        lambda x, w: keras.ops.conv(x, w, padding="same", dilation_rate=(2, 1)), IMAGE, (3, 3, 4, 5),
    ),
    "of a sequence": (lambda x, w: keras.ops.conv(x, w, dilation_rate=3), SEQUENCE, (3, 4, 5)),
    "depthwise": (
        lambda x, w: keras.ops.depthwise_conv(x, w, padding="same", dilation_rate=2), IMAGE, (3, 3, 4, 2),
    ),
    "separable": (
        lambda x, w: keras.ops.separable_conv(x, w, tf.ones((1, 1, 4, 5)), dilation_rate=2), IMAGE, (3, 3, 4, 1),
    ),
    "TensorFlow's": (lambda x, w: tf.nn.convolution(x, w, 1, "SAME", None, [2, 2]), IMAGE, (3, 3, 4, 5)),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("sizes", [{"batch": 4}, {"batch": 2, "model": 2}], ids=["batch4", "batch2_model2"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_dilated_convolution_is_that_of_one_device(name, sizes):
    convolve, images, shape = CONVOLUTIONS[name]
    kernel = np.random.RandomState(1).normal(size=shape).astype("float32")

    def step(images, kernel):
        with tf.GradientTape() as tape:
            tape.watch([images, kernel])
            result = convolve(images, kernel)
            loss = tf.reduce_sum(result**2)
        return result, *tape.gradient(loss, [images, kernel])

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**sizes), zero_stage=0)
    placed = (
        transfer.host_to_mesh(images, ("batch",) + (None,) * (images.ndim - 1), strategy.mesh),
        transfer.host_to_mesh(kernel, (None,) * kernel.ndim, strategy.mesh),
    )
    expected = tf.function(step)(tf.constant(images), tf.constant(kernel))
    found = strategy.run(tf.function(step), args=placed)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(transfer.to_host(ours), theirs, rtol=2e-4, atol=2e-4)


class Dilated(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, shape[-1], 4), initializer="glorot_uniform", name="kernel")

    def call(self, images):
        return keras.ops.conv(images, self.kernel, padding="same", dilation_rate=2)


def test_a_dilated_convolution_sends_the_gradient_of_its_kernel_alone():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(IMAGE.shape[1:]), Dilated(), keras.layers.GlobalAveragePooling2D()])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0, analyzer=None)
    tfshard.as_distributed(model).compile("sgd", "mse", strategy=strategy)
    profile = tfshard.profile_step(model, (IMAGE, np.zeros((8, 4), "float32")))
    assert [each.kind for each in profile.collectives] == ["all-reduce"]


def test_a_model_trains_with_ctc_as_on_one_device():
    losses = []
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((7, 5))
        model = keras.Model(inputs, keras.layers.Dense(5)(keras.layers.LSTM(6, return_sequences=True)(inputs)))
        if strategy is None:
            model.compile("sgd", keras.losses.CTC(), jit_compile=False)
        else:
            tfshard.as_distributed(model).compile("sgd", keras.losses.CTC(), strategy=strategy)
        losses.append(model.fit(LOGITS, LABELS, batch_size=8, epochs=3, verbose=0).history["loss"])
    assert losses[1][0] - losses[1][-1] > 1e-3, "premise: it learns"
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_what_other_code_calls_is_tensorflows_own_again():
    before = tf.map_fn, tf.vectorized_map, tf.nn.ctc_loss, tf.nn.convolution
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    sharded = transfer.host_to_mesh(LOGITS, ("batch", None, None), strategy.mesh)
    seen = []

    def step(t):
        seen.append(tf.map_fn)
        return t * 2.0

    strategy.run(tf.function(step), args=(sharded,))
    assert seen and seen[0] is not before[0], "premise: a step has its own"
    assert (tf.map_fn, tf.vectorized_map, tf.nn.ctc_loss, tf.nn.convolution) == before
