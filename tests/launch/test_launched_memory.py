"""A client returns freed memory to the system, unless it uses TensorFlow's allocator (launched_memory.py)."""

import pathlib
import subprocess
import sys

import pytest

import launched
from launched_memory import BLOCK, BLOCKS
from tfshard.devices import allocators

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the thresholds are glibc's")


@pytest.fixture(scope="module")
def found():
    """The numbers that a client reports, by its allocator."""

    def client(allocator: str) -> dict:
        script = str(launched.HERE / "launched_memory.py")
        flags = ("--num_processes=1", "--devices_per_process=2", f"--allocator={allocator}")
        done = launched.launch(*flags, script, bare=False)
        assert done.returncode == 0, done.stderr
        return launched.found(done, 1)[0]["memory"]

    return {allocator: client(allocator) for allocator in ("system", "tensorflow")}


@pytest.mark.slow
def test_a_client_returns_the_memory_that_a_step_has_freed(found):
    system, tensorflow = found["system"], found["tensorflow"]
    assert system["environment"]["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] == "1"
    assert system["held"]["most"] > 0.9 * BLOCKS * BLOCK
    assert system["held"]["left"] < 0.1 * BLOCKS * BLOCK
    assert tensorflow["environment"]["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] is None


@pytest.mark.slow
def test_the_plan_predicts_what_a_client_holds():
    script = str(launched.HERE / "launched_memory.py")
    done = launched.launch("--num_processes=2", "--devices_per_process=1", script, "train")
    assert done.returncode == 0, done.stderr
    for client in launched.found(done, 2):
        held, planned = client["memory"]["held"], client["memory"]["planned"]
        assert client["memory"]["of_tensors"] > 100 << 20, "premise: tensors are a good part of what is held"
        assert 0.85 < held / planned < 1.15


@pytest.mark.slow
def test_a_profile_without_bytes_names_the_allocator_that_tells_them(found):
    assert found["system"]["peak"] is None
    assert "--allocator=tensorflow" in found["system"]["matches"]
    assert found["tensorflow"]["matches"] == "yes" and found["tensorflow"]["peak"] > 0


def test_variables_that_a_user_has_set_keep_their_value(monkeypatch):
    monkeypatch.setenv("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "0")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    environment = allocators.environment_of_system_allocator()
    assert environment["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] == "0" and environment["MALLOC_MMAP_THRESHOLD_"] == "1048576"
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.check=0:glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert "GLIBC_TUNABLES" not in allocators.environment_of_system_allocator()


# Free memory in this process's heap, left by other tests, would serve the blocks.
FREES_BLOCKS = """
import ctypes, sys

sys.path[:0] = [{root!r}, {tests!r}]
import tfshard
from launched_memory import BLOCKS, MIB, resident

BLOCK = 8 * MIB

tfshard.initialize(num_devices=1, device_type="CPU")
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
# Once such a block is freed, glibc would take blocks of up to its size from the heap, which shrinks at its end.
library.free(library.malloc(24 << 20))
start = resident()
blocks = [library.malloc(BLOCK) for _ in range(BLOCKS)]
for block in blocks:
    library.memset(block, 1, BLOCK)
assert resident() - start > 0.9 * BLOCKS * BLOCK
for block in blocks[:-1]:
    library.free(block)
left = resident() - start
library.free(blocks[-1])
assert left < 0.1 * BLOCKS * BLOCK, left
"""


def test_initialize_has_glibc_unmap_a_large_block_when_it_is_freed():
    script = FREES_BLOCKS.format(root=str(ROOT), tests=str(ROOT / "tests"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
