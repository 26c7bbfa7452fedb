"""Loops and branches in steps match one device in results and gradients, in any number of steps."""

import collections
import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import parity
import tfshard
from sweeps import table
from tfshard.devices import transfer

VALUES = np.random.RandomState(0).uniform(0.1, 1.0, (8, 6)).astype("float32")


def positive(t):
    return tf.reduce_sum(t) > 0


def by_sum(row):
    """AutoGraph makes a `tf.cond` of the `if`."""
    if tf.reduce_sum(row) > 3:
        return tf.tanh(row) * row
    return row


CASES = {
    "map_fn with a Python if": lambda t: tf.map_fn(by_sum, t),
    "cond": lambda t: tf.cond(positive(t), lambda: tf.tanh(t) * tf.exp(t), lambda: tf.sin(t) * t),
    "cond, other branch": lambda t: tf.cond(positive(-t), lambda: tf.tanh(t) * tf.exp(t), lambda: tf.sin(t) * t),
    "keras.ops.cond": lambda t: keras.ops.cond(positive(t), lambda: tf.tanh(t) * t, lambda: t),
    "while_loop": lambda t: tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, tf.tanh(a * a) + t), (0, t))[1],
    "while_loop that ends by a value": lambda t: tf.while_loop(lambda a: tf.reduce_sum(a) < 90, lambda a: a * 1.5, [t]),
    "cond in a while_loop": lambda t: tf.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, tf.cond(positive(a), lambda: tf.tanh(a) * a, lambda: a)), (0, t)
    )[1],
    "scan": lambda t: tf.scan(lambda state, row: tf.tanh(state * row), t),
    "map_fn": lambda t: tf.map_fn(lambda row: row * tf.reduce_sum(row), t),
    "map_fn with a cond": lambda t: tf.map_fn(
        lambda row: tf.cond(tf.reduce_sum(row) > 3, lambda: tf.tanh(row) * row, lambda: row), t
    ),
    "cond in a cond": lambda t: tf.cond(
        positive(t), lambda: tf.cond(positive(-t), lambda: t, lambda: tf.tanh(t) * t), lambda: tf.exp(t)
    ),
    "cond by a shape": lambda t: tf.cond(tf.equal(tf.shape(t)[1], 6), lambda: tf.tanh(t) * t, lambda: t),
    "switch_case": lambda t: tf.switch_case(
        tf.cast(positive(t), tf.int32) + 1, [lambda: t, lambda: t * t, lambda: tf.tanh(t) * t, lambda: t]
    ),
    "switch_case, default": lambda t: tf.switch_case(tf.cast(positive(t), tf.int32) + 4, {0: lambda: t}, lambda: t * t),
    "keras.ops.switch": lambda t: keras.ops.switch(
        tf.cast(positive(-t), tf.int32), [lambda a: a * a, lambda a: a], tf.tanh(t)
    ),
    "associative_scan": lambda t: keras.ops.associative_scan(lambda a, c: a * c, t, axis=0),
    "associative_scan, axis=1": lambda t: keras.ops.associative_scan(lambda a, c: a * c, t, axis=1),
    "map_fn of all rows": lambda t: tf.map_fn(lambda row: tf.linalg.matvec(t, row), t),
    "map_fn over columns": lambda t: tf.map_fn(lambda column: column * tf.reduce_sum(column), tf.transpose(t)),
    "vectorized_map of all rows": lambda t: tf.vectorized_map(lambda row: tf.linalg.matvec(t, row), t),
    "vectorized_map of scatters": lambda t: tf.vectorized_map(
        lambda row: tf.tensor_scatter_nd_add(row, [[1], [3]], row[:2]), t
    ),
    "vectorized_map over columns": lambda t: tf.vectorized_map(lambda a: a * tf.reduce_sum(a), tf.transpose(t)),
    "vectorized_map": lambda t: tf.vectorized_map(lambda row: row * tf.reduce_sum(row), t),
    "keras.ops.scan": lambda t: keras.ops.scan(lambda c, row: (tf.tanh(c + row), c), tf.zeros(6), t)[1],
    "keras.ops.map": lambda t: keras.ops.map(lambda row: row * tf.reduce_sum(row), t),
    "keras.ops.fori_loop": lambda t: keras.ops.fori_loop(0, 3, lambda i, a: tf.tanh(a) * a, t),
    "where by one number": lambda t: tf.where(positive(t), tf.tanh(t) * t, t),
    "where by one number, of a vector": lambda t: tf.where(positive(t), tf.reduce_sum(t, 0), 1.0),
    "where by one number, of the same": lambda t: tf.where(positive(t), t, t),
}


def step(function, t):
    with tf.GradientTape() as tape:
        tape.watch(t)
        result = function(t)
        loss = tf.reduce_sum(tf.square(result))
    return result, tape.gradient(loss, t)


MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}


@pytest.mark.sweep(3)
@table(
    "loops and branches", ("mesh", "name"), itertools.product(MESHES, CASES), sample=4,
    always=[("batch4", name) for name in CASES],
)  # fmt: skip
def test_results_and_gradients_are_those_of_one_device(mesh, name):
    sizes = MESHES[mesh]
    function = functools.partial(step, CASES[name])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**sizes), zero_stage=0)
    axes = ("batch", "model" if "model" in sizes else None)
    sharded = transfer.host_to_mesh(VALUES, axes, strategy.mesh)
    assert tf.experimental.dtensor.fetch_layout(sharded).num_shards(0) == sizes["batch"]
    expected = tf.function(function)(tf.constant(VALUES))
    for ours, theirs in zip(strategy.run(tf.function(function), args=(sharded,)), expected, strict=True):
        np.testing.assert_allclose(transfer.to_host(ours), theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["while_loop", "scan", "cond"])
def test_steps_that_are_alike_are_compiled_one_after_the_other_and_run_again(name):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    sharded = transfer.host_to_mesh(VALUES, ("batch", None), strategy.mesh)
    functions = [
        functools.partial(step, lambda t, shift=shift: CASES[name](t + shift)) for shift in (0.0, 0.1, 0.2, 0.3)
    ]
    traced = [tf.function(function) for function in functions]

    def check():
        for function, expected in zip(traced, functions, strict=True):
            ours = strategy.run(function, args=(sharded,))
            for mine, theirs in zip(ours, tf.function(expected)(tf.constant(VALUES)), strict=True):
                np.testing.assert_allclose(transfer.to_host(mine), theirs, rtol=2e-5, atol=1e-6)

    check()
    # TensorFlow recreates the running functions from the remaining ones.
    tf.compat.v1.reset_default_graph()
    keras.backend.clear_session()
    check()


def test_a_map_over_the_batch_is_done_by_each_device_with_its_own_rows():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    sharded = transfer.host_to_mesh(VALUES, ("batch", None), strategy.mesh)

    def mapped(t):
        return tf.map_fn(lambda row: row * 2.0, t)

    with strategy.extended.results_stay_sharded():
        result = strategy.run(tf.function(mapped), args=(sharded,))
    np.testing.assert_allclose(transfer.to_host(result), VALUES * 2)
    assert tf.experimental.dtensor.fetch_layout(result).num_shards(0) == 4


def test_a_map_that_writes_to_a_variable_is_refused():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    sharded = transfer.host_to_mesh(VALUES, ("batch", None), strategy.mesh)
    with strategy.scope():
        count = keras.Variable(np.zeros(6, "float32"), name="count")

    def counted(row):
        count.assign(count + row)
        return row * 2.0

    with pytest.raises(tfshard.errors.StrategyError, match="'count' is written in the body of a tf.while_loop"):
        strategy.run(tf.function(lambda t: tf.map_fn(counted, t)), args=(sharded,))


@pytest.mark.slow
def test_a_layer_that_keeps_its_state_goes_on_from_it_as_on_one_device():
    rs = np.random.RandomState(0)
    x, y = rs.normal(size=(16, 6, 5)).astype("float32"), rs.normal(size=(16, 3)).astype("float32")
    runs = []
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        inputs = keras.Input(batch_shape=(8, 6, 5))
        layer = keras.layers.LSTM(4, stateful=True)
        model = keras.Model(inputs, keras.layers.Dense(3)(layer(inputs)))
        if strategy is None:
            model.compile("sgd", "mse", jit_compile=False)
        else:
            tfshard.as_distributed(model).compile("sgd", "mse", strategy=strategy)
        losses = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        states = [np.array(state.numpy()) for state in layer.states]
        kept = model.predict(x[:8], batch_size=8, verbose=0)
        layer.reset_state()
        runs.append((losses, *states, kept, model.predict(x[:8], batch_size=8, verbose=0)))
    assert np.abs(runs[0][-1] - runs[0][-2]).max() > 1e-3, "premise: the state matters"
    for ours, theirs in zip(runs[1], runs[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def language_model() -> keras.Model:
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(11, 6, embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0))(tokens)
    x = keras.layers.LSTM(6, return_sequences=True)(x)
    x = keras.layers.Bidirectional(keras.layers.GRU(4, return_sequences=True))(x)
    return keras.Model(tokens, keras.layers.Dense(11)(x))


@pytest.mark.slow
def test_a_recurrent_model_of_unknown_length_fits_evaluates_and_predicts_as_on_one_device():
    rs = np.random.RandomState(0)
    tokens, short = rs.randint(0, 11, (20, 7)), rs.randint(0, 11, (6, 4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    runs = []
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = language_model()
        if strategy is None:
            model.compile(parity.dense_gradients(keras.optimizers.SGD(0.5)), loss, jit_compile=False)
        else:
            tfshard.as_distributed(model).compile(keras.optimizers.SGD(0.5), loss, strategy=strategy)
        # Batches of 8, 8 and 4; validation of 6 rows, which four devices do not divide.
        history = model.fit(
            tokens, tokens[:, ::-1], batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(short, short)
        ).history
        runs.append((history, model.predict(short, verbose=0), model.evaluate(tokens, tokens, verbose=0)))
    (plain, *theirs), (ours, *mine) = runs
    assert plain["loss"][1] < plain["loss"][0] - 1e-3, "premise: it trains"
    for key, values in plain.items():
        np.testing.assert_allclose(ours[key], values, rtol=1e-6, err_msg=key)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def two_loops() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 4))
    both = [keras.layers.SimpleRNN(6)(inputs), keras.layers.SimpleRNN(8)(inputs)]
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(both)))


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def most_compiled(since: set[str]) -> int:
    """Return how often the most compiled function was compiled."""
    made = [name for name in set(context.context().list_function_names()) - since if "step" in name]
    return max(collections.Counter(name.partition("__func_")[0] for name in made if "__func_" in name).values())


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_loops_of_steps_that_dtensor_compiles_again_train_as_on_one_device(steps_per_execution: int):
    rs = np.random.RandomState(0)
    # Batches of 10, which are replicated, and of 8.
    x, labels = rs.normal(size=(48, 5, 4)).astype("float32"), rs.randint(0, 3, 48)
    runs, before = [], set(context.context().list_function_names())
    for strategy in (None, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))):
        keras.backend.clear_session()
        model, options = two_loops(), {"jit_compile": False} if strategy is None else {"strategy": strategy}
        model.compile(keras.optimizers.SGD(0.5), LOSS, steps_per_execution=steps_per_execution, **options)
        history = model.fit(x, labels, batch_size=10, epochs=2, shuffle=False, verbose=0).history
        runs.append((history["loss"], model.evaluate(x, labels, batch_size=9, verbose=0)))
    assert most_compiled(since=before) == 2, "premise"
    assert runs[0][0][1] < runs[0][0][0] - 1e-3, "premise: it trains"
    for ours, theirs in zip(runs[1], runs[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("inside", [False, True], ids=["run", "run in a function"])
def test_loops_of_a_custom_step_that_dtensor_compiles_again_train_as_on_one_device(inside: bool):
    rs = np.random.RandomState(0)
    x, labels = rs.normal(size=(42, 5, 4)).astype("float32"), rs.randint(0, 3, 42)
    dataset = tf.data.Dataset.from_tensor_slices((x, labels)).batch(9)
    # Alternately 9 and 6 rows, which are replicated; or 9 rows, and 6 at the end.
    batches = dataset if inside else [(x[:n], labels[start : start + n]) for start in range(5) for n in (9, 6)]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    losses, before = [], set(context.context().list_function_names())
    for sharded in (False, True):
        keras.backend.clear_session()
        with strategy.scope() if sharded else contextlib.nullcontext():
            model, optimizer = two_loops(), keras.optimizers.SGD(0.5)

        @tf.function
        def step(x, labels, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = LOSS(labels, model(x, training=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        @tf.function
        def step_on_mesh(x, labels, step=step):
            return strategy.run(step.python_function, args=(x, labels))

        given = strategy.experimental_distribute_dataset(dataset) if sharded and inside else batches
        losses.append([])
        for _ in range(2):
            for batch in given:
                if given is batches:
                    batch = tuple(map(tf.convert_to_tensor, batch))
                if not sharded:
                    loss = step(*batch)
                else:
                    loss = step_on_mesh(*batch) if inside else strategy.run(step, args=batch)
                losses[-1].append(float(loss))
    assert most_compiled(since=before) == 2, "premise"
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
