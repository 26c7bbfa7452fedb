"""A step that returns a variable returns the value that the step wrote, as on one device."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.storage import ShardedVariable

X = np.random.RandomState(0).normal(size=(32, 8)).astype("float32")
Y = X[:, :1]
KINDS = {
    "stage 3": ({"batch": 4}, {"zero_stage": 3}),
    "stage 0, alone": ({"batch": 4}, {"zero_stage": 0, "analyzer": None}),
    "model axis": ({"batch": 2, "model": 2}, {"layout_map": {".*dense/kernel": (None, "model"), ".*": ()}}),
}
pytestmark = pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")


def strategy(kind: str, **options) -> tfshard.ShardedStrategy:
    axes, others = KINDS[kind]
    return tfshard.ShardedStrategy(tfshard.create_mesh(**axes), **(others | options))


class Telling(keras.Model):
    """Returns variables from its steps in many forms."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(64)
        self.out = keras.layers.Dense(1)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")
        self.odd = self.add_weight(shape=(), initializer="zeros", trainable=False, name="odd")
        self.table = self.add_weight(shape=(16, 4), initializer="zeros", trainable=False, name="table")
        self.still = self.add_weight(shape=(16, 4), initializer="ones", trainable=False, name="still")
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(loss)
        told = {
            "kernel": self.hidden.kernel,
            "iterations": self.optimizer.iterations,
            "total": self.mean.total,
            "of the metric": tuple(self.mean.variables),
            "still": self.still,
            "rate": self.optimizer.learning_rate,
            "loss": loss,
        }
        return told if self.only_after_the_update else told | self.write(loss)

    only_after_the_update = False

    def write(self, loss):
        before = self.count + 0.0
        same = keras.ops.convert_to_tensor(self.count)
        self.count.assign_add(1.0)
        returned = self.table.assign(self.table + 2.0)
        tf.cond(self.count > 1.5, lambda: self.odd.assign_add(1.0), lambda: self.odd.assign(self.odd - 1.0))
        return {
            "count": self.count,
            "value": self.count.value,
            "same": same,
            "ops": keras.ops.convert_to_tensor(self.count),
            "tf": tf.convert_to_tensor(self.count),
            "sum": self.count + 0.0,
            "before": before,
            "nested": {"tuple": (self.count, {"odd": self.odd}), "values": (self.count.value, self.table)},
            "table": self.table,
            "as assign returns it": returned,
            "result": self.mean.result(),
            "iterations read": self.optimizer.iterations + 0,
        }

    def test_step(self, data):
        self.mean.update_state(tf.reduce_mean(self(data[0])))
        return {"total": self.mean.total} | self.write(0.0)

    def predict_step(self, data):
        self.count.assign_add(1.0)
        self.table.assign_add(tf.ones((16, 4)))
        return {"y": self(data), "table": self.table, "still": self.still.value}


def built(chosen: tfshard.ShardedStrategy | None, *, only_after_the_update: bool = False, **options) -> Telling:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = Telling()
    model.only_after_the_update = only_after_the_update
    model(X[:1])
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=options.pop("accumulated", None))
    if chosen is None:
        model.compile(optimizer, "mse", jit_compile=False, **options)
        return model
    tfshard.as_distributed(model).compile(optimizer, "mse", strategy=chosen, **options)
    assert isinstance(model.count.value, ShardedVariable)
    if chosen.zero_stage == 3:
        assert set(model.hidden.kernel.value.layout.storage) & {"batch", "model"}, "premise: it is sharded"
    return model


def told(model: Telling) -> list:
    """Return the logs of each step, and predictions."""
    steps = []

    def note(number, logs):
        steps.append(keras.tree.map_structure(keras.ops.convert_to_numpy, logs))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=note, on_test_batch_end=note)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
    if model.only_after_the_update:
        return steps
    model.evaluate(X, Y, batch_size=16, verbose=0, callbacks=[callback])
    if model.steps_per_execution == 1:  # Otherwise, Keras reports the last value for all steps of an execution.
        steps.append(model.predict(X, batch_size=8, verbose=0))
    return steps


@functools.cache
def plain(**options) -> list:
    return told(built(None, **options))


def assert_same(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        tf.nest.assert_same_structure(one, other)
        flat = zip(keras.tree.flatten_with_path(one), tf.nest.flatten(other), strict=True)
        for (path, our), their in flat:
            assert np.shape(our) == np.shape(their), (number, path)
            np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-6, err_msg=f"{number} {path}")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("stage 3", {}),
        ("stage 0, alone", {"steps_per_execution": 2}),
        ("model axis", {"accumulated": 2}),
        ("stage 3", {"run_eagerly": True}),
    ],
    ids=str,
)
def test_steps_of_a_model_return_the_variables_that_they_wrote(kind, options):
    ours = told(built(strategy(kind), **options))
    assert float(ours[0]["count"]) == options.get("steps_per_execution", 1), "premise: it counts"
    # Plain Keras cannot return a tf.Variable from an eager step.
    assert_same(ours, plain(**{name: value for name, value in options.items() if name != "run_eagerly"}))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["stage 3", "stage 0, alone"])
def test_a_step_in_microbatches_returns_variables_after_the_update(kind):
    ours = told(built(strategy(kind, microbatches=2), only_after_the_update=True))
    assert [int(each["iterations"]) for each in ours] == [1, 2, 3, 4]
    for each, other in zip(ours, plain(only_after_the_update=True), strict=True):
        for name in ("kernel", "iterations", "still", "rate"):
            np.testing.assert_allclose(each[name], other[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_is_computed_of_an_optimizers_counter_after_the_update_is_refused_in_microbatches():
    class Counting(Telling):
        def train_step(self, data):
            super().train_step((data[0], data[1]))
            return {"float": tf.cast(self.optimizer.iterations, tf.float32)}

    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(Counting())
    model(X[:1])
    model.compile("sgd", "mse", strategy=strategy("stage 3", microbatches=2))
    with pytest.raises(tfshard.errors.StrategyError, match="sgd/iteration' is read after its optimizer's update"):
        model.train_on_batch(X, Y)


# --- functions around strategy.run -------------------------------------------------------------------------------


class Loop:
    """A custom loop: variables, a step and functions that run it, with or without a strategy."""

    def __init__(self, chosen: tfshard.ShardedStrategy | None):
        self.strategy = chosen
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        with chosen.scope() if chosen else contextlib.nullcontext():
            self.model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.Adam(0.01)
            self.optimizer.build(self.model.trainable_variables)
            self.count = tf.Variable(0.0, name="count")
            self.table = tf.Variable(tf.zeros((8, 4)), name="table")
        self.kernel = self.model.layers[0].kernel

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x) - x[:, :1]))
            other = tf.reduce_mean(self.model(x))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.count.assign_add(1.0)
        self.table.assign(self.table + other)  # An all-reduce, which DTensor merges with the loss's.
        return loss

    def run(self, function, *args):
        return function(*args) if self.strategy is None else self.strategy.run(function, args=args)

    @property
    def variables(self):
        return self.count, self.table, self.kernel, self.optimizer.iterations


def returned_by_the_step(loop):
    return lambda x: loop.run(lambda x: (loop.step(x), loop.variables, loop.kernel.value), x)


def returned_by_a_compiled_step(loop):
    step = tf.function(lambda x: (loop.step(x), loop.variables, {"a": [loop.kernel.value]}))
    return lambda x: loop.run(step, x)


def returned_around(loop):
    return tf.function(lambda x: (loop.run(loop.step, x), loop.variables))


def read_around(loop):
    @tf.function
    def train(x):
        before = loop.count + 0.0, tf.reduce_sum(loop.kernel)
        loss = loop.run(loop.step, x)
        return before, loss, loop.count + 0.0, loop.table.value(), tf.reduce_sum(loop.kernel), loop.variables

    return train


def twice(loop):
    @tf.function
    def train(x):
        first = loop.run(loop.step, x)
        middle = loop.table + 0.0, loop.kernel + 0.0
        return first, middle, loop.run(loop.step, x), loop.variables

    return train


def overwritten(loop):
    """The first write needs an all-reduce, and the second does not."""

    @tf.function
    def train(x):
        loss = loop.run(loop.step, x)
        loop.run(lambda: loop.table.assign(tf.fill((8, 4), 7.0)))
        return loss, loop.table

    return train


def written_around(loop):
    @tf.function
    def train(x):
        loop.count.assign(loop.count * 2.0)
        loss = loop.run(loop.step, x)
        loop.count.assign_add(10.0)
        loop.table.assign(tf.ones((8, 4)))
        return loss, loop.variables

    return train


def branch_behind(loop):
    @tf.function
    def train(x):
        loss = loop.run(loop.step, x)
        return loss, tf.cond(loop.count > 1.5, lambda: loop.table * 10.0, lambda: loop.table * 100.0)

    return train


def in_a_branch(loop):
    @tf.function
    def train(x):
        run = functools.partial(loop.run, loop.step, x)
        return tf.cond(loop.count < 0.5, run, lambda: tf.reduce_sum(loop.table)), loop.variables

    return train


def in_a_loop(loop):
    @tf.function
    def train(x):
        loss = tf.constant(0.0)
        for _ in tf.range(3):
            loss = loop.run(loop.step, x)
        return loss, loop.variables, loop.count + 1.0

    return train


def read_only(loop):
    return tf.function(lambda x: (loop.run(tf.reduce_sum, x), loop.variables))


AROUND = [
    returned_by_the_step, returned_by_a_compiled_step, returned_around, read_around, twice, overwritten, written_around,
    branch_behind, in_a_branch, in_a_loop, read_only,
]  # fmt: skip


def of_loop(make, chosen: tfshard.ShardedStrategy | None) -> list:
    loop = Loop(chosen)
    train, results = make(loop), []
    for _ in range(2):
        batches = [tf.constant(X)]
        if chosen is not None:
            assert isinstance(loop.count, ShardedVariable)
            dataset = tf.data.Dataset.from_tensors(X)
            batches = chosen.experimental_distribute_dataset(dataset)
        results += [tf.nest.map_structure(np.array, train(batch)) for batch in batches]
    return [*results, [np.array(each) for each in loop.variables]]


@functools.cache
def plain_loop(make) -> list:
    return of_loop(make, None)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", AROUND, ids=lambda make: make.__name__)
def test_functions_around_a_step_see_what_it_wrote(make):
    kinds = list(KINDS)
    for kind in (kinds[AROUND.index(make) % len(kinds)],):
        assert_same(of_loop(make, strategy(kind)), plain_loop(make))


def read_behind_a_function(loop):
    step = tf.function(lambda x: loop.run(loop.step, x))
    return tf.function(lambda x: (step(x), loop.count + 0.0))


def step_in_a_function_behind_another(loop):
    one, other = (tf.function(lambda x: loop.run(loop.step, x)) for _ in range(2))
    return tf.function(lambda x: (one(x), other(x)))


def loop_behind_a_step(loop):
    @tf.function
    def train(x):
        loss = loop.run(loop.step, x)
        for _ in tf.range(2):
            loss = loop.run(loop.step, x)
        return loss

    return train


def read_behind_a_branch_behind_a_step(loop):
    @tf.function
    def train(x):
        loss = loop.run(loop.step, x)
        loss = tf.cond(loss < 0.0, lambda: loop.run(loop.step, x), lambda: loss)
        return loss, loop.count + 0.0

    return train


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "make",
    [
        read_behind_a_function,
        step_in_a_function_behind_another,
        loop_behind_a_step,
        read_behind_a_branch_behind_a_step,
    ],
    ids=lambda make: make.__name__,
)
def test_steps_that_dtensor_would_not_keep_in_order_are_refused(make):
    with pytest.raises(tfshard.errors.StrategyError, match="is written by a strategy.run, and used or written again"):
        of_loop(make, strategy("stage 3"))
