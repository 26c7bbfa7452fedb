"""A local S3 server (moto) on loopback, behind proxies that inject faults (tests/fault_proxy.py)."""

import contextlib
import dataclasses
import http.client
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
BUCKET = "bucket"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """A running server.

    Attributes:
        port: Its own port.
        doors: The ports of the proxies.
    """

    port: int
    doors: tuple[int, ...]

    def environment(self, door: int | None = None) -> dict[str, str]:
        """Return the environment variables with which any S3 client finds the server, directly or through a proxy."""
        port = self.port if door is None else self.doors[door]
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def options(self, door: int | None = None) -> dict[str, object]:
        """Return the `storage_options` of the server, directly or through a proxy."""
        found = self.environment(door)
        return {
            "key": found["AWS_ACCESS_KEY_ID"],
            "secret": found["AWS_SECRET_ACCESS_KEY"],
            "client_kwargs": {"endpoint_url": found["AWS_ENDPOINT_URL"], "region_name": found["AWS_DEFAULT_REGION"]},
        }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextlib.contextmanager
def running(doors: int = 1) -> Iterator[Server]:
    """Run a server with an empty bucket."""
    server = Server(port=free_port(), doors=tuple(free_port() for _ in range(doors)))
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    programs = [
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port)],
        [sys.executable, str(HERE / "fault_proxy.py"), str(server.port), *map(str, server.doors)],
    ]
    processes = [
        subprocess.Popen(each, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for each in programs
    ]
    try:
        for port in (server.port, *server.doors):
            _wait(port, processes)
        assert _request(server.port, "PUT", f"/{BUCKET}") == 200
        yield server
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _request(port: int, method: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()


def _wait(port: int, processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert all(process.poll() is None for process in processes), "a server ended"
        assert time.monotonic() < deadline, "a server does not answer"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
