"""Compare the losses of one model on one device, with tfshard on a model axis of 4, and with Keras on JAX.

    tools/jax_comparison.sh

Keras on JAX takes the layout map of tfshard's plan. All three start from the same weights, take the same batches, and
use Adam. The program exits with 1 if the relative difference of a loss is more than `--tolerance`.
"""

import dataclasses
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from typing import Any

from absl import app, flags

from tools.jax_comparison import losses
from tools.report import models

_JAX_PYTHON = flags.DEFINE_string("jax_python", None, "Python of the environment with JAX.", required=True)
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-4, "Largest relative difference of two losses.")

DEVICES, STEPS = 4, 10
MODEL = models.Model(kind="gpt", batch=8, layers=2, width=32, heads=4, vocabulary=64, length=16)


def main(argv: list[str]) -> None:
    del argv
    import keras
    import numpy as np

    import tfshard

    tfshard.initialize(num_devices=DEVICES, device_type="CPU")
    model = models.build(MODEL)
    weights = {v.path: v.numpy() for v in model.weights}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(model=DEVICES), "auto", zero_stage=0)
    layout_map = strategy.plan(model).to_keras_layout_map()
    jax, jax_weights = _on_jax(layout_map, weights)

    model.compile(**models.options(), jit_compile=False)
    one = losses.of(model, MODEL, STEPS)
    sharded = models.build(MODEL)
    sharded.set_weights(list(weights.values()))
    sharded.compile(**models.options(), strategy=strategy)
    ours = losses.of(sharded, MODEL, STEPS)

    print(f"Keras {keras.__version__}; JAX {jax['jax']} with Keras {jax['keras']}; {DEVICES} CPU devices, model axis")
    print(f"{len(jax['sharded'])} of {len(weights)} variables are sharded on JAX, as in the plan")
    print(f"{'step':>4} {'one device':>12} {'tfshard':>12} {'Keras on JAX':>13} {'tfshard - JAX':>14}")
    for step, (a, b, c) in enumerate(zip(one, ours, jax["losses"], strict=True)):
        print(f"{step:4d} {a:12.7f} {b:12.7f} {c:13.7f} {b - c:14.1e}")
    difference = max(abs(b - c) / abs(c) for b, c in zip(ours, jax["losses"], strict=True))
    apart = max(float(np.abs(v.numpy() - jax_weights[v.path]).max()) for v in sharded.weights)
    print(f"largest relative difference of losses: {difference:.1e} (allowed: {_TOLERANCE.value:.0e})")
    print(f"largest difference of a weight after {STEPS} steps: {apart:.1e}")
    sys.exit(0 if difference <= _TOLERANCE.value else 1)


def _on_jax(layout_map: object, weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train from these weights with Keras on JAX. Returns the printed results and the weights after the steps."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        files = pathlib.Path(folder)
        (files / "map.pickle").write_bytes(pickle.dumps(layout_map))
        np.savez(files / "weights.npz", **weights)
        done = subprocess.run(
            [
                _JAX_PYTHON.value, "-m", "tools.jax_comparison.on_jax",
                f"--model={json.dumps(dataclasses.asdict(MODEL))}", f"--steps={STEPS}",
                f"--layout_map={files / 'map.pickle'}", f"--weights={files / 'weights.npz'}",
                f"--result={files / 'result.npz'}",
            ],
            stdout=subprocess.PIPE, text=True, check=True,
            env={
                **os.environ, "KERAS_BACKEND": "jax",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            },
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1]), dict(np.load(files / "result.npz"))


if __name__ == "__main__":
    app.run(main)
