"""Simulated steps on clusters of any size."""

import json

import keras
import numpy as np
import pytest

import tfshard
from tfshard.errors import LayoutError, StrategyError
from tfshard.planning import Machine

WIDTH = 1024
DESCRIBED = {
    "product_flops": 1e14, "bandwidth": 1e12, "operation_seconds": 1e-6, "memory": 4e9, "peak_flops": 2e14,
    "devices_per_host": 8, "inside": {"latency": 1e-5, "bandwidth": 1e11},
    "between": {"latency": 1e-4, "bandwidth": 1e9},
}  # fmt: skip


def build(count: int = 6) -> keras.Model:
    hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(count)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden])


def simulate(devices=(8,), batch=4096, machine=None, model=None, **options):
    found = Machine.from_dict(DESCRIBED | (machine or {}))
    return tfshard.simulate(model or tfshard.abstract_model(build), found, devices, batch, **options)


def test_a_step_on_one_host_is_what_advise_says_of_it():
    """The peak and the time equal the results for the mesh alone."""
    machine = Machine.from_dict(DESCRIBED)
    best = best_without_pipelines(simulate(), 8)
    advice = tfshard.advise(
        build(), 8, 1 << 40, 4096, inputs=np.zeros((4096, WIDTH), "float32"), machine=machine,
    )  # fmt: skip
    meshes = [each for each in simulate().considered[8] if "pipeline" not in each.mesh_shape]
    twin = next(each for each in meshes if each.microbatches == 1 or each.microbatches == 32)
    assert best.mesh_shape == twin.mesh_shape == {"batch": 8}
    whole = simulate(batch=64).considered[8]
    small = tfshard.advise(build(), 8, 1 << 40, 64, inputs=np.zeros((64, WIDTH), "float32"), machine=machine)
    candidate = next(
        each for each in small.candidates if each.zero_stage == 3 and not each.recompute and each.problem is None
    )
    one = next(each for each in whole if each.microbatches == 1 and not each.recompute)
    assert one.seconds == pytest.approx(candidate.step_seconds)
    assert one.peak_bytes == candidate.peak_bytes
    fitting = [each for each in advice.candidates if each.step_seconds is not None and each.fits]
    assert advice.recommended.step_seconds <= 1.06 * min(each.step_seconds for each in fitting)
    alike = [each for each in small.candidates if each.fits and each.step_seconds <= 1.06 * fastest_of(small)]
    assert small.recommended is alike[0] and alike == sorted(alike, key=lambda each: each.zero_stage)


def best_without_pipelines(found, count: int):
    """Return the quickest step that fits and is on one mesh."""
    return next(
        each
        for each in found.considered[count]
        if "pipeline" not in each.mesh_shape and each.needed_bytes <= found.machine.memory
    )


def fastest_of(advice) -> float:
    """Return the time of the fastest step that fits."""
    return min(each.step_seconds for each in advice.candidates if each.step_seconds is not None and each.fits)


def test_slow_links_between_hosts_are_used_once_for_each_replica():
    assert simulate(devices=(64,)).best[64].mesh_shape == {"replica": 8, "batch": 8}
    fast = {"between": {"latency": 1e-5, "bandwidth": 8e11}}
    flat = simulate(devices=(64,), machine=fast).best[64]
    assert flat.collective_seconds < simulate(devices=(64,)).best[64].collective_seconds


def test_what_does_not_fit_is_taken_in_parts_or_on_more_devices():
    roomy = simulate(batch=65536, machine={"memory": None}).best[8]
    tight = simulate(batch=65536, machine={"memory": int(roomy.needed_bytes * 0.9)}).best[8]
    assert tight is None or tight.needed_bytes < roomy.needed_bytes
    nothing = simulate(devices=(8, 64), machine={"memory": 3e6})
    assert nothing.best == {8: None, 64: None}
    assert "each device" in nothing.problems[8]
    assert "nothing" in str(nothing)
    with pytest.raises(StrategyError, match=r"nothing to draw.*no step fits.*devices=\[8, 64\]"):
        nothing.plot("curve.svg")


@pytest.mark.slow
def test_more_devices_are_quicker_until_what_they_send_is_more():
    link = {"latency": 1e-5, "bandwidth": 2e11, "hop": 1e-6}
    simulated = simulate(devices=(8, 64, 512, 4096), batch=4096 * 8, machine={"between": link})
    found = {count: best_without_pipelines(simulated, count) for count in simulated.best}
    seconds = [found[count].seconds for count in (8, 64, 512)]
    assert seconds == sorted(seconds, reverse=True)
    assert all(0 < each.utilization < 0.5 for each in found.values()), "half of the peak is what products reach"
    assert found[4096].utilization < found[8].utilization


def test_a_model_axis_is_tried_within_a_host():
    sizes = {each.mesh_shape.get("model", 1) for each in simulate(devices=(16,), layout_map="auto").considered[16]}
    assert sizes == {1, 2, 4, 8}


def test_tables_json_and_a_picture_have_what_there_is(tmp_path):
    found = simulate(devices=(8, 64))
    text = " ".join(str(found).split())
    assert "batch=8" in text and "replica=8 x batch=8" in text and "MFU" in text
    data = json.loads(found.to_json())
    assert data["best"]["8"]["seconds"] == found.best[8].seconds
    assert data["machine"]["peak_flops"] == 2e14
    found.plot(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 1000


def test_open_dims_need_a_length():
    def tokens() -> keras.Model:
        x = keras.Input((None,), dtype="int32")
        return keras.Model(x, keras.layers.Dense(8)(keras.layers.Embedding(100, 16)(x)))

    model = tfshard.abstract_model(tokens)
    with pytest.raises(StrategyError, match="length="):
        simulate(model=model)
    short, long = (simulate(model=model, length=length, batch=64).best[8] for length in (16, 64))
    assert long.peak_bytes > short.peak_bytes and long.compute_seconds > short.compute_seconds


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devices": (0,)}, StrategyError, "devices must be a positive integer"),
        ({"devices": (12,)}, StrategyError, "hosts of 8 devices"),
        ({"devices": (64,), "machine": {"between": None}}, StrategyError, "no links between hosts"),
        ({"batch": 2.5}, StrategyError, "batch must be a positive integer"),
        ({"model": [1]}, StrategyError, "needs a keras.Model"),
        ({"model": keras.Sequential([keras.layers.Dense(4)])}, StrategyError, "is not built.*keras.Input"),
        ({"layout_map": {".*": ("data", None)}}, LayoutError, "data"),
        ({"zero_stages": (4,)}, StrategyError, "Unknown ZeRO stage"),
    ],
)
def test_what_cannot_be_simulated_is_told(options, error, message):
    with pytest.raises(error, match=message):
        simulate(**options)


def test_advise_takes_a_machine_only_with_a_model_it_can_look_into():
    specs = [tfshard.layouts.VariableSpec(path="kernel", shape=(64, 64))]
    with pytest.raises(StrategyError, match="the graph of a keras.Model"):
        tfshard.advise(specs, 8, 1 << 30, 64, machine=Machine.from_dict(DESCRIBED))
