"""Cross entropy of logits with integer labels, by operations on local shards."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tests import parity
from tfshard.devices import transfer
from tfshard.operations import cross_entropies

# These tests shard classes although that sends more.
pytestmark = pytest.mark.filterwarnings("ignore:transposed")
CLASSES = 24
RS = np.random.RandomState(0)
BY_CLASS = tfshard.LayoutMap()
BY_CLASS.column("out")
BY_CLASS.replicated("hidden/.*")
# Options of a strategy, with the axis that shards the classes.
LAYOUTS = [
    ({"mesh": {"batch": 4}}, None),
    ({"mesh": {"batch": 4}, "zero_stage": 3}, None),
    ({"mesh": {"replica": 2, "batch": 2}}, None),
    ({"mesh": {"batch": 2, "model": 2}, "layout_map": BY_CLASS}, "model"),
    ({"mesh": {"model": 4}, "layout_map": BY_CLASS}, "model"),
    ({"mesh": {"batch": 4}, "microbatches": 2}, None),
]


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(cross_entropies, "LEAST_ELEMENTS", 1)


@pytest.fixture
def made():
    with mock.patch.object(cross_entropies._Labels, "of", wraps=cross_entropies._Labels.of) as made:
        yield made


def build(timesteps=None):
    inputs = keras.Input((6,) if timesteps is None else (timesteps, 6))
    x = keras.layers.Dense(16, "tanh", name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="out")(x))


def batches_of(rows, timesteps=None):
    shape = (rows,) if timesteps is None else (rows, timesteps)
    return [(RS.normal(size=(*shape, 6)).astype("float32"), RS.randint(0, CLASSES, shape)) for _ in range(2)]


def strategy_of(options):
    return tfshard.ShardedStrategy(**options | {"mesh": tfshard.create_mesh(**options["mesh"])})


def loss(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("timesteps", [None, 3])
@pytest.mark.parametrize("rows", [8, 6, 7])
@pytest.mark.parametrize(("options", "axis"), LAYOUTS)
def test_models_train_as_on_one_device(options, axis, rows, timesteps, made):
    how = {"optimizer": lambda: keras.optimizers.Adam(1e-2), "loss": loss()}
    batches = batches_of(rows, timesteps)
    reference = parity.train(lambda: build(timesteps), batches, **how)
    ours = parity.train(lambda: build(timesteps), batches, strategy=strategy_of(options), **how)
    assert {call.args[3] for call in made.call_args_list} == {axis}, "premise"
    parity.assert_same(ours, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["weights", "ignored", "probabilities", "int8 labels", "a column of labels"])
@pytest.mark.parametrize(("options", "axis"), [LAYOUTS[0], LAYOUTS[3]])
def test_options_of_the_loss_are_those_of_one_device(options, axis, given, made):
    x, y = RS.normal(size=(20, 6)).astype("float32"), RS.randint(0, CLASSES, 20)
    weights = RS.uniform(size=20).astype("float32") if given == "weights" else None
    of = keras.losses.SparseCategoricalCrossentropy() if given == "probabilities" else loss(
        ignore_class=3 if given == "ignored" else None
    )  # fmt: skip
    if given == "ignored":
        y[::4] = 3
    y = y.astype("int8") if given == "int8 labels" else y[:, None] if given == "a column of labels" else y

    def run(**strategy):
        keras.utils.set_random_seed(1)
        model = build()
        if given == "probabilities":
            model = keras.Sequential([model, keras.layers.Softmax()])
        model.compile(keras.optimizers.SGD(0.5), of, metrics=["accuracy"], **strategy)
        history = model.fit(x, y, sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return [*history["loss"], *history["accuracy"], *model.evaluate(x, y, batch_size=8, verbose=0)], model.predict(
            x, verbose=0
        )

    expected, ours = run(), run(strategy=strategy_of(options))
    assert made.called, "premise"
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(ours[1], expected[1], atol=1e-5)


def step(order, labels):
    def value(logits):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)

    return parity.derivatives_of(value, order)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_derivatives_are_those_of_one_device(order, dtype, made):
    logits, labels = RS.normal(size=(8, CLASSES)).astype(dtype), RS.randint(0, CLASSES, 8)
    logits[1] *= 100.0
    logits[2] = 1e4 * np.sign(logits[2])
    logits[3, 5] = -np.inf
    labels[3] = 2
    strategy = strategy_of(LAYOUTS[0][0])
    placed = transfer.host_to_mesh(logits, ("batch", None), strategy.mesh)
    ours = [transfer.to_host(each) for each in strategy.run(step(order, labels), args=(placed,))]
    assert made.called, "premise"
    for our, their in zip(ours, step(order, labels)(tf.constant(logits)), strict=True):
        np.testing.assert_allclose(our, their, rtol=2e-5, atol=1e-6)
    assert np.abs(ours[0]).max() > 1e3, "premise: a label far below the largest logit"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("label", [-1, CLASSES])
@pytest.mark.parametrize(("options", "axis"), [LAYOUTS[0], LAYOUTS[3], LAYOUTS[4]])
def test_a_label_that_is_no_class_fails_the_step(options, axis, label, made):
    model = build()
    model.compile("sgd", loss(), strategy=strategy_of(options))
    (x, y), _ = batches_of(8)
    model.train_on_batch(x, y)
    before = [variable.numpy() for variable in model.trainable_variables]
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{label}\] does not index into .*logit_of_each_label"):
        model.train_on_batch(x, np.where(np.arange(8) == 5, label, y))
    assert made.called, "premise"
    for variable, value in zip(model.trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert np.isfinite(model.train_on_batch(x, y))


def test_what_is_small_or_of_another_dtype_is_left_to_tensorflow(made, monkeypatch):
    strategy = strategy_of(LAYOUTS[0][0])

    def run(dtype):
        logits = transfer.host_to_mesh(RS.normal(size=(8, CLASSES)).astype(dtype), ("batch", None), strategy.mesh)
        return strategy.run(step(0, np.arange(8)), args=(logits,))

    run("float16")
    assert not made.called
    monkeypatch.setattr(cross_entropies, "LEAST_ELEMENTS", 2 * CLASSES + 1)  # On a device.
    run("float32")
    assert not made.called
    monkeypatch.setattr(cross_entropies, "LEAST_ELEMENTS", 2 * CLASSES)
    run("float32")
    assert made.called


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("options", "most"), [({"mesh": {"batch": 4}}, 1.01), ({"mesh": {"model": 4}, "layout_map": BY_CLASS}, 0.6)]
)
def test_a_step_holds_no_more_than_with_tensorflows_kernel(options, most, monkeypatch):
    """The logits' buffer holds all intermediate results.

    With sharded classes, no one-hot vectors of that size exist.
    """
    inputs = keras.Input((128, 6))
    x = keras.layers.Dense(16, "tanh", name="hidden")(inputs)
    added = []
    for least in (1 << 62, 1):
        monkeypatch.setattr(cross_entropies, "LEAST_ELEMENTS", least)
        model = keras.Model(inputs, keras.layers.Dense(2048, name="out")(x))
        model.compile("sgd", loss(), strategy=strategy_of(options))
        batch = RS.normal(size=(16, 128, 6)).astype("float32"), RS.randint(0, 2048, (16, 128))
        added.append(min(tfshard.profile_step(model, batch).peak.device_added for _ in range(2)))
    assert added[0] >= 4 << 20, "premise: logits of 4 MiB on a device"
    assert added[1] <= most * added[0]
