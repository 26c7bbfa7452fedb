"""The described machine that is most like the devices of this process, for `strategy="auto"`.

A description only has to rank configurations. The description of logical CPU devices was measured. The descriptions of
GPUs come from data sheets (`clusters`).
"""

import dataclasses
import os

from tfshard.devices import clients, gpus, startup
from tfshard.planning.machine import Machine

# The description of a GPU by a part of its name, as nvidia-smi prints it.
_BY_NAME = {"H100": "h100", "H200": "h100", "A100": "a100"}


def here() -> Machine | None:
    """Return the machine for the devices that DTensor was started with.

    Returns None if no description is like the devices, or if logical CPU devices are on several hosts: the network
    between the hosts is not known.
    """
    started = startup.current()
    if started is None:
        return None
    neighbours = clients.here().neighbours
    devices = started.local_devices * neighbours
    if started.device_type == "CPU":
        if started.num_clients > neighbours:
            return None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return _with_devices(dataclasses.replace(Machine.load("cpu"), cores=cores), devices)
    if started.device_type == "GPU":
        cards = gpus.smi("--query-gpu=name,memory.total", "--format=csv,noheader") or ""
        names = {name for part, name in _BY_NAME.items() if part in cards}
        return _with_devices(Machine.load(names.pop()), devices) if len(names) == 1 else None
    return None


def _with_devices(machine: Machine, devices: int) -> Machine:
    return dataclasses.replace(machine, links=dataclasses.replace(machine.links, devices_per_host=devices))
