"""The watchdog of a launched run. It tracks the operations of each client and finds the client that caused a failure.

Clients report the start and the end of every operation that takes all clients (clients.py). All clients go through the
same operations in the same order. If a client has waited too long in an operation, the client that has not reached the
operation is to blame. The module is pure Python: messages and times go in, `Failure`s come out.
"""

import dataclasses
from collections.abc import Callable, Iterable

from tfshard.devices.channel import Connection
from tfshard.devices.clients import HEARTBEAT_SECONDS
from tfshard.launch.options import Clock, Launch
from tfshard.launch.processes import describe, exit_code

# The other clients miss a client that ended its script after _MISSED_SECONDS. It has _ENDING_SECONDS to end.
_MISSED_SECONDS = 3.0
_ENDING_SECONDS = 8.0
# The time to wait for the cause of an error that may be a consequence of another client's error.
_SETTLE_SECONDS = 0.5
_CONSEQUENCE_SECONDS = 3.0
# Errors that TensorFlow raises in a client when another client is lost, or Python when the launcher stops reading.
_CONSEQUENCES = (
    "UnavailableError",
    "AbortedError",
    "CancelledError",
    "DeadlineExceededError",
    "InternalError",
    "BrokenPipeError",
)
# Errors that a restart would repeat.
_NO_RETRY = (
    "MeshError",
    "InitializationError",
    "StrategyError",
    "LayoutError",
    "UnsupportedLayerError",
    "CheckpointCorruptError",
    "CheckpointMismatchError",
)
# Advice for clients that run different operations.
_TAKES_ALL = (
    "Steps need all clients, and so do calls that need full values of sharded variables (model.save, save_weights, "
    "export, get_weights, variable.numpy(), checkpoints, report). Client 0 writes the files that all clients save "
    "together. Make these calls on every client, not under an 'if rank == 0'."
)


@dataclasses.dataclass(kw_only=True, eq=False)
class WatchedClient:
    """A client in one start of the run, as its launcher sees it. Times are by the launcher's clock.

    Attributes:
        client_id: The client's number.
        host: The index of its host.
        local_index: The index of the client on its host.
        connection: The connection to the client, or None.
        pid: The process id on its host.
        job: The `host:port` of its TensorFlow server.
        facts: The values it registered with. Empty before it has called `tfshard.initialize()`.
        heard: When the client last sent a message.
        lost: When the client closed its connection before the end of its script.
        operations: The number of operations the client has begun.
        label: The label of the last operation.
        since: When the last operation began or ended.
        inside: True while the client is in the last operation.
        broken: True if the last operation ended with an error.
        error: The last operation error, which the script may have caught.
        failed_in: The number of the operation that failed.
        limit: The seconds that the current operation may take.
        leaving: True if the client has reached the end of its script.
        left: When the launcher let the client exit.
        missed_in: The operation in which another client waits for this client.
        reported: True if the client has reported a fatal exception.
        status: The exit status for `processes.describe`. None while the process runs.
    """

    client_id: int
    host: int
    local_index: int
    connection: Connection | None = None
    pid: int | None = None
    job: str = ""
    facts: dict[str, object] = dataclasses.field(default_factory=dict)
    heard: float = 0.0
    lost: float | None = None
    operations: int = 0
    label: str = ""
    since: float = 0.0
    inside: bool = False
    broken: bool = False
    error: str = ""
    failed_in: int | None = None
    limit: float = 0.0
    leaving: bool = False
    left: float | None = None
    missed_in: str = ""
    reported: bool = False
    status: int | None = None

    def where(self) -> str:
        """Return the last operation as text for messages."""
        return f" {'in' if self.inside or self.broken else 'after'} {self.label}" if self.label else ""

    def doing(self, now: float) -> str:
        """Return the client's current activity as text for messages."""
        if self.status is not None:
            return f"it {describe(self.status)}"
        if self.connection is None and self.lost is None:
            return "it has not called tfshard.initialize()"
        if self.leaving:
            return "it has reached the end of its script"
        if not self.label:
            return "it has not started an operation"
        return f"{'in' if self.inside else 'after'} {self.label} since {now - self.since:.0f} s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why a run ends.

    Attributes:
        text: Names the client, the step and the cause.
        at: When the launcher noticed the failure.
        code: The resulting exit code.
        clients: The clients to blame.
        tail: The client's last output.
        retry: True if a restart may help.
        consequence: True if another client's failure may be the cause.
    """

    text: str
    at: float
    code: int = 1
    clients: tuple[int, ...] = ()
    tail: tuple[str, ...] = ()
    retry: bool = True
    consequence: bool = False


class Watchdog:
    """Watches the clients of one start of a run.

    Attributes:
        clients: The clients by id.
        first_registered: When the first client called `tfshard.initialize()`.
    """

    def __init__(
        self,
        options: Launch,
        clock: Clock,
        clients: Iterable[WatchedClient] = (),
        *,
        is_stopped: Callable[[int], bool] = lambda client_id: False,
    ):
        """Start to watch clients.

        Args:
            options: The time limits.
            clock: The launcher's clock.
            clients: The clients to watch.
            is_stopped: Returns whether a signal has stopped a client's process, as far as this machine can tell.
        """
        self.clients = {client.client_id: client for client in clients}
        self.first_registered: float | None = None
        self._options = options
        self._clock = clock
        self._is_stopped = is_stopped
        self._started = clock.now
        # For each operation that not all clients have begun: its label, its batch's checksum and the first client in
        # it.
        self._begun: dict[int, tuple[str, int | None, int]] = {}
        self._failures: list[Failure] = []

    # --- what happens ---------------------------------------------------------------------------------

    def begin(self, client: WatchedClient, number: int, label: str, *, limit: float | None, digest: int | None) -> None:
        """Note that a client begins its operation with this number."""
        client.operations, client.label, client.inside = number + 1, label, True
        client.since, client.limit = self._clock.now, limit or self._options.step_timeout
        client.broken, client.missed_in = False, ""
        other_label, other_digest, other = self._begun.setdefault(number, (label, digest, client.client_id))
        if label != other_label:
            self.fail(
                f"Client {client.client_id} reached {label} while client {other} was in {other_label}: every client "
                f"must do the same operations in the same order. {_TAKES_ALL}",
                clients=(client.client_id,), retry=False,
            )  # fmt: skip
        elif digest != other_digest:
            self.fail(
                f"Clients {other} and {client.client_id} were given different batches in {label}. Every client must "
                "get the same batches, from which it takes its rows: seed the shuffling, keep the order of parallel "
                "maps (deterministic=True), and map random Keras layers with tfshard.random_map instead of "
                "dataset.map; or let each client feed its own part (ShardedStrategy(already_sharded=True)).",
                clients=(client.client_id,), retry=False,
            )  # fmt: skip
        for old in [n for n in self._begun if n < min(c.operations for c in self.clients.values())]:
            del self._begun[old]

    def end(self, client: WatchedClient, *, failed: bool, error: str = "") -> None:
        """Note that a client's operation ended, perhaps with an error."""
        client.inside, client.broken, client.since = False, failed, self._clock.now
        if failed:
            client.error, client.failed_in = error, client.operations - 1

    def leave(self, client: WatchedClient) -> list[WatchedClient]:
        """Note that a client reached the end of its script. Once all have, returns the clients that may exit."""
        client.leaving, client.inside, client.since = True, False, self._clock.now
        if all(other.leaving or other.status is not None for other in self.clients.values()):
            return [other for other in self.clients.values() if self._let_go(other)]
        return []

    def reported(self, client: WatchedClient, error: str, text: str) -> None:
        """Note the exception that ends a client."""
        client.reported = True
        self.fail(
            f"Client {client.client_id} failed{client.where()}:\n{text}",
            clients=(client.client_id,), consequence=error in _CONSEQUENCES, retry=error not in _NO_RETRY,
        )  # fmt: skip

    def ended(self, client: WatchedClient, status: int, tail: Iterable[str]) -> None:
        """Note that a client's process has ended."""
        where = client.where()
        client.status, client.inside = status, False
        if status == 0 and client.missed_in:
            self._ended_early(client)
        if client.reported or (status == 0 and (client.facts or self.first_registered is None)):
            return
        before = "" if client.facts else ", before it called tfshard.initialize()"
        self.fail(
            f"Client {client.client_id} {describe(status)}{where}{before}.",
            clients=(client.client_id,), code=exit_code(status) or 1, tail=tuple(tail),
        )  # fmt: skip

    def vanished(self, client: WatchedClient) -> None:
        """Note that a client that no launcher started closed its connection, so its process has ended."""
        if client.left is not None:
            self.ended(client, 0, ())
            return
        where = client.where()
        client.status, client.inside = 1, False
        if not client.reported:
            self.fail(
                f"Client {client.client_id} is gone{where}: its process ended without an error that tfshard saw, such "
                "as a signal, or its machine or network failed. Its own output tells more.",
                clients=(client.client_id,),
            )

    def disconnected(self, client: WatchedClient) -> None:
        """Note that a client closed its connection. If its process does not end soon, the client is stuck."""
        if client.left is None and not client.leaving:
            client.lost = self._clock.now

    def fail(
        self,
        text: str,
        *,
        code: int = 1,
        clients: tuple[int, ...] = (),
        tail: tuple[str, ...] = (),
        retry: bool = True,
        consequence: bool = False,
    ) -> None:
        """Record a failure. The arguments are the attributes of `Failure`."""
        self._failures.append(
            Failure(
                text=text,
                at=self._clock.now,
                code=code,
                clients=clients,
                tail=tail,
                retry=retry,
                consequence=consequence,
            )
        )

    # --- limits ---------------------------------------------------------------------------------------

    def watch(self) -> list[WatchedClient]:
        """Check all time limits. Returns clients to let exit, because their exit codes tell more."""
        now, options = self._clock.now, self._options
        missing = tuple(client.client_id for client in self.clients.values() if not client.facts)
        limit = None
        if missing and now - self._started > options.startup_timeout:
            limit = f"{options.startup_timeout:.0f} s of the start"
        elif missing and self.first_registered is not None:
            if now - self.first_registered > options.registration_timeout:
                limit = f"{options.registration_timeout:.0f} s after the first client"
            elif any(self.clients[number].status == 0 for number in missing):
                limit = "its life"
        if limit is not None:
            self.fail(
                f"Clients {missing} did not call tfshard.initialize() within {limit} ({self._doing(missing)}).",
                clients=missing,
            )
            return []
        released = []
        for client in self.clients.values():
            if client.status is not None or not client.facts:
                continue
            if client.left is not None:
                if now - client.left > options.step_timeout:
                    self.fail(f"Client {client.client_id} did not end after its script.", clients=(client.client_id,))
            elif client.lost is not None and now - client.lost > _MISSED_SECONDS:
                self.fail(
                    f"Client {client.client_id} is stuck: it closed its connection and did not end "
                    f"({self._describe(client.client_id)}).",
                    clients=(client.client_id,),
                )
            elif now - client.heard > options.step_timeout:
                self.fail(
                    f"Client {client.client_id} is stuck: it sent no heartbeat for {options.step_timeout:.0f} s "
                    f"({self._describe(client.client_id)}).",
                    clients=(client.client_id,),
                )
            elif client.inside:
                released += self._watch_operation(client)
        return released

    def _watch_operation(self, client: WatchedClient) -> list[WatchedClient]:
        now = self._clock.now
        behind = [c for c in self.clients.values() if c.operations < client.operations]
        # The time restarts once all clients have reached the operation.
        together = [c.since for c in self.clients.values() if c.inside and c.operations == client.operations]
        waited = now - (client.since if behind else max(together))
        released = []
        if waited > _MISSED_SECONDS:
            for other in behind:
                other.missed_in = other.missed_in or f"client {client.client_id} was in {client.label}"
                if other.leaving and self._let_go(other):
                    released.append(other)
                if other.status == 0:
                    self._ended_early(other)
        ending = any(c.left is not None and now - c.left < _ENDING_SECONDS for c in behind)
        if waited <= client.limit or (ending and waited <= client.limit + _ENDING_SECONDS):
            return released
        # Blame silent clients first, then clients that have not reached the operation, then all clients.
        silent = [c for c in self.clients.values() if c.lost is not None or now - c.heard > 5 * HEARTBEAT_SECONDS]
        if not silent and (failed := self._failed_where_others_are(client, behind)):
            self.fail(
                f"Client {failed.client_id} failed in an operation that needs all clients, and its script continued "
                f"({self._describe(failed.client_id)}), while others wait in it "
                f"({self._doing(c.client_id for c in self.clients.values() if c is not failed)}). Its error:\n"
                f"{failed.error}",
                clients=(failed.client_id,),
            )
            return released
        blamed = silent or behind or list(self.clients.values())
        numbers = tuple(c.client_id for c in blamed)
        what = "did not reach" if blamed is behind else "did not end"
        self.fail(
            f"Clients {numbers} {what} {client.label} within {client.limit:.0f} s: stuck ({self._doing(numbers)}).",
            clients=numbers,
        )
        return released

    def _failed_where_others_are(self, client: WatchedClient, behind: Iterable[WatchedClient]) -> WatchedClient | None:
        """Return a client that failed in the operation in which `client`, or a client behind it, waits."""
        held_up = {c.operations - 1 for c in (client, *behind) if c.inside}
        return next((c for c in self.clients.values() if c.failed_in in held_up and not c.left), None)

    def _let_go(self, client: WatchedClient) -> bool:
        """Let a client at the end of its script exit. Returns False if it was already released or has ended."""
        waits = client.left is None and client.status is None
        if waits:
            client.left = self._clock.now
        return waits

    def _ended_early(self, client: WatchedClient) -> None:
        code = "" if client.status is None else ", with exit code 0,"
        self.fail(
            f"Client {client.client_id} ended its script{code} while {client.missed_in}: all clients must run the "
            f"same steps. {_TAKES_ALL}",
            clients=(client.client_id,), retry=False,
        )  # fmt: skip

    def _doing(self, numbers: Iterable[int]) -> str:
        return "; ".join(f"client {number}: {self._describe(number)}" for number in numbers)

    def _describe(self, client_id: int) -> str:
        stopped = "its process is stopped (SIGSTOP), " if self._is_stopped(client_id) else ""
        return stopped + self.clients[client_id].doing(self._clock.now)

    # --- the cause ------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """True if any failure was recorded."""
        return bool(self._failures)

    def cause(self) -> Failure | None:
        """Return the failure to report, after waiting for a failure on another client that may have caused it."""
        if not self._failures:
            return None
        waited = self._clock.now - self._failures[0].at
        causes = [failure for failure in self._failures if not failure.consequence]
        ending = [c for c in self.clients.values() if c.missed_in and c.left is not None and c.status is None]
        if not causes and ending:
            # The exit of a released client takes the others down, so its exit code tells the reason.
            if waited >= _ENDING_SECONDS:
                self._ended_early(ending[0])
            return None
        if causes and waited >= _SETTLE_SECONDS:
            return next((failure for failure in causes if failure.code > 128), causes[0])
        return self._failures[0] if waited >= _CONSEQUENCE_SECONDS else None
