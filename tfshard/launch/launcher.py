"""`tfshard launch`: starts and ends the clients of a run together, as the leader or as a follower."""

import contextlib
import os
import signal
from collections.abc import Iterator

from tfshard.devices import gpus
from tfshard.launch.follower import Follower
from tfshard.launch.leader import Leader
from tfshard.launch.options import Launch, log


def launch(options: Launch) -> int:
    """Run the clients until they end.

    Returns:
        0, or the exit code of the client that failed.

    Raises:
        LaunchError: The run cannot start with these options.
    """
    _log_gpus(options)
    with signals() as received:
        if options.host_index:
            return Follower(options, received).run()
        return Leader(options, received).run()


def _log_gpus(options: Launch) -> None:
    seen = [variables.get(gpus.VISIBLE) for variables in options.gpus_of_clients]
    if seen[0] is not None:
        log(f"the clients of this host see the GPUs {' | '.join(map(str, seen))}.")
    elif gpus.VISIBLE not in os.environ and gpus.count() is None:
        log(
            "this machine has NVIDIA GPUs, but neither nvidia-smi nor /proc/driver/nvidia/gpus counts them. Set "
            f"{gpus.VISIBLE} for the launcher, which divides it among the clients."
        )


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP inside the context, so the launcher can end the run in order."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
