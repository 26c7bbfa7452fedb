"""`strategy="auto"` chooses by the memory of the devices, says what it chose, and trains as plain Keras does."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard.errors import DeviceMemoryError, StrategyError
from tfshard.planning import known_machines
from tfshard.planning.advice import Candidate
from tfshard.training import automatic

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(64, 12).astype("float32"), RANDOM.randint(0, 4, 64)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Choose in `advise`'s order, which does not depend on the cores of this machine, and restore the memory."""
    from tfshard.devices import startup

    monkeypatch.setattr(known_machines, "here", lambda: None)
    before = startup.current()
    yield
    startup._runtime = before


def build(width: int = 192, blocks: int = 3) -> keras.Model:
    """Return a model with blocks that can be computed again."""
    layers = [
        layer
        for number in range(blocks)
        for layer in (
            keras.layers.Dense(width, activation="gelu", name=f"block{number}_up"),
            keras.layers.Dense(width, name=f"block{number}_down"),
        )
    ]
    return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(4)])


def made(make=build, **options) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), LOSS, metrics=["accuracy"], jit_compile=False, **options)
    return model


def deep() -> keras.Model:
    """Return a model with kernels that stand alone, so that stage 3 needs less than stage 1."""
    return build(640, 1)


def needed(make=build, rows: int = 64, **facts) -> int:
    """Return the bytes that a configuration of the model needs, as `advise` says."""
    advice = tfshard.advise(made(make), 4, 1 << 30, rows, layout_map="auto", inputs=X[:rows])
    return min(
        each.needed_bytes
        for each in advice.candidates
        if each.problem is None and all(getattr(each, name) == value for name, value in facts.items())
    )


def chosen(model: keras.Model) -> Candidate:
    return automatic.state_of(model).chosen


def assert_alike(model: keras.Model, losses, expected: keras.Model, expected_losses) -> None:
    np.testing.assert_allclose(losses, expected_losses, rtol=TOLERANCE)
    for ours, theirs in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=TOLERANCE, err_msg=ours.path)


BATCH = {"batch": 4, "model": 1}
MODEL = {"batch": 1, "model": 4}
# By name: the model, the memory, and what must be chosen.
CASES = {
    "slots do not fit": (build, {"mesh_shape": BATCH, "zero_stage": 1}),
    "all fits": (build, {"mesh_shape": BATCH, "zero_stage": 0}),
    "parameters do not fit": (deep, {"mesh_shape": BATCH, "zero_stage": 3, "recompute": False}),
    "a batch axis does not fit": (deep, {"mesh_shape": MODEL, "zero_stage": 0}),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_match_plain_keras_whatever_the_memory_makes_it_choose(case):
    make, expected = CASES[case]
    tfshard.initialize(memory_per_device=needed(make, **expected))
    model = made(make, strategy="auto")
    assert not isinstance(model.distribute_strategy, tfshard.ShardedStrategy)  # No batch is known.
    options = {"batch_size": 64, "epochs": 3, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, **options).history
    assert {name: getattr(chosen(model), name) for name in expected} == expected
    assert len(model.layers[0].kernel.value.mesh.global_device_ids()) == 4
    plain = made(make)
    assert_alike(model, history["loss"], plain, plain.fit(X, Y, **options).history["loss"])
    assert history["accuracy"][-1] > 0.3


def test_microbatches_and_recomputation_match_plain_keras_where_nothing_else_fits():
    rows = np.tile(X, (32, 1)), np.tile(Y, 32)
    model, plain = made(strategy="auto"), made()
    advised = tfshard.advise(model, 4, 1 << 30, len(rows[0]), layout_map="auto", inputs=rows[0])
    least = min(each.needed_bytes for each in advised.candidates if not each.recompute and each.problem is None)
    tfshard.initialize(memory_per_device=least * 3 // 5)
    losses = [model.train_on_batch(*rows)[0] for _ in range(2)]
    assert chosen(model).microbatches > 1
    assert_alike(model, losses, plain, [plain.train_on_batch(*rows)[0] for _ in range(2)])


def test_it_prints_the_choice_and_code_that_makes_the_same_strategy(capfd, caplog):
    tfshard.initialize(memory_per_device=needed(mesh_shape=BATCH, zero_stage=1))
    model = made(strategy="auto")
    with caplog.at_level("INFO", logger="tfshard"):
        model.train_on_batch(X, Y)
        model.train_on_batch(X, Y)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tfshard: strategy=")]
    assert 'strategy="auto" chose batch=4, ZeRO stage 1, for batches of 64 samples: the first of' in line
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith('strategy="auto"')]
    assert told == [line.removeprefix("tfshard: ")]
    code = re.search(r"To write it down: strategy=(.*)$", line)[1]
    strategy = eval(code, {"tfshard": tfshard})
    assert repr(strategy) == repr(model.distribute_strategy)
    model.compile("sgd", LOSS, strategy=strategy)
    assert model.distribute_strategy is strategy and automatic.state_of(model) is None


def test_the_machine_of_logical_cpu_devices_ranks_by_time(monkeypatch, capfd):
    monkeypatch.undo()
    tfshard.initialize(memory_per_device="1GiB")
    model = made(strategy="auto")
    model.train_on_batch(X, Y)
    assert chosen(model).step_seconds is not None
    assert "the fastest steps by estimate of the" in capfd.readouterr().err


def unknown_sizes(shuffled: bool = True):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return (data.shuffle(64, seed=1) if shuffled else data).batch(24)


class Slices(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[index * 16 : index * 16 + 16], Y[index * 16 : index * 16 + 16]


def generated():
    while True:
        yield X[:16], Y[:16]
        yield X[16:32], Y[16:32]


DATA = {
    "tf.data of unknown batch size": lambda: {"x": unknown_sizes(), "shuffle": False},
    "arrays smaller than a batch": lambda: {"x": X[:16], "y": Y[:16], "shuffle": False},
    "PyDataset": lambda: {"x": Slices(), "shuffle": False},
    "generator": lambda: {"x": generated(), "steps_per_epoch": 3, "shuffle": False},
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("data", DATA)
def test_the_first_batch_is_looked_at_and_still_trained_on_in_the_same_order(data):
    def small() -> keras.Model:
        return keras.Sequential([keras.Input((12,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(4)])

    tfshard.initialize(memory_per_device="1GiB")
    model, seen = made(small, strategy="auto"), []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    losses = model.fit(**DATA[data](), epochs=2, verbose=0, callbacks=[count]).history["loss"]
    assert isinstance(model.distribute_strategy, tfshard.ShardedStrategy)
    plain = made(small)
    steps = list(seen)
    seen.clear()
    assert_alike(
        model, losses, plain, plain.fit(**DATA[data](), epochs=2, verbose=0, callbacks=[count]).history["loss"]
    )
    assert steps == seen


class Built(keras.Model):
    """A model that its first batch builds."""

    def __init__(self):
        super().__init__()
        self.hidden, self.top = keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)

    def call(self, x):
        return self.top(self.hidden(x))


def test_a_model_that_its_first_batch_builds_has_the_weights_of_plain_keras():
    tfshard.initialize(memory_per_device="1GiB")
    model, plain = made(Built, strategy="auto"), made(Built)
    assert not model.built
    losses = [model.train_on_batch(X, Y)[0] for _ in range(2)]
    assert_alike(model, losses, plain, [plain.train_on_batch(X, Y)[0] for _ in range(2)])


@pytest.mark.slow
def test_an_evaluation_chooses_and_training_on_a_larger_batch_chooses_again():
    rows = np.tile(X, (8, 1)), np.tile(Y, 8)
    model, plain = made(strategy="auto"), made()
    tfshard.initialize(memory_per_device=needed(mesh_shape=BATCH, zero_stage=1))
    assert model.predict(X, verbose=0).shape == (64, 4)  # On one device: nothing was chosen.
    assert chosen(model) is None
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=TOLERANCE)
    first = model.distribute_strategy
    assert isinstance(first, tfshard.ShardedStrategy) and not automatic.state_of(model).is_for_training
    losses = [model.train_on_batch(X, Y)[0]]
    assert model.distribute_strategy is first
    losses += [model.train_on_batch(*rows)[0], model.train_on_batch(X, Y)[0]]
    assert model.distribute_strategy is not first
    expected = [plain.train_on_batch(*batch)[0] for batch in ((X, Y), rows, (X, Y))]
    assert_alike(model, losses, plain, expected)


def test_an_evaluation_runs_where_training_on_its_batch_would_not_fit(capfd):
    tfshard.initialize(memory_per_device=1000)
    model, plain = made(strategy="auto"), made()
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, verbose=0), rtol=TOLERANCE)
    assert "training on such a batch would not fit, and it comes closest" in capfd.readouterr().err
    with pytest.raises(DeviceMemoryError, match="found nothing that fits"):
        model.train_on_batch(X, Y)


def test_nothing_that_fits_is_an_error_with_the_nearest_misses_before_any_step():
    tfshard.initialize(memory_per_device="10KiB")
    model = made(strategy="auto")
    before = [np.array(weight) for weight in model.get_weights()]
    with pytest.raises(DeviceMemoryError, match=r"nearest misses: tfshard.ShardedStrategy\(.*needs .*smaller batch"):
        model.fit(X, Y, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert not isinstance(model.distribute_strategy, tfshard.ShardedStrategy)
    tfshard.initialize(memory_per_device="1GiB")
    model.fit(X, Y, verbose=0)  # The model still waits for its choice.
    assert isinstance(model.distribute_strategy, tfshard.ShardedStrategy)


def odd() -> keras.Model:
    """Return a model over whose variables no model axis can be laid."""
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(3), keras.layers.Dense(5)])


def test_a_batch_that_no_mesh_divides_is_an_error_that_names_batch_sizes():

    tfshard.initialize(memory_per_device="1GiB")
    with pytest.raises(StrategyError, match="its batch axis does not divide.*multiple of 4, such as 16"):
        made(odd, strategy="auto").train_on_batch(X[:13], Y[:13])


def test_clones_and_second_compiles_wait_for_a_choice_and_loaded_models_are_plain(tmp_path):
    tfshard.initialize(memory_per_device="1GiB")
    model = made(strategy="auto")
    clone = keras.models.clone_model(model)
    assert automatic.state_of(clone) is not None
    model.compile("sgd", LOSS)
    model.train_on_batch(X, Y)
    assert isinstance(model.distribute_strategy, tfshard.ShardedStrategy)
    assert chosen(model) is not None
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not isinstance(loaded.distribute_strategy, tfshard.ShardedStrategy)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=TOLERANCE)


@pytest.mark.parametrize("cls", [tfshard.Sequential, tfshard.Model], ids=["Sequential", "Model"])
def test_classes_of_tfshard_take_auto_and_keep_the_settings_beside_it(cls):
    tfshard.initialize(memory_per_device="1GiB")
    inputs = keras.Input((12,))
    dense = keras.layers.Dense(4)
    model = cls([inputs, dense]) if cls is tfshard.Sequential else cls(inputs, dense(inputs))
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    model.compile(optimizer, LOSS, run_eagerly=True, strategy="auto")
    model.train_on_batch(X, Y)
    assert model.optimizer is optimizer and model.run_eagerly
    assert isinstance(model.distribute_strategy, tfshard.ShardedStrategy)


def test_other_texts_are_refused_with_the_choices():
    with pytest.raises(StrategyError, match=r"'auto' to choose one .* Received: strategy='automatic'"):
        made(strategy="automatic")


def test_the_scope_of_another_strategy_is_refused():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = build()
    with pytest.raises(StrategyError, match="the scope of another one is open"), strategy.scope():
        model.compile("sgd", "mse", strategy="auto")


def test_a_model_without_a_call_is_refused_before_a_step():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(4)

        def train_step(self, data):
            return {"loss": tf.reduce_mean(self.inner(data[0]))}

    model = Pair()
    model.compile("sgd", strategy="auto")
    with pytest.raises(StrategyError, match="plans a step from the model's call, and model 'pair' has none"):
        model.train_on_batch(X, Y)
