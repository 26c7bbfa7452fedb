"""The recommender of examples/recommender.py: time of a step, resident memory and quality of each way to train it.

    python tools/bench/embedding_tables.py --rows=10000000 --steps=300

Ways: plain Keras on one device; tables on four devices, with Keras's meaning and lazy; and stage 3 without `tables=`
(`--ways="one device,keras,lazy,whole"`). Each runs in a process of its own, in turn, `rounds` times over.
"""

import json
import pathlib
import sys
import time

import common
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent / "examples"))

import recommender  # noqa: E402  Its flags are those of the model and of the data.

_ROUNDS = flags.DEFINE_integer("rounds", 1, "Rounds.", lower_bound=1)
_WAYS = flags.DEFINE_list("ways", ["one device", "keras", "lazy", "whole"], "What to compare.")
_WAY = flags.DEFINE_string("way", None, "Measure this one here, and print JSON.")


def measure(way: str) -> dict:
    """Trains in one way in this process."""
    import keras
    import numpy as np

    import tfshard

    flags.FLAGS.mesh = "" if way == "one device" else f"batch:{common.DEVICES}"
    flags.FLAGS.sparse = "keras" if way == "one device" else way
    strategy = recommender.make_strategy()
    keras.utils.set_random_seed(flags.FLAGS.seed)
    random = np.random.default_rng(flags.FLAGS.seed)
    steps, batch_size = flags.FLAGS.steps, flags.FLAGS.batch_size
    users = recommender.make_users(steps * batch_size, random)
    before = common.resident_bytes("VmRSS")
    model = recommender.make_compiled(strategy)
    born = common.resident_bytes()
    times: list[float] = []

    def note(batch, logs):
        times.append(time.perf_counter())

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    inputs = [users.histories, users.items]
    model.fit(inputs, users.labels, batch_size=batch_size, verbose=0, callbacks=[callback])
    area = recommender.area_under_curve(model, recommender.make_users(8192, random))
    sent = 0
    if strategy is not None:
        batch = [each[:batch_size] for each in inputs], users.labels[:batch_size]
        sent = tfshard.profile_step(model, batch).bytes("all-to-all")
    return {
        "sent": sent,
        "step": float(np.median(np.diff(times[2:]))),
        "before": before,
        "birth": born - before,
        "peak": common.resident_bytes() - before,
        "rest": common.resident_bytes("VmRSS") - before,
        "area": area,
        "origin": common.origin(),
    }


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    results = common.rounds(_WAYS.value, _ROUNDS.value)
    first = next(iter(results.values()))[0]
    print(f"{first['origin']}, {_ROUNDS.value} rounds")
    given = flags.FLAGS
    print(
        f"{given.rows:,} rows of {given.width}, {given.history + 1} ids a sample, batch {given.batch_size}, "
        f"{given.steps} steps, {given.optimizer}"
    )
    for way, runs in results.items():
        step = common.spread(1000 * run["step"] for run in runs)
        memory = {name: common.spread(run[name] / 2**20 for run in runs) for name in ("birth", "peak", "rest")}
        area = common.spread((run["area"] for run in runs), ".4f")
        print(f"{way:12} step {step} ms, " + ", ".join(f"{k} {v} MiB" for k, v in memory.items()) + f", area {area}")
        if any(run["sent"] for run in runs):
            print(f"{'':12} all-to-all {common.spread(run['sent'] / 2**20 for run in runs)} MiB that the trace tells")


if __name__ == "__main__":
    app.run(main)
