"""What it costs that failures of a step are raised at that step: DTensor synchronous, and small copies written last.

    python tools/bench/failure_cost.py --rounds=15
    python tools/bench/failure_cost.py --layers=12 --width=128 --vocabulary=1500 --batch_size=8

Two copies of one GPT in one process, one on a DTensor device that runs behind Python as it does by default and does not
notice failures, trained in turn, an epoch each, of which the steps are timed one by one, but for the first, which
waits for the iterator. A round's figure is the median of its steps; the result is the median of the rounds' ratios.
"""

import statistics

import common
import gpt_flags
from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 8, "Steps of an epoch.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds.", lower_bound=2)
_ZERO_STAGE = flags.DEFINE_integer("zero_stage", 3, "ZeRO stage.")


def main(argv):
    del argv
    import keras
    from tensorflow.dtensor.python import api

    import tfshard
    from tfshard import _private
    from tfshard.storage import barrier, passes, small_copies

    tfshard.initialize(num_devices=common.DEVICES, device_type="CPU")
    all_passes, tokens = passes.PASSES, dict(barrier._tokens)
    ways = {}
    for name, watched in (("unwatched", False), ("watched", True)):
        if watched:
            _private.make_dtensor_synchronous()
            passes.PASSES = all_passes
        else:
            api.reset_dtensor_device(is_async=True)
            passes.PASSES = tuple(each for each in all_passes if each is not small_copies.hold_small_copies)
        barrier._tokens.clear()
        barrier._tokens.update(tokens)
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=common.DEVICES), zero_stage=_ZERO_STAGE.value)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, data = gpt_flags.gpt2(steps=_STEPS.value)
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        ways[name] = (model, api._dtensor_singleton)
        model.fit(*data, batch_size=gpt_flags.BATCH_SIZE.value, epochs=1, verbose=0)

    def epoch(name: str) -> float:
        model, api._dtensor_singleton = ways[name]
        # Not waited for: Python may prepare the next step while the devices work.
        times = common.fit_times(model, data, batch_size=gpt_flags.BATCH_SIZE.value, epochs=1, waits=False)
        _private.wait_for_devices()
        return times["step"]

    times = {name: [] for name in ways}
    for number in range(_ROUNDS.value):
        for name in sorted(ways, reverse=number % 2 == 1):  # Neither is always the first.
            times[name].append(epoch(name))
    ratios = [a / b for a, b in zip(times["watched"], times["unwatched"], strict=True)]
    print(f"{common.origin()}, median of {_ROUNDS.value} rounds of {_STEPS.value} steps, stage {_ZERO_STAGE.value}")
    for name, found in times.items():
        print(f"{name:>10} {common.spread((1e3 * each for each in found), '.1f')} ms a step")
    quartiles = statistics.quantiles(ratios, n=4)
    print(f"watched / unwatched {statistics.median(ratios):.3f} (quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f})")


if __name__ == "__main__":
    app.run(main)
