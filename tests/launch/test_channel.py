"""The control channel authenticates its messages, and refuses all others."""

import contextlib
import hashlib
import hmac
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from queue import Queue

import pytest

import tfshard
from tfshard.devices import channel, enrolment, key_exchange

SECRET = "the secret"
MESSAGES = ({"kind": "hello", "text": "the first message of a client"}, {"kind": "beat", "number": 12345})


@pytest.fixture
def server():
    events: Queue = Queue()
    made = channel.Server("127.0.0.1", 0, "the secret", events)
    made.events = events
    yield made
    made.close()


def test_messages_go_both_ways(server):
    connection = channel.Connection.open(server.address, "the secret", timeout=5)
    connection.send("hello", number=1)
    received = server.events.get(timeout=5)
    assert received.message == {"kind": "hello", "number": 1}
    received.connection.send("reply", text="short")
    received.connection.send("reply", text="x" * 100_000)
    assert connection.receive() == {"kind": "reply", "text": "short"}
    assert connection.receive()["text"] == "x" * 100_000
    connection.close()
    assert server.events.get(timeout=5).message is None


def test_a_wrong_secret_is_refused_before_a_message_is_looked_at(server):
    connection = channel.Connection.open(server.address, "another secret", timeout=5)
    connection.send("hello")
    assert connection.receive() is None
    connection.close()
    assert "does not know the secret" in server.refused.get(timeout=5)
    assert server.events.empty()


def test_a_recorded_conversation_cannot_be_played_again(server):
    """A proxy records the client's messages."""
    recorded = []
    proxy = socket.create_server(("127.0.0.1", 0))

    def relay():
        inner, _ = proxy.accept()
        host, port = server.address.split(":")
        outer = socket.create_connection((host, int(port)))

        def back():
            with outer:
                while data := outer.recv(1 << 16):
                    inner.sendall(data)

        threading.Thread(target=back, daemon=True).start()
        with inner:
            while data := inner.recv(1 << 16):
                recorded.append(data)
                outer.sendall(data)
            outer.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=relay, daemon=True).start()
    connection = channel.Connection.open(f"127.0.0.1:{proxy.getsockname()[1]}", "the secret", timeout=5)
    connection.send("hello")
    assert server.events.get(timeout=5).message == {"kind": "hello"}
    connection.close()
    assert server.events.get(timeout=5).message is None
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as replay:
        replay.sendall(b"".join(recorded))
        assert "does not know the secret" in server.refused.get(timeout=5)
    assert server.events.empty()
    proxy.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 5, b"tfshard1" + bytes(32) + struct.pack(">I", 1 << 31)])
def test_strangers_are_refused(server, data):
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(data + bytes(64))
        assert server.refused.get(timeout=5)
    assert server.events.empty()


def test_a_closed_server_frees_its_port(server):
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(tfshard.errors.LaunchError, match="Address already in use"):
        channel.Server("127.0.0.1", port, "the secret", Queue())
    server.close()
    time.sleep(0.1)
    channel.Server("127.0.0.1", port, "the secret", Queue()).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "::", "224.0.0.1"])
def test_public_addresses_are_refused_unless_allowed(host):
    with pytest.raises(tfshard.errors.LaunchError, match="loopback and private addresses only"):
        channel.check_private(host)
    assert channel.check_private(host, allow_public=True) == host


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.4", "172.16.0.1", "::1", "localhost"])
def test_private_addresses_are_taken(host):
    assert channel.check_private(host)


# --- corrupted bytes --------------------------------------------------------------------------------------


def conversation(server_nonce: bytes, nonce: bytes) -> bytes:
    """Return the bytes that a client sends: an independent implementation of the protocol."""
    key = hmac.digest(SECRET.encode(), b"to server" + nonce + server_nonce, hashlib.sha256)
    sent = b"tfshard1" + nonce
    for number, message in enumerate(MESSAGES):
        text = json.dumps(message).encode()
        sent += struct.pack(">I", len(text)) + hmac.digest(key, struct.pack(">Q", number) + text, hashlib.sha256) + text
    return sent


OPENING = len(b"tfshard1") + 32
FIRST = OPENING + 4 + 32 + len(json.dumps(MESSAGES[0]))
LENGTH = len(conversation(bytes(32), bytes(32)))


def corruptions() -> Iterator[tuple[int, int]]:
    """Yield each byte position of a conversation once, with a change of the byte."""
    drawn = random.Random("corruptions")
    yield from ((place, drawn.randrange(1, 256)) for place in range(LENGTH))


def say(sock: socket.socket, place: int | None, change: int = 0) -> None:
    """Send a conversation with one changed byte, and close the sending side."""
    nonce = os.urandom(32)
    server_nonce = sock.recv(OPENING, socket.MSG_WAITALL)[8:]
    sent = bytearray(conversation(server_nonce, nonce))
    if place is not None:
        sent[place] ^= change
    with contextlib.suppress(OSError):  # The server may refuse it before its end.
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)


def received(place: int | None, change: int = 0) -> Iterator[dict]:
    """Yield the messages that a connection accepts from the conversation."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stranger = socket.create_connection(listening.getsockname())
        inner, _ = listening.accept()
    with stranger, inner:
        thread = threading.Thread(target=say, args=(stranger, place, change))
        thread.start()
        try:
            connection = channel.Connection(inner, SECRET, is_server=True)
            while (message := connection.receive()) is not None:
                yield message
        finally:
            thread.join()


def test_a_changed_byte_is_a_control_error_and_nothing_behind_it_is_taken():
    assert list(received(None)) == list(MESSAGES)
    tried = list(corruptions())
    assert len(tried) == len(set(tried)) >= 200
    for place, change in tried:
        taken = []
        with pytest.raises(channel.ControlError):
            for message in received(place, change):
                taken.append(message)
        assert taken == list(MESSAGES[: place >= FIRST]), place


def test_a_server_closes_what_has_a_changed_byte_and_goes_on(server):
    host, port = server.address.split(":")
    for place, change in [*corruptions(), (None, 0)]:
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            say(sock, place, change)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        expected = list(MESSAGES[: len(MESSAGES) if place is None else place >= FIRST])
        if expected:
            assert [server.events.get(timeout=30).message for _ in expected] == expected
            assert server.events.get(timeout=30).message is None
        else:
            assert server.refused.get(timeout=30)
    assert server.events.empty() and server.refused.empty()


# --- members without a secret ---------------------------------------------------------------------------------


RUN = {"system": "SLURM", "job": "4711.0", "members": 3}


@pytest.fixture
def coordinator():
    """A server that hands its secret to members 1 and 2 of a run."""
    events: Queue = Queue()
    members = enrolment.Enrolment(RUN, 3)
    made = channel.Server("127.0.0.1", 0, channel.new_secret(), events, members.enrol)
    made.events, made.members = events, members
    yield made
    made.close()


def secret_for(server, member, run=RUN) -> str:
    return enrolment.enrolled_secret(server.address, member, run, seconds=5)


def test_the_prime_of_the_exchange_is_a_safe_prime_of_the_formula_of_rfc_7919():
    # floor(2**2942 * e), from the series of e.
    total, term, k = 0, 1 << 3100, 1
    while term:
        total, term, k = total + term, term // k, k + 1
    prime = 2**3072 - 2**3008 + ((total >> (3100 - 2942)) + 2625351) * 2**64 - 1
    assert key_exchange.PRIME == prime
    for number in (prime, (prime - 1) // 2):
        assert pow(2, number - 1, number) == 1 and pow(3, number - 1, number) == 1


@pytest.mark.parametrize("value", [0, 1, key_exchange.PRIME - 1, key_exchange.PRIME, 2**3072 - 1])
def test_a_public_value_that_gives_the_key_away_is_refused(value):
    with pytest.raises(key_exchange.BadPublicValueError):
        key_exchange.KeyExchange().key(value.to_bytes(key_exchange.PUBLIC_BYTES, "big"), b"")


def test_each_member_gets_the_secret_once_and_can_use_it(coordinator):
    for member in (1, 2):
        connection = channel.Connection.open(coordinator.address, secret_for(coordinator, member), timeout=5)
        connection.send("hello", number=member)
        assert coordinator.events.get(timeout=5).message == {"kind": "hello", "number": member}
        connection.close()
        assert coordinator.events.get(timeout=5).message is None
    assert coordinator.members.fault is None
    coordinator.members.close()
    with pytest.raises(tfshard.errors.LaunchError, match="all 3 members have started.*set TFSHARD_SECRET"):
        secret_for(coordinator, 2)
    assert coordinator.members.fault is None, "a stranger who comes later does not end the run"


@pytest.mark.parametrize("present", [(1,), (2, 1)])
def test_a_second_process_in_a_members_place_gets_nothing_and_ends_the_run(coordinator, present):
    """Also when a stranger has taken the last place."""
    for member in present:
        secret_for(coordinator, member)
    with pytest.raises(tfshard.errors.LaunchError, match="Two processes call themselves member 1"):
        secret_for(coordinator, 1)
    assert "a stranger has taken a member's place" in coordinator.members.fault


@pytest.mark.parametrize(
    ("member", "run", "message"),
    [
        (1, {**RUN, "job": "4712.0"}, "belongs to another run"),
        (0, RUN, "members 0 to 2, and 0 is here"),
        (3, RUN, "members 0 to 2"),
        ("1", RUN, "members 0 to 2"),
    ],
)
def test_a_member_of_another_run_or_with_another_number_is_refused(coordinator, member, run, message):
    with pytest.raises(tfshard.errors.LaunchError, match=message):
        secret_for(coordinator, member, run)
    assert coordinator.members.fault is None


def test_a_run_with_a_secret_hands_it_to_nobody(server):
    with pytest.raises(tfshard.errors.LaunchError, match="does not hand out a secret.*TFSHARD_SECRET, set it on all"):
        enrolment.enrolled_secret(server.address, 1, RUN, seconds=5)
    assert "It has no secret, and this run has one" in server.refused.get(timeout=5)
    assert server.events.empty()


def test_an_exchanged_key_opens_nothing_but_the_enrolment(coordinator):
    """A client without the run's secret cannot send the messages of members."""
    connection = channel.Connection.open(coordinator.address, None, timeout=5)
    connection.send("register", client=1)
    assert connection.receive()["kind"] == "refused"
    connection.close()
    assert coordinator.events.empty()


def test_a_listener_does_not_see_the_secret(coordinator):
    """A proxy records what both ends send."""
    recorded = []
    proxy = socket.create_server(("127.0.0.1", 0))

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                recorded.append(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def relay():
        host, port = coordinator.address.split(":")
        inner, _ = proxy.accept()
        with inner, socket.create_connection((host, int(port))) as outer:
            back = threading.Thread(target=copy, args=(outer, inner), daemon=True)
            back.start()
            copy(inner, outer)
            back.join()

    relaying = threading.Thread(target=relay, daemon=True)
    relaying.start()
    address = f"127.0.0.1:{proxy.getsockname()[1]}"
    secret = enrolment.enrolled_secret(address, 1, RUN, seconds=5)
    relaying.join(5)
    proxy.close()
    seen = b"".join(recorded)
    assert b"enrolled" in seen, "premise: the whole exchange was recorded"
    assert secret.encode() not in seen and bytes.fromhex(secret) not in seen
    connection = channel.Connection.open(coordinator.address, secret, timeout=5)
    connection.send("hello")
    assert coordinator.events.get(timeout=5).message == {"kind": "hello"}
    connection.close()


def test_messages_of_an_exchange_that_are_changed_on_the_way_are_refused(coordinator):
    connection = channel.Connection.open(coordinator.address, None, timeout=5)
    connection._send_key = b"another key"
    connection.send("enrol", member=1, run=RUN)
    assert connection.receive() is None
    connection.close()
    assert "does not know the secret" in coordinator.refused.get(timeout=5)
    assert secret_for(coordinator, 1), "the place of member 1 is still free"


def test_a_name_that_only_its_own_host_can_reach_is_refused(monkeypatch):
    """Debian writes `127.0.1.1 NAME` to /etc/hosts."""
    addresses = {"node0": "127.0.1.1", "node1": "10.0.0.2", "alone": "127.0.0.1"}

    def resolve(name, *_, **__):
        if name not in addresses:
            raise OSError("unknown name")
        return [(2, 1, 6, "", (addresses[name], 0))]

    monkeypatch.setattr(channel.socket, "getaddrinfo", resolve)
    with pytest.raises(tfshard.errors.LaunchError, match="'node0' the address 127.0.1.1 .* which 'node1' at 10.0.0.2"):
        channel.check_is_reachable("node0", "127.0.1.1", ["later", "node1"])
    channel.check_is_reachable("node0", "10.0.0.1", ["node1"])
    channel.check_is_reachable("node0", "127.0.1.1", ["alone", "later"])
