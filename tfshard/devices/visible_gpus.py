"""The GPUs that each client of a host sees: CUDA_VISIBLE_DEVICES, from the client's index on its host."""

import os

from tfshard.devices import gpus
from tfshard.errors import LaunchError


def divided(num_processes: int, devices_per_process: int | None) -> list[dict[str, str]]:
    """Return the environment variables that give each client of this host GPUs of its own.

    TensorFlow takes the memory of every GPU that it sees, so two clients must not see the same GPU. The GPUs are those
    of the launcher's own CUDA_VISIBLE_DEVICES, else all GPUs of the machine. A client gets `devices_per_process` of
    them, or an equal part. On a machine without NVIDIA GPUs, and with an empty CUDA_VISIBLE_DEVICES, nothing is set.

    Args:
        num_processes: The number of clients on this host.
        devices_per_process: The number of devices of each client. None leaves the choice to the script.

    Returns:
        The variables of each client, by its index on this host.

    Raises:
        LaunchError: The machine has too few GPUs.
    """
    nothing: list[dict[str, str]] = [{}] * num_processes
    number, value = gpus.count(), os.environ.get(gpus.VISIBLE)
    if number == 0 or (value is None and gpus.has_partitions()):
        return nothing
    names = [str(each) for each in range(number or 0)] if value is None else gpus.visible(value)
    if not names:
        return nothing  # The user hides the GPUs, or nobody can count them.
    share = devices_per_process or len(names) // num_processes
    if share == 0 or share * num_processes > len(names):
        raise LaunchError(
            f"The clients of this host need GPUs of their own, and there are {len(names)}: {','.join(names)}. Start "
            "fewer clients, give each fewer devices, or hide the GPUs from a run on CPU devices with "
            f"{gpus.VISIBLE}= (empty). A script that splits GPUs leaves --devices_per_process out. "
            f"Received: num_processes={num_processes}, devices_per_process={devices_per_process}, "
            f"{gpus.VISIBLE}={value}"
        )
    return [{gpus.VISIBLE: ",".join(names[first : first + share])} for first in range(0, share * num_processes, share)]
