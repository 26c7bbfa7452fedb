"""A model of the streams on which devices communicate, which explores the orders in which threads can use them.

Each device has one stream, on which operations run one after the other: NCCL's stream in TensorFlow. An operation runs
when it is the first on the streams of all its devices, and all its members have begun it. A message without a stream
goes from host to host, and runs when both ends have begun it.

A client has threads. Each does its actions in order, and any thread may be the next to do an action. A thread waits
for tasks of its client, and for operations that it has begun.
"""

import collections
import dataclasses
import itertools
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence

Key = Hashable


@dataclasses.dataclass(frozen=True)
class Action:
    """One action of a thread.

    Attributes:
        kind: `"wait"` for all facts in `keys`; `"tell"` that they are facts; or `"begin"` the operation `keys[0]`.
        keys: The facts, or the operation.
        streams: The devices on whose streams this thread puts the operation.
    """

    kind: str
    keys: tuple[Key, ...]
    streams: tuple[str, ...] = ()


Threads = Mapping[Hashable, Sequence[Action]]


def begun(key: Key, streams: Sequence[str] = ()) -> list[Action]:
    """Return the actions of a thread that begins an operation and waits for its end."""
    return [Action("begin", (key,), tuple(streams)), Action("wait", (("ended", key),))]


class State:
    """How far each thread has come, and what is on each stream."""

    def __init__(self, threads: Threads):
        self.threads = {name: tuple(actions) for name, actions in threads.items()}
        self.places = dict.fromkeys(self.threads, 0)
        self.streams: dict[str, tuple[Key, ...]] = {}
        self.facts: set[Key] = set()
        self.members: collections.Counter[Key] = collections.Counter()
        self._of_key: dict[Key, tuple[int, set[str]]] = {}
        users: dict[str, set[Hashable]] = collections.defaultdict(set)
        for name, actions in self.threads.items():
            for action in actions:
                if action.kind == "begin":
                    count, devices = self._of_key.get(action.keys[0], (0, set()))
                    self._of_key[action.keys[0]] = (count + 1, devices | set(action.streams))
                    for device in action.streams:
                        users[device].add(name)
        self.shared = {device for device, names in users.items() if len(names) > 1}

    def copy(self) -> "State":
        new = object.__new__(State)
        new.__dict__ = {**self.__dict__, "places": dict(self.places), "streams": dict(self.streams)}
        new.facts, new.members = set(self.facts), self.members.copy()
        return new

    def key(self) -> Hashable:
        return tuple(self.places.values()), tuple(sorted(self.streams.items()))

    def next_of(self, name: Hashable) -> Action | None:
        """Return the next action of a thread, if the thread can do it."""
        if self.places[name] == len(self.threads[name]):
            return None
        action = self.threads[name][self.places[name]]
        return action if action.kind != "wait" or self.facts.issuperset(action.keys) else None

    def able(self) -> list[Hashable]:
        """Return the threads that can do an action."""
        return [name for name in self.threads if self.next_of(name) is not None]

    def do(self, name: Hashable) -> None:
        """Do the next action of a thread. Operations that can run then end."""
        action = self.next_of(name)
        assert action is not None
        self.places[name] += 1
        if action.kind == "tell":
            self.facts.update(action.keys)
        elif action.kind == "begin":
            key = action.keys[0]
            self.members[key] += 1
            for device in action.streams:
                self.streams[device] = (*self.streams.get(device, ()), key)
            waiting = [key]
            while waiting:
                waiting += self._run(waiting.pop())

    def _run(self, key: Key) -> list[Key]:
        """End an operation, if it can run. Returns the operations that are then the first on their streams."""
        count, devices = self._of_key[key]
        if self.members[key] < count or any(self.streams[device][0] != key for device in devices):
            return []
        self.facts.add(("ended", key))
        firsts = []
        for device in devices:
            self.streams[device] = self.streams[device][1:]
            firsts += self.streams[device][:1]
        return firsts

    def has_ended(self) -> bool:
        return all(place == len(self.threads[name]) for name, place in self.places.items())

    def waiting(self) -> dict[Hashable, Action]:
        """Return the next action of each thread that has not ended."""
        return {
            name: self.threads[name][place] for name, place in self.places.items() if place < len(self.threads[name])
        }


def orders(threads: Threads) -> Iterator[State]:
    """Yield the last state of each order of actions, as long as it differs from the states before.

    Two threads' actions give the same state in both orders, unless both put an operation on one stream. Only the order
    of such actions is explored.
    """
    waiting, seen = [State(threads)], set()
    while waiting:
        state = waiting.pop()
        choices = _settle(state)
        if state.key() in seen:
            continue
        seen.add(state.key())
        if not choices:
            yield state
        for name in choices:
            new = state.copy()
            new.do(name)
            waiting.append(new)


def _settle(state: State) -> list[Hashable]:
    """Do all actions whose order does not matter. Returns the threads whose next action's order may matter."""
    while True:
        able = state.able()
        free = [name for name in able if not state.shared.intersection(state.next_of(name).streams)]
        if not free:
            return able
        for name in free:
            state.do(name)


def drawn_order(threads: Threads, seed: int) -> State:
    """Return the last state of an order of single actions that is drawn at random."""
    state, generator = State(threads), random.Random(seed)
    while able := state.able():
        state.do(generator.choice(able))
    return state


def threads_of(clients: Sequence[Sequence[Sequence]], devices: Sequence[Sequence[str]], *, on_streams: bool) -> Threads:
    """Return the threads of a step that launched_messages.py has recorded.

    Args:
        clients: The events of each client.
        devices: The devices of each pipeline rank.
        on_streams: True if messages between devices use the streams of both devices.
    """
    threads: dict[Hashable, list[Action]] = collections.defaultdict(list)
    for client, events in enumerate(clients):
        counts: dict[Hashable, Iterator[int]] = collections.defaultdict(itertools.count)
        ended = tuple(("task", client, event[2]) for event in events if event[1] == "end")
        for name, kind, *arguments in events:
            thread = threads[client, name]
            if kind == "begin":
                thread.append(Action("wait", tuple(("task", client, each) for each in arguments[1])))
            elif kind == "end":
                thread.append(Action("tell", (("task", client, arguments[0]),)))
            elif kind == "join":
                thread.append(Action("wait", ended))
            elif kind == "collective":
                rank = arguments[0]
                local = [device for device in devices[rank] if f"/task:{client}/" in device]
                key: Key = ("collective", rank, next(counts[rank]))
                thread += begun(key, local) if local else []
            else:
                source, target = arguments
                key = (source, target, next(counts[kind, source, target]))
                uses_streams = on_streams and not source.startswith("host:")
                if kind == "receive":
                    thread += begun(key, [target] if uses_streams else [])
                else:
                    thread.append(Action("tell", (("to send", key),)))
                    # Each pair of devices has a sender thread.
                    sender = threads[client, source, target]
                    sender.append(Action("wait", (("to send", key),)))
                    sender += begun(key, [source] if uses_streams else [])
    return threads
