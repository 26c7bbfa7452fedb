"""Checkpoints are complete or absent, fit any mesh, and are checked before use."""

import shutil
import threading

import keras
import numpy as np
import pytest

import tfshard
from resuming import (
    X,
    Y,
    assert_same_bits,
    compiled,
    filled,
    values,
    without_metrics,
)
from tfshard.checkpoints import files, manifest, writer
from tfshard.layouts import boxes

# --- boxes and manifests -------------------------------------------------------------------------------


def test_runs_are_boxes_in_row_major_order():
    rs = np.random.RandomState(0)
    for _ in range(300):
        shape = tuple(rs.randint(1, 5, rs.randint(0, 5)))
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        begin, end = sorted(rs.randint(0, array.size + 1, 2))
        found = [x for box in boxes.run(shape, begin, end) for x in array[box.slices].reshape(-1)]
        assert found == list(range(begin, end))


def test_a_manifest_comes_back_and_refuses_pieces_that_do_not_cover():
    def variable(*pieces, shape=(4, 6)):
        stored = [manifest.StoredShard(box=boxes.Box(offset=o, shape=s), checksum=1) for o, s in pieces]
        return manifest.StoredVariable(
            kind="slot", path="a", shape=shape, dtype="float32", layout=None, group=None, shards=tuple(stored)
        )

    def around(stored):
        return manifest.Manifest(
            step=1, generation=0, versions={"keras": "3"}, plan={"mesh": None}, variables={"a": stored},
            files={"data.index": manifest.StoredFile(bytes=1, sha256="x")},
            position=manifest.Position(epoch=1, step=None, consumed=2, num_batches=None, fresh=True, clients=1),
        )  # fmt: skip

    good = around(variable(((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 4))))
    assert manifest.decode(manifest.encode(good), "here") == good
    for bad in (
        variable(((0, 0), (4, 5))),
        variable(((0, 0), (2, 6)), ((1, 0), (2, 6))),
        variable(((0, 0), (4, 6)), ((0, 0), (4, 6))),
        variable(((1, 0), (4, 6))),
        variable(((0, 0), (2, 12))),
    ):
        with pytest.raises(tfshard.errors.CheckpointCorruptError, match="shard"):
            manifest.decode(manifest.encode(around(bad)), "here")


def test_what_several_clients_wrote_is_put_together_and_refused_when_a_piece_is_missing():
    def part(*offsets):
        boxes_ = [boxes.Box(offset=(offset, 0), shape=(1, 6)) for offset in offsets]
        pieces = tuple(manifest.StoredShard(box=box, checksum=box.offset[0]) for box in boxes_)
        return manifest.StoredVariable(
            kind="slot", path="a", shape=(4, 6), dtype="float32", layout=None, group=None, shards=pieces
        )

    first, second = (manifest.encode_part({"a": part(*offsets)}) for offsets in ((0, 2), (1, 3)))
    assert manifest.decode_parts([first, second], "here") == {"a": part(0, 2, 1, 3)}
    for parts, fault in (
        ([first], "do not cover"),
        ([first, first], "overlap"),
        ([first, second[:-9]], "not JSON"),
        ([first, b"[]"], "not an object"),
        ([first, b'{"a": {}}'], "no list of shards"),
    ):
        with pytest.raises(
            tfshard.errors.CheckpointCorruptError, match=f"The data that the clients wrote cannot be used: .*{fault}"
        ):
            manifest.decode_parts(parts, "here")


# --- contents ---------------------------------------------------------------------------------------------


def test_state_of_every_kind_comes_back(tmp_path):
    def make():
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        inner = keras.optimizers.AdamW(1e-2, use_ema=True)
        return compiled(optimizer=keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2))

    model = make()
    model.fit(X, Y, batch_size=8, verbose=0)
    model.optimizer.inner_optimizer.learning_rate = 0.125
    expected = values(model)
    assert expected["optimizer/dynamic_scale"] != 8.0 and expected["optimizer/learning_rate#2"] == 0.125
    assert any(key.endswith("_average") for key in expected)
    assert any("seed_generator" in key for key in expected)
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 6)
    other = make()
    assert not other.optimizer.built
    manager.restore(other)
    assert_same_bits(without_metrics(values(other)), without_metrics(expected))


@pytest.mark.slow
def test_accumulated_gradients_and_the_global_seed_come_back(tmp_path):
    class Noisy(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x)[1:])

    def make():
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = tfshard.Sequential([keras.Input((13,)), Noisy(), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(1e-2, momentum=0.9, gradient_accumulation_steps=3)
        model.compile(optimizer, "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
        return model

    model = make()
    for _ in range(2):
        model.train_on_batch(X[:8], Y[:8])
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 2)
    saved = values(model)
    assert saved["seed/global"].any() and saved["optimizer/sequential_dense_kernel_gradient_accumulator"].any()
    expected = [float(model.train_on_batch(X[:8], Y[:8])) for _ in range(3)]
    other = make()
    # Keras draws from the global generator when it builds metrics, in the first step.
    other.train_on_batch(X[:8], Y[:8])
    manager.restore(other)
    assert_same_bits(without_metrics(values(other)), without_metrics(saved))
    assert [float(other.train_on_batch(X[:8], Y[:8])) for _ in range(3)] == expected
    assert_same_bits(values(other), values(model))


# --- commits -------------------------------------------------------------------------------------------


def test_keep_deletes_older_steps_and_saving_a_step_again_replaces_it(tmp_path):
    model = compiled()
    manager = tfshard.CheckpointManager(tmp_path, keep=2)
    assert manager.latest_step() is None
    for step in (1, 2, 3):
        manager.save(model, step)
    assert manager.steps() == [2, 3]
    for value in (1.0, 2.0):
        model.layers[0].bias.assign(np.full(17, value))
        manager.save(model, 3)
        assert manager.steps() == [2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000002", "step-00000003.2"]
    model.layers[0].bias.assign(np.zeros(17))
    manager.restore(model)
    np.testing.assert_array_equal(model.layers[0].bias.numpy(), np.full(17, 2.0))


def test_a_step_that_is_older_than_those_that_are_kept_is_there_when_it_was_saved(tmp_path):
    model = compiled()
    manager = tfshard.CheckpointManager(tmp_path, keep=1)
    manager.save(model, 5)
    path = manager.save(model, 3)
    assert path.is_dir() and manager.steps() == [3, 5]
    manager.save(model, 6)
    assert manager.steps() == [6]


def test_what_a_killed_writer_left_is_not_taken_for_a_checkpoint_and_is_cleared(tmp_path):
    model = compiled()
    manager = tfshard.CheckpointManager(tmp_path)
    path = manager.save(model, 1)
    shutil.copytree(path, tmp_path / ".tmp-step-00000002")
    shutil.copytree(path, tmp_path / ".tmp-removed-step-00000000-1-1")
    assert manager.steps() == [1]
    manager.save(model, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001", "step-00000002"]


def test_an_asynchronous_save_has_the_values_of_its_step(tmp_path, monkeypatch):
    model = filled()
    expected = values(model)
    go_on = threading.Event()
    run = writer.Writing.run

    def slow(self, snapshot):
        go_on.wait()
        run(self, snapshot)

    monkeypatch.setattr(writer.Writing, "run", slow)
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1, wait=False)
    for _ in range(3):
        model.train_on_batch(X[:8], Y[:8])
    assert manager.steps() == []
    go_on.set()
    manager.wait()
    assert manager.steps() == [1]
    assert not np.array_equal(values(model)["model/sequential/dense/kernel"], expected["model/sequential/dense/kernel"])
    manager.restore(model)
    assert_same_bits(without_metrics(values(model)), without_metrics(expected))


def test_a_failed_save_is_raised_and_leaves_what_was_committed(tmp_path, monkeypatch):
    model = compiled()
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    expected = values(model)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(tfshard.errors.CheckpointError, match="could not be written.*No space left"):
            manager.save(model, 2)
        manager.save(model, 2, wait=False)
        with pytest.raises(tfshard.errors.CheckpointError, match="could not be written.*No space left"):
            manager.wait()
    assert manager.steps() == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001"]
    manager.restore(model)
    assert_same_bits(values(model), expected)
    manager.save(model, 2)
    assert manager.steps() == [1, 2]


def test_two_writers_to_one_directory_are_told(tmp_path, monkeypatch):
    model = compiled()
    go_on = threading.Event()
    run = writer.Writing.run
    monkeypatch.setattr(writer.Writing, "run", lambda self, snapshot: (go_on.wait(), run(self, snapshot)))
    first, second = tfshard.CheckpointManager(tmp_path), tfshard.CheckpointManager(tmp_path)
    first.save(model, 1, wait=False)
    try:
        with pytest.raises(tfshard.errors.CheckpointError, match="Another process, or another CheckpointManager"):
            second.save(model, 2)
    finally:
        go_on.set()
    first.wait()
    assert second.steps() == [1]


def test_wrong_arguments_are_refused(tmp_path):
    model = compiled()
    manager = tfshard.CheckpointManager(tmp_path)
    for call, message in (
        (lambda: tfshard.CheckpointManager(tmp_path, keep=0), "keep must be a positive integer"),
        (lambda: tfshard.CheckpointManager(7), "directory must be a path or a URL"),
        (lambda: manager.save(model, -1), "step must be an integer"),
        (lambda: manager.save("model", 1), "keras.Model that is built"),
        (lambda: manager.save(keras.Sequential([keras.layers.Dense(2)]), 1), "keras.Model that is built"),
        (lambda: manager.restore(model), "checkpoint does not exist"),
        (lambda: manager.restore(model, step=3), "checkpoint does not exist"),
        (lambda: tfshard.CheckpointCallback(tmp_path), "every_steps or every_epochs"),
        (lambda: tfshard.CheckpointCallback(tmp_path, every_steps=0), "every_steps must be a positive integer"),
        (lambda: manager.save(model, 1, iterator=iter([1])), "Only two kinds of iterators"),
    ):
        with pytest.raises(tfshard.errors.CheckpointError, match=message):
            call()
    assert list(tmp_path.iterdir()) == []


# --- refusals ------------------------------------------------------------------------------------------


def test_every_mismatch_is_named_at_once_and_nothing_is_changed(tmp_path):
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(filled(), 1)
    keras.backend.clear_session()
    model = tfshard.Sequential(
        [keras.Input((13,)), keras.layers.Dense(16), keras.layers.Dense(3, dtype="float64"), keras.layers.Dense(3)]
    )
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    expected = values(model)
    with pytest.raises(tfshard.errors.CheckpointMismatchError) as caught:
        manager.restore(model)
    message = str(caught.value)
    for line in (
        r"'model/sequential/dense/kernel' has shape=(13, 17) in the checkpoint and (13, 16) in the model",
        r"'model/sequential/dense_1/bias' is float32 in the checkpoint and float64 in the model",
        r"'model/sequential/dense_2/bias' of shape=(3,) is not in the checkpoint",
        r"'model/sequential/batch_normalization/gamma' of shape=(17,) is not in the model",
        r"'optimizer/sequential_dense_kernel_momentum' of shape=(13, 17) is not in the model",
    ):
        assert line in message
    assert_same_bits(values(model), expected)
    model.train_on_batch(X[:8], Y[:8])
