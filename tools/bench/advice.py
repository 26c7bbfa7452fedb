"""The memory that `tfshard.advise` predicts for a step, beside what a process took: stages 0 to 3 on four devices.

    python tools/bench/advice.py

Each measurement is a process of its own. The peak of 28 Dense layers less that of 4, over the difference of their
parameters, leaves out what TensorFlow takes by itself; a quarter of it is one device's. Two steps with Adam, no groups.
"""

import json

import common
from absl import app, flags

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
    print(f"{'stage':>5} {'predicted':>10} {'measured':>9}   in copies of the parameters on one device")
    for stage in range(4):
        results = []
        for layers in (4, 28):
            results.append(common.run_child(f"--way={stage}:{layers}"))
        small, large = results
        parameters = large["parameters"] - small["parameters"]
        measured = (large["peak"] - small["peak"]) / parameters / common.DEVICES
        predicted = (large["predicted"] - small["predicted"]) / parameters
        print(f"{stage:>5} {predicted:>10.2f} {measured:>9.2f}")
    print(large["origin"])


if __name__ == "__main__":
    app.run(main)
