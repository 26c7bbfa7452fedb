"""Hand the run's secret to members that were given none, once to each.

The first process that claims to be member 3 gets the secret. If a second process claims this before the clients start,
the run ends, because one of the two is a stranger. Once the clients have started, nobody gets the secret any more.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfshard.devices.channel import Connection, ControlError
from tfshard.errors import LaunchError

_RETRY_SECONDS = 0.5


class Enrolment:
    """The members that have the run's secret, as the coordinator sees them.

    Attributes:
        fault: Why the run must end, or None.

    >>> members = Enrolment({"job": "4711"}, 3)
    >>> members.enrol({"kind": "enrol", "member": 1, "run": {"job": "4711"}}, "10.0.0.2")
    >>> members.enrol({"kind": "enrol", "member": 2, "run": {"job": "4712"}}, "10.0.0.3")
    "it belongs to another run: {'job': '4712'} instead of {'job': '4711'}"
    """

    def __init__(self, run: Mapping[str, object], num_members: int):
        """Start without members.

        Args:
            run: The facts that are equal on all members of the run (`ClusterRun.identity`).
            num_members: The number of members. Member 0 is the coordinator and needs no enrolment.
        """
        self.fault: str | None = None
        self._run = dict(run)
        self._members: dict[int, str] = {}
        self._num_members = num_members
        self._is_closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Hand out no secret from now on. Called when the clients have started."""
        with self._lock:
            self._is_closed = True

    def enrol(self, message: Mapping[str, Any], peer: str) -> str | None:
        """Record a member. Return why the member does not get the secret, or None if it gets the secret."""
        with self._lock:
            member = message.get("member")
            if message.get("kind") != "enrol" or message.get("run") != self._run:
                # repr, because a stranger's text goes to the log.
                return f"it belongs to another run: {message.get('run')!r} instead of {self._run}"
            if not isinstance(member, int) or not 0 < member < self._num_members:
                return f"the run has the members 0 to {self._num_members - 1}, and 0 is here. Received: {member!r}"
            if self._is_closed:
                return (
                    f"all {self._num_members} members have started. Members that come back after a failure need a "
                    "secret: set TFSHARD_SECRET, see: tfshard docs security"
                )
            if member in self._members:
                self.fault = (
                    f"Two processes call themselves member {member}: on {self._members[member]} and on {peer}. Give "
                    "each process its own number. If each process has its own number, a stranger has taken a member's "
                    "place: set TFSHARD_SECRET, see: tfshard docs security."
                )
                return self.fault
            self._members[member] = peer
            return None


def enrolled_secret(
    address: str,
    member: int,
    run: Mapping[str, object],
    seconds: float,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> str:
    """Get the run's secret from the coordinator.

    Args:
        address: The `host:port` of the coordinator.
        member: The number of this member.
        run: The facts that are equal on all members of the run (`ClusterRun.identity`).
        seconds: How long to wait for a coordinator that has not started yet.
        is_interrupted: Returns True to give up.

    Raises:
        LaunchError: The coordinator cannot be reached, has a secret, or refuses.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = Connection.open(address, None, timeout=10.0)
            break
        except ControlError as error:
            raise LaunchError(
                f"The coordinator does not hand out a secret: {error} If member 0 has a TFSHARD_SECRET, set it on all "
                f"members. Received: {address}"
            ) from None
        except OSError as error:
            if time.monotonic() > deadline or is_interrupted():
                raise LaunchError(f"The coordinator cannot be reached: {error}. Received: {address}") from None
        time.sleep(_RETRY_SECONDS)
    try:
        connection.send("enrol", member=member, run=dict(run))
        reply = connection.receive()
        if reply is None:
            raise ControlError("It closed the connection.")
        if reply["kind"] != "enrolled":
            raise LaunchError(f"The coordinator refuses member {member}: {reply['reason']}")
        return connection.unsealed(reply["secret"])
    except LaunchError:
        raise
    except (OSError, ControlError, KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"The coordinator does not hand out a secret: {error} Received: {address}") from None
    finally:
        connection.close()


WARNING = (
    "no secret was given, so the coordinator hands one to the first process that claims each member's place. This "
    "keeps out listeners, and strangers who come after the start. It does not keep out strangers who come first or can "
    "change the traffic. On a network that you share, set TFSHARD_SECRET (openssl rand -hex 32) or TFSHARD_SECRET_FILE "
    "on all members; see: tfshard docs security."
)
