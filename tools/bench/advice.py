"""The memory that `tfshard.advise` predicts for a step, beside what the allocator gave: stages 0 to 3 on four devices.

    python tools/bench/advice.py

Each measurement is a process of its own: the peak of a step of a Dense model with Adam, no groups, over all devices; a
quarter of it is one device's. All in turn, `rounds` times over; figures are medians of the rounds, with the least and
the most, in copies of the parameters on one device.
"""

import json

import common
from absl import app, flags

_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_LAYERS = flags.DEFINE_list("layers", ["6", "24"], "Dense layers.")
_CLIP = flags.DEFINE_float("global_clipnorm", None, "Of Adam.")
_WAY = flags.DEFINE_string("way", None, "Measure stage:layers here, and print JSON.")

WIDTH = 1024


def measure(stage: int, layers: int) -> dict:
    import keras
    import numpy as np

    import tfshard

    with common.scope(f"stage {stage}", analyzer=None):
        hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(layers)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden])
        optimizer = keras.optimizers.Adam(global_clipnorm=_CLIP.value)
        model.compile(optimizer, "mse")
    profile = tfshard.profile_step(model, (np.zeros((16, WIDTH)), np.zeros((16, WIDTH))))
    advice = tfshard.advise(model, common.DEVICES, 1 << 40, 16, optimizer=optimizer, analyzer=None)
    predicted = next(
        c.peak_bytes for c in advice.candidates if c.zero_stage == stage and c.mesh_shape == {"batch": common.DEVICES}
    )
    return {
        "peak": profile.peak.bytes,
        "parameters": 4 * model.count_params(),
        "predicted": predicted,
        "origin": common.origin(),
    }


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(*(int(part) for part in _WAY.value.split(":")))))
        return
    ways = [(stage, int(layers)) for stage in range(4) for layers in _LAYERS.value]
    results: dict = {way: [] for way in ways}
    for _ in range(_ROUNDS.value):
        for (stage, layers), runs in results.items():
            runs.append(common.run_child(f"--way={stage}:{layers}"))
    print(f"{results[ways[0]][0]['origin']}, median (and range) of {_ROUNDS.value} rounds")
    print(f"stage layers {'predicted':>10} {'measured':>21} {'measured / predicted':>21}")
    for (stage, layers), runs in results.items():
        unit = runs[0]["parameters"]
        measured = common.spread(run["peak"] / unit / common.DEVICES for run in runs)
        ratio = common.spread(run["peak"] / common.DEVICES / run["predicted"] for run in runs)
        print(f"{stage:>5} {layers:>6} {runs[0]['predicted'] / unit:>10.2f} {measured:>21} {ratio:>21}")


if __name__ == "__main__":
    app.run(main)
