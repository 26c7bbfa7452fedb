"""Train a tiny model in a run that a cluster started. Imported, on one device.

As a program, it takes a JSON list of runs: a name, and the environment variables of each member. It imports
TensorFlow once, and forks the members of each run, because a member's own import would take most of the time.
"""

import json
import os
import subprocess
import sys
import time

import keras
import numpy as np

import parity
import tfshard

STEPS = 2
RANDOM = np.random.RandomState(0)
BATCH = RANDOM.randn(4, 6).astype("float32"), RANDOM.randn(4, 2).astype("float32")
# The longest time of a run, in s.
SECONDS = 60


def build() -> keras.Sequential:
    """Return the model. Its initial values come from a seed, so they are equal everywhere."""
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])


def losses(model: keras.Model) -> list[float]:
    """Return the loss of each step."""
    return [float(model.train_on_batch(*BATCH)) for _ in range(STEPS)]


def plain() -> list[float]:
    """Return the losses of plain Keras."""
    model = build()
    model.compile(parity.dense_gradients(keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    return losses(model)


def train() -> dict:
    """Join the run, and return the client, the number of clients, the losses, and the layouts of the kernels."""
    started = tfshard.initialize(num_devices=2, device_type="CPU")
    model = tfshard.as_distributed(build())
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2))
    model.compile(keras.optimizers.Adam(0.1), "mse", strategy=strategy)
    found = losses(model)
    child = [sys.executable, "-c", "import os; print(os.environ.get('TFSHARD_SECRET'))"]
    secret = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
    layouts = [getattr(weight.value, "layout", None) for weight in model.trainable_weights if len(weight.shape) == 2]
    return {
        "client": started.client_id,
        "clients": started.num_clients,
        "losses": found,
        "kernels": [str(layout.storage) for layout in layouts if layout is not None],
        "secret": secret,
    }


def _member(environment: dict[str, str], output: int) -> None:
    """Run a member in the forked process, and end it as Python ends a program."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    print(f"FOUND {json.dumps(train())}", flush=True)


def run(name: str, members: list[dict[str, str]]) -> None:
    """Fork the members of a run, wait for them, and print a line of JSON for the run."""
    pids, pipes = [], []
    for environment in members:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _member(environment, write)
            sys.exit(0)
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    deadline, codes = time.monotonic() + SECONDS, {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            if time.monotonic() > deadline:
                os.kill(pid, 9)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    said = [open(pipe, errors="replace").read() for pipe in pipes]
    print(f"RUN {json.dumps([name, [codes[pid] for pid in pids], said])}", flush=True)


if __name__ == "__main__":
    for name, members in json.loads(sys.argv[1]):
        run(name, members)
