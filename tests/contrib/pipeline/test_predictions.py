"""`advise` and `simulate` propose pipelines, with memory, time and bubble, and their code runs."""

import dataclasses

import keras
import numpy as np
import pytest

import tfshard
from tfshard.planning import Machine, pipelined_steps

MEBI = 1 << 20
X = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")


def machine(memory: float = 1e12, between: float = 1e7, latency: float = 1e-4) -> Machine:
    """Hosts of two devices, with a slow network between the hosts."""
    return Machine.from_dict({
        "product_flops": 1e10, "bandwidth": 1e10, "memory": memory, "devices_per_host": 2,
        "inside": {"latency": 1e-5, "bandwidth": 1e10}, "between": {"latency": latency, "bandwidth": between},
    })  # fmt: skip


def build(layers: int = 8, width: int = 64) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((width,)), *(keras.layers.Dense(width, "tanh", name=f"dense_{i}") for i in range(layers))]
    )


def pipelines(candidates) -> list:
    return [each for each in candidates if "pipeline" in each.mesh_shape]


def test_a_pipeline_is_proposed_where_it_is_the_quickest_and_its_code_trains_like_one_device():
    model = build()
    advice = tfshard.advise(model, 4, "1GiB", batch=32, machine=machine(), optimizer="sgd")
    chosen = advice.recommended
    assert chosen.mesh_shape["pipeline"] >= 2, str(advice)
    assert f"with microbatches={chosen.microbatches}, in which ranks wait {chosen.bubble:.0%}" in advice.reasons[0]
    others = [each for each in advice.candidates if "pipeline" not in each.mesh_shape]
    assert others and chosen.step_seconds < min(each.step_seconds for each in others)
    names = {"model": model, "tfshard": tfshard, "optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}
    exec(chosen.code, names)
    plain = build()
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    for _ in range(3):
        loss = float(names["model"].train_on_batch(X, X / 2))
        np.testing.assert_allclose(loss, float(plain.train_on_batch(X, X / 2)), rtol=1e-5)
    for ours, theirs in zip(names["model"].get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_prediction_holds_what_the_pipeline_stores_and_waits_as_its_plan_says():
    # Sending takes no time, as in the plan.
    model = build(4)
    advice = tfshard.advise(model, 4, "1GiB", batch=32, machine=machine(between=1e15, latency=1e-12), optimizer="adam")
    found = {(each.mesh_shape["pipeline"], each.zero_stage): each for each in pipelines(advice.candidates)}
    assert {ranks for ranks, _ in found} == {2, 4} and {stage for _, stage in found} == {1, 3}
    for stage in (1, 3):
        candidate = found[2, stage]
        cut = build(4)
        names = {"model": cut, "tfshard": tfshard, "optimizer": "adam", "loss": "mse"}
        exec(candidate.code, names)
        names["model"].train_on_batch(X, X)
        held = max(report.bytes_per_device() for report in tfshard.pipelining.reports(names["model"]))
        # The report also has metrics and the counters of the step and of seeds.
        assert candidate.stored_bytes == pytest.approx(held, abs=128)
        planned = tfshard.pipelining.plan(names["model"], X)
        assert planned.schedule.microbatches == candidate.microbatches
        assert candidate.bubble == pytest.approx(planned.bubble(), abs=0.2)


def test_without_a_machine_pipelines_come_only_if_nothing_else_fits():
    model = build(layers=8, width=256)
    x = np.zeros((32, 256), "float32")
    roomy = tfshard.advise(model, 4, "1GiB", batch=32, inputs=x)
    assert not pipelines(roomy.candidates)
    tight = tfshard.advise(model, 4, 1 * MEBI, batch=32, inputs=x)
    found = pipelines(tight.candidates)
    assert found and all(each.step_seconds is None and each.bubble > 0 for each in found)
    least = min(tight.candidates, key=lambda each: each.needed_bytes)
    fits = tfshard.advise(model, 4, least.needed_bytes, batch=32, inputs=x)
    assert fits.recommended is not None


def test_a_model_that_cannot_be_cut_has_no_pipeline_and_advice_changes_no_model():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(64)

        def call(self, x):
            return self.dense(x)

    own = Own()
    own(X)
    assert not pipelines(tfshard.advise(own, 4, "1GiB", batch=32, inputs=X, machine=machine()).candidates)
    model = build(4)
    outputs = [layer.output for layer in model.layers]
    assert pipelines(tfshard.advise(model, 4, "1GiB", batch=32, machine=machine()).candidates)
    # A layer that was called twice has no single output.
    assert [layer.output for layer in model.layers] == outputs


def test_a_model_that_normalizes_by_the_batch_has_no_pipeline_and_pipelines_can_be_left_out():
    layers = [keras.layers.Dense(64), keras.layers.BatchNormalization(), keras.layers.Dense(64)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    assert not pipelines(tfshard.advise(model, 4, "1GiB", batch=32, machine=machine()).candidates)
    advice = tfshard.advise(build(4), 4, "1GiB", batch=32, machine=machine(), pipelines=False)
    assert not pipelines(advice.candidates)


def test_a_model_without_values_has_pipelines():
    model = tfshard.abstract_model(lambda: build(4))
    assert pipelines(tfshard.advise(model, 4, "1GiB", batch=32, machine=machine()).candidates)


def test_a_simulation_proposes_a_pipeline_over_a_slow_network():
    found = tfshard.simulate(tfshard.abstract_model(build), machine(), devices=[4], batch=32)
    best = found.best[4]
    assert best.mesh_shape == {"pipeline": 2, "batch": 2} and 0 < best.bubble < 1
    others = [each for each in found.considered[4] if "pipeline" not in each.mesh_shape]
    assert others and all(each.seconds > best.seconds and each.bubble is None for each in others)
    quick = tfshard.simulate(tfshard.abstract_model(build), machine(between=1e12), devices=[4], batch=32)
    assert "pipeline" not in quick.best[4].mesh_shape


def test_more_microbatches_shorten_the_bubble():
    question = pipelined_steps.PipelineQuestion(
        model=build(4), ranks=2, data_size=2, microbatches=2, config=tfshard.layouts.ShardingConfig(), inputs=X,
        optimizer="adam", machine=machine(),
    )  # fmt: skip
    few = pipelined_steps.predict(question)
    many = pipelined_steps.predict(dataclasses.replace(question, microbatches=8))
    assert few.bubble > many.bubble > 0
