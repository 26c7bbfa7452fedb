"""Train the model of `client.py`, with faults during compilation, steps and saves."""

import os
import time
from typing import Any

import keras
import kinds
import model as small
import numpy as np
from absl import flags

import tfshard
from tfshard.checkpoints import writer
from tfshard.devices import clients, startup
from tfshard.layouts import variable_layout

_FLAGS = flags.FLAGS
# The points that cut off a save of several clients: before or after a function of tfshard/checkpoints/writer.py.
SAVES = {
    "save_pieces": ("_write_shards", False),
    "save_written": ("_write_shards", True),
    "save_published": ("_publish", True),
    "save_gathered": ("_gather", True),
    "save_committed": ("_commit", True),
    "save_pruned": ("_prune", True),
}
# The number of steps between two checks of `--seconds`.
_LOOK_EVERY = 20


class Progress(keras.callbacks.Callback):
    """Print each step, cause a fault after a step, and end the training after `--seconds`."""

    def __init__(self, fault: str, at_step: int):
        super().__init__()
        self.fault, self.at_step = fault, at_step
        self.begun: float | None = None

    def on_train_batch_begin(self, step, logs=None):
        if self.begun is None:
            self.begun = time.monotonic()
            print("begins", flush=True)

    def on_train_batch_end(self, step, logs=None):
        count = clients.here().count
        print(f"step {step + 1} loss {float(logs['loss']):.9g} clients {count}", flush=True)
        if self.fault and step + 1 == self.at_step:
            kinds.in_training(self.fault, self.model.get_weights)
        time.sleep(_FLAGS.step_seconds)
        if _FLAGS.seconds and not step % _LOOK_EVERY:
            # All clients use the clock of client 0, and end with the same step.
            trained = tfshard.collectives.broadcast(np.float64(time.monotonic() - self.begun))
            self.model.stop_training = bool(trained > _FLAGS.seconds)


def _kill_in_save(name: str, step: int) -> None:
    """Kill this process in the save of a step."""
    function, after = SAVES[name]
    whole = getattr(writer.Writing, function)

    def cut_off(self, *args):
        if self.step != step:
            return whole(self, *args)
        if after:
            whole(self, *args)
        kinds.kill()

    setattr(writer.Writing, function, cut_off)


def train(fault: str, at_step: int) -> None:
    """Train according to the flags of `client.py`."""
    if fault == "kill_starting":
        startup._start = lambda *_, **__: kinds.kill()
    tfshard.initialize()
    job = os.environ["DTENSOR_JOBS"].split(",")[int(os.environ["DTENSOR_CLIENT_ID"])]
    print(f"port {job.rpartition(':')[2]}", flush=True)
    if fault in SAVES:
        _kill_in_save(fault, at_step)
    keras.utils.set_random_seed(1 if fault == "seed" else 0)
    axes = {"model": _FLAGS.model_axis, "batch": -1} if _FLAGS.model_axis > 1 else {"batch": -1}
    options: dict[str, Any] = {}
    if kinds.replicas() > 1:
        axes = {"replica": kinds.replicas(), **axes}
        # Each gradient is reduced within a replica first and then across replicas, even in this small model.
        variable_layout.LEAST_BY_REPLICAS_BYTES = 0
        options = {"analyzer": None}
    if kinds.pipeline() > 1:
        axes = {"pipeline": kinds.pipeline(), **axes}
    if (how := kinds.compression()) is not None:
        variable_layout.LEAST_BY_REPLICAS_BYTES = small.COMPRESSED_BYTES
        options = {"analyzer": None, "compression": how}
    if fault == "mesh":
        axes = {"batch": 1, "model": -1}
    layout_map = tfshard.LayoutMap()
    if _FLAGS.model_axis > 1:
        layout_map.column(".*/up")
    layout_map.replicated(".*", optional=True)
    progress = Progress(fault, at_step)

    class Up(keras.layers.Dense):
        """A layer that kills its process when the process traces its first step."""

        def call(self, x):
            if fault == "kill_tracing" and progress.begun is not None:
                kinds.kill()
            return super().call(x)

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map, **options)
    model = tfshard.as_distributed(small.build(Up))
    if kinds.pipeline() > 1:
        model = tfshard.pipeline(model, kinds.pipeline(), microbatches=3)
    model.compile(keras.optimizers.Adam(1e-2), "mse", strategy=strategy)
    callbacks: list[Any] = []
    if _FLAGS.state:
        saving = tfshard.CheckpointCallback(_FLAGS.state, _FLAGS.every_steps, async_save=_FLAGS.async_save)
        callbacks.append(saving)
        print(f"resumes after step {saving.manager.latest_step()}", flush=True)
    callbacks.append(progress)
    data = small.batches(_FLAGS.steps, at_step if fault == "batches" else None)
    model.fit(data, shuffle=False, verbose=0, callbacks=callbacks)
