"""The devices of a process compile an XLA program once, together (devices/compilations.py)."""

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import sys
{before}
import keras
import numpy as np
import tfshard

tfshard.initialize(num_devices=4, device_type="CPU")
keras.utils.set_random_seed(0)


class Block(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.up, self.down = keras.layers.Dense(32, activation="relu"), keras.layers.Dense(16)

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 32))
        self.built = True

    def call(self, x):
        return x + self.down(self.up(x))


inputs = keras.Input((16,))
x = inputs
for n in range(3):
    x = Block(name=f"block{{n}}")(x)
model = tfshard.as_distributed(keras.Model(inputs, keras.layers.Dense(1)(x)))
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
model.compile("sgd", "mse", jit_compile=True, strategy=strategy, **{options})
model.fit(np.ones((32, 16), "float32"), np.ones((32, 1), "float32"), batch_size=8, epochs=2, verbose=0)
"""


def _counts(before="", options=None, **environment):
    """Return how many programs were compiled and read in a process that trains three equal blocks on four devices."""
    script = SCRIPT.format(before=before, options=options or {})
    levels = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "xla_device_compiler_client=2"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **levels, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return tuple(
        len(re.findall(f"{word} (?:to )?xla::LocalExecutable", done.stderr)) for word in ("Compiling", "Loading")
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}], ids=["step", "loop"])
def test_one_device_compiles_each_program(options):
    # The forward program and the backward program of all blocks, and the update of the group.
    assert _counts(options=options) == (3, 3 * 3)


@pytest.mark.slow
def test_second_run_compiles_nothing_with_a_directory_of_the_user(tmp_path):
    flags = f"--tf_xla_persistent_cache_directory={tmp_path}"
    assert _counts(TF_XLA_FLAGS=flags) == (3, 9)
    assert _counts(TF_XLA_FLAGS=flags) == (0, 12)


@pytest.mark.slow
def test_every_device_compiles_if_the_script_listed_devices_before():
    before = "import tensorflow as tf; tf.config.list_physical_devices()"
    assert _counts(before=before) == (12, 0)


SCHEDULE = """
import os
import tensorflow as tf
import tfshard
from tfshard import _private

tfshard.initialize(num_devices=4, device_type="CPU")
assert tf.config.threading.get_intra_op_parallelism_threads() == {threads}
before = os.environ["XLA_FLAGS"]
_private.stablehlo(lambda x: 2 * x, [tf.TensorSpec([3])], "CPU")
assert os.environ["XLA_FLAGS"] == before
tf.function(lambda x: 2 * x + 1, jit_compile=True)(tf.ones([3]))
"""
FLAG = "xla_cpu_enable_concurrency_optimized_scheduler"


@pytest.mark.slow
@pytest.mark.parametrize(
    "threads, given, expected",
    [(1, "", "false"), (2, "", "true"), (1, f" --{FLAG}=true", "true")],
    ids=["one thread", "two threads", "flag of the user"],
)
def test_programs_have_a_schedule_for_one_thread(tmp_path, threads, given, expected):
    environment = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path}{given}"}
    if threads > 1:
        environment["TF_NUM_INTRAOP_THREADS"] = str(threads)
    script = SCHEDULE.format(threads=1 if threads == 1 else 0)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (options,) = tmp_path.glob("*.debug_options")
    # XLA lists the options that differ from the default, which is true.
    assert (f"{FLAG}: false" in options.read_text()) == (expected == "false")
