"""Measure the memory that recomputation saves and the time it costs, for a GPT-2 at stage 3 on four devices.

    python tools/bench/recompute.py --layers=12

The ways are: no recomputation, recomputation, and recomputation that keeps the outputs of matrix products. *Adds* is
the peak memory that a step adds, by the allocator's trace, summed over all devices. *Activations* is *adds* minus the
peak that a step adds with one sample of two tokens per device. *Saved* is the share of the activations that
recomputation saves. Steps of all ways are interleaved in one process. Each ratio compares two steps of the same round.
Losses are compared bit by bit.
"""

import statistics
import time

import common
import gpt_flags
from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 12, "Timed steps.")

WAYS = {"all kept": None, "recomputed": False, "products kept": True}


def build(keep_products: bool | None):
    """Return a compiled model and its batch."""
    import keras

    import tfshard

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with common.scope("stage 3"):
        model, batch = gpt_flags.gpt2()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    strategy: tfshard.ShardedStrategy = model.distribute_strategy
    if keep_products is not None:
        strategy.recompute(model, keep_products=keep_products)
    return model, batch


def main(argv):
    del argv
    import tfshard

    losses, added, small, steps = {}, {}, {}, {}
    for way, keep_products in WAYS.items():
        model, (x, y) = build(keep_products)
        losses[way] = [float(model.train_on_batch(x, y)) for _ in range(4)]
        added[way] = tfshard.profile_step(model, (x, y)).peak.added
        few = {key: value[: common.DEVICES, :2] for key, value in x.items()}
        small[way] = tfshard.profile_step(model, (few, y[: common.DEVICES, :2])).peak.added
        steps[way] = (model, x, y)
    times: dict = {way: [] for way in WAYS}
    for _ in range(_STEPS.value):
        for way, (model, x, y) in steps.items():
            begin = time.perf_counter()
            model.train_on_batch(x, y)
            times[way].append(time.perf_counter() - begin)
    print(f"{common.origin()}, {model.count_params():,} parameters")
    print(f"{'':>14} {'adds, MiB':>10} {'activations':>12} {'saved':>6} {'step / all kept':>22} {'same losses':>12}")
    before = added["all kept"] - small["all kept"]
    for way in WAYS:
        activations = added[way] - small[way]
        ratio = common.spread([a / b for a, b in zip(times[way], times["all kept"], strict=True)])
        print(
            f"{way:>14} {added[way] / 2**20:>10.0f} {activations / 2**20:>12.0f} {1 - activations / before:>6.0%} "
            f"{ratio:>22} {losses[way] == losses['all kept']!s:>12}"
        )
    print(f"median step {1e3 * statistics.median(times['all kept']):.0f} ms")


if __name__ == "__main__":
    app.run(main)
