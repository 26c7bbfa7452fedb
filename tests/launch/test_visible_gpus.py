"""Each client of a host sees GPUs of its own."""

import os
import subprocess

import pytest

import fake_gpus
import launched
import tfshard
from tfshard.clusters import ClusterRun
from tfshard.devices import cluster_members, gpus, visible_gpus
from tfshard.launch.options import Launch


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that gives this machine GPUs, and the launcher a CUDA_VISIBLE_DEVICES."""

    def make(number: int, value: str | None = None, partitions: int = 0) -> None:
        monkeypatch.setenv("PATH", fake_gpus.path(tmp_path, number, partitions=partitions))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if value is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)

    gpus.smi.cache_clear()
    yield make
    gpus.smi.cache_clear()


@pytest.mark.parametrize(
    ("number", "value", "num_processes", "devices_per_process", "expected"),
    [
        (8, None, 4, 2, ["0,1", "2,3", "4,5", "6,7"]),
        (8, None, 8, 1, [str(each) for each in range(8)]),
        (8, None, 2, 2, ["0,1", "2,3"]),
        (8, None, 2, None, ["0,1,2,3", "4,5,6,7"]),
        (7, None, 2, None, ["0,1,2", "3,4,5"]),
        (1, None, 1, None, ["0"]),
        (8, "7,6,5,4", 2, 2, ["7,6", "5,4"]),
        (8, "GPU-a, GPU-b,GPU-c,GPU-d", 2, None, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
        (8, "3,1,-1,0", 2, 1, ["3", "1"]),
        (1, "MIG-a,MIG-b", 2, 1, ["MIG-a", "MIG-b"]),
        (1, "0,0", 2, 1, ["0", "0"]),
    ],
)
def test_gpus_are_divided_among_the_clients(number, value, num_processes, devices_per_process, expected, machine):
    machine(number, value)
    found = visible_gpus.divided(num_processes, devices_per_process)
    assert found == [{"CUDA_VISIBLE_DEVICES": each} for each in expected]


@pytest.mark.parametrize(
    ("number", "value", "partitions"),
    [(0, None, 0), (0, "0,1", 0), (8, "", 0), (8, "-1", 0), (8, "NoDevFiles", 0), (1, None, 2)],
)
def test_nothing_is_set_without_gpus_or_where_they_are_hidden_or_partitioned(number, value, partitions, machine):
    machine(number, value, partitions)
    assert visible_gpus.divided(2, 1) == [{}, {}]


def test_gpus_that_nobody_counts_are_divided_if_they_are_named(machine, monkeypatch):
    machine(0, "0,1")
    monkeypatch.setattr(gpus, "count", lambda: None)
    assert visible_gpus.divided(2, 1) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus.divided(2, 1) == [{}, {}]


@pytest.mark.parametrize(
    ("number", "value", "num_processes", "devices_per_process"),
    [(3, None, 2, 2), (1, None, 2, None), (8, "0,1,2", 2, 2), (8, "0", 2, None)],
)
def test_too_few_gpus_are_an_error_that_says_what_to_do(number, value, num_processes, devices_per_process, machine):
    machine(number, value)
    with pytest.raises(tfshard.errors.LaunchError) as refused:
        visible_gpus.divided(num_processes, devices_per_process)
    there = len(value.split(",")) if value else number
    assert f"there are {there}: {value or ','.join(map(str, range(number)))}." in str(refused.value)
    assert "CUDA_VISIBLE_DEVICES= (empty)" in str(refused.value)
    assert f"num_processes={num_processes}, devices_per_process={devices_per_process}" in str(refused.value)
    options = Launch(command=("python",), num_processes=num_processes, devices_per_process=devices_per_process)
    with pytest.raises(tfshard.errors.LaunchError, match="GPUs of their own"):
        tfshard.launch.launch(options)


# --- launched processes

SCRIPT = "import os; print('SEES', os.environ.get('CUDA_VISIBLE_DEVICES'))\n"


def launch(tmp_path, *flags: str, script: str = SCRIPT) -> tuple[list[str], subprocess.CompletedProcess]:
    """Return what each client sees."""
    (tmp_path / "script.py").write_text(script)
    done = launched.launch(*flags, str(tmp_path / "script.py"))
    return [line for client in (0, 1) for line in launched.said(done, f"[client {client}] SEES")], done


def test_the_variable_reaches_each_client(tmp_path, machine):
    machine(4)
    seen, done = launch(tmp_path, "--num_processes=2", "--devices_per_process=2")
    assert seen == ["0,1", "2,3"], done.stderr
    assert "tfshard launch: the clients of this host see the GPUs 0,1 | 2,3." in done.stderr
    machine(4, "3,1")
    assert launch(tmp_path, "--num_processes=2", "--devices_per_process=1")[0] == ["3", "1"]
    machine(0)
    seen, done = launch(tmp_path, "--num_processes=2", "--devices_per_process=2")
    assert seen == ["None", "None"] and "see the GPUs" not in done.stderr
    machine(3)
    seen, done = launch(tmp_path, "--num_processes=2", "--devices_per_process=2")
    assert seen == [] and done.returncode == 2
    assert "LaunchError: The clients of this host need GPUs of their own, and there are 3" in done.stderr


@pytest.mark.slow
def test_a_run_on_cpu_devices_trains_with_the_variable(tmp_path, machine):
    machine(2)
    script = (
        "import tfshard; tfshard.initialize(num_devices=2, device_type='CPU')\n"
        f"{SCRIPT}print('SUM', float(tfshard.collectives.all_reduce(1.0)))\n"
    )
    seen, done = launch(tmp_path, "--num_processes=2", "--devices_per_process=1", script=script)
    assert done.returncode == 0, done.stderr
    assert seen == ["0", "1"]
    assert launched.said(done, "SUM") == ["2.0", "2.0"]


def member(index: int, **options) -> ClusterRun:
    """Return a run of four members, two on this machine."""
    names = {
        "system": "torchrun",
        "variables": ("RANK",),
        "coordinator": "a",
        "port": 1,
        "num_members": 4,
        "num_local": 2,
    }
    return ClusterRun(**{**names, "index": index, "local_index": index % 2, "num_local": 2, **options})


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (None, {"has_own_gpus": False}, "2,3"),
        (None, {"has_own_gpus": True}, "2,3"),
        ("5,6,7,0", {"has_own_gpus": False}, "7,0"),
        ("0", {"has_own_gpus": True}, "0"),
        (None, {"num_local": 1, "local_index": 0}, None),
    ],
    ids=["not set", "not set, own", "one list for all", "own", "alone on its machine"],
)
def test_a_process_that_a_cluster_starts_takes_gpus_of_its_own(machine, monkeypatch, value, options, expected):
    machine(4, value)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    cluster_members.choose_gpus(member(3, **options))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected
