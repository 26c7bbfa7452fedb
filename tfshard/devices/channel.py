"""The control channel of a launched run: authenticated messages between launchers and clients.

Both ends send a magic word and a nonce. Each direction of the connection has a key, derived from the run's secret and
the two nonces, so a recorded connection cannot be replayed. Then each message is a frame: its length, the HMAC-SHA256
of its number and text, and its text (JSON). A frame with a wrong HMAC closes the connection before its text is parsed.
The channel encrypts nothing: messages hold step numbers, checksums and error texts.

A member without a secret begins with another magic word. The two ends then make a key for this connection by a key
exchange (key_exchange.py), over which the server hands out the run's secret once to each member (enrolment.py).
"""

import contextlib
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
import time
from collections.abc import Callable, Iterable
from typing import Any

from tfshard.devices.key_exchange import PUBLIC_BYTES, BadPublicValueError, KeyExchange
from tfshard.errors import LaunchError

_MAGIC = b"tfshard1"
_EXCHANGE_MAGIC = b"tfshardX"
_NONCE_BYTES = 32
_MAC_BYTES = 32
_HEADER = struct.Struct(">I")
# The maximum bytes to buffer for a peer that has not yet proved that it knows the secret.
_FIRST_FRAME_BYTES = 1 << 16
_FRAME_BYTES = 1 << 26
_HANDSHAKE_SECONDS = 10.0
_SEND_SECONDS = 10
_MAX_STRANGERS = 64
# A dead connection is given up after about this time, in s: keepalives, and data that nobody acknowledges.
_DEAD_SECONDS = 20


class ControlError(Exception):
    """The peer does not know the secret or does not speak the protocol."""


def new_secret() -> str:
    """Return a secret for one run: 256 random bits as hexadecimal digits."""
    return os.urandom(32).hex()


class Connection:
    """One end of a connection. Messages are JSON objects.

    Any thread may send. Only one thread receives.

    Attributes:
        peer_address: The IP address of the other end.
        own_address: The IP address of this end.
        is_exchange: True if the two ends share no secret and made a key for this connection alone.
    """

    def __init__(self, sock: socket.socket, secret: str | None, *, is_server: bool, may_exchange: bool = False):
        """Begin to talk.

        Args:
            sock: The connected socket.
            secret: The run's secret. None, at a client, for a key exchange.
            is_server: True at the end that accepted the connection.
            may_exchange: True if this server exchanges keys with clients that have no secret.

        Raises:
            OSError: The connection is closed.
            ControlError: The peer does not speak the protocol, or one end has no secret and the other one does.
        """
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._socket = sock
        self._lock = threading.Lock()
        self._sent = self._received = 0
        self.peer_address, self.own_address = sock.getpeername()[0], sock.getsockname()[0]
        sock.settimeout(_HANDSHAKE_SECONDS)
        nonce = os.urandom(_NONCE_BYTES)
        sock.sendall((_EXCHANGE_MAGIC if secret is None else _MAGIC) + nonce)
        opening = self._read(len(_MAGIC) + _NONCE_BYTES)
        magic, theirs = opening[: len(_MAGIC)], opening[len(_MAGIC) :]
        self.is_exchange = secret is None or (may_exchange and magic == _EXCHANGE_MAGIC)
        if magic == _EXCHANGE_MAGIC and not self.is_exchange:
            raise ControlError("It has no secret, and this run has one: set TFSHARD_SECRET on all members.")
        if magic not in (_MAGIC, _EXCHANGE_MAGIC):
            raise ControlError("It does not speak the protocol of tfshard's control channel.")
        nonces = (theirs + nonce) if is_server else (nonce + theirs)
        key = self._exchanged(nonces) if secret is None or self.is_exchange else secret.encode()
        keys = [hmac.digest(key, word + nonces, hashlib.sha256) for word in (b"to server", b"to client")]
        self._receive_key, self._send_key = keys if is_server else keys[::-1]
        self._pad = hmac.digest(key, b"the run's secret" + nonces, hashlib.sha256)

    def _exchanged(self, nonces: bytes) -> bytes:
        exchange = KeyExchange()
        self._socket.sendall(exchange.public)
        try:
            return exchange.key(self._read(PUBLIC_BYTES), nonces)
        except BadPublicValueError as error:
            raise ControlError(str(error)) from None

    def sealed(self, secret: str) -> str:
        """Return a secret of 32 bytes in hexadecimal digits, encrypted for the other end. Call this once."""
        return bytes(a ^ b for a, b in zip(bytes.fromhex(secret), self._pad, strict=True)).hex()

    def unsealed(self, text: str) -> str:
        """Return the secret that the other end `sealed`."""
        return self.sealed(text)

    def notice_a_dead_peer(self) -> None:
        """Close this connection some 20 s after the other machine or the network is gone (Linux)."""
        sock = self._socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_SECONDS // 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_SECONDS // 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_SECONDS * 1000)

    @classmethod
    def open(cls, address: str, secret: str | None, timeout: float) -> "Connection":
        """Connect to `address` (`host:port`). Without a secret, make a key by a key exchange.

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

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        events: "queue.Queue[Received]",
        enrol: Callable[[dict[str, Any], str], str | None] | None = None,
    ):
        """Start to listen.

        Args:
            host: The IP address to listen on.
            port: The port. 0 picks a free port.
            secret: The run's secret.
            events: The queue for each `Received`.
            enrol: Hands the run's secret to clients that have none: takes a client's first message and its IP address,
                and returns why the client does not get it, or None. Without `enrol`, such clients are refused. The
                secret is then made by `new_secret`.

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
        self._enrol = enrol
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
            # A run may have more members than this. The others wait in the kernel's queue.
            self._strangers.acquire()
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return  # Closed.
            threading.Thread(target=self._serve, args=(sock,), name="tfshard-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        known = False
        connection = None
        try:
            connection = Connection(sock, self._secret, is_server=True, may_exchange=self._enrol is not None)
            if connection.is_exchange:
                self._hand_out(connection)
                return
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

    def _hand_out(self, connection: Connection) -> None:
        assert self._enrol is not None
        message = connection.receive()
        if message is None:
            return
        reason = self._enrol(message, connection.peer_address)
        if reason is None:
            connection.send("enrolled", secret=connection.sealed(self._secret))
        else:
            self.refused.put(f"{connection.peer_address}: {reason}")
            connection.send("refused", reason=reason)


def check_is_reachable(name: str, address: str, others: Iterable[str]) -> None:
    """Check that other hosts can reach a name, which systems such as Debian give the address 127.0.1.1 on its own host.

    Args:
        name: The name of this host.
        address: Its address, as this host sees it.
        others: The names or addresses of the other hosts.

    Raises:
        LaunchError: The address is a loopback address, and another host has an address that is not.
    """
    if not _is_loopback(address):
        return
    for other in others:
        with contextlib.suppress(OSError):
            found = str(socket.getaddrinfo(other, None, proto=socket.IPPROTO_TCP)[0][4][0])
            if not _is_loopback(found):
                raise LaunchError(
                    f"This machine gives its own name '{name}' the address {address} (see /etc/hosts), which '{other}' "
                    f"at {found} cannot reach. Name the address of this machine in the private network instead, or "
                    f"correct /etc/hosts. Received: address={name!r}"
                )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def check_private(host: str, *, allow_public: bool = False, wait: float = 0.0) -> str:
    """Return the IP address of `host`, which must be loopback or private.

    Args:
        host: A name or an IP address of this machine.
        allow_public: If True, allow any address.
        wait: The seconds to wait for the name. Clusters may publish names after the machines start.

    Raises:
        LaunchError: The host has no address, or a public one.

    >>> check_private("127.0.0.1")
    '127.0.0.1'
    >>> check_private("8.8.8.8")
    Traceback (most recent call last):
    ...
    tfshard.errors.LaunchError: The control channel listens on loopback and private addresses only. ...
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            address = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)[0][4][0]
            break
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            reason = str(error)
        raise LaunchError(f"The address of '{host}' cannot be found: {reason}. Received: address={host!r}")
    ip = ipaddress.ip_address(str(address).partition("%")[0])
    if (ip.is_global or ip.is_unspecified or ip.is_multicast) and not allow_public:
        raise LaunchError(
            "The control channel listens on loopback and private addresses only. Give an address of the machine's "
            "private network, or pass --allow_public_address (TFSHARD_ALLOW_PUBLIC_ADDRESS=1) if a firewall protects "
            f"it; see: tfshard docs security. Received: address={host!r} ({ip})"
        )
    return str(address)
