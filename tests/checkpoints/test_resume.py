"""CheckpointCallback resumes an interrupted run with the bits of an uninterrupted run."""

import functools
import shutil

import numpy as np
import pytest
import tensorflow as tf

import resuming
import sweeps
import tfshard
from resuming import (
    Batches,
    X,
    Y,
    assert_same_bits,
    assert_unchanged,
    build,
    compiled,
    script,
    values,
    without_metrics,
)
from tfshard.training import datasets

# The steps at which a run of each kind is interrupted: after each checkpoint but the last. Two epochs of six steps, or
# of four.
KINDS = {
    "arrays": range(2, 12, 2),
    "tf.data": range(2, 12, 2),
    "tf.data of unknown length": range(2, 12, 2),
    "tf.data with steps_per_epoch": range(2, 8, 2),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function that returns an uninterrupted run of a kind, and its checkpoints."""

    @functools.cache
    def run(kind: str) -> tuple[resuming.Run, tfshard.CheckpointManager]:
        directory = tmp_path_factory.mktemp("whole")
        return script(kind, directory, keep=None), tfshard.CheckpointManager(directory)

    return run


@pytest.mark.sweep(1)
@sweeps.table(
    "runs interrupted after a checkpoint", ("kind", "at"), [(kind, at) for kind in KINDS for at in KINDS[kind]],
    # At 4, the input pipeline had read the first epoch's data to their end, ahead of training.
    always=[
        ("arrays", 4), ("tf.data", 4), ("tf.data", 8), ("tf.data of unknown length", 6),
        ("tf.data with steps_per_epoch", 4),
    ],
    sample=1,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_resumed_run_has_the_bits_of_one_that_was_never_interrupted(kind, at, whole, tmp_path):
    run, manager = whole(kind)
    assert len(set(run.losses)) == len(run.losses) > 6
    assert manager.steps() == [*KINDS[kind], len(run.losses)]
    shutil.copytree(manager.open(at).directory, tmp_path / manager.open(at).directory.name)
    resumed = script(kind, tmp_path, keep=None)
    assert_same_bits(resumed.values, run.values)
    assert resumed.losses == run.losses[at:]
    for name, logged in resumed.history.items():
        assert logged == run.history[name][-len(logged) :], name


@pytest.mark.parametrize("ahead, later", [(1, 1), (2, 0), (0, 2)])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", ["tf.data of unknown length", "tf.data with steps_per_epoch"])
def test_a_run_that_read_ahead_resumes_with_the_batches_that_it_had_not_trained(
    kind, ahead, later, whole, tmp_path, monkeypatch
):
    run, _ = whole(kind)
    monkeypatch.setitem(datasets.PREFETCH, "CPU", ahead)
    stopped = script(kind, tmp_path, stop_after=5)
    assert stopped.losses == run.losses[:5]
    assert tfshard.CheckpointManager(tmp_path).latest_step() == 4
    monkeypatch.setitem(datasets.PREFETCH, "CPU", later)
    resumed = script(kind, tmp_path)
    assert resumed.losses == run.losses[4:]
    assert_same_bits(resumed.values, run.values)


def test_a_position_with_batches_read_ahead_holds_them_and_needs_an_iterator_with_a_place_for_them():
    samples = tf.data.Dataset.from_tensor_slices({"x": X, "rows": np.arange(44)}).shuffle(30, seed=7).batch(8)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=2)
    sharded = strategy.experimental_distribute_dataset(samples, options)
    batches = iter(sharded)
    seen = [next(batches)["rows"].numpy().tolist() for _ in range(2)]
    state = datasets.iterator_state(batches)
    assert state.shape.rank == 0, "premise: batches were read ahead"
    seen += [batch["rows"].numpy().tolist() for batch in batches]
    assert len(seen) == 6 and sorted(row for rows in seen for row in rows) == list(range(44))
    for depth in (0, 2):
        options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=depth)
        resumed = iter(strategy.experimental_distribute_dataset(samples, options))
        datasets.restore_iterator(resumed, state)
        again = datasets.iterator_state(resumed)  # Before a batch was taken.
        assert [batch["rows"].numpy().tolist() for batch in resumed] == seen[2:]
        datasets.restore_iterator(resumed := iter(sharded), again)
        assert [batch["rows"].numpy().tolist() for batch in resumed] == seen[2:]
        datasets.restore_iterator(resumed, state)  # It was used to its end.
        next(resumed)
        datasets.restore_iterator(resumed, state)  # It has read ahead.
        assert [batch["rows"].numpy().tolist() for batch in resumed] == seen[2:]
    with pytest.raises(tfshard.errors.CheckpointError, match="had read batches ahead"):
        datasets.restore_iterator(iter(samples), state)
    with pytest.raises(tfshard.errors.CheckpointError, match="had read batches ahead"):
        datasets.restore_iterator(datasets.host_iterator(iter(sharded)), state)


@pytest.mark.slow
def test_the_callback_changes_nothing_and_saves_the_end(tmp_path):
    whole = script("tf.data", epochs=3)
    saved = script("tf.data", tmp_path, every_steps=5)
    assert saved.losses == whole.losses[: len(saved.losses)]
    assert tfshard.CheckpointManager(tmp_path).steps() == [5, 10, 12]
    longer = script("tf.data", tmp_path, epochs=3)
    assert longer.losses == whole.losses[12:]
    assert_same_bits(longer.values, whole.values)
    with pytest.warns(UserWarning, match="Nothing was trained"):
        again = script("tf.data", tmp_path, epochs=3)
    assert again.losses == []
    assert_same_bits(without_metrics(again.values), without_metrics(whole.values))


def test_a_run_that_goes_on_on_another_mesh_has_the_losses_and_weights_of_one_device(tmp_path):
    """Compares with plain Keras without interruption, including dropout."""
    plain = script("tf.data in one order", strategy=lambda: None)
    first = script("tf.data in one order", tmp_path, stop_after=9)
    at = tfshard.CheckpointManager(tmp_path).open()
    assert (at.step, at.position.epoch, at.position.step) == (8, 1, 2)
    half = lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=2), zero_stage=1)  # noqa: E731
    resumed = script("tf.data in one order", tmp_path, strategy=half)
    for run, mesh in ((first, {"batch": 4}), (resumed, {"batch": 2})):
        assert run.model.distribute_strategy.mesh_shape == mesh
        assert any("batch" in variable.value.layout.storage for variable in run.model.optimizer.variables[2:])
    np.testing.assert_allclose(first.losses, plain.losses[:9], rtol=2e-5)
    np.testing.assert_allclose(resumed.losses, plain.losses[8:], rtol=2e-5)
    assert min(np.abs(np.diff(plain.losses))) > 1e-3
    found = [key for key in plain.values if key.startswith(("model/", "optimizer/"))]
    assert resumed.values.keys() >= set(found) and len(found) > 18
    for key in found:
        np.testing.assert_allclose(resumed.values[key], plain.values[key], rtol=1e-4, atol=2e-5, err_msg=key)
        if key.startswith("model/"):
            # The steps after the checkpoint moved the weight by far more than the tolerance.
            assert np.abs(plain.values[key] - at.read(key)).max() > 2e-3, key


def test_data_whose_position_cannot_be_saved_are_refused_before_training(tmp_path):
    def python():
        yield X[:8], Y[:8]

    samples = tf.data.Dataset.from_tensor_slices((X, Y))
    symbolic = tf.data.Options()
    symbolic.experimental_symbolic_checkpoint = True
    specs = (tf.TensorSpec((None, 13)), tf.TensorSpec((None, 3)))
    model = compiled()
    expected = values(model)
    every = {"every_epochs": 1}
    for given, options, message in (
        ({"x": python(), "shuffle": False}, every, "data of GeneratorDataAdapter"),
        ({"x": Batches(X, Y, 3)}, every, "PyDataset"),
        ({"x": Batches(X, Y, 3), "shuffle": False}, {"every_steps": 1}, "PyDataset"),
        ({"x": X, "y": Y, "shuffle": "batch"}, every, "shuffled in batches"),
        ({"x": tf.data.Dataset.from_generator(python, output_signature=specs), "shuffle": False}, every, "Python code"),
        (
            {"x": samples.map(lambda x, y: (x + tf.random.normal([13]), y)).batch(8), "shuffle": False},
            every,
            "stateless",
        ),
        ({"x": samples.batch(8).with_options(symbolic), "shuffle": False}, every, "symbolic_checkpoint"),
    ):
        with pytest.raises(tfshard.errors.CheckpointError, match=message):
            model.fit(**given, verbose=0, callbacks=[tfshard.CheckpointCallback(tmp_path, **options)])
    assert_unchanged(model, expected)
    model.fit(
        Batches(X, Y, 3), shuffle=False, verbose=0, callbacks=[tfshard.CheckpointCallback(tmp_path, every_epochs=1)]
    )
    assert tfshard.CheckpointManager(tmp_path).steps() == [3]
    plain = build()
    plain.compile("sgd", "mse")
    with pytest.raises(tfshard.errors.CheckpointError, match="compiled with strategy="):
        plain.fit(X, Y, verbose=0, callbacks=[tfshard.CheckpointCallback(tmp_path, every_epochs=1)])


def test_another_dataset_is_refused_before_a_variable_changes(tmp_path):
    script("tf.data", tmp_path, stop_after=5)
    model = compiled()
    expected = values(model)
    other = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).shuffle(3).map(lambda x, y: (x, y)).batch(2)
    other = other.unbatch()
    with pytest.raises(tfshard.errors.CheckpointError, match="does not fit this dataset"):
        model.fit(other, shuffle=False, verbose=0, callbacks=[tfshard.CheckpointCallback(tmp_path, every_steps=1)])
    assert_unchanged(model, expected)


@pytest.mark.slow
def test_a_loop_of_your_own_resumes_where_its_iterator_was(tmp_path, monkeypatch):
    def begin():
        model = compiled()
        samples = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(30, seed=7).batch(8).repeat(2)
        strategy = model.distribute_strategy
        return model, iter(strategy.experimental_distribute_dataset(samples))

    model, batches = begin()
    manager = tfshard.CheckpointManager(tmp_path)
    losses = []
    for batch in batches:
        losses.append(float(model.train_on_batch(*batch)))
        if len(losses) == 7:
            manager.save(model, 7, iterator=batches)
    assert len(losses) == 12
    other, batches = begin()
    assert manager.restore(other, iterator=batches).step == 7
    assert [float(other.train_on_batch(*batch)) for batch in batches] == losses[7:]
    assert_same_bits(values(other), values(model))
    with monkeypatch.context() as patch:
        patch.setattr(
            datasets, "iterator_savers", lambda strategy: 3
        )  # As with already_sharded=True and three clients.
        with pytest.raises(
            tfshard.errors.CheckpointMismatchError, match="positions of 1 clients in their data, .* has 3"
        ):
            manager.restore(other, iterator=begin()[1])
    manager.save(other, 8)
    with pytest.raises(tfshard.errors.CheckpointError, match="saved without an iterator"):
        manager.restore(other, iterator=iter(tf.data.Dataset.range(3)))
