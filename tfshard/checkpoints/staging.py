"""Staging: a temporary local directory for files on their way to a remote file system.

TensorFlow writes bundles to local files only. A process that is killed leaves its directory behind. The next save on
the host deletes it: the system has released the lock of the dead process.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

_PREFIX = "tfshard-staging-"
_LOCK = "lock"


class Staging:
    """A temporary directory, below the directory that `TMPDIR` names.

    Attributes:
        directory: Its path.
    """

    def __init__(self) -> None:
        delete_abandoned()
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Lock the file before it gets its name: `delete_abandoned` deletes a directory without a locked file.
        unnamed = self.directory / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(unnamed, self.directory / _LOCK)

    def __truediv__(self, name: str) -> pathlib.Path:
        return self.directory / name

    def delete(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)


def delete_abandoned() -> None:
    """Delete the directories of this user whose processes have ended."""
    for directory in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails while its process lives.
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
