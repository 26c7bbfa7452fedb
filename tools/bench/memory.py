"""Measure the memory of one process that trains a large model with Adam on four devices and on one.

The ways are: sharded, sharded with all variables gathered once, plain Keras on one device, and mirrored.

    python tools/bench/memory.py
    python tools/bench/memory.py --layers=16
    python tools/bench/memory.py --model=gpt2 --ways=sharded
    python tools/bench/memory.py --allocator=system

Each way runs in a separate process, interleaved with the other ways, `rounds` times. The unit is one float32 copy of
the parameters. Figures are medians over the rounds, with the minimum and the maximum. The columns are:

- *resident*: the resident memory of the process, including the memory that compilation takes.
- *in use*: the memory that the allocator has given out at the peak of a step.
- *activations*: the part of that peak that the plan attributes to the batch.

The GPT-2 has 12 blocks, 768 units and 110 million parameters; a batch is 8 texts of 128 tokens. TensorFlow's CPU
allocator keeps freed memory. The system's allocator returns freed memory, but does not report the memory in use.
"""

import json
import os

import common
from absl import app, flags

_LAYERS = flags.DEFINE_integer("layers", 32, "Dense layers of the MLP.")
_WIDTH = flags.DEFINE_integer("width", 2048, "Units of each layer.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")
_STEPS = flags.DEFINE_integer("steps", 8, "Steps.")
_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_MODEL = flags.DEFINE_enum("model", "mlp", ["mlp", "gpt2"], "The model to train.")
_ALLOCATOR = flags.DEFINE_enum("allocator", "tensorflow", ["system", "tensorflow"], "Allocator of the tensors.")
WAYS = ["sharded", "gathered once", "one device", "mirrored"]
_WAYS = flags.DEFINE_list("ways", WAYS, "Ways to measure.")
_WAY = flags.DEFINE_enum("way", None, WAYS, "Measure this way in this process, and print JSON.")


def measure(way: str) -> dict:
    """Train in this process, and measure its memory."""
    import keras
    import numpy as np

    import tfshard

    is_sharded = way in ("sharded", "gathered once")
    options = {"reshard_after_forward": way == "sharded"} if is_sharded else {}
    scope = common.scope("stage 3" if is_sharded else way, **options)
    before = common.resident_bytes()
    size = 8 if _MODEL.value == "gpt2" else _BATCH_SIZE.value
    with scope:
        if _MODEL.value == "gpt2":
            model, (x, y) = common.gpt2(
                layers=12, width=768, heads=12, vocabulary=32000, sequence=128, samples=size * _STEPS.value
            )
        else:
            hidden = [keras.layers.Dense(_WIDTH.value, activation="relu") for _ in range(_LAYERS.value)]
            model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(10)])
            samples, rs = size * _STEPS.value, np.random.RandomState(0)
            x, y = rs.randn(samples, 1024).astype("float32"), rs.randint(0, 10, samples)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=size, verbose=0)
    result = {
        "parameters": model.count_params(),
        "resident": common.resident_bytes(),
        "resident_before": before,
        "origin": common.origin(),
    }
    if not is_sharded:
        return result
    first = keras.tree.map_structure(lambda leaf: leaf[:size], x)
    planned = model.distribute_strategy.plan(model, inputs=first)
    peak = tfshard.profile_step(model, (first, y[:size])).peak  # None: the system's allocator does not report it.
    return {**result, "in_use": 0 if peak is None else peak.bytes, "activations": 4 * planned.peak.activation_bytes}


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    if _ALLOCATOR.value == "system":
        os.environ.update(common.SYSTEM_ALLOCATOR)
    results = common.rounds(_WAYS.value, _ROUNDS.value)
    first = results[_WAYS.value[0]][0]
    unit = 4 * first["parameters"]
    print(f"{first['origin']}, {_ALLOCATOR.value}'s allocator, median (and range) of {_ROUNDS.value} rounds")
    print(f"{first['parameters']:,} parameters, Adam; copies of the parameters")
    print(f"{'':>14} {'resident GB':>22} {'above the start':>20} {'in use':>20} {'activations':>20}")
    for way, runs in results.items():
        resident = common.spread(run["resident"] / 1e9 for run in runs)
        added = common.spread(((run["resident"] - run["resident_before"]) / unit for run in runs), ".1f")
        in_use, activations = (
            common.spread((run[name] / unit for run in runs), ".1f") if "in_use" in runs[0] else "-"
            for name in ("in_use", "activations")
        )
        print(f"{way:>14} {resident:>22} {added:>20} {in_use:>20} {activations:>20}")
    if {"sharded", "mirrored"} <= results.keys():
        print(
            f"sharded / mirrored: {common.spread(common.ratios(results['sharded'], results['mirrored'], 'resident'))}"
        )


if __name__ == "__main__":
    app.run(main)
