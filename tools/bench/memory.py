"""Resident memory of one process that trains a large MLP with Adam on four devices, sharded and mirrored.

    python tools/bench/memory.py

Each strategy runs in a process of its own; the unit is one float32 copy of the parameters.
"""

import json
import platform
import resource
import subprocess
import sys

from absl import app, flags

_LAYERS = flags.DEFINE_integer("layers", 32, "Dense layers of the MLP.")
_WIDTH = flags.DEFINE_integer("width", 2048, "Units of each.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")
_STEPS = flags.DEFINE_integer("steps", 8, "Steps.")
_STRATEGY = flags.DEFINE_enum("strategy", None, ["sharded", "mirrored"], "Measure this one here, and print JSON.")

DEVICES = 4
BYTES_PER_KILOBYTE = 1024


def resident_bytes() -> int:
    """The highest resident memory of this process so far (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_KILOBYTE


def measure(name: str) -> dict:
    """Trains under one strategy in this process."""
    import keras
    import numpy as np
    import tensorflow as tf

    if name == "sharded":
        import tfshard

        tfshard.initialize(num_devices=DEVICES, device_type="CPU")
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=DEVICES), zero_stage=3)
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])
    before = resident_bytes()
    with strategy.scope():
        hidden = [keras.layers.Dense(_WIDTH.value, activation="relu") for _ in range(_LAYERS.value)]
        model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    samples = _BATCH_SIZE.value * _STEPS.value
    rs = np.random.RandomState(0)
    x, y = rs.randn(samples, 1024).astype("float32"), rs.randint(0, 10, samples)
    model.fit(x, y, batch_size=_BATCH_SIZE.value, verbose=0)
    return {
        "parameters": model.count_params(),
        "resident": resident_bytes(),
        "resident_before": before,
        "versions": f"Python {platform.python_version()}, TensorFlow {tf.__version__}, Keras {keras.__version__}",
    }


def main(argv):
    del argv
    if _STRATEGY.value:
        print(json.dumps(measure(_STRATEGY.value)))
        return
    results = {}
    for name in ("sharded", "mirrored"):
        command = [sys.executable, __file__, *sys.argv[1:], f"--strategy={name}"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results[name] = json.loads(output.splitlines()[-1])
    unit = 4 * results["sharded"]["parameters"]
    print(f"{results['sharded']['versions']}, {platform.machine()}, {DEVICES} logical CPU devices")
    print(f"{results['sharded']['parameters']:,} parameters, Adam, batch {_BATCH_SIZE.value}")
    for name, result in results.items():
        added = (result["resident"] - result["resident_before"]) / unit
        print(f"{name:>9}: resident {result['resident'] / 1e9:6.2f} GB, {added:5.1f} parameter copies above the start")
    print(f"sharded / mirrored: {results['sharded']['resident'] / results['mirrored']['resident']:.2f}")


if __name__ == "__main__":
    app.run(main)
