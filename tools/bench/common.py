"""Models, child processes, timing and memory counts that the benchmarks share."""

import contextlib
import itertools
import json
import os
import pathlib
import platform
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable

DEVICES = 4
ROUNDS = 3  # The default of --rounds.
EPOCHS = 3  # Timed epochs, after one untimed epoch.
BYTES_PER_KIBIBYTE = 1024
# Tests, and benchmarks that `start` devices, use this type: "CPU" or "GPU".
DEVICE_TYPE = os.environ.get("TFSHARD_DEVICE_TYPE", "CPU").upper()
# The memory of each logical GPU when one GPU is split.
GPU_MEBIBYTES = int(os.environ.get("TFSHARD_GPU_MEBIBYTES", "4096"))


# The environment of a process that returns freed memory to the system. The file is run by its path: `import tfshard`
# imports TensorFlow, which reads the environment.
_ALLOCATORS = pathlib.Path(__file__).parents[2] / "tfshard" / "devices" / "allocators.py"
SYSTEM_ALLOCATOR: dict[str, str] = runpy.run_path(str(_ALLOCATORS))["SYSTEM_ALLOCATOR"]


def run_child(*arguments: str, package: str | None = None) -> dict:
    """Run this script again with more flags, and return the JSON of its last line.

    With `package`, the child imports tfshard from that folder.
    """
    command = [sys.executable, *sys.argv, *arguments]
    environment = os.environ | ({"PYTHONPATH": str(pathlib.Path(package).resolve())} if package else {})
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


def rounds(ways: Iterable[str], count: int) -> dict[str, list[dict]]:
    """Run this script for each way, interleaved, `count` times. Returns the results of each way in order."""
    results: dict[str, list[dict]] = {way: [] for way in ways}
    for _ in range(count):
        for way, runs in results.items():
            runs.append(run_child(f"--way={way}"))
    return results


def origin() -> str:
    """Return the versions and the machine."""
    import keras
    import tensorflow as tf

    versions = f"Python {platform.python_version()}, TensorFlow {tf.__version__}, Keras {keras.__version__}"
    return f"{versions}, {platform.machine()}, {DEVICES} logical {DEVICE_TYPE} devices"


def split_devices(devices: int) -> None:
    """Create logical CPU devices, or split the first GPU if the machine has fewer than `devices`."""
    import tensorflow as tf

    physical = tf.config.list_physical_devices(DEVICE_TYPE)
    if DEVICE_TYPE == "CPU":
        parts = [tf.config.LogicalDeviceConfiguration()] * devices
    elif len(physical) < devices:
        parts = [tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MEBIBYTES)] * (devices - len(physical) + 1)
    else:
        return
    tf.config.set_logical_device_configuration(physical[0], parts)


def start(devices: int = DEVICES) -> None:
    """Start DTensor on devices of the type that TFSHARD_DEVICE_TYPE names."""
    import tfshard

    if DEVICE_TYPE == "GPU":
        split_devices(devices)
    tfshard.initialize(num_devices=devices, device_type=DEVICE_TYPE)


def resident_bytes(what: str = "VmHWM") -> int:
    """Return the resident memory of this process, on Linux.

    Args:
        what: `"VmHWM"` for the peak, `"VmRSS"` for now, `"RssAnon"` for now without pages of files.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what)) * BYTES_PER_KIBIBYTE


def scope(way: str, *, devices: int = DEVICES, **options):
    """Return the scope to build and compile a model under, for `"one device"`, `"mirrored"` or, say, `"stage 3"`."""
    import tensorflow as tf

    if way.startswith("stage"):
        import tfshard

        start(devices)
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=devices), zero_stage=int(way[6]), **options)
        return strategy.scope()
    if way == "mirrored":
        split_devices(devices)
        # NCCL takes no parts of a GPU.
        parts = DEVICE_TYPE == "GPU" and len(tf.config.list_physical_devices("GPU")) < devices
        return tf.distribute.MirroredStrategy(
            [f"{DEVICE_TYPE}:{i}" for i in range(devices)],
            cross_device_ops=tf.distribute.HierarchicalCopyAllReduce() if parts else None,
        ).scope()
    return contextlib.nullcontext()


def gpt2(*, layers: int, width: int, heads: int, vocabulary: int, sequence: int, samples: int):
    """Return a KerasHub GPT-2 with its embedding table as output layer, and random samples: (model, (x, y))."""
    import keras
    import keras_hub
    import numpy as np

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=vocabulary, num_layers=layers, num_heads=heads, hidden_dim=width, intermediate_dim=4 * width,
        max_sequence_length=sequence, dropout=0.0,
    )  # fmt: skip
    model = keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))
    tokens = np.random.RandomState(0).randint(0, vocabulary, (samples, sequence))
    return model, ({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, tokens)


def step_ends(model, data, *, batch_size: int, epochs: int) -> list[list[float]]:
    """Train, and return the end of each step of each epoch by `time.perf_counter`, with the loss on the host."""
    import keras

    ends: list[list[float]] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            ends.append([])

        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])
            ends[-1].append(time.perf_counter())

    model.fit(*data, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=[Clock()])
    return ends


def step_times(ends: list[float]) -> list[float]:
    """Return the seconds of each step of an epoch but the first, from the end of the step before."""
    return [after - before for before, after in itertools.pairwise(ends)]


def fit_times(model, data, *, batch_size: int, epochs: int = EPOCHS) -> dict:
    """Measure the steps of `fit`.

    A step lasts from the end of the step before to the end of the step, so the setup of an epoch, such as its iterator,
    does not count.

    Args:
        model: A compiled model.
        data: The arguments of `fit`, with at least two steps.
        batch_size: Samples of a step.
        epochs: The number of timed epochs, after one untimed epoch.

    Returns:
        A dict of seconds: `"first"` to the end of the first step, `"steps"` of each timed step, `"step"` their median.
    """
    start = time.perf_counter()
    ends = step_ends(model, data, batch_size=batch_size, epochs=1 + epochs)
    times = [seconds for epoch in ends[1:] for seconds in step_times(epoch)]
    return {"first": ends[0][0] - start, "steps": times, "step": statistics.median(times)}


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Format the median, the least and the most: `1.10 (1.05 to 1.31)`."""
    values = sorted(values)
    return f"{statistics.median(values):{form}} ({values[0]:{form}} to {values[-1]:{form}})"


def ratios(ours: Iterable[dict], theirs: Iterable[dict], key: str = "step") -> list[float]:
    """Return the ratio of each round."""
    return [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
