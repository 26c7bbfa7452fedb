"""Measure how long the first step takes, against depth: GPT-2 blocks of width 64 on one device and at stage 3.

    python tools/bench/first_step.py --plot=benchmarks/first_step.svg
    python tools/bench/first_step.py --depths=densenet --ways="one device,stage 3"

Each depth and way runs in a separate process. The figures are seconds of the processor (user and system, all threads)
and of the wall clock, from the call of `compile` to the end of the first `train_on_batch`, and of the second. The
first figure is the one to compare on a machine that does other work, too. `densenet` is DenseNet121 with images of 32 x
32 pixels. "Compiled" means `jit_compile=True`.
"""

import json
import resource
import statistics
import time

import common
from absl import app, flags

_DEPTHS = flags.DEFINE_list("depths", ["6", "12", "24", "48", "96"], "Transformer blocks, or densenet.")
_WIDTH = flags.DEFINE_integer("width", 64, "Width of the model.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 1000, "Tokens of the vocabulary.")
_SEQUENCE = flags.DEFINE_integer("sequence_length", 32, "Tokens of a sample.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Samples of a step.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Rounds.", lower_bound=1)
_WAYS = flags.DEFINE_list("ways", ["one device", "stage 3", "stage 3 compiled"], "Ways to measure.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the table to this picture.")
_WAY = flags.DEFINE_string("way", None, "Measure depth:way here, and print JSON.")


def measure(depth: str, way: str) -> dict:
    """Measure the first and the second step in this process."""
    import keras
    import numpy as np

    with common.scope(way.removesuffix(" compiled")):
        if depth == "densenet":
            model = keras.applications.DenseNet121(weights=None, input_shape=(32, 32, 3), classes=10)
            x = np.random.RandomState(0).normal(size=(_BATCH_SIZE.value, 32, 32, 3)).astype("float32")
            batch = x, np.arange(_BATCH_SIZE.value) % 10
            loss = keras.losses.SparseCategoricalCrossentropy()
        else:
            model, batch = common.gpt2(
                layers=int(depth), width=_WIDTH.value, heads=4, vocabulary=_VOCABULARY.value,
                sequence=_SEQUENCE.value, samples=_BATCH_SIZE.value,
            )  # fmt: skip
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        ends = [_now()]
        model.compile("adam", loss, jit_compile=way.endswith("compiled"))
        for _ in range(3):
            float(model.train_on_batch(*batch))
            ends.append(_now())
    found = {"parameters": model.count_params(), "origin": common.origin()}
    for name, before, after in zip(("first", "second", "third"), ends, ends[1:], strict=False):
        found |= {name: after[0] - before[0], f"{name} wall": after[1] - before[1]}
    return found


def _now() -> tuple[float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, time.perf_counter()


def main(argv):
    del argv
    if _WAY.value:
        depth, _, way = _WAY.value.partition(":")
        print(json.dumps(measure(depth, way)))
        return
    keys = [(depth, way) for depth in _DEPTHS.value for way in _WAYS.value]
    results: dict = {key: [] for key in keys}
    for _ in range(_ROUNDS.value):
        for (depth, way), runs in results.items():
            runs.append(common.run_child(f"--way={depth}:{way}"))
    print(
        f"{results[keys[0]][0]['origin']}, median of {_ROUNDS.value} rounds; seconds of the processor (and of the wall)"
    )
    print(f"{'blocks':>8} {'way':>20} {'first step':>18} {'second step':>18} {'third step':>18}")
    for (depth, way), runs in results.items():
        cells = [
            f"{_median(runs, name):.1f} ({_median(runs, f'{name} wall'):.1f})" for name in ("first", "second", "third")
        ]
        print(f"{depth:>8} {way:>20} " + " ".join(f"{cell:>18}" for cell in cells), flush=True)
    if _PLOT.value:
        _draw(results)


def _median(runs: list[dict], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _draw(results: dict) -> None:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for way in _WAYS.value:
        points = [
            (int(depth), _median(runs, "first"))
            for (depth, of), runs in results.items()
            if of == way and depth.isdigit()
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=way)
    axes.set(xlabel="blocks", ylabel="seconds of the processor", title="First step", ylim=(0, None))
    axes.legend()
    figure.savefig(_PLOT.value)


if __name__ == "__main__":
    app.run(main)
