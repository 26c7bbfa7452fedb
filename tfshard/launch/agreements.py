"""Agreements among the clients of a launched run, as their launcher sees them."""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(kw_only=True)
class _Agreement:
    """The n-th agreement of every client."""

    what: str
    deadline: float
    values: dict[int, dict[str, object]] = dataclasses.field(default_factory=dict)
    # Set when the agreement is decided: the fault, and whether the fault is a missing client.
    fault: str | None = None
    missing: bool = False
    decided: bool = False


class Agreements:
    """Collects and compares the values of all clients.

    Each client numbers its agreements. Agreements with the same number belong together.

    >>> agreements = Agreements(2)
    >>> agreements.add(0, {"number": 0, "what": "the mesh", "value": {"batch": 4}, "timeout": 9}, now=0.0)
    []
    >>> for client, reply in agreements.add(
    ...     1, {"number": 0, "what": "the mesh", "value": {"batch": 2}, "timeout": 9}, now=1.0
    ... ):
    ...     print(client, reply["fault"])
    0 The clients differ in the mesh. batch: client 0 has 4, client 1 has 2.
    1 The clients differ in the mesh. batch: client 0 has 4, client 1 has 2.
    """

    def __init__(self, num_clients: int):
        self._num_clients = num_clients
        self._open: dict[int, _Agreement] = {}

    def add(self, client: int, message: dict[str, Any], now: float) -> list[tuple[int, dict[str, object]]]:
        """Add a client's value. Returns (client, reply) pairs to send."""
        number = message["number"]
        agreement = self._open.setdefault(number, _Agreement(what=message["what"], deadline=now + message["timeout"]))
        agreement.deadline = min(agreement.deadline, now + message["timeout"])
        agreement.values[client] = message["value"]
        late = agreement.decided
        if not late and message["what"] != agreement.what:
            agreement.fault = (
                f"Client {client} has reached {message['what']}, but other clients have reached {agreement.what}."
            )
            agreement.decided = True
        elif not late and len(agreement.values) == self._num_clients:
            agreement.fault = _difference(agreement)
            agreement.decided = True
        if not agreement.decided:
            return []
        replies = [(other, _reply(agreement)) for other in ([client] if late else agreement.values)]
        if len(agreement.values) == self._num_clients:
            del self._open[number]
        return replies

    def expired(self, now: float) -> list[tuple[int, dict[str, object]]]:
        """Decide the agreements that have timed out. Returns (client, reply) pairs to send."""
        replies = []
        for agreement in self._open.values():
            if not agreement.decided and now >= agreement.deadline:
                absent = [client for client in range(self._num_clients) if client not in agreement.values]
                agreement.fault = f"Clients {absent} did not reach {agreement.what} in time."
                agreement.missing = agreement.decided = True
                replies += [(client, _reply(agreement)) for client in agreement.values]
        return replies


def _reply(agreement: _Agreement) -> dict[str, object]:
    return {"kind": "agreed", "fault": agreement.fault, "missing": agreement.missing}


def _difference(agreement: _Agreement) -> str | None:
    """Describe the first value in which clients differ, or return None."""
    names = dict.fromkeys(name for value in agreement.values.values() for name in value)
    for name in names:
        given = {client: json.dumps(value[name]) for client, value in sorted(agreement.values.items()) if name in value}
        if len(set(given.values())) > 1:
            first = {text: client for client, text in reversed(given.items())}
            parts = [f"client {client} has {text}" for text, client in sorted(first.items(), key=lambda item: item[1])]
            return f"The clients differ in {agreement.what}. {name}: {', '.join(parts)}."
    return None
