"""Sequence parallelism shards activations between blocks along the sequence, and keeps the numbers."""

import keras
import numpy as np
import pytest

import families
import parity
import tfshard
from sweeps import table

MESHES = {"model4": {"model": 4}, "batch2_model2": {"batch": 2, "model": 2}}


def strategy(mesh: str, stage: int, layout_map="auto") -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(
        tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=stage, sequence_parallel=True
    )


@pytest.mark.sweep(1)
@table(
    "sequence parallel families", ("family", "mesh", "stage"),
    [(family, mesh, 3 if "batch" in mesh else 0) for family in ("gpt2", "bert", "llama") for mesh in MESHES],
    always=[("gpt2", "model4", 0), ("llama", "batch2_model2", 3)],
)  # fmt: skip
def test_families_match_one_device(family, mesh, stage):
    run = families.train(family, strategy(mesh, stage))
    assert parity.sharded_share(run.model, "model") > 0.5
    parity.assert_same(run, families.reference(family), rtol=0, atol=families.TOLERANCE)
    # Activations between blocks are gathered before each block (two blocks of one layer, and the logits), and their
    # gradients in the backward pass. On each mesh this is an all-gather, which sends half the bytes of an all-reduce.
    profile = tfshard.profile_step(run.model, families.batches(family)[0])
    gathers = [c.count for c in profile.collectives if c.kind == "all-gather" and c.name.lower().count("gather") == 2]
    assert sum(gathers) == 6


def block(width: int = 16) -> keras.Model:
    inputs = keras.Input((8, width))
    x = keras.layers.LayerNormalization()(inputs)
    x = keras.layers.Dense(64, activation="relu", name="up")(x)
    x = inputs + keras.layers.Dense(width, name="down")(x)
    x = keras.layers.Dropout(0.5)(keras.layers.LayerNormalization(name="between")(x))
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(x))


def test_a_normalization_between_blocks_sees_a_share_of_the_positions():
    """Its output is gathered for the next kernel: one tensor of (batch, sequence, width), in bytes of the trace."""
    model = tfshard.as_distributed(block(512))
    model.compile("sgd", "mse", strategy=strategy("model4", 0))
    batch = np.ones((64, 8, 512), "float32"), np.ones((64, 8, 4), "float32")
    gathered = [c.bytes for c in tfshard.profile_step(model, batch).collectives if c.kind == "all-gather"]
    assert 64 * 8 * 512 * 4 in gathered


def test_lengths_that_do_not_divide_stay_whole_and_match():
    def build():
        inputs = keras.Input((7, 16))
        x = keras.layers.Dense(64, activation="relu", name="up")(inputs)
        return keras.Model(inputs, keras.layers.Dense(16, name="down")(x))

    rs = np.random.RandomState(0)
    batches = [(rs.randn(8, 7, 16).astype("float32"), rs.randn(8, 7, 16).astype("float32"))]
    settings = {"optimizer": keras.optimizers.Adam, "loss": "mse", "steps": 4}
    run = parity.train(build, batches, strategy=strategy("batch2_model2", 3), **settings)
    parity.assert_same(run, parity.train(build, batches, **settings), rtol=1e-4, atol=2e-5)


def test_nothing_to_shard_is_an_error():
    model = tfshard.as_distributed(block())
    with pytest.raises(tfshard.errors.LayoutError, match="needs a layer that is sharded by row"):
        model.compile("sgd", "mse", strategy=strategy("model4", 0, {".*": ()}))


def test_merging_the_sequence_between_blocks_is_an_error_that_names_the_operation():
    inputs = keras.Input((8, 16))
    x = keras.layers.Dense(64, activation="relu", name="up")(inputs)
    x = keras.layers.Dense(16, name="down")(x)
    x = keras.ops.reshape(x, (-1, 16))
    model = tfshard.as_distributed(keras.Model(inputs, x))
    with pytest.raises(
        tfshard.errors.LayoutError, match=r"reshapes \(2, 8, 16\) to \(16, 16\), which merges the sequence"
    ):
        model.compile("sgd", "mse", strategy=strategy("model4", 0))


@pytest.mark.slow
def test_recomputed_blocks_with_a_sequence_in_shards_match_one_device():
    def build():
        keras.utils.set_random_seed(0)
        return families.BUILDERS["gpt2"]()

    chosen = strategy("batch2_model2", 3)
    model = tfshard.as_distributed(build())
    assert chosen.recompute(model, ".*transformer_layer.*"), "premise"
    model.compile(families.optimizer(), families.LOSS, strategy=chosen)
    plain = build()
    plain.compile(families.optimizer(), families.LOSS, jit_compile=False)
    ((x, y),) = families.batches("gpt2")
    for _ in range(2):
        np.testing.assert_allclose(model.train_on_batch(x, y), plain.train_on_batch(x, y), rtol=1e-5)
