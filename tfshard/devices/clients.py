"""The clients of a run, and the agreements and operations that this process shares with them.

A process that was started alone is `Alone` and has nobody to agree with. A client of a launched run is `Launched`. Its
launcher (leader.py, follower.py) started it with `Settings` in its environment, or a cluster started it and
`cluster_members` made the settings. `startup.initialize` makes it join the run before DTensor starts. From then on,
the client reports its operations, and a thread sends heartbeats. When the connection closes, the launcher is gone, and
the client ends too.
"""

import abc
import atexit
import contextlib
import dataclasses
import os
import queue
import socket
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfshard import _private
from tfshard.devices import checksums
from tfshard.devices.channel import Connection, ControlError
from tfshard.errors import ClientError, InitializationError, ShardingError

HEARTBEAT_SECONDS = 1.0
# The exit code of a client that lost its launcher.
LOST_EXIT_CODE = 75
_RETRY_SECONDS = 0.5
# In place of the error of an operation: the client has left the run.
_LEFT = "it left the run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that `tfshard launch` passes to a client in environment variables (`TFSHARD_CLIENT_ID` etc.).

    Attributes:
        client_id: The number of this client, from 0.
        num_clients: The number of clients.
        local_index: The number of this client on its host, from 0. It does not change in a restart.
        num_local: The number of clients on this host.
        restart: The number of restarts so far.
        control: The `host:port` of the control channel.
        secret: The run's secret.
        address: The address at which the other clients reach this client. Empty: the address from which it connects to
            the control channel.
        devices_per_process: The number of devices of each client. None leaves the choice to the client.
        client_port: The port of this client's TensorFlow server. 0 picks a free port.
        first_step_timeout: The seconds that the first step, and the work before it, may take.
        seed: Keras's random seed, equal on all clients, unless the script sets another.
    """

    client_id: int
    num_clients: int
    local_index: int
    num_local: int
    restart: int
    control: str
    secret: str
    address: str
    devices_per_process: int | None
    client_port: int
    first_step_timeout: float
    seed: int

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables of a client."""
        values = dataclasses.asdict(self)
        return {f"TFSHARD_{name.upper()}": "" if value is None else str(value) for name, value in values.items()}

    @classmethod
    def from_environment(cls) -> "Settings | None":
        """Return the settings of this process, or None if no launcher started it.

        Raises:
            InitializationError: The settings are incomplete.
        """
        if "TFSHARD_CONTROL" not in os.environ:
            return None
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name = f"TFSHARD_{field.name.upper()}"
            text = os.environ.get(name)
            kind = {"control": str, "secret": str, "address": str, "first_step_timeout": float}.get(field.name, int)
            try:
                values[field.name] = None if text == "" and field.name == "devices_per_process" else kind(text)
            except (TypeError, ValueError):
                raise InitializationError(
                    f"The environment variable {name} must have the value that 'tfshard launch' sets. "
                    f"Received: {text!r}"
                ) from None
        return cls(**values)


class Clients(abc.ABC):
    """The clients of a run, as one client sees them. `here()` returns the instance of this process.

    All clients go through the same agreements and operations in the same order, each in its main thread.

    Attributes:
        rank: The number of this client, from 0.
        count: The number of clients.
        is_launched: True if a launcher started the clients, even if only one.
        local_index: The number of this client on its host, from 0.
        restarts: How often the launcher restarted the clients.
        neighbours: The number of clients on the host of this client, itself included.
    """

    rank: int
    count: int
    is_launched: bool
    local_index: int
    restarts: int
    neighbours: int = 1

    @abc.abstractmethod
    def agree(
        self,
        what: str,
        value: Mapping[str, object],
        *,
        error: type[ShardingError] = ClientError,
        hint: str = "",
        timeout: float | None = None,
    ) -> None:
        """Wait for all clients and check that they pass the same values.

        Args:
            what: The subject of the agreement, for the message.
            value: Names to JSON values. Each value must be equal on all clients that pass it.
            error: The exception to raise if the clients differ.
            hint: The remedy in that exception's message.
            timeout: The seconds to wait. Default: the limit of the first step.

        Raises:
            ClientError: A client did not come in time, or this is not the main thread.
        """

    def barrier(self, what: str = "a barrier", *, timeout: float | None = None) -> None:
        """Wait for all clients.

        Args:
            what: The name of the barrier, for messages.
            timeout: The seconds to wait. Default: the limit of the first step.

        Raises:
            ClientError: A client did not come in time, or this is not the main thread.
        """
        self.agree(what, {}, timeout=timeout)

    @abc.abstractmethod
    def operation(
        self, label: str, *, first: bool = False, limit: float | None = None, digest: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Mark the body of the context as an operation that takes all clients.

        Args:
            label: The name of the operation, equal on all clients.
            first: If True, the operation compiles something and gets the limit of a first step.
            limit: The seconds that the operation may take. Default: the launcher's limit for a step.
            digest: A checksum of values that must be equal on all clients.
        """

    @abc.abstractmethod
    def communication(self) -> contextlib.AbstractContextManager[None]:
        """Surround the run of a step's function on the devices of all clients.

        Raises:
            ClientError: An earlier error has left the devices unable to communicate.
        """

    @abc.abstractmethod
    def step(self, kind: str, batch: Sequence[object], first: bool) -> contextlib.AbstractContextManager[None]:
        """Mark the body of the context as a step, which is a numbered `operation`.

        Args:
            kind: The kind of step, such as `"training step"`. Each kind is numbered separately.
            batch: The leaves of the step's input. Leaves with a noted checksum must hold the same values on all
                clients.
            first: True if the step's function has not run on these shapes before, so DTensor compiles it.
        """

    @abc.abstractmethod
    def continue_steps(self, kind: str, done: int) -> None:
        """Continue the numbering of a kind of `step` after `done` steps of an earlier run."""

    @abc.abstractmethod
    def purpose(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Add a purpose to the labels of the operations inside the context.

        Args:
            what: The call in the user's script, such as `"model.save of model 'net'"`, equal on all clients. The
                outermost purpose counts.
        """

    @abc.abstractmethod
    def wait_for_devices(self) -> None:
        """Wait for the operations that this client has started on its devices, if other clients may wait for them."""

    @abc.abstractmethod
    def checksum(self, value: np.ndarray) -> int | None:
        """Return a checksum of a value that must be equal on all clients. None if no other client compares it."""

    @abc.abstractmethod
    def note_checksum(self, tensor: object, checksum: int) -> None:
        """Record the checksum of the host value from which a mesh tensor was made. It must be equal on all clients."""

    def note_value(self, tensor: object, value: np.ndarray) -> None:
        """Record that a mesh tensor was made from a host value that must be equal on all clients."""
        checksum = self.checksum(value)
        if checksum is not None:
            self.note_checksum(tensor, checksum)

    @abc.abstractmethod
    def leave(self) -> None:
        """Wait for the others and leave the run, in a process that goes on without them."""

    @abc.abstractmethod
    def note_start(self, *, by_script: bool) -> None:
        """Record that the client has started. Unless the script asked for it, a joint operation must follow."""


class Alone(Clients):
    """A process that was not launched. It waits for nobody."""

    rank = 0
    count = 1
    is_launched = False
    local_index = 0
    restarts = 0

    def agree(
        self,
        what: str,
        value: Mapping[str, object],
        *,
        error: type[ShardingError] = ClientError,
        hint: str = "",
        timeout: float | None = None,
    ) -> None:
        pass

    def operation(
        self, label: str, *, first: bool = False, limit: float | None = None, digest: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def communication(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def step(self, kind: str, batch: Sequence[object], first: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def continue_steps(self, kind: str, done: int) -> None:
        pass

    def purpose(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait_for_devices(self) -> None:
        pass

    def checksum(self, value: np.ndarray) -> int | None:
        return None

    def note_checksum(self, tensor: object, checksum: int) -> None:
        pass

    def leave(self) -> None:
        pass

    def note_start(self, *, by_script: bool) -> None:
        pass


class Launched(Clients):
    """A client of a launched run, connected to its launcher.

    Attributes:
        settings: The client's `Settings`.
        ends_communication: Returns whether the devices of the clients cannot communicate any more after an error of an
            operation. `startup` sets it.
        seed: Keras's random seed, from the launcher, once the client has registered.
    """

    is_launched = True

    def __init__(self, settings: Settings, *, wait: float | None = None):
        """Connect to the launcher.

        Args:
            settings: The client's settings.
            wait: How long to wait for a coordinator that has not started yet, in a process that a cluster started. None
                in a process of a launcher.

        Raises:
            InitializationError: The launcher cannot be reached, or has another secret.
        """
        self.seed = settings.seed
        # The thread whose order all clients share: the main thread, or the thread of a function that Ray runs.
        self._thread = threading.current_thread()
        self._has_launcher = wait is None
        self.rank = settings.client_id
        self.count = settings.num_clients
        self.local_index = settings.local_index
        self.restarts = settings.restart
        self.neighbours = settings.num_local
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._operations = self._agreements = 0
        self._inside = False
        self.ends_communication: Callable[[BaseException], bool] = lambda error: False
        # The operation and error after which the devices cannot communicate.
        self._last_failure: tuple[str, str] | None = None
        self._leaving = False
        self._end_text = ""
        self._purposes: list[str] = []
        self._has_to_meet = False
        self._steps: dict[str, int] = {}
        # The checksums of live tensors' values, by id, because tensors have no hash.
        self._checksums: dict[int, int] = {}
        try:
            self._connection = _connected(settings, wait or 0.0)
        except (OSError, ControlError, ValueError) as error:
            raise InitializationError(
                f"The launcher cannot be reached on its control channel: {error}. Received: {settings.control}"
            ) from None
        self.settings = dataclasses.replace(settings, address=settings.address or self._connection.own_address)
        if not self._has_launcher:
            self._connection.notice_a_dead_peer()
        threading.Thread(target=self._receive, name="tfshard-control", daemon=True).start()
        self._report_failures()

    def register(self, facts: Mapping[str, object]) -> list[str]:
        """Register this client at the launcher and wait for all other clients.

        Args:
            facts: The values that must be equal on all clients.

        Returns:
            The `host:port` of each client's TensorFlow server.

        Raises:
            InitializationError: The port is taken, or the launcher refuses.
        """
        with _reserve_port(self.settings) as port:
            host = self.settings.address
            job = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._connection.send(
                "register", client=self.settings.client_id, restart=self.settings.restart, pid=os.getpid(), job=job,
                facts=dict(facts),
            )  # fmt: skip
            threading.Thread(target=self._beat, name="tfshard-heartbeat", daemon=True).start()
            reply = self._replies.get()
        if reply["kind"] == "refused":
            self._leaving = True
            raise InitializationError(reply["reason"])
        # Exit functions run in reverse order, so this runs after all functions registered later.
        atexit.register(self._wait_for_others)
        self.seed = reply["seed"]
        jobs: list[str] = reply["jobs"]
        return jobs

    def agree(
        self,
        what: str,
        value: Mapping[str, object],
        *,
        error: type[ShardingError] = ClientError,
        hint: str = "",
        timeout: float | None = None,
    ) -> None:
        if not self._is_in_order():
            raise ClientError(
                f"Only the {self._thread_name()} of a client can take part in {what}: the order of other threads "
                f"differs between clients. Received: thread '{threading.current_thread().name}'"
            )
        number, self._agreements = self._agreements, self._agreements + 1
        wait = self.settings.first_step_timeout if timeout is None else timeout
        # The launcher ends the wait. The operation's later limit applies only if that fails.
        with self.operation(what, limit=wait + 10.0):
            self._connection.send("agree", number=number, what=what, value=dict(value), timeout=wait)
            reply = self._replies.get()
        if reply["fault"] is not None:
            missing = reply["missing"]
            raise (ClientError if missing else error)(f"{reply['fault']} {'' if missing else hint}".rstrip())

    @contextlib.contextmanager
    def operation(
        self, label: str, *, first: bool = False, limit: float | None = None, digest: int | None = None
    ) -> Iterator[None]:
        # Other threads have no order that all clients share.
        if self._inside or not self._is_in_order():
            yield
            return
        self._has_to_meet = False
        number, self._operations = self._operations, self._operations + 1
        if self._purposes:
            label = f"{label}, for {self._purposes[0]}"
        if first:
            limit = max(limit or 0.0, self.settings.first_step_timeout)
        self._check_communication(label)
        self._inside, failed, text = True, True, ""
        self._send("begin", number=number, label=label, limit=limit, digest=digest)
        try:
            yield
            failed = False
        except BaseException as error:
            text = _text_of(error)
            self._note_failure(label, error)
            raise
        finally:
            self._inside = False
            # Send the end after an error too, because the script may catch the error.
            self._send("end", number=number, failed=failed, error=text)

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        self._check_communication("a step")
        try:
            yield
        except BaseException as error:
            self._note_failure("a step", error)
            raise

    def _note_failure(self, label: str, error: BaseException) -> None:
        if self.ends_communication(error):
            self._last_failure = label, _text_of(error)

    def _check_communication(self, label: str) -> None:
        if self._last_failure is not None:
            before, text = self._last_failure
            if text is _LEFT:
                raise ClientError(
                    f"Client {self.rank} has left the run with tfshard.shutdown(), and cannot join another one. Start "
                    f"a new process. Received: {label}"
                )
            raise ClientError(
                f"Client {self.rank} cannot go on after {before} failed: TensorFlow then aborts NCCL's communicators "
                "between the clients, and cannot make them again in the same processes. Let the error end the script. "
                "'tfshard launch --max_restarts=N' then starts all clients again, and the script continues from its "
                f"last checkpoint. Received: {label}, after {text}"
            )

    def step(self, kind: str, batch: Sequence[object], first: bool) -> contextlib.AbstractContextManager[None]:
        if self.count > 1 and not self._is_in_order():
            raise ClientError(
                f"Only the {self._thread_name()} of a client can run a {kind}: the clients of a launched run must run "
                "their steps in the same order, and the order of other threads differs between clients. Run it in that "
                f"thread. Received: thread '{threading.current_thread().name}'"
            )
        number = self._steps[kind] = self._steps.get(kind, 0) + 1
        digest = checksums.of_text(str([self._checksums.get(id(leaf)) for leaf in batch]))
        return self.operation(f"{kind} {number}", first=first, digest=digest)

    def continue_steps(self, kind: str, done: int) -> None:
        self._steps[kind] = done

    @contextlib.contextmanager
    def purpose(self, what: str) -> Iterator[None]:
        if not self._is_in_order():
            yield
            return
        self._purposes.append(what)
        try:
            yield
        finally:
            self._purposes.pop()

    def wait_for_devices(self) -> None:
        _private.wait_for_devices()

    def checksum(self, value: np.ndarray) -> int | None:
        return checksums.of_array(value)

    def note_checksum(self, tensor: object, checksum: int) -> None:
        self._checksums[id(tensor)] = checksum
        # Remove the entry before another tensor can get the id.
        weakref.finalize(tensor, self._checksums.pop, id(tensor), None).atexit = False

    def note_start(self, *, by_script: bool) -> None:
        self._has_to_meet = not by_script

    def _is_in_order(self) -> bool:
        """Return whether this thread's operations have the order that all clients share."""
        return threading.current_thread() is self._thread

    def _thread_name(self) -> str:
        is_main = self._thread is threading.main_thread()
        return "main thread" if is_main else f"thread that called tfshard.initialize() ('{self._thread.name}')"

    # --- the connection -------------------------------------------------------------------------------

    def _send(self, kind: str, **fields: Any) -> None:
        try:
            self._connection.send(kind, **fields)
        except OSError:
            self._end_with_launcher()

    def _beat(self) -> None:
        wait = threading.Event()
        while not self._leaving:
            self._send("beat")
            wait.wait(HEARTBEAT_SECONDS)

    def _receive(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                if message["kind"] == "end":
                    self._end_text = str(message["text"])
                    break
                self._replies.put(message)
        except (ControlError, OSError, ValueError):
            pass  # Treat an error like a closed connection.
        self._end_with_launcher()

    def _end_with_launcher(self) -> None:
        """End the process at once. The main thread may hang in a collective, where it handles no signal or error."""
        if self._leaving:
            return
        cause = f"ends with the run: {self._end_text}" if self._end_text else "lost its launcher and ends."
        print(f"tfshard: client {self.settings.client_id} {cause}", file=sys.stderr, flush=True)
        os._exit(LOST_EXIT_CODE)

    # --- the end --------------------------------------------------------------------------------------

    def _report_failures(self) -> None:
        before = sys.excepthook

        def report(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
            if not issubclass(kind, KeyboardInterrupt) and not self._leaving:
                self._send_failure(kind.__name__, _text_of(value))
            before(kind, value, trace)

        sys.excepthook = report

    def _send_failure(self, error: str, text: str) -> None:
        """Report the error that ends this client. The client then leaves without waiting for the others."""
        with contextlib.suppress(OSError):
            self._connection.send(
                "failed", client=self.settings.client_id, restart=self.settings.restart, error=error, text=text
            )
        self._leaving = True

    def leave(self) -> None:
        if self._has_launcher or self._leaving:
            return  # The end of the script tells the launcher, which also waits for the end of the process.
        error = sys.exc_info()[1]
        if error is not None:
            self._send_failure(type(error).__name__, _text_of(error))
        self._wait_for_others()
        self._last_failure = self._last_failure or ("the run", _LEFT)
        self._connection.close()

    def _wait_for_others(self) -> None:
        """Wait for the other clients, which may still read from this client's memory in their last step."""
        if self._leaving:
            return
        if self._has_to_meet:
            self._send_failure(
                "StrategyError",
                "The script ended without a tfshard.ShardedStrategy and without a collective, so the clients trained "
                "nothing together. Compile the model with strategy=tfshard.ShardedStrategy(...).",
            )
            return
        self._connection.send("leave")
        while self._replies.get()["kind"] != "left":
            pass  # A late reply to an abandoned agreement.
        self._leaving = True


def _connected(settings: Settings, wait: float) -> Connection:
    deadline = time.monotonic() + wait
    while True:
        try:
            return Connection.open(settings.control, settings.secret, timeout=10.0)
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _text_of(error: BaseException) -> str:
    """Return an error as Python prints it, without the traceback."""
    return "".join(traceback.format_exception_only(error)).strip()[:4000]


# --- the clients of this process ----------------------------------------------------------------------

# Holds the id of the process that the launcher started. Its child processes inherit the environment.
PID_VARIABLE = "TFSHARD_PID"

_here: Clients = Alone()


def here() -> Clients:
    """Return the clients of this process's run. `Alone` before it joins a run."""
    return _here


def is_to_join() -> bool:
    """Return whether a launcher started this process and the process has not joined its run yet."""
    return (
        not _here.is_launched and "TFSHARD_CONTROL" in os.environ and os.environ.get(PID_VARIABLE) == str(os.getpid())
    )


def join(settings: Settings, *, wait: float | None = None) -> Launched:
    """Connect this process to its launcher. Hides the run's secret from its child processes.

    Args:
        settings: The client's settings.
        wait: How long to wait for the coordinator, in a process that a cluster started. None with a launcher.
    """
    global _here
    assert not _here.is_launched
    for name in ("TFSHARD_CONTROL", "TFSHARD_SECRET"):
        os.environ.pop(name, None)
    _here = launched = Launched(settings, wait=wait)
    return launched


@contextlib.contextmanager
def replaced(by: Clients) -> Iterator[None]:
    """Make `here()` return `by` inside the context. For tests."""
    global _here
    before, _here = _here, by
    try:
        yield
    finally:
        _here = before


@contextlib.contextmanager
def _reserve_port(settings: Settings) -> Iterator[int]:
    """Hold a port for TensorFlow's server until all clients have registered and the server can start.

    Raises:
        InitializationError: The port is taken.
    """
    family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        # Ignore the old connections of a restarted run. A live server still holds the port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Bind all interfaces, like TensorFlow's server: see docs/security.md. Nothing listens on this socket.
            held.bind(("", settings.client_port))
        except OSError as error:
            raise InitializationError(
                f"Client {settings.client_id} cannot use port {settings.client_port} for its TensorFlow server: "
                f"{error.strerror}. Stop the program that uses it, or choose other ports with --client_port. "
                f"Received: client_port={settings.client_port}"
            ) from None
        yield held.getsockname()[1]
