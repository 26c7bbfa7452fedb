"""Time of a step, and bytes between hosts, over links of some rates: two hosts of one client with two devices.

    python tools/bench/between_hosts.py                          # narrow: 196 variables of 2.6M parameters
    python tools/bench/between_hosts.py --rates=1gbit --stages=3 --width=256 --layers=4
    python tools/bench/between_hosts.py --ways=flat,hybrid --stages=3 --width=256 --layers=4
    python tools/bench/between_hosts.py --ways=hybrid --compressions=none,bfloat16,int8,powersgd:4 --stages=3

The hosts are network namespaces of this machine (tools/hosts.py), so it takes root. Each rate is one run of two
clients, which train at one stage after the other. A step ends with its loss on the host; bytes are what the interface
of host 0 sent, by the kernel's counter. *Planned* are those of a ring over four devices of which two are on each host,
for the collectives of the plan: 3/4 of what a gather gives, 3/2 of what a reduction takes (a CPU reduces all before it
scatters). *Hybrid* is a mesh of two replicas, each of them a host: what its devices send each other does not count, and
each of the two sends what it reduces with the other host. A *pipeline* has half of the model on each host, with two
devices of a batch axis; sent are the activations at the cut, and the table that is also the last matrix, whose value
is on both. *Compressions* are those of gradients (`ShardedStrategy`). *Of first* is the time of a step over that with
the first compression, at the same stage, in the same way and run; or, with one compression, over that in the first way.
"""

import itertools
import json
import math
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

_RATES = flags.DEFINE_list("rates", ["10gbit", "1gbit", "100mbit"], "Of the hosts' links.")
_STAGES = flags.DEFINE_list("stages", ["3", "0"], "ZeRO stages.")
_WAYS = flags.DEFINE_list(
    "ways",
    ["flat"],
    "`flat` (four devices share out all), `hybrid` (the two of a host), `pipeline` (a host has a part).",
)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 4, "Of pipelines.", lower_bound=1)
_COMPRESSIONS = flags.DEFINE_list("compressions", ["none"], "`none`, `bfloat16`, `int8`, `powersgd:RANK`.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps, besides the first two.", lower_bound=1)
_MEASURE = flags.DEFINE_boolean("measure", False, "Measure here, in a client of a launched run, and print JSON.")

# Narrow, unless the flags say otherwise.
for _name, _value in {"layers": 12, "width": 128, "vocabulary": 1500, "batch_size": 8}.items():
    flags.FLAGS.set_default(_name, _value)


MESHES = {
    "flat": {"batch": common.DEVICES},
    "hybrid": {"replica": 2, "batch": common.DEVICES // 2},
    "pipeline": {"pipeline": 2, "batch": common.DEVICES // 2},
}


def sent_by_a_host(way: str, kind: str, axis: str, size: int) -> float:
    """Bytes that a host sends to the other for a collective of so many bytes."""
    if way == "hybrid" and axis == "replica":
        return 2 * size if kind == "all-reduce" else size  # Each of two devices: half of it, of a reduction twice.
    if way == "hybrid" and kind in ("all-gather", "all-to-all"):
        return 0.0
    if kind == "all-to-all":
        return size  # Each of two devices: half of it, to the two of the other host.
    share = (common.DEVICES - 1) / common.DEVICES * size
    return share if kind == "all-gather" else 2 * share


def compression_of(name: str):
    """What `ShardedStrategy` takes."""
    import tfshard

    kind, _, rank = name.partition(":")
    return tfshard.PowerSGD(rank=int(rank), warm_up_steps=0) if kind == "powersgd" else None if name == "none" else name


def measure(stage: int, way: str, compression: str) -> dict:
    """Step times in seconds and bytes sent, of each step but the first two, and the plan's bytes."""
    import keras

    import tfshard
    from tfshard.contrib.pipeline.models import pipeline_of
    from tools.host_runs import network

    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**MESHES[way]), zero_stage=stage, compression=compression_of(compression)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    if way == "pipeline":
        model, (x, y) = gpt_flags.gpt2()
        model = tfshard.pipeline(model, 2, microbatches=_MICROBATCHES.value)
        model.compile("adam", loss, strategy=strategy)
    else:
        with strategy.scope():
            model, (x, y) = gpt_flags.gpt2()
            model.compile("adam", loss)

    def sent_so_far() -> int:
        # Once all clients have got what they wait for.
        tfshard.collectives.barrier()
        return network.own_traffic().sent

    for _ in range(2):
        model.train_on_batch(x, y)
    sent, times = sent_so_far(), [time.perf_counter()]
    for _ in range(_STEPS.value):
        float(model.train_on_batch(x, y))
        times.append(time.perf_counter())
    sent = sent_so_far() - sent
    if way == "pipeline":
        # What the first part gives, and the value of what both have.
        rank = pipeline_of(model).ranks[1]
        planned = [tfshard.contrib.pipeline.plan(model, x).parts[0].sent_bytes]
        planned += [4 * math.prod(variable.shape) for variable, _ in rank.mirrors.values()]
    else:
        planned = [
            each.count * sent_by_a_host(way, each.kind, each.axis, each.bytes or 0)
            for each in strategy.plan(model, inputs=x).collectives
        ]
    return {
        "way": way,
        "stage": stage,
        "compression": compression,
        "step": statistics.median(after - before for before, after in itertools.pairwise(times)),
        "sent": sent / _STEPS.value,
        "planned": sum(planned),
        "parameters": model.count_params(),
        "bubble": None if way != "pipeline" else tfshard.contrib.pipeline.measured(model).bubble,
        "origin": common.origin(),
    }


def run(rate: str) -> list[dict]:
    """What client 0 finds in a launched run over links of this rate."""
    script = str(pathlib.Path(sys.argv[0]).resolve())
    done = subprocess.run(
        [sys.executable, "-m", "tools.hosts", f"--rate={rate}", script, *sys.argv[1:], "--measure"], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"The run over {rate} failed:\n{done.stdout[-4000:]}")
    return [json.loads(text) for text in re.findall(r"\[client 0\] FOUND (.*)", done.stdout)]


def main(argv):
    del argv
    if _MEASURE.value:
        import tfshard

        for stage, way, compression in itertools.product(_STAGES.value, _WAYS.value, _COMPRESSIONS.value):
            found = measure(int(stage), way, compression)
            if tfshard.collectives.rank() == 0:
                print(f"FOUND {json.dumps(found)}", flush=True)
        return
    for number, rate in enumerate(_RATES.value):
        results = run(rate)
        if not number:
            first = results[0]
            print(f"{first['origin']}, on two hosts; {_STEPS.value} steps: median of time, mean of bytes")
            batch = f"{gpt_flags.BATCH_SIZE.value} x {gpt_flags.SEQUENCE.value}"
            print(f"{first['parameters']:,} parameters, batch {batch}, Adam")
            print(
                f"{'rate':>8} {'stage':>6} {'way':>8} {'compression':>12} {'step ms':>9} {'of first':>9} "
                f"{'sent MB':>9} {'planned':>9} {'ratio':>7} {'Gbit/s':>7}"
            )
        exact = {}
        for found in results:
            key = (found["stage"], found["way"]) if len(_COMPRESSIONS.value) > 1 else found["stage"]
            first_step = exact.setdefault(key, found["step"])
            megabytes, planned = found["sent"] / 1e6, found["planned"] / 1e6
            print(
                f"{rate:>8} {found['stage']:>6} {found['way']:>8} {found['compression']:>12} "
                f"{1e3 * found['step']:>9.0f} {found['step'] / first_step:>9.2f} {megabytes:>9.2f} {planned:>9.2f} "
                f"{megabytes / planned:>7.3f} {8e-3 * megabytes / found['step']:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
