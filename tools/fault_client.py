"""Trains a small model in a launched run, with a fault where `tools/faults.py` asks for one.

    tfshard launch --num_processes=2 tools/fault_client.py --steps=20
    tfshard launch --num_processes=2 tools/fault_client.py --fault=raise --client=1 --at_step=5

It prints its process id and each step, writes its state after each step to a file where it is asked to, and goes on
from there when it is restarted.
"""

import json
import os
import pathlib
import sys
import time

from absl import app, flags

_STEPS = flags.DEFINE_integer("steps", 1000000, "Training steps.")
_FAULT = flags.DEFINE_list("fault", [], "What happens (main, _at_step), in the first start and in each restart.")
_CLIENT = flags.DEFINE_integer("client", 1, "In which client, by its place on its host.")
_AT_STEP = flags.DEFINE_integer("at_step", 5, "After which step, for faults in training.")
_STATE = flags.DEFINE_string("state", "", "A directory for the state, to go on from after a restart.")
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.0, "Sleep after each step.")
_MODEL_AXIS = flags.DEFINE_integer("model_axis", 1, "Size of the model axis, across clients.")


def _fault() -> str:
    """What happens in this process."""
    restart = int(os.environ["TFSHARD_RESTART"])
    if int(os.environ["TFSHARD_LOCAL_INDEX"]) != _CLIENT.value or restart >= len(_FAULT.value):
        return ""
    return _FAULT.value[restart]


def main(argv: list[str]) -> None:
    del argv
    fault = _fault()
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
    import numpy as np

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
    state = pathlib.Path(_STATE.value) / "state.weights.h5" if _STATE.value else None
    done = 0
    if state is not None and state.exists():
        done = json.loads(state.with_name("step.json").read_text())["step"]
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        model.load_weights(state)
        print(f"resumed after step {done}", flush=True)
    while done < _STEPS.value:
        # A batch of its own for each step, the same in every run.
        random = np.random.RandomState(done + (1000 if fault == "batches" and done >= _AT_STEP.value else 0))
        x = random.randn(24, 16).astype("float32")
        loss = model.train_on_batch(x, x.sum(axis=1, keepdims=True))
        done += 1
        print(f"step {done} loss {float(loss):.6f} clients {started.num_clients}", flush=True)
        if fault and done == _AT_STEP.value:
            _at_step(fault, model)
        if state is not None:
            _save(model, state, done, started.client_id)
        time.sleep(_STEP_SECONDS.value)


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
    if fault == "loop":
        while True:
            pass


def _save(model, state: pathlib.Path, step: int, client_id: int) -> None:
    """All clients take part; the file is complete when `save_weights` returns."""
    written = state.with_name("new.weights.h5")
    model.save_weights(written)
    if client_id == 0:
        os.replace(written, state)
        state.with_name("step.json").write_text(json.dumps({"step": step}))


if __name__ == "__main__":
    app.run(main)
