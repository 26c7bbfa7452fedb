"""A model compiled under a second strategy moves to that strategy, and continues to train as on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.storage.variables import ShardedVariable
from tfshard.training import reshard

layers = keras.layers
TOKENS = np.random.RandomState(0).randint(0, 9, (16, 6))
CLASSES = np.arange(16) % 4

STRATEGIES = {
    "stage 3": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)),
    "stage 1, alone": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=1, analyzer=None),
    "model axis": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map="auto"),
    "tensor": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(model=4), layout_map="auto", zero_stage=0),
    "replicas": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(replica=2, batch=2), zero_stage=2),
    "two devices": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=2), slot_dtype="bfloat16"),
}
# Each strategy is left once and entered once.
ROUNDS = list(zip(STRATEGIES, [*list(STRATEGIES)[1:], next(iter(STRATEGIES))], strict=True))


class Mean(keras.Model):
    """Has a custom metric and an inner model."""

    def __init__(self):
        super().__init__(name="outer")
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(9, 16)(inputs)
        x = x + layers.MultiHeadAttention(4, 4)(x, x)
        x = layers.LayerNormalization()(layers.Dense(16)(layers.Dense(32, "gelu")(x)))
        self.body = keras.Model(inputs, layers.LSTM(8)(x), name="body")
        self.norm = layers.BatchNormalization()
        self.head = layers.Dense(4)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, tokens, training=False):
        outputs = self.head(self.norm(self.body(tokens), training=training))
        self.seen.update_state(outputs)
        return outputs


def run(before, after, *, again: bool) -> tuple[keras.Model, list]:
    """Train two epochs under each strategy. Returns the model, the logs of `fit`, and the weights.

    Args:
        before: The first strategy; None for plain Keras.
        after: The second strategy.
        again: True to give the second strategy the optimizer and the metric of the first.
    """
    keras.utils.set_random_seed(1)
    model, told = Mean(), []
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer, metric = keras.optimizers.SGD(0.1, momentum=0.9), keras.metrics.SparseCategoricalAccuracy(name="right")
    for number, strategy in enumerate((before, after)):
        if number == 1 and not again:
            optimizer, metric = keras.optimizers.SGD(0.05), keras.metrics.SparseCategoricalAccuracy(name="right")
        extra = {} if strategy is None else {"strategy": strategy}
        model.compile(optimizer, loss, metrics=[metric], jit_compile=False, **extra)
        told += model.fit(TOKENS, CLASSES, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        told += model.evaluate(TOKENS, CLASSES, verbose=0)
        told += [model.predict(TOKENS, verbose=0), np.array(model.seen.result())]
    told += [int(optimizer.iterations.numpy()), *[np.array(weight) for weight in model.get_weights()]]
    return model, told


@functools.cache
def reference(again: bool) -> list:
    return run(None, None, again=again)[1]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("again", [True, False], ids=["same optimizer", "new optimizer"])
@pytest.mark.parametrize(("before", "after"), ROUNDS, ids=[f"{a} to {b}" for a, b in ROUNDS])
def test_a_model_trains_on_under_another_strategy(before, after, again):
    # bfloat16 slots are rounded.
    tolerance = 3e-2 if "two devices" in (before, after) else 1e-4
    strategy = STRATEGIES[after]()
    model, told = run(STRATEGIES[before](), strategy, again=again)
    for ours, theirs in zip(told, reference(again), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance / 5)
    for variable in (*model.variables, *model.optimizer.variables):
        assert isinstance(variable.value, ShardedVariable) and variable.value.mesh == strategy.mesh, variable.path
    groups = {variable.value.layout.group for variable in model.trainable_variables}
    assert (groups == {None}) == (strategy.config.analyzer is None), "as planned"
    assert strategy.report(model).variables
    strategy.check_consistency(model)


def small(strategy, **options) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, "tanh", name="up"), layers.Dense(4, name="down")])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False, strategy=strategy, **options)
    return model


X, Y = np.ones((8, 6), np.float32), np.zeros((8, 4), np.float32)


def test_a_strategy_like_the_one_before_moves_nothing():
    """Happens when a notebook cell is run again."""
    model = small(STRATEGIES["stage 3"]())
    model.train_on_batch(X, Y)
    rests = [variable.value.storage for variable in model.variables]
    slots = [variable.value.storage for variable in model.optimizer.variables]
    optimizer, again = model.optimizer, STRATEGIES["stage 3"]()
    model.compile(optimizer, "mse", strategy=again)
    before = float(model.evaluate(X, Y, verbose=0))
    assert float(model.train_on_batch(X, Y)) == pytest.approx(before, rel=1e-5)
    assert [variable.value.storage for variable in model.variables] == rests
    assert [variable.value.storage for variable in model.optimizer.variables] == slots


def test_functions_that_were_traced_before_a_move_say_what_to_do():
    """The functions do not run: no device reads a buffer that the variables left, scalars included."""
    old, new = STRATEGIES["stage 3"](), STRATEGIES["two devices"]()
    model = small(old)
    batch = next(iter(old.experimental_distribute_dataset(tf.data.Dataset.from_tensors(X))))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    around = tf.function(lambda x: old.run(step, args=(x,)))
    concrete, inside = around.get_concrete_function(batch), tf.function(step)
    loss = float(around(batch))
    old.run(inside, args=(X,))
    values = model.get_weights()
    model.compile(keras.optimizers.Adam(0.01), "mse", strategy=new)
    assert all(variable.value.mesh == new.mesh != old.mesh for variable in model.variables), "premise"
    for function in (around, concrete):
        with pytest.raises(tfshard.errors.StrategyError, match="Make the function again"):
            function(batch)
    # Traced after the move, under the strategy before.
    for function in (tf.function(lambda x: old.run(step, args=(x,))), lambda x: old.run(tf.function(step), args=(x,))):
        with pytest.raises(tfshard.errors.StrategyError, match="on the mesh of another strategy"):
            function(batch)
    for function in (inside, step):
        with pytest.raises(tfshard.errors.StrategyError, match="on the mesh of another strategy"):
            old.run(function, args=(X,))
    for ours, theirs in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert float(new.run(tf.function(step), args=(X,))) < loss


def test_a_function_of_a_plain_model_says_what_to_do_once_the_model_is_sharded():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
    outputs = tf.function(lambda x: model(x))
    expected = outputs(X).numpy()
    model.compile("sgd", "mse", strategy=STRATEGIES["stage 3"]())
    with pytest.raises(tfshard.errors.StrategyError, match="reads variable '.*kernel'"):
        outputs(X)
    np.testing.assert_allclose(tf.function(lambda x: model(x))(X), expected, rtol=1e-5)


def test_functions_of_a_plain_model_run_on_if_a_strategy_refuses_the_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16), layers.Dense(4)])
    outputs = tf.function(lambda x: model(x))
    expected = outputs(X).numpy()

    def fail(variable, *args, **kwargs):
        if variable is model.layers[1].kernel:
            raise MemoryError("premise")
        return original(variable, *args, **kwargs)

    original = reshard.replace
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(reshard, "replace", fail)
        model.compile("sgd", "mse", strategy=STRATEGIES["stage 3"]())
    np.testing.assert_array_equal(outputs(X), expected)


def test_what_a_model_had_under_the_strategy_before_is_freed_and_fails_where_it_is_read():
    old = STRATEGIES["stage 3"]()
    model = small(old)
    model.train_on_batch(X, Y)

    @tf.function
    def outputs(x):
        return model(x)

    expected = outputs(X).numpy()
    storage = model.get_layer("up").kernel.value.storage
    model.compile("sgd", "mse", strategy=STRATEGIES["model axis"]())
    assert not storage.members
    with pytest.raises(tfshard.errors.StrategyError, match="reads variables of model 'sequential"):
        outputs(X)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-5)
    with pytest.raises(tfshard.errors.StrategyError, match="Compile it with this one"):
        old.report(model)


def test_a_model_stays_where_it_is_if_the_other_strategy_cannot_take_it():
    old = STRATEGIES["stage 3"]()
    model = small(old)
    model.train_on_batch(X, Y)
    values = model.get_weights()
    mesh = tfshard.create_mesh(batch=2, model=2)
    with pytest.raises(tfshard.errors.LayoutError):
        model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(mesh, {".*up/kernel": ("model", "model")}))
    with pytest.raises(tfshard.errors.StrategyError, match="pipeline axis"):
        pipeline = tfshard.ShardedStrategy(tfshard.create_mesh(pipeline=2, batch=2))
        model.compile("sgd", "mse", strategy=pipeline)
    assert all(variable.value.mesh == old.mesh for variable in model.variables)
    for ours, theirs in zip(model.get_weights(), values, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    model.train_on_batch(X, Y)


def test_a_model_around_one_that_goes_elsewhere_says_what_to_do():
    old, new = STRATEGIES["stage 3"](), STRATEGIES["model axis"]()
    body = small(old)
    around = keras.Sequential([keras.Input((6,)), body, layers.Softmax()])
    around.compile("sgd", "mse", strategy=old)
    around.train_on_batch(X, Y)
    body.compile("sgd", "mse", strategy=new)
    body.train_on_batch(X, Y)
    with pytest.raises(tfshard.errors.StrategyError, match="is on another mesh, because another model shares it"):
        around.train_on_batch(X, Y)
    around.compile("sgd", "mse", strategy=new)
    around.train_on_batch(X, Y)
    body.train_on_batch(X, Y)


@pytest.mark.parametrize("after", ["stage 1, alone", "two devices"])
def test_a_model_that_shares_layers_with_one_that_moves(after):
    """The other model trains on under its strategy if both strategies have one mesh. Otherwise an error says so."""

    def steps(old=None, new=None):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        shared = layers.Dense(16, "tanh", name="shared")(inputs)
        models = [keras.Model(inputs, layers.Dense(4, name=name)(shared)) for name in ("one", "two")]
        for model in models:
            model.compile(
                keras.optimizers.Adam(0.01), "mse", jit_compile=False, **({} if old is None else {"strategy": old})
            )
            told = [float(model.train_on_batch(X, Y))]
        models[0].compile(models[0].optimizer, "mse", jit_compile=False, **({} if new is None else {"strategy": new}))
        yield from told
        for model in models[::-1] * 2:
            yield float(model.train_on_batch(X, Y))
            yield float(model.evaluate(X, Y, verbose=0))

    old, new = STRATEGIES["stage 3"](), STRATEGIES[after]()
    if old.mesh == new.mesh:
        np.testing.assert_allclose(list(steps(old, new)), list(steps()), rtol=1e-4)
        return
    inputs = keras.Input((6,))
    shared = layers.Dense(16, name="shared")(inputs)
    models = [keras.Model(inputs, layers.Dense(4)(shared)) for _ in range(2)]
    for model in models:
        model.compile("sgd", "mse", strategy=old)
        model.train_on_batch(X, Y)
    models[0].compile("sgd", "mse", strategy=new)
    for use in (
        lambda: models[1].train_on_batch(X, Y),
        lambda: models[1].test_on_batch(X, Y),
        lambda: models[1].predict(X),
    ):
        with pytest.raises(tfshard.errors.StrategyError, match="is on another mesh, because another model shares it"):
            use()
    models[1].compile("sgd", "mse", strategy=new)
    models[1].train_on_batch(X, Y)
