"""The Keras surface under a strategy: fit and its relatives, inputs of every kind, callbacks, saving."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from resuming import Batches
from surface import LOSS, X, Y, assert_same_history, both, build, compiled, strategy


def test_fit_with_validation_split_and_a_remainder_batch_matches_one_device():
    assert len(X) * 0.9 % 8, "premise: the last batch does not divide"
    result, expected = both(
        lambda m: m.fit(X, Y, batch_size=8, epochs=3, shuffle=False, validation_split=0.1, verbose=0)
    )
    assert_same_history(result, expected)


def test_remainder_batch_costs_at_most_one_more_trace():
    traces = []

    class Counting(keras.layers.Dense):
        def call(self, inputs, training=None):
            if not tf.distribute.in_cross_replica_context():  # Excludes Keras's symbolic build.
                traces.append(inputs.shape)
            return super().call(inputs)

    model = tfshard.Sequential([keras.Input((6,)), Counting(3)])
    model.compile("sgd", LOSS, strategy=strategy())
    traces.clear()
    model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    assert len(traces) <= 2, traces


@pytest.mark.sweep(1)
@pytest.mark.parametrize("size", [1, 7])
def test_any_batch_size_matches_one_device(size):
    # SGD: the bias before a batch normalization has only rounding errors as its gradient, which Adam would amplify.
    result, expected = both(
        lambda m: m.fit(X, Y, batch_size=size, epochs=1, shuffle=False, verbose=0), optimizer=keras.optimizers.SGD
    )
    assert_same_history(result, expected)


def test_evaluate_and_predict_match_one_device():
    def use(model):
        return model.evaluate(X, Y, batch_size=8, verbose=0), model.predict(X, batch_size=8, verbose=0)

    (loss, predicted), (expected_loss, expected) = both(use)
    np.testing.assert_allclose(loss, expected_loss, atol=2e-5)
    assert predicted.shape == (26, 3)
    np.testing.assert_allclose(predicted, expected, atol=2e-5)


def test_on_batch_methods_match_one_device():
    def use(model):
        return (
            model.train_on_batch(X[:8], Y[:8]),
            model.test_on_batch(X[8:15], Y[8:15]),
            model.train_on_batch(X[:8], Y[:8], sample_weight=np.arange(8.0)),
            model.train_on_batch(X[:8], Y[:8], class_weight={0: 1.0, 1: 2.0, 2: 0.5}),
        ), model.predict_on_batch(X[:5])

    (results, predicted), (expected, expected_predicted) = both(use)
    np.testing.assert_allclose(results, expected, atol=2e-5)
    np.testing.assert_allclose(predicted, expected_predicted, atol=2e-5)


def test_sample_and_class_weights_in_fit_match_one_device():
    weights = {"sample_weight": np.linspace(0, 2, 26)}, {"class_weight": {0: 1.0, 1: 3.0, 2: 0.1}}
    results, expected = both(lambda m: [m.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **kw) for kw in weights])
    for ours, theirs in zip(results, expected, strict=True):
        assert_same_history(ours, theirs)


def generator():
    for start in range(0, 24, 8):
        yield X[start : start + 8], Y[start : start + 8]


def test_inputs_of_every_kind_match_one_device():
    """The same model takes all kinds one after the other."""

    def fit(model):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        options = {"shuffle": False, "verbose": 0}
        return {
            "tf.data": model.fit(dataset, validation_data=dataset, epochs=2, **options),
            "PyDataset": model.fit(Batches(X, Y, 3), epochs=2, **options),
            "generator": model.fit(generator(), steps_per_epoch=3, **options),
            "steps_per_epoch": model.fit(dataset.repeat(), steps_per_epoch=2, epochs=3, **options),
        }

    result, expected = both(fit)
    for kind, history in expected.items():
        assert_same_history(result[kind], history, kind)


def test_a_generator_of_unknown_length_ends_the_epoch():
    model = compiled(True)
    with pytest.warns(UserWarning, match="ran out of data"):
        history = model.fit(generator(), shuffle=False, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


def test_steps_per_execution_matches_one_device():
    result, expected = both(
        lambda m: m.fit(X[:24], Y[:24], batch_size=4, epochs=2, shuffle=False, verbose=0), steps_per_execution=2
    )
    np.testing.assert_allclose(result.history["loss"], expected.history["loss"], atol=2e-5)


def test_run_eagerly_matches_one_device():
    result, expected = both(lambda m: m.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0), run_eagerly=True)
    assert_same_history(result, expected)


def test_multiple_dict_inputs_and_outputs_match_one_device():
    def make():
        keras.utils.set_random_seed(1)
        a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
        h = keras.layers.Concatenate()([keras.layers.Dense(5)(a), keras.layers.Dense(7)(b)])
        return keras.Model(
            {"a": a, "b": b}, {"p": keras.layers.Dense(3, name="p")(h), "q": keras.layers.Dense(1, name="q")(h)}
        )

    inputs = {"a": X[:22], "b": X[:22, :4]}
    targets = {"p": Y[:22], "q": X[:22, :1]}
    kwargs = {
        "loss": {"p": LOSS, "q": "mse"},
        "loss_weights": {"p": 1.0, "q": 0.5},
        "metrics": {"p": ["accuracy"], "q": ["mae"]},
    }
    reference, model = make(), tfshard.as_distributed(make())
    reference.compile(keras.optimizers.Adam(1e-2), **kwargs, jit_compile=False)
    model.compile(keras.optimizers.Adam(1e-2), **kwargs, strategy=strategy())
    fits = [m.fit(inputs, targets, batch_size=8, epochs=2, shuffle=False, verbose=0) for m in (model, reference)]
    assert_same_history(*fits)
    ours, theirs = (m.predict(inputs, verbose=0) for m in (model, reference))
    assert ours.keys() == theirs.keys()
    np.testing.assert_allclose(ours["p"], theirs["p"], atol=2e-5)


def test_callbacks_work(tmp_path):
    callbacks = lambda where: [  # noqa: E731
        keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.CSVLogger(str(where / "log.csv")),
        keras.callbacks.TensorBoard(str(where / "board"), histogram_freq=1),
        keras.callbacks.ModelCheckpoint(str(where / "best.keras")),
        keras.callbacks.TerminateOnNaN(),
    ]

    def fit(model):
        where = tmp_path / type(model).__mro__[1].__name__
        where.mkdir()
        return model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=callbacks(where))

    result, expected = both(fit)
    assert_same_history(result, expected)
    assert len(list(tmp_path.rglob("best.keras"))) == 2
    assert len(list(tmp_path.rglob("log.csv"))) == 2


def test_summary_count_params_and_weights():
    model, reference = compiled(True), compiled(False)
    lines = []
    model.summary(print_fn=lines.append)
    assert any("Total params" in line for line in "\n".join(map(str, lines)).splitlines())
    assert model.count_params() == reference.count_params()
    doubled = [2 * weight for weight in model.get_weights()]
    model.set_weights(doubled)
    for ours, theirs in zip(model.get_weights(), doubled, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_custom_train_step_matches_one_device():
    class Custom(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(LOSS(y, self(x, training=True))) + 0.1 * tf.reduce_sum(self.dense.kernel**2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}

    histories = []
    for chosen in (strategy(), None):
        keras.utils.set_random_seed(0)
        model = tfshard.as_distributed(Custom())
        model.compile(keras.optimizers.Adam(1e-2), strategy=chosen, jit_compile=False)
        histories.append(model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0))
    assert_same_history(*histories)


def test_custom_training_loop_matches_one_device():
    def loop(chosen):
        keras.utils.set_random_seed(0)
        with chosen.scope():
            model = build()
            optimizer = keras.optimizers.Adam(1e-2)

        def step(x, y):
            with tf.GradientTape() as tape:
                per_sample = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
                loss = tf.nn.compute_average_loss(per_sample, global_batch_size=8)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )
            return loss

        @tf.function
        def distributed(x, y):
            return chosen.reduce("SUM", chosen.run(step, args=(x, y)), axis=None)

        dataset = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(8)
        losses = [
            float(distributed(*batch)) for _ in range(2) for batch in chosen.experimental_distribute_dataset(dataset)
        ]
        return losses, model.get_weights()

    losses, weights = loop(strategy())
    expected_losses, expected = loop(tf.distribute.get_strategy())
    np.testing.assert_allclose(losses, expected_losses, atol=2e-5)
    for ours, theirs in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def used(model: keras.Model) -> dict:
    return {
        "fit": model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0),
        "train_on_batch": model.train_on_batch(X[:8], Y[:8]),
        "predict_on_batch": model.predict_on_batch(X[:5]),
    }


@functools.cache
def plain() -> dict:
    """Return the results of plain Keras."""
    model = compiled(False)
    return {"initial": model.get_weights(), **used(model)}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["as_distributed", "Sequential", "Model", "subclass", "scope"])
def test_three_ways_in_give_one_behaviour(way):
    class Sub(tfshard.Model):
        def __init__(self):
            super().__init__()
            self.parts = build()

        def call(self, inputs, training=None):
            return self.parts(inputs, training=training)

    def functional():
        inputs = keras.Input((6,))
        return tfshard.Model(inputs, build()(inputs))

    reference = plain()
    chosen = strategy()
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    if way == "scope":
        with chosen.scope():
            model = build()
            model.compile(keras.optimizers.Adam(1e-2), LOSS, metrics=["accuracy"])
        assert all(isinstance(v.value, tfshard.storage.ShardedVariable) for v in model.variables)
    else:
        model = {
            "as_distributed": lambda: tfshard.as_distributed(build()),
            "Sequential": lambda: build(tfshard.Sequential),
            "Model": functional,
            "subclass": Sub,
        }[way]()
        model.compile(keras.optimizers.Adam(1e-2), LOSS, metrics=["accuracy"], strategy=chosen)
    if way not in ("subclass",):
        for ours, theirs in zip(model.get_weights(), reference["initial"], strict=True):
            np.testing.assert_array_equal(ours, theirs)  # The same seed gives the same initial values.
    result = used(model)
    assert parity.shard_axes(model) == {"batch"}
    assert_same_history(result["fit"], reference["fit"])
    np.testing.assert_allclose(result["train_on_batch"], reference["train_on_batch"], atol=2e-5)
    np.testing.assert_allclose(result["predict_on_batch"], reference["predict_on_batch"], atol=2e-5)


def test_strategy_none_is_plain_keras():
    model = tfshard.as_distributed(build())
    model.compile("sgd", LOSS, strategy=None)
    model.fit(X, Y, verbose=0)
    assert not any(isinstance(v.value, tfshard.storage.ShardedVariable) for v in model.variables)


def test_strategy_is_a_tf_distribute_strategy():
    chosen = strategy()
    assert isinstance(chosen, tf.distribute.Strategy)
    assert chosen.num_replicas_in_sync == 1
    with chosen.scope():
        assert tf.distribute.get_strategy() is chosen


def multi_ema() -> keras.optimizers.Optimizer:
    def ema(rate, momentum):
        return keras.optimizers.Adam(rate, use_ema=True, ema_momentum=momentum)

    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(ema(0.02, 0.5), {".*/bias": ema(0.05, 0.7)}))


def with_ema(optimizer: str, chosen: tfshard.ShardedStrategy | None) -> tuple:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(
        keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    )
    one = keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.5)
    model.compile(one if optimizer == "one" else multi_ema(), LOSS, strategy=chosen, jit_compile=False)
    history = model.fit(
        X[:24], Y[:24], batch_size=12, epochs=3, shuffle=False, verbose=0, validation_data=(X[:8], Y[:8]),
        callbacks=[keras.callbacks.SwapEMAWeights()],
    )  # fmt: skip
    return model, history


@functools.cache
def plain_with_ema(optimizer: str) -> tuple:
    return with_ema(optimizer, None)


GROUPED = tfshard.ParameterAnalyzer()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("stage", "optimizer", "analyzer"), [
    (0, "one", GROUPED), (1, "several", None), (2, "one", GROUPED), (3, "one", None), (3, "several", GROUPED),
])  # fmt: skip
def test_swapped_ema_weights_are_those_of_one_device(stage, optimizer, analyzer):
    """Swaps three times back and forth. After each step the averages differ, so a swap that reads old values shows."""

    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage, analyzer=analyzer)
    (model, result), (reference, expected) = with_ema(optimizer, chosen), plain_with_ema(optimizer)
    averages = [a for part in getattr(model.optimizer, "optimizers", [model.optimizer])
                for a in part._model_variables_moving_average]  # fmt: skip
    assert len(averages) == len(model.trainable_variables)
    assert {v.value.layout.group is not None for v in model.trainable_variables} == {analyzer is not None}
    assert ("batch" in {axis for a in averages for axis in a.value.layout.storage}) == (stage > 0)
    assert len(set(np.round(expected.history["val_loss"], 3))) == 3, "premise: every swap shows"
    assert_same_history(result, expected)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_no_data_is_what_it_is_in_keras():
    def outcome(function, data):
        try:
            result = function(*data, verbose=0)
        except ValueError as error:
            return str(error)
        return getattr(result, "history", result)

    model, reference = compiled(True), compiled(False)
    empty = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(0)
    for data in ((X[:0], Y[:0]), (empty, None)):
        results = [
            (outcome(functools.partial(m.fit, shuffle=False), data), outcome(m.evaluate, data))
            for m in (model, reference)
        ]
        assert results[0] == results[1]
    model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_batches_of_many_sizes_go_through_reshapes_and_slices_as_on_one_device():
    """Keras traces a step with unknown batch size once it has seen two sizes."""

    class Parts(keras.layers.Layer):
        def call(self, inputs):
            flat = tf.reshape(inputs, (tf.shape(inputs)[0], -1))
            return flat[:, 1][:, None] * flat[:, ::2][:, :1] + flat

    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((3, 2)), Parts(), keras.layers.Reshape((2, 3)), keras.layers.Flatten(),
                                 keras.layers.Dense(3)])  # fmt: skip

    model, reference = tfshard.as_distributed(build()), build()
    model.compile("sgd", LOSS, strategy=strategy())
    reference.compile("sgd", LOSS, jit_compile=False)
    inputs, batches = X.reshape(-1, 3, 2), [24, 8, 2, 3, 5, 26]
    for size in batches:
        for call in ("evaluate", "fit"):
            results = [
                getattr(m, call)(inputs[:size], Y[:size], batch_size=size, verbose=0) for m in (model, reference)
            ]
            ours, theirs = (getattr(result, "history", {"loss": [result]})["loss"] for result in results)
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=f"{call} of {size}")
    assert parity.shard_axes(model) == {"batch"}
