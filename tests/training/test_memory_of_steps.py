"""Steps leave nothing in host memory: no records of collectives, no compiled operations."""

import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import collective_records
import launched
import parity
import tfshard

# Each way to run a step takes some seconds. An ordinary run takes the most distinct ways.
ALONE = ("stage 3", "loops", "eager steps", "run in a function, of one batch")
SWEPT = (*collective_records.COMPILED, "pipeline", *collective_records.CUSTOM)
LOGGED = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "collective_ops=1"}


def counted(log: str) -> dict[str, tuple[int, int]]:
    """Count, for each run between `BEGIN` and `END`, the collectives that ran, and those with a record."""
    found = {}
    for way, lines in re.findall(r"^BEGIN (.*?)$(.*?)^END ", log, re.DOTALL | re.MULTILINE):
        ran = len(re.findall(r"Collective\w+ group_size", lines))
        found[way] = ran, lines.count("Setting instance step_id under DTensor")
    return found


def assert_no_records(ways: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, collective_records.__file__, *ways],
        capture_output=True, text=True, errors="replace", timeout=900, env={**os.environ, **LOGGED, **paths()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = counted(done.stderr)
    assert all(any(way in each for each in found) for way in ways)
    assert sum(ran for ran, _ in found.values()) > 20 * len(ways), "premise: collectives ran, and are seen"
    assert {way: kept for way, (_, kept) in found.items() if kept} == {}


def paths() -> dict[str, str]:
    return {"PYTHONPATH": f"{launched.ROOT}{os.pathsep}{launched.HERE}"}


@pytest.mark.slow
def test_no_record_of_a_collective_is_kept_for_a_step():
    assert_no_records(ALONE)


@pytest.mark.slow
def test_no_record_of_a_collective_is_kept_however_a_step_runs():
    assert_no_records(SWEPT)


def mlp() -> keras.Model:
    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, keras.layers.Dropout(0.5), keras.layers.Dense(1)])


class Annealed(keras.Model):
    """Each step's loss has another weight, a Python number."""

    def __init__(self):
        super().__init__()
        self.net, self.weight = mlp(), 1.0

    def call(self, x, training=False):
        return self.net(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.weight *= 0.9
        return tf.reduce_mean(tf.square(y - y_pred) * self.weight)


rates = keras.optimizers.schedules.CosineDecay(0.01, 1000)
EAGER = {
    "SGD": (mlp, lambda: keras.optimizers.SGD(rates, momentum=0.9), 3),
    "Adam": (mlp, lambda: keras.optimizers.Adam(rates, global_clipnorm=0.1), 3),
    "Adam, stage 1": (mlp, lambda: keras.optimizers.Adam(rates), 1),
    "Adam, stage 0": (mlp, lambda: keras.optimizers.Adam(rates), 0),
    "Adafactor": (mlp, lambda: keras.optimizers.Adafactor(rates), 3),
    "Lion with averages": (mlp, lambda: keras.optimizers.Lion(rates, weight_decay=0.01, use_ema=True), 3),
    "a weight of Python": (Annealed, lambda: keras.optimizers.RMSprop(0.01), 3),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", EAGER)
def test_eager_steps_compile_nothing_more(name: str):
    build, optimizer, stage = EAGER[name]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage, analyzer=None)
    model = tfshard.as_distributed(build()) if build is mlp else None
    if model is None:
        with strategy.scope():
            model = build()
    model.compile(optimizer(), "mse", metrics=["mae"], run_eagerly=True, strategy=strategy)
    rs = np.random.RandomState(0)
    batches = [(rs.normal(size=(8, 16)).astype("float32"), rs.normal(size=(8, 1)).astype("float32")) for _ in range(9)]
    for batch in batches[:6]:
        model.train_on_batch(*batch)
    assert stage == 0 or name.startswith("Adam, ") or parity.shard_axes(model) == {"batch"}, "premise"
    known = set(context.context().list_function_names())
    for batch in batches[6:]:
        model.train_on_batch(*batch)
    assert set(context.context().list_function_names()) - known == set()
