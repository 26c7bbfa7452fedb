"""An LSTM language model: time to the first step, time of a step and resident memory of each way to train it.

    python tools/bench/recurrent.py

Ways: plain Keras on one device, MirroredStrategy and stage 3 on four devices; and stage 3 with `unroll=True`, which
takes minutes to compile (`--ways="one device,stage 3,stage 3 unrolled"`, with fewer `--timesteps`). Each runs in a
process of its own, in turn, `rounds` times over; ratios are to one device in the same round.
"""

import json

import common
from absl import app, flags

_TIMESTEPS = flags.DEFINE_integer("timesteps", 200, "Tokens of a sample.")
_UNITS = flags.DEFINE_integer("units", 128, "Of each of two LSTM layers, and of the embedding.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 1000, "Tokens that there are.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Samples of a step.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of an epoch.")
_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_WAYS = flags.DEFINE_list("ways", ["one device", "mirrored", "stage 3"], "What to compare; the first is the measure.")
_WAY = flags.DEFINE_string("way", None, "Measure this one here, and print JSON.")


def measure(way: str) -> dict:
    """Trains in one way in this process."""
    import keras
    import numpy as np

    scope = common.scope(way.removesuffix(" unrolled"))
    before = common.resident_bytes()
    with scope:
        tokens = keras.Input((_TIMESTEPS.value,), dtype="int32")
        x = keras.layers.Embedding(_VOCABULARY.value, _UNITS.value)(tokens)
        for _ in range(2):
            x = keras.layers.LSTM(_UNITS.value, return_sequences=True, unroll=way.endswith(" unrolled"))(x)
        model = keras.Model(tokens, keras.layers.Dense(_VOCABULARY.value)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    shape = (_BATCH_SIZE.value * _STEPS.value, _TIMESTEPS.value)
    data = np.random.RandomState(0).randint(0, _VOCABULARY.value, shape)
    times = common.fit_times(model, (data, data), batch_size=_BATCH_SIZE.value)
    return {**times, "resident": common.resident_bytes(), "resident_before": before, "origin": common.origin()}


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    results = common.rounds(_WAYS.value, _ROUNDS.value)
    measured = results[_WAYS.value[0]]
    print(f"{measured[0]['origin']}, median (and range) of {_ROUNDS.value} rounds")
    print(f"2 LSTM layers of {_UNITS.value} units, {_TIMESTEPS.value} timesteps, batch {_BATCH_SIZE.value}, SGD")
    for way, runs in results.items():
        first = common.spread(run["first"] for run in runs)
        step = common.spread(1000 * run["step"] for run in runs)
        memory = common.spread((run["resident"] - run["resident_before"]) / 1e6 for run in runs)
        ratio = common.spread(common.ratios(runs, measured))
        print(f"{way:>16}: first step {first} s, step {step} ms, ratio {ratio}, memory above the start {memory} MB")


if __name__ == "__main__":
    app.run(main)
