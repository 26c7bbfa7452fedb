"""Full models match one device in five Adam steps under the strategy."""

import itertools

import keras
import keras_hub
import numpy as np
import pytest

import parity
import tfshard
from families import BUILDERS, FAMILIES, SMALL, TOLERANCE, batches, reference, train
from sweeps import table

MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}, "model4": {"model": 4}}
# The minimal share of the bytes that the model axis shards. In a ViT of this size, the kernel of the patches is a
# third, and stays replicated.
SHARES = {"vit": 0.4}
# Without a batch axis the stages are the same.
CASES = [
    *itertools.product(BUILDERS, ("batch4", "batch2_model2"), (0, 1, 2, 3)),
    *((name, "model4", 0) for name in BUILDERS),
]


def always() -> list[tuple[str, str, int]]:
    """Return each model, each mesh at each stage, and each kind of model on two meshes.

    Models of one kind look alike to tfshard: encoders, decoders with and without gates, encoders with decoders.
    """
    kinds = (
        ("mlp", "odd"), ("cnn", "attention"), ("bert", "roberta"), ("gpt2", "opt"), ("llama", "mistral"),
        ("gemma", "qwen"), ("t5", "bart"), ("vit", "vit"),
    )  # fmt: skip
    cells = set()
    for number, (one, other) in enumerate(kinds):
        cells |= {(one, "batch4", number % 4), (other, "batch2_model2", (number + 2) % 4)}
    cells |= {(name, "model4", 0) for name in ("cnn", "gpt2", "llama")}
    # The quick tests contain this case.
    return sorted(cells | {("mlp", "batch4", 3)}, key=CASES.index)


def test_the_cells_that_are_always_taken_cover_what_they_say():
    cells = set(always())
    assert {name for name, _, _ in cells} == set(BUILDERS) == {"mlp", "odd", "cnn", "attention", *FAMILIES}
    expected = {*itertools.product(("batch4", "batch2_model2"), (0, 1, 2, 3)), ("model4", 0)}
    assert {(mesh, stage) for _, mesh, stage in cells} == expected


# T5's attention layers pass no mask on and warn about it, even on one device.
@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning")
@table("models", ("name", "mesh", "stage"), CASES, always=always(), sample=1)
def test_model_matches_one_device(name, mesh, stage):
    axes = MESHES[mesh]
    layout_map = "auto" if "model" in axes else None
    if name == "odd" and "model" in axes:
        with pytest.raises(tfshard.errors.LayoutError, match="'auto' found nothing to shard"):
            strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map)
            tfshard.as_distributed(BUILDERS[name]()).compile("sgd", "mse", strategy=strategy)
        layout_map = {".*": ()}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map, zero_stage=stage)
    run = train(name, strategy)
    assert_sharded(run, name, axes, stage)
    parity.assert_same(run, reference(name), rtol=0.0, atol=TOLERANCE)


def assert_sharded(run: parity.Run, name: str, axes: dict[str, int], stage: int) -> None:
    """Premise: most of the model is stored as mesh and stage say."""
    assert run.model.trainable_variables[0].value.mesh.size == 4
    if name == "odd":
        assert not any(dim % 2 == 0 for v in run.model.trainable_variables for dim in v.shape)
    if "model" in axes:
        assert parity.sharded_share(run.model, "model") >= (0.0 if name == "odd" else SHARES.get(name, 0.5))
        assert name != "odd" or "model" not in parity.shard_axes(run.model)
    if "batch" in axes:
        share = parity.sharded_share(run.model, "batch")
        assert share >= 0.9 if stage == 3 else share == 0.0
        slots = [v for v in run.model.optimizer.variables if v.path.endswith(("momentum", "velocity"))]
        assert len(slots) == 2 * len(run.model.trainable_variables)
        sharded = sum(np.prod(v.shape) for v in slots if "batch" in v.value.layout.storage)
        assert sharded >= 0.9 * sum(np.prod(v.shape) for v in slots) if stage else not sharded


@pytest.mark.slow
def test_kerashub_task_with_its_own_compile():
    """KerasHub's `compile` chooses the same optimizer, loss and metrics as on one device."""

    def fit(strategy):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        backbone = keras_hub.models.GPT2Backbone(**SMALL, max_sequence_length=8, dropout=0.0)
        task = tfshard.as_distributed(keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None))
        assert isinstance(task, keras_hub.models.GPT2CausalLM)
        task.compile(strategy=strategy, jit_compile=False)
        before = task.get_weights()
        history = task.fit(*batches("gpt2")[0], batch_size=8, epochs=3, shuffle=False, verbose=0).history
        return task, before, history

    task, _, history = fit(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    plain, before, expected = fit(None)
    assert parity.sharded_share(task, "batch") >= 0.9
    # The default rate is 2e-5, for three steps.
    moved = np.concatenate([np.abs(a - b).ravel() for a, b in zip(plain.get_weights(), before, strict=True)])
    assert np.median(moved) > 100 * 2e-7
    assert history.keys() == expected.keys() and len(history) == 2
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-6, err_msg=name)
    for ours, theirs in zip(task.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-7)
