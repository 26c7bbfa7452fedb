"""Measure the resident memory of a process by the kernel's count, on Linux.

A freed tensor counts as free only if its memory returns to the system. All compared programs therefore run with
`ENVIRONMENT`: glibc maps each block of 256 KiB or more separately (M_MMAP_THRESHOLD, which glibc does not adapt once
the variable is set) and unmaps it when the block is freed. TensorFlow and PyTorch allocate there, because their
allocators would keep freed memory.
"""

import gc
import pathlib
import runpy
from collections.abc import Callable

# The file is run by its path, because the other programs run without tfshard and TensorFlow.
_ALLOCATORS = pathlib.Path(__file__).parents[2] / "tfshard" / "devices" / "allocators.py"
ENVIRONMENT: dict[str, str] = runpy.run_path(str(_ALLOCATORS))["SYSTEM_ALLOCATOR"]
_KIBIBYTE = 1024


def now() -> int:
    """Return the resident bytes."""
    gc.collect()
    return _status("VmRSS")


def between_and_at_peak(steps: Callable[[], object], before: int, devices: int) -> dict[str, float]:
    """Measure the bytes of a device before some steps, and at the peak of the steps.

    Args:
        steps: Runs steps that have run before.
        before: The resident bytes before the model was created.
        devices: The number of devices of this process.

    Returns:
        The bytes per device, with the keys `"rests"` (between steps) and `"peak"`.
    """
    rests = now() - before
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # This resets the peak to the current value.
    steps()
    return {"rests": rests / devices, "peak": (_status("VmHWM") - before) / devices}


def _status(what: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what)) * _KIBIBYTE
