"""Step time of a launched run: with collectives renamed and not, and with collectives in one order and in none.

    python tools/bench/launched_steps.py
    python tools/bench/launched_steps.py --meshes=flat --rounds=9 --steps=10
    python tools/bench/launched_steps.py --width=256 --layers=4 --vocabulary=8000 --batch_size=16

Two clients with two devices each on this machine. *Not renamed* is a step whose collectives have kept DTensor's names,
of which TensorFlow keeps a record for each step and asks client 0 (`give_unique_names`).
One run trains both copies of the model, in turn, in blocks of `steps` steps. The ratio is of two neighbouring blocks.

*No order* is a run with TensorFlow's `dependency_optimization`, in which tfshard's own collectives are stateless:
DTensor's compiler puts those in no order. TensorFlow reads the first when it starts, so this is a run of its own, in
turn with runs that have the order. The ratio is of the two runs of one round, with collectives renamed in both.

A step ends with its loss on the host; a block's figure is the median of its steps. Printed are the median, the least
and the most of the blocks or rounds. What each way had is counted in the functions that ran, and checked: collectives
with DTensor's names, and stateless ones.
"""

import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from unittest import mock

import common
import gpt_flags
from absl import app, flags

ROOT = pathlib.Path(__file__).parents[2]

_MESHES = flags.DEFINE_list(
    "meshes", ["flat", "hybrid"], "`flat` (four devices share out all), `hybrid` (two replicas)."
)
_STAGE = flags.DEFINE_integer("stage", 3, "ZeRO stage.", 0, 3)
_GROUPS = flags.DEFINE_boolean("groups", False, "Whether small variables are gathered in groups.")
_STEPS = flags.DEFINE_integer("steps", 5, "Steps of a block.", 2)
_BLOCKS = flags.DEFINE_integer("blocks", 5, "Blocks of each copy in a run.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", common.ROUNDS, "Runs with and without the order.", 1)
_MEASURE = flags.DEFINE_enum("measure", None, ["flat", "hybrid"], "Measure here, in a client, and print JSON.")
_ORDERED = flags.DEFINE_boolean("ordered", True, "Of a client: whether its collectives have an order.")

# Narrow, unless the flags say otherwise: many collectives, each of them small.
for _name, _value in {"layers": 6, "width": 128, "vocabulary": 1500, "batch_size": 8}.items():
    flags.FLAGS.set_default(_name, _value)

MESHES = {"flat": {"batch": common.DEVICES}, "hybrid": {"replica": 2, "batch": common.DEVICES // 2}}
RENAMED, NOT_RENAMED = "renamed", "not renamed"


def remove_order() -> None:
    """Leaves out in this process what puts collectives in an order. Before the client is started."""
    from tfshard.devices import replicas, startup

    ordered = replicas._common
    replicas._common = lambda keys, mesh: {**ordered(keys, mesh), "is_stateless": True}
    startup._keep_order = lambda **options: None


def collectives(names: set[str]) -> dict[str, int]:
    """Counts collectives in functions: all, those with DTensor's names, and those that are stateless."""
    from tensorflow.python.eager import context

    found = {"all": 0, "DTensor's names": 0, "stateless": 0}
    for name in names:
        for node in context.context().get_function_def(name).node_def:
            if node.op.startswith("Collective") and "V2" in node.op:
                found["all"] += 1
                found["DTensor's names"] += "DTensor" in node.name
                found["stateless"] += node.attr["is_stateless"].b
    return found


def measure(mesh: str) -> dict:
    """Medians of each block, in seconds, of both copies; and what collectives they had."""
    import keras
    from tensorflow.python.eager import context

    import tfshard
    from tfshard._private import functions

    if not _ORDERED.value:
        remove_order()
    options = {} if _GROUPS.value else {"analyzer": None}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=_STAGE.value, **options)
    steps, found = {}, {"times": {RENAMED: [], NOT_RENAMED: []}, "collectives": {}}
    for way in found["times"]:
        known = set(context.context().list_function_names())
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, (x, y) = gpt_flags.gpt2()
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

        def step(model=model, x=x, y=y) -> float:
            return float(model.train_on_batch(x, y))

        keeps_names = mock.patch.object(functions, "_has_dtensor_collectives", lambda function: False)
        # The first is compiled, the second runs what was renamed.
        with keeps_names if way == NOT_RENAMED else contextlib.nullcontext():
            losses = [step() for _ in range(3)]
        steps[way] = step
        found["collectives"][way] = collectives(set(context.context().list_function_names()) - known)
        found.setdefault("losses", losses)
        assert losses == found["losses"], "both train alike"
    # When functions of the second are named, TensorFlow drops the kernels of the first, too.
    for step in steps.values():
        for _ in range(2):
            step()
    for _ in range(_BLOCKS.value):
        for way, times in found["times"].items():
            block = []
            for _ in range(_STEPS.value):
                begin = time.perf_counter()
                steps[way]()
                block.append(time.perf_counter() - begin)
            times.append(statistics.median(block))
    return {**found, "parameters": model.count_params(), "origin": common.origin()}


def run(mesh: str, *, ordered: bool) -> dict:
    """What client 0 finds in a launched run."""
    script = str(pathlib.Path(sys.argv[0]).resolve())
    done = subprocess.run(
        [
            sys.executable, "-m", "tfshard", "launch", "--num_processes=2",
            f"--devices_per_process={common.DEVICES // 2}", script, *sys.argv[1:], f"--measure={mesh}",
            f"--ordered={str(ordered).lower()}",
        ],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    found = re.search(r"\[client 0\] FOUND (.*)", done.stdout)
    if done.returncode or found is None:
        sys.exit(f"The run on the mesh '{mesh}' failed:\n{done.stdout[-4000:]}")
    result = json.loads(found[1])
    check(mesh, result["collectives"], ordered=ordered)
    return result


def check(mesh: str, counted: dict[str, dict[str, int]], *, ordered: bool) -> None:
    """Checks that the ways differ in what they are to differ in, and in nothing else."""
    renamed, kept = counted[RENAMED], counted[NOT_RENAMED]
    assert renamed["all"] == kept["all"] > 0, counted
    assert kept["DTensor's names"] > 0 == renamed["DTensor's names"], counted
    # On a flat mesh all collectives are DTensor's, which are never stateless.
    assert (renamed["stateless"] > 0) == (mesh == "hybrid" and not ordered), counted


def main(argv):
    del argv
    if _MEASURE.value:
        import tfshard

        found = measure(_MEASURE.value)
        if tfshard.collectives.rank() == 0:
            print(f"FOUND {json.dumps(found)}", flush=True)
        return
    for number, mesh in enumerate(_MESHES.value):
        runs = {True: [], False: []}
        for _ in range(_ROUNDS.value):
            for ordered, results in runs.items():
                results.append(run(mesh, ordered=ordered))
        first = runs[True][0]
        if not number:
            batch = f"{gpt_flags.BATCH_SIZE.value} x {gpt_flags.SEQUENCE.value}"
            print(f"{first['origin']}, in two clients")
            print(f"{first['parameters']:,} parameters, batch {batch}, Adam, stage {_STAGE.value}")
            print(f"{_ROUNDS.value} rounds of {_BLOCKS.value} blocks of {_STEPS.value} steps each")
            print(f"{'mesh':>8} {'collectives':>12} {'':>12} {'step ms':>20} {'':>10} {'step ms':>20} {'ratio':>20}")
        blocks = {
            way: [seconds for each in runs[True] for seconds in each["times"][way]] for way in (RENAMED, NOT_RENAMED)
        }
        rounds = {
            ordered: [statistics.median(each["times"][RENAMED]) for each in results]
            for ordered, results in runs.items()
        }
        count = first["collectives"][RENAMED]["all"]
        for (ours, mine), (theirs, other) in (
            ((RENAMED, blocks[RENAMED]), (NOT_RENAMED, blocks[NOT_RENAMED])),
            (("in order", rounds[True]), ("no order", rounds[False])),
        ):
            ratio = common.spread(a / b for a, b in zip(mine, other, strict=True))
            print(
                f"{mesh:>8} {count:>12} {theirs:>12} {common.spread((1e3 * each for each in other), '.0f'):>20} "
                f"{ours:>10} {common.spread((1e3 * each for each in mine), '.0f'):>20} {ratio:>20}",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
