"""Measure what saving costs a training step: one GPT with no saves, asynchronous saves and synchronous saves.

    python tools/bench/async_save.py
    python tools/bench/async_save.py --every_steps=50 --layers=8 --width=512

A block is `every_steps` steps, with one save before its first step. A block lasts until the background part of its save
has ended. Blocks of the three kinds alternate in one process, which spreads a drift of the machine evenly over them.
The step time of a block is the block's time divided by its number of steps. All steps train on one batch, which is made
before. Each figure is the median over the rounds, with the minimum and the maximum. Each ratio compares a block with
the block without a save in the same round.
"""

import pathlib
import tempfile
import time

import common
import gpt_flags
from absl import app, flags

_EVERY_STEPS = flags.DEFINE_integer("every_steps", 20, "Steps of a block, which saves once.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds.", lower_bound=1)
_STAGE = flags.DEFINE_integer("zero_stage", 3, "ZeRO stage.")
_DIRECTORY = flags.DEFINE_string("directory", None, "Directory for the checkpoints. By default a temporary directory.")

WAYS = ("none", "async", "sync")


def main(argv):
    del argv
    import keras

    import tfshard

    with common.scope(f"stage {_STAGE.value}"):
        model, (x, y) = gpt_flags.gpt2()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    times = {way: [] for way in WAYS}
    blocked = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as directory:
        manager = tfshard.CheckpointManager(directory, keep=1)
        # The first step traces the training step, and in the second TensorFlow instantiates the step's functions again.
        # The first save compiles the read of each layout.
        for _ in range(2):
            model.train_on_batch(x, y)
        path = manager.save(model, 0)
        size = sum(file.stat().st_size for file in pathlib.Path(path).iterdir())
        step = 0
        for _ in range(_ROUNDS.value):
            for way in WAYS:
                begin = time.perf_counter()
                if way != "none":
                    manager.save(model, step, wait=way == "sync")
                blocked[way].append(time.perf_counter() - begin)
                for _ in range(_EVERY_STEPS.value):
                    model.train_on_batch(x, y)
                    step += 1
                manager.wait()
                times[way].append((time.perf_counter() - begin) / _EVERY_STEPS.value)
    print(f"{common.origin()}, median (and range) of {_ROUNDS.value} rounds")
    print(
        f"{model.count_params():,} parameters, checkpoint of {size / 1e6:.0f} MB, stage {_STAGE.value}, "
        f"one save every {_EVERY_STEPS.value} steps of {gpt_flags.BATCH_SIZE.value} x {gpt_flags.SEQUENCE.value}"
    )
    print(f"{'':>6} {'step ms':>24} {'/ none':>24} {'save holds up ms':>24}")
    for way in WAYS:
        step = common.spread((1e3 * each for each in times[way]), ".1f")
        ratio = common.spread((a / b for a, b in zip(times[way], times["none"], strict=True)), ".3f")
        held = common.spread((1e3 * each for each in blocked[way]), ".1f")
        print(f"{way:>6} {step:>24} {ratio:>24} {held:>24}")


if __name__ == "__main__":
    app.run(main)
