"""Check `parity`: training on a mesh at each ZeRO stage gives the weights of plain Keras on one device."""

from collections.abc import Mapping

import keras
import numpy as np

import tfshard
from tfshard.command_line import ZERO_STAGES
from tfshard.devices import startup
from tfshard.doctor.check_log import CheckLog, CheckRequest, mesh_text

# Allows for float32 sums in another order. The weights are about 1.
TOLERANCE = 1e-4
_STEPS = 3
_UP, _DOWN = 8, 8


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Train at each stage on each mesh. A difference above `TOLERANCE` is a fault."""
    worst = 0.0
    for axes in request.meshes:
        # A pipeline shards no gradients over pipeline ranks, but each rank has a stage.
        for stage in ZERO_STAGES:
            difference = parity(axes, stage)
            worst = max(worst, difference)
            log.row("Parity", mesh=mesh_text(axes), stage=stage, difference=f"{difference:.1e}")
            if not difference <= TOLERANCE:
                log.fault(
                    f"On mesh {mesh_text(axes)} at ZeRO stage {stage}, weights differ from those on one device by "
                    f"{difference:.1e}. The tolerance is {TOLERANCE:.0e}."
                )
    log.summarize(f"largest difference {worst:.1e}, tolerance {TOLERANCE:.0e}")


def parity(axes: Mapping[str, int] | None = None, zero_stage: int = 3) -> float:
    """Train a tiny model with plain Keras on one device, and sharded on a mesh.

    Args:
        axes: The mesh. By default, all devices are on the axis `batch`.
        zero_stage: The ZeRO stage.

    Returns:
        The largest absolute difference of a weight after three Adam steps.
    """
    devices = tfshard.initialize().num_devices
    axes = axes or {"batch": devices}
    generator = np.random.default_rng(0)
    samples = 8 * devices
    x, y = (generator.normal(size=(samples, size)).astype("float32") for size in (6, _DOWN))
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    plain = _model()
    start = plain.get_weights()
    plain.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    sharded = _model()
    sharded.set_weights(start)
    is_pipeline = "pipeline" in axes
    sharded = tfshard.pipeline(sharded, stages=2, microbatches=2) if is_pipeline else tfshard.as_distributed(sharded)
    layout_map = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)} if "model" in axes else None
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), zero_stage=zero_stage, layout_map=layout_map)
    sharded.compile(keras.optimizers.Adam(0.01), "mse", strategy=strategy)
    for model in (plain, sharded):
        for _ in range(_STEPS):
            model.train_on_batch(x, y)
    pairs = zip(plain.get_weights(), sharded.get_weights(), strict=True)
    return max(float(np.max(np.abs(np.array(theirs) - np.array(ours)))) for theirs, ours in pairs)


def _model() -> keras.Model:
    layers = [keras.layers.Dense(_UP * 8, "tanh", name="up"), keras.layers.Dense(_DOWN, name="down")]
    return keras.Sequential([keras.Input((6,)), *layers])
