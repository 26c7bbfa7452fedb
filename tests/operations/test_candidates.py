"""All devices draw the same candidate classes as one device."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from sweeps import table
from tfshard.devices import transfer

RS = np.random.RandomState(0)
ROWS = RS.normal(size=(12, 8)).astype("float32")
LABELS = RS.randint(0, 30, (12, 1))
WEIGHTS = RS.normal(size=(30, 8)).astype("float32")
BIASES = RS.normal(size=30).astype("float32")
MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}
random = tf.random
SAMPLERS = {
    "uniform": lambda y, seed: random.uniform_candidate_sampler(y, 1, 4, True, 30, seed=seed),
    "log uniform": lambda y, seed: random.log_uniform_candidate_sampler(y, 1, 4, True, 30, seed=seed),
    "learned unigram": lambda y, seed: random.learned_unigram_candidate_sampler(y, 1, 4, True, 30, seed=seed),
    "fixed unigram": lambda y, seed: random.fixed_unigram_candidate_sampler(
        y, 1, 4, True, 30, unigrams=[1.0 + i % 3 for i in range(30)], seed=seed
    ),
    "all": lambda y, seed: random.all_candidate_sampler(y, 1, 30, True, seed=seed),
}
LOSSES = {"sampled softmax": tf.nn.sampled_softmax_loss, "noise contrast": tf.nn.nce_loss}


def step_of(loss: str, sampler: str, seed: int | None):
    def step(rows, labels, weights, biases):
        drawn = SAMPLERS[sampler](labels, seed)
        with tf.GradientTape() as tape:
            tape.watch([rows, weights, biases])
            value = LOSSES[loss](weights, biases, labels, rows, int(drawn[0].shape[0]), 30, sampled_values=drawn)
            total = tf.reduce_mean(value)
        gradients = tape.gradient(total, [rows, weights, biases])
        return [drawn[0], value, *(tf.convert_to_tensor(each) for each in gradients)]

    return tf.function(step)


def results(step, mesh: str) -> list[list[tf.Tensor]]:
    """Return the results of two runs of a step on a mesh."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    arguments = [transfer.host_to_mesh(each, ("batch", None), strategy.mesh) for each in (ROWS, LABELS)]
    assert dtensor.fetch_layout(arguments[0]).num_shards(0) == MESHES[mesh]["batch"], "premise"
    arguments += [transfer.host_to_mesh(each, (None,) * each.ndim, strategy.mesh) for each in (WEIGHTS, BIASES)]
    with strategy.extended.results_stay_sharded():
        return [strategy.run(step, args=tuple(arguments)) for _ in range(2)]


@pytest.mark.sweep(1)
@table(
    "candidate samplers", ("loss", "sampler", "mesh"),
    [(loss, sampler, mesh) for loss in LOSSES for sampler in SAMPLERS for mesh in MESHES],
    always=[("sampled softmax", "log uniform", "batch4")], sample=2,
)  # fmt: skip
def test_losses_over_drawn_classes_match_one_device(loss: str, sampler: str, mesh: str):
    plain = step_of(loss, sampler, seed=1)
    for ours, theirs in zip(
        results(step_of(loss, sampler, seed=1), mesh), [plain(ROWS, LABELS, WEIGHTS, BIASES) for _ in range(2)],
        strict=True,
    ):  # fmt: skip
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(transfer.to_host(mine), other, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", [None, 1])
def test_all_devices_draw_the_same_classes(seed: int | None, monkeypatch):
    if seed is None:
        # Without a seed, each kernel would choose one.
        monkeypatch.setattr(tf.random, "log_uniform_candidate_sampler", _unseeded)
    drawn = [dtensor.unpack(found[0]) for found in results(step_of("sampled softmax", "log uniform", seed), "batch4")]
    assert all(len(pieces) == 4 for pieces in drawn), "premise"
    for pieces in drawn:
        assert len({tuple(piece.numpy()) for piece in pieces}) == 1
    assert not np.array_equal(drawn[0][0], drawn[1][0]), "it draws others in the next step"


def _unseeded(labels, num_true, num_sampled, unique, range_max, seed=None):
    return tf.raw_ops.LogUniformCandidateSampler(
        true_classes=labels, num_true=num_true, num_sampled=num_sampled, unique=unique, range_max=range_max
    )
