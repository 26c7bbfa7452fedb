"""The memory of a device, as far as the operating system and the driver tell it.

`strategy="auto"` chooses for this memory. `tfshard.initialize(memory_per_device=)` replaces it.
"""

import dataclasses
import functools
import os
import pathlib

import tensorflow as tf

from tfshard import tables
from tfshard.devices import clients, gpus, startup
from tfshard.errors import InitializationError

# The share of the memory that a plan may fill. On CPU, the compiler and the batches take some of the host's memory. On
# GPUs, the allocator loses some to fragments.
_CPU_SHARE, _GPU_SHARE = 0.8, 0.92
_MEMINFO = pathlib.Path("/proc/meminfo")
_CGROUP = pathlib.Path("/sys/fs/cgroup")
_MEBIBYTE = 1 << 20


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of each device of this process that a step may use.

    Attributes:
        bytes: The number of bytes.
        origin: The source of the number, for messages.
    """

    bytes: int
    origin: str


def per_device() -> DeviceMemory:
    """Return the memory of a device that DTensor was started with.

    Raises:
        InitializationError: DTensor is not started, or neither the system nor the driver tells the memory.
    """
    started = startup.current()
    if started is None:
        raise InitializationError("DTensor is not started. Call tfshard.initialize() first.")
    if started.memory_per_device is not None:
        return DeviceMemory(started.memory_per_device, "tfshard.initialize(memory_per_device=)")
    found = _of_gpus() if started.device_type == "GPU" else _of_cpus(started) if started.device_type == "CPU" else None
    if found is None:
        raise InitializationError(
            f"The memory of a {started.device_type} device is not known here. Give it: "
            f"tfshard.initialize(memory_per_device='16GiB'). Received: {started}"
        )
    return found


def available_bytes() -> int | None:
    """Return the bytes of the host that a process can still take, or None if the system does not tell.

    These are the available bytes of the kernel's count, or what the process's cgroup has left if that is less.
    """
    found = []
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:
            found.append(int(lines["MemAvailable"].split()[0]) << 10)
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
        if limit != "max":
            found.append(max(0, int(limit) - int(used)))
    except OSError:
        pass  # The root cgroup, another version of cgroups, or another system.
    if not found and "SC_AVPHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found) if found else None


def _of_cpus(started: startup.Runtime) -> DeviceMemory | None:
    """Return an equal part of the host's available memory for each logical CPU device."""
    available = available_bytes()
    if available is None:
        return None
    devices = started.local_devices * clients.here().neighbours
    share = int(_CPU_SHARE * available) // devices
    counted = "1 device" if devices == 1 else f"{devices} devices"
    origin = f"{_CPU_SHARE:.0%} of the {tables.size(available)} that the host has available, for {counted}"
    return DeviceMemory(share, origin)


@functools.cache
def _of_gpus() -> DeviceMemory | None:
    """Return the memory of the smallest GPU, or of the smallest part of a GPU that was split."""
    limits = [
        part.memory_limit
        for gpu in tf.config.list_physical_devices("GPU")
        for part in tf.config.get_logical_device_configuration(gpu) or ()
    ]
    if limits and all(limits):
        return DeviceMemory(int(_GPU_SHARE * min(limits)) * _MEBIBYTE, "the memory_limit of the smallest logical GPU")
    memories = gpus.visible_memories()
    if not memories:
        return None
    usable = min(memories) - startup.reserved_bytes()
    return DeviceMemory(int(_GPU_SHARE * usable), f"a GPU of {tables.size(min(memories))}, less TensorFlow's reserve")
