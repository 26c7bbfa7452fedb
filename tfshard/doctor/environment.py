"""Check `environment`: versions, NCCL, hosts, devices and their memory."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfshard import __version__, collectives, tables
from tfshard.devices import clients, gpus, startup
from tfshard.doctor.check_log import CheckLog, CheckRequest

_PACKAGES = ("tensorflow", "keras", "keras-hub", "numpy")
_NOT_INSTALLED = "not installed"


def versions() -> dict[str, str]:
    """Return the versions of Python, tfshard and the packages that tfshard uses."""
    found = {name: package_version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "tfshard": __version__, **found}


def package_version(name: str) -> str:
    """Return the version of an installed package, or `"not installed"`."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _NOT_INSTALLED


def nccl() -> dict[str, str]:
    """Return NCCL's version, if NCCL is installed, and NCCL's environment variables, if any are set."""
    version = gpus.nccl_version()
    return ({} if version is None else {"version": version}) | gpus.nccl_variables()


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Log versions, NCCL, hosts and devices of all clients. A difference of NCCL's is a fault."""
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
    if any(facts["nccl"] != found[0]["nccl"] for facts in found):
        log.fault("Clients have different versions or environment variables of NCCL: see the table NCCL.")
    if text := found[0]["links"]:
        log.note(f"nvidia-smi topo -m of client 0:\n{text}")
    hosts = len({facts["host"]["host"] for facts in found})
    log.summarize(
        f"{started.device_type} devices: {started.num_devices}, processes: {started.num_clients}, hosts: {hosts}"
    )


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
    query = gpus.smi("--query-gpu=pci.bus_id,name,memory.total", "--format=csv,noheader") or ""
    rows = [line.split(", ") for line in query.splitlines()] or [["", "GPU", "unknown"]]
    return [
        {"name": name, "model": rows[i % len(rows)][1], "memory": rows[i % len(rows)][-1]}
        for i, name in enumerate(names)
    ]


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
