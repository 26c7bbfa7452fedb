"""The processes of a check: `python -m tfshard.doctor.check_process REQUEST`.

Each process writes the stacks of all its threads to the check's folder at the time limit, on SIGTERM, and when it dies
of a signal such as SIGSEGV. faulthandler does this in C, even while the main thread hangs in TensorFlow.
"""

import faulthandler
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping

from tfshard.devices import clients, startup
from tfshard.doctor import (
    axis_bandwidth,
    collective_values,
    device_pairs,
    environment,
    failing_steps,
    parity_check,
    rank_order,
    scaling,
    step_memory,
    step_overlap,
)
from tfshard.doctor.check_log import LOG_FILE, CheckLog, CheckRequest

FUNCTIONS: Mapping[str, Callable[[CheckLog, startup.Runtime, CheckRequest], None]] = {
    "environment": environment.run,
    "rank-order": rank_order.run,
    "collective-values": collective_values.run,
    "device-pairs": device_pairs.run,
    "axis-bandwidth": axis_bandwidth.run,
    "parity": parity_check.run,
    "scaling": scaling.run,
    "peak-memory": step_memory.run,
    "overlap": step_overlap.run,
    "failing-steps": failing_steps.run,
}


def stacks_file(client: int | str) -> str:
    """Return the name of the file with the stacks of a client, in the check's folder."""
    return f"stacks-{client}.txt"


def main(arguments: list[str]) -> None:
    """Run a check's part in this process.

    Args:
        arguments: The request, as JSON.
    """
    request = CheckRequest.from_json(arguments[0])
    folder = pathlib.Path(request.folder)
    client = int(os.environ.get("TFSHARD_CLIENT_ID", "0"))
    # Open until the process ends, because faulthandler keeps only the number of the file.
    stacks = (folder / stacks_file(client)).open("w", encoding="utf-8")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGTERM, stacks, all_threads=True, chain=True)
    faulthandler.dump_traceback_later(request.seconds, exit=True, file=stacks)
    started = startup.initialize(num_devices=request.num_devices)
    log = CheckLog(folder / LOG_FILE if clients.here().rank == 0 else None)
    FUNCTIONS[request.function](log, started, request)
    environment.share_faults(log)


if __name__ == "__main__":
    main(sys.argv[1:])
