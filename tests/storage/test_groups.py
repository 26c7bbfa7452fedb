"""Small variables share a buffer in groups, and behave as before."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard import _private

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(24, 13)).astype("float32"), RS.normal(size=(24, 3)).astype("float32")
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16)]


def build() -> keras.Model:
    inputs = keras.Input((13,))
    x = keras.layers.Dense(17, activation="relu", name="first")(inputs)
    x = keras.layers.Dense(8, activation="tanh", name="second")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="third")(x))


def strategy(stage: int = 3, **kwargs) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage, **kwargs)


def storages(variables) -> set:
    return {id(variable.value.storage) for variable in variables}


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)


def check(build=build, optimizer=adam, stage=3, **kwargs) -> parity.Run:
    """Train with and without a strategy. Asserts that all trained variables form one group."""
    run = parity.train(build, BATCHES, optimizer=optimizer, loss="mse", strategy=strategy(stage, **kwargs))
    assert len(storages(run.model.trainable_variables)) == 1
    parity.assert_same(run, parity.train(build, BATCHES, optimizer=optimizer, loss="mse"), rtol=0, atol=2e-5)
    return run


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_group_is_one_buffer_and_its_slots_are_one_each(stage):
    run = check(stage=stage)
    slots = run.model.optimizer._momentums + run.model.optimizer._velocities
    assert len(storages(slots)) == 2
    (buffer,) = {id(v.value.buffer): v.value.buffer for v in run.model.trainable_variables}.values()
    assert tuple(buffer.shape) == (4, buffer.shape[1])
    elements = sum(np.prod(v.shape) for v in run.model.trainable_variables)
    assert elements <= 4 * buffer.shape[1] < elements + 6 * 16


def test_weight_decay_leaves_out_excluded_members():
    def optimizer():
        chosen = keras.optimizers.AdamW(1e-3, weight_decay=0.5)
        chosen.exclude_from_weight_decay(var_names=["bias"])
        return chosen

    run = check(optimizer=optimizer)
    everything = parity.train(
        build, BATCHES, optimizer=lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.5), loss="mse"
    )
    kernels = [path for path in run.weights if path.endswith("kernel")]
    biases = [path for path in run.weights if path.endswith("bias")]
    assert all(np.allclose(run.weights[p], everything.weights[p], atol=2e-5) for p in kernels)
    assert not all(np.allclose(run.weights[p], everything.weights[p], atol=2e-5) for p in biases)


class TwoRates(keras.optimizers.SGD):
    """Biases learn ten times faster."""

    tfshard_elementwise = True

    def tfshard_update_key(self, variable):
        return "bias" in variable.name

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, 10 * learning_rate if "bias" in variable.name else learning_rate)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_subclass_may_treat_members_differently(momentum):
    check(optimizer=lambda: TwoRates(1e-2, momentum=momentum))


def test_an_optimizer_that_is_not_elementwise_is_right_in_a_group():
    class Unknown(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient / keras.ops.norm(gradient), variable, learning_rate)

    check(optimizer=lambda: Unknown(1e-2, momentum=0.9))
    check(optimizer=lambda: keras.optimizers.Lamb(1e-2))


@keras.saving.register_keras_serializable("test_groups")
class SomeWithoutGradient(keras.Model):
    """Its step trains only the second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(5), keras.layers.Dense(3)
        self.build((None, 13))

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 5))
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
        weights = self.second.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@keras.saving.register_keras_serializable("test_groups")
class UpdatedInAFunction(keras.Model):
    """Its step updates in a function, which is a nested graph of the step."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - y))

        @tf.function
        def update(gradients):
            self.optimizer.apply(gradients, self.trainable_variables)

        update(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


def test_an_update_in_a_function_of_its_own_writes_its_group():
    def of_functional():
        model = build()
        return UpdatedInAFunction(model.inputs, model.outputs)

    check(of_functional, lambda: keras.optimizers.Adam(1e-2))


def test_a_step_that_updates_some_members_leaves_the_others():
    def optimizer():
        return keras.optimizers.Adam(1e-2)

    run = parity.train(SomeWithoutGradient, BATCHES, optimizer=optimizer, loss="mse", strategy=strategy())
    assert len(storages(run.model.trainable_variables)) == 1
    reference = parity.train(SomeWithoutGradient, BATCHES, optimizer=optimizer, loss="mse")
    parity.assert_same(run, reference, rtol=0, atol=2e-5, slots=False)


def test_an_optimizer_that_was_trained_before_brings_its_slots():
    def trained():
        keras.utils.set_random_seed(0)
        model = build()
        model.compile(keras.optimizers.Adam(1e-2), "mse", jit_compile=False)
        model.train_on_batch(*BATCHES[0])
        return model

    reference = trained()
    reference.train_on_batch(*BATCHES[1])
    model = tfshard.as_distributed(trained())
    model.compile(model.optimizer, "mse", strategy=strategy())
    assert len(storages(model.optimizer._momentums)) == 1
    model.train_on_batch(*BATCHES[1])
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_members_are_set_read_saved_and_loaded_by_name(tmp_path):
    run = check()
    weights = [RS.normal(size=w.shape).astype("float32") for w in run.model.get_weights()]
    run.model.set_weights(weights)
    for ours, expected in zip(run.model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, expected)
    run.model.get_layer("second").bias.assign(np.arange(8.0))
    np.testing.assert_array_equal(run.model.get_layer("second").bias.numpy(), np.arange(8.0))
    np.testing.assert_array_equal(run.model.get_layer("first").kernel.numpy(), weights[0])
    run.model.save_weights(tmp_path / "m.weights.h5")
    plain = build()
    plain.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(plain.get_layer("first").kernel.numpy(), weights[0])


def test_a_custom_loop_groups_models_and_slots_born_in_scope():
    keras.utils.set_random_seed(0)
    chosen = strategy()
    with chosen.scope():
        model = build()
        optimizer = keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)
    assert len(storages(model.trainable_variables)) == 1
    assert len(storages(optimizer._momentums)) == 1

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        # A read after the write sees the new value.
        return loss, keras.ops.sum(keras.ops.abs(model.trainable_variables[0]))

    for x, y in BATCHES:
        _, total = chosen.run(step, args=(x, y))
        np.testing.assert_allclose(total, np.abs(model.trainable_variables[0].numpy()).sum(), rtol=1e-5)
    reference = parity.train(
        build, BATCHES, optimizer=lambda: keras.optimizers.Adam(1e-2), loss="mse", steps=len(BATCHES)
    )
    for ours, theirs in zip(model.get_weights(), reference.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_models_born_around_others_share_their_group(monkeypatch, reverse):
    found = _private.models_under
    by_name = functools.partial(sorted, key=lambda model: model.name, reverse=reverse)
    monkeypatch.setattr(_private, "models_under", lambda strategy: by_name(found(strategy)))
    chosen = strategy()
    with chosen.scope():
        x = keras.Input((8,))
        models = [keras.Model(x, keras.layers.Dense(8)(x))]
        for _ in range(4):
            models.append(keras.Model(x, keras.layers.Dense(8)(models[-1](x))))
    variables = models[-1].trainable_variables
    assert len(variables) == 10, "premise"
    assert len(storages(variables)) == 1


def test_a_traced_function_that_no_strategy_runs_reads_what_it_wrote():
    model = tfshard.as_distributed(build())
    model.compile("sgd", "mse", strategy=strategy())
    bias = model.get_layer("first").bias

    @tf.function
    def step():
        bias.assign(bias + 1.0)
        return bias + 1.0

    assert bias.value.layout.group is not None
    for count in (1.0, 2.0):
        np.testing.assert_array_equal(step(), np.full(17, count + 1))
        np.testing.assert_array_equal(bias.numpy(), np.full(17, count))


def train_in_column_and_row(**axes: int) -> parity.Run:
    layout_map = tfshard.LayoutMap()
    layout_map.column("second")
    layout_map.row("third")
    layout_map.replicated("first/kernel")
    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map)
    return parity.train(build, BATCHES, optimizer=adam, loss="mse", strategy=chosen)


def test_groups_follow_the_model_axis():
    run = train_in_column_and_row(batch=2, model=2)
    groups = {v.path: v.value.layout.group for v in run.model.trainable_variables}
    assert groups["second/kernel"] == groups["second/bias"] != groups["first/kernel"] == groups["third/bias"]
    assert "model" in run.model.get_layer("second").kernel.value.layout.storage
    parity.assert_same(run, parity.train(build, BATCHES, optimizer=adam, loss="mse"), rtol=0, atol=2e-5)


def test_without_an_analyzer_each_variable_stands_alone():
    run = parity.train(build, BATCHES, optimizer=adam, loss="mse", strategy=strategy(analyzer=None))
    assert len(storages(run.model.trainable_variables)) == 6
    parity.assert_same(run, parity.train(build, BATCHES, optimizer=adam, loss="mse"), rtol=0, atol=2e-5)


def test_averages_that_overwrite_weights_leave_groups_as_they_are():
    def averaged():
        return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)

    run = parity.train(build, BATCHES, optimizer=averaged, loss="mse", strategy=strategy())
    assert len(storages(run.model.trainable_variables)) == 1
    parity.assert_same(run, parity.train(build, BATCHES, optimizer=averaged, loss="mse"), rtol=0, atol=2e-5)


def test_accumulated_gradients_of_a_group_are_one_buffer():
    def accumulating():
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)

    run = parity.train(build, BATCHES, optimizer=accumulating, loss="mse", strategy=strategy())
    assert len(storages(run.model.optimizer._accumulated_gradients)) == 1
    parity.assert_same(run, parity.train(build, BATCHES, optimizer=accumulating, loss="mse"), rtol=0, atol=2e-5)


def test_embeddings_of_a_group_sum_their_sparse_gradients():
    def with_embedding():
        tokens = keras.Input((13,))
        x = keras.layers.Embedding(5, 7)(keras.ops.cast(keras.ops.abs(tokens), "int32"))
        return keras.Model(tokens, keras.layers.Dense(3)(keras.layers.Flatten()(x)))

    check(build=with_embedding)


def test_sync_stats_tell_the_groups():
    run = check()
    stats = strategy().sync_stats(run.model)
    assert stats.variables == 6
    assert stats.bytes == 4 * run.model.count_params() == stats.groups[0].bytes
    assert stats.groups[0].members[0] == "first/kernel"


@pytest.mark.on_cpu("equal bits: GPUs add in any order")
def test_check_consistency_names_the_variable_that_differs():
    from tensorflow.experimental import dtensor

    # The model axis holds copies. (DTensor copies the first shard of a small replicated tensor.)
    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), {".*": ()}, analyzer=None)
    model = tfshard.as_distributed(build())
    model.compile("adam", "mse", strategy=chosen)
    model.train_on_batch(*BATCHES[0])
    chosen.check_consistency(model)
    bias = model.get_layer("second").bias.value
    assert bias.layout.storage == ("batch",)
    pieces = dtensor.unpack(bias.buffer.value())
    changed = [*pieces[:3], tf.constant(pieces[3].numpy() + 1.0)]
    bias.buffer.assign(dtensor.pack(changed, dtensor.Layout.batch_sharded(chosen.mesh, "batch", 1)))
    with pytest.raises(
        tfshard.errors.ConsistencyError, match=r"'second/bias' should be the same on devices CPU:2 and CPU:3"
    ):
        chosen.check_consistency(model)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_deep_model_sends_one_gather_and_one_reduction(stage):
    def deep():
        layers = [keras.layers.Dense(13, activation="tanh") for _ in range(12)]
        return keras.Sequential([keras.Input((13,)), *layers, keras.layers.Dense(3)])

    model = tfshard.as_distributed(deep())
    model.compile("adam", "mse", metrics=["mae"], strategy=strategy(stage))
    profile = tfshard.profile_step(model, BATCHES[0])
    assert len(model.trainable_variables) == 26
    assert profile.count("all-reduce") == 1
    assert profile.count("all-gather") == (1 if stage else 0)


def test_frozen_variables_of_a_megabyte_in_all_share_a_sharded_buffer():
    def frozen():
        inputs = keras.Input((13,))
        x = keras.layers.Dense(160, trainable=False)(inputs)
        for _ in range(11):
            x = keras.layers.Dense(160, activation="tanh", trainable=False)(x)
        return keras.Model(inputs, keras.layers.Dense(3)(x))

    run = parity.train(frozen, BATCHES, optimizer=adam, loss="mse", strategy=strategy())
    assert sum(np.prod(v.shape) * 4 for v in run.model.non_trainable_variables if "dense" in v.path) > 1 << 20
    weights = [v for layer in run.model.layers for v in layer.non_trainable_variables]
    assert len(storages(weights)) == 1
    assert weights[0].value.layout.storage == ("batch", None)
    parity.assert_same(run, parity.train(frozen, BATCHES, optimizer=adam, loss="mse"), rtol=0, atol=2e-5)


def test_a_batch_axis_of_one_device_groups_as_well():
    run = train_in_column_and_row(batch=1, model=4)
    assert all(v.value.layout.grouped for v in run.model.trainable_variables)
    parity.assert_same(run, parity.train(build, BATCHES, optimizer=adam, loss="mse"), rtol=0, atol=2e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{}, {"analyzer": None}], ids=["grouped", "alone"])
def test_gradients_are_of_what_was_read_also_after_another_optimizer_wrote(options):
    def train(chosen):
        keras.utils.set_random_seed(0)
        with chosen.scope() if chosen else contextlib.nullcontext():
            model = build()
            first, second = keras.optimizers.Adam(1e-2), keras.optimizers.SGD(1e-2, momentum=0.9)

        @tf.function(jit_compile=False)
        def step(x, y):
            with tf.GradientTape(persistent=True) as tape:
                loss = keras.ops.mean(keras.ops.square(model(x) - y))
            weights = model.trainable_variables
            first.apply(tape.gradient(loss, weights[:3]), weights[:3])
            second.apply(tape.gradient(loss, weights[2:]), weights[2:])

        for batch in BATCHES:
            chosen.run(step, args=batch) if chosen else step(*batch)
        return model.get_weights()

    for ours, theirs in zip(train(strategy(**options)), train(None), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_an_update_function_may_be_given_keyword_arguments():
    chosen = strategy()
    with chosen.scope():
        model = build()
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(model.trainable_variables)
    before = model.get_weights()

    def shift(variable, by):
        variable.assign_add(keras.ops.ones_like(variable) * by)

    def step():
        def merged(distribution):
            with keras.name_scope("sgd", caller=optimizer):
                for variable in model.trainable_variables:
                    distribution.extended.update(variable.value, shift, kwargs={"by": 2.0}, group=False)

        tf.distribute.get_replica_context().merge_call(merged)
        return tf.constant(0.0)

    chosen.run(tf.function(step, jit_compile=False))
    for ours, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(ours, start + 2.0)
