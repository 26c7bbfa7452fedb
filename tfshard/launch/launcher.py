"""`tfshard launch`: starts and ends the clients of a run together, as the leader or as a follower."""

import contextlib
import signal
from collections.abc import Iterator

from tfshard.launch.follower import Follower
from tfshard.launch.leader import Leader
from tfshard.launch.options import Launch


def launch(options: Launch) -> int:
    """Run the clients until they end.

    Returns:
        0, or the exit code of the client that failed.

    Raises:
        LaunchError: The run cannot start with these options.
    """
    with _signals() as received:
        if options.host_index:
            return Follower(options, received).run()
        return Leader(options, received).run()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP inside the context, so the launcher can end the run in order."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
