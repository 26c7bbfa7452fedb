"""How much of a step's collectives is hidden behind computing, by trace and as the plan predicts it.

    python tools/bench/overlap.py                                 # in one process
    python tools/bench/overlap.py --rates=1gbit,100mbit           # two hosts of two devices, as root
    python tools/bench/overlap.py --ways="stage=3;stage=3,prefetch=2" --layers=2 --width=64

A way is options with commas between: `stage`, `mesh` (`flat` or `hybrid`), `threshold` and `maximum` of groups in KiB,
`prefetch`, and `merged`: how many all-reduces DTensor merges in one (its switch
DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE; 0: all). Links are measured in the same run. Steps of all ways are
done in turn: ratios to the first way are those of steps that followed each other, median and quartiles. *Hidden* is
the median of some profiles, of the devices of client 0.
"""

import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import common
import gpt_flags
from absl import app, flags

ROOT = pathlib.Path(__file__).parents[2]
MESHES = {"flat": {"batch": common.DEVICES}, "hybrid": {"replica": 2, "batch": common.DEVICES // 2}}
DEFAULTS = {"stage": "3", "mesh": "flat", "threshold": "1024", "maximum": "25600", "prefetch": "1", "merged": "0"}

_RATES = flags.DEFINE_list("rates", ["here"], "Of the hosts' links; `here`: one process.")
_WAYS = flags.DEFINE_string(
    "ways", "stage=3;stage=3,maximum=2048;stage=3,threshold=64;stage=3,threshold=64,prefetch=2;stage=0;"
    "stage=0,merged=40", "Ways to train.",
)  # fmt: skip
_STEPS = flags.DEFINE_integer("steps", 12, "Steps of each way, besides the first two.", lower_bound=2)
_PROFILES = flags.DEFINE_integer("profiles", 3, "Profiles of each way.", lower_bound=1)
_SAVE = flags.DEFINE_string("save", None, "A folder for the timeline of each way.")
_MEASURE = flags.DEFINE_boolean("measure", False, "Measure here and print JSON.")

# Narrow, unless the flags say otherwise.
for _name, _value in {"layers": 12, "width": 128, "vocabulary": 1500, "batch_size": 8}.items():
    flags.FLAGS.set_default(_name, _value)


def trained(way: str):
    """A strategy and a model that was compiled, and its batch, after two steps."""
    import keras

    import tfshard
    from tfshard.devices import merges

    options = {**DEFAULTS, **dict(part.split("=") for part in way.split(","))}
    # What a user's environment would have set from the start.
    merges._is_ours = options["merged"] == "0"
    os.environ.pop(merges.SWITCH, None)
    if not merges._is_ours:
        os.environ[merges.SWITCH] = options["merged"]
    groups = tfshard.ParameterAnalyzer(
        group_threshold_bytes=int(options["threshold"]) << 10, max_group_bytes=int(options["maximum"]) << 10
    )
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**MESHES[options["mesh"]]), zero_stage=int(options["stage"]), analyzer=groups,
        prefetch=int(options["prefetch"]),
    )  # fmt: skip
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model, batch = gpt_flags.gpt2()
    model = tfshard.as_distributed(model)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), strategy=strategy)
    for _ in range(2):
        model.train_on_batch(*batch)
    return strategy, model, batch


def timed(model, batch) -> float:
    begin = time.perf_counter()
    float(model.train_on_batch(*batch))
    return time.perf_counter() - begin


def measure() -> None:
    """Prints what each way takes."""
    import tfshard

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    links = tfshard.profile_network([1 << 10, 1 << 20], repeats=2).links
    ways = {way: trained(way) for way in _WAYS.value.split(";")}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _, (way, (_, model, batch)) in itertools.product(range(_STEPS.value), ways.items()):
        times[way].append(timed(model, batch))
    first = next(iter(times.values()))
    for way, (strategy, model, batch) in ways.items():
        profiles = [tfshard.profile_step(model, batch) for _ in range(_PROFILES.value)]
        profile = sorted(profiles, key=lambda each: each.hidden)[len(profiles) // 2]
        timeline = profile.timeline
        plan = strategy.plan(model, inputs=batch[0], links=links, compute_seconds=timeline.computing_seconds)
        found = {
            "way": way,
            "step": statistics.median(times[way]),
            "ratio": statistics.quantiles((a / b for a, b in zip(times[way], first, strict=True)), n=4),
            "count": profile.count(),
            **timeline.to_dict(),
            "planned_hidden": plan.overlap.hidden,
            "planned_collective_seconds": plan.overlap.collective_seconds,
            "origin": common.origin(),
        }
        if tfshard.collectives.rank() == 0:
            print(f"FOUND {json.dumps(found)}", flush=True)
            if _SAVE.value:
                timeline.save(pathlib.Path(_SAVE.value) / f"{way}.json")


def run(rate: str) -> list[dict]:
    """What client 0 finds over links of this rate, or a process by itself."""
    script = [str(pathlib.Path(sys.argv[0]).resolve()), *sys.argv[1:], "--measure"]
    hosts = [] if rate == "here" else ["-m", "tools.hosts", f"--rate={rate}", "--launch_flags=--step_timeout=300"]
    done = subprocess.run(
        [sys.executable, *hosts, *script], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        print(f"The run over {rate} failed:\n{done.stdout[-4000:]}", file=sys.stderr)
    return [json.loads(text) for text in re.findall(r"FOUND (.*)", done.stdout)]


def main(argv):
    del argv
    if _MEASURE.value:
        measure()
        return
    for rate in _RATES.value:
        results = run(rate)
        if results:
            print(f"{results[0]['origin']}; {rate}")
        for each in results:
            low, ratio, high = each["ratio"]
            print(
                f"{each['way']:>36} step {1e3 * each['step']:6.0f} ms, {ratio:.2f} ({low:.2f} to {high:.2f}) of the "
                f"first; {each['count']} collectives, {1e3 * each['collective_seconds']:.0f} ms (planned "
                f"{1e3 * each['planned_collective_seconds']:.0f}), hidden {each['hidden']:.2f} (planned "
                f"{each['planned_hidden']:.2f}); waits {1e3 * each['waiting_seconds']:.0f} ms, computes "
                f"{1e3 * each['computing_seconds']:.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
