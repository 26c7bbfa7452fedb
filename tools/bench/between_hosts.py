"""Measure step times and the bytes between hosts, over links of several rates: two hosts with two devices each.

    python tools/bench/between_hosts.py                          # narrow: 196 variables of 2.6M parameters
    python tools/bench/between_hosts.py --rates=1gbit --stages=3 --width=256 --layers=4
    python tools/bench/between_hosts.py --ways=flat,hybrid --stages=3 --width=256 --layers=4
    python tools/bench/between_hosts.py --ways=hybrid --compressions=none,bfloat16,int8,powersgd:4 --stages=3
    python tools/bench/between_hosts.py --gathers=none,int8,float8_e4m3fn --stages=3 --width=256 --layers=4

The hosts are network namespaces of this machine (tools/hosts.py), which take root. Each host runs one client. Each rate
is one launched run, which trains with one ZeRO stage after the other. A step ends with its loss on the host. The kernel
counts the bytes that the interface of host 0 sends.

The ways are:

- *flat*: a batch axis of four devices. *Planned* bytes assume a ring over the devices, of which each host has two. An
  all-gather sends 3/4 of its result. A reduction sends 3/2 of its input, because a CPU all-reduces before it scatters.
- *hybrid*: a mesh of two replicas, one for each host. *Planned* leaves out the traffic between the devices of a host.
  Each device reduces its gradients with a device of the other host.
- *pipeline*: half of the model on each host, with two devices on a batch axis. The hosts exchange the activations at
  the cut. They also exchange the value of the embedding table, which both stages use.

*Compressions* are the gradient compressions of `ShardedStrategy`, *gathers* its `gather_dtype`. *Of first* divides a
step time by the step time of the first compression and gather dtype, with the same stage and way in the same run. With
a single one of both, it divides by the step time of the first way.
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

_RATES = flags.DEFINE_list("rates", ["10gbit", "1gbit", "100mbit"], "Rates of the hosts' links.")
_STAGES = flags.DEFINE_list("stages", ["3", "0"], "ZeRO stages.")
_WAYS = flags.DEFINE_list(
    "ways",
    ["flat"],
    "`flat` (four devices share out all), `hybrid` (the two of a host), `pipeline` (a host has a part).",
)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 4, "Number of microbatches of pipelines.", lower_bound=1)
_COMPRESSIONS = flags.DEFINE_list("compressions", ["none"], "`none`, `bfloat16`, `int8`, `powersgd:RANK`.")
_GATHERS = flags.DEFINE_list("gathers", ["none"], "`none`, `int8`, `float8_e4m3fn`.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps after the first two.", lower_bound=1)
_MEASURE = flags.DEFINE_boolean("measure", False, "Measure here, in a client of a launched run, and print JSON.")

# The narrow model is the default.
for _name, _value in {"layers": 12, "width": 128, "vocabulary": 1500, "batch_size": 8}.items():
    flags.FLAGS.set_default(_name, _value)


MESHES = {
    "flat": {"batch": common.DEVICES},
    "hybrid": {"replica": 2, "batch": common.DEVICES // 2},
    "pipeline": {"pipeline": 2, "batch": common.DEVICES // 2},
}


def sent_by_a_host(way: str, kind: str, axis: str, size: int) -> float:
    """Return the bytes that a host sends to the other host for a collective of `size` bytes."""
    if way == "hybrid" and axis == "replica":
        return 2 * size if kind == "all-reduce" else size  # Each of two devices sends half, for a reduction twice.
    if way == "hybrid" and kind in ("all-gather", "all-to-all"):
        return 0.0
    if kind == "all-to-all":
        return size  # Each of two devices sends half to the two devices of the other host.
    share = (common.DEVICES - 1) / common.DEVICES * size
    return share if kind == "all-gather" else 2 * share


def compression_of(name: str):
    """Return the `compression` argument of `ShardedStrategy`."""
    import tfshard

    kind, _, rank = name.partition(":")
    return tfshard.PowerSGD(rank=int(rank), warm_up_steps=0) if kind == "powersgd" else None if name == "none" else name


def measure(stage: int, way: str, compression: str, gather_dtype: str) -> dict:
    """Train in this client. Returns the median step time in seconds, and the sent and planned bytes of a step.

    The first two steps do not count.
    """
    import keras

    import tfshard
    from tfshard.contrib.pipeline.models import pipeline_of
    from tools.host_runs import network

    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**MESHES[way]),
        zero_stage=stage,
        compression=compression_of(compression),
        gather_dtype=None if gather_dtype == "none" else gather_dtype,
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
        # After the barrier, all earlier data has arrived on all clients.
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
        # The activations that stage 0 sends, and the variables that both stages mirror.
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
        "gathers": gather_dtype,
        "step": statistics.median(after - before for before, after in itertools.pairwise(times)),
        "sent": sent / _STEPS.value,
        "planned": sum(planned),
        "parameters": model.count_params(),
        "bubble": None if way != "pipeline" else tfshard.contrib.pipeline.measured(model).bubble,
        "origin": common.origin(),
    }


def run(rate: str) -> list[dict]:
    """Launch a run over links of this rate, and return the results of client 0."""
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

        for stage, way, *sent in itertools.product(_STAGES.value, _WAYS.value, _COMPRESSIONS.value, _GATHERS.value):
            found = measure(int(stage), way, *sent)
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
                f"{'rate':>8} {'stage':>6} {'way':>8} {'compression':>12} {'gathers':>14} "
                f"{'step ms':>9} {'of first':>9} "
                f"{'sent MB':>9} {'planned':>9} {'ratio':>7} {'Gbit/s':>7}"
            )
        exact = {}
        for found in results:
            several = len(_COMPRESSIONS.value) * len(_GATHERS.value) > 1
            key = (found["stage"], found["way"]) if several else found["stage"]
            first_step = exact.setdefault(key, found["step"])
            megabytes, planned = found["sent"] / 1e6, found["planned"] / 1e6
            print(
                f"{rate:>8} {found['stage']:>6} {found['way']:>8} {found['compression']:>12} {found['gathers']:>14} "
                f"{1e3 * found['step']:>9.0f} {found['step'] / first_step:>9.2f} {megabytes:>9.2f} {planned:>9.2f} "
                f"{megabytes / planned:>7.3f} {8e-3 * megabytes / found['step']:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
