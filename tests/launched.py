"""Starts launched runs for tests, and finds what their clients said."""

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
    """A process of Python, to its end."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT
    )


def launch(*arguments: str, bare: bool = True) -> subprocess.CompletedProcess:
    """A launched run, to its end.

    Args:
        arguments: Of `tfshard launch`.
        bare: By the same launcher in a process that does not import TensorFlow, which it does not need; else by the
            command line, which takes more flags.
    """
    command = watched.BARE_LAUNCH if bare else watched.LAUNCH
    return run(*command[1:], *arguments)


def said(done: subprocess.CompletedProcess, word: str) -> list[str]:
    """What stands behind a word, in each line that has it."""
    return [line.partition(word)[2].strip() for line in done.stdout.splitlines() if word in line]


def found(done: subprocess.CompletedProcess, num_clients: int) -> list[dict]:
    """The `FOUND` lines of each client, by name."""
    clients = [said(done, f"[client {client}] FOUND ") for client in range(num_clients)]
    return [dict(json.loads(line) for line in lines) for lines in clients]


def plain_losses(steps: int, *, rate: float = 1e-2, of: int | None = None) -> list[float]:
    """What plain Keras says after each step of the model of tools/fault_runs on one device: the mean so far.

    Args:
        steps: How many.
        rate: Of learning.
        of: How many batches there are; by default as many.
    """
    return losses(steps, rate=rate, of=of, jit_compile=False)


def losses(steps: int, *, rate: float = 1e-2, of: int | None = None, **options) -> list[float]:
    """The same in this process as `options` of `compile` say, with a strategy or without."""
    said: list[float] = []
    keras.utils.set_random_seed(0)
    trained = model.build()
    if "strategy" in options:
        trained = tfshard.as_distributed(trained)
    trained.compile(keras.optimizers.Adam(rate), "mse", **options)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: said.append(float(logs["loss"])))
    trained.fit(model.batches(of or steps).take(steps), shuffle=False, verbose=0, callbacks=[note])
    return said
