"""Memory and step time of launched clients on CPU: with the system's allocator, and with TensorFlow's.

    python tools/bench/launched_memory.py
    python tools/bench/launched_memory.py --stages=1,3 --width=1536 --layers=16

Two clients with one device each train an MLP with Adam. *Held* is the most that a client had resident by the kernel's
count, of the client that held more; *tensors* is that without what the client held when DTensor was started. *Planned*
is what `plan.peak` says of the devices' tensors, and of the whole client (`Peak.resident_bytes`). Runs with both
allocators follow each other, `rounds` times over; the ratio of step times is of the two runs of one round.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import common
from absl import app, flags

ROOT = pathlib.Path(__file__).parents[2]

_LAYERS = flags.DEFINE_integer("layers", 8, "Dense layers of the MLP.", 1)
_WIDTH = flags.DEFINE_integer("width", 3072, "Units of each.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.", 2)
_STAGES = flags.DEFINE_list("stages", ["3"], "ZeRO stages.")
_STEPS = flags.DEFINE_integer("steps", 10, "Steps, besides the first three.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", 1)
_MEASURE = flags.DEFINE_string("measure", None, "Measure this stage here, in a client, and print JSON.")

ALLOCATORS = ("tensorflow", "system")


def measure(stage: int) -> dict:
    """Trains in this client."""
    import keras
    import numpy as np

    import tfshard

    tfshard.initialize(device_type="CPU")
    started = common.resident_bytes("VmRSS")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2), zero_stage=stage)
    with strategy.scope():
        hidden = [keras.layers.Dense(_WIDTH.value, activation="relu") for _ in range(_LAYERS.value)]
        model = keras.Sequential([keras.Input((_WIDTH.value,)), *hidden, keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rs = np.random.RandomState(0)
    x = rs.randn(_BATCH_SIZE.value, _WIDTH.value).astype("float32")
    y = rs.randint(0, 10, _BATCH_SIZE.value)
    planned = strategy.plan(model, inputs=x).peak
    times = []
    for _ in range(3 + _STEPS.value):
        begin = time.perf_counter()
        float(model.train_on_batch(x, y))
        times.append(time.perf_counter() - begin)
    return {
        "held": common.resident_bytes(),
        "started": started,
        "planned": planned.resident_bytes(),
        "planned_tensors": planned.peak_bytes,
        "step": statistics.median(times[3:]),
        "parameters": model.count_params(),
        "origin": common.origin(),
    }


def run(stage: str, allocator: str) -> dict:
    """What the client that holds more finds in a launched run."""
    script = str(pathlib.Path(sys.argv[0]).resolve())
    done = subprocess.run(
        [
            sys.executable, "-m", "tfshard", "launch", "--num_processes=2", "--devices_per_process=1",
            f"--allocator={allocator}", script, *sys.argv[1:], f"--measure={stage}",
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    found = re.findall(r"\[client \d\] FOUND (.*)", done.stdout)
    if done.returncode or len(found) != 2:
        sys.exit(f"The run failed:\n{done.stdout[-4000:]}")
    return max(map(json.loads, found), key=lambda each: each["held"])


def main(argv):
    del argv
    if _MEASURE.value:
        print(f"FOUND {json.dumps(measure(int(_MEASURE.value)))}", flush=True)
        return
    for number, stage in enumerate(_STAGES.value):
        runs = {allocator: [] for allocator in ALLOCATORS}
        for _ in range(_ROUNDS.value):
            for allocator, results in runs.items():
                results.append(run(stage, allocator))
        first = runs["system"][0]
        if not number:
            print(f"{first['origin']}, in two clients with one device each; {first['parameters']:,} parameters, Adam,")
            print(
                f"batch {_BATCH_SIZE.value}; {_ROUNDS.value} rounds of {_STEPS.value} steps; MiB, medians (and range)"
            )
            print(
                f"{'stage':>6} {'allocator':>11} {'held':>24} {'planned':>8} {'tensors':>20} {'planned':>8} "
                f"{'step ms':>20}"
            )
        for allocator, results in runs.items():
            held = common.spread((each["held"] / (1 << 20) for each in results), ",.0f")
            tensors = common.spread(((each["held"] - each["started"]) / (1 << 20) for each in results), ",.0f")
            step = common.spread((1e3 * each["step"] for each in results), ",.0f")
            print(
                f"{stage:>6} {allocator:>11} {held:>24} {first['planned'] / (1 << 20):>8,.0f} {tensors:>20} "
                f"{first['planned_tensors'] / (1 << 20):>8,.0f} {step:>20}",
                flush=True,
            )
        ratio = common.spread(a["step"] / b["step"] for a, b in zip(runs["system"], runs["tensorflow"], strict=True))
        print(f"{stage:>6} step, system / tensorflow: {ratio}", flush=True)


if __name__ == "__main__":
    app.run(main)
