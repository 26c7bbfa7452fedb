"""A remote file system in memory that a process can be killed on, at each change.

    with Cloud(kill=(0, 3)) as cloud:
        ...a save, which raises Killed at its change number 3...

A killed client changes nothing any more. Its threads that renew claims end, as those of a dead process do.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

from fsspec.implementations.memory import MemoryFileSystem

from disk import Killed
from tfshard.checkpoints import leases, remote_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A moment at which a client can be killed.

    Attributes:
        what: `"write"`, `"delete"` or `"mkdir"`.
        path: The path.
        after: True if the file system has made the change.
    """

    what: str
    path: str
    after: bool

    def __str__(self) -> str:
        return f"{self.what} {self.path} {'after' if self.after else 'before'}"


class Cloud:
    """Count the changes in this context, and kill a client at one of them.

    Args:
        kill: The client to kill, and the number of its point, from 0. None kills no client.
        client: Returns the calling client.

    Attributes:
        points: The points of each client, in order.
    """

    def __init__(self, *, kill: tuple[int, int] | None = None, client: Callable[[], int] = lambda: 0):
        self.points: dict[int, list[Point]] = {}
        self._kill = kill
        self._client = client
        self._killed: set[int] = set()
        self._leases: list[leases.Lease] = []
        self._patches: list[Any] = []

    @property
    def was_killed(self) -> bool:
        return bool(self._killed)

    def stop_if_killed(self) -> None:
        """End a client that waits for a killed client. The launcher would kill it, too."""
        if self._killed:
            self._killed.add(self._client())
            raise Killed

    def __enter__(self) -> "Cloud":
        cloud = self
        make = leases.Lease.__init__

        def noted(lease: leases.Lease, *args: Any) -> None:
            make(lease, *args)
            cloud._leases.append(lease)

        class Files(MemoryFileSystem):
            cachable = False

            def pipe_file(self, path, value, **kwargs):
                return cloud._do("write", path, lambda: MemoryFileSystem.pipe_file(self, path, value, **kwargs))

            def rm_file(self, path):
                return cloud._do("delete", path, lambda: MemoryFileSystem.rm_file(self, path))

            def cat_file(self, path, **kwargs):
                cloud._alive()
                return MemoryFileSystem.cat_file(self, path, **kwargs)

            def find(self, path, **kwargs):
                cloud._alive()
                return MemoryFileSystem.find(self, path, **kwargs)

        def connect(root: remote_files.RemoteDirectory, options: object) -> tuple[Files, str]:
            return Files(), Files._strip_protocol(root.url)

        self._replace(remote_files.RemoteDirectory, "_connect", connect)
        self._replace(leases.Lease, "__init__", noted)
        told = threading.excepthook
        self._replace(threading, "excepthook", lambda args: args.exc_type is Killed or told(args))
        return self

    def _replace(self, owner: object, name: str, by: object) -> None:
        self._patches.append(mock.patch.object(owner, name, by))
        self._patches[-1].start()

    def __exit__(self, *error: object) -> None:
        for patch in reversed(self._patches):
            patch.stop()
        for lease in self._leases:
            lease._stop.set()
            leases._held.discard(lease.id)

    def _alive(self) -> None:
        if self._client() in self._killed:
            raise Killed

    def _do(self, what: str, path: str, call: Callable[[], Any]) -> Any:
        self._point(Point(what=what, path=path, after=False))
        done = call()
        self._point(Point(what=what, path=path, after=True))
        return done

    def _point(self, point: Point) -> None:
        client = self._client()
        if client in self._killed:
            raise Killed
        points = self.points.setdefault(client, [])
        points.append(point)
        if self._kill == (client, len(points) - 1):
            self._killed.add(client)
            raise Killed
