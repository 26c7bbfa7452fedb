"""The launcher that leads a run. It watches the clients, and ends or restarts all of them when one fails.

The leader is the launcher of the first host. It owns the control channel, to which the clients and the other hosts'
launchers (follower.py) connect, and it alone decides. All of its state changes in its main thread, which takes events
from one queue.

The leader watches each process as its parent (waitpid), each client's heartbeat and operations (watchdog.py), and the
other launchers' heartbeats. Leader and followers send each other heartbeats.

The launcher's clock stops while the launcher itself does not run. A launcher that was stopped or swapped out therefore
raises no false alarm.
"""

import contextlib
import dataclasses
import queue
import random
import signal
import time
from collections.abc import Mapping
from typing import Any

from tfshard.command_line import DEFAULT_PORT
from tfshard.devices import channel
from tfshard.devices.channel import Connection, Received, Server, check_private
from tfshard.devices.clients import Settings
from tfshard.devices.enrolment import WARNING, Enrolment
from tfshard.launch import agreements
from tfshard.launch.options import (
    HOST_SECONDS,
    Clock,
    Launch,
    client_environment,
    log,
    name_of_host,
    shared_options,
)
from tfshard.launch.processes import Processes
from tfshard.launch.watchdog import Failure, Watchdog, WatchedClient


@dataclasses.dataclass(kw_only=True, eq=False)
class _Host:
    """A launcher, as the leader sees it. `connection` is None for the leader itself and for a lost launcher."""

    index: int
    connection: Connection | None = None
    heard: float = 0.0
    running: bool = False

    @property
    def peer_address(self) -> str:
        """The IP address of the launcher."""
        return "" if self.connection is None else self.connection.peer_address


# The time that a cluster may take to publish the name of its first machine, in s.
_NAME_SECONDS = 30.0
# The time that a dead client's last messages may take to arrive, in s.
_LAST_WORDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Death:
    """A client after the end of its process, with the arguments of `Watchdog.ended`.

    Attributes:
        since: When the launcher learned of the end.
    """

    client: WatchedClient
    status: int
    tail: list[str]
    since: float


class Leader:
    """The launcher of the first host."""

    def __init__(self, options: Launch, received: list[int]):
        self._options = options
        self._received = received
        self._clock = Clock()
        self._events: queue.Queue[Received] = queue.Queue()
        self._processes = Processes(options.grace)
        self._hosts = {index: _Host(index=index) for index in range(len(options.hosts))}
        # The host and local index of each client in the run.
        self._places = [(host, local) for host in self._hosts for local in range(options.num_processes)]
        self._restart = 0
        self._seed = random.SystemRandom().randrange(1 << 31)
        self._watchdog = Watchdog(options, self._clock)
        self._by_connection: dict[Connection, WatchedClient] = {}
        self._dead: list[_Death] = []
        self._secret = options.secret or channel.new_secret()
        self._enrolment = None
        if options.identity is not None and options.secret is None:
            self._enrolment = Enrolment(options.identity, self._num_members())
            log(f"warning: {WARNING}")
        host = check_private(
            options.address or options.hosts[0],
            allow_public=options.allow_public_address,
            wait=_NAME_SECONDS if options.identity is not None else 0.0,
        )
        if options.address is None:
            channel.check_is_reachable(options.hosts[0], host, options.hosts[1:])
        port = options.port or (DEFAULT_PORT if len(options.hosts) > 1 else 0)
        enrol = None if self._enrolment is None else self._enrolment.enrol
        self._server = Server(host, port, self._secret, self._events, enrol)

    def _num_members(self) -> int:
        """Return the number of members that need the secret, this one included."""
        return len(self._hosts)

    def run(self) -> int:
        """Start and restart the clients until they end. Returns the exit code."""
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

    def _wait_for_hosts(self) -> Failure | None:
        deadline = self._clock.now + self._options.startup_timeout
        while missing := [host.index for host in self._hosts.values() if self._is_lost(host)]:
            self._tick()
            if self._received or self._clock.now > deadline:
                names = [name_of_host(self._options, index) for index in missing]
                return self._interrupted() or Failure(
                    text=f"The launchers of hosts {names} did not connect within "
                         f"{self._options.startup_timeout:.0f} s.",
                    at=self._clock.now, retry=False,
                )  # fmt: skip
            if (failure := self._watchdog.cause()) is not None:
                return failure
        return None

    def _is_lost(self, host: _Host) -> bool:
        return host.index != 0 and host.connection is None

    def _attempt(self) -> Failure | None:
        """Start all clients once and wait. Returns the failure, or None if all clients ended well."""
        clients = [
            WatchedClient(client_id=client_id, host=host, local_index=local, heard=self._clock.now)
            for client_id, (host, local) in enumerate(self._places)
        ]
        self._by_connection, self._dead = {}, []
        self._agreements = agreements.Agreements(len(clients))
        self._watchdog = Watchdog(self._options, self._clock, clients, is_stopped=self._processes.is_stopped)
        for host in {client.host for client in clients}:
            self._hosts[host].running = True
            if self._is_lost(self._hosts[host]):
                self._lose(self._hosts[host], "is gone")
        for client in clients:
            self._start(client)
        while True:
            self._tick()
            if self._received:
                return self._interrupted()
            for client_id, reply in self._agreements.expired(self._clock.now):
                self._reply(self._watchdog.clients[client_id], reply)
            self._release(self._watchdog.watch())
            if (failure := self._watchdog.cause()) is not None:
                return failure
            if not self._watchdog.has_failed and all(client.status is not None for client in clients):
                if self._watchdog.first_registered is not None:
                    return None
                self._watchdog.fail(
                    "The clients ended without calling tfshard.initialize(), so they trained nothing together.",
                    retry=False,
                )

    def _start(self, client: WatchedClient) -> None:
        options = self._options
        settings = Settings(
            client_id=client.client_id,
            num_clients=len(self._places),
            local_index=client.local_index,
            num_local=options.num_processes,
            restart=self._restart,
            control=self._server.address,
            # The other launchers know the secret.
            secret=self._secret if client.host == 0 else "",
            address=options.hosts[client.host] or self._hosts[client.host].peer_address,
            devices_per_process=options.devices_per_process,
            client_port=options.client_port + client.local_index if options.client_port else 0,
            first_step_timeout=options.first_step_timeout,
            seed=self._seed,
        )
        width = len(str(len(self._places) - 1))
        if client.host == 0:
            client.pid = self._processes.start(
                client.client_id, options.command, client_environment(settings, options), width
            ).pid
        else:
            self._tell(self._hosts[client.host], "start", settings=dataclasses.asdict(settings), width=width)

    def _tick(self) -> None:
        """Process events: messages, ended processes and lost hosts."""
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
        if self._enrolment is not None and self._enrolment.fault is not None:
            self._watchdog.fail(self._enrolment.fault, retry=False)
            self._enrolment.fault = None
        for process in self._processes.poll():
            assert process.status is not None
            self._ended(process.client_id, process.status, process.tail(), self._restart)
        for death in list(self._dead):
            # Wait for the client's last messages, which tell where the client was.
            if death.client.connection is None or self._clock.now - death.since > _LAST_WORDS:
                self._dead.remove(death)
                self._watchdog.ended(death.client, death.status, death.tail)
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
        clients = [client for client in self._watchdog.clients.values() if client.host == host.index]
        for client in clients:
            if client.connection is not None:
                client.connection.close()  # The launcher is gone, so this ends the client.
        numbers = tuple(client.client_id for client in clients)
        name = name_of_host(self._options, host.index)
        text = f"The launcher of host {host.index} ({name}), with clients {numbers}, {what}."
        self._watchdog.fail(text, clients=numbers)

    def _closed(self, connection: Connection) -> None:
        for host in self._hosts.values():
            if host.connection is connection:
                self._lose(host, "closed its connection")
        client = self._by_connection.pop(connection, None)
        if client is not None:
            client.connection = None
            self._watchdog.disconnected(client)

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
            # A client may fail before it registers.
            failed = self._watchdog.clients.get(message["client"])
            if failed is not None and failed.connection in (None, connection) and message["restart"] == self._restart:
                self._watchdog.reported(failed, message["error"], message["text"])
        client = self._by_connection.get(connection)
        if client is None:
            return
        client.heard = self._clock.now
        if kind == "begin":
            fields = {name: message[name] for name in ("number", "label", "limit", "digest")}
            self._watchdog.begin(client, **fields)
        elif kind == "end":
            self._watchdog.end(client, failed=message["failed"], error=message["error"])
        elif kind == "agree":
            for number, reply in self._agreements.add(client.client_id, message, self._clock.now):
                self._reply(self._watchdog.clients[number], reply)
        elif kind == "leave":
            self._release(self._watchdog.leave(client))

    def _ended(self, client_id: int, status: int, tail: list[str], restart: int) -> None:
        """Note the end of a client's process, if the process belongs to the current start."""
        client = self._watchdog.clients.get(client_id)
        if client is not None and restart == self._restart:
            self._dead.append(_Death(client=client, status=status, tail=tail, since=self._clock.now))

    def _reply(self, client: WatchedClient, message: Mapping[str, Any]) -> None:
        if client.connection is not None:
            with contextlib.suppress(OSError):  # The exit of its process will tell.
                client.connection.send(**message)

    def _release(self, clients: list[WatchedClient]) -> None:
        """Let clients that wait at the end of their script exit."""
        for client in clients:
            self._reply(client, {"kind": "left"})

    def _join(self, connection: Connection, message: dict[str, Any]) -> None:
        """Accept or refuse another host's launcher."""
        host = self._hosts.get(message["index"])
        ours = shared_options(self._options)
        if host is None or host.index == 0 or host.connection is not None:
            reason = f"a launcher with host_index={message['index']} has already joined"
        elif message["options"] != ours:
            reason = f"its options differ: {message['options']} instead of {ours}"
        else:
            host.connection, host.heard = connection, self._clock.now
            return
        text = f"The launcher on {connection.peer_address} cannot join: {reason}."
        with contextlib.suppress(OSError):
            connection.send("end", code=2, text=text)
        self._watchdog.fail(text, retry=False)

    def _register(self, connection: Connection, message: dict[str, Any]) -> None:
        """Register a client that has called `tfshard.initialize()`, or refuse it."""
        number, pid = message["client"], message["pid"]
        clients = self._watchdog.clients
        client = clients.get(number)
        if message["restart"] != self._restart:
            connection.close()  # From an earlier start.
            return
        first = next((c for c in clients.values() if c.facts), None)
        reason = None
        if client is None:
            reason = f"A process calls itself client {number}, but the run has {len(clients)} clients."
        elif client.connection is not None or client.facts:
            reason = (
                f"Two processes call themselves client {number}: process {client.pid} on "
                f"{name_of_host(self._options, client.host)} and process {pid} on {connection.peer_address}. Each "
                "process needs a different TFSHARD_CLIENT_ID, which 'tfshard launch' sets."
            )
        elif first is not None:
            for name, value in message["facts"].items():
                if first.facts.get(name) != value:
                    reason = (
                        f"The {name} of client {number} differs from that of client {first.client_id}. It must be "
                        f"the same on all clients. Received: {value!r} and {first.facts.get(name)!r}"
                    )
        if reason is not None:
            with contextlib.suppress(OSError):
                connection.send("refused", reason=reason)
            self._watchdog.fail(reason, clients=(number,), retry=False)
            return
        assert client is not None
        client.connection, client.pid, client.job = connection, pid, message["job"]
        client.facts, client.heard = message["facts"], self._clock.now
        self._by_connection[connection] = client
        if self._watchdog.first_registered is None:
            self._watchdog.first_registered = self._clock.now
        if all(other.facts for other in clients.values()):
            jobs = [other.job for other in clients.values()]
            for each in clients.values():
                self._reply(each, {"kind": "start", "jobs": jobs, "seed": self._seed})
            if self._enrolment is not None:
                self._enrolment.close()

    # --- failures -------------------------------------------------------------------------------------

    def _interrupted(self) -> Failure | None:
        if not self._received:
            return None
        number = self._received[0]
        name = signal.Signals(number).name
        return Failure(text=f"Ended by {name}.", at=self._clock.now, code=128 + number, retry=False)

    def _report(self, failure: Failure) -> None:
        log(failure.text)
        if any(failure.tail):
            log(f"its last output:\n{chr(10).join(failure.tail)}")

    def _stop(self) -> None:
        """End all processes on all hosts."""
        number = self._received[0] if self._received else signal.SIGTERM
        deadline = self._clock.now + self._options.grace + 5.0
        self._processes.stop(number)
        for host in self._hosts.values():
            self._tell(host, "stop", restart=self._restart, signal=number)
        interrupts = len(self._received)
        while any(host.running for host in self._hosts.values()):
            self._tick()
            if len(self._received) > interrupts:
                self._processes.kill()  # The user asked twice.
            if self._clock.now > deadline:
                for host in self._hosts.values():
                    if host.running and host.connection is not None:
                        self._lose(host, "did not end its clients")
                deadline += 1.0

    def _may_restart(self, failure: Failure) -> bool:
        """Return whether to restart, and drop clients that cannot come back if enough others remain."""
        options = self._options
        if not failure.retry or self._restart >= options.max_restarts:
            return False
        deadline = self._clock.now + options.registration_timeout
        while any(self._is_lost(host) for host in self._hosts.values()) and self._clock.now < deadline:
            self._tick()  # The host's launcher may restart.
            if self._received:
                return False
        gone = {place for place in self._places if self._is_lost(self._hosts[place[0]])}
        if self._restart and not all(client.facts for client in self._watchdog.clients.values()):
            gone |= {self._places[number] for number in failure.clients if number < len(self._places)}
        left = [place for place in self._places if place not in gone]
        if not gone:
            return True
        if options.elastic_min is not None and len(left) >= options.elastic_min:
            self._places = left
            return True
        return not any(self._is_lost(self._hosts[place[0]]) for place in gone)
