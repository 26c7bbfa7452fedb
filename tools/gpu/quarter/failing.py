"""Let a step fail on four devices, train ten steps that do not, and print how both went.

TFSHARD_DEVICE_TYPE=GPU python tools/gpu/quarter/failing.py
"""

import json
import pathlib
import sys
import time

from absl import app, flags

ROOT = pathlib.Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "bench")]

import common  # noqa: E402

_STEPS = flags.DEFINE_integer("steps", 10, "Steps after the failed one.")


def main(argv: list[str]) -> None:
    del argv
    common.start()
    import keras
    import numpy as np
    import tensorflow as tf

    import tfshard

    class Checked(keras.layers.Layer):
        """Fails on NaN."""

        def call(self, x):
            return tf.debugging.check_numerics(x, "not a number in the batch")

    layers = [Checked(), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(1)]
    model = tfshard.Sequential([keras.Input((64,)), *layers])
    model.compile("adam", "mse", jit_compile=False, strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    x, y = np.ones((16, 64), np.float32), np.ones((16, 1), np.float32)
    model.train_on_batch(x, y)
    before, found = model.get_weights(), {}
    begin = time.perf_counter()
    try:
        model.train_on_batch(np.full_like(x, np.nan), y)
        found["failed_step"] = "did not fail"
    except tf.errors.InvalidArgumentError as error:
        found["failed_step"] = f"{type(error).__name__}: {str(error)[:200]}"
    found["failed_step_seconds"] = round(time.perf_counter() - begin, 2)
    found["weights_changed"] = any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    losses = [float(model.train_on_batch(x, y)) for _ in range(_STEPS.value)]
    found["losses_after"] = [round(each, 6) for each in losses]
    print(json.dumps(found), flush=True)
    sys.exit(not (found["failed_step"].startswith("InvalidArgument") and np.isfinite(losses).all()))


if __name__ == "__main__":
    app.run(main)
