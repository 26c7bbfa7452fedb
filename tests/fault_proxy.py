"""An HTTP proxy on loopback that injects faults in front of a server. As a program, proxies until it is stopped.

    python tests/fault_proxy.py UPSTREAM_PORT PORT [PORT ...]

A request to `/fault-proxy` with a JSON object sets the faults of the port that it comes to, and returns the requests
that the port has seen since the faults were set before:

    {"refuse": 20.0}                           answer 503 for 20 seconds
    {"refuse": 20.0, "drop": true}             answer 503, or close the connection, by turns
    {"kill": [pid, number, "before"]}          SIGKILL a process at a change, before the server sees the request
    {"kill": [pid, number, "after"]}           after the server has made the change, before the process knows
    {}                                         no faults

A change is a request that changes something: PUT, POST or DELETE. Of the requests whose connection is closed, every
other one reaches the server.
"""

import dataclasses
import http.client
import http.server
import json
import os
import signal
import sys
import threading
import time

PATH = "/fault-proxy"
_DENIED = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@dataclasses.dataclass
class Faults:
    """The faults of a port.

    Attributes:
        refuse_until: The time until which requests are refused.
        drop: True to close connections, too.
        kill: The process to kill, the number of the change, and `"before"` or `"after"`.
        seen: Method and path of each change.
        refused: How many requests were refused.
    """

    refuse_until: float = 0.0
    drop: bool = False
    kill: tuple[int, int, str] | None = None
    seen: list[str] = dataclasses.field(default_factory=list)
    refused: int = 0


class Proxy(http.server.ThreadingHTTPServer):
    """A proxy at one port of loopback."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, port: int, upstream: int):
        super().__init__(("127.0.0.1", port), _Handler)
        self.upstream = upstream
        self.lock = threading.Lock()
        self.faults = Faults()

    def handle_error(self, request, client_address):
        """A client that was killed closes its connections."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *args):
        """Print nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return found

    def _any(self) -> None:
        body = self._body()
        if self.path == PATH:
            self._set(json.loads(body or b"{}"))
            return
        is_change = self.command in ("PUT", "POST", "DELETE")
        with self.server.lock:
            faults = self.server.faults
            number = len(faults.seen)
            if is_change:
                faults.seen.append(f"{self.command} {self.path}")
            refuses = time.monotonic() < faults.refuse_until
            faults.refused += refuses
            turn = faults.refused
        kills = faults.kill if is_change and faults.kill is not None and faults.kill[1] == number else None
        if kills is not None and kills[2] == "before":
            self._kill(kills[0])
            return
        if refuses and not (faults.drop and turn % 2):
            self._answer(503, {"Content-Type": "application/xml"}, _DENIED)
            return
        if refuses and turn % 4 == 1:
            self.close_connection = True  # The server does not see it.
            return
        answer = self._forward(body)
        if kills is not None:
            self._kill(kills[0])
            return
        if refuses:
            self.close_connection = True  # The server has done it, and the client does not know.
            return
        self._answer(*answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.close_connection = True

    def _set(self, wanted: dict) -> None:
        with self.server.lock:
            before = self.server.faults
            self.server.faults = Faults(
                refuse_until=time.monotonic() + wanted.get("refuse", 0.0), drop=wanted.get("drop", False),
                kill=tuple(wanted["kill"]) if "kill" in wanted else None,
            )  # fmt: skip
        told = json.dumps({"seen": before.seen, "refused": before.refused}).encode()
        self._answer(200, {"Content-Type": "application/json"}, told)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        dropped = ("connection", "expect", "transfer-encoding", "content-length", "keep-alive")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        if body or self.command in ("PUT", "POST"):
            headers["Content-Length"] = str(len(body))
        connection.request(self.command, self.path, body=body or None, headers=headers)
        reply = connection.getresponse()
        content = reply.read()
        kept = {name: value for name, value in reply.getheaders() if name.lower() not in dropped[:1] + dropped[2:]}
        if self.command == "HEAD":
            kept["Content-Length"] = reply.getheader("Content-Length") or "0"
        connection.close()
        return reply.status, kept, content

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers and status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def control(port: int, **wanted: object) -> dict:
    """Set the faults of a port, and return what the port has seen since."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", PATH, body=json.dumps(wanted))
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def main() -> None:
    upstream, *ports = map(int, sys.argv[1:])
    proxies = [Proxy(port, upstream) for port in ports]
    for proxy in proxies[1:]:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
    proxies[0].serve_forever()


if __name__ == "__main__":
    main()
