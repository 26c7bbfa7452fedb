"""Collectives in a single process, and between clients in separate processes (launched_collectives.py)."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfshard
from tfshard import collectives
from tfshard.measure import network_profile

HERE = pathlib.Path(__file__).parents[1]


def launch(num_processes: int, *command: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "tfshard", "launch", f"--num_processes={num_processes}", *command]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    return subprocess.run(line, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.slow
def test_collectives_between_clients():
    done = launch(2, "--devices_per_process=1", str(HERE / "launched_collectives.py"))
    assert done.returncode == 0, done.stderr
    assert "[client 0] all collectives agree" in done.stdout and "[client 1] all collectives agree" in done.stdout


@pytest.mark.slow
def test_profile_network_prints_a_table_and_draws_a_plot(tmp_path):
    plot = tmp_path / "network.png"
    done = launch(
        2, "--devices_per_process=1", "--module", "tfshard", "profile-network", "--sizes=1000,65536", "--repeats=2",
        f"--plot={plot}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Collectives between 2 CPU devices, 2 processes" in done.stdout
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        assert done.stdout.count(kind) == 2
    assert plot.stat().st_size > 1000


def test_one_process_gets_its_own_value_back():
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    value = np.arange(6, dtype=np.float32).reshape(3, 2)
    for result in (
        collectives.all_reduce(value),
        collectives.all_gather(value, axis=-1),
        collectives.reduce_scatter(value, "max"),
        collectives.broadcast(value),
    ):
        assert isinstance(result, np.ndarray) and result is not value
        np.testing.assert_array_equal(result, value)
    assert tf.is_tensor(collectives.all_reduce(tf.constant(value)))
    assert collectives.all_reduce(2.5, "mean") == 2.5
    collectives.barrier(timeout=1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collectives.all_reduce(1.0, "product"), "Unknown reduction. Reductions: .*Received: op='product'"),
        (lambda: collectives.all_reduce(np.array([True])), "Dtypes that can be reduced: .*Received: dtype=bool"),
        (lambda: collectives.all_reduce(3, "mean"), "A mean needs a floating dtype"),
        (lambda: collectives.all_gather(np.array(["a"])), "take numbers and bools"),
        (lambda: collectives.all_gather(1.0), "axis must be a dim of the value"),
        (lambda: collectives.all_gather(np.zeros((2, 2)), axis=2), "axis must be a dim of the value"),
        (lambda: collectives.reduce_scatter(1.0), "The first dim must be a multiple of the number of clients"),
        (lambda: collectives.broadcast(1.0, root=1), "root must be the number of a client, from 0 to 0"),
        (lambda: collectives.barrier(timeout=0), "timeout must be positive"),
        (lambda: tfshard.profile_network(sizes=[0]), "Sizes and repeats must be positive integers"),
        (lambda: tf.function(lambda: collectives.all_reduce(tf.constant(1.0)))(), "take eager values"),
    ],
)
def test_wrong_values_are_refused(call, message):
    with pytest.raises(tfshard.errors.CollectiveError, match=message):
        call()


def test_values_on_a_mesh_are_refused():
    model = tfshard.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(4)])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model.compile("sgd", "mse", strategy=strategy)
    value = strategy.run(lambda x: 2 * x, args=(np.ones((4, 4), np.float32),))
    with pytest.raises(tfshard.errors.CollectiveError, match="is on a mesh and is already global"):
        collectives.all_reduce(value)


def test_bandwidth_is_that_of_a_ring():
    measured = network_profile.Measurement(kind="all_reduce", bytes=4000, seconds=0.001, devices=4)
    assert (measured.bandwidth, measured.bus_bandwidth) == (4e6, 6e6)
    gathered = network_profile.Measurement(kind="all_gather", bytes=4000, seconds=0.001, devices=4)
    assert gathered.bus_bandwidth == 3e6
