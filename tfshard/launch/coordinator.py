"""The leader of a run whose clients a cluster started: it watches them, and starts and ends no process.

The coordinator knows a client by its connection alone. A connection that closes before the client has left the run
means that its process has ended, or that its machine or the network is gone.
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from tfshard.devices.channel import Connection
from tfshard.launch.launcher import signals
from tfshard.launch.leader import Leader
from tfshard.launch.options import Launch, log_as
from tfshard.launch.watchdog import Failure, WatchedClient


class Coordinator(Leader):
    """The leader of clients that it has not started.

    Attributes:
        address: The `host:port` of the control channel.
        secret: The run's secret.
    """

    def __init__(self, options: Launch, received: list[int]):
        self._parent = os.getppid()
        super().__init__(options, received)
        self.address, self.secret = self._server.address, self._secret

    def _num_members(self) -> int:
        return len(self._places)

    def _start(self, client: WatchedClient) -> None:
        """The cluster has started the client."""

    def _tick(self) -> None:
        super()._tick()
        first = self._watchdog.clients.get(0)
        if first is not None and not first.facts and first.status is None and os.getppid() != self._parent:
            first.status = 1
            self._watchdog.fail("Client 0 ended before it joined the run.", clients=(0,))

    def _register(self, connection: Connection, message: dict[str, Any]) -> None:
        connection.notice_a_dead_peer()
        super()._register(connection, message)

    def _closed(self, connection: Connection) -> None:
        client = self._by_connection.pop(connection, None)
        if client is not None:
            client.connection = None
            self._watchdog.vanished(client)

    def _stop(self) -> None:
        """The clients end when they hear of the failure."""

    def _report(self, failure: Failure) -> None:
        super()._report(failure)
        for client in self._watchdog.clients.values():
            if client.connection is not None:
                with contextlib.suppress(OSError):
                    client.connection.send("end", text=failure.text)
                client.connection.close()


def serve(options: Mapping[str, Any], tell: Any) -> int:
    """Coordinate a run to its end. Returns 0, or the exit code of the failure.

    Args:
        options: The host, port, secret, number of clients, identity and time limits.
        tell: A function that takes the address and the secret once the coordinator listens.
    """
    log_as("tfshard coordinator")
    launch = Launch(
        command=(),
        num_processes=options["num_clients"],
        hosts=(options["host"],),
        port=options["port"],
        secret=options["secret"],
        identity=options["identity"],
        allow_public_address=options["allow_public_address"],
        **options["timeouts"],
    )
    with signals() as received:
        coordinator = Coordinator(launch, received)
        tell(coordinator.address, coordinator.secret)
        return coordinator.run()
