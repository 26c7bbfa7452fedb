"""The timeline of a step: each device's operations and collectives, and the hidden share of the collectives."""

import json

import keras
import numpy as np
import pytest

import tfshard
from tfshard.measure.timeline import DeviceTimeline, TimedWork, Timeline


def work(begin, end, met=None, lane=0, kind="MatMul"):
    return TimedWork(name="x", kind=kind, lane=lane, begin=begin, end=end, met=begin if met is None else met)


def test_hidden_is_the_share_of_collectives_in_which_the_device_computes():
    # 4 + 2 s of collectives overlap 1 + 1 s of operations. Overlapping collectives count once.
    first = DeviceTimeline(
        operations=(work(0.0, 1.0), work(0.5, 3.0, lane=1), work(6.0, 7.0)), collectives=(work(2, 4), work(3, 6))
    )
    assert first.computing == [(0.0, 3.0), (6.0, 7.0)] and first.communicating == [(2, 6)]
    second = DeviceTimeline(operations=(work(0.0, 2.0),), collectives=(work(1.0, 3.0),))
    timeline = Timeline(devices=(first, second))
    assert timeline.hidden == pytest.approx(2 / 6)
    assert (timeline.collective_seconds, timeline.computing_seconds, timeline.seconds) == (3.0, 3.0, 7.0)
    # Another device's operations hide nothing.
    swapped = [DeviceTimeline(operations=b.operations, collectives=a.collectives) for a, b in ((first, second),)]
    assert Timeline(devices=tuple(swapped)).hidden == 0.0
    assert Timeline(devices=(DeviceTimeline(operations=(work(0.0, 1.0),), collectives=()),)).hidden is None


def test_waiting_for_other_devices_is_told_from_sending():
    # It waits for 2 s and computes during one of them. It does not wait while another collective sends.
    alone = DeviceTimeline(operations=(work(0.0, 1.0),), collectives=(work(0.0, 3.0, met=2.0),))
    assert Timeline(devices=(alone,)).waiting_seconds == pytest.approx(1.0)
    beside = DeviceTimeline(operations=(), collectives=(work(0.0, 3.0, met=2.0), work(0.5, 1.5)))
    assert Timeline(devices=(beside,)).waiting_seconds == pytest.approx(1.0)


MESHES = {"flat": {"batch": 4}, "hybrid": {"replica": 2, "batch": 2}, "two axes": {"batch": 2, "model": 2}}


@pytest.fixture(scope="module", params=[*MESHES, "parts"])
def profile(request):
    options = {"microbatches": 2} if request.param == "parts" else {}
    hidden = [keras.layers.Dense(256, activation="tanh") for _ in range(3)]
    model = tfshard.Sequential([keras.Input((256,)), *hidden])
    if request.param == "two axes":
        options = {"layout_map": "auto"}
    mesh = tfshard.create_mesh(**MESHES.get(request.param, MESHES["flat"]))
    strategy = tfshard.ShardedStrategy(mesh, analyzer=None, **options)
    model.compile("adam", "mse", strategy=strategy)
    x = np.ones((16, 256), "float32")
    return tfshard.profile_step(model, (x, x))


@pytest.mark.sweep(1)
def test_each_device_has_its_operations_and_all_collectives(profile):
    devices = profile.timeline.devices
    assert len(devices) == 4
    assert [len(device.collectives) for device in devices] == [profile.count()] * 4
    kinds = [sorted(each.kind for each in device.operations) for device in devices]
    assert any("MatMul" in kind for kind in kinds[0]) and all(each == kinds[0] for each in kinds)
    for device in devices:
        for each in (*device.operations, *device.collectives):
            assert 0 <= each.begin <= each.met <= each.end <= profile.timeline.seconds < profile.seconds
    assert 0 <= profile.hidden <= 1
    assert f"{profile.hidden:.0%} of collectives hidden" in " ".join(str(profile).split())
    numbers = profile.to_dict()["timeline"]
    assert numbers["hidden"] == profile.hidden and "devices" not in numbers


def test_a_saved_timeline_is_a_trace_of_which_rows_do_not_overlap(profile, tmp_path):
    profile.timeline.save(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    expected = sum(len(device.operations) + len(device.collectives) for device in profile.timeline.devices)
    assert len(spans) == expected and {each["pid"] for each in spans} == {0, 1, 2, 3}
    assert {each["args"]["name"] for each in events if each["ph"] == "M"} >= {"device 3", "operations", "collectives"}
    rows = {}
    for each in spans:
        if each["cat"] == "collectives":
            rows.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
    for row in rows.values():
        row.sort()
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in zip(row, row[1:], strict=False))
