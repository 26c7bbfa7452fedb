"""The model of streams finds the deadlock of messages between devices, and none of messages between hosts."""

import pytest

import streams
from tfshard.devices import messages

FIRST, SECOND = (f"/job:worker/replica:0/task:{client}/device:GPU:0" for client in (0, 1))


def two_messages(*, on_streams: bool) -> streams.Threads:
    """Return the threads of two clients that each send a message in one thread, and receive one in another."""
    return {
        (source, target, end): streams.begun((source, target), [end] if on_streams else [])
        for source, target in ((FIRST, SECOND), (SECOND, FIRST))
        for end in (source, target)
    }


def test_messages_between_devices_deadlock_if_one_device_sends_first_and_the_other_receives_first():
    threads = two_messages(on_streams=True)
    ends = list(streams.orders(threads))
    assert any(state.has_ended() for state in ends)
    stuck = [state for state in ends if not state.has_ended()]
    assert stuck
    for state in stuck:
        assert {keys[0] for keys in state.streams.values()} == {(FIRST, SECOND), (SECOND, FIRST)}
    assert any(not streams.drawn_order(threads, seed).has_ended() for seed in range(100))


def test_messages_between_devices_in_one_order_on_both_ends_do_not_deadlock():
    threads = two_messages(on_streams=True)
    alike = {end: [*threads[FIRST, SECOND, end], *threads[SECOND, FIRST, end]] for end in (FIRST, SECOND)}
    assert [state.has_ended() for state in streams.orders(alike)] == [True]


def test_messages_between_hosts_do_not_deadlock_in_any_order():
    threads = two_messages(on_streams=False)
    assert all(state.has_ended() for state in streams.orders(threads))
    assert all(streams.drawn_order(threads, seed).has_ended() for seed in range(100))
    never = {**threads, (FIRST, SECOND, FIRST): [streams.Action("wait", ("nothing",))]}
    assert not any(state.has_ended() for state in streams.orders(never)), "premise: a lost message is found"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (FIRST, "/job:worker/task:0/device:CPU:0"),
        (SECOND, "/job:worker/task:1/device:CPU:0"),
        ("host:1", "/job:worker/task:1/device:CPU:0"),
        ("/job:worker/replica:0/task:1/device:CPU:3", "/job:worker/replica:0/task:1/device:CPU:3"),
    ],
)
def test_the_host_broadcasts_the_messages_of_its_gpus(end, expected, monkeypatch):
    two = type("Two", (), {"count": 2, "rank": 0})()
    monkeypatch.setattr(messages.clients, "here", lambda: two)
    assert messages._device(end) == expected
