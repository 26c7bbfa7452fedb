"""Activations that compute their derivative in the forward pass."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tests import parity
from tfshard.devices import transfer
from tfshard.operations import activations

MEBI = 1 << 20
BLOCKS = 4
RS = np.random.RandomState(0)


ACTIVATIONS = {
    "gelu": keras.activations.gelu,
    "approximate gelu": lambda x: keras.activations.gelu(x, approximate=True),
    "silu": keras.activations.silu,
}


def step(activation, order):
    return parity.derivatives_of(ACTIVATIONS[activation], order)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_of_any_order_are_those_of_one_device(activation, order):
    x = np.concatenate([np.linspace(-9, 9, 48), [0.0, -0.0, 1e-30, -40.0, 40.0, 1e4, -1e4, 0.5]]).astype("float32")
    x = x.reshape(8, 7)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    placed = transfer.host_to_mesh(x, ("batch", None), strategy.mesh)
    made = mock.Mock(wraps=activations._kept)
    with mock.patch.object(activations, "_kept", made):
        ours = [transfer.to_host(each) for each in strategy.run(step(activation, order), args=(placed,))]
    assert made.called == (order > 0), "premise: with its derivative, where there is a tape"
    for our, their in zip(ours, step(activation, order)(tf.constant(x)), strict=True):
        # A third power of 1e4 has no more digits.
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-6)
    if order:
        assert np.abs(ours[1]).max() > 1, "premise"


def blocks(activation):
    """Return `BLOCKS` blocks with a wide activation of 2 MiB per device."""
    inputs = keras.Input((128, 64))
    x = inputs
    for number in range(BLOCKS):
        y = keras.layers.Dense(512, activation=activation, name=f"up_{number}")(x)
        x = x + keras.layers.Dense(64, name=f"down_{number}")(y)
    return keras.Model(inputs, x), RS.normal(size=(32, 128, 64)).astype("float32")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mesh", [{"batch": 4}, {"replica": 2, "batch": 2}], ids=["batch4", "replicas"])
@pytest.mark.parametrize("stage", [0, 3])
def test_two_tensors_of_each_wait_for_the_backward_pass(stage, mesh, activation):
    """A ReLU keeps its result; these keep their derivative, too. Before, devices kept one or two more tensors."""
    added = []
    for function in (keras.activations.relu, ACTIVATIONS[activation]):
        model, x = blocks(function)
        model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), zero_stage=stage))
        added.append(min(tfshard.profile_step(model, (x, x)).peak.device_added for _ in range(3)))
    assert added[0] > BLOCKS * 2 * MEBI, "premise: the results"
    assert (added[1] - added[0]) / (BLOCKS * 2 * MEBI) == pytest.approx(1, abs=0.4)


def small():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(16, activation="gelu", name="block_0")(inputs)
    x = x + keras.layers.Dense(16, ACTIVATIONS["approximate gelu"], name="block_1")(x)
    x = x + keras.layers.Dense(16, "silu", name="block_2")(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 0}, {"zero_stage": 3}, {"zero_stage": 2, "microbatches": 2},
        {"mesh": {"replica": 2, "batch": 2}},
        {"mesh": {"batch": 2, "model": 2}, "layout_map": "auto"}, {"recompute": True}, {"precision": "mixed_bfloat16"},
        {"microbatches": 2, "recompute": True},
    ],
)  # fmt: skip
def test_models_with_these_train_as_on_one_device(options):
    options = dict(options)
    mesh = tfshard.create_mesh(**options.pop("mesh", {"batch": 4}))
    is_recomputed, precision = options.pop("recompute", False), options.pop("precision", "float32")

    def build():
        with keras.RematScope(mode="full" if is_recomputed else None):
            return small()

    batches = [(RS.normal(size=(8, 6)).astype("float32"), RS.randint(0, 4, 8)) for _ in range(2)]
    strategy = tfshard.ShardedStrategy(mesh, **options)
    how = {"optimizer": lambda: keras.optimizers.Adam(1e-2), "loss": keras.losses.SparseCategoricalCrossentropy(True)}
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        reference = parity.train(small, batches, **how)
        with mock.patch.object(activations, "_kept", wraps=activations._kept) as kept:
            ours = parity.train(build, batches, strategy=strategy, **how)
    finally:
        keras.config.set_dtype_policy(before)
    assert kept.call_count >= 3, "premise"
    tolerance = 1e-5 if precision == "float32" else 2e-2
    parity.assert_same(ours, reference, rtol=tolerance, atol=tolerance, slots=precision == "float32")


def test_a_prediction_makes_no_derivative():
    model, x = small(), RS.normal(size=(8, 6)).astype("float32")
    expected = model.predict(x, verbose=0)
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    with mock.patch.object(activations, "_kept", wraps=activations._kept) as kept:
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
        model.evaluate(x, np.zeros((8, 4), "float32"), verbose=0)
    assert not kept.called


def test_a_gelu_is_tensorflows_to_the_bit():
    x = tf.constant(RS.normal(size=1000).astype("float32") * 3)
    np.testing.assert_array_equal(activations._exact(x)[0], tf.nn.gelu(x))
