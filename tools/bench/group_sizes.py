"""Measure step times by the size of groups, over links of several rates and delays: two hosts with one device each.

    python tools/bench/group_sizes.py --rates=1gbit --layers=96
    python tools/bench/group_sizes.py --rates=100mbit,100mbit+5ms --layers=40 --steps=2
    python tools/bench/group_sizes.py --rates=10gbit --layers=192 --sizes=0.5,1,4,8,16,32,64

A step gathers each group once, unless `--reshard` is given: with it, a step with few groups gathers less, because
groups of up to the bytes of the largest stay gathered.

The hosts are network namespaces of this machine (tools/hosts.py), which take root. Each host runs one client of one
device. The model is a chain of Dense layers without biases; all kernels are grouped, and `max_group_bytes` is one of
the sizes, in MiB. One launched run of a rate measures its links, compiles a model for each size, and trains all models
in turn for some rounds. A step ends with its loss on the host.

*Of best* divides a step time by the shortest. *Product* is latency * bandwidth of the all-gather that the run measured.
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
from absl import app, flags

ROOT = pathlib.Path(__file__).parents[2]
KIBI, MEBI = 1 << 10, 1 << 20

_RATES = flags.DEFINE_list("rates", ["1gbit"], "Rates of the hosts' links, with a delay: 100mbit+5ms.")
_SIZES = flags.DEFINE_list("sizes", ["0.25", "0.5", "1", "2", "4", "8", "16", "32"], "max_group_bytes in MiB.")
_STAGE = flags.DEFINE_integer("stage", 3, "ZeRO stage.")
_RESHARD = flags.DEFINE_boolean("reshard", False, "Gather again for the backward pass, except small groups.")
_LAYERS = flags.DEFINE_integer("layers", 96, "Dense layers.")
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the layers. A kernel has 4 * width**2 bytes.")
_BATCH = flags.DEFINE_integer("batch_size", 256, "Samples of a step.")
_STEPS = flags.DEFINE_integer("steps", 4, "Steps of a model in a round, after one that is not timed.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds over all sizes.")
_MEASURE = flags.DEFINE_boolean("measure", False, "Measure here, in a client of a launched run, and print JSON.")


def measure() -> dict:
    """Train in this client. Returns the step times of each size in seconds, by round, and the links."""
    import keras
    import numpy as np

    import tfshard

    mesh = tfshard.create_mesh(batch=2)
    links = tfshard.profile_network(sizes=(1 * KIBI, 64 * KIBI, 1 * MEBI, 4 * MEBI), repeats=3).links
    x = np.random.default_rng(0).normal(size=(_BATCH.value, _WIDTH.value)).astype("float32")
    models, found = {}, {}
    for size in _SIZES.value:
        keras.utils.set_random_seed(0)
        analyzer = tfshard.ParameterAnalyzer(
            group_threshold_bytes=1 << 40, max_group_bytes=max(int(float(size) * MEBI), 1)
        )
        strategy = tfshard.ShardedStrategy(
            mesh, zero_stage=_STAGE.value, analyzer=analyzer, reshard_after_forward=_RESHARD.value
        )
        model = keras.Sequential([keras.Input([_WIDTH.value])])
        for _ in range(_LAYERS.value):
            model.add(keras.layers.Dense(_WIDTH.value, "relu", use_bias=False))
        model.compile("adam", "mse", strategy=strategy)
        model.train_on_batch(x, x)
        plan = strategy.plan(model, inputs=x)
        found[size] = {
            "buffers": len(plan.groups) or _LAYERS.value,
            "sent": sum(each.count * (each.bytes or 0) for each in plan.collectives),
            "gathered": plan.peak.gathered_bytes,
            "rounds": [],
        }
        models[size] = model
    for _ in range(_ROUNDS.value):
        for size, model in models.items():
            float(model.train_on_batch(x, x))
            tfshard.collectives.barrier()
            times = [time.perf_counter()]
            for _ in range(_STEPS.value):
                float(model.train_on_batch(x, x))
                times.append(time.perf_counter())
            found[size]["rounds"].append([after - before for before, after in itertools.pairwise(times)])
    return {
        "sizes": found,
        "parameters": next(iter(models.values())).count_params(),
        "links": links.to_dict()["between"],
        "origin": common.origin().rpartition(",")[0],
    }


def run(rate: str) -> dict:
    """Launch a run over links of this rate and delay, and return the result of client 0."""
    script = str(pathlib.Path(sys.argv[0]).resolve())
    rate, _, delay = rate.partition("+")
    link = [f"--rate={rate}", f"--delay_ms={delay.removesuffix('ms') or 0}", "--devices_per_process=1"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.hosts", *link, script, *sys.argv[1:], "--measure"], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"The run over {rate} failed:\n{done.stdout[-4000:]}")
    (text,) = re.findall(r"\[client 0\] FOUND (.*)", done.stdout)
    return json.loads(text)


def main(argv):
    del argv
    if _MEASURE.value:
        import tfshard

        found = measure()
        if tfshard.collectives.rank() == 0:
            print(f"FOUND {json.dumps(found)}", flush=True)
        return
    for rate in _RATES.value:
        result = run(rate)
        link = result["links"]["all-gather"]
        print(f"{rate}: {result['origin']}, two hosts of one device, stage {_STAGE.value}, batch {_BATCH.value}")
        print(
            f"{result['parameters']:,} parameters in {_LAYERS.value} kernels of {4 * _WIDTH.value**2 / MEBI:g} MiB; "
            f"all-gather: {1e6 * link['latency']:.0f} us, {link['bandwidth'] / 1e6:.1f} MB/s, "
            f"product {link['latency'] * link['bandwidth'] / MEBI:.3f} MiB"
        )
        medians = {
            size: [statistics.median(times) for times in found["rounds"]] for size, found in result["sizes"].items()
        }
        best = min(statistics.median(rounds) for rounds in medians.values())
        print(f"{'MiB':>6} {'buffers':>8} {'gathered MiB':>13} {'step ms':>9} {'of best':>8}  rounds, ms")
        for size, found in result["sizes"].items():
            step = statistics.median(medians[size])
            rounds = " ".join(f"{1e3 * each:.0f}" for each in medians[size])
            print(
                f"{size:>6} {found['buffers']:>8} {found['gathered'] / MEBI:>13.1f} {1e3 * step:>9.0f} "
                f"{step / best:>8.3f}  {rounds}",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
