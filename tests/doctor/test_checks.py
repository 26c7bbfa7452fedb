"""Each check of `tfshard doctor --all-devices` passes here, and names the fault that planted_faults.py plants."""

import contextlib
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import planted_faults
import tfshard
from tfshard.devices import messages, startup, transfer
from tfshard.doctor import (
    axis_bandwidth,
    check_list,
    check_process,
    collective_values,
    device_pairs,
    environment,
    failing_steps,
    parity_check,
    rank_order,
    small_models,
    step_memory,
)
from tfshard.doctor.check_log import CheckLog, CheckRequest
from tfshard.doctor.device_pairs import PairBandwidth
from tfshard.planning import Link, Links

FOUR = {"batch": 4}
TWO_BY_TWO = {"batch": 2, "model": 2}


def checked(function, *meshes: dict[str, int], **options) -> CheckLog:
    """Return the log of a check that ran in this process."""
    log = CheckLog()
    request = CheckRequest(function="", folder="", seconds=0.0, meshes=meshes, **options)
    function(log, tfshard.initialize(), request)
    return log


# --- faults ------------------------------------------------------------------------------------------


def test_permuted_ranks_are_named(monkeypatch):
    assert checked(rank_order.run, FOUR, TWO_BY_TWO).faults == []
    planted_faults.permute_ranks(monkeypatch.setattr)
    permuted = checked(rank_order.run, FOUR, TWO_BY_TWO)
    assert [row["order"] for row in permuted.tables["Ranks"]] == ["permuted", "permuted"]
    assert [fault.split(": ")[0] for fault in permuted.faults] == ["Mesh batch=4", "Mesh batch=2 model=2"]
    assert "in another order" in permuted.faults[0] and "CPU:3', '/job:localhost" in permuted.faults[0]


def test_a_slow_link_is_named(monkeypatch):
    planted_faults.slow_a_link(monkeypatch.setattr)
    log = checked(device_pairs.run)
    assert len(log.tables["Pairs"]) == 6
    assert any("Slow link within a process between devices 1, 3: " in fault for fault in log.faults)


def test_a_wrong_result_of_a_collective_is_named_with_its_device(monkeypatch):
    assert checked(collective_values.run, TWO_BY_TWO, FOUR).faults == []
    planted_faults.damage_a_result(monkeypatch.setattr)
    log = checked(collective_values.run, TWO_BY_TWO, FOUR)
    assert len(log.faults) == len(log.tables["Values"]) == 3 * len(collective_values.KINDS) - 2
    assert log.faults[0] == "all-reduce over axis 'batch' of mesh batch=2 model=2 is wrong on device 1."


@pytest.mark.parametrize(
    ("kind", "operation"),
    [("all-gather in groups", "CollectiveGatherV2"), ("all-to-all in groups", "CollectiveAllToAllV2")],
)
def test_collectives_in_groups_run_the_collectives_of_their_names(kind, operation):
    mesh = tfshard.create_mesh(**FOUR)
    _, layout_of, run = collective_values.KINDS[kind]
    traced = tf.function(lambda x: transfer.relayout(run(x, "batch", mesh), layout_of("batch"), mesh), autograph=False)
    graph = traced.get_concrete_function(tf.TensorSpec((4, 8), tf.float32)).graph
    assert operation in {each.type for each in graph.get_operations()}


def test_wrong_sums_of_gradients_are_named_with_mesh_and_stage(monkeypatch):
    planted_faults.sum_wrongly(monkeypatch.setattr)
    monkeypatch.setattr(parity_check, "ZERO_STAGES", {3: ""})
    log = checked(parity_check.run, FOUR)
    assert "On mesh batch=4 at ZeRO stage 3, weights differ from those on one device by" in "".join(log.faults)


def test_links_slower_than_expected_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(axis_bandwidth, "SIZES", (1024, 4096))
    expected = tmp_path / "links.json"
    Links.of(devices_per_host=2, inside=Link(latency=0.0, bandwidth=1e15)).save(expected)
    log = checked(axis_bandwidth.run, expected=str(expected))
    assert len(log.tables[axis_bandwidth.ALL]) == 4
    assert [fault.partition(" has ")[0] for fault in log.faults] == [
        f"Slow link inside hosts: {kind}" for kind in ("all-gather", "all-reduce", "all-to-all")
    ]


def test_a_peak_above_the_plan_is_named(monkeypatch):
    monkeypatch.setattr(step_memory, "_STAGES", (0,))
    monkeypatch.setattr(step_memory, "_TRIES", 1)
    monkeypatch.setattr(step_memory, "_measured", lambda started, profile: 1 << 40)
    log = checked(step_memory.run)
    assert log.faults[0].startswith("At ZeRO stage 0, a device has 1.00 TiB at the peak of a step. The plan predicts")


@pytest.mark.parametrize(
    ("case", "error"), [("nan-input", "InvalidArgumentError"), ("operation", "UnsupportedOperationError")]
)
def test_a_failing_step_raises_its_cause_and_the_next_step_trains(case, error):
    log = checked(failing_steps.run, case=case)
    assert log.faults == [] and log.headline.startswith("1 of 1 raised")
    assert log.tables["Failing steps"][0]["error"] == error


def test_a_step_that_does_not_fail_or_raises_something_else_is_named(monkeypatch):
    steps = {
        "good": ("a good step", lambda model, x, y: model.train_on_batch(x, y)),
        "other": ("another error", lambda model, x, y: model.train_on_batch(x, y, no_such_argument=1)),
    }
    monkeypatch.setattr(failing_steps, "STEPS", {
        name: failing_steps.FailingStep(
            title=title, error="TypeError", words="planted", fail=fail, build=failing_steps._checked
        )
        for name, (title, fail) in steps.items()
    })  # fmt: skip
    first, second = checked(failing_steps.run).faults
    assert first == "A step raised no error: a good step."
    assert second.startswith("A step raised another error, TypeError: ") and second.endswith("(another error)")


def test_a_step_after_a_failed_step_that_fails_too_is_named(monkeypatch):
    def raises(*batch: np.ndarray) -> float:
        raise ValueError("a planted error")

    def failing(title: str, next_step) -> failing_steps.FailingStep:
        def fail(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
            model.train_on_batch = next_step
            raises(x, y)

        return failing_steps.FailingStep(
            title=title, error="ValueError", words="planted", fail=fail, build=failing_steps._checked
        )

    steps = {"a": failing("first", raises), "b": failing("second", lambda x, y: np.nan)}
    monkeypatch.setattr(failing_steps, "STEPS", steps)
    log = checked(failing_steps.run)
    assert log.faults == [
        "The step after the failed step raised ValueError: a planted error (first)",
        "The step after the failed step has the loss nan (second)",
    ]
    assert [row["next step"] for row in log.tables["Failing steps"]] == ["fails", "fails"]
    assert log.headline.startswith("0 of 2")


def test_a_step_that_gpus_compute_without_an_error_is_skipped_there(capsys):
    request = CheckRequest(function="", folder="", seconds=0.0, case="id")
    log = CheckLog()
    failing_steps.run(log, startup.Runtime(device_type="GPU", num_devices=4, num_clients=2), request)
    assert log.faults == [] and log.notes == [capsys.readouterr().out.strip()]
    assert log.notes[0].startswith(failing_steps.SKIPPED)


def test_ten_steps_fail():
    assert len(failing_steps.STEPS) == 10


# --- pairs -------------------------------------------------------------------------------------------


def pair(first: int, second: int, bandwidth: float, kind: str = "between hosts") -> PairBandwidth:
    return PairBandwidth(first=first, second=second, kind=kind, bandwidth=bandwidth)


def test_links_are_compared_with_links_of_their_kind():
    between = [pair(0, 2, 1.0), pair(0, 3, 1.1), pair(1, 2, 0.9), pair(1, 3, 1.0)]
    inside = [pair(0, 1, 100.0, "within a process"), pair(2, 3, 90.0, "within a process")]
    assert device_pairs.slow_pairs([*between, *inside]) == {}
    assert list(device_pairs.slow_pairs([*between[:3], pair(1, 3, 0.2), *inside])) == [pair(1, 3, 0.2)]


def test_a_device_whose_links_are_all_slow_is_named():
    """Of three hosts, one has a slow cable: two of three links are slow."""
    measured = [pair(0, 1, 10.0), pair(0, 2, 1.0), pair(1, 2, 1.0)]
    slow = device_pairs.slow_pairs(measured)
    assert [(each.first, each.second) for each in slow] == [(0, 2), (1, 2)]
    started = tfshard.initialize()
    assert device_pairs._in_common(slow, measured, started) == ["All links between hosts of device 2 are slow."]


def test_a_pair_of_gpus_of_one_process_copies_and_other_pairs_send_messages(monkeypatch):
    """Messages of GPUs use the CPU device of their client: two GPUs of one client would be one device in a group."""
    used: list[str] = []
    monkeypatch.setattr(device_pairs, "_copy_there_and_back", lambda *arguments: used.append("copy"))
    monkeypatch.setattr(device_pairs, "_send_there_and_back", lambda *arguments: used.append("message"))
    monkeypatch.setattr(device_pairs.tf, "device", lambda name: contextlib.nullcontext())
    for kind, ends in (("GPU", (True, True)), ("GPU", (True, False)), ("GPU", (False, True)), ("CPU", (True, True))):
        names = [f"/job:localhost/replica:0/task:0/device:{kind}:{number}" for number in (0, 1)]
        device_pairs._round_trip(*names, ends)
    assert used[:: device_pairs._REPEATS + 1] == ["copy", "message", "message", "message"]


def test_a_copy_ends_where_it_began():
    first, second, *_ = messages.devices_of(tfshard.create_mesh(batch=4))
    with tf.device(first):
        value = tf.range(8.0)
    copied = device_pairs._copy_there_and_back(value, first, second)
    assert copied.device == first and copied.numpy().tolist() == value.numpy().tolist()


def test_rings_of_neighbours_are_measured_on_many_devices():
    pairs = device_pairs.pairs_of(64, (1, 8))
    assert {(0, 1), (0, 63), (0, 8), (0, 56)} <= set(pairs) and len(pairs) == 128
    assert {device for each in pairs for device in each} == set(range(64))


# --- the environment, and the models -----------------------------------------------------------------


def test_the_environment_lists_versions_devices_and_nccl(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    log = checked(environment.run)
    assert [row["device"] for row in log.tables["Devices"]] == [0, 1, 2, 3]
    assert {"package": "keras", "version": keras.__version__} in log.tables["Versions"]
    assert {"client": 0, "name": "NCCL_DEBUG", "value": "INFO"} in log.tables["NCCL"]


@pytest.mark.parametrize(
    ("second", "faults", "notes"),
    [
        ({"version": "2.27.7", "NCCL_SOCKET_IFNAME": "eth0"}, 0, []),
        ({"version": "2.27.7", "NCCL_SOCKET_IFNAME": "eth1"}, 0, ["NCCL_SOCKET_IFNAME"]),
        ({"version": "2.27.7"}, 0, ["NCCL_SOCKET_IFNAME"]),
        ({"version": "2.21.5", "NCCL_SOCKET_IFNAME": "eth0"}, 1, []),
        ({"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO"}, 1, ["NCCL_DEBUG"]),
    ],
)
def test_different_versions_of_nccl_are_a_fault_and_different_variables_a_note(second, faults, notes):
    log = CheckLog()
    environment._compare_nccl(log, [{"version": "2.27.7", "NCCL_SOCKET_IFNAME": "eth0"}, second])
    assert len(log.faults) == faults
    assert [note.partition(": ")[2].partition(". See")[0] for note in log.notes] == notes


@pytest.mark.parametrize(
    ("count", "visible", "models"),
    [
        (2, None, ["A", "B"]),
        (2, "2,1", ["C", "B"]),
        (1, "1,0", ["B"]),
        (1, "GPU-1", ["A or B or C"]),
        (2, "0,GPU-1", ["A or B or C"] * 2),
        (2, "0,7", ["A or B or C"] * 2),
        (1, "MIG-1", ["A or B or C"]),
    ],
)
def test_gpus_have_the_models_that_cuda_visible_devices_names(count, visible, models):
    found = environment.cards_of(count, "A, 80 MiB\nB, 40 MiB\nC, 20 MiB\n", visible)
    assert [model for model, _ in found] == models
    assert environment.cards_of(1, "", visible) == [("GPU", "unknown")]


def test_each_small_model_has_samples_for_each_device():
    for build in small_models.MODELS.values():
        model, (x, y) = build(4)
        assert len(x) == len(y) == 4 * small_models.SAMPLES
        assert np.shape(model.predict_on_batch(x))[0] == len(x)


# --- the list and the log ----------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 64])
@pytest.mark.parametrize("is_launched", [False, True])
def test_every_check_has_a_function_and_a_name_of_its_own(devices, is_launched):
    checks = check_list.checks_of(devices, (devices, devices), is_launched=is_launched)
    assert checks[0] == check_list.FIRST
    functions = set(check_process.FUNCTIONS)
    assert {each.function for each in checks} == (
        functions - set(check_list._NEEDS_SEVERAL_DEVICES) if devices == 1 else functions
    )
    assert len({each.name for each in checks}) == len(checks)
    for each in checks:
        for axes in each.meshes:
            assert np.prod(list(axes.values())) == devices


def test_a_name_selects_its_checks_and_those_they_compare_with():
    checks = check_list.checks_of(4, (2, 4), is_launched=True)
    assert [each.name for each in check_list.selected(checks, ["scaling-4"])] == ["scaling-1", "scaling-4"]
    assert len(check_list.selected(checks, ["failing-steps"])) == 10
    assert check_list.selected(checks, ["fail"]) == []


def test_steps_are_timed_on_whole_processes_and_hosts():
    assert check_list.device_counts(64, (8, 8)) == [1, 2, 4, 8, 16, 32, 64]
    assert check_list.device_counts(12, (3, 6)) == [1, 2, 12]


def test_a_log_is_on_the_disk_after_each_entry(tmp_path):
    log = CheckLog(tmp_path / "log.json")
    log.row("A table", name="a", value=1.5)
    log.fault("A fault.")
    log.fault("A fault.")
    read = CheckLog.read(tmp_path)
    assert (read.tables, read.faults, read.notes) == ({"A table": [{"name": "a", "value": 1.5}]}, ["A fault."], [])
    assert json.loads((tmp_path / "log.json").read_text()) == log.to_dict()
    assert CheckLog.read(pathlib.Path("nowhere")).to_dict() == CheckLog().to_dict()
