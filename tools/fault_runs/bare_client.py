"""Run a client without TensorFlow: it joins, agrees and takes steps like `client.py`, but computes nothing.

The client sends the same messages as a client with TensorFlow. In a step, all clients wait for each other, as in a
collective: a client that waits for a dead client hangs.
"""

import os
import socket
import time

import bare  # noqa: F401
import kinds
import numpy as np
from absl import app, flags

from tfshard.devices import clients
from tfshard.errors import MeshError, StrategyError

_FLAGS = flags.FLAGS


def exchange(here: clients.Clients) -> None:
    """Wait in an operation that needs all clients."""
    with here.operation("the exchange of 4 bytes for each device"):
        time.sleep(10000)


def main(argv: list[str]) -> None:
    del argv
    fault, at_step = kinds.fault()
    kinds.before_joining(fault)
    settings = clients.Settings.from_environment()
    assert settings is not None
    kinds.at_joining(fault, clients)
    here = clients.join(settings)
    jobs = here.register({"devices": 1})
    # TensorFlow's server listens on this port, too.
    server = socket.create_server(("", int(jobs[here.rank].rpartition(":")[2])))
    print(f"port {server.getsockname()[1]}", flush=True)
    with here.operation("the start of DTensor"):
        if fault == "kill_starting":
            kinds.kill()
    here.barrier("the start of DTensor")
    here.agree("the mesh", {"axes": {"batch": 1 if fault == "mesh" else -1}}, error=MeshError)
    values = {"sequential/up/kernel": int(fault == "seed")}
    here.agree("the initial values of model 'sequential'", values, error=StrategyError)
    traced: set[str] = set()
    for step in range(1, _FLAGS.steps + 1):
        batch = np.full(4, step + (1000 if fault == "batches" and step > at_step else 0))
        here.note_value(batch, batch)
        with here.step("training step", [batch], traced):
            here.agree("the gradients", {})
        print(f"step {step} loss {1 / step:.9g} clients {here.count}", flush=True)
        if fault and step == at_step:
            kinds.in_training(fault, lambda: exchange(here))
        time.sleep(max(_FLAGS.step_seconds, 0.01))
    server.close()


if __name__ == "__main__":
    assert "TFSHARD_CONTROL" in os.environ, "It is started by a launcher."
    app.run(main)
