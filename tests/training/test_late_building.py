"""Models that get variables after `compile`, and variables outside the mesh when a step reads them."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard

RS = np.random.RandomState(0)
X = RS.normal(size=(26, 6)).astype("float32")
Y = RS.normal(size=(26, 4)).astype("float32")
Dense = keras.layers.Dense


def strategy(layout_map=None, **axes: int) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(**(axes or {"batch": 4})), layout_map)


def build(way: str, chosen: tfshard.ShardedStrategy | None) -> keras.Model:
    """Return a compiled model without variables: on one device, or in one of the README's three ways."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    layers = [Dense(8, "tanh", name="up"), Dense(4, name="down")]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if chosen is None:
        model = keras.Sequential(layers)
        model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    elif way == "scope":
        with chosen.scope():
            model = keras.Sequential(layers)
            model.compile("sgd", "mse", metrics=["mae"])
            model.optimizer = optimizer
    else:
        model = tfshard.Sequential(layers) if way == "tfshard" else tfshard.as_distributed(keras.Sequential(layers))
        model.compile(optimizer, "mse", metrics=["mae"], strategy=chosen)
    assert not model.variables or not any("kernel" in v.path for v in model.variables)
    return model


LATE = {
    "called": lambda m: m(X[:1]),
    "built": lambda m: m.build((None, 6)),
    "added": lambda m: (m(X[:1]), m.add(Dense(4, name="more"))),
    "lora": lambda m: (m(X[:1]), m.layers[0].enable_lora(2)),
    "predicted": lambda m: m.predict(X, verbose=0),
}


def trained(model: keras.Model) -> tuple[dict, list]:
    # 4 devices do not divide 10 rows, and not the 6 rows of the last batch.
    history = model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
    return history, model.get_weights()


def assert_trains_like(model: keras.Model, reference: tuple[dict, list]) -> None:
    (history, weights), (expected, expected_weights) = trained(model), reference
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, err_msg=key)
    for ours, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for variable in model.variables:
        assert isinstance(variable.value, tfshard.storage.ShardedVariable), variable.path
    assert parity.shard_axes(model) >= {"batch"}


def changed(model: keras.Model, late: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    LATE[late](model)
    return model


@functools.cache
def plain(late: str) -> tuple[dict, list]:
    """Return the result of one device, which is the same for all ways."""
    return trained(changed(build("", None), late))


# Each way and each change at least once.
CASES = [("tfshard", "called"), ("as_distributed", "called"), ("scope", "called"), ("tfshard", "built"),
         ("as_distributed", "added"), ("tfshard", "lora"), ("scope", "predicted")]  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("way", "late"), CASES)
def test_a_model_that_is_built_after_compile_is_sharded_and_trains_like_one_device(way: str, late: str):
    chosen = strategy()
    model = changed(build(way, chosen), late)
    assert_trains_like(model, plain(late))
    report = chosen.report(model)
    assert report.bytes_per_device("parameter") * 4 >= report.bytes_on_one_device("parameter") > 0
    assert report.bytes_per_device("slot") > 0


@pytest.mark.slow
def test_layers_that_are_built_late_keep_the_layout_map():
    layout_map = tfshard.LayoutMap()
    layout_map.column(".*up")
    layout_map.row(".*down")
    chosen = strategy(layout_map, batch=2, model=2)
    reference, model = build("tfshard", None), build("tfshard", chosen)
    for each in (reference, model):
        each(X[:1])
    assert_trains_like(model, trained(reference))
    assert model.layers[0].kernel.value.layout.compute == (None, "model")
    assert model.layers[1].kernel.value.layout.compute == ("model", None)


@pytest.mark.slow
def test_a_layer_that_got_lora_after_training_trains_on_after_compile():
    chosen = strategy()
    reference, model = build("tfshard", None), build("tfshard", chosen)
    for each, kwargs in ((reference, {"jit_compile": False}), (model, {"strategy": chosen})):
        each.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
        keras.utils.set_random_seed(1)
        each.layers[0].enable_lora(2)
        each.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **kwargs)
    assert_trains_like(model, trained(reference))


@pytest.mark.slow
def test_a_model_around_one_that_was_traced_leaves_its_variables_where_the_trace_finds_them():
    chosen = strategy()
    keras.utils.set_random_seed(0)
    inner = tfshard.as_distributed(keras.Sequential([keras.Input((6,)), Dense(8), Dense(4)]))
    inner.compile("sgd", "mse", strategy=chosen)
    before = inner.evaluate(X, Y, verbose=0)
    outer = tfshard.as_distributed(keras.Sequential([keras.Input((6,)), inner, Dense(4)]))
    outer.compile(keras.optimizers.SGD(0.5), "mse", strategy=chosen)
    outer.fit(X, Y, epochs=2, verbose=0)
    # Evaluate by the function that was traced first, and by a new one.
    after = inner.evaluate(X, Y, verbose=0)
    hidden = X @ inner.get_weights()[0] + inner.get_weights()[1]
    outputs = hidden @ inner.get_weights()[2] + inner.get_weights()[3]
    assert abs(before - after) > 1e-3, "premise: the weights have changed"
    np.testing.assert_allclose(after, np.mean((outputs - Y) ** 2), rtol=1e-5)


def test_a_submodel_that_predicted_before_it_was_sharded_predicts_with_the_trained_weights():
    keras.utils.set_random_seed(0)
    generator = keras.Sequential([keras.Input((6,)), Dense(4)])
    generator.predict(X, verbose=0)
    model = tfshard.as_distributed(keras.Sequential([keras.Input((6,)), generator, Dense(4)]))
    model.compile(keras.optimizers.SGD(0.5), "mse", strategy=strategy())
    model.fit(X, Y, verbose=0)
    assert parity.shard_axes(model) == {"batch"}
    kernel, bias = generator.get_weights()
    np.testing.assert_allclose(np.array(generator(X)), X @ kernel + bias, rtol=1e-4, atol=1e-5)


class Counting(keras.Model):
    def __init__(self, counter: tf.Variable):
        super().__init__()
        self.dense = Dense(4)
        self.counter = [lambda: counter]

    def call(self, inputs):
        return self.dense(inputs) * self.counter[0]()


def test_a_variable_that_is_not_on_the_mesh_is_an_error_that_names_it():
    model = tfshard.as_distributed(Counting(tf.Variable(2.0, name="factor")))
    model.compile("sgd", "mse", strategy=strategy())
    with pytest.raises(tfshard.errors.StrategyError, match=r"'factor:0', which is not on the mesh.*scope\(\)"):
        model.fit(X, Y, verbose=0)


def test_a_function_around_run_that_reads_a_variable_off_the_mesh_is_an_error_that_names_it():
    chosen = strategy()
    plain = keras.Sequential([keras.Input((6,)), Dense(4, name="plain")])
    function = tf.function(lambda batch: chosen.run(lambda x: tf.reduce_sum(plain(x)), args=(batch,)))
    batch = next(iter(chosen.experimental_distribute_dataset(tf.data.Dataset.from_tensors(X))))
    with pytest.raises(tfshard.errors.StrategyError, match="plain/kernel', which is not on the mesh"):
        function(batch)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_is_built_outside_of_the_scope_once_its_model_is_compiled(stage: int):
    def trained(chosen):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), Dense(16, "tanh"), Dense(4)])
        model.compile(keras.optimizers.Nadam(1e-2), "mse", **({} if chosen is None else {"strategy": chosen}))
        model.optimizer.build(model.trainable_variables)
        slots = [variable.value for variable in model.optimizer.variables if "momentum" in variable.path]
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        return model, slots

    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage)
    (model, slots), (plain, _) = trained(chosen), trained(None)
    assert slots and all(isinstance(slot, tfshard.storage.ShardedVariable) for slot in slots)
    for ours, theirs in zip(model.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["run a function", "run in a function", "run eagerly"])
@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_of_a_custom_loop_is_on_the_mesh_or_an_error_names_it(inside: bool, way: str):
    chosen = strategy()
    with chosen.scope():
        model = keras.Sequential([keras.Input((6,)), Dense(4)])
    with chosen.scope() if inside else contextlib.nullcontext():
        optimizer = keras.optimizers.Adam(name="mine")

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    if way == "run a function":
        run = functools.partial(chosen.run, tf.function(step))
    elif way == "run in a function":
        run = tf.function(lambda args: chosen.run(step, args=args))
    else:
        run = functools.partial(chosen.run, step)
    dataset = tf.data.Dataset.from_tensors((X[:8], Y[:8])).repeat(3)
    batches = list(chosen.experimental_distribute_dataset(dataset))
    if inside:
        losses = [float(run(batch)) for batch in batches]
        assert losses[2] < losses[0] and int(optimizer.iterations.numpy()) == 3
    else:
        with pytest.raises(tfshard.errors.StrategyError, match="uses an optimizer that belongs to another strategy"):
            run(batches[0])
