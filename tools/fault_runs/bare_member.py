"""Run a process that a cluster starts by itself, without TensorFlow: it joins the run, agrees and takes steps.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tools/fault_runs/bare_member.py --steps=3
"""

import argparse
import os
import signal
import time

import bare  # noqa: F401

from tfshard.clusters import find_run
from tfshard.devices import cluster_members


def fail(fault: str) -> None:
    """Cause a fault between two steps."""
    if fault == "raise":
        raise RuntimeError("the disk is full")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "exit":
        raise SystemExit(0)


def main() -> None:
    """Join, take steps and leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000000)
    parser.add_argument("--fault", default="")
    parser.add_argument("--client", type=int, default=1)
    parser.add_argument("--shutdown", action="store_true")
    arguments = parser.parse_args()
    run = find_run()
    assert run is not None, "It is started by a cluster."
    here = cluster_members.join(run)
    here.register({"devices": 1})
    print(f"[client {here.rank}] pid {os.getpid()}", flush=True)
    try:
        for step in range(1, arguments.steps + 1):
            with here.step("training step", [], False):
                here.agree("the gradients", {})
            print(f"[client {here.rank}] step {step} of {here.count} clients", flush=True)
            if step == 2 and here.rank == arguments.client:
                fail(arguments.fault)
            time.sleep(0.05)
    finally:
        if arguments.shutdown:
            here.leave()
    if arguments.shutdown:
        print(f"[client {here.rank}] goes on", flush=True)


if __name__ == "__main__":
    main()
