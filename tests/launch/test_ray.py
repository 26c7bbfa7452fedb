"""The recipe of docs/clusters.md for Ray, on a local Ray of two workers."""

import importlib.util
import json

import keras
import numpy as np
import pytest

import launched
import parity

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install tfshard[ray]", allow_module_level=True)

STEPS = 2
# Ray Train runs the function in a thread. Its trainers need packages of ray[train].
TRAINER = f"""
import json, os, pathlib, sys
sys.path.insert(0, {str(launched.ROOT / "examples")!r})
import on_ray, ray
from ray import cloudpickle, train
from ray.train.tensorflow import TensorflowTrainer

cloudpickle.register_pickle_by_value(on_ray)

def loop(config):
    found = on_ray.train({STEPS})
    rank = train.get_context().get_world_rank()
    pathlib.Path(config["folder"], str(rank)).write_text(json.dumps(found))
    train.report({{"loss": found[-1]}})

variables = {{"PYTHONHASHSEED": "0", "TFSHARD_DEVICES_PER_PROCESS": "1"}}
ray.init(num_cpus=3, include_dashboard=False, logging_level=40, _node_ip_address="127.0.0.1",
         runtime_env={{"env_vars": variables}})
TensorflowTrainer(
    loop, train_loop_config={{"folder": sys.argv[1]}}, scaling_config=train.ScalingConfig(num_workers=2),
    run_config=train.RunConfig(storage_path=sys.argv[1]),
).fit()
"""


def plain() -> list[float]:
    """Return the losses of the example's model on one device."""
    random = np.random.RandomState(0)
    x, y = random.randn(8, 6).astype("float32"), random.randn(8, 2).astype("float32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
    model.compile(parity.dense_gradients(keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    return [float(model.train_on_batch(x, y)) for _ in range(STEPS)]


def test_actors_of_ray_train_as_one_device():
    done = launched.run(
        str(launched.ROOT / "examples" / "on_ray.py"), "--num_workers=2", f"--steps={STEPS}", "--host=127.0.0.1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for worker in (0, 1):
        (found,) = launched.said(done, f"worker {worker}: ")
        np.testing.assert_allclose([float(loss) for loss in found.split(", ")], plain(), rtol=1e-5)


@pytest.mark.slow
def test_rays_tensorflow_trainer_trains_as_one_device(tmp_path):
    if any(importlib.util.find_spec(name) is None for name in ("pandas", "pyarrow")):
        pytest.skip("Ray Train is not installed: pip install ray[train]")
    done = launched.run("-c", TRAINER, str(tmp_path), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in ("0", "1"):
        np.testing.assert_allclose(json.loads((tmp_path / rank).read_text()), plain(), rtol=1e-5)
