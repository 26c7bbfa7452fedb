"""Parts of a distributed model, and models around it, work as ordinary Keras models outside steps."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.trainer import model_supports_jit

import parity
import tfshard
from tfshard.errors import StrategyError

RS = np.random.RandomState(0)
X = RS.randn(16, 6).astype("float32")
Y = RS.randn(16, 4).astype("float32")
Z = RS.randn(16, 3).astype("float32")
GROUPED = tfshard.ParameterAnalyzer()
KINDS = {
    "stage 0": ({"batch": 4}, {"zero_stage": 0}),
    "grouped": ({"batch": 4}, {}),
    "alone": ({"batch": 4}, {"analyzer": None}),
    "model axis": ({"batch": 2, "model": 2}, {"layout_map": {"up/(kernel|bias)": ("model",), ".*": ()}}),
}
pytestmark = pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")


def strategy(kind: str = "grouped") -> tfshard.ShardedStrategy:
    axes, options = KINDS[kind]
    return tfshard.ShardedStrategy(tfshard.create_mesh(**axes), **options)


def compiled(chosen: tfshard.ShardedStrategy | None, model: keras.Model | None = None) -> keras.Model:
    if model is None:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, "tanh", name="up")(inputs)
        hidden = keras.layers.BatchNormalization(name="norm")(hidden)
        model = keras.Model(inputs, keras.layers.Dense(4, name="down")(hidden))
    # XLA takes longer to compile the reference than the reference to train.
    tfshard.as_distributed(model).compile(keras.optimizers.Adam(0.02), "mse", strategy=chosen, jit_compile=False)
    return model


def fit(model: keras.Model, y: np.ndarray = Y) -> list:
    return model.fit(X, y, batch_size=8, shuffle=False, verbose=0).history["loss"]


def assert_close(ours: list, theirs: list) -> None:
    assert len(ours) == len(theirs)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(our, their, atol=2e-5, err_msg=str(number))


def assert_sharded(model: keras.Model, kind: str) -> None:
    variables = [v.value for v in model.trainable_variables]
    assert all(isinstance(v, tfshard.storage.ShardedVariable) for v in variables)
    assert ("batch" in parity.shard_axes(model)) == (kind != "stage 0")
    assert ("model" in parity.shard_axes(model)) == (kind == "model axis")
    assert any(v.layout.group is not None for v in variables) == (kind != "alone")


def used(model: keras.Model) -> tuple[list, list]:
    """Use parts of a model and models around it three times, with training between.

    Returns the results and the final weights.
    """
    traced, training = tf.function(model), tf.function(lambda x: model(x, training=True))

    @tf.function
    def saliency(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.reduce_sum(model(x) ** 2)
        return tape.gradient(outputs, x)

    cut = keras.Model(model.input, model.layers[1].output)
    wrapped = keras.Sequential([model, keras.layers.Softmax()])
    wrapped.compile(loss="mse", jit_compile=False)
    results = []
    for _ in range(3):
        results += [cut.predict(X, verbose=0), wrapped.predict(X, verbose=0), wrapped(X), traced(X), saliency(X)]
        results += [training(X), model.get_layer("norm").moving_mean.numpy()]  # This writes, too.
        results += [wrapped.evaluate(X, Y, verbose=0)]
        results += fit(model)
    return results, model.get_weights()


@functools.cache
def plain() -> tuple[list, list]:
    return used(compiled(None))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_wrapped_models_predict_with_the_values_of_that_moment(kind):
    """The functions are traced at first, and used three times with training between."""

    model = compiled(strategy(kind))
    (ours, weights), (theirs, expected) = used(model), plain()
    assert_sharded(model, kind)
    assert np.abs(theirs[0] - theirs[len(theirs) // 3]).max() > 1e-3, "premise: training shows"
    assert_close(ours, theirs)
    assert_close(weights, expected)


def around_one(chosen: tfshard.ShardedStrategy | None, way: str = "") -> tuple:
    model = compiled(chosen)
    cut = keras.Model(model.input, model.layers[1].output)
    results = [*fit(model), cut.predict(X, verbose=0)]

    def around():
        keras.utils.set_random_seed(1)
        return keras.Model(model.input, keras.layers.Dense(3, name="head")(model.output))

    if way == "scope" and chosen is not None:
        with chosen.scope():
            outer = around()
        outer.compile(keras.optimizers.Adam(0.02), "mse", jit_compile=False)
        assert "strategy" in type(outer).compile.__annotations__, "born under the scope"
    else:
        outer = compiled(chosen, around())
    # Alternately train one model, and check that the other sees the result in functions traced before.
    for _ in range(2):
        results += [*fit(outer, Z), *fit(model), outer.train_on_batch(X[:8], Z[:8])]
        results += [outer.predict(X, verbose=0), model.predict(X, verbose=0), cut.predict(X, verbose=0)]
    return outer, results


@functools.cache
def plain_around_one() -> tuple:
    return around_one(None)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), [("as_distributed", "grouped"), ("scope", "model axis")])
def test_a_model_around_a_distributed_one_trains_under_the_same_strategy(way, kind):
    chosen = strategy(kind)
    (outer, ours), (reference, theirs) = around_one(chosen, way), plain_around_one()
    assert_sharded(outer, kind)
    assert_close(ours, theirs)
    assert_close(outer.get_weights(), reference.get_weights())


def test_a_model_that_was_traced_before_its_variables_were_sharded_sees_them_and_a_function_fails():
    model = compiled(None)
    cut, traced = keras.Model(model.input, model.layers[1].output), tf.function(model)
    before = cut.predict(X, verbose=0)
    traced(X)
    compiled(strategy(), model)
    fit(model)
    after = cut.predict(X, verbose=0)
    assert np.abs(before - after).max() > 1e-3
    np.testing.assert_allclose(after, model.layers[1](X), atol=1e-6)
    # The function holds the old variables: it raises an error instead of using their old values.
    with pytest.raises(StrategyError, match="traced before variables moved"):
        traced(X)


def test_an_update_outside_of_a_step_is_refused_by_name_and_a_frozen_model_trains_its_head():
    model = compiled(strategy())
    text = r"Variable 'up/kernel' is sharded.*as_distributed\(model\).compile\(..., strategy=strategy\).*strategy.run"
    outer = keras.Sequential([model, keras.layers.Dense(3)])
    outer.compile("sgd", "mse")
    with pytest.raises(tfshard.errors.StrategyError, match=text):
        outer.fit(X, Z, verbose=0)
    assert_close(model.get_weights(), compiled(None).get_weights())

    def head(body):
        body.trainable = False
        keras.utils.set_random_seed(2)
        outer = keras.Sequential([body, keras.layers.Dense(3)])
        outer.compile("sgd", "mse", jit_compile=False)
        return [*fit(outer, Z), *fit(outer, Z), outer.get_weights()[-1]]

    results = head(model)
    assert isinstance(model.layers[1].kernel.value, tfshard.storage.ShardedVariable)
    assert_close(results, head(compiled(None)))


def test_plain_models_around_it_are_not_compiled_by_xla():
    """On GPUs, Keras compiles supporting models with XLA, which cannot use variables of other devices."""
    model = compiled(strategy())
    assert_sharded(model, "grouped")
    assert model_supports_jit(compiled(None)), "premise"
    assert not model_supports_jit(keras.Model(model.input, model.output))
    wrapped, plain_one = (keras.Sequential([body, keras.layers.Softmax()]) for body in (model, compiled(None)))
    with pytest.warns(UserWarning, match="Model doesn't support `jit_compile=True`"):
        wrapped.compile(loss="mse", jit_compile=True)
    assert_close([wrapped.predict(X, verbose=0)], [plain_one.predict(X, verbose=0)])


def test_a_function_orders_its_reads_and_writes():
    with strategy().scope():
        kernel = keras.Variable(np.ones((4, 3), "float32"), name="kernel")
        count = keras.Variable(0, dtype="int32", name="count")
    assert "batch" in kernel.value.layout.storage

    @tf.function
    def step():
        before = tf.identity(kernel.value)
        kernel.assign(before * 2)
        if count > 0:
            kernel.assign_add(tf.ones((4, 3)))
        count.assign_add(1)
        return before, kernel.value + 0.0

    for first, last in ((1, 2), (2, 5), (5, 11)):
        before, after = step()
        assert (float(before[0, 0]), float(after[3, 2])) == (first, last)
        np.testing.assert_array_equal(kernel.numpy(), np.full((4, 3), last))
    assert int(count) == 3
