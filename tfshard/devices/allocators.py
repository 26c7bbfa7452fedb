"""The allocators of host memory: which one a process uses, and when it returns memory to the system.

TensorFlow's kernels on CPU use oneDNN's allocator, which keeps the memory that a step has freed. glibc keeps freed
blocks, too: each time that a large block is freed, glibc raises the size from which it maps blocks one by one, up to
32 MiB. A process then holds about twice what a step has in use (docs/measurements.md, "Memory of launched runs").
"""

import ctypes
import os
import sys

# oneDNN's own limit (mkl_cpu_allocator.h): TensorFlow takes smaller blocks from the system's allocator anyway.
_MAPPED_BYTES = 256 << 10
# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_ONEDNN = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
_MMAP, _TRIM = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
_TUNABLES = "GLIBC_TUNABLES"
# The environment of a process whose kernels, and glibc, return large blocks to the system as soon as they are freed.
SYSTEM_ALLOCATOR = {_ONEDNN: "1", _MMAP: str(_MAPPED_BYTES), _TRIM: str(_MAPPED_BYTES)}
# Pages of 2 MiB where Linux offers them: the kernel then maps large blocks with far fewer page faults.
_HUGE_PAGES = "glibc.malloc.hugetlb"


def uses_system_allocator() -> bool:
    """Return whether TensorFlow's kernels on CPU use the system's allocator, which no trace of TensorFlow records."""
    return os.environ.get(_ONEDNN, "0").lower() in ("1", "true")


def environment_of_system_allocator() -> dict[str, str]:
    """Return the environment of a process that returns the memory it has freed.

    Variables that are set already keep their value.
    """
    found = {name: os.environ.get(name, value) for name, value in SYSTEM_ALLOCATOR.items()}
    tunables = os.environ.get(_TUNABLES, "")
    if _HUGE_PAGES not in tunables:
        found[_TUNABLES] = ":".join([*([tunables] if tunables else []), f"{_HUGE_PAGES}=1"])
    return found


def return_freed_blocks() -> bool:
    """Make glibc map blocks of 256 KiB and more one by one, and unmap each when it is freed.

    Returns:
        Whether glibc does so: not where the environment sets the thresholds, nor with another C library.
    """
    is_chosen = any(name in os.environ for name in (_MMAP, _TRIM)) or "_threshold" in os.environ.get(_TUNABLES, "")
    if not sys.platform.startswith("linux") or is_chosen:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False  # Such as musl, which has no such thresholds.
    return all(library.mallopt(which, _MAPPED_BYTES) == 1 for which in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))
