"""The launcher that leads a run: it watches the clients, and ends or restarts all of them when one fails.

It is the launcher of the first host: it has the control channel, to which the clients and the launchers of
the other hosts (follower.py) connect, and it alone decides. All of its state changes in its main thread, which takes
events out of one queue.

What is watched:

- each process, by its parent (waitpid);
- each client's heartbeat, and what it does: clients report the beginning and the end of every operation that takes all
  of them (clients.py). All clients go through the same operations in the same order, so the one that has not come to an
  operation that another one has waited in for too long is the one to blame;
- the other launchers' heartbeats, both ways.

Times are measured in a clock that stands still while the launcher itself does not run, so that a launcher that was
stopped or swapped out raises no false alarm.
"""

import contextlib
import dataclasses
import queue
import random
import signal
import time
from typing import Any

from tfshard import agreements, control
from tfshard.clients import HEARTBEAT_SECONDS, Settings
from tfshard.control import Connection, Server, check_private
from tfshard.launch_options import (
    DEFAULT_PORT,
    HOST_SECONDS,
    Clock,
    Launch,
    client_environment,
    log,
    shared_options,
)
from tfshard.processes import Processes, describe, exit_code

# A client that has ended its script is missed by the others after so long, and has so long to end.
_MISSED_SECONDS = 3.0
_ENDING_SECONDS = 8.0
# How long to wait for the cause of an error that may be the consequence of another client's.
_SETTLE_SECONDS = 0.5
_CONSEQUENCE_SECONDS = 3.0
# What TensorFlow raises in a client that lost another one.
_CONSEQUENCES = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "InternalError")
# Errors of a client that will come again.
_NO_RETRY = (
    "MeshError",
    "InitializationError",
    "StrategyError",
    "LayoutError",
    "UnsupportedLayerError",
    "CheckpointCorruptError",
    "CheckpointMismatchError",
)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Host:
    """A launcher, as the leader sees it; `connection` is None for itself and for one that is gone."""

    index: int
    connection: Connection | None = None
    heard: float = 0.0
    running: bool = False


@dataclasses.dataclass(kw_only=True, eq=False)
class _Watched:
    """A client in one start of the run, as the leader sees it; times by its clock."""

    client_id: int
    host: _Host
    local_index: int
    connection: Connection | None = None
    pid: int | None = None
    job: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    heard: float = 0.0
    # How many operations it has begun; the last one, and since when and for how long it may be in it.
    operations: int = 0
    label: str = ""
    since: float = 0.0
    inside: bool = False
    # Whether the last one ended with an error.
    broken: bool = False
    limit: float = 0.0
    leaving: bool = False
    left: float | None = None
    # What another client has been waiting in, as long as this one has not come to it.
    missed_in: str = ""
    reported: bool = False
    status: int | None = None

    def where(self) -> str:
        """The last operation, for messages."""
        return f" {'in' if self.inside or self.broken else 'after'} {self.label}" if self.label else ""

    def doing(self, now: float) -> str:
        """What it does, for messages."""
        if self.status is not None:
            return f"it {describe(self.status)}"
        if self.connection is None:
            return "it has not called tfshard.initialize()"
        if self.leaving:
            return "it has come to the end of its script"
        if not self.label:
            return "it has not begun anything"
        return f"{'in' if self.inside else 'after'} {self.label} since {now - self.since:.0f} s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why a run ends.

    Attributes:
        text: Names client, step and cause.
        at: When it was noticed.
        code: The exit code that it gives.
        clients: The clients to blame.
        tail: What the client wrote last.
        retry: Whether a restart may help.
        consequence: Whether it may be the consequence of another client's failure.
    """

    text: str
    at: float
    code: int = 1
    clients: tuple[int, ...] = ()
    tail: tuple[str, ...] = ()
    retry: bool = True
    consequence: bool = False


class Leader:
    """The launcher of the first host."""

    def __init__(self, options: Launch, received: list[int]):
        self._options = options
        self._received = received
        self._clock = Clock()
        self._events: queue.Queue[Any] = queue.Queue()
        self._processes = Processes(options.grace)
        self._hosts = {index: _Host(index=index) for index in range(len(options.hosts))}
        # Host and local index of each client that takes part.
        self._places = [(host, local) for host in self._hosts for local in range(options.num_processes)]
        self._restart = 0
        self._seed = random.SystemRandom().randrange(1 << 31)
        self._failures: list[_Failure] = []
        self._clients: dict[int, _Watched] = {}
        self._by_connection: dict[Connection, _Watched] = {}
        self._secret = options.secret or control.new_secret()
        host = check_private(options.address or options.hosts[0], allow_public=options.allow_public_address)
        port = options.port or (DEFAULT_PORT if len(options.hosts) > 1 else 0)
        self._server = Server(host, port, self._secret, self._events)

    def run(self) -> int:
        """Starts and restarts the clients until they end; returns the exit code."""
        text, code = "The run has ended.", 1
        try:
            failure = self._wait_for_hosts()
            while True:
                failure = failure or self._attempt()
                if failure is None:
                    code = 0
                    return code
                code, text = failure.code, failure.text
                self._stop()
                self._report(failure)
                if not self._may_restart(failure):
                    return code
                self._restart += 1
                log(f"restart {self._restart} of {self._options.max_restarts}, with {len(self._places)} clients.")
                failure = None
        finally:
            self._processes.kill()
            while self._processes.running:
                self._processes.poll()
            for host in self._hosts.values():
                self._tell(host, "end", code=code, text=text)
            self._server.close()

    # --- one start ------------------------------------------------------------------------------------

    def _wait_for_hosts(self) -> _Failure | None:
        deadline = self._clock.now + self._options.startup_timeout
        while missing := [host.index for host in self._hosts.values() if self._is_lost(host)]:
            self._tick()
            if self._received or self._clock.now > deadline:
                names = [self._options.hosts[index] for index in missing]
                return self._interrupted() or _Failure(
                    text=f"The launchers of hosts {names} did not come within {self._options.startup_timeout:.0f} s.",
                    at=self._clock.now, retry=False,
                )  # fmt: skip
            if self._failures:
                return self._failures[0]
        return None

    def _is_lost(self, host: _Host) -> bool:
        return host.index != 0 and host.connection is None

    def _attempt(self) -> _Failure | None:
        """One start of all clients; returns why it failed, or None when they have ended well."""
        self._failures = []
        self._clients, self._by_connection = {}, {}
        self._agreements = agreements.Agreements(len(self._places))
        self._begun: dict[int, tuple[str, int | None, int]] = {}
        self._started = self._clock.now
        self._first_registered: float | None = None
        for client_id, (host, local) in enumerate(self._places):
            self._clients[client_id] = _Watched(
                client_id=client_id, host=self._hosts[host], local_index=local, heard=self._clock.now
            )
            self._hosts[host].running = True
        for client_id, client in self._clients.items():
            if self._is_lost(client.host):
                self._lose(client.host, "is gone")
            self._start(client_id)
        while True:
            self._tick()
            if self._received:
                return self._interrupted()
            self._watch()
            if self._failures:
                failure = self._chosen()
                if failure is not None:
                    return failure
            elif all(client.status is not None for client in self._clients.values()):
                if self._first_registered is not None:
                    return None
                self._fail("The clients ended without calling tfshard.initialize(), so they trained nothing together.",
                           retry=False)  # fmt: skip

    def _start(self, client_id: int) -> None:
        client, options = self._clients[client_id], self._options
        settings = Settings(
            client_id=client_id,
            num_clients=len(self._places),
            local_index=client.local_index,
            restart=self._restart,
            control=self._server.address,
            # The other launchers know it.
            secret=self._secret if client.host.index == 0 else "",
            address=options.hosts[client.host.index],
            devices_per_process=options.devices_per_process,
            client_port=options.client_port + client.local_index if options.client_port else 0,
            first_step_timeout=options.first_step_timeout,
        )
        width = len(str(len(self._places) - 1))
        if client.host.index == 0:
            process = self._processes.start(client_id, options.command, client_environment(settings), width)
            client.pid = process.pid
        else:
            self._tell(client.host, "start", settings=dataclasses.asdict(settings), width=width)

    def _tick(self) -> None:
        """Takes what has happened: messages, processes that ended, hosts that are gone."""
        deadline = time.monotonic() + 0.1
        while (wait := deadline - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=wait)
            except queue.Empty:
                break
            if event.message is None:
                self._closed(event.connection)
            else:
                self._handle(event.connection, event.message)
        self._clock.tick()
        with contextlib.suppress(queue.Empty):
            while True:
                log(f"refused a connection from {self._server.refused.get_nowait()}")
        for process in self._processes.poll():
            self._ended(process.client_id, process.status, process.tail())
        self._hosts[0].running = bool(self._processes.running)
        for host in self._hosts.values():
            if host.connection is not None:
                self._tell(host, "beat")
                if self._clock.now - host.heard > HOST_SECONDS:
                    self._lose(host, f"sent no heartbeat for {HOST_SECONDS:.0f} s")

    def _tell(self, host: _Host, kind: str, **fields: Any) -> None:
        if host.connection is not None:
            try:
                host.connection.send(kind, **fields)
            except OSError:
                self._lose(host, "closed its connection")

    def _lose(self, host: _Host, what: str) -> None:
        if host.connection is not None:
            host.connection.close()
        host.connection, host.running = None, False
        clients = tuple(c.client_id for c in self._clients.values() if c.host is host)
        for number in clients:
            connection = self._clients[number].connection
            if connection is not None:
                connection.close()  # Its launcher does not end it; this does.
        name = self._options.hosts[host.index]
        self._fail(f"The launcher of host {host.index} ({name}), with clients {clients}, {what}.", clients=clients)

    def _closed(self, connection: Connection) -> None:
        for host in self._hosts.values():
            if host.connection is connection:
                self._lose(host, "closed its connection")
        client = self._by_connection.pop(connection, None)
        if client is not None:
            client.connection = None
            # Its process is watched: what became of it comes from there, unless it lives on without a connection.
            if client.left is None and not client.leaving:
                client.heard = min(client.heard, self._clock.now - self._options.step_timeout + _MISSED_SECONDS)

    # --- messages -------------------------------------------------------------------------------------

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "host":
            self._join(connection, message)
            return
        if kind == "register":
            self._register(connection, message)
            return
        if kind in ("ended", "stopped", "interrupted", "beat"):
            for host in self._hosts.values():
                if host.connection is connection:
                    host.heard = self._clock.now
                    if kind == "ended":
                        self._ended(message["client"], message["status"], message["tail"], message["restart"])
                    elif kind == "stopped" and message["restart"] == self._restart:
                        host.running = False
                    elif kind == "interrupted":
                        self._received.append(message["signal"])
                    return
        if kind == "failed":
            self._failed(connection, message)
        client = self._by_connection.get(connection)
        if client is None:
            return
        client.heard = self._clock.now
        if kind == "begin":
            self._begin(client, message)
        elif kind == "end":
            client.inside, client.broken, client.since = False, message["failed"], self._clock.now
        elif kind == "agree":
            for number, reply in self._agreements.add(client.client_id, message, self._clock.now):
                self._reply(number, reply)
        elif kind == "leave":
            client.leaving, client.inside, client.since = True, False, self._clock.now
            if all(other.leaving or other.status is not None for other in self._clients.values()):
                for other in self._clients.values():
                    self._release(other)

    def _reply(self, client_id: int, message: dict[str, Any]) -> None:
        connection = self._clients[client_id].connection
        if connection is not None:
            with contextlib.suppress(OSError):  # Its process will tell.
                connection.send(**message)

    def _release(self, client: _Watched) -> None:
        """Lets a client that waits at the end of its script end."""
        if client.left is None and client.status is None:
            client.left = self._clock.now
            self._reply(client.client_id, {"kind": "left"})

    def _join(self, connection: Connection, message: dict[str, Any]) -> None:
        """Another host's launcher has come."""
        host = self._hosts.get(message["index"])
        ours = shared_options(self._options)
        if host is None or host.index == 0 or host.connection is not None:
            reason = f"there is a launcher with host_index={message['index']} already"
        elif message["options"] != ours:
            reason = f"its options differ: {message['options']} instead of {ours}"
        else:
            host.connection, host.heard = connection, self._clock.now
            return
        text = f"The launcher on {connection.peer_address} cannot join: {reason}."
        with contextlib.suppress(OSError):
            connection.send("end", code=2, text=text)
        self._fail(text, retry=False)

    def _register(self, connection: Connection, message: dict[str, Any]) -> None:
        """A client has called `tfshard.initialize()`."""
        number, pid = message["client"], message["pid"]
        client = self._clients.get(number)
        if message["restart"] != self._restart:
            connection.close()  # Of a start that was ended.
            return
        first = next((c for c in self._clients.values() if c.facts), None)
        reason = None
        if client is None:
            reason = f"A process calls itself client {number}, and there are {len(self._clients)} clients."
        elif client.connection is not None or client.facts:
            reason = (
                f"Two processes call themselves client {number}: process {client.pid} on "
                f"{self._options.hosts[client.host.index]} and process {pid} on {connection.peer_address}. "
                "Each needs its own TFSHARD_CLIENT_ID, which 'tfshard launch' sets."
            )
        elif first is not None:
            for name, value in message["facts"].items():
                if first.facts.get(name) != value:
                    reason = (
                        f"Client {number} has another {name} than client {first.client_id}. It has to be the same on "
                        f"all clients. Received: {value!r} and {first.facts.get(name)!r}"
                    )
        if reason is not None:
            with contextlib.suppress(OSError):
                connection.send("refused", reason=reason)
            self._fail(reason, clients=(number,), retry=False)
            return
        assert client is not None
        client.connection, client.pid, client.job = connection, pid, message["job"]
        client.facts, client.heard = message["facts"], self._clock.now
        self._by_connection[connection] = client
        if self._first_registered is None:
            self._first_registered = self._clock.now
        if all(other.facts for other in self._clients.values()):
            jobs = [other.job for other in self._clients.values()]
            for each in self._clients:
                self._reply(each, {"kind": "start", "jobs": jobs, "seed": self._seed})

    def _begin(self, client: _Watched, message: dict[str, Any]) -> None:
        number, label, digest = message["number"], message["label"], message["digest"]
        client.operations, client.label, client.inside = number + 1, label, True
        client.since, client.limit = self._clock.now, message["limit"] or self._options.step_timeout
        client.broken, client.missed_in = False, ""
        other_label, other_digest, other = self._begun.setdefault(number, (label, digest, client.client_id))
        if label != other_label:
            self._fail(
                f"Client {client.client_id} has come to {label} while client {other} was in {other_label}: every "
                "client has to do the same in the same order. Steps, whole values of sharded variables and saving take "
                "all clients, so they must not depend on the client's number.",
                clients=(client.client_id,), retry=False,
            )  # fmt: skip
        elif digest != other_digest:
            self._fail(
                f"Clients {other} and {client.client_id} were given different batches in {label}. Every client has to "
                "be given the same batches, of which it takes its rows: seed the shuffling and keep the order of "
                "parallel maps (deterministic=True), or let each client feed its own part "
                "(ShardedStrategy(already_sharded=True)).",
                clients=(client.client_id,), retry=False,
            )  # fmt: skip
        for old in [n for n in self._begun if n < min(c.operations for c in self._clients.values())]:
            del self._begun[old]

    def _failed(self, connection: Connection, message: dict[str, Any]) -> None:
        """A client reports an exception that ends it."""
        client = self._clients.get(message["client"])
        if client is None or client.connection not in (None, connection) or message["restart"] != self._restart:
            return
        client.reported = True
        self._fail(
            f"Client {client.client_id} failed{client.where()}:\n{message['text']}",
            clients=(client.client_id,),
            consequence=message["error"] in _CONSEQUENCES,
            retry=message["error"] not in _NO_RETRY,
        )

    def _ended(self, client_id: int, status: int | None, tail: list[str], restart: int | None = None) -> None:
        """A client's process has ended."""
        client = self._clients.get(client_id)
        if client is None or status is None or restart not in (None, self._restart):
            return
        where = client.where()
        client.status, client.inside = status, False
        if status == 0 and client.missed_in:
            self._ended_early(client)
        if client.reported or (status == 0 and (client.facts or self._first_registered is None)):
            return
        before = "" if client.facts else ", before it called tfshard.initialize()"
        self._fail(
            f"Client {client_id} {describe(status)}{where}{before}.",
            clients=(client_id,), code=exit_code(status) or 1, tail=tuple(tail),
        )  # fmt: skip

    # --- limits ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        now, options = self._clock.now, self._options
        clients = list(self._clients.values())
        for client_id, reply in self._agreements.expired(now):
            self._reply(client_id, reply)
        missing = tuple(client.client_id for client in clients if not client.facts)
        limit = None
        if missing and now - self._started > options.startup_timeout:
            limit = f"{options.startup_timeout:.0f} s of the start"
        elif missing and self._first_registered is not None:
            if now - self._first_registered > options.registration_timeout:
                limit = f"{options.registration_timeout:.0f} s after the first client"
            elif any(self._clients[number].status == 0 for number in missing):
                limit = "its life"
        if limit is not None:
            doing = "; ".join(f"client {number}: {self._describe(number)}" for number in missing)
            self._fail(
                f"Clients {missing} did not call tfshard.initialize() within {limit} ({doing}).", clients=missing
            )
            return
        for client in clients:
            if client.status is not None or not client.facts:
                continue
            if client.left is not None:
                if now - client.left > options.step_timeout:
                    self._fail(f"Client {client.client_id} does not end after its script.", clients=(client.client_id,))
            elif now - client.heard > options.step_timeout:
                self._silent(client)
            elif client.inside:
                self._watch_operation(client)

    def _describe(self, client_id: int) -> str:
        client = self._clients[client_id]
        process = self._processes.running.get(client_id)
        stopped = "its process is stopped (SIGSTOP), " if process is not None and process.is_stopped() else ""
        return stopped + client.doing(self._clock.now)

    def _silent(self, client: _Watched) -> None:
        self._fail(
            f"Client {client.client_id} is stuck: it sent no heartbeat for {self._options.step_timeout:.0f} s "
            f"({self._describe(client.client_id)}).",
            clients=(client.client_id,),
        )

    def _watch_operation(self, client: _Watched) -> None:
        waited = self._clock.now - client.since
        behind = [c for c in self._clients.values() if c.operations < client.operations]
        if waited > _MISSED_SECONDS:
            for other in behind:
                other.missed_in = other.missed_in or f"client {client.client_id} was in {client.label}"
                if other.leaving:
                    self._release(other)  # Its exit code tells more.
                if other.status == 0:
                    self._ended_early(other)
        ending = any(c.left is not None and self._clock.now - c.left < _ENDING_SECONDS for c in behind)
        if waited <= client.limit or (ending and waited <= client.limit + _ENDING_SECONDS):
            return
        # Those that are in it, and say nothing, hold it up; else those that have not come to it; else nobody in
        # particular.
        silent = [c for c in self._clients.values() if self._clock.now - c.heard > 5 * HEARTBEAT_SECONDS]
        blamed = silent or behind or list(self._clients.values())
        numbers = tuple(c.client_id for c in blamed)
        doing = "; ".join(f"client {number}: {self._describe(number)}" for number in numbers)
        what = "did not come to" if blamed is behind else "did not end"
        self._fail(
            f"Clients {numbers} {what} {client.label} within {client.limit:.0f} s: stuck ({doing}).", clients=numbers
        )

    def _ended_early(self, client: _Watched) -> None:
        code = "" if client.status is None else ", with exit code 0,"
        self._fail(
            f"Client {client.client_id} ended its script{code} while {client.missed_in}: all clients have to run the "
            "same steps.",
            clients=(client.client_id,), retry=False,
        )  # fmt: skip

    # --- failures -------------------------------------------------------------------------------------

    def _fail(self, text: str, **options: Any) -> None:
        self._failures.append(_Failure(text=text, at=self._clock.now, **options))

    def _interrupted(self) -> _Failure | None:
        if not self._received:
            return None
        number = self._received[0]
        self._signal = number
        name = signal.Signals(number).name
        return _Failure(text=f"Ended by {name}.", at=self._clock.now, code=128 + number, retry=False)

    def _chosen(self) -> _Failure | None:
        """The failure to report, once others had time to turn out to be its cause."""
        waited = self._clock.now - self._failures[0].at
        causes = [failure for failure in self._failures if not failure.consequence]
        ending = [c for c in self._clients.values() if c.missed_in and c.left is not None and c.status is None]
        if not causes and ending:
            # Let go, it takes the others down with it: its exit code tells why.
            if waited >= _ENDING_SECONDS:
                self._ended_early(ending[0])
            return None
        if causes and waited >= _SETTLE_SECONDS:
            return next((failure for failure in causes if failure.code > 128), causes[0])
        return self._failures[0] if waited >= _CONSEQUENCE_SECONDS else None

    def _report(self, failure: _Failure) -> None:
        log(failure.text)
        if any(failure.tail):
            log(f"its last output:\n{chr(10).join(failure.tail)}")

    def _stop(self) -> None:
        """Ends all processes on all hosts."""
        number = self._received[0] if self._received else signal.SIGTERM
        deadline = self._clock.now + self._options.grace + 5.0
        self._processes.stop(number)
        for host in self._hosts.values():
            self._tell(host, "stop", restart=self._restart, signal=number)
        interrupts = len(self._received)
        while any(host.running for host in self._hosts.values()):
            self._tick()
            if len(self._received) > interrupts:
                self._processes.kill()  # Asked twice.
            if self._clock.now > deadline:
                for host in self._hosts.values():
                    if host.running and host.connection is not None:
                        self._lose(host, "did not end its clients")
                deadline += 1.0

    def _may_restart(self, failure: _Failure) -> bool:
        """Whether to start again; leaves out the clients that cannot come back, if there are enough without them."""
        options = self._options
        if not failure.retry or self._restart >= options.max_restarts:
            return False
        deadline = self._clock.now + options.registration_timeout
        while any(self._is_lost(host) for host in self._hosts.values()) and self._clock.now < deadline:
            self._tick()  # Its launcher may be restarted.
            if self._received:
                return False
        gone = {place for place in self._places if self._is_lost(self._hosts[place[0]])}
        if self._restart and not all(client.facts for client in self._clients.values()):
            gone |= {self._places[number] for number in failure.clients if number < len(self._places)}
        left = [place for place in self._places if place not in gone]
        if not gone:
            return True
        if options.elastic_min is not None and len(left) >= options.elastic_min:
            self._places = left
            return True
        return not any(self._is_lost(self._hosts[place[0]]) for place in gone)
