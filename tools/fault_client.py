"""Trains a small model in a launched run, with a fault where `tools/faults.py` asks for one.

    tfshard launch --num_processes=2 tools/fault_client.py --steps=20
    tfshard launch --num_processes=2 tools/fault_client.py --fault=raise --client=1 --at_step=5

It prints its process id and each step. With --state it saves checkpoints, and goes on from the last one when it is
restarted. Every step has a batch of its own, the same in every run.
"""

import os
import sys
import time
from typing import Any

from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 1000000, "Training steps.")
_FAULT = flags.DEFINE_list("fault", [], "What happens (main, _at_step), in the first start and in each restart.")
_CLIENT = flags.DEFINE_integer("client", 1, "In which client, by its place on its host.")
_AT_STEP = flags.DEFINE_list("at_step", ["5"], "After which step, for faults in training; a step for each start.")
_STATE = flags.DEFINE_string("state", "", "A directory for checkpoints, to go on from after a restart.")
_EVERY_STEPS = flags.DEFINE_integer("every_steps", 1, "Steps from one checkpoint to the next.")
_ASYNC = flags.DEFINE_bool("async_save", False, "Write checkpoints in a thread.")
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.0, "Sleep after each step.")
_MODEL_AXIS = flags.DEFINE_integer("model_axis", 1, "Size of the model axis, across clients.")


def _fault() -> tuple[str, int]:
    """What happens in this process, and after which step."""
    restart = int(os.environ["TFSHARD_RESTART"])
    if int(os.environ["TFSHARD_LOCAL_INDEX"]) != _CLIENT.value or restart >= len(_FAULT.value):
        return "", 0
    return _FAULT.value[restart], int(_AT_STEP.value[min(restart, len(_AT_STEP.value) - 1)])


def main(argv: list[str]) -> None:
    del argv
    fault, at_step = _fault()
    print(f"pid {os.getpid()}", flush=True)
    if fault == "never":
        time.sleep(10000)
    if fault == "gone":
        sys.exit(7)
    if fault == "duplicate":
        os.environ["TFSHARD_CLIENT_ID"] = str((_CLIENT.value + 1) % int(os.environ["TFSHARD_NUM_CLIENTS"]))
    import tfshard

    started = tfshard.initialize()
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1 if fault == "seed" else 0)
    axes = {"model": _MODEL_AXIS.value, "batch": -1} if _MODEL_AXIS.value > 1 else {"batch": -1}
    if fault == "mesh":
        axes = {"batch": 1, "model": -1}
    layout_map = tfshard.LayoutMap()
    if _MODEL_AXIS.value > 1:
        layout_map.column(".*/up")
    layout_map.whole(".*", optional=True)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map)
    model = tfshard.Sequential([keras.Input((16,)), keras.layers.Dense(32, "tanh", name="up"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-2), "mse", strategy=strategy)
    wrong_from = at_step if fault == "batches" else _STEPS.value

    def batch(step, number):
        seed = tf.where(step < wrong_from, number, number + 1_000_000)
        x = tf.random.stateless_normal((24, 16), tf.stack([seed, 0]))
        return x, tf.reduce_sum(x, axis=1, keepdims=True)

    callbacks: list[Any] = []
    if _STATE.value:
        saving = tfshard.CheckpointCallback(_STATE.value, _EVERY_STEPS.value, async_save=_ASYNC.value)
        callbacks.append(saving)
        print(f"resumes after step {saving.manager.latest_step()}", flush=True)

    class Progress(keras.callbacks.Callback):
        """Prints each step, and does what the flags ask for."""

        def on_train_batch_end(self, step, logs=None):
            print(f"step {step + 1} loss {float(logs['loss']):.9g} clients {started.num_clients}", flush=True)
            if fault and step + 1 == at_step:
                _at_step(fault, model)
            time.sleep(_STEP_SECONDS.value)

    callbacks.append(Progress())
    dataset = tf.data.Dataset.range(_STEPS.value).shuffle(64, seed=0).enumerate().map(batch)
    model.fit(dataset, shuffle=False, verbose=0, callbacks=callbacks)


def _at_step(fault: str, model) -> None:
    if fault == "raise":
        raise RuntimeError("the disk is full")
    if fault == "exit":
        sys.exit(0)
    if fault == "exit3":
        sys.exit(3)
    if fault == "segfault":
        os.kill(os.getpid(), 11)
    if fault == "kill":
        os.kill(os.getpid(), 9)
    if fault == "alone":
        model.get_weights()
    if fault == "slow":
        time.sleep(5)
    if fault == "loop":
        while True:
            pass


if __name__ == "__main__":
    app.run(main)
