"""Check `environment`: versions, NCCL, hosts, devices and their memory."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfshard import __version__, _private, collectives, tables
from tfshard.devices import clients, gpus, startup
from tfshard.doctor.check_log import CheckLog, CheckRequest

_PACKAGES = ("tensorflow", "keras", "keras-hub", "numpy")
_NOT_INSTALLED = "not installed"
# The name of NCCL's version, beside the names of its environment variables.
_NCCL_VERSION = "version"


def versions() -> dict[str, str]:
    """Return the versions of Python, tfshard and the packages that tfshard uses."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "tfshard": __version__, **found}


def _version(name: str) -> str:
    try:
        return _private.package_version(name)
    except importlib.metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def nccl() -> dict[str, str]:
    """Return NCCL's version, if NCCL is installed, and NCCL's environment variables, if any are set."""
    version = gpus.nccl_version()
    return ({} if version is None else {_NCCL_VERSION: version}) | gpus.nccl_variables()


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Log versions, NCCL, hosts and devices of all clients. Different versions of NCCL are a fault."""
    del request
    found = [json.loads(text) for text in texts_of_all(json.dumps(_facts(started)))]
    for name, version in found[0]["versions"].items():
        log.row("Versions", package=name, version=version)
    for client, facts in enumerate(found):
        for name, value in facts["nccl"].items():
            log.row("NCCL", client=client, name=name, value=value)
        host = facts["host"]
        log.row("Processes", client=client, **host)
        for number, device in enumerate(facts["devices"]):
            log.row(
                "Devices", device=client * started.local_devices + number, client=client, host=host["host"], **device
            )
    _compare_nccl(log, [facts["nccl"] for facts in found])
    if text := found[0]["links"]:
        log.note(f"nvidia-smi topo -m of client 0:\n{text}")
    hosts = len({facts["host"]["host"] for facts in found})
    log.summarize(
        f"{started.device_type} devices: {started.num_devices}, processes: {started.num_clients}, hosts: {hosts}"
    )


def _compare_nccl(log: CheckLog, of_clients: Sequence[Mapping[str, str]]) -> None:
    """Log differences of NCCL between clients. Variables may differ, such as the names of network interfaces."""
    names = sorted({name for each in of_clients for name in each})
    different = [name for name in names if len({each.get(name) for each in of_clients}) > 1]
    if _NCCL_VERSION in different:
        log.fault("Clients have different versions of NCCL: see the table NCCL.")
        different.remove(_NCCL_VERSION)
    if different:
        log.note(f"Environment variables that differ between clients: {', '.join(different)}. See the table NCCL.")


def _facts(started: startup.Runtime) -> dict[str, object]:
    return {
        "versions": versions(),
        "nccl": nccl(),
        "host": {
            "host": platform.node(),
            "pid": os.getpid(),
            "cores": os.cpu_count(),
            "memory": tables.size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "visible GPUs": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        },
        "devices": _devices(started),
        "links": (gpus.smi("topo", "-m") or "") if started.device_type == "GPU" else "",
    }


def _devices(started: startup.Runtime) -> list[dict[str, str]]:
    """Return the name, the model and the memory of each local device."""
    names = [device.name for device in tf.config.list_logical_devices(started.device_type)][: started.local_devices]
    if started.device_type != "GPU":
        return [{"name": name, "model": started.device_type, "memory": "the host's"} for name in names]
    # Not run: needs GPUs.
    query = gpus.smi("--query-gpu=name,memory.total", "--format=csv,noheader") or ""
    cards = cards_of(len(names), query, os.environ.get(gpus.VISIBLE))
    return [
        {"name": name, "model": model, "memory": memory} for name, (model, memory) in zip(names, cards, strict=True)
    ]


def cards_of(count: int, query: str, visible: str | None) -> list[tuple[str, str]]:
    """Return the model and the memory of each GPU of this process.

    If CUDA_VISIBLE_DEVICES does not name enough GPUs by their numbers, each GPU has all models of the machine.

    Args:
        count: The number of GPUs.
        query: nvidia-smi's lines with the model and the memory of all GPUs of the machine.
        visible: The value of CUDA_VISIBLE_DEVICES, or None if it is not set.

    >>> cards_of(2, "H200, 141 GiB\\nH200, 141 GiB\\nA2, 15 GiB", "2,0")
    [('A2', '15 GiB'), ('H200', '141 GiB')]
    >>> cards_of(1, "H200, 141 GiB\\nA2, 15 GiB", "GPU-5ebe9f43")
    [('H200 or A2', '141 GiB or 15 GiB')]
    """
    cards = [line.rpartition(", ") for line in query.splitlines() if line]
    names = gpus.visible(visible) if visible is not None else [str(number) for number in range(len(cards))]
    numbers = [int(name) for name in names if name.isdigit() and int(name) < len(cards)]
    if len(numbers) == len(names) >= count:
        return [(cards[number][0], cards[number][2]) for number in numbers[:count]]
    models, memories = ({card[at]: None for card in cards} for at in (0, 2))
    return [(" or ".join(models) or "GPU", " or ".join(memories) or "unknown")] * count


def texts_of_all(text: str) -> list[str]:
    """All-gather a text of each client. All clients call this."""
    mine = np.frombuffer(text.encode(), np.uint8)
    longest = int(collectives.all_reduce(np.int64(len(mine)), "max"))
    padded = np.zeros((1, longest + 1), np.uint8)
    padded[0, : len(mine)] = mine
    return [bytes(row).rstrip(b"\0").decode() for row in collectives.all_gather(padded)]


def client_of(device: int, started: startup.Runtime) -> int:
    """Return the client of a device, by the device's number in the run."""
    return device // started.local_devices


def device_text(devices: Sequence[int], started: startup.Runtime) -> str:
    """Return the numbers of devices, with their clients in a run of several clients."""
    numbers = ", ".join(map(str, devices))
    text = f"device {numbers}" if len(devices) == 1 else f"devices {numbers}"
    if started.num_clients == 1:
        return text
    owners = sorted({client_of(device, started) for device in devices})
    return f"{text} ({'client' if len(owners) == 1 else 'clients'} {', '.join(map(str, owners))})"


def share_faults(log: CheckLog) -> None:
    """Add the faults that other clients found to client 0's log. All clients call this."""
    if clients.here().count == 1:
        return
    for text in texts_of_all(json.dumps(log.faults)):
        faults: Sequence[str] = json.loads(text)
        for fault in faults:
            log.fault(fault)
