"""Lease: the right to save to a remote directory, which one save holds at a time.

An object store has no locks. A save writes an object, its claim, to the directory `.writers`, and then lists the
directory. If the listing has no other live claim, the save holds the lease. A listing contains every object that was
written before, so if two saves begin at the same time, at least one of them sees the claim of the other. A save that
sees another live claim withdraws its own claim and tries again.

The holder renews its claim while it works. A save is dead if its claim was not renewed for `EXPIRES_SECONDS`, or if its
process was on this host and has ended. A holder that cannot renew its claim stops itself well before the claim expires
(`check`): it never commits what another save may regard as left over.
"""

import contextlib
import json
import os
import random
import threading
import time
import uuid
from typing import Any

from tfshard.checkpoints.remote_files import RemoteDirectory
from tfshard.errors import CheckpointError

DIRECTORY = ".writers"
RENEW_SECONDS = 5.0
# A holder stops itself after this long without a renewal.
FENCE_SECONDS = 70.0
EXPIRES_SECONDS = 90.0
_PAUSE_SECONDS = 0.5

# The claims that saves of this process hold.
_held: set[str] = set()


class LeaseLostError(CheckpointError):
    """A save could not renew its claim in time, or its claim was removed."""


class Lease:
    """The claim of one save.

    Args:
        root: The directory of the run.

    Attributes:
        id: The name of the claim, unlike that of any other save.
        abandoned: The names of checkpoints that dead saves were writing, once `acquire` has returned.
    """

    def __init__(self, root: RemoteDirectory):
        self.id = uuid.uuid4().hex
        self.abandoned: list[str] = []
        self._root = root
        self._name = f"{DIRECTORY}/{self.id}.json"
        self._attempt = ""
        self._renewals = 0
        self._renewed = 0.0
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> str:
        """The name of the claim's file."""
        return self._name

    def acquire(self) -> None:
        """Wait until this save holds the lease, and renew the claim from then on.

        Raises:
            CheckpointError: Another save holds the lease and is alive.
        """
        seen: dict[str, tuple[bytes, float]] = {}
        _held.add(self.id)
        try:
            while True:
                self._write()
                if not self._others(seen):
                    break
                # Withdraw the claim: of two saves that see each other, one must list the directory alone.
                self._root.delete([self._name])
                time.sleep(_PAUSE_SECONDS * random.uniform(0.5, 2.0))
        except BaseException:
            _held.discard(self.id)
            with contextlib.suppress(Exception):
                self._root.delete([self._name])
            raise

        self._thread = threading.Thread(target=self._renew, name="tfshard-lease", daemon=True)
        self._thread.start()

    def announce(self, attempt: str) -> None:
        """Tell other saves and the other clients the name of the checkpoint.

        Raises:
            LeaseLostError: Another save has taken this save for dead.
        """
        self.check()  # Never bring a claim back that another save has removed.
        self._attempt = attempt
        self._write()

    def check(self) -> None:
        """Raise `LeaseLostError` if other saves may regard this save as dead."""
        is_there = self._root.exists(self._name)
        since = _now() - self._renewed
        if since > FENCE_SECONDS:
            raise LeaseLostError(
                f"The remote directory could not be written to for {since:.0f} seconds, so another process may have "
                f"begun to save there. The checkpoint was not committed. Received: directory='{self._root.url}'"
            )
        if not is_there:
            raise LeaseLostError(
                "Another process took this save for dead and removed its claim. The checkpoint was not committed. "
                f"Received: directory='{self._root.url}'"
            )

    def release(self) -> None:
        """Give the lease back. A claim that cannot be deleted expires."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        _held.discard(self.id)
        with contextlib.suppress(CheckpointError):
            self._root.delete([self._name])

    def _write(self, seconds: float | None = None) -> None:
        with self._writing:
            begun = _now()
            claim = {"attempt": self._attempt, "renewals": self._renewals, "process": _process()}
            self._root.write(self._name, json.dumps(claim).encode(), seconds=seconds)
            self._renewed = begun

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            self._renewals += 1
            try:
                if self._root.exists(self._name):  # Never bring a claim back that another save has removed.
                    self._write(seconds=0.0)
            except CheckpointError:
                continue  # The next renewal may succeed; `check` looks at the time of the last.
            except BaseException:
                return

    def _others(self, seen: dict[str, tuple[bytes, float]]) -> bool:
        """Return True if another claim may be alive, and remove the claims of dead saves.

        Args:
            seen: The content of each claim, and when this save first saw this content.
        """
        alive = False
        for path in self._root.find(DIRECTORY):
            if path == self._name:
                continue
            try:
                content = self._root.read(path)
            except FileNotFoundError:
                continue
            claim = _decoded(content)
            before, since = seen.setdefault(path, (content, _now()))
            renewed = before != content
            if renewed:
                seen[path] = content, _now()
            id_here = path.rpartition("/")[2].removesuffix(".json")
            if claim["attempt"] and (renewed or id_here in _held):
                raise CheckpointError(
                    "Another process, or another CheckpointManager, is saving to this directory. Give each training "
                    f"run a separate directory. Received: directory='{self._root.url}'"
                )
            ended = bool(_host()) and claim["process"] == _process() and id_here not in _held
            if ended or _has_ended(claim["process"]) or self._is_expired(path, since):
                if claim["attempt"]:
                    self.abandoned.append(str(claim["attempt"]))
                self._root.delete([path])
            else:
                alive = True
        return alive

    def _is_expired(self, path: str, since: float) -> bool:
        if _now() - since > EXPIRES_SECONDS:
            return True
        # By the server's clock, if the file system tells.
        try:
            mine, theirs = self._root.modified(self._name), self._root.modified(path)
        except FileNotFoundError:
            return False
        return mine is not None and theirs is not None and (mine - theirs).total_seconds() > EXPIRES_SECONDS


def claim_of(root: RemoteDirectory) -> tuple[str, str] | None:
    """Return the claim of the save that holds the lease, as its path and the name of the checkpoint; None if none does.

    The other clients of a save call this while its first client holds the lease.
    """
    for path in root.find(DIRECTORY):
        with contextlib.suppress(FileNotFoundError):
            attempt = _decoded(root.read(path))["attempt"]
            if attempt:
                return path, str(attempt)
    return None


def _decoded(content: bytes) -> dict[str, Any]:
    """Return a claim. A file that is no claim counts as the claim of an unknown process without a checkpoint."""
    try:
        claim = json.loads(content)
        return {"attempt": str(claim["attempt"]), "process": str(claim["process"])}
    except (ValueError, KeyError, TypeError):
        return {"attempt": "", "process": ""}


def _now() -> float:
    """Return the seconds of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _process() -> str:
    """Return a name of this process that no other process has, on this host or another."""
    return f"{_host()}/{os.getpid()}/{_started(os.getpid())}"


def _host() -> str:
    """Return a name of this running kernel and this namespace of processes; empty if the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Return when a process of this host was started; None if it does not exist or is only waited for."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else fields[18].decode()


def _has_ended(process: str) -> bool:
    """Return True for a process of this host that has ended."""
    host, _, rest = process.rpartition("/")[0].rpartition("/")
    if not host or host != _host() or not rest.isdigit():
        return False
    return _started(int(rest)) != process.rpartition("/")[2]
