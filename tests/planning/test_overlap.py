"""The hidden share of a step's communication: predicted, and in the trace of a step."""

import keras
import numpy as np
import pytest

import tfshard
from tfshard.planning import Link, Links

WIDTH, LAYERS = 1024, 8
KERNEL = 4 * WIDTH * WIDTH
X = np.zeros((64, WIDTH), "float32")
ALONE = tfshard.ParameterAnalyzer(group_threshold_bytes=1 << 16)


def products() -> keras.Model:
    hidden = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden])


def predict(seconds_of_kernel: float, *, compute_seconds=1.0, stage=3, mesh=None, analyzer=ALONE, **options):
    """Predict for links with the given time to gather a kernel, and twice that time to reduce it."""
    link = Link(latency=0.0, bandwidth=3 / 4 * KERNEL / seconds_of_kernel)
    links = Links.of(devices_per_host=4, inside=link)
    mesh = mesh or {"batch": 4}
    return tfshard.plan(
        products(), mesh, zero_stage=stage, analyzer=analyzer, inputs=X, optimizer="sgd", links=links,
        compute_seconds=compute_seconds, **options,
    )  # fmt: skip


def test_what_is_sent_beside_computing_is_hidden():
    fast, slow = predict(1e-3).overlap, predict(1.0).overlap
    assert fast.hidden > 0.8 and fast.seconds < 1.0 + fast.collective_seconds * 0.2 + 1e-9
    assert slow.hidden < 0.2 and slow.seconds > slow.collective_seconds
    for each in (fast, slow):
        assert each.compute_seconds == pytest.approx(1.0)
        assert max(1.0, each.collective_seconds) <= each.seconds <= 1.0 + each.collective_seconds
        # At any time, computing, communication, or both run.
        assert each.seconds <= 1.0 + (1 - each.hidden) * each.collective_seconds + 1e-6


def test_the_time_in_collectives_is_that_of_the_plan():
    for mesh in ({"batch": 4}, {"replica": 2, "batch": 2}):
        for stage in (0, 2, 3):
            plan = predict(1e-3, stage=stage, mesh=mesh)
            assert plan.overlap.collective_seconds == pytest.approx(plan.collective_seconds, rel=1e-3), (mesh, stage)


def test_one_reduction_at_the_end_hides_nothing():
    overlap = predict(1e-2, stage=0).overlap
    assert overlap.hidden == pytest.approx(0.0, abs=0.02)
    assert overlap.seconds == pytest.approx(1.0 + overlap.collective_seconds, rel=0.02)


def test_a_plan_tells_what_is_hidden_if_it_knows_how():
    plan = predict(1e-2)
    assert f"ms of computing hide {plan.overlap.hidden:.0%} of the time in collectives" in " ".join(str(plan).split())
    assert plan.to_dict()["overlap"]["hidden"] == plan.overlap.hidden
    assert predict(1e-2, compute_seconds=None).overlap is None
    assert predict(1e-2, mesh={"batch": 2, "model": 2}, layout_map="auto").overlap is None
