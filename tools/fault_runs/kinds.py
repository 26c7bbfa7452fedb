"""Define the faults that a client causes in itself, before training and between steps, and the client's flags.

This module does not import TensorFlow or tfshard, because a client announces itself before it imports them.
"""

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable

from absl import flags

flags.DEFINE_integer("steps", 1000000, "Training steps.")
flags.DEFINE_float("seconds", 0.0, "Train for this number of seconds instead of --steps.")
_FAULT = flags.DEFINE_list("fault", [], "The fault in the first start and in each restart.")
_CLIENT = flags.DEFINE_integer("client", 1, "The client with the fault, by its index on its host.")
_AT_STEP = flags.DEFINE_list("at_step", ["5"], "The step before the fault, for faults in training: one for each start.")
flags.DEFINE_string("state", "", "A directory for checkpoints, to resume from after a restart.")
flags.DEFINE_integer("every_steps", 1, "Steps from one checkpoint to the next.")
flags.DEFINE_bool("async_save", False, "Write checkpoints in a thread.")
flags.DEFINE_float("step_seconds", 0.0, "Sleep after each step.")
flags.DEFINE_integer("model_axis", 1, "Size of the model axis, across clients.")
_REPLICAS = flags.DEFINE_list(
    "replicas", ["1"], "Replicas of the mesh, in the first start and in each restart; 1: a flat mesh."
)
_PIPELINE = flags.DEFINE_list(
    "pipeline", ["1"], "Size of the pipeline axis, in the first start and in each restart; 1: no pipeline axis."
)
_COMPRESSION = flags.DEFINE_list(
    "compression", ["none"], "Compression of gradients, in the first start and in each restart: none, bfloat16, int8."
)


def fault() -> tuple[str, int]:
    """Return the fault of this process, and the step after which it happens."""
    restart = int(os.environ["TFSHARD_RESTART"])
    if int(os.environ["TFSHARD_LOCAL_INDEX"]) != _CLIENT.value or restart >= len(_FAULT.value):
        return "", 0
    return _FAULT.value[restart], int(_AT_STEP.value[min(restart, len(_AT_STEP.value) - 1)])


def replicas() -> int:
    """Return the number of replicas of the mesh in this start."""
    return int(_of_this_start(_REPLICAS.value))


def pipeline() -> int:
    """Return the size of the pipeline axis in this start."""
    return int(_of_this_start(_PIPELINE.value))


def compression() -> str | None:
    """Return the gradient compression of this start."""
    name = _of_this_start(_COMPRESSION.value)
    return None if name == "none" else name


def _of_this_start(values: list[str]) -> str:
    return values[min(int(os.environ["TFSHARD_RESTART"]), len(values) - 1)]


def kill() -> None:
    """End this process like `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


def before_joining(fault: str) -> None:
    """Announce the process, and cause a fault that happens before the process joins."""
    print(f"pid {os.getpid()}, control port {os.environ['TFSHARD_CONTROL'].rpartition(':')[2]}", flush=True)
    if fault == "kill_importing":
        kill()
    if fault == "never":
        time.sleep(10000)
    if fault == "gone":
        sys.exit(7)
    if fault == "duplicate":
        os.environ["TFSHARD_CLIENT_ID"] = str((_CLIENT.value + 1) % int(os.environ["TFSHARD_NUM_CLIENTS"]))


def at_joining(fault: str, clients: types.ModuleType) -> None:
    """Cause a fault that happens while clients first wait for each other.

    Args:
        fault: The name of the fault.
        clients: The module `tfshard.devices.clients`.
    """
    if "kill_registered" in _FAULT.value and not fault:
        time.sleep(3.0)  # The other client has to wait.
    if fault == "kill_registered":
        threading.Thread(target=_kill_when_registered, args=(clients,), daemon=True).start()
    if fault == "kill_agreeing":

        def agree(self, what, value, **options):
            with self.operation(what):
                kill()

        clients.Launched.agree = agree  # type: ignore[attr-defined]


def _kill_when_registered(clients: types.ModuleType) -> None:
    while not clients.here().is_launched:
        time.sleep(0.01)
    time.sleep(0.5)
    kill()


def in_training(fault: str, alone: Callable[[], object]) -> None:
    """Cause a fault that happens after a step.

    Args:
        fault: The name of the fault.
        alone: A function that needs all clients, but that only this client calls.
    """
    if fault == "raise":
        raise RuntimeError("the disk is full")
    if fault == "exit":
        sys.exit(0)
    if fault == "exit3":
        sys.exit(3)
    if fault == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "kill":
        kill()
    if fault == "alone":
        alone()
    if fault == "slow":
        time.sleep(5)
    if fault == "loop":
        while True:
            pass
