"""`initialize(devices=)` chooses devices by name, and the memory of a device is found or given."""

import os
import subprocess
import sys

import pytest

import fake_gpus
import tfshard
from tfshard import _private
from tfshard.devices import device_memory, gpus, startup
from tfshard.errors import InitializationError


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that gives this machine GPUs that TensorFlow has not listed, and a CUDA_VISIBLE_DEVICES."""

    def make(number: int, value: str | None = None) -> None:
        monkeypatch.setenv("PATH", fake_gpus.path(tmp_path, number))
        monkeypatch.setattr(_private, "devices_are_listed", lambda: False)
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
        if value is not None:
            monkeypatch.setenv(gpus.VISIBLE, value)

    gpus.smi.cache_clear()
    device_memory._of_gpus.cache_clear()
    # Restores the variable that the test sets.
    monkeypatch.setenv(gpus.VISIBLE, "")
    yield make
    gpus.smi.cache_clear()
    device_memory._of_gpus.cache_clear()


@pytest.mark.parametrize(
    ("value", "names", "expected"),
    [
        (None, ["GPU:0", "GPU:3"], "0,3"),
        (None, ["gpu:3", "GPU:0"], "3,0"),
        ("4,5,6,7", ["GPU:3", "GPU:0"], "7,4"),
        ("GPU-a,GPU-b", ["GPU:1"], "GPU-b"),
    ],
)
def test_tensorflow_sees_only_the_named_gpus_in_their_order(value, names, expected, machine):
    machine(8, value)
    startup._see_only(startup._checked_names(names, None, None))
    assert os.environ[gpus.VISIBLE] == expected


REFUSED = {
    "another type": (["TPU:0"], {}, r"named by its type and number.*On TPUs use num_devices.*Wrong: \['TPU:0'\]"),
    "no number": (["GPU"], {}, r"GPUs here: GPU:0, GPU:1; logical CPU devices: CPU:0, CPU:1 and so on"),
    "a number": ([0], {}, r"Wrong: \[0\]"),
    "a text": ("GPU:0", {}, r"must be a list of names, such as \['GPU:0', 'GPU:3'\]"),
    "nothing": ([], {}, "must be a list of names"),
    "two types": (["GPU:0", "CPU:0"], {}, "All devices of a mesh have one type"),
    "one twice": (["GPU:1", "gpu:01"], {}, "A device stands twice"),
    "a number beside": (["GPU:0"], {"num_devices": 1}, "leave num_devices and device_type out"),
    "a type beside": (["GPU:0"], {"device_type": "GPU"}, "leave num_devices and device_type out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_names_are_refused_with_the_devices_there_are(case, machine):
    machine(2)
    devices, options, message = REFUSED[case]
    with pytest.raises(InitializationError, match=f"(?s){message}.*Received: devices="):
        tfshard.initialize(devices=devices, **options)


def test_a_gpu_that_is_not_here_is_refused(machine):
    machine(2)
    with pytest.raises(
        InitializationError, match=r"not here. GPUs here: GPU:0, GPU:1; .*Received: devices=\['GPU:2'\]"
    ):
        startup._see_only(("GPU:2",))


def test_names_that_differ_from_the_running_devices_are_refused():
    with pytest.raises(InitializationError, match=r"already started.*devices=\['CPU:0', 'CPU:2'\]"):
        tfshard.initialize(devices=["CPU:0", "CPU:2"])


def test_a_launched_run_refuses_names(monkeypatch):
    monkeypatch.setattr(startup, "_runtime", None)
    monkeypatch.setattr(startup.clients.Settings, "from_environment", classmethod(lambda cls: object()))
    with pytest.raises(InitializationError, match="CUDA_VISIBLE_DEVICES=0,3 tfshard launch"):
        tfshard.initialize(devices=["CPU:0"])


@pytest.mark.slow
def test_named_cpu_devices_are_the_devices_of_the_mesh():
    done = run(
        "import tfshard; print(tfshard.initialize(devices=['CPU:2', 'CPU:0']), tfshard.create_mesh(batch=-1).shape());"
        "print(tfshard.initialize(devices=['CPU:2', 'CPU:0'], memory_per_device='1GiB').memory_per_device)"
    )
    assert "Runtime(device_type='CPU', num_devices=2) [2]\n1073741824" in done.stdout, done.stderr


def test_the_memory_of_a_device_is_given_or_a_part_of_the_hosts(monkeypatch):
    before = startup.current()
    try:
        found = device_memory.per_device()
        assert 0 < found.bytes <= device_memory.available_bytes() // before.num_devices
        assert f"for {before.num_devices} devices" in found.origin
        assert tfshard.initialize(memory_per_device="16MiB").memory_per_device == 16 << 20
        assert device_memory.per_device().bytes == 16 << 20
        with pytest.raises(InitializationError, match="memory_per_device must be a positive number of bytes"):
            tfshard.initialize(memory_per_device="much")
    finally:
        startup._runtime = before


def test_the_memory_left_in_a_cgroup_counts(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    monkeypatch.setattr(device_memory, "_CGROUP", tmp_path)
    assert device_memory.available_bytes() == 600000
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory.available_bytes() > 600000


def test_a_gpu_has_the_memory_that_its_driver_reports_without_tensorflows_reserve(machine):
    machine(2)
    found = device_memory._of_gpus()
    assert found.bytes == int(0.92 * ((fake_gpus.MEBIBYTES - 1800) << 20))
