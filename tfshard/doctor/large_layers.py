"""A model with layers of 4 MiB, large enough for traces to report collectives and tensors."""

import keras
import numpy as np

import tfshard
from tfshard.doctor.small_models import Batch

_WIDTH, _LAYERS, _SAMPLES = 1024, 4, 4


def compiled(devices: int, zero_stage: int) -> tuple[tfshard.ShardedStrategy, keras.Model, Batch]:
    """Return a strategy over all devices, the model compiled with it, and a batch."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(_WIDTH, "relu", use_bias=False) for _ in range(_LAYERS)]
    model = tfshard.as_distributed(keras.Sequential([keras.Input((_WIDTH,)), *hidden]))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=devices), zero_stage=zero_stage, analyzer=None)
    model.compile("adam", "mse", strategy=strategy)
    x = np.random.default_rng(0).normal(size=(_SAMPLES * devices, _WIDTH)).astype("float32")
    return strategy, model, (x, x)
