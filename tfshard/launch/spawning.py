"""`spawn`: run a function in the processes of a local run, from Python and from notebooks."""

import contextlib
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle

from tfshard.clusters import variables
from tfshard.clusters.finding import CHOICE, NONE
from tfshard.devices import clients
from tfshard.errors import ClientError, LaunchError
from tfshard.launch.launcher import signals
from tfshard.launch.leader import Leader
from tfshard.launch.options import Launch

# The files in the folder of a spawn. The last two are followed by the number of a client.
CALL, RESULT, ERROR = "call", "result-", "error-"


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int = 2,
    devices_per_process: int | None = None,
    **options: Any,
) -> list[Any]:
    """Run a function in new processes that train together on this machine, and return its results.

    Each process is a client of a launched run: `function` calls `tfshard.initialize()`, makes a strategy and trains, as
    a script under `tfshard launch` does. The function and its arguments are pickled with cloudpickle, so functions of
    notebooks and lambdas work, and this process may have used TensorFlow before. It keeps the GPUs that it has taken:
    on GPUs, spawn before the first tensor (not run).

    Args:
        function: The function. Its result must be picklable.
        args: The arguments of the function, the same in each process.
        num_processes: The number of processes.
        devices_per_process: The number of devices of each process. None leaves the choice to the function.
        **options: Other attributes of `tfshard.launch.Launch`, such as `step_timeout`.

    Returns:
        The results in the order of the clients.

    Raises:
        ClientError: A process failed. All others have been ended. The message has the traceback of that process, and
            `__cause__` is its exception if that can be pickled.
        LaunchError: The options are wrong, the function cannot be pickled, or this process is a client itself.
        KeyboardInterrupt: ^C ended the processes.

    Example:

    >>> import tfshard
    >>> tfshard.spawn(lambda x: x + tfshard.collectives.rank(), args=(10,), num_processes=1, devices_per_process=1)
    [10]
    """
    if clients.here().is_launched:
        raise LaunchError(
            "tfshard.spawn starts a run of its own, and this process is a client of a run already. Call the function "
            f"directly, or spawn from a process outside of the run. Received: {function}"
        )
    if not callable(function):
        raise LaunchError(f"spawn needs a function. Received: function={function!r}")
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise LaunchError(f"args must be a tuple of the function's arguments, such as (0.01,). Received: args={args!r}")
    with tempfile.TemporaryDirectory(prefix="tfshard-spawn-") as name:  # Only this user may read it.
        folder = pathlib.Path(name)
        try:
            (folder / CALL).write_bytes(cloudpickle.dumps((sys.path, function, tuple(args))))
        except Exception as error:
            raise LaunchError(
                f"The function or its arguments cannot be pickled: {error}. Pass values that can be pickled, and make "
                f"models and strategies inside of the function. Received: function={function}, args={args!r}"
            ) from None
        launch = Launch(
            command=(sys.executable, "-m", "tfshard.launch.spawned", name),
            num_processes=num_processes,
            devices_per_process=devices_per_process,
            **options,
        )
        with _received() as received, _environment():
            code = Leader(launch, received).run()
        if received and received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        found = [folder / f"{RESULT}{client}" for client in range(num_processes)]
        if code or not all(file.exists() for file in found):
            raise _failure(folder, code)
        return [pickle.loads(file.read_bytes()) for file in found]


@contextlib.contextmanager
def _received() -> Iterator[list[int]]:
    """Collect signals. Only the main thread can collect them; in another thread, signals keep their handlers."""
    if threading.current_thread() is threading.main_thread():
        with signals() as received:
            yield received
    else:
        yield []


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Let the new processes import the package that this process has imported, and ignore a cluster around it."""
    package = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    with variables.temporary(PYTHONPATH=path, **{CHOICE: NONE}):
        yield


def _failure(folder: pathlib.Path, code: int) -> ClientError:
    """Return the error of the client that failed first, or of the run."""
    files = sorted(folder.glob(f"{ERROR}*"), key=lambda file: file.stat().st_mtime_ns)
    # After the first client's error, the other clients may have had errors of lost connections.
    for file in files:
        text, kind, pickled = pickle.loads(file.read_bytes())
        error: ClientError = ClientError(
            f"Client {file.name.removeprefix(ERROR)} raised {kind}. Its traceback:\n\n{text}"
        )
        error.__cause__ = _loaded(pickled)
        return error
    ended: ClientError = ClientError(
        "A process ended without a result. The launcher's lines above name the process and the reason. "
        f"Received: exit code {code}"
    )
    return ended


def _loaded(pickled: bytes | None) -> BaseException | None:
    with contextlib.suppress(Exception):
        found = None if pickled is None else pickle.loads(pickled)
        return found if isinstance(found, BaseException) else None
    return None
