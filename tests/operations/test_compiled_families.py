"""Models of KerasHub with compiled blocks match one device for ten steps, at every stage and on three meshes."""

import functools
import itertools

import keras
import numpy as np
import pytest

import families
import parity
import tfshard
from sweeps import table
from tfshard.operations import compiled_blocks

MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}, "model4": {"model": 4}}
# Without a batch axis the stages are the same.
CASES = [
    *itertools.product(families.FAMILIES, ("batch4", "batch2_model2"), (0, 1, 2, 3)),
    *((name, "model4", 0) for name in families.FAMILIES),
]
STEPS = 10


def losses(name: str, strategy: tfshard.ShardedStrategy | None) -> tuple[keras.Model, list[float]]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers, families.SMALL["num_layers"] = families.SMALL["num_layers"], 2
    try:
        model = families.BUILDERS[name]()
    finally:
        families.SMALL["num_layers"] = layers
    # T5 does not scale its scores: with 0.01, plain Keras with XLA on one device differs by 3e-4 after ten steps.
    optimizer = keras.optimizers.SGD(2e-4 if name == "t5" else 0.01)
    if strategy is None:
        model.compile(parity.dense_gradients(optimizer), families.LOSS, jit_compile=False)
    else:
        model = tfshard.as_distributed(model)
        model.compile(optimizer, families.LOSS, jit_compile=True, strategy=strategy)
    ((x, y),) = families.batches(name)
    return model, [float(model.train_on_batch(x, y)) for _ in range(STEPS)]


@functools.cache
def reference(name: str) -> list[float]:
    return losses(name, None)[1]


# T5's attention layers pass no mask on and warn about it, even on one device.
@pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning")
@pytest.mark.filterwarnings("ignore:(?s).*T5TransformerLayer. is not compiled. its devices communicate:UserWarning")
@pytest.mark.sweep(3)
@table(
    "families with compiled blocks", ("name", "mesh", "stage"), CASES, always=[("llama", "batch2_model2", 3)], sample=2
)
def test_losses_match_one_device(name: str, mesh: str, stage: int):
    layout_map = "auto" if "model" in MESHES[mesh] else None
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=stage)
    model, found = losses(name, strategy)
    blocks = compiled_blocks.compiled_blocks(model)
    assert len(blocks) == (4 if name in ("t5", "bart") else 2), "premise: there are blocks"
    if name != "t5" or layout_map is None:  # The lookups of its relative positions are not followed.
        assert not any(each.reason for each in blocks), "premise: they are compiled"
    expected = reference(name)
    assert abs(expected[-1] - expected[0]) > 1e-3 * expected[0], "premise: it learns"
    np.testing.assert_allclose(found, expected, rtol=2e-6)
