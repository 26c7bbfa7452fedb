"""The control channel of a launched run: authenticated messages between launchers and clients.

Both ends send a magic word and a nonce. Each direction of the connection has a key, derived from the run's secret and
the two nonces, so a recorded connection cannot be replayed. Then each message is a frame: its length, the HMAC-SHA256
of its number and text, and its text (JSON). A frame with a wrong HMAC closes the connection before its text is parsed.
The channel encrypts nothing: messages hold step numbers, checksums and error texts.
"""

import dataclasses
import hashlib
import hmac
import ipaddress
import json
import os
import queue
import socket
import struct
import threading
from typing import Any

from tfshard.errors import LaunchError

_MAGIC = b"tfshard1"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_HEADER = struct.Struct(">I")
# The maximum bytes to buffer for a peer that has not yet proved that it knows the secret.
_FIRST_FRAME_BYTES = 1 << 16
_FRAME_BYTES = 1 << 26
_HANDSHAKE_SECONDS = 10.0
_SEND_SECONDS = 10
_MAX_STRANGERS = 64


class ControlError(Exception):
    """The peer does not know the secret or does not speak the protocol."""


def new_secret() -> str:
    """Return a secret for one run: 256 random bits as hexadecimal digits."""
    return os.urandom(32).hex()


class Connection:
    """One end of a connection. Messages are JSON objects.

    Any thread may send. Only one thread receives.
    """

    def __init__(self, sock: socket.socket, secret: str, *, is_server: bool):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._socket = sock
        self._lock = threading.Lock()
        self._sent = self._received = 0
        self.peer_address = sock.getpeername()[0]
        sock.settimeout(_HANDSHAKE_SECONDS)
        nonce = os.urandom(_NONCE_BYTES)
        sock.sendall(_MAGIC + nonce)
        opening = self._read(len(_MAGIC) + _NONCE_BYTES)
        if opening[: len(_MAGIC)] != _MAGIC:
            raise ControlError("It does not speak the protocol of tfshard's control channel.")
        theirs = opening[len(_MAGIC) :]
        nonces = (theirs + nonce) if is_server else (nonce + theirs)
        keys = [hmac.digest(secret.encode(), word + nonces, hashlib.sha256) for word in (b"to server", b"to client")]
        self._receive_key, self._send_key = keys if is_server else keys[::-1]

    @classmethod
    def open(cls, address: str, secret: str, timeout: float) -> "Connection":
        """Connect to `address` (`host:port`).

        Raises:
            OSError: Nobody listens at the address.
            ControlError: Another program listens at the address.
        """
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
        try:
            return cls(sock, secret, is_server=False)
        except BaseException:
            sock.close()
            raise

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message.

        Raises:
            OSError: The connection is closed, or the peer no longer reads.
        """
        text = json.dumps({"kind": kind, **fields}).encode()
        with self._lock:
            code = _code(self._send_key, self._sent, text)
            self._sent += 1
            self._socket.sendall(_HEADER.pack(len(text)) + code + text)

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message. Returns None when the connection is closed.

        Raises:
            ControlError: The peer does not know the secret or does not speak the protocol.
        """
        header = self._read(_HEADER.size + _MAC_BYTES, may_end=True)
        if not header:
            return None
        (length,) = _HEADER.unpack_from(header)
        if length > (_FRAME_BYTES if self._received else _FIRST_FRAME_BYTES):
            raise ControlError(f"It sent a message of {length} bytes, more than is allowed.")
        text = self._read(length)
        if not hmac.compare_digest(header[_HEADER.size :], _code(self._receive_key, self._received, text)):
            raise ControlError("It does not know the secret of this run.")
        if not self._received:
            self._socket.settimeout(None)
        self._received += 1
        message = json.loads(text)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ControlError("It does not speak the protocol of tfshard's control channel.")
        return message

    def _read(self, length: int, may_end: bool = False) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._socket.recv(min(length - len(data), 1 << 20))
            except ConnectionResetError:
                part = b""
            if not part:
                if may_end and not data:
                    return b""
                raise ControlError("It closed the connection in the middle of a message.")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close the connection. A waiting receiver gets None."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # Already closed.
        self._socket.close()


def _code(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + text, hashlib.sha256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Received:
    """An entry in a `Server`'s queue.

    Attributes:
        connection: The connection of the message.
        message: The message, or None when the connection was closed.
    """

    connection: Connection
    message: dict[str, Any] | None


class Server:
    """Accepts connections and puts all their messages into one queue.

    Attributes:
        address: The `host:port` on which the server listens.
        refused: The reasons for refused connections, for the log.
    """

    def __init__(self, host: str, port: int, secret: str, events: "queue.Queue[Received]"):
        """Start to listen.

        Args:
            host: The IP address to listen on.
            port: The port. 0 picks a free port.
            secret: The run's secret.
            events: The queue for each `Received`.

        Raises:
            LaunchError: The port is taken, or the address does not belong to this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Reuse the port of an earlier run at once. Binding still fails if another program listens on it.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(_MAX_STRANGERS)
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"The control channel cannot listen on {host}:{port}: {error.strerror}. Choose another address or "
                f"port (--address, --port), or stop the program that uses it. Received: port={port}"
            ) from None
        bound = self._socket.getsockname()[1]
        self.address = f"[{host}]:{bound}" if family == socket.AF_INET6 else f"{host}:{bound}"
        self.refused: queue.Queue[str] = queue.Queue()
        self._secret = secret
        self._events = events
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        threading.Thread(target=self._accept, name="tfshard-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        try:
            # Wake up accept(), which would otherwise keep the port until the next connection.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # Nobody waits in accept().
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return  # Closed.
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="tfshard-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        known = False
        connection = None
        try:
            connection = Connection(sock, self._secret, is_server=True)
            while (message := connection.receive()) is not None:
                if not known:
                    known = True
                    self._strangers.release()
                self._events.put(Received(connection=connection, message=message))
        except (ControlError, OSError, ValueError) as error:
            if not known:
                self.refused.put(f"{connection.peer_address if connection else 'a connection'}: {error}")
        finally:
            if not known:
                self._strangers.release()
            sock.close()
            if known and connection is not None:
                self._events.put(Received(connection=connection, message=None))


def check_private(host: str, *, allow_public: bool = False) -> str:
    """Return the IP address of `host`, which must be loopback or private.

    Args:
        host: A name or an IP address of this machine.
        allow_public: If True, allow any address.

    Raises:
        LaunchError: The host has no address, or a public one.

    >>> check_private("127.0.0.1")
    '127.0.0.1'
    >>> check_private("8.8.8.8")
    Traceback (most recent call last):
    ...
    tfshard.errors.LaunchError: The control channel listens on loopback and private addresses only. ...
    """
    try:
        address = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0]
    except OSError as error:
        raise LaunchError(f"The address of '{host}' cannot be found: {error}. Received: address={host!r}") from None
    ip = ipaddress.ip_address(str(address).partition("%")[0])
    if (ip.is_global or ip.is_unspecified or ip.is_multicast) and not allow_public:
        raise LaunchError(
            "The control channel listens on loopback and private addresses only. Give an address of the machine's "
            "private network, or pass --allow_public_address if a firewall protects it; see: tfshard docs security. "
            f"Received: address={host!r} ({ip})"
        )
    return str(address)
