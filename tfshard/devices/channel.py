"""The control channel of a launched run: authenticated messages between its launchers and clients.

Both ends send a magic word and a nonce. The keys of the connection, one for each direction, are made of the run's
secret and the two nonces, so that what was recorded cannot be played again. Then each message is a frame: length,
HMAC-SHA256 of its number and its text, text (JSON). A frame with another code ends the connection before its text is
looked at. Nothing is encrypted: messages hold step numbers, checksums and the text of errors.
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
# Until the other end has shown that it knows the secret, it may not make this one hold more than this.
_FIRST_FRAME_BYTES = 1 << 16
_FRAME_BYTES = 1 << 26
_HANDSHAKE_SECONDS = 10.0
_SEND_SECONDS = 10
_MAX_STRANGERS = 64


class ControlError(Exception):
    """The other end of a connection does not know the secret, or does not speak the protocol."""


def new_secret() -> str:
    """A secret for one run, 256 random bits as hexadecimal digits."""
    return os.urandom(32).hex()


class Connection:
    """One end of a connection; messages are JSON objects.

    Any thread may send; one thread receives.
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
        """Connects to `address` (`host:port`).

        Raises:
            OSError: Nobody listens there.
            ControlError: Somebody else does.
        """
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
        try:
            return cls(sock, secret, is_server=False)
        except BaseException:
            sock.close()
            raise

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message.

        Raises:
            OSError: The connection is closed, or the other end takes nothing any more.
        """
        text = json.dumps({"kind": kind, **fields}).encode()
        with self._lock:
            code = _code(self._send_key, self._sent, text)
            self._sent += 1
            self._socket.sendall(_HEADER.pack(len(text)) + code + text)

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message; None when the connection is closed.

        Raises:
            ControlError: The other end does not know the secret.
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
        """Closes the connection; a receiver that waits gets None."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It is closed already.
        self._socket.close()


def _code(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + text, hashlib.sha256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Received:
    """What a `Server` puts in its queue.

    Attributes:
        connection: Where it came from.
        message: The message; None when the connection was closed.
    """

    connection: Connection
    message: dict[str, Any] | None


class Server:
    """Accepts connections and puts the messages of all of them into one queue.

    Attributes:
        address: `host:port` where it listens.
        refused: Why connections were refused, for the log.
    """

    def __init__(self, host: str, port: int, secret: str, events: "queue.Queue[Received]"):
        """Args:
        host: The IP address to listen on.
        port: The port; 0 for any free one.
        secret: Of the run.
        events: Where to put each `Received`.

        Raises:
            LaunchError: The port is taken, or the address is not this machine's.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port that an earlier run left is free at once; one that is listened on is still refused.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(_MAX_STRANGERS)
        except OSError as error:
            self._socket.close()
            raise LaunchError(
                f"The control channel cannot listen on {host}:{port}: {error.strerror}. Choose another address or "
                f"port (--address, --port), or end the program that holds it. Received: port={port}"
            ) from None
        bound = self._socket.getsockname()[1]
        self.address = f"[{host}]:{bound}" if family == socket.AF_INET6 else f"{host}:{bound}"
        self.refused: queue.Queue[str] = queue.Queue()
        self._secret = secret
        self._events = events
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        threading.Thread(target=self._accept, name="tfshard-accept", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        try:
            # Wakes accept() up, which would otherwise keep the port until the next connection.
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
    """The IP address of `host`, which must be loopback or private.

    Args:
        host: A name or an IP address of this machine.
        allow_public: Take any address.

    Raises:
        LaunchError: Not an address, or a public one.

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
