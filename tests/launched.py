"""Start launched runs for tests, and find the output of their clients."""

import json
import os
import pathlib
import subprocess
import sys

import keras

import tfshard
from tools.fault_runs import model, watched

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent


def run(*command: str, timeout: float = 900) -> subprocess.CompletedProcess:
    """Run a Python process to its end."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
    )


def launch(*arguments: str, bare: bool = True) -> subprocess.CompletedProcess:
    """Run a launched run to its end.

    Args:
        arguments: The arguments of `tfshard launch`.
        bare: True to use the launcher in a process that does not import TensorFlow, which it does not need. Otherwise
            the command line is used, which takes more flags.
    """
    command = watched.BARE_LAUNCH if bare else watched.LAUNCH
    return run(*command[1:], *arguments)


def said(done: subprocess.CompletedProcess, word: str) -> list[str]:
    """Return the text after a word, for each line that contains the word."""
    return [line.partition(word)[2].strip() for line in done.stdout.splitlines() if word in line]


def found(done: subprocess.CompletedProcess, num_clients: int) -> list[dict]:
    """Return the `FOUND` lines of each client, by name."""
    clients = [said(done, f"[client {client}] FOUND ") for client in range(num_clients)]
    return [dict(json.loads(line) for line in lines) for lines in clients]


def plain_losses(steps: int, *, rate: float = 1e-2, of: int | None = None) -> list[float]:
    """Return the mean loss so far after each step of plain Keras, for the model of tools/fault_runs on one device.

    Args:
        steps: The number of steps.
        rate: The learning rate.
        of: The number of batches; by default one per step.
    """
    return losses(steps, rate=rate, of=of, jit_compile=False)


def losses(steps: int, *, rate: float = 1e-2, of: int | None = None, **options) -> list[float]:
    """Return the losses in this process, with the given `options` of `compile`, with or without a strategy."""
    said: list[float] = []
    keras.utils.set_random_seed(0)
    trained = model.build()
    if "strategy" in options:
        trained = tfshard.as_distributed(trained)
    trained.compile(keras.optimizers.Adam(rate), "mse", **options)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: said.append(float(logs["loss"])))
    trained.fit(model.batches(of or steps).take(steps), shuffle=False, verbose=0, callbacks=[note])
    return said
