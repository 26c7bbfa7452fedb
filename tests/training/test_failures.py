"""A step that fails on the devices raises in Python at that step, and leaves the model unchanged."""

import functools
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import error_interpolation

import parity
import tfshard
from tfshard import _private
from tfshard.training import failures

RS = np.random.RandomState(0)
X = RS.normal(size=(16, 6)).astype("float32")
Y = RS.normal(size=(16, 2)).astype("float32")
IDS = RS.randint(0, 10, (16, 6))
# In the fourth device's rows.
NAN = np.where(np.arange(96).reshape(16, 6) == 92, np.nan, X).astype("float32")
BAD_IDS = np.where(np.arange(96).reshape(16, 6) == 92, 77, IDS)


class Finite(keras.layers.Layer):
    def call(self, inputs):
        return tf.debugging.check_numerics(inputs, "not finite")


class FiniteGradient(keras.layers.Layer):
    """The gradient of 1/x, which must be finite."""

    def call(self, inputs):
        @tf.custom_gradient
        def apply(x):
            return x, lambda upstream: tf.debugging.check_numerics(upstream / x, "no gradient")

        return apply(inputs)


class FiniteTargets(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(tf.debugging.check_numerics(y_true, "no target"))


def checked() -> keras.Model:
    layers = [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.0), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, Finite(name="finite"), keras.layers.Dense(2)])


def checked_first() -> keras.Model:
    """Return a model with no collective before the failing operation at stage 0."""
    return keras.Sequential([keras.Input((6,)), Finite(name="finite"), keras.layers.Dense(2)])


def embedding() -> keras.Model:
    layers = [keras.layers.Embedding(10, 4, name="table"), keras.layers.Flatten(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])


MODELS = {"check_numerics": (checked, X, NAN, "not finite"), "id": (embedding, IDS, BAD_IDS, "77 is not in")}


def compiled(build, stage: int | None, **kwargs) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    if stage is None:
        model.compile(parity.dense_gradients(keras.optimizers.Adam()), "mse", jit_compile=False, **kwargs)
    else:
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage)
        tfshard.as_distributed(model).compile(keras.optimizers.Adam(), "mse", strategy=strategy, **kwargs)
    return model


def state(model: keras.Model) -> dict[str, np.ndarray]:
    return {f"{i} {v.path}": np.array(v.numpy()) for i, v in enumerate(model.variables)}


def assert_as_before(model: keras.Model, before: dict[str, np.ndarray], *, without: tuple[str, ...] = ()) -> None:
    for path, value in state(model).items():
        if not any(name in path for name in without):
            np.testing.assert_array_equal(value, before[path], err_msg=path)


CALLS = {
    "fit": lambda m, x: m.fit(x, Y, batch_size=16, verbose=0),
    "fit in steps of two": lambda m, x: m.fit(np.concatenate([X if x.dtype == X.dtype else IDS, x]),
                                              np.concatenate([Y, Y]), batch_size=16, shuffle=False, verbose=0),
    "evaluate": lambda m, x: m.evaluate(x, Y, batch_size=16, verbose=0),
    "predict": lambda m, x: m.predict(x, batch_size=16, verbose=0),
    "train_on_batch": lambda m, x: m.train_on_batch(x, Y),
    "test_on_batch": lambda m, x: m.test_on_batch(x, Y),
    "predict_on_batch": lambda m, x: m.predict_on_batch(x),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("kind", "stage"), [("check_numerics", 0), ("id", 3)])
def test_a_failing_kernel_raises_what_plain_keras_raises_and_training_goes_on(kind: str, stage: int):
    build, good, bad, words = MODELS[kind]
    reference, model = compiled(build, None), compiled(build, stage)
    reference.train_on_batch(good, Y)
    model.train_on_batch(good, Y)
    assert stage == 0 or parity.shard_axes(model) == {"batch"}
    for name, call in CALLS.items():
        # All calls for one kind of failure: `fit` runs the function of `train_on_batch`.
        if name == "fit in steps of two" or (kind == "id" and name not in ("train_on_batch", "predict")):
            continue
        before = state(model)
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            call(reference, bad)
        with pytest.raises(tf.errors.InvalidArgumentError, match=words) as raised:
            call(model, bad)
        assert "finite" in str(raised.value) if kind == "check_numerics" else "table" in str(raised.value), name
        # Metrics are reset at the start of fit and evaluate.
        assert_as_before(model, before, without=("total", "count", "loss"))
    model.optimizer.learning_rate = reference.optimizer.learning_rate = 0.01
    # The reference's counters may have advanced in its failed steps. Compare them only from here on.
    reference.set_weights(model.get_weights())
    for ours, theirs in zip(model.optimizer.variables, reference.optimizer.variables, strict=True):
        theirs.assign(ours.numpy())
    np.testing.assert_allclose(
        [float(model.train_on_batch(good, Y)) for _ in range(3)],
        [float(reference.train_on_batch(good, Y)) for _ in range(3)],
        rtol=1e-5,
    )


def test_the_second_step_of_an_epoch_fails_and_the_first_one_counts():
    model = compiled(checked, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        CALLS["fit in steps of two"](model, NAN)
    assert int(model.optimizer.iterations.numpy()) == 1


def test_the_message_names_the_layer_and_the_line():
    model = compiled(checked, 3)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.train_on_batch(NAN, Y)
    message = str(raised.value)
    assert "operation CheckNumerics in 'sequential_1/finite_1'" in message
    assert __file__ in message and 'return tf.debugging.check_numerics(inputs, "not finite")' in message
    assert "Variables are as before the step." in message


def mapped(y_true, y_pred):
    """Create the operation in a function that optree calls."""
    return keras.tree.map_structure(lambda x: tf.debugging.check_numerics(x * np.nan, "mapped"), [y_pred])[0]


@pytest.mark.parametrize(
    ("build", "loss", "x", "line"),
    [
        (embedding, "mse", BAD_IDS, "model.fit(x, Y, batch_size=16, verbose=0)"),
        (functools.partial(keras.Sequential, [keras.Input((6,)), keras.layers.Dense(2)]), mapped, X, "map_structure"),
    ],
    ids=["a layer of Keras", "a function of optree"],
)
def test_the_place_that_is_named_is_the_users_line(build, loss, x, line):
    model = build()
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    tfshard.as_distributed(model).compile("sgd", loss, strategy=strategy)
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        model.fit(x, Y, batch_size=16, verbose=0)
    [place] = [each for each in str(raised.value).splitlines() if "made at" in each]
    assert f"made at {__file__}:" in place and line in place, place


def test_a_failing_metric_names_the_metric_and_leaves_the_weights():
    model = compiled(checked, 3, metrics=[FiniteTargets()])
    model.train_on_batch(X, Y)
    before = state(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="made at .*in update_state") as raised:
        model.train_on_batch(X, np.where(np.arange(16)[:, None] == 15, np.nan, Y).astype("float32"))
    assert "Variables are as before the step." in str(raised.value) or "may have been written" in str(raised.value)
    if "as before the step." in str(raised.value):
        assert_as_before(model, before)
    model._distribute_strategy.check_consistency(model)


def test_variables_that_a_failed_step_may_have_written_are_named():
    def late() -> keras.Model:
        return keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, use_bias=False, name="early"), FiniteGradient(),
             keras.layers.Dense(4, name="late"), keras.layers.Dense(2, name="last")]
        )  # fmt: skip

    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(late())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3, analyzer=None)
    model.compile("adam", "mse", strategy=strategy)
    model.train_on_batch(X, Y)
    before = state(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no gradient") as raised:
        model.train_on_batch(np.where(np.arange(16)[:, None] == 15, 0, X).astype("float32"), Y)
    message = str(raised.value)
    listed = message.partition("may have been written: ")[2]
    assert "kernel" in listed and "Load a checkpoint" in listed
    assert "early" not in listed
    # Separately reduced kernels are updated when their gradients are there. All other variables are small copies or
    # wait for them; the first of these is the early layer's.
    assert_as_before(model, before, without=("late", "last"))
    strategy.check_consistency(model)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("inside", [False, True], ids=["run", "tf.function around run"])
def test_a_failing_custom_step_raises_at_that_step(inside: bool):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with strategy.scope():
        model = checked()
        optimizer = keras.optimizers.Adam()
    assert parity.shard_axes(model) == {"batch"}

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.losses.mean_squared_error(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    if inside:
        run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    else:
        compiled_step = tf.function(step)

        def run(x, y):
            return strategy.run(compiled_step, args=(x, y))

    (good,) = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors((X, Y)))
    (bad,) = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors((NAN, Y)))
    first = float(run(*good))
    before = model.get_weights()
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
            run(*bad)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(optimizer.iterations.numpy()) == 1
    assert float(run(*good)) < first


def test_an_eager_step_that_fails_raises_and_leaves_the_model():
    model = compiled(checked, 3, run_eagerly=True)
    model.train_on_batch(X, Y)
    before = state(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        model.train_on_batch(NAN, Y)
    assert_as_before(model, before)
    assert np.isfinite(model.train_on_batch(X, Y))


def test_the_first_steps_of_a_process_may_fail():
    """TensorFlow forms its collective groups at the first collective. A cancelled group would stay cancelled."""
    code = (
        "import tfshard; tfshard.initialize(4, 'CPU')\nimport numpy as np, tensorflow as tf, test_failures as t\n"
        "m = t.compiled(t.checked_first, 0)\n"
        "for x in [t.NAN, t.NAN, t.X] * 2:\n"
        "    try: print('trained', np.isfinite(m.train_on_batch(x, t.Y)))\n"
        "    except tf.errors.InvalidArgumentError as e: print('raised')\n"
    )
    here = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(here), str(here.parent)]}\n{code}"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split("\n")[:-1] == ["raised", "raised", "trained True"] * 2, done.stdout + done.stderr


def test_tags_are_found_in_messages_that_have_a_program_in_them():
    plain = error_interpolation.parse_message
    message = "a{{node Foo/bar_1}}b{{function_node __inference_f_3}}c {{x}} {{node not a tag}} {{node Last}}"
    expected = plain(message)
    assert [len(tags) for tags in expected[1:]] == [1, 2], "premise"
    program = " %0 = tf.Reshape(%1, %2) {device = {}}\n" * 100_000
    with _private.quickly_parsed():
        assert error_interpolation.parse_message is not plain
        assert error_interpolation.parse_message(message) == expected
        text, *tags = error_interpolation.parse_message(message + program)  # TensorFlow's function takes hours.
    assert (text, tags) == (expected[0] + program, list(expected[1:]))
    assert error_interpolation.parse_message is plain


REMEDY = r"recompute.*microbatches.*tfshard.advise"


def test_an_error_of_a_device_without_memory_says_what_holds_less():
    with pytest.raises(tf.errors.ResourceExhaustedError, match=REMEDY), failures.explained("A step"):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating a tensor")


@pytest.mark.slow  # TensorFlow waits for memory for 20 to 60 seconds.
def test_a_step_without_memory_says_what_holds_less():
    class Huge(keras.layers.Layer):
        def call(self, x):
            size = tf.cast(tf.reduce_sum(tf.zeros_like(x)), tf.int64) + (1 << 46)
            return x + tf.reduce_sum(tf.random.stateless_uniform([size], [1, 2]))

    model = keras.Sequential([keras.Input((4,)), Huge(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    with pytest.raises(tf.errors.ResourceExhaustedError, match=REMEDY):
        model.fit(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), verbose=0)


def test_checks_of_all_operations_are_refused_before_training():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = tfshard.as_distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]))
    model.compile("adam", "mse", strategy=strategy)
    x = np.ones((8, 4), "float32")
    refused = functools.partial(
        pytest.raises, tfshard.errors.UnsupportedOperationError, match=r"disable_check_numerics\(\).*TerminateOnNaN"
    )
    tf.debugging.enable_check_numerics()
    try:
        with refused():
            tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
        with refused():
            model.compile("adam", "mse", strategy=strategy)
        for use in (
            lambda: model.fit(x, x, verbose=0),
            lambda: model.evaluate(x, x, verbose=0),
            lambda: model.train_on_batch(x, x),
            lambda: strategy.run(tf.reduce_sum, args=(x,)),
        ):
            with refused():
                use()
    finally:
        tf.debugging.disable_check_numerics()
    assert np.isfinite(model.fit(x, x, verbose=0).history["loss"]).all()


def test_collectives_that_an_earlier_failure_aborted_are_no_unsupported_operation():
    text = "{{function_node __func_1}} Collective ops is aborted by: Device CPU:2 ... DTensor"
    aborted = tf.errors.InternalError(None, None, text)
    with pytest.raises(tf.errors.InternalError) as caught, failures.translated_errors("A step"):
        raise aborted
    assert caught.value is aborted
