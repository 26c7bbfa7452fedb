"""A client that reports its memory after TensorFlow freed many blocks, and its profile (test_launched_memory.py)."""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tfshard

MIB = 1 << 20
BLOCKS, BLOCK = 96, MIB
VARIABLES = ("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def resident(what: str = "VmRSS") -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(what))


def held_after_freeing() -> dict[str, int]:
    """Return the bytes above the start while many tensors live, and after all but the last are freed."""
    with tf.device("CPU:0"):
        start = resident()
        tensors = [tf.fill((BLOCK // 4,), float(i)) for i in range(BLOCKS)]
        most = resident()
        del tensors[:-1]
        return {"most": most - start, "left": resident() - start}


def main() -> None:
    tfshard.initialize(device_type="CPU")
    held_after_freeing()  # Loads the libraries that the first kernel loads.
    found = {"environment": {name: os.environ.get(name) for name in VARIABLES}, "held": held_after_freeing()}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))
    model = tfshard.Sequential([keras.Input((512,)), keras.layers.Dense(512), keras.layers.Dense(512)])
    model.compile("sgd", "mse", strategy=strategy)
    x = np.ones((8, 512), "float32")
    profile = tfshard.profile_step(model, (x, x))
    found["peak"] = None if profile.peak is None else profile.peak.bytes
    try:
        tfshard.measure.assert_matches_plan(profile, strategy.plan(model, inputs=x))
        found["matches"] = "yes"
    except tfshard.errors.StrategyError as e:
        found["matches"] = str(e)
    print(f"FOUND {json.dumps(['memory', found])}", flush=True)


def train() -> None:
    """Train a larger model, and report the peak memory and the planned peak."""
    tfshard.initialize(device_type="CPU")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))
    model = tfshard.Sequential([keras.Input((1536,)), *(keras.layers.Dense(1536, "relu") for _ in range(8))])
    model.compile("adam", "mse", strategy=strategy)
    x = np.ones((16, 1536), "float32")
    planned = strategy.plan(model, inputs=x).peak
    model.fit(x, x, batch_size=16, epochs=4, verbose=0)
    found = {"held": resident("VmHWM"), "planned": planned.resident_bytes(), "of_tensors": planned.peak_bytes}
    print(f"FOUND {json.dumps(['memory', found])}", flush=True)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
