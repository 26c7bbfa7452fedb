"""Train with NCCL between four parts of one GPU, beside one device: does a step end, and with which losses.

    NCCL_MULTI_RANK_GPU_ENABLE=1 python tools/gpu/quarter/nccl.py --zero_stage=3

DTensor refuses NCCL where it finds fewer GPUs than devices, because NCCL does by default. This program passes over that
check only, so that both DTensor's compiler and TensorFlow's configuration (`collective_nccl`) use NCCL. On CPU devices
the collectives are TensorFlow's rings.
"""

import itertools
import json
import os
import pathlib
import sys
import unittest.mock
from typing import Any

from absl import app, flags

ROOT = pathlib.Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "bench")]

import common  # noqa: E402

_STAGE = flags.DEFINE_integer("zero_stage", 3, "ZeRO stage.")
_MESH = flags.DEFINE_string("mesh", '{"batch": 4}', "Arguments of create_mesh, as JSON.")
_DEVICES = 4


def start() -> None:
    """Start four devices that communicate by NCCL if they are GPUs."""
    if common.DEVICE_TYPE != "GPU":
        common.start(_DEVICES)
        return
    from tensorflow.dtensor.python import accelerator_util

    os.environ["DTENSOR_GPU_USE_NCCL_COMMUNICATION"] = "1"
    # The first answer is for the check, the others for the configuration.
    answers = unittest.mock.Mock(side_effect=itertools.chain([False], itertools.repeat(True)))
    with unittest.mock.patch.object(accelerator_util.config, "gpu_use_nccl_communication", answers):
        common.start(_DEVICES)


def losses(strategy: Any) -> list[float]:
    """Return the losses of six steps of a small network, under a strategy or on one device."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(256, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(1)])
    options = {"jit_compile": False}
    if strategy is not None:
        import tfshard

        model = tfshard.as_distributed(model)
        options["strategy"] = strategy
    model.compile("adam", "mse", **options)
    rs = np.random.RandomState(0)
    x, y = rs.randn(16, 64).astype("float32"), rs.randn(16, 1).astype("float32")
    return [float(model.train_on_batch(x, y)) for _ in range(6)]


def main(argv: list[str]) -> None:
    del argv
    start()
    import tfshard

    mesh = tfshard.create_mesh(**json.loads(_MESH.value))
    found = losses(tfshard.ShardedStrategy(mesh, zero_stage=_STAGE.value))
    expected = losses(None)
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    line = {"zero_stage": _STAGE.value, "mesh": json.loads(_MESH.value), "losses": found}
    print(json.dumps({**line, "largest_difference": difference}), flush=True)
    sys.exit(difference > 1e-4)


if __name__ == "__main__":
    app.run(main)
