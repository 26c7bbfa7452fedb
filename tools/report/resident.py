"""What a process has in memory by the kernel's count. Linux only.

A tensor that is freed counts as free only if its memory goes back to the system. Every peer runs with `ENVIRONMENT`:
blocks of 256 KiB and more are mapped one by one (glibc's M_MMAP_THRESHOLD, which is fixed once it is set), and unmapped
when they are freed; TensorFlow's kernels and PyTorch's take their memory there, where theirs would keep it.
"""

import gc
import pathlib
import runpy
from collections.abc import Callable

# The file is run by its path: peers do without tfshard and TensorFlow.
_ALLOCATORS = pathlib.Path(__file__).parents[2] / "tfshard" / "devices" / "allocators.py"
ENVIRONMENT: dict[str, str] = runpy.run_path(str(_ALLOCATORS))["SYSTEM_ALLOCATOR"]
_KIBIBYTE = 1024


def now() -> int:
    """Bytes that are resident."""
    gc.collect()
    return _status("VmRSS")


def between_and_at_peak(steps: Callable[[], object], before: int, devices: int) -> dict[str, float]:
    """Runs some steps more.

    Args:
        steps: That have run before.
        before: Bytes before there was a model.
        devices: Of this process.

    Returns:
        `"rests"` and `"peak"`: bytes a device.
    """
    rests = now() - before
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # The highest so far is what there is now.
    steps()
    return {"rests": rests / devices, "peak": (_status("VmHWM") - before) / devices}


def _status(what: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what)) * _KIBIBYTE
