"""The memory that `tfshard.advise` predicts for a step, beside what a process took: stages 0 to 3 on four devices.

    python tools/bench/advice.py

Each measurement is a process of its own. The peak of 28 Dense layers less that of 4, over the difference of their
parameters, leaves out what TensorFlow takes by itself; a quarter of it is one device's. Two steps with Adam, no groups.
All stages in turn, `rounds` times over; figures are medians of the rounds, with the least and the most.
"""

import json

import common
from absl import app, flags

_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_LAYERS = flags.DEFINE_list("layers", ["4", "28"], "Dense layers of the small and of the large model.")
_WAY = flags.DEFINE_string("way", None, "Measure stage:layers here, and print JSON.")

WIDTH = 1024


def measure(stage: int, layers: int) -> dict:
    import keras
    import numpy as np

    import tfshard

    with common.scope(f"stage {stage}", analyzer=None):
        hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(layers)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden])
        model.compile("adam", "mse")
    model.fit(np.zeros((32, WIDTH)), np.zeros((32, WIDTH)), batch_size=16, verbose=0)
    advice = tfshard.advise(model, common.DEVICES, 1 << 40, 16, optimizer="adam", analyzer=None)
    predicted = next(
        c.peak_bytes for c in advice.candidates if c.zero_stage == stage and c.mesh_shape == {"batch": common.DEVICES}
    )
    return {
        "peak": common.resident_bytes(),
        "parameters": 4 * model.count_params(),
        "predicted": predicted,
        "origin": common.origin(),
    }


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(*(int(part) for part in _WAY.value.split(":")))))
        return
    measured: dict[int, list[float]] = {stage: [] for stage in range(4)}
    predicted: dict[int, float] = {}
    for _ in range(_ROUNDS.value):
        for stage, found in measured.items():
            small, large = (common.run_child(f"--way={stage}:{layers}") for layers in _LAYERS.value)
            parameters = large["parameters"] - small["parameters"]
            found.append((large["peak"] - small["peak"]) / parameters / common.DEVICES)
            predicted[stage] = (large["predicted"] - small["predicted"]) / parameters
    print(f"{large['origin']}, median (and range) of {_ROUNDS.value} rounds")
    print(f"{'stage':>5} {'predicted':>10} {'measured':>21}   in copies of the parameters on one device")
    for stage, found in measured.items():
        print(f"{stage:>5} {predicted[stage]:>10.2f} {common.spread(found):>21}")


if __name__ == "__main__":
    app.run(main)
