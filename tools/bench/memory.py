"""Resident memory of one process that trains a large MLP with Adam on four devices, sharded and mirrored.

    python tools/bench/memory.py

Each strategy runs in a process of its own, in turn, `rounds` times over. The unit is one float32 copy of the
parameters; figures are medians of the rounds, with the least and the most.
"""

import json

import common
from absl import app, flags

_LAYERS = flags.DEFINE_integer("layers", 32, "Dense layers of the MLP.")
_WIDTH = flags.DEFINE_integer("width", 2048, "Units of each.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")
_STEPS = flags.DEFINE_integer("steps", 8, "Steps.")
_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_STRATEGY = flags.DEFINE_enum("strategy", None, ["sharded", "mirrored"], "Measure this one here, and print JSON.")


def measure(name: str) -> dict:
    """Trains under one strategy in this process."""
    import keras
    import numpy as np

    strategy_scope = common.scope("stage 3" if name == "sharded" else name)
    before = common.resident_bytes()
    with strategy_scope:
        hidden = [keras.layers.Dense(_WIDTH.value, activation="relu") for _ in range(_LAYERS.value)]
        model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    samples = _BATCH_SIZE.value * _STEPS.value
    rs = np.random.RandomState(0)
    x, y = rs.randn(samples, 1024).astype("float32"), rs.randint(0, 10, samples)
    model.fit(x, y, batch_size=_BATCH_SIZE.value, verbose=0)
    return {
        "parameters": model.count_params(),
        "resident": common.resident_bytes(),
        "resident_before": before,
        "origin": common.origin(),
    }


def main(argv):
    del argv
    if _STRATEGY.value:
        print(json.dumps(measure(_STRATEGY.value)))
        return
    results: dict = {"sharded": [], "mirrored": []}
    for _ in range(_ROUNDS.value):
        for name, runs in results.items():
            runs.append(common.run_child(f"--strategy={name}"))
    first = results["sharded"][0]
    unit = 4 * first["parameters"]
    print(f"{first['origin']}, median (and range) of {_ROUNDS.value} rounds")
    print(f"{first['parameters']:,} parameters, Adam, batch {_BATCH_SIZE.value}")
    for name, runs in results.items():
        resident = common.spread(run["resident"] / 1e9 for run in runs)
        added = common.spread(((run["resident"] - run["resident_before"]) / unit for run in runs), ".1f")
        print(f"{name:>9}: resident {resident} GB, {added} parameter copies above the start")
    print(f"sharded / mirrored: {common.spread(common.ratios(results['sharded'], results['mirrored'], 'resident'))}")


if __name__ == "__main__":
    app.run(main)
