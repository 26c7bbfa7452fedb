"""Models with custom steps that build them, and that pass other data to the model, losses and metrics than the dataset.

On one device, Keras builds all of them where the step uses them.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfshard
from tfshard.errors import StrategyError
from tfshard.graph import inventory
from tfshard.storage.variables import ShardedVariable

X = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
Y = X[:, :3]
MESHES = {"batch": {"batch": 4}, "batch x model": {"batch": 2, "model": 2}}


def mlp(*sizes):
    return keras.Sequential([layers.Dense(size, "tanh") for size in sizes])


def updated(model, tape, loss, part):
    variables = part.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


class InsideOnly(keras.Model):
    """Has no call. The loss and a metric use the output of a part."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(24, 3)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            outputs = self.inner(x)
            loss = self.compute_loss(x, y, outputs)
        updated(self, tape, loss, self.inner)
        return {**self.compute_metrics(x, y, outputs), "loss": loss}


class OnPartOfTheData(keras.Model):
    """Calls the model on another shape than the data's. The call does not use one part of the model."""

    def __init__(self):
        super().__init__()
        self.generator = mlp(24, 16)
        self.critic = mlp(12, 1)

    def build(self, shape):
        pass

    def call(self, noise):
        return self.generator(noise)

    def train_step(self, data):
        x, *_ = data
        with tf.GradientTape(persistent=True) as tape:
            made, real = self.critic(self(x[:, :4])), self.critic(x)
            theirs, ours = ops.mean(ops.softplus(-made)), ops.mean(ops.softplus(made) + ops.softplus(-real))
        variables = [self.generator.trainable_variables, self.critic.trainable_variables]
        gradients = tape.gradient(theirs, variables[0]) + tape.gradient(ours, variables[1])
        self.optimizer.apply(gradients, variables[0] + variables[1])
        return {"theirs": theirs, "ours": ours}


class TargetsInParts(keras.Model):
    """Makes its targets from several inputs with a copy of the network, as in deep Q-learning."""

    def __init__(self):
        super().__init__()
        self.network, self.copy = mlp(24, 4), mlp(24, 4)
        for part in (self.network, self.copy):
            part.build((None, 16))
        self.copy.set_weights(self.network.get_weights())

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data[:2]
        rewards, after = ops.split(ops.concatenate([y, x], axis=1), [1], axis=1)
        target = rewards[:, 0] + 0.9 * ops.max(self.copy(after[:, :16]), axis=1)
        with tf.GradientTape() as tape:
            value = ops.max(self(x), axis=1)
            loss = self.compute_loss(y=target, y_pred=value)
        updated(self, tape, loss, self.network)
        return {"loss": loss}


class Patches(keras.Model):
    """The call returns something else than the loss takes, as in a masked autoencoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(12), mlp(8)

    def both(self, x):
        return x[:, 8:], self.decoder(self.encoder(x[:, :8]))

    def call(self, x):
        return ops.concatenate(self.both(x), axis=1)

    def train_step(self, data):
        x, *_ = data
        with tf.GradientTape() as tape:
            hidden, outputs = self.both(x)
            loss = self.compute_loss(y=hidden, y_pred=outputs)
        updated(self, tape, loss, self)
        return {**self.compute_metrics(None, hidden, outputs), "loss": loss}

    def test_step(self, data):
        hidden, outputs = self.both(data[0])
        return self.compute_metrics(None, hidden, outputs)


MODELS = [InsideOnly, OnPartOfTheData, TargetsInParts, Patches]
# As in keras.io's examples: a metric in a global variable, and in no attribute.
global_loss = keras.metrics.Mean(name="loss")


class GlobalMetric(InsideOnly):
    def train_step(self, data):
        logs = super().train_step(data)
        global_loss.update_state(logs["loss"])
        return {"loss": global_loss.result()}

    @property
    def metrics(self):
        return [global_loss]


class LateMetrics(InsideOnly):
    """The property names attributes that `compile` sets after Keras's `compile`."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.late = {"loss": global_loss}

    def train_step(self, data):
        logs = super().train_step(data)
        self.late["loss"].update_state(logs["loss"])
        return {"loss": self.late["loss"].result()}

    @property
    def metrics(self):
        return [*self.late.values()]


class TrainsByItself(layers.Layer):
    """A layer with a separate optimizer (Hinton 2022, Forward-Forward)."""

    def __init__(self, units, size):
        super().__init__()
        self.dense = layers.Dense(units)
        self.dense.build((None, size))
        self.optimizers = [keras.optimizers.Adam(1e-2, epsilon=1e-3)]
        self.loss_metric = keras.metrics.Mean(name="loss")

    def call(self, x):
        return ops.relu(self.dense(x))

    def learn(self, x):
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.softplus(1.0 - ops.sum(ops.square(self(x)), axis=-1)))
        variables = self.dense.trainable_variables
        self.optimizers[0].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.loss_metric.update_state(loss)
        return ops.stop_gradient(self(x)), self.loss_metric.result()


class ByLayers(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [TrainsByItself(24, 16), TrainsByItself(8, 24)]

    def call(self, x):
        return self.parts[1](self.parts[0](x))

    def train_step(self, data):
        x, first = self.parts[0].learn(data[0])
        return {"first": first, "second": self.parts[1].learn(x)[1]}


def compiled(cls, mesh, optimizer=keras.optimizers.Adam):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = tfshard.as_distributed(cls())
    layout_map = "auto" if mesh and "model" in mesh and cls is Patches else None
    if mesh and "model" in mesh and layout_map is None:
        layout_map = {".*": ()}
    strategy = None
    if mesh:
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), layout_map, zero_stage=3)
    metrics = None if cls in (OnPartOfTheData, TargetsInParts, GlobalMetric, LateMetrics, ByLayers) else ["mae"]
    model.compile(optimizer(1e-2), "mse", metrics=metrics, strategy=strategy, jit_compile=False)
    return model


def fit(model, **arguments):
    return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, **arguments).history


def assert_same(history, expected):
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, atol=1e-6, err_msg=key)


def assert_sharded(model):
    variables = [variable.value for variable in model.variables + model.optimizer.variables]
    assert all(isinstance(each, ShardedVariable) for each in variables)
    kernels = [each for each in variables if len(each.shape) == 2]
    assert len(kernels) > 3 and all("batch" in each.storage.format.storage for each in kernels)


def test_attribute_optimizers_leave_out_those_of_compiled_parts_but_not_shared_ones():
    model = ByLayers()
    model.teacher = keras.Sequential([keras.Input((16,)), layers.Dense(2)])
    model.teacher.compile("sgd", "mse")
    found = inventory.attribute_optimizers(model)
    assert list(found.values()) == [part.optimizers[0] for part in model.parts]
    assert list(found) == list(inventory.attribute_optimizers(ByLayers()))
    model.shared = model.teacher.optimizer  # Like a GAN that trains with the optimizer of its compiled discriminator.
    assert inventory.attribute_optimizers(model)["shared"] is model.teacher.optimizer


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("cls", [GlobalMetric, LateMetrics, ByLayers], ids=lambda cls: cls.__name__)
def test_metrics_and_optimizers_that_the_model_does_not_have_as_attributes_come_to_the_mesh(cls, mesh):
    def trained(axes):
        global_loss.__init__(name="loss")
        model = compiled(cls, axes)
        return fit(model), model

    (expected, plain), (history, model) = trained(None), trained(MESHES[mesh])
    assert_same(history, expected)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("cls", MODELS, ids=lambda cls: cls.__name__)
def test_a_model_that_its_step_builds_trains_as_on_one_device(cls, mesh):
    plain, model = compiled(cls, None), compiled(cls, MESHES[mesh])
    expected, history = fit(plain), fit(model)
    assert_sharded(model)
    assert_same(history, expected)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_makes_a_number_of_its_own_is_built_by_a_step():
    """Nadam's product of momenta starts as a constant in the graph of the step."""
    plain, model = (compiled(OnPartOfTheData, mesh, keras.optimizers.Nadam) for mesh in (None, MESHES["batch"]))
    assert not model.optimizer.built, "premise"
    assert_same(fit(model), fit(plain))


def test_what_a_step_builds_is_there_before_training_begins():
    """A run can then continue from a checkpoint."""
    seen = []
    begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.extend(model.inner.weights))
    model = compiled(InsideOnly, MESHES["batch"])
    assert not model.inner.weights
    fit(model, callbacks=[begin])
    assert len(seen) == 4 and seen == model.inner.weights
    assert len({each.value.storage for each in seen}) == 1, "They are small, and so in one group."


def test_a_step_is_traced_once_for_what_it_makes_and_once_to_run():
    traced = []

    class Counting(InsideOnly):
        def train_step(self, data):
            traced.append(data[0].shape)
            return super().train_step(data)

    model = compiled(Counting, MESHES["batch"])
    fit(model)
    assert traced == [(16, 16)] * 2, "As often as on one device, where a tf.function is traced again without births."
    fit(model)
    assert len(traced) == 2


@pytest.mark.sweep(1)
@pytest.mark.parametrize("data", ["arrays", "tf.data", "generator", "one by one"])
def test_batches_of_every_kind_build_a_model(data):
    def trained(mesh):
        model = compiled(Patches, mesh)
        batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)]
        if data == "arrays":
            return fit(model)["loss"]
        if data == "one by one":
            return [model.train_on_batch(*batch, return_dict=True)["loss"] for batch in batches]
        if data == "generator":
            return model.fit((each for each in batches), steps_per_epoch=4, shuffle=False, verbose=0).history["loss"]
        # Sizes of batches are unknown before they are read.
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
        return model.fit(dataset, epochs=2, shuffle=False, verbose=0).history["loss"]

    np.testing.assert_allclose(trained(MESHES["batch"]), trained(None), rtol=1e-5)


def test_a_model_is_built_by_its_evaluation_first():
    results = []
    for mesh in (MESHES["batch"], None):
        model = compiled(Patches, mesh)
        before = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
        history = fit(model, validation_data=(X[:20], Y[:20]))
        after = model.evaluate(X, Y, batch_size=16, verbose=0, return_dict=True)
        results.append({"before": before["mae"], "after": after["mae"], **history})
    assert_same(*results)


def test_an_optimizer_that_no_step_uses_gets_no_slots():
    """Keras gives an optimizer to a model that was compiled without one, as many GANs are."""

    class Own(InsideOnly):
        def __init__(self):
            super().__init__()
            self.inner.build((None, 16))
            self.own = keras.optimizers.Adam(1e-2)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean((self.inner(x) - y) ** 2)
            variables = self.inner.trainable_variables
            self.own.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    histories = []
    for strategy in (tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), None):
        keras.utils.set_random_seed(1)
        model = tfshard.as_distributed(Own())
        model.compile(strategy=strategy, jit_compile=False)
        histories.append(fit(model))
        assert model.own.built and not model.optimizer.built
    assert_same(*histories)


def test_training_goes_on_after_the_step_that_built_a_model_has_failed():
    class Checked(InsideOnly):
        def train_step(self, data):
            logs = super().train_step(data)
            tf.debugging.assert_less(ops.max(data[0]), 100.0)
            return logs

    model = compiled(Checked, MESHES["batch"])
    kinds = tf.TensorSpec((None, 16)), tf.TensorSpec((None, 3))  # Only the first step tells the number of samples.
    large = tf.data.Dataset.from_generator(lambda: [(1e4 * X[:16], Y[:16])], output_signature=kinds)
    with pytest.raises(tf.errors.InvalidArgumentError, match="x < y"):
        model.fit(large, shuffle=False, verbose=0)
    assert len(model.inner.weights) == 4
    assert len(fit(model)["loss"]) == 2


def test_a_step_that_runs_eagerly_builds_a_model():
    class Looking(InsideOnly):
        def train_step(self, data):
            assert float(ops.sum(data[0])) != 0.0
            return super().train_step(data)

    histories = []
    for mesh in (MESHES["batch"], None):
        model = compiled(Looking, mesh)
        model.run_eagerly = True
        histories.append(fit(model))
    assert_same(*histories)


def test_an_error_of_a_step_is_the_users():
    class Wrong(InsideOnly):
        def train_step(self, data):
            self.inner(data[0])
            raise KeyError("no such target")

    with pytest.raises(KeyError, match="no such target"):
        fit(compiled(Wrong, MESHES["batch"]))


def test_a_built_model_is_predicted_with_before_and_after_training():
    """The variables that its functions read move when small variables join their group."""
    results = []
    for mesh in (MESHES["batch"], None):
        keras.utils.set_random_seed(2)
        model = tfshard.as_distributed(mlp(24, 3))
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh)) if mesh else None
        model.compile(keras.optimizers.Adam(1e-2), "mse", strategy=strategy, jit_compile=False)
        first = [model.predict(data, batch_size=16, verbose=0) for data in (X, X[:20])]
        losses = fit(model)["loss"]
        results.append([*first, losses, model.predict(X, batch_size=16, verbose=0)])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("traced", [True, False], ids=["tf.function", "run"])
def test_a_loop_whose_first_step_builds_its_model_goes_on_when_others_are_born(traced):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))

    def losses(chosen):
        keras.utils.set_random_seed(3)
        with chosen.scope() if chosen else contextlib.nullcontext():
            model, optimizer = mlp(24, 3), keras.optimizers.Adam(1e-2)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = ops.mean((model(x) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
        run = (lambda *batch: chosen.run(step, args=batch)) if chosen else step
        run = tf.function(run) if traced or not chosen else run
        for _ in range(2):
            for batch in chosen.experimental_distribute_dataset(dataset) if chosen else dataset:
                yield float(run(*batch))
            with chosen.scope() if chosen else contextlib.nullcontext():
                mlp(4).build((None, 2))

    np.testing.assert_allclose(list(losses(strategy)), list(losses(None)), rtol=1e-5)


def test_a_function_that_reads_what_has_moved_fails():
    """If the old variables had no elements, TensorFlow's gather would read out of bounds."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with strategy.scope():
        model = mlp(24, 3)
    step = tf.function(lambda x: strategy.run(model, args=(x,)))
    (batch,) = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X[:16]).batch(16))
    step(batch)
    before = {variable.value.storage for variable in model.variables}
    tfshard.as_distributed(model).compile("adam", "mse", strategy=strategy)
    assert before.isdisjoint(variable.value.storage for variable in model.variables)
    with pytest.raises(StrategyError, match="traced before variables moved"):
        step(batch)
