"""Record the disk changes of a save, one by one, and kill the save at any of them.

`Disk` wraps the functions of `os` that change files, and the two operations with which TensorFlow writes tensors. Each
call below its folder is a point at which a process can be killed. A write, and a write of tensors, has further points
within: half of the bytes are written, or the data without the index. At a point the process is either killed by a
signal, or only appears to be: `Killed` is raised, and its handlers can no longer change the disk.

`Watch` asks the system (inotify) for changes, to find changes that do not go through one of these points.
"""

import ctypes
import dataclasses
import os
import pathlib
import signal
import struct
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import tensorflow as tf

# The suffix that TensorFlow adds to the name of a file while it writes the file.
TORN = ".tempstate1"


class Killed(BaseException):
    """The process was killed, as far as the disk can tell."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the disk, by one call.

    Attributes:
        what: `"mkdir"`, `"create"`, `"write"`, `"fsync"`, `"fsync directory"`, `"rename"`, `"unlink"`, `"rmdir"`,
            `"save tensors"` or `"merge tensors"`.
        path: The changed path below the folder; for tensors the prefix of their files.
        to: The new name.
        within: The finished part of the change at this point; empty before the change.
    """

    what: str
    path: str
    to: str = ""
    within: str = ""

    def __str__(self) -> str:
        return " ".join(text for text in (self.what, self.path, self.to and f"-> {self.to}", self.within) if text)


class Disk:
    """Record the changes below a folder in this context, and kill the process at one of them.

    Args:
        folder: Changes outside this folder are ignored.
        kill: The client to kill, and the number of its point, from 0. None kills no client.
        really: True to kill the process by SIGKILL.
        all_at_once: True to kill the other clients at the same moment. Otherwise they run on until they wait.
        watch: True to ask the system for changes.
        power: True to record the files that would survive a power loss.
        client: Returns the calling client.

    Attributes:
        points: The points of each client, in order.
        unexplained: Changes that the system saw, but that were no points.
        durable: The files that would survive a power loss.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        kill: tuple[int, int] | None = None,
        really: bool = False,
        all_at_once: bool = False,
        watch: bool = False,
        power: bool = False,
        client: Callable[[], int] = lambda: 0,
    ):
        self.folder = pathlib.Path(os.path.realpath(folder))
        self.points: dict[int, list[Change]] = {}
        self.unexplained: list[str] = []
        self._kill = kill
        self._really = really
        self._all_at_once = all_at_once
        self._client = client
        self._killed: set[int] = set()
        # Descriptors of files that were created or written.
        self._open: set[int] = set()
        # Only one client at a time changes the disk.
        self._lock = threading.RLock()
        self._tearing = False
        self._patches: list = []
        self._watch = Watch(self.folder) if watch else None
        self.durable = Durable(self.folder) if power else None

    @property
    def was_killed(self) -> bool:
        return bool(self._killed)

    def stop_if_killed(self) -> None:
        """End a client that waits for a killed client. The launcher would kill it, too."""
        if self._killed:
            self._killed.add(self._client())
            raise Killed

    def __enter__(self) -> "Disk":
        self._replace(os, "open", self._opening(os.open))
        self._replace(os, "close", self._closing(os.close))
        for name, what in _CALLS.items():
            self._replace(os, name, self._changing(getattr(os, name), what))
        self._replace(tf.raw_ops, "SaveV2", self._writing(tf.raw_ops.SaveV2, "save tensors", "prefix", _TORN_SAVE))
        self._replace(
            tf.raw_ops, "MergeV2Checkpoints",
            self._writing(tf.raw_ops.MergeV2Checkpoints, "merge tensors", "destination_prefix", _TORN_MERGE),
        )  # fmt: skip
        # A thread that ends by a kill prints nothing.
        told = threading.excepthook
        self._replace(threading, "excepthook", lambda args: args.exc_type is Killed or told(args))
        return self

    def _replace(self, owner: object, name: str, by: Callable) -> None:
        self._patches.append(mock.patch.object(owner, name, by))
        self._patches[-1].start()

    def __exit__(self, *error: object) -> None:
        for patch in reversed(self._patches):
            patch.stop()
        # As at the end of a process: closing a locked file releases the lock.
        for descriptor in self._open:
            os.close(descriptor)
        if self._watch is not None:
            self.unexplained += self._watch.changes()
            self._watch.close()

    # --- the replaced functions

    def _changing(self, real: Callable, what: str) -> Callable:
        def call(path, *args, **kwargs):
            at = self._below(path, kwargs.get("dir_fd"))
            if at is None:
                return real(path, *args, **kwargs)
            if what == "rename":
                change = Change(what=what, path=at, to=str(self._below(args[0], None)))
            else:
                is_directory = what == "fsync" and (self.folder / at).is_dir()
                change = Change(what=what + " directory" * is_directory, path=at)
            torn = {}
            if what == "write":
                torn["half"] = lambda: real(path, bytes(args[0])[: len(args[0]) // 2])
            return self._do(change, lambda: real(path, *args, **kwargs), torn)

        return call

    def _opening(self, real: Callable) -> Callable:
        def call(path, flags, *args, **kwargs):
            at = self._below(path, kwargs.get("dir_fd")) if flags & os.O_CREAT else None
            if at is None:
                return real(path, flags, *args, **kwargs)
            if (self.folder / at).exists():
                assert not flags & os.O_TRUNC
                descriptor = real(path, flags, *args, **kwargs)
            else:
                descriptor = self._do(Change(what="create", path=at), lambda: real(path, flags, *args, **kwargs))
            self._open.add(descriptor)
            return descriptor

        return call

    def _closing(self, real: Callable) -> Callable:
        def call(descriptor):
            self._open.discard(descriptor)
            real(descriptor)

        return call

    def _writing(self, real: Callable, what: str, argument: str, torn: dict[str, Callable]) -> Callable:
        def call(**kwargs):
            at = self._below(kwargs[argument], None)
            if at is None:
                return real(**kwargs)
            tears = {within: lambda tear=tear: tear(real, kwargs) for within, tear in torn.items()}
            return self._do(Change(what=what, path=at), lambda: real(**kwargs), tears)

        return call

    def _below(self, path: object, directory: int | None) -> str | None:
        """Return a path relative to the folder, from a path or a descriptor; None for a path outside."""
        if self._tearing:
            return None
        if isinstance(path, int):
            found = os.readlink(f"/proc/self/fd/{path}")
        else:
            above = "" if directory is None else os.readlink(f"/proc/self/fd/{directory}")
            parent, name = os.path.split(os.path.join(above, os.fspath(path)))
            found = os.path.join(os.path.realpath(parent), name)
        inside = found == str(self.folder) or found.startswith(f"{self.folder}{os.sep}")
        return os.path.relpath(found, self.folder) if inside else None

    # --- points

    def _do(self, change: Change, call: Callable, torn: Mapping[str, Callable] = types.MappingProxyType({})) -> object:
        with self._lock:
            if self._watch is not None:
                self.unexplained += self._watch.changes()
            self._point(change)
            for within, tear in torn.items():
                self._point(dataclasses.replace(change, within=within), tear)
            done = call()
            if self._watch is not None:
                self._watch.changes()
            if self.durable is not None:
                self.durable.note(change)
            return done

    def _point(self, change: Change, tear: Callable[[], object] | None = None) -> None:
        client = self._client()
        if client in self._killed or (self._killed and self._all_at_once):
            raise Killed
        points = self.points.setdefault(client, [])
        points.append(change)
        if self._kill != (client, len(points) - 1):
            return
        if tear is not None:
            self._tearing = True
            tear()
            self._tearing = False
        if self._really:
            os.kill(os.getpid(), signal.SIGKILL)
        self._killed.add(client)
        raise Killed


_CALLS = {
    "mkdir": "mkdir",
    "rmdir": "rmdir",
    "unlink": "unlink",
    "remove": "unlink",
    "rename": "rename",
    "replace": "rename",
    "write": "write",
    "fsync": "fsync",
}


# --- files that TensorFlow leaves if it is killed while it writes (seen with strace): it writes the data under a
# temporary name, renames them, and does the same with the index


def _files(prefix: str) -> tuple[list[str], str]:
    directory, name = os.path.split(prefix)
    data = sorted(found for found in os.listdir(directory) if found.startswith(f"{name}.data-"))
    return [os.path.join(directory, found) for found in data], f"{prefix}.index"


def _halve(path: str, to: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)
    os.rename(path, to)


def _half_of_the_data(save: Callable, kwargs: dict) -> None:
    save(**kwargs)
    (data,), index = _files(kwargs["prefix"])
    os.unlink(index)
    _halve(data, data + TORN)


def _no_index(write: Callable, kwargs: dict) -> None:
    write(**kwargs)
    os.unlink(_files(kwargs.get("prefix") or kwargs["destination_prefix"])[1])


def _half_of_the_index(save: Callable, kwargs: dict) -> None:
    save(**kwargs)
    _, index = _files(kwargs["prefix"])
    _halve(index, index + TORN)


def _one_data_file(merge: Callable, kwargs: dict) -> None:
    del merge
    (data,), _ = _files(kwargs["checkpoint_prefixes"][0])
    os.rename(data, f"{kwargs['destination_prefix']}.data-00000-of-{len(kwargs['checkpoint_prefixes']):05d}")


def _half_of_the_merged_index(merge: Callable, kwargs: dict) -> None:
    # Under its final name, before the indices of the parts are deleted.
    merge(**kwargs)
    _, index = _files(kwargs["destination_prefix"])
    _halve(index, index)


_TORN_SAVE = {
    "half of the data": _half_of_the_data,
    "no index": _no_index,
    "half of the index": _half_of_the_index,
}
_TORN_MERGE = {
    "one data file": _one_data_file,
    "no index": _no_index,
    "half of the index": _half_of_the_merged_index,
}


class Durable:
    """The files in a folder after a power loss: names and contents that were synced, or that existed from the start."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        # By inode number. The system reuses the number of a deleted inode.
        self._numbers: dict[int, int] = {}
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        found = [folder, *folder.rglob("*")]
        for path in found:
            self._made(path)
        for path in found:
            self._synced(path)

    def note(self, change: Change) -> None:
        """Record a change."""
        path = self._folder / change.path
        if change.what in ("mkdir", "create"):
            self._made(path)
        elif change.what == "save tensors":
            for written in path.parent.glob(f"{path.name}.*"):
                self._made(written)
        elif change.what == "merge tensors":
            self._made(path.with_name(f"{path.name}.index"))
        elif change.what.startswith("fsync"):
            self._synced(path)

    def _made(self, path: pathlib.Path) -> None:
        number = self._numbers[path.stat().st_ino] = len(self._contents) + len(self._names)
        if path.is_dir():
            self._names[number] = {}
        else:
            self._contents[number] = b""

    def _synced(self, path: pathlib.Path) -> None:
        number = self._number(path)
        if path.is_dir():
            self._names[number] = {entry.name: self._number(entry) for entry in path.iterdir()}
        else:
            self._contents[number] = path.read_bytes()

    def _number(self, path: pathlib.Path) -> int:
        return self._numbers[path.stat().st_ino]

    def without_what_was_not_synced(self, to: pathlib.Path) -> None:
        """Write the worst case: every name and content that was not synced is lost."""
        self._lay(self._number(self._folder), to)

    def _lay(self, number: int, to: pathlib.Path) -> None:
        if number in self._contents:
            to.write_bytes(self._contents[number])
            return
        to.mkdir()
        for name, below in self._names[number].items():
            self._lay(below, to / name)

    def with_all_names(self, to: pathlib.Path) -> None:
        """Write the opposite case: all names are on the disk, but only synced contents."""
        for path in [self._folder, *sorted(self._folder.rglob("*"))]:
            at = to / path.relative_to(self._folder)
            if path.is_dir():
                at.mkdir()
            else:
                at.write_bytes(self._contents[self._number(path)])


class Watch:
    """The changes of names in a folder and its subfolders, as the system reports them."""

    # The flags of inotify(7): modified, moved away and here, created, deleted.
    _MASK = 0x2 | 0x40 | 0x80 | 0x100 | 0x200
    _DIRECTORY = 0x40000000

    def __init__(self, folder: pathlib.Path):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._queue = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._queue >= 0
        self._folders: dict[int, str] = {}
        for path, _, _ in os.walk(folder):
            self._add(path)

    def _add(self, path: str) -> None:
        number = self._libc.inotify_add_watch(self._queue, path.encode(), self._MASK)
        assert number >= 0 or not os.path.exists(path), path
        self._folders[number] = path

    def changes(self) -> list[str]:
        """Return the changes since the last call."""
        found = []
        for number, mask, name in self._events():
            if mask & self._MASK:
                path = os.path.join(self._folders[number], name)
                found.append(f"{mask & self._MASK:#x} {path}")
                if mask & self._DIRECTORY and mask & 0x180:
                    self._add(path)
        return found

    def _events(self) -> Iterator[tuple[int, int, str]]:
        try:
            content = os.read(self._queue, 1 << 16)
        except BlockingIOError:
            return
        at = 0
        while at < len(content):
            number, mask, _, size = struct.unpack_from("iIII", content, at)
            at += 16
            yield number, mask, content[at : at + size].rstrip(b"\0").decode()
            at += size

    def close(self) -> None:
        os.close(self._queue)
