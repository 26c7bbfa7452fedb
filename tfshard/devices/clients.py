"""Clients: who else takes part in a run, and what this process agrees on and does together with them.

A process that was started alone is `Alone`: it has nobody to agree with. A client of a launched run is `Launched`: its
launcher (leader.py, follower.py) started it with `Settings` in its environment, and `startup.initialize` makes it join
before DTensor is started. From then on the client reports what it is doing, and a thread of it sends a heartbeat. When
the connection closes the launcher is gone, and the client ends with it.
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
import traceback
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfshard import _private
from tfshard.devices import checksums
from tfshard.devices.channel import Connection, ControlError
from tfshard.errors import ClientError, InitializationError, ShardingError

HEARTBEAT_SECONDS = 1.0
# What a client that lost its launcher ends with.
LOST_EXIT_CODE = 75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What `tfshard launch` tells a client, in environment variables of the same names, `TFSHARD_CLIENT_ID` etc.

    Attributes:
        client_id: This client, from 0.
        num_clients: How many there are.
        local_index: This client among those of its host, from 0; the same in every restart.
        num_local: How many clients its host has.
        restart: How often the run was restarted.
        control: `host:port` of the control channel.
        secret: The run's secret.
        address: Where the other clients reach this one.
        devices_per_process: How many devices each client has; None for its own choice.
        client_port: The port of this client's TensorFlow server; 0 for any free one.
        first_step_timeout: Seconds that the first step, and what goes before it, may take.
        seed: Keras's random seed, the same on all clients, unless the script sets another.
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
        """The environment variables of a client."""
        values = dataclasses.asdict(self)
        return {f"TFSHARD_{name.upper()}": "" if value is None else str(value) for name, value in values.items()}

    @classmethod
    def from_environment(cls) -> "Settings | None":
        """The settings of this process, None when it was not launched.

        Raises:
            InitializationError: They are not complete.
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
                    f"The environment variable {name} must be what 'tfshard launch' sets. Received: {text!r}"
                ) from None
        return cls(**values)


class Clients(abc.ABC):
    """The clients of a run, as one of them sees them; `here()` returns those of this process.

    All clients come to the same agreements and operations in the same order, each from its main thread.

    Attributes:
        rank: The number of this client, from 0.
        count: How many clients there are.
        is_launched: Whether a launcher started them, which is true of a single one too.
        local_index: The number of this client among those of its host, from 0.
        restarts: How often it started them anew.
    """

    rank: int
    count: int
    is_launched: bool
    local_index: int
    restarts: int

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
        """Waits for all clients and checks that they give the same values.

        Args:
            what: What they agree on, for the message.
            value: Names to JSON values; each has to be the same on all clients that give it.
            error: What to raise when they differ.
            hint: What to do then, for the message.
            timeout: Seconds to wait; by default what the first step may take.

        Raises:
            ClientError: A client did not come in time, or this is not the main thread.
        """

    def barrier(self, what: str = "a barrier", *, timeout: float | None = None) -> None:
        """Waits for all clients.

        Args:
            what: Where they meet, for messages.
            timeout: Seconds to wait; by default what the first step may take.

        Raises:
            ClientError: A client did not come in time, or this is not the main thread.
        """
        self.agree(what, {}, timeout=timeout)

    @abc.abstractmethod
    def operation(
        self, label: str, *, first: bool = False, limit: float | None = None, digest: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A context: something that all clients do together, and that none can end alone.

        Args:
            label: What it is; the same on all clients.
            first: Whether something is compiled in it, so that it may take as long as a first step.
            limit: Seconds that it may take; by default the launcher's limit for a step.
            digest: A checksum of what has to be the same on all clients.
        """

    @abc.abstractmethod
    def step(self, kind: str, batch: Sequence[object], first: bool) -> contextlib.AbstractContextManager[None]:
        """The `operation` of a step. The steps of a kind are numbered.

        Args:
            kind: Such as `"training step"`.
            batch: The leaves of what it is run on; those of which `note_value` was told have to hold the same values on
                all clients.
            first: Whether the step's function has not been run on such shapes before, so that it is compiled.
        """

    @abc.abstractmethod
    def continue_steps(self, kind: str, done: int) -> None:
        """The next `step` of a kind comes after so many: a run goes on that did them before."""

    @abc.abstractmethod
    def purpose(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A context: its operations are done for this, which their labels say.

        Args:
            what: What a user's script called, such as `"model.save of model 'net'"`; the same on all clients. The
                outermost one counts.
        """

    @abc.abstractmethod
    def wait_for_devices(self) -> None:
        """Waits for what this client has started on its devices, if others may wait for it."""

    @abc.abstractmethod
    def checksum(self, value: np.ndarray) -> int | None:
        """A checksum of what has to be the same on all clients; None where there is nothing to compare it with."""

    @abc.abstractmethod
    def note_value(self, tensor: object, value: np.ndarray) -> None:
        """A tensor on the mesh was made from this value on the host, which has to be the same on all clients."""

    @abc.abstractmethod
    def note_start(self, *, by_script: bool) -> None:
        """It is started; unless the script asked for that, it has to do something together with the others."""


class Alone(Clients):
    """A process that was not launched: it agrees with itself, and waits for nobody."""

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

    def note_value(self, tensor: object, value: np.ndarray) -> None:
        pass

    def note_start(self, *, by_script: bool) -> None:
        pass


class Launched(Clients):
    """A client of a launched run: what it tells its launcher, and hears from it.

    Attributes:
        settings: Its `Settings`.
    """

    is_launched = True

    def __init__(self, settings: Settings):
        """Connects.

        Raises:
            InitializationError: The launcher cannot be reached, or has another secret.
        """
        self.settings = settings
        self.rank = settings.client_id
        self.count = settings.num_clients
        self.local_index = settings.local_index
        self.restarts = settings.restart
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._operations = self._agreements = 0
        self._inside = False
        self._leaving = False
        self._purposes: list[str] = []
        self._has_to_meet = False
        self._steps: dict[str, int] = {}
        # Of the values of tensors that live, by id: tensors have no hash.
        self._checksums: dict[int, int] = {}
        try:
            self._connection = Connection.open(settings.control, settings.secret, timeout=10.0)
        except (OSError, ControlError, ValueError) as error:
            raise InitializationError(
                f"The launcher cannot be reached on its control channel: {error}. "
                f"Received: TFSHARD_CONTROL={settings.control}"
            ) from None
        threading.Thread(target=self._receive, name="tfshard-control", daemon=True).start()
        self._report_failures()

    def register(self, facts: Mapping[str, object]) -> list[str]:
        """Tells the launcher that this client is there, and waits for all others.

        Args:
            facts: What has to be the same on all clients.

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
        # Last of the functions that run at exit: those registered later come first.
        atexit.register(self._leave)
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
        if threading.current_thread() is not threading.main_thread():
            raise ClientError(
                f"Only the main thread of a client can come to {what}: other threads have no order that all clients "
                f"share. Received: thread '{threading.current_thread().name}'"
            )
        number, self._agreements = self._agreements, self._agreements + 1
        wait = self.settings.first_step_timeout if timeout is None else timeout
        # The launcher ends the wait; its own limit comes later, for when this does not work.
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
        # Other threads have no order that clients could share.
        if self._inside or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._has_to_meet = False
        number, self._operations = self._operations, self._operations + 1
        if self._purposes:
            label = f"{label}, for {self._purposes[0]}"
        if first:
            limit = max(limit or 0.0, self.settings.first_step_timeout)
        self._inside, failed, text = True, True, ""
        self._send("begin", number=number, label=label, limit=limit, digest=digest)
        try:
            yield
            failed = False
        except BaseException as error:
            text = _text_of(error)
            raise
        finally:
            self._inside = False
            # Also after an error, which the script may catch.
            self._send("end", number=number, failed=failed, error=text)

    def step(self, kind: str, batch: Sequence[object], first: bool) -> contextlib.AbstractContextManager[None]:
        if self.count > 1 and threading.current_thread() is not threading.main_thread():
            raise ClientError(
                f"Only the main thread of a client can run a {kind}: the clients of a launched run take their steps in "
                "one order, and other threads have none that they share. Run it in the main thread. "
                f"Received: thread '{threading.current_thread().name}'"
            )
        number = self._steps[kind] = self._steps.get(kind, 0) + 1
        digest = checksums.of_text(str([self._checksums.get(id(leaf)) for leaf in batch]))
        return self.operation(f"{kind} {number}", first=first, digest=digest)

    def continue_steps(self, kind: str, done: int) -> None:
        self._steps[kind] = done

    @contextlib.contextmanager
    def purpose(self, what: str) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
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

    def note_value(self, tensor: object, value: np.ndarray) -> None:
        self._checksums[id(tensor)] = checksums.of_array(value)
        # Before another tensor can have its id.
        weakref.finalize(tensor, self._checksums.pop, id(tensor), None).atexit = False

    def note_start(self, *, by_script: bool) -> None:
        self._has_to_meet = not by_script

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
                self._replies.put(message)
        except (ControlError, OSError, ValueError):
            pass  # As good as closed.
        self._end_with_launcher()

    def _end_with_launcher(self) -> None:
        """Ends the process: the main thread may hang in a collective, where it hears no signal and no exception."""
        if self._leaving:
            return
        print(f"tfshard: client {self.settings.client_id} lost its launcher and ends.", file=sys.stderr, flush=True)
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
        """Tells what ends this client, which leaves without waiting for the others."""
        with contextlib.suppress(OSError):
            self._connection.send(
                "failed", client=self.settings.client_id, restart=self.settings.restart, error=error, text=text
            )
        self._leaving = True

    def _leave(self) -> None:
        """Waits for the others: those that still end their last step read from this client's memory."""
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
            pass  # A reply to an agreement that was given up.
        self._leaving = True


def _text_of(error: BaseException) -> str:
    """An error as Python prints it, without where it was raised."""
    return "".join(traceback.format_exception_only(error)).strip()[:4000]


# --- those of this process ----------------------------------------------------------------------------

# The process that the launcher started: those that it starts itself have the same environment.
PID_VARIABLE = "TFSHARD_PID"

_here: Clients = Alone()


def here() -> Clients:
    """The clients of the run that this process takes part in; `Alone` before it joins one."""
    return _here


def is_to_join() -> bool:
    """Whether this process is a client that a launcher started, and has not joined its run yet."""
    return (
        not _here.is_launched and "TFSHARD_CONTROL" in os.environ and os.environ.get(PID_VARIABLE) == str(os.getpid())
    )


def join(settings: Settings) -> Launched:
    """Connects this process to its launcher, and hides the run's secret from the processes that it starts."""
    global _here
    assert not _here.is_launched
    for name in ("TFSHARD_CONTROL", "TFSHARD_SECRET"):
        del os.environ[name]
    _here = launched = Launched(settings)
    return launched


@contextlib.contextmanager
def replaced(by: Clients) -> Iterator[None]:
    """A context in which `here()` returns others, for tests of what a client does."""
    global _here
    before, _here = _here, by
    try:
        yield
    finally:
        _here = before


@contextlib.contextmanager
def _reserve_port(settings: Settings) -> Iterator[int]:
    """Holds a port for TensorFlow's server, which is started when all clients are there.

    Raises:
        InitializationError: It is taken.
    """
    family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        # The connections of a run that was restarted do not hold the port; a server does.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # On all interfaces, as TensorFlow's server: see docs/security.md. Nothing listens on it.
            held.bind(("", settings.client_port))
        except OSError as error:
            raise InitializationError(
                f"Client {settings.client_id} cannot have port {settings.client_port} for its TensorFlow server: "
                f"{error.strerror}. End the program that holds it, or choose others with --client_port. "
                f"Received: client_port={settings.client_port}"
            ) from None
        yield held.getsockname()[1]
