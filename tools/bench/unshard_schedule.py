"""Time of a step that follows the unshard schedule, beside a step whose gathers DTensor starts all at once.

    python tools/bench/unshard_schedule.py
    python tools/bench/unshard_schedule.py --model=mlp

At stage 3 on four devices with Adam, in one process: both models are compiled, then they step alternately, so that
other work on the machine meets both. The ratio is that of steps that follow each other; the median of all, and its
quartiles.
"""

import dataclasses
import statistics
import time

import common
import gpt_flags
from absl import app, flags

_MODEL = flags.DEFINE_enum("model", "gpt2", ["gpt2", "mlp"], "What is trained: an MLP of 16 layers of 1024 units.")
_PAIRS = flags.DEFINE_integer("pairs", 40, "Pairs of steps.", lower_bound=2)


def compiled(is_scheduled: bool):
    """A model at stage 3, with a batch."""
    import keras
    import numpy as np

    import tfshard

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES))
    if not is_scheduled:
        strategy.config = dataclasses.replace(strategy.config, reshard=None)
    with strategy.scope():
        if _MODEL.value == "mlp":
            layers = [keras.layers.Dense(1024, activation="relu") for _ in range(16)]
            model, batch = keras.Sequential([keras.Input((1024,)), *layers]), (np.ones((64, 1024)), np.ones((64, 1024)))
            model.compile("adam", "mse")
        else:
            model, batch = gpt_flags.gpt2()
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, batch


def main(argv):
    del argv
    import tfshard

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    models = [compiled(is_scheduled) for is_scheduled in (False, True)]
    for model, batch in models * 2:
        model.train_on_batch(*batch)
    pairs = []
    for number in range(_PAIRS.value):
        taken = {}
        for which in (0, 1) if number % 2 else (1, 0):
            begin = time.perf_counter()
            models[which][0].train_on_batch(*models[which][1])
            taken[which] = time.perf_counter() - begin
        pairs.append(taken)
    ratios = [pair[1] / pair[0] for pair in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    milliseconds = [1e3 * statistics.median(pair[which] for pair in pairs) for which in (0, 1)]
    print(f"{common.origin()}, {_PAIRS.value} pairs of steps")
    print(f"{models[0][0].count_params():,} parameters")
    print(f"all at once {milliseconds[0]:.0f} ms, scheduled {milliseconds[1]:.0f} ms")
    print(f"scheduled / all at once: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    app.run(main)
