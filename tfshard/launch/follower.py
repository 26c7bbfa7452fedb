"""The launcher of every host but the first, which follows the leader.

The follower starts and ends the clients of its host and reports their exit to the leader. If the leader is gone, the
follower ends its clients.
"""

import contextlib
import queue
import threading
import time
from typing import Any

from tfshard.command_line import DEFAULT_PORT
from tfshard.devices.channel import Connection, ControlError
from tfshard.devices.clients import Settings
from tfshard.devices.enrolment import enrolled_secret
from tfshard.errors import LaunchError
from tfshard.launch.options import HOST_SECONDS, Clock, Launch, client_environment, log, shared_options
from tfshard.launch.processes import Processes


class Follower:
    """The launcher of a host other than the first. It does what the leader says."""

    def __init__(self, options: Launch, received: list[int]):
        self._options = options
        self._received = received
        # Without a secret, the leader hands one out.
        self._secret = options.secret or ""
        self._clock = Clock()
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._processes = Processes(options.grace)
        self._restart = 0
        self._stopping = False

    def run(self) -> int:
        """Join the leader and serve it until the leader ends the run. Returns the exit code."""
        connection = self._connect()
        threading.Thread(target=self._receive, args=(connection,), daemon=True).start()
        heard = self._clock.now
        try:
            connection.send("host", index=self._options.host_index, options=shared_options(self._options))
            while True:
                messages = self._next_messages()
                self._clock.tick()
                if messages:
                    heard = self._clock.now
                for message in messages:
                    if message is None:
                        return self._lost("closed its connection")
                    if message["kind"] == "end":
                        if message["code"]:
                            log(message["text"])
                        code: int = message["code"]
                        return code
                    self._do(message)
                if self._clock.now - heard > HOST_SECONDS:
                    return self._lost(f"sent no heartbeat for {HOST_SECONDS:.0f} s")
                self._serve(connection)
        except OSError:
            return self._lost("closed its connection")
        finally:
            self._processes.kill()
            while self._processes.running:
                self._processes.poll()
            connection.close()

    def _connect(self) -> Connection:
        options = self._options
        address = f"{options.address or options.hosts[0]}:{options.port or DEFAULT_PORT}"
        if options.secret is None:
            assert options.identity is not None
            self._secret = enrolled_secret(
                address, options.host_index, options.identity, options.startup_timeout, lambda: bool(self._received)
            )
        deadline = time.monotonic() + options.startup_timeout
        while True:
            try:
                return Connection.open(address, self._secret, timeout=10.0)
            except (OSError, ControlError, ValueError) as error:
                # The leader may not have started yet.
                if time.monotonic() > deadline or not isinstance(error, OSError) or self._received:
                    raise LaunchError(
                        f"The launcher of host 0 cannot be reached: {error}. Received: {address}"
                    ) from None
            time.sleep(0.5)

    def _receive(self, connection: Connection) -> None:
        with contextlib.suppress(ControlError, OSError, ValueError):
            while (message := connection.receive()) is not None:
                self._messages.put(message)
        self._messages.put(None)

    def _next_messages(self) -> list[dict[str, Any] | None]:
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._messages.get(timeout=0.1))
            while True:
                found.append(self._messages.get_nowait())
        return found

    def _do(self, message: dict[str, Any]) -> None:
        if message["kind"] == "start":
            settings = Settings(**{**message["settings"], "secret": self._secret})
            self._restart, self._stopping = settings.restart, False
            environment = client_environment(settings, self._options)
            self._processes.start(settings.client_id, self._options.command, environment, message["width"])
        elif message["kind"] == "stop":
            self._restart, self._stopping = message["restart"], True
            self._processes.stop(message["signal"])

    def _serve(self, connection: Connection) -> None:
        connection.send("beat")
        for process in self._processes.poll():
            connection.send(
                "ended", client=process.client_id, status=process.status, tail=process.tail(), restart=self._restart
            )
        if self._stopping and not self._processes.running:
            connection.send("stopped", restart=self._restart)
            self._stopping = False
        if self._received:
            connection.send("interrupted", signal=self._received.pop(0))

    def _lost(self, what: str) -> int:
        log(f"The launcher of host 0 {what}: this launcher stops all clients of its host.")
        return 1
