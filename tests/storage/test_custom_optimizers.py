"""Optimizers of custom loops and in attributes of a model are saved, restored and reported."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(16, 6)).astype("float32"), RS.normal(size=(16, 3)).astype("float32")


class Loop:
    """A custom training loop with an optimizer outside the model."""

    def __init__(self, strategy: tfshard.ShardedStrategy | None, optimizer=keras.optimizers.Adam):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        self.strategy = strategy
        with (strategy or tf.distribute.get_strategy()).scope():
            self.model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
            )
            self.optimizer = optimizer(1e-2)
        self._step = tf.function(self._train)

    def _train(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True) - y))
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def train(self, steps: int) -> list[float]:
        run = self._step if self.strategy is None else lambda x, y: self.strategy.run(self._step, args=(x, y))
        return [float(run(tf.constant(X[:8]), tf.constant(Y[:8]))) for _ in range(steps)]


def strategy(stage: int = 3, batch: int = 4, **options) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=batch), zero_stage=stage, **options)


def slots(optimizer) -> dict[str, np.ndarray]:
    return {variable.path: np.array(variable.numpy()) for variable in optimizer.variables}


def axes_of(variables) -> list[set]:
    """Return the mesh axes that shard the storage of each variable."""
    return [set(variable.value.buffer.layout.sharding_specs) & {"batch"} for variable in variables]


def assert_like_one_device(losses, expected) -> None:
    """Assert equal losses. Premise: each step changes the loss by far more than the tolerance."""
    tolerance = 2e-6
    steps = np.abs(np.diff(np.asarray(expected), axis=0)) / np.abs(expected[1:])
    assert steps.min() > 100 * tolerance
    np.testing.assert_allclose(losses, expected, rtol=tolerance)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A loop that was saved after four steps and trained on, with the losses of the later steps."""
    loop = Loop(strategy())
    loop.train(4)
    manager = tfshard.CheckpointManager(tmp_path_factory.mktemp("loop"))
    manager.save(loop.model, 4)
    return loop, manager, loop.train(3)


def test_a_custom_loop_resumes_with_the_bits_of_one_that_was_never_interrupted(run):
    loop, manager, losses = run
    assert axes_of(loop.model.trainable_variables) == [{"batch"}] * 4
    resumed = Loop(strategy())
    assert not resumed.optimizer.built
    manager.restore(resumed.model, optimizers=resumed.optimizer)
    assert int(resumed.optimizer.iterations.numpy()) == 4
    assert resumed.train(3) == losses
    ours, expected = slots(resumed.optimizer), slots(loop.optimizer)
    assert len(expected) == 2 + 2 * 4
    for (path, value), theirs in zip(ours.items(), expected.values(), strict=True):
        np.testing.assert_array_equal(value, theirs, err_msg=path)


def test_a_custom_loop_resumes_on_another_mesh_and_plain(run, tmp_path):
    """The reference is plain Keras on one device."""
    expected = Loop(None).train(7)
    manager = tfshard.CheckpointManager(tmp_path)
    whole = Loop(strategy())
    first = whole.train(4)
    manager.save(whole.model, 4)
    assert_like_one_device(first + whole.train(3), expected)
    for other in (strategy(1, batch=2, analyzer=None), None):
        resumed = Loop(other)
        manager.restore(resumed.model, optimizers=[resumed.optimizer])
        assert int(resumed.optimizer.iterations.numpy()) == 4
        assert_like_one_device(resumed.train(3), expected[4:])
        if other is not None:
            assert axes_of(resumed.model.trainable_variables) == [set()] * 4
            assert axes_of(resumed.optimizer.variables[2:]) == [{"batch"}] * 8


def test_the_report_counts_the_slots_of_a_custom_loop(run):
    loop, _, _ = run
    report = loop.strategy.report(loop.model)
    parameters = report.bytes_on_one_device("parameter")
    # Two slots of Adam for each parameter, the step counter and the learning rate.
    assert report.bytes_on_one_device("slot") == 2 * parameters + 8 + 4
    # A quarter, and the padding of rows.
    assert report.bytes_per_device("slot") < 0.3 * report.bytes_on_one_device("slot")
    loop.strategy.check_consistency(loop.model)


def test_an_optimizer_that_only_one_side_has_is_named_and_nothing_is_restored(run, tmp_path):
    loop, manager, _ = run
    resumed = Loop(strategy())
    before = [np.array(weight) for weight in resumed.model.get_weights()]
    mismatch = tfshard.errors.CheckpointMismatchError
    with pytest.raises(mismatch, match=r"optimizer 'adam' \(10 variables\) is in the checkpoint"):
        manager.restore(resumed.model)
    with pytest.raises(mismatch, match="optimizer 'mine' is not in the checkpoint, which has .*adam"):
        manager.restore(resumed.model, optimizers={"mine": resumed.optimizer})
    for weight, expected in zip(resumed.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)
    manager.restore(resumed.model, optimizers=())
    assert not resumed.optimizer.built and int(resumed.optimizer.iterations.numpy()) == 0
    with pytest.raises(mismatch, match="'optimizers/adam/.*_momentum'.* is not in the model"):
        sgd = Loop(strategy(), keras.optimizers.SGD)
        manager.restore(sgd.model, optimizers={"adam": sgd.optimizer})
    with pytest.raises(tfshard.errors.CheckpointError, match="must be a keras.optimizers.Optimizer, a list of them"):
        manager.save(loop.model, 5, optimizers="adam")


@pytest.mark.slow
def test_two_optimizers_of_one_name_need_names(tmp_path):
    loop = Loop(strategy())
    first, second = loop.optimizer, None
    loop.train(1)
    with loop.strategy.scope():
        second = loop.optimizer = keras.optimizers.Adam(1e-3)
    loop._step = tf.function(loop._train)
    loop.train(2)
    manager = tfshard.CheckpointManager(tmp_path)
    with pytest.raises(tfshard.errors.CheckpointError, match="several optimizers named 'adam'"):
        manager.save(loop.model, 3)
    manager.save(loop.model, 3, optimizers={"first": first, "second": second})
    names = {key.split("/")[1] for key in manager.open().manifest.variables if key.startswith("optimizers/")}
    assert names == {"first", "second"}
    assert int(manager.open().read("optimizers/second/iteration")) == 2


@pytest.mark.slow
def test_an_optimizer_that_compile_replaced_is_not_in_the_checkpoint(tmp_path):
    model = tfshard.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    used = [keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9)]
    chosen = strategy()
    for optimizer in used:
        model.compile(optimizer, "mse", strategy=chosen)
        model.fit(X, Y, verbose=0)
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    keys = [key for key in manager.open().manifest.variables if key.startswith("optimizer")]
    assert keys and not [key for key in keys if key.startswith("optimizers/") or "velocity" in key]
    assert model.optimizer is used[1] and used[0].built


class GAN(keras.Model):
    """Two networks with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(6)])
        self.critic = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        self.build((None, 4))

    def call(self, noise):
        return self.critic(self.generator(noise))

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        with tf.GradientTape() as tape:
            real, fake = self.critic(data), self.call(data[:, :4])
            d_loss = tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(tf.nn.softplus(fake))
        variables = self.critic.trainable_variables
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            g_loss = tf.reduce_mean(tf.nn.softplus(-self.call(data[:, :4])))
        variables = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables, strict=True))
        return {"d": d_loss, "g": g_loss}


def make_gan(chosen, *, late: bool = False) -> GAN:
    """Return a GAN. Its optimizers are arguments of `compile`, or set after `compile`."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    gan = GAN()
    options = {} if chosen is None else {"strategy": chosen}
    model = gan if chosen is None else tfshard.as_distributed(gan)
    optimizers = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(2e-2)
    model.compile(*([None, None] if late else optimizers), **options)
    gan.d_optimizer, gan.g_optimizer = optimizers
    return gan


def fit_gan(gan: GAN, epochs: int, directory=None, *, done: int = 0) -> list[tuple[float, float]]:
    """Return the losses of two steps per epoch, after the epochs that are done or in the checkpoint."""
    losses: list[tuple[float, float]] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append((float(logs["d"]), float(logs["g"])))
    )
    callbacks = [note] if directory is None else [note, tfshard.CheckpointCallback(directory, every_steps=1)]
    gan.fit(X, batch_size=8, initial_epoch=done, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return losses


@pytest.mark.slow
def test_a_gan_with_two_optimizers_resumes_and_has_the_numbers_of_one_device(tmp_path):
    expected = fit_gan(make_gan(None), 3)
    gan = make_gan(strategy())
    whole = fit_gan(gan, 1, tmp_path / "same")
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    whole += fit_gan(gan, 3, done=1)
    for optimizer in (gan.d_optimizer, gan.g_optimizer):
        assert axes_of(optimizer.variables[2:]) == [{"batch"}] * 8
    assert_like_one_device(whole, expected)
    keys = list(tfshard.CheckpointManager(tmp_path / "same").open().manifest.variables)
    for name in ("d_optimizer", "g_optimizer"):
        assert len([key for key in keys if key.startswith(f"optimizers/{name}/")]) == 2 + 2 * 4
    resumed = make_gan(strategy(), late=True)
    assert fit_gan(resumed, 3, tmp_path / "same") == whole[2:]
    for name in ("d_optimizer", "g_optimizer"):
        assert int(getattr(resumed, name).iterations.numpy()) == 6
    assert_like_one_device(fit_gan(make_gan(strategy(2, batch=2)), 3, tmp_path / "other"), expected[2:])
