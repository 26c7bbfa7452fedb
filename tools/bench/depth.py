"""Measure how the peak of a step grows with depth and with devices: GPT-2 blocks of one width at stage 3.

    python tools/bench/depth.py --plot=docs/depth.png
    python tools/bench/depth.py --depths=12 --devices=2,4,8

Each depth runs in a separate process. A block adds its parameters and Adam's slots to the stored bytes. The gathered
bytes do not grow with depth. Activations grow with depth, and are kept small here. Bytes are summed over all
devices, by the allocator's trace.
"""

import json
import statistics

import common
from absl import app, flags

_DEPTHS = flags.DEFINE_list("depths", ["6", "12", "24", "48"], "Transformer blocks.")
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 1000, "Tokens of the vocabulary.")
_SEQUENCE = flags.DEFINE_integer("sequence_length", 16, "Tokens of a sample.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Samples of a step.")
_DEVICES = flags.DEFINE_list("devices", ["4"], "Numbers of devices.")
_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw the table to this picture.")
_WAY = flags.DEFINE_string("way", None, "Measure depth:devices here, and print JSON.")


def measure(depth: int, devices: int) -> dict:
    """Measure the stored bytes and the peak of a step in this process."""
    import keras

    import tfshard

    with common.scope("stage 3", devices=devices, analyzer=tfshard.ParameterAnalyzer(group_threshold_bytes=1 << 16)):
        model, batch = common.gpt2(
            layers=depth, width=_WIDTH.value, heads=4, vocabulary=_VOCABULARY.value, sequence=_SEQUENCE.value,
            samples=_BATCH_SIZE.value,
        )  # fmt: skip
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    profile = tfshard.profile_step(model, batch)
    return {
        "parameters": 4 * model.count_params(),
        "rests": sum(profile.variable_bytes.values()),
        "added": profile.peak.added,
        "origin": common.origin(),
    }


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(*(int(part) for part in _WAY.value.split(":")))))
        return
    ways = [(int(depth), int(devices)) for devices in _DEVICES.value for depth in _DEPTHS.value]
    results: dict = {way: [] for way in ways}
    for _ in range(_ROUNDS.value):
        for (depth, devices), runs in results.items():
            runs.append(common.run_child(f"--way={depth}:{devices}"))
    first = results[ways[0]][0]
    print(f"{first['origin']}, median (and range) of {_ROUNDS.value} rounds; MiB")
    print(f"{'blocks':>6} {'devices':>8} {'parameters':>11} {'rests':>8} {'a step adds':>22}")
    for (depth, devices), runs in results.items():
        added = common.spread((run["added"] / 2**20 for run in runs), ".1f")
        parameters, rests = (runs[0][key] / 2**20 for key in ("parameters", "rests"))
        print(f"{depth:>6} {devices:>8} {parameters:>11.1f} {rests:>8.1f} {added:>22}")
    if _PLOT.value:
        _draw(results)


def _draw(results: dict) -> None:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    depths = [depth for depth, _ in results]
    for label, keys in (("rests", ["rests"]), ("peak", ["rests", "added"])):
        values = [sum(statistics.median(run[key] for run in runs) for key in keys) / 2**20 for runs in results.values()]
        axes.plot(depths, values, marker="o", label=label)
    axes.set(xlabel="blocks", ylabel="MiB on all devices", title="A step of stage 3", ylim=(0, None))
    axes.legend()
    figure.savefig(_PLOT.value)


if __name__ == "__main__":
    app.run(main)
