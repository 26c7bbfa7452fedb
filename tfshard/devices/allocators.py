"""The host memory allocators of a process, and when they return memory to the system.

With oneDNN, TensorFlow's CPU kernels use oneDNN's allocator, which keeps the memory that a step has freed. Without it,
as on CPUs without VNNI or AMX, they use glibc's. glibc also keeps freed blocks: each time a large block is freed, glibc
raises the size from which it maps blocks one by one, up to 32 MiB. A process then holds about twice the memory that a
step uses (benchmarks/LOG.md, "Memory of launched runs").
"""

import ctypes
import os
import sys

# oneDNN's limit (mkl_cpu_allocator.h): TensorFlow always takes smaller blocks from the system's allocator.
_MAPPED_BYTES = 256 << 10
# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_ONEDNN = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
# glibc keeps less than these in each process that calls `initialize`. With 256 KiB for both, a step of a GPT of 5.2M
# parameters took 1.9 times the processor time, for page faults (benchmarks/LOG.md, "Page faults").
_MMAP_THRESHOLD, _TRIM_THRESHOLD = 4 << 20, 16 << 20
_MMAP, _TRIM = "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"
_TUNABLES = "GLIBC_TUNABLES"
# These variables make TensorFlow's kernels and glibc return large blocks to the system as soon as they are freed.
SYSTEM_ALLOCATOR = {_ONEDNN: "1", _MMAP: str(_MAPPED_BYTES), _TRIM: str(_MAPPED_BYTES)}
# Use pages of 2 MiB where Linux offers them: the kernel then maps large blocks with far fewer page faults.
_HUGE_PAGES = "glibc.malloc.hugetlb"


def uses_system_allocator() -> bool:
    """Return whether the environment lets oneDNN use the system allocator. TensorFlow's traces do not record it."""
    return os.environ.get(_ONEDNN, "0").lower() in ("1", "true")


def environment_of_system_allocator() -> dict[str, str]:
    """Return environment variables that make a process return freed memory.

    Variables that are already set keep their value.
    """
    found = {name: os.environ.get(name, value) for name, value in SYSTEM_ALLOCATOR.items()}
    tunables = os.environ.get(_TUNABLES, "")
    if _HUGE_PAGES not in tunables:
        found[_TUNABLES] = ":".join([*([tunables] if tunables else []), f"{_HUGE_PAGES}=1"])
    return found


def return_freed_blocks() -> bool:
    """Make glibc map blocks of 4 MiB and more one by one, and unmap each block when it is freed.

    Of smaller freed blocks, glibc keeps 16 MiB at the top of each heap.

    Returns:
        False if the environment already sets the thresholds, or with another C library.
    """
    is_chosen = any(name in os.environ for name in (_MMAP, _TRIM)) or "_threshold" in os.environ.get(_TUNABLES, "")
    if not sys.platform.startswith("linux") or is_chosen:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False  # For example musl, which lacks these thresholds.
    wanted = ((_M_MMAP_THRESHOLD, _MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD))
    return all(library.mallopt(which, size) == 1 for which, size in wanted)
