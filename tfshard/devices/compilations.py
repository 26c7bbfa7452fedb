"""Compile XLA programs once for all devices of this process, while the step is still being traced.

TensorFlow keeps the programs of each device apart: every device compiles every program. With a directory for compiled
programs (`--tf_xla_persistent_cache_directory` in TF_XLA_FLAGS), a device reads the file of another device. Devices
that reach a program at the same time still compile it several times. `start` compiles a program for one device in a
thread, and lets the other devices read the file. `wait` waits for that at the end of the trace.

TensorFlow finds a compiled program by the attributes of the operation and the shapes of its inputs. `start` runs an
operation with the attributes that DTensor gives the operation in the step. The name of a file depends on the name of
the operation, too.
"""

import atexit
import concurrent.futures
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.clusters import variables

_FLAGS = "TF_XLA_FLAGS"
_OPTION = "--tf_xla_persistent_cache_directory"

# True if the devices of this process share compiled programs.
_is_shared = False
# One after the other: each program runs once, on zeros.
_pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tfshard-compilation")
_waiting: list[concurrent.futures.Future[None]] = []
_lock = threading.Lock()


def share() -> None:
    """Let devices read the programs that other devices of this process compiled.

    TensorFlow reads the flags when it first lists devices. If a script has done so before, each device compiles.
    A directory that the user has set in TF_XLA_FLAGS stays, and keeps the programs for later runs.
    """
    global _is_shared
    if _is_shared:
        return
    before = os.environ.get(_FLAGS)
    if before is not None and _OPTION in before:
        _is_shared = True
        return
    is_file = before is not None and not before.lstrip().startswith("-")  # Flags in a file cannot be added to.
    if is_file or _private.devices_are_listed():
        return
    try:
        directory = tempfile.mkdtemp(prefix="tfshard-programs-")
    except OSError:
        return  # Each device compiles.
    atexit.register(_remove, directory, os.getpid())
    # A process that the script starts makes another directory.
    with variables.temporary(**{_FLAGS: " ".join([*filter(None, [before]), f"{_OPTION}={directory}"])}):
        tf.config.list_physical_devices()
    _is_shared = True


def _remove(directory: str, process: int) -> None:
    if os.getpid() == process:  # Not in a fork.
        shutil.rmtree(directory, ignore_errors=True)


def start(
    module: bytes,
    inputs: Sequence[tf.TensorSpec],
    results: Sequence[tf.TensorSpec],
    mesh: dtensor.Mesh,
    *,
    layouts: Sequence[str] = (),
) -> None:
    """Begin to compile a program for the devices of this process.

    Args:
        module: The serialized StableHLO module.
        inputs: The shape and dtype of each input.
        results: The local shape and dtype of each result.
        mesh: The mesh of the step.
        layouts: The layout of each result, if an operand in the step has a parted layout (`_private.annotated_call`).
    """
    devices = mesh.local_devices()
    if len(devices) < 2:
        return

    def run_on(device: str) -> None:
        with tf.device(device):
            zeros = [tf.raw_ops.Empty(shape=each.shape, dtype=each.dtype, init=True) for each in inputs]
            _private.run_always(_private.annotated_call(module, zeros, results, mesh.device_type(), layouts))

    # Trace here, not in the thread: all clients of a launched run have to count operations alike. Each device gets its
    # own function, because the operation has to have the same name on all devices.
    with tf.init_scope():
        first, *others = (_private.traced_apart(run_on, device) for device in devices)

    def compile_() -> None:
        try:
            first()
            # Reading a program logs lines that are no errors: of a text format, and of preferences of the processor.
            with _private.without_native_errors():
                for each in others:
                    each()
        except tf.errors.OpError:
            pass  # The step raises the error, and names the block.

    # The functions above are traced in any case: a client that does not share counts operations like the others.
    if _is_shared:
        with _lock:
            _waiting.append(_pool.submit(compile_))


def wait() -> None:
    """Wait until all programs are compiled that `start` began to compile."""
    with _lock:
        waiting, _waiting[:] = list(_waiting), []
    for each in waiting:
        each.result()
