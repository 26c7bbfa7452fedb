"""GPUs are counted and described without CUDA, by a driver that a fake nvidia-smi stands for."""

import ctypes
import os
import subprocess

import pytest
import tensorflow as tf

import fake_gpus
from tfshard import cli
from tfshard.devices import gpus, startup
from tfshard.doctor import parity_check


@pytest.fixture(autouse=True)
def new_answers():
    gpus.smi.cache_clear()
    yield
    gpus.smi.cache_clear()


def test_gpus_are_counted_by_nvidia_smi(tmp_path, monkeypatch):
    for number in (1, 3, 16):
        gpus.smi.cache_clear()
        monkeypatch.setenv("PATH", fake_gpus.path(tmp_path / str(number), number))
        assert gpus.count() == number
        assert not gpus.has_partitions()
        assert gpus.memories() == [fake_gpus.MEBIBYTES << 20] * number


@pytest.mark.parametrize("state", ["missing", "failing"])
def test_without_nvidia_smi_gpus_are_counted_in_proc(state, tmp_path, monkeypatch):
    driver, devices = tmp_path / "gpus", tmp_path / "dev"
    devices.mkdir()
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / "empty") if state == "missing" else fake_gpus.path(tmp_path, 2, fails=True)
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(gpus, "_DRIVER", driver)
    monkeypatch.setattr(gpus, "_DEVICES", devices)
    assert gpus.count() == 0
    (devices / "nvidiactl").touch()
    assert gpus.count() == 0
    (devices / "nvidia0").touch()
    assert gpus.count() is None, "there is a GPU, and nobody counts it"
    for number in range(3):
        (driver / f"0000:0{number}:00.0").mkdir(parents=True)
    assert gpus.count() == 3
    assert gpus.memories() == [] and not gpus.has_partitions()


def test_partitions_of_a_gpu_are_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_gpus.path(tmp_path, 1, partitions=2))
    assert gpus.count() == 1 and gpus.has_partitions()


def test_facts_name_cards_links_and_nccl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_gpus.path(tmp_path, 4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setattr(gpus, "nccl_version", lambda: "2.27.7 (loaded)")
    assert gpus.facts() == [
        ("gpus", f"4 x NVIDIA H100 80GB HBM3, {fake_gpus.MEBIBYTES} MiB"),
        ("links", "NV18 between 6 pairs"),
        ("visible", "CUDA_VISIBLE_DEVICES=2,3"),
        ("nccl", "2.27.7 (loaded)"),
        ("nccl", "NCCL_ALGO=Ring"),
        ("nccl", "NCCL_DEBUG=INFO"),
    ]


def test_links_are_counted_by_kind():
    matrix = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV12\tSYS\tSYS\tPIX\t0-31\n"
        "GPU1\tNV12\t X \tSYS\tSYS\tPIX\t0-31\n"
        "GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\n"
        "GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\n"
        "NIC0\tPIX\tPIX\tSYS\tSYS\t X \t\n\nLegend:\n\n  X    = Self\n"
    )
    assert gpus.links(matrix) == {"NV12": 2, "SYS": 4}
    assert gpus.links("") == {}


class Library:
    """A loaded NCCL."""

    @staticmethod
    def ncclGetVersion(pointer) -> int:
        pointer._obj.value = 22803
        return 0


def test_the_version_of_nccl_is_that_of_the_loaded_library_or_of_the_package(monkeypatch):
    def missing(name, mode):
        assert (name, mode) == ("libnccl.so.2", os.RTLD_NOLOAD)
        raise OSError("not loaded")

    versions = {"nvidia-nccl-cu12": "2.27.7"}

    def version(package):
        if package not in versions:
            raise gpus.importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(gpus.importlib.metadata, "version", version)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpus.nccl_version() == "2.27.7 (nvidia-nccl-cu12)"
    versions.clear()
    assert gpus.nccl_version() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Library)
    assert gpus.nccl_version() == "2.28.3 (loaded)"


@pytest.mark.parametrize(
    ("mebibytes", "given", "expected"),
    [
        (81559, None, "4077"),
        (143771, None, "4096"),
        (40960, None, "2048"),
        (24564, None, None),  # Less than TensorFlow's own choice.
        (None, None, None),  # nvidia-smi does not tell.
        (81559, "100", "100"),
    ],
)
def test_memory_is_left_to_nccl(mebibytes, given, expected, monkeypatch):
    # Set first, so that the variable is not set after the test.
    monkeypatch.setenv("TF_DEVICE_MIN_SYS_MEMORY_IN_MB", given or "")
    if given is None:
        monkeypatch.delenv("TF_DEVICE_MIN_SYS_MEMORY_IN_MB")
    monkeypatch.setattr(gpus, "memories", lambda: [] if mebibytes is None else [mebibytes << 20, 200 << 30])
    startup._leave_room_for_nccl()
    assert os.environ.get("TF_DEVICE_MIN_SYS_MEMORY_IN_MB") == expected


def test_what_initialize_prints_on_gpus(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", fake_gpus.path(tmp_path, 2))
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a", "b"])
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: None)
    monkeypatch.setenv("TF_DEVICE_MIN_SYS_MEMORY_IN_MB", "4077")
    startup._print_gpus()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"tfshard: gpus: 2 x NVIDIA H100 80GB HBM3, {fake_gpus.MEBIBYTES} MiB; links: NV18 between 1"
    )
    assert line.endswith("memory growth: False; MiB left to others: 4077")


def test_doctor_prints_the_gpus_and_nccl(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", fake_gpus.path(tmp_path, 2))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setattr(parity_check, "parity", lambda: 0.0)
    assert cli._run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"gpus         2 x NVIDIA H100 80GB HBM3, {fake_gpus.MEBIBYTES} MiB" in lines
    assert "links        NV18 between 1 pairs" in lines
    assert "nccl         NCCL_DEBUG=WARN" in lines


def test_the_fake_is_run_like_a_driver(tmp_path):
    listed = subprocess.run([fake_gpus.path(tmp_path, 1).split(":")[0] + "/nvidia-smi", "-L"], capture_output=True)
    assert listed.stdout.startswith(b"GPU 0: NVIDIA H100"), "premise of the tests above"
