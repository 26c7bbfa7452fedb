"""Sharded variables take only their share of the devices' memory."""

import gc
import pathlib
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard import _private


def held(model) -> dict[str, list[int]]:
    """Return the bytes of parameters and slots on each device."""
    kinds = {"parameter": model.trainable_variables, "slot": model.optimizer.variables}
    sums = {}
    for kind, variables in kinds.items():
        # The members of a group share a buffer.
        buffers = {id(v.value.buffer): v.value.buffer for v in variables}.values()
        sums[kind] = np.sum([[np.asarray(p).nbytes for p in dtensor.unpack(b.value())] for b in buffers], axis=0)
    return {kind: on_devices.tolist() for kind, on_devices in sums.items()}


def model_above_one_megabyte() -> keras.Model:
    return keras.Sequential(
        [keras.Input((301,)), keras.layers.Dense(509), keras.layers.Dense(512), keras.layers.Dense(10)]
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", ["as_distributed", "scope"])
def test_each_of_four_devices_holds_a_quarter_at_stage_3(way):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    if way == "scope":
        with strategy.scope():
            model = model_above_one_megabyte()
            model.compile("adam", "mse")
    else:
        model = tfshard.as_distributed(model_above_one_megabyte())
        model.compile("adam", "mse", strategy=strategy)
    model.fit(np.zeros((8, 301)), np.zeros((8, 10)), batch_size=8, verbose=0)
    whole = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    assert whole > 1 << 20
    assert len(held(model)["parameter"]) == 4
    for on_device in held(model)["parameter"]:
        assert on_device == pytest.approx(whole / 4, rel=0.02)
    for on_device in held(model)["slot"]:
        assert on_device == pytest.approx(2 * whole / 4, rel=0.02)
    report = strategy.report(model)
    assert report.bytes_per_device("parameter") == max(held(model)["parameter"])
    assert report.bytes_on_one_device("parameter") == whole


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("stage", "parameters", "slots"), [(0, 1, 1), (1, 1, 4), (2, 1, 4), (3, 4, 4)])
def test_stages_shard_what_they_say(stage, parameters, slots):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage)
    model = tfshard.as_distributed(model_above_one_megabyte())
    model.compile("adam", "mse", strategy=strategy)
    model.fit(np.zeros((8, 301)), np.zeros((8, 10)), batch_size=8, verbose=0)
    data = strategy.report(model).to_dict()
    assert data["world_size"] == 4 and data["zero_stage"] == stage
    # All variables are in one group with unsharded gradients (others: test_gradients.py).
    assert data["gradients_reduce_scattered"] is False
    assert data["totals"]["gradient"]["bytes_per_device"] == data["totals"]["parameter"]["bytes_on_one_device"]
    shards = {
        kind: {v["shards"] for v in data["variables"] if v["kind"] == kind and v["shape"]}
        for kind in ("parameter", "slot")
    }
    assert shards == {"parameter": {parameters}, "slot": {slots}}
    assert "total parameters" in str(strategy.report(model))


def anonymous() -> int:
    """Return the bytes of this process's memory that are not pages of files."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        pytest.skip("Linux only.")
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_one_more_variable_costs_its_elements_and_no_program_of_its_own():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)

    def make(number: int) -> list[tf.Variable]:
        with strategy.scope():
            variables = [tf.Variable(np.full((8, 8), i, np.float32), name=f"named_{i}") for i in range(number)]
        assert all((v.numpy() == i).all() for i, v in enumerate(variables))
        assert len({id(v.buffer) for v in variables}) == number
        return variables

    kept = make(2)
    before = anonymous()
    kept += make(150)
    # They took 0.2 MiB each while DTensor compiled a program for each name.
    assert anonymous() - before < 10 << 20


def allocated() -> int:
    """Return the bytes in use by TensorFlow's CPU allocator, read from a trace."""
    keras.backend.clear_session()
    gc.collect()
    with tempfile.TemporaryDirectory() as directory:
        with tf.profiler.experimental.Profile(directory, tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)):
            np.asarray(tf.zeros((1 << 16,)) + 1)
        (file,) = pathlib.Path(directory).rglob("*.xplane.pb")
        trace = _private.read_trace(file.read_bytes())
    found = [event.stats["bytes_allocated"] for event in trace if event.name == "MemoryAllocation"]
    return max(found, default=0)


def test_nothing_but_the_pieces_stays_allocated_after_a_step():
    before = allocated()
    if not before:
        pytest.skip("This TensorFlow's CPU allocator does not report what it holds (no oneDNN).")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    layers = [keras.layers.Dense(1024, activation="relu") for _ in range(6)]
    model = tfshard.as_distributed(keras.Sequential([keras.Input((1024,)), *layers]))
    model.compile("adam", "mse", strategy=strategy)
    for _ in range(2):
        model.train_on_batch(np.ones((8, 1024)), np.ones((8, 1024)))
    copy = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    # The parameters and the two slots of Adam, once over all devices. Views of full gradients made it 5.5.
    assert (allocated() - before) / copy < 1.2 * 3


def test_no_operation_of_a_step_is_asked_for_a_description_of_its_own(monkeypatch):
    asked_by = []
    of_tensorflow = tf.Operation.op_def

    def op_def(operation):
        asked_by.append(sys._getframe(1).f_globals["__name__"])
        return of_tensorflow.__get__(operation)

    monkeypatch.setattr(tf.Operation, "op_def", property(op_def), raising=False)
    with tf.Graph().as_default():
        assert tf.constant(1.0).op.op_def.name == "Const"
    assert asked_by == [__name__]  # Premise: calls are recorded.
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(512), keras.layers.Dense(8)])
    tfshard.as_distributed(model)
    strategy.recompute(model, [".*dense"])
    model.compile("adam", "mse", strategy=strategy)
    model.fit(np.zeros((8, 16)), np.zeros((8, 8)), batch_size=8, verbose=0)
    assert not [name for name in asked_by if name.startswith("tfshard")]  # TensorFlow asks for a few.
