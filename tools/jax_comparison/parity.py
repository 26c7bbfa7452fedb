"""One model's losses: one device, tfshard on a model axis of 4, and Keras on JAX under the same plan's layout map.

    tools/jax_comparison.sh parity

All start from the same weights, take the same batches, and use Adam. Exits with 1 if a loss differs by more than
`--tolerance` of its value.
"""

import pathlib
import pickle
import sys
import tempfile

import gpt
from absl import app, flags

_JAX_PYTHON = flags.DEFINE_string("jax_python", None, "Python of the environment with JAX.", required=True)
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-4, "Largest relative difference of two losses.")

CONFIG = gpt.Config(layers=2, width=32, heads=4, vocabulary=64, sequence=16, batch=8, steps=10)


def main(argv):
    del argv
    import keras
    import numpy as np

    import tfshard

    tfshard.initialize(num_devices=gpt.DEVICES, device_type="CPU")
    keras.utils.set_random_seed(0)
    model = gpt.build(CONFIG)
    weights = {v.path: v.numpy() for v in model.weights}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(model=gpt.DEVICES), "auto", zero_stage=0)
    plan = strategy.plan(model)
    with tempfile.TemporaryDirectory() as folder:
        files = pathlib.Path(folder)
        (files / "map.pickle").write_bytes(pickle.dumps(plan.to_keras_layout_map()))
        np.savez(files / "weights.npz", **weights)
        jax = gpt.run_on_jax(
            _JAX_PYTHON.value, f"--config={CONFIG.to_json()}", f"--layout_map={files / 'map.pickle'}",
            f"--weights={files / 'weights.npz'}", f"--result={files / 'result.npz'}",
        )  # fmt: skip
        jax_weights = dict(np.load(files / "result.npz"))

    model.compile(**gpt.compile_options(), jit_compile=False)
    one = gpt.losses(model, CONFIG)
    sharded = tfshard.as_distributed(gpt.build(CONFIG))
    sharded.set_weights(list(weights.values()))
    sharded.compile(**gpt.compile_options(), strategy=strategy)
    ours = gpt.losses(sharded, CONFIG)

    print(
        f"Keras {keras.__version__}; JAX {jax['jax']} with Keras {jax['keras']}; {gpt.DEVICES} CPU devices, model axis"
    )
    print(f"{len(jax['sharded'])} of {len(weights)} variables are sharded on JAX, as in the plan")
    print(f"{'step':>4} {'one device':>12} {'tfshard':>12} {'Keras on JAX':>13} {'tfshard - JAX':>14}")
    for step, (a, b, c) in enumerate(zip(one, ours, jax["losses"], strict=True)):
        print(f"{step:4d} {a:12.7f} {b:12.7f} {c:13.7f} {b - c:14.1e}")
    difference = max(abs(b - c) / abs(c) for b, c in zip(ours, jax["losses"], strict=True))
    apart = max(float(np.abs(v.numpy() - jax_weights[v.path]).max()) for v in sharded.weights)
    print(f"largest relative difference of losses: {difference:.1e} (allowed: {_TOLERANCE.value:.0e})")
    print(f"largest difference of a weight after {CONFIG.steps} steps: {apart:.1e}")
    sys.exit(0 if difference <= _TOLERANCE.value else 1)


if __name__ == "__main__":
    app.run(main)
