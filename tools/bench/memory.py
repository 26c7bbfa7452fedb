"""Memory of one process that trains a large MLP with Adam on four devices: sharded, with all gathered once, mirrored.

    python tools/bench/memory.py
    python tools/bench/memory.py --layers=16

Each way runs in a process of its own, in turn, `rounds` times over. The unit is one float32 copy of the parameters;
figures are medians of the rounds, with the least and the most. *Resident* is what the process took of the system, what
it holds to compile included; *in use* what the allocator had given out at the peak of a step.
"""

import json

import common
from absl import app, flags

_LAYERS = flags.DEFINE_integer("layers", 32, "Dense layers of the MLP.")
_WIDTH = flags.DEFINE_integer("width", 2048, "Units of each.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")
_STEPS = flags.DEFINE_integer("steps", 8, "Steps.")
_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_WAY = flags.DEFINE_enum("way", None, ["sharded", "gathered once", "mirrored"], "Measure this here, and print JSON.")


def measure(way: str) -> dict:
    """Trains in this process."""
    import keras
    import numpy as np

    import tfshard

    options = {} if way == "mirrored" else {"reshard_after_forward": way == "sharded"}
    scope = common.scope("mirrored" if way == "mirrored" else "stage 3", **options)
    before = common.resident_bytes()
    with scope:
        hidden = [keras.layers.Dense(_WIDTH.value, activation="relu") for _ in range(_LAYERS.value)]
        model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    samples = _BATCH_SIZE.value * _STEPS.value
    rs = np.random.RandomState(0)
    x, y = rs.randn(samples, 1024).astype("float32"), rs.randint(0, 10, samples)
    model.fit(x, y, batch_size=_BATCH_SIZE.value, verbose=0)
    resident = common.resident_bytes()
    batch = x[: _BATCH_SIZE.value], y[: _BATCH_SIZE.value]
    return {
        "parameters": model.count_params(),
        "resident": resident,
        "resident_before": before,
        "in_use": 0 if way == "mirrored" else tfshard.profile_step(model, batch).peak.bytes,
        "origin": common.origin(),
    }


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    results: dict = {"sharded": [], "gathered once": [], "mirrored": []}
    for _ in range(_ROUNDS.value):
        for way, runs in results.items():
            runs.append(common.run_child(f"--way={way}"))
    first = results["sharded"][0]
    unit = 4 * first["parameters"]
    print(f"{first['origin']}, median (and range) of {_ROUNDS.value} rounds")
    print(f"{first['parameters']:,} parameters, Adam, batch {_BATCH_SIZE.value}; copies of the parameters")
    print(f"{'':>14} {'resident GB':>22} {'above the start':>20} {'in use':>20}")
    for way, runs in results.items():
        resident = common.spread(run["resident"] / 1e9 for run in runs)
        added = common.spread(((run["resident"] - run["resident_before"]) / unit for run in runs), ".1f")
        in_use = common.spread((run["in_use"] / unit for run in runs), ".1f") if way != "mirrored" else "-"
        print(f"{way:>14} {resident:>22} {added:>20} {in_use:>20}")
    print(f"sharded / mirrored: {common.spread(common.ratios(results['sharded'], results['mirrored'], 'resident'))}")


if __name__ == "__main__":
    app.run(main)
