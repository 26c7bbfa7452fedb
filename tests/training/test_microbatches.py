"""A step in microbatches matches the full batch on one device."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import small_models
import tfshard
from tfshard.devices.batching import Parts
from tfshard.measure import step_profile
from tfshard.training import microbatches

RS = np.random.RandomState(0)
WIDTH = 16
X = RS.normal(size=(16, WIDTH)).astype("float32")
TOKENS = RS.randint(1, 24, (16, 6)).astype("int32")
# Each microbatch has another number of tokens, and one sample has none.
TOKENS[:, 3:] *= RS.uniform(size=(16, 3)) > np.linspace(0.1, 0.9, 16)[:, None]
TOKENS[5] = 0
CLASSES = (np.arange(16) % 4).astype("int32")
LABELS = RS.randint(0, 24, (16, 6)).astype("int32")
WEIGHTS = RS.uniform(size=16).astype("float32")
TOKEN_WEIGHTS = RS.uniform(size=(16, 6)).astype("float32")

opt = keras.optimizers


def strategy(mesh=None, count=2, **options):
    return tfshard.ShardedStrategy(tfshard.create_mesh(**(mesh or {"batch": 4})), microbatches=count, **options)


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


# --- Models ----------------------------------------------------------------------------------------------


def mlp():
    hidden = [keras.layers.Dense(WIDTH, activation="silu", kernel_regularizer="l2") for _ in range(3)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(4)])


def constrained():
    hidden = keras.layers.Dense(WIDTH, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(1.0))
    return keras.Sequential([keras.Input((WIDTH,)), hidden, keras.layers.Dense(4, bias_constraint="non_neg")])


def masked():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(24, WIDTH, mask_zero=True)(inputs)
    x = keras.layers.LSTM(WIDTH, return_sequences=True)(x)
    return keras.Model(inputs, keras.layers.Dense(24)(x))


def convolutions():
    inputs = keras.Input((WIDTH,))
    x = keras.layers.Reshape((4, 4, 1))(inputs)
    x = keras.layers.MaxPooling2D()(keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Flatten()(x)))


class Chooses(keras.layers.Layer):
    """Chooses between two kernels for all samples by a weight, so all microbatches choose the same."""

    def build(self, shape):
        self.first = self.add_weight(shape=(WIDTH, WIDTH), name="first")
        self.second = self.add_weight(shape=(WIDTH, WIDTH), name="second")

    def call(self, x):
        use = [lambda: tf.matmul(x, self.first), lambda: tf.nn.silu(tf.matmul(x, self.second))]
        return tf.cond(tf.reduce_sum(self.first**2) < 0, *use)


def branches():
    return keras.Sequential([keras.Input((WIDTH,)), Chooses(), keras.layers.Dense(4)])


class OwnStep(keras.Model):
    """Adds a custom loss, which is a mean."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            own = keras.ops.mean(outputs**2)
            loss = self.compute_loss(x, y, outputs) + 0.1 * own
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def own_step():
    plain = mlp()
    return OwnStep(plain.inputs, plain.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    build: Callable[[], keras.Model] = mlp
    batches: tuple = ((X, CLASSES), (X[::-1].copy(), CLASSES))
    loss: Callable[[], object] = crossentropy
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: opt.Adam(1e-2)
    steps: int = 4
    policy: str = "float32"
    options: dict = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-6


def of_reduction(reduction, weights):
    batch = (TOKENS, LABELS, *weights)
    # A sum over 96 tokens has larger losses.
    tolerance = 2e-5 if reduction == "sum" else 1e-6
    rate = 1e-3 if reduction == "sum" else 1e-2
    return Case(
        build=masked,
        batches=(batch,),
        loss=lambda: crossentropy(reduction=reduction),
        optimizer=lambda: opt.Adam(rate),
        tolerance=tolerance,
    )


CASES = {
    "stage 3": Case(),
    "stage 3, alone": Case(options={"analyzer": None}),
    "stage 2": Case(options={"zero_stage": 2, "analyzer": None}),
    "stage 1": Case(options={"zero_stage": 1, "analyzer": None}),
    "stage 0": Case(options={"zero_stage": 0}),
    "all gathered at once": Case(options={"analyzer": None, "reshard_after_forward": False}),
    "one sample a part": Case(options={"count": 4}),
    "more parts than samples": Case(options={"count": 7}),
    "uneven batches": Case(batches=((X[:12], CLASSES[:12]), (X[:6], CLASSES[:6]))),
    "two axes": Case(
        build=small_models.attention,
        batches=((TOKENS, CLASSES),),
        options={"mesh": {"batch": 2, "model": 2}, "layout_map": "auto", "count": 4},
    ),
    "model axis": Case(
        build=small_models.attention, batches=((TOKENS, CLASSES),), options={"mesh": {"model": 4}, "layout_map": "auto"}
    ),
    "attention": Case(build=small_models.attention, batches=((TOKENS, CLASSES),)),
    "convolutions": Case(build=convolutions),
    "branches": Case(build=branches),
    "constraints": Case(build=constrained),
    "own step": Case(build=own_step),
    "weights": Case(batches=((X, CLASSES, WEIGHTS),)),
    "weights, divided by": Case(
        batches=((X, CLASSES, WEIGHTS),), loss=lambda: crossentropy(reduction="mean_with_sample_weight")
    ),
    **{
        f"masked, {reduction}, {'weights' if weights else 'no weights'}": of_reduction(reduction, weights)
        for reduction in ("sum_over_batch_size", "mean_with_sample_weight", "sum")
        for weights in ((), (TOKEN_WEIGHTS,))
    },
    "clipped": Case(optimizer=lambda: opt.Adam(1e-2, clipvalue=1e-3)),
    "clipped norm": Case(optimizer=lambda: opt.Adam(1e-2, clipnorm=0.01)),
    "clipped global norm": Case(optimizer=lambda: opt.SGD(0.1, momentum=0.9, global_clipnorm=0.01)),
    "averages": Case(
        optimizer=lambda: opt.AdamW(1e-2, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3), steps=5
    ),
    "accumulated": Case(optimizer=lambda: opt.Adam(1e-2, gradient_accumulation_steps=2, use_ema=True), steps=5),
    "bfloat16": Case(policy="mixed_bfloat16", tolerance=2e-2),
    "float16": Case(
        policy="mixed_float16",
        optimizer=lambda: opt.LossScaleOptimizer(opt.Adam(1e-2), initial_scale=2.0**10, dynamic_growth_steps=3),
        steps=8,
        tolerance=2e-3,
    ),
}


def run(case, chosen=None):
    def build():
        before = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy(case.policy)
        try:
            return case.build()
        finally:
            keras.mixed_precision.set_dtype_policy(before)

    return parity.train(
        build, list(case.batches), optimizer=case.optimizer, loss=case.loss(), strategy=chosen, steps=case.steps
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_numbers_of_the_whole_batch_on_one_device(name, monkeypatch):
    case, counts = CASES[name], []
    loop = microbatches.MicrobatchedStep._while

    def noted(self, *args):
        counts.append(self.parts.count)
        return loop(self, *args)

    monkeypatch.setattr(microbatches.MicrobatchedStep, "_while", noted)
    trained = run(case, strategy(**case.options))
    assert counts and min(counts) > 1, "premise: there were parts"
    reference = run(case)
    np.testing.assert_allclose(trained.losses, reference.losses, rtol=case.tolerance, atol=case.tolerance)
    assert len(set(reference.losses)) == len(reference.losses), "premise: it trains"
    for path, value in trained.weights.items():
        np.testing.assert_allclose(value, reference.weights[path], atol=20 * case.tolerance, err_msg=path)


def test_a_step_that_overflows_is_skipped_as_on_one_device():
    def overflowing():
        return opt.LossScaleOptimizer(opt.SGD(1e-2), initial_scale=2.0**24, dynamic_growth_steps=100)

    # Sums over a microbatch may overflow where classes cancel out in the batch, so each microbatch has all classes.
    classes = np.arange(16) // 4 + np.arange(16) % 4
    batches = ((X, classes % 4),)
    case = Case(policy="mixed_float16", optimizer=overflowing, steps=8, tolerance=2e-3, batches=batches)
    trained, reference = run(case, strategy(count=4)), run(case)
    scales = [float(each.model.optimizer.dynamic_scale.numpy()) for each in (trained, reference)]
    assert scales[1] < 2.0**24, "premise: steps were skipped"
    assert scales[0] == scales[1]
    assert int(trained.model.optimizer.inner_optimizer.iterations.numpy()) == int(
        reference.model.optimizer.inner_optimizer.iterations.numpy()
    )


class OneByOne(keras.Model):
    """Takes the same microbatches on one device by hand, with separate statistics and one update."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        total = None
        for part in (np.arange(16) % 4 < 2, np.arange(16) % 4 >= 2):  # Two of the four rows of each of four devices.
            xs, ys = tf.boolean_mask(x, part), tf.boolean_mask(y, part)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(xs, ys, self(xs, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
        self.optimizer.apply([each / 2 for each in total], self.trainable_variables)
        return {"loss": loss}


def test_batch_statistics_are_those_of_each_part_in_turn():
    def normalized(cls=keras.Model):
        inputs = keras.Input((WIDTH,))
        x = keras.layers.BatchNormalization(momentum=0.5)(keras.layers.Dense(WIDTH, use_bias=False)(inputs))
        return cls(inputs, keras.layers.Dense(4)(keras.layers.ReLU()(x)))

    trained = run(Case(build=normalized), strategy())
    reference = run(Case(build=lambda: normalized(OneByOne)))
    for path, value in trained.weights.items():
        np.testing.assert_allclose(value, reference.weights[path], atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_fit_has_the_metrics_of_the_whole_batch_and_each_part_draws_its_own_mask():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH), keras.layers.Dropout(0.5, seed=1, name="dropout"), keras.layers.Dense(4)]
    model = tfshard.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(opt.SGD(0.0), crossentropy(), metrics=["accuracy"], strategy=strategy(count=4))
    states = []
    for _ in range(2):
        model.train_on_batch(X, CLASSES)
        states.append(model.get_layer("dropout").seed_generator.state.numpy())
    assert not np.array_equal(*states)
    history = model.fit(X, CLASSES, batch_size=16, verbose=0).history
    one = keras.Sequential([keras.Input((WIDTH,)), layers[0].__class__(WIDTH), keras.layers.Dense(4)])
    one.set_weights(model.get_weights()[:4])
    one.compile("sgd", crossentropy(), metrics=["accuracy"])
    assert model.evaluate(X, CLASSES, verbose=0) == pytest.approx(one.evaluate(X, CLASSES, verbose=0), rel=1e-6)
    assert history["accuracy"][0] * 16 == pytest.approx(round(history["accuracy"][0] * 16)), "16 samples were counted"


@pytest.mark.slow
def test_a_loop_of_ones_own_is_done_in_parts_where_it_trains():
    def build(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model, optimizer = mlp(), opt.Adam(1e-2)
            optimizer.build(model.trainable_variables)
        return model, optimizer

    def functions(model, optimizer):
        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        @tf.function
        def evaluate(x):
            return tf.reduce_sum(model(x))

        return step, evaluate

    chosen = strategy(count=4)
    model, optimizer = build(chosen.scope())
    step, evaluate = functions(model, optimizer)
    one, plain = build(tf.distribute.get_strategy().scope())
    plain_step, plain_evaluate = functions(one, plain)
    for _ in range(3):
        assert float(chosen.run(step, (X, CLASSES))) == pytest.approx(float(plain_step(X, CLASSES)), rel=1e-5)
    assert float(chosen.run(evaluate, (X,))) == pytest.approx(float(plain_evaluate(X)), rel=1e-5)


@pytest.mark.slow
def test_the_last_batch_of_several_steps_in_one_execution_may_be_smaller():
    losses = {}
    for way in ("sharded", "plain"):
        keras.utils.set_random_seed(0)
        model, options = mlp(), {}
        if way == "sharded":
            model, options = tfshard.as_distributed(model), {"strategy": strategy()}
        model.compile(opt.Adam(1e-2), crossentropy(), steps_per_execution=3, **options)
        batches = tf.data.Dataset.from_tensor_slices((X[:12], CLASSES[:12])).batch(8)
        losses[way] = model.fit(batches, epochs=2, shuffle=False, verbose=0).history["loss"]
        assert model.predict(X, batch_size=6, verbose=0).shape == (16, 4)
    np.testing.assert_allclose(losses["sharded"], losses["plain"], rtol=1e-5)


@pytest.mark.slow
def test_the_number_of_parts_can_be_changed_between_steps():
    chosen = strategy(count=1)
    model = tfshard.as_distributed(mlp())
    model.compile(opt.SGD(0.0), crossentropy(), strategy=chosen)
    losses = []
    for count in (1, 2, 4):
        chosen.microbatches = count
        losses.append(model.train_on_batch(X, CLASSES))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.slow
def test_a_part_holds_the_activations_of_a_part():
    x = RS.normal(size=(4096, 64)).astype("float32")
    added = {}
    for count in (1, 8):
        layers = [keras.layers.Dense(512, activation="tanh") for _ in range(4)]
        model = tfshard.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(64)])
        model.compile("sgd", "mse", strategy=strategy(count=count, analyzer=None))
        # Take the minimum of several runs: on a busy machine, a microbatch may start before another's tensors are
        # freed.
        peaks = [tfshard.profile_step(model, (x, x)).peak for _ in range(6)]
        if any(peak is None for peak in peaks):
            pytest.skip("This TensorFlow's CPU allocator does not report what it holds (no oneDNN).")
        added[count] = min(peak.added for peak in peaks)
    activations = 4 * 4096 * 512 * 4
    assert added[1] > activations, "premise: they are what a step holds most of"
    assert added[1] - added[8] > 0.6 * activations


@pytest.mark.parametrize(
    ("rows", "count", "expected"), [(16, 2, 2), (16, 3, 4), (12, 2, 3), (16, 9, 4), (6, 2, 2), (4, 3, 1), (7, 2, 7)]
)
def test_parts_are_equal_and_no_larger_than_asked_for(rows, count, expected):
    with tf.Graph().as_default():
        batch = tf.zeros((rows, 3)), tf.zeros((rows,)), tf.zeros(()), None
        parts = Parts.of(batch, count, strategy().mesh)
    assert (parts.count, parts.rows * parts.count) == (expected, rows)


# --- Steps that cannot run in microbatches ---------------------------------------------------------------


def own_loop(function):
    chosen = strategy()
    with chosen.scope():
        model, optimizer = mlp(), opt.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def update(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return chosen.run(tf.function(lambda *args: function(model, update, *args)), (X,))


@pytest.mark.slow
def test_what_is_not_a_mean_is_not_returned():
    with pytest.raises(tfshard.errors.StrategyError, match=r"scalars that are means.*shape=\(8,\)"):
        own_loop(lambda model, update, x: (update(x), tf.reduce_sum(x, 1)))


def test_what_is_updated_later_is_not_read():
    with pytest.raises(tfshard.errors.StrategyError, match="kernel' is read after its optimizer's update"):
        own_loop(lambda model, update, x: update(x) + tf.reduce_mean(model(x)))


def test_a_divisor_that_depends_on_random_numbers_is_refused():
    def loss(y, outputs):
        losses = keras.ops.mean(outputs**2, -1)
        losses._keras_mask = keras.random.uniform(losses.shape) > 0.5
        return losses

    model = tfshard.as_distributed(mlp())
    model.compile("sgd", loss, strategy=strategy())
    with pytest.raises(tfshard.errors.StrategyError, match="divided by a value that depends on the state"):
        model.train_on_batch(X, X[:, :4])


def test_tensors_of_other_rows_are_refused():
    chosen = strategy()
    with pytest.raises(tfshard.errors.StrategyError, match="have the same number of rows"):
        chosen.run(tf.function(lambda x, y: tf.reduce_sum(x) + tf.reduce_sum(y)), (X, X[:4]))


@pytest.mark.parametrize("count", [0, 1.5, True, "4"])
def test_other_numbers_of_parts_are_refused(count):
    with pytest.raises(tfshard.errors.StrategyError, match="microbatches must be"):
        strategy(count=count)


# --- Plans -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "x", "options"),
    [
        (small_models.attention, TOKENS, {}),
        (small_models.attention, TOKENS, {"zero_stage": 1}),
        (small_models.attention, TOKENS, {"zero_stage": 0}),
        (convolutions, X, {"zero_stage": 2, "analyzer": None}),
        (small_models.attention, TOKENS, {"reduce_once": True, "analyzer": None}),
        (small_models.attention, TOKENS, {"reduce_once": True, "zero_stage": 0}),
    ],
)
def test_a_plan_counts_what_each_part_sends(build, x, options):
    chosen, model = strategy(**options), tfshard.as_distributed(build())
    model.compile("adam", crossentropy(), strategy=chosen)
    one = strategy(count=1, **options)
    planned = chosen.plan(model, inputs=x)
    step_profile.assert_matches_plan(tfshard.profile_step(model, (x, CLASSES)), planned)
    plans = planned, one.plan(build(), "adam", x)
    reductions = [sum(c.count for c in each.collectives if c.kind != "all-gather") for each in plans]
    if not options.get("reduce_once"):
        assert reductions[0] == 2 * reductions[1]
    assert tfshard.plan(build(), {"batch": 4}, optimizer="adam", inputs=x, microbatches=2, **options).collectives


def test_the_planned_peak_has_the_activations_of_a_part_and_what_gradients_are_added_up_in():
    layers = [keras.layers.Dense(512, activation="tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(64)])
    x = np.zeros((4096, 64), "float32")
    peaks = {
        count: tfshard.plan(model, {"batch": 4}, optimizer="sgd", analyzer=None, inputs=x, microbatches=count).peak
        for count in (1, 4)
    }
    activations = 4 * 1024 * 512 * 4
    assert peaks[1].activation_bytes > activations
    assert peaks[1].activation_bytes - peaks[4].activation_bytes > 0.6 * activations
    assert peaks[4].gradient_bytes > peaks[4].stored_bytes * 0.9, "the sums are as large as the parameters"


# --- Reduced once ----------------------------------------------------------------------------------------

ONCE = {
    "stage 3": Case(options={"analyzer": None}),
    "groups": Case(options={"count": 4}),
    "stage 0": Case(options={"zero_stage": 0}),
    "attention": Case(
        build=small_models.attention, batches=((TOKENS, CLASSES),), options={"zero_stage": 2, "analyzer": None}
    ),
    "convolutions": Case(build=convolutions, options={"zero_stage": 1, "analyzer": None}),
    "recurrent": of_reduction("sum_over_batch_size", (TOKEN_WEIGHTS,)),
    "clipped": Case(optimizer=lambda: opt.SGD(0.1, momentum=0.9, global_clipnorm=0.01)),
    "bfloat16": Case(policy="mixed_bfloat16", tolerance=2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONCE)
def test_gradients_that_are_reduced_once_are_those_of_the_whole_batch(name):
    case = ONCE[name]
    trained, reference = run(case, strategy(reduce_once=True, **case.options)), run(case)
    np.testing.assert_allclose(trained.losses, reference.losses, rtol=case.tolerance, atol=case.tolerance)
    for path, value in trained.weights.items():
        np.testing.assert_allclose(value, reference.weights[path], atol=20 * case.tolerance, err_msg=path)


def test_gradients_are_reduced_once():
    x = RS.normal(size=(16, 512)).astype("float32")
    reduced = {}
    for once in (False, True):
        model = tfshard.Sequential([keras.Input((512,)), keras.layers.Dense(512, use_bias=False)])
        model.compile("sgd", "mse", strategy=strategy(count=4, zero_stage=2, analyzer=None, reduce_once=once))
        reduced[once] = tfshard.profile_step(model, (x, x)).bytes("all-reduce")
    assert reduced[True] > 0
    assert reduced[False] == 4 * reduced[True]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("once", [False, True])
def test_a_model_that_trains_in_parts_predicts_and_evaluates_whole_batches(once):
    def results(chosen):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)])
        model.compile("adam", "mse", **({} if chosen is None else {"strategy": chosen}))
        x = np.random.RandomState(0).normal(size=(32, 16)).astype("float32")
        y = x[:, :4]
        history = model.fit(x, y, batch_size=16, shuffle=False, verbose=0, validation_data=(x, y)).history
        evaluated = model.evaluate(x, y, batch_size=16, verbose=0)
        return [*history["loss"], *history["val_loss"], evaluated, model.predict(x, batch_size=16, verbose=0)]

    for ours, theirs in zip(results(strategy(reduce_once=once)), results(None), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_a_step_of_ones_own_would_see_parts_of_gradients():
    model = tfshard.as_distributed(own_step())
    model.compile("sgd", crossentropy(), strategy=strategy(reduce_once=True))
    with pytest.raises(tfshard.errors.StrategyError, match="would see unreduced gradients"):
        model.train_on_batch(X, CLASSES)
    with pytest.raises(tfshard.errors.StrategyError, match="a mesh of only a batch axis"):
        strategy({"batch": 2, "model": 2}, reduce_once=True, layout_map={".*": ()})


def test_an_update_in_a_part_is_refused():
    class Scaled(keras.optimizers.SGD):
        pass

    optimizer = Scaled(0.1)
    applied = optimizer.apply
    optimizer.apply = lambda grads, variables=None: applied([2 * each for each in grads], variables)
    model = tfshard.as_distributed(mlp())
    model.compile(optimizer, crossentropy(), strategy=strategy())
    with pytest.raises(tfshard.errors.StrategyError, match="is updated in a microbatch"):
        model.train_on_batch(X, CLASSES)


def test_verify_compares_the_step_with_its_batch_as_one():
    chosen, model = strategy(), tfshard.as_distributed(mlp())
    model.compile("adam", crossentropy(), strategy=chosen)
    assert tfshard.verify(model, (X, CLASSES)).ok
    assert chosen.microbatches == 2


def test_two_optimizers_update_members_of_one_group():
    def losses(chosen):
        keras.utils.set_random_seed(0)
        with chosen.scope():
            model = mlp()
            optimizers = opt.Adam(1e-2), opt.SGD(0.1)
            halves = model.trainable_variables[:3], model.trainable_variables[3:]
            for optimizer, variables in zip(optimizers, halves, strict=True):
                optimizer.build(variables)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizers[0].apply(gradients[:3], halves[0])
            optimizers[1].apply(gradients[3:], halves[1])
            return loss

        return [float(chosen.run(step, (X, CLASSES))) for _ in range(3)]

    plain = tf.distribute.get_strategy()
    np.testing.assert_allclose(losses(strategy(count=4)), losses(plain), rtol=1e-5)
