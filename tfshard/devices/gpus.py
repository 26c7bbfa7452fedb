"""NVIDIA GPUs of this machine and NCCL, as the driver reports them. Does not import TensorFlow.

The launcher counts GPUs, `initialize` and `tfshard doctor` print them. None of this has run on a machine with several
GPUs.
"""

import collections
import contextlib
import ctypes
import functools
import importlib.metadata
import os
import pathlib
import re
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = pathlib.Path("/proc/driver/nvidia/gpus")
_DEVICES = pathlib.Path("/dev")
_LIBRARY = "libnccl.so.2"
_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_SECONDS = 30.0


def count() -> int | None:
    """Return the number of NVIDIA GPUs of this machine, or of this container, without starting CUDA.

    Asks nvidia-smi, which every driver has. Without it, counts the driver's entries in /proc. Returns None if neither
    exists, but a GPU does.
    """
    listed = smi("-L")
    if listed is not None:
        return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    if _DRIVER.is_dir():
        return len(list(_DRIVER.iterdir()))
    return None if any(_DEVICES.glob("nvidia[0-9]*")) else 0


def has_partitions() -> bool:
    """Return whether a GPU is split into MIG devices, which CUDA_VISIBLE_DEVICES names by their ids."""
    return re.search(r"^\s+MIG ", smi("-L") or "", re.MULTILINE) is not None


def visible(value: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names. CUDA ends the list at the first invalid name.

    >>> visible("2,0,-1,1"), visible("")
    (['2', '0'], [])
    """
    names: list[str] = []
    for name in value.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name.strip()):
            break
        names.append(name.strip())
    return names


def memories() -> list[int]:
    """Return the bytes of memory of each GPU of this machine. Empty if nvidia-smi does not tell."""
    found = smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return [int(line) << 20 for line in (found or "").split() if line.isdigit()]


def visible_memories() -> list[int]:
    """Return the bytes of memory of each GPU that CUDA_VISIBLE_DEVICES lists by number; of all GPUs without the
    variable, or if it lists ids."""
    found = memories()
    names = visible(os.environ.get(VISIBLE, "")) or [str(number) for number in range(len(found))]
    numbers = [int(name) for name in names if name.isdigit()]
    listed = [found[number] for number in numbers if number < len(found)]
    return listed if len(listed) == len(names) else found


def facts() -> list[tuple[str, str]]:
    """Return the GPUs, their links, NCCL's version and NCCL's environment variables, each as a name and a text."""
    cards = collections.Counter((smi("--query-gpu=name,memory.total", "--format=csv,noheader") or "").splitlines())
    found = [("gpus", "; ".join(f"{number} x {card.strip()}" for card, number in cards.items()) or "none found")]
    if sum(cards.values()) > 1:
        kinds = [f"{kind} between {pairs} pairs" for kind, pairs in links(smi("topo", "-m") or "").items()]
        found.append(("links", ", ".join(kinds) or "unknown"))
    if VISIBLE in os.environ:
        found.append(("visible", f"{VISIBLE}={os.environ[VISIBLE]}"))
    found.append(("nccl", nccl_version() or "not installed"))
    return found + [("nccl", f"{name}={value}") for name, value in nccl_variables().items()]


def nccl_variables() -> dict[str, str]:
    """Return NCCL's environment variables."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}


def links(matrix: str) -> dict[str, int]:
    """Return the number of pairs of GPUs with each kind of link, such as NV18 or PHB, from `nvidia-smi topo -m`.

    >>> links("     GPU0 GPU1 GPU2 NIC0\\nGPU0  X  NV12 SYS  PHB\\nGPU1 NV12  X  SYS  PHB\\nGPU2 SYS  SYS  X  PHB\\n")
    {'NV12': 1, 'SYS': 2}
    """
    rows = [line.split() for line in re.sub(r"\x1b\[\d*m", "", matrix).splitlines()]
    rows = [row for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    pairs = [kind for number, row in enumerate(rows) for kind in row[number + 2 : len(rows) + 1]]
    return dict(collections.Counter(pairs))


def nccl_version() -> str | None:
    """Return the version of the NCCL that this process has loaded, or of the installed package."""
    with contextlib.suppress(OSError, AttributeError):
        number = ctypes.c_int()
        # The library that TensorFlow has loaded, or none.
        if ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number)) == 0:
            return f"{version_of(number.value)} (loaded)"
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{importlib.metadata.version(package)} ({package})"
    return None


def version_of(number: int) -> str:
    """Return the version that NCCL's number stands for (NCCL_VERSION in nccl.h).

    >>> version_of(22707), version_of(2708)
    ('2.27.7', '2.7.8')
    """
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


@functools.cache
def smi(*arguments: str) -> str | None:
    """Run nvidia-smi once for each command. Returns its output, or None if it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
