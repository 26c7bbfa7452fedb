"""Measure the step time of one GPT on one device, under MirroredStrategy, and at stages 0 to 3 on four devices.

    python tools/bench/step_time.py --rounds=5
    python tools/bench/step_time.py --layers=12 --width=128 --vocabulary=1500 --batch_size=8
    python tools/bench/step_time.py --ways="stage 2,stage 3" --against=FOLDER
    python tools/bench/step_time.py --ways="one device,one device compiled,stage 3,stage 3 compiled"

The second command trains a narrow model of 196 variables and 2.6M parameters, for which groups matter most. "Alone"
means without groups, and "compiled" means with `jit_compile=True`. In the way "stage 3 all threads", an operation has
a thread for each core, which is TensorFlow's default, even though the devices share the cores.

Each way runs in a separate process, interleaved with the other ways, `rounds` times. Interleaving spreads a drift of
the machine evenly over the ways. The figure of a round is the median of its steps. Printed are the median, the minimum
and the maximum of the rounds. Each ratio compares two figures of the same round.

With `--against`, each way also runs with the package of another checkout (`git worktree add FOLDER COMMIT`), and the
ratios compare the two packages.
"""

import json
import os

import common
import gpt_flags
from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 8, "Steps of an epoch.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Rounds.", lower_bound=1)
_WAYS = flags.DEFINE_list("ways", None, "Ways to measure. By default all.")
_AGAINST = flags.DEFINE_string("against", None, "The folder of another checkout to compare with.")
_WAY = flags.DEFINE_string("way", None, "Measure this way in this process, and print JSON.")

WAYS = ("one device", "mirrored", "stage 0", "stage 1", "stage 2", "stage 3", "stage 3 alone")


def measure(way: str) -> dict:
    """Measure the seconds to the end of the first step, and of later steps, in this process."""
    import keras

    options = {"analyzer": None} if way.endswith("alone") else {}
    if way.endswith("all threads"):
        os.environ["TF_NUM_INTRAOP_THREADS"] = str(os.cpu_count())
    compiled = way.endswith("compiled")
    with common.scope(way.removesuffix(" compiled"), **options):
        model, data = gpt_flags.gpt2(steps=_STEPS.value)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=compiled)
    times = common.fit_times(model, data, batch_size=gpt_flags.BATCH_SIZE.value)
    return {**times, "parameters": model.count_params(), "origin": common.origin()}


def compare_packages(ways: list[str]) -> None:
    """Print the times of a step and of the first step for each way, and their ratios to the other package."""
    ours, theirs = ({way: [] for way in ways} for _ in range(2))
    for _ in range(_ROUNDS.value):
        for way in ways:
            theirs[way].append(common.run_child(f"--way={way}", package=_AGAINST.value))
            ours[way].append(common.run_child(f"--way={way}"))
    print(f"{ours[ways[0]][0]['origin']}, median (and range) of {_ROUNDS.value} rounds")
    print(f"{'':>14} {'step ms':>20} {'/ other':>21} {'first step s':>21} {'/ other':>21}")
    for way in ways:
        step = common.spread((1e3 * run["step"] for run in ours[way]), ".0f")
        first = common.spread((run["first"] for run in ours[way]), ".1f")
        to_step, to_first = (common.spread(common.ratios(ours[way], theirs[way], key)) for key in ("step", "first"))
        print(f"{way:>14} {step:>20} {to_step:>21} {first:>21} {to_first:>21}")


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    ways = _WAYS.value or list(WAYS)
    if _AGAINST.value:
        compare_packages(ways)
        return
    results = {way: [] for way in ways}
    for _ in range(_ROUNDS.value):
        for way in ways:
            results[way].append(common.run_child(f"--way={way}"))
    first = results[ways[0]][0]
    print(f"{first['origin']}, median (and range) of {_ROUNDS.value} rounds")
    batch = f"{gpt_flags.BATCH_SIZE.value} x {gpt_flags.SEQUENCE.value}"
    print(f"{first['parameters']:,} parameters, batch {batch}, Adam")
    print(f"{'':>14} {'step ms':>20} {'/ one device':>21} {'/ mirrored':>21} {'first step s':>21}")
    for way in ways:
        runs = results[way]
        step = common.spread((1e3 * run["step"] for run in runs), ".0f")
        to_first = common.spread((run["first"] for run in runs), ".1f")
        compared = [
            common.spread(common.ratios(runs, results[base])) if base in results else "-"
            for base in ("one device", "mirrored")
        ]
        print(f"{way:>14} {step:>20} {compared[0]:>21} {compared[1]:>21} {to_first:>21}")


if __name__ == "__main__":
    app.run(main)
