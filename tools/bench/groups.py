"""Threshold and size of groups: collectives, step time and memory of a narrow GPT-2, stage 3 on four devices.

    python tools/bench/groups.py --plot=docs/groups.png

Each setting runs in a process of its own, in turn, `rounds` times over, so that a machine whose speed drifts slows all
of them. Figures are medians of the rounds, with the least and the most; ratios to `analyzer=None` are of one round.
"""

import json
import statistics

import common
from absl import app, flags

_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 12, "Transformer blocks.")
_PLOT = flags.DEFINE_string("plot", None, "Where to save a picture of the table (needs matplotlib).")
_WAY = flags.DEFINE_string("way", None, "Measure this one here (threshold:maximum in KiB), and print JSON.")

# Threshold and maximum, in KiB; 0 is no groups.
SETTINGS = ((0, 0), (16, 25600), (128, 25600), (1024, 512), (1024, 2048), (1024, 25600))
BATCH = 8
STEPS = 8


def measure(threshold: int, maximum: int) -> dict:
    import keras

    import tfshard

    analyzer = tfshard.ParameterAnalyzer(threshold << 10, maximum << 10) if threshold else None
    with common.scope("stage 3", analyzer=analyzer):
        model, data = common.gpt2(
            layers=_LAYERS.value, width=128, heads=4, vocabulary=1500, sequence=128, samples=BATCH * STEPS
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    times = common.fit_times(model, data, batch_size=BATCH)
    memory = common.resident_bytes()
    x, y = data
    profile = tfshard.profile_step(model, ({name: value[:BATCH] for name, value in x.items()}, y[:BATCH]))
    return {**times, "memory": memory, "collectives": profile.count(), "origin": common.origin()}


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(*(int(part) for part in _WAY.value.split(":")))))
        return
    results: dict = {setting: [] for setting in SETTINGS}
    for _ in range(_ROUNDS.value):
        for threshold, maximum in SETTINGS:
            results[threshold, maximum].append(common.run_child(f"--way={threshold}:{maximum}"))
    alone = results[SETTINGS[0]]
    print(f"{alone[0]['origin']}, median (and range) of {_ROUNDS.value} rounds")
    print(f"GPT-2, {_LAYERS.value} layers of width 128, batch {BATCH} x 128")
    print(
        f"{'threshold':>10} {'maximum':>11} {'collectives':>11} "
        f"{'step ms':>20} {'/ alone':>21} {'first s':>21} {'GB':>21}"
    )
    rows = []
    for setting in SETTINGS:
        runs = results[setting]
        row = {key: statistics.median(run[key] for run in runs) for key in ("step", "first", "memory", "collectives")}
        ratios = common.ratios(runs, alone)
        row["ratio"] = statistics.median(ratios)
        rows.append(row)
        names = [f"{kib} KiB" if kib else "none" for kib in setting]
        print(
            f"{names[0]:>10} {names[1]:>11} {row['collectives']:>11.0f} "
            f"{common.spread((1e3 * run['step'] for run in runs), '.0f'):>20} {common.spread(ratios):>21} "
            f"{common.spread((run['first'] for run in runs), '.1f'):>21} "
            f"{common.spread(run['memory'] / 1e9 for run in runs):>21}"
        )
    if _PLOT.value:
        plot(rows, _PLOT.value)


def plot(rows: list, path: str) -> None:
    """Three bars for each setting: collectives, step time, time to the first step."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(9, 3), layout="constrained")
    labels = ["none" if not threshold else f"{threshold} KiB\n{maximum} KiB" for threshold, maximum in SETTINGS]
    quantities = (
        ("collectives", 1, "collectives a step"),
        ("ratio", 1, "step time / none"),
        ("first", 1, "first step, s"),
    )
    for axes, (key, scale, title) in zip(figure.subplots(1, 3), quantities, strict=True):
        axes.bar(labels, [row[key] * scale for row in rows])
        axes.set(title=title)
        axes.tick_params(axis="x", labelsize=6)
    figure.supxlabel("threshold, maximum of a group", fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(main)
