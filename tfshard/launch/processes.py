"""Start, watch and end the processes of a launched run on this machine."""

import collections
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

_TAIL_LINES = 20
# The time that a dead process's output may take to arrive.
_DRAIN_SECONDS = 2.0


class Process:
    """A client's process.

    Attributes:
        client_id: The client's number.
        pid: The process id.
        status: The exit status for `describe`. None while the process runs.
    """

    def __init__(self, client_id: int, command: Sequence[str], environment: Mapping[str, str], width: int):
        self.client_id = client_id
        self.status: int | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._popen = subprocess.Popen(
            # Before it becomes the user's program, the child asks the kernel to end it together with this process.
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A separate session is also a separate process group. Terminal signals then reach the client only through
            # the launcher, and the client's child processes end with it. (process_group=0 would be enough, but Python
            # 3.10 lacks it.)
            start_new_session=True,
        )
        self.pid = self._popen.pid
        prefix = f"[client {client_id:{width}}] "
        self._readers = []
        for pipe, out, keep in ((self._popen.stdout, sys.stdout, False), (self._popen.stderr, sys.stderr, True)):
            reader = threading.Thread(target=self._copy, args=(pipe, out, prefix, keep), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _copy(self, pipe: IO[bytes], out: IO[str], prefix: str, keep: bool) -> None:
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace").rstrip("\n")
                if keep:
                    self._tail.append(text)
                try:
                    out.write(f"{prefix}{text}\n")
                    out.flush()
                except (OSError, ValueError):
                    pass  # Nobody reads the log any more. Keep emptying the pipe.

    def poll(self) -> bool:
        """Return whether the process has ended. If so, its process group is gone too."""
        if self.status is not None:
            return True
        # Do not reap the process yet. Until then, no other process or group can take its id.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.signal(signal.SIGKILL)
        self.status = self._popen.wait()
        end = time.monotonic() + _DRAIN_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, end - time.monotonic()))
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the process group, unless the process has ended."""
        if self.status is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass  # The group has ended.

    def tail(self) -> list[str]:
        """Return the last lines that the process wrote to stderr."""
        return list(self._tail)

    def is_stopped(self) -> bool:
        """Return whether a signal (SIGSTOP) or a debugger has stopped the process."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] in ("T", "t")
        except OSError:
            return False


class Processes:
    """The clients on this machine during one start of the run.

    Attributes:
        running: The processes that have not ended, by client id.
    """

    def __init__(self, grace: float):
        """Start with no process.

        Args:
            grace: The seconds from SIGTERM to SIGKILL.
        """
        self.running: dict[int, Process] = {}
        self._grace = grace
        self._kill_at: float | None = None

    def start(self, client_id: int, command: Sequence[str], environment: Mapping[str, str], width: int) -> Process:
        """Start a client."""
        self._kill_at = None
        process = self.running[client_id] = Process(client_id, command, environment, width)
        return process

    def poll(self) -> list[Process]:
        """Return the processes that ended since the last call. Sends SIGKILL once the grace period has passed."""
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.kill()
        ended = [process for process in self.running.values() if process.poll()]
        for process in ended:
            del self.running[process.client_id]
        return ended

    def is_stopped(self, client_id: int) -> bool:
        """Return whether a signal or a debugger has stopped a client of this machine."""
        return client_id in self.running and self.running[client_id].is_stopped()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask all processes to end. `poll` enforces it."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace
            for process in self.running.values():
                process.signal(number)
                # A stopped process receives no other signal.
                process.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all processes at once."""
        for process in self.running.values():
            process.signal(signal.SIGKILL)


def describe(status: int) -> str:
    """Describe how a process ended, from its exit code (negative for a signal).

    >>> describe(3), describe(-9)
    ('ended with exit code 3', 'was killed by signal 9 (SIGKILL)')
    """
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""  # A real-time signal.
    return f"was killed by signal {-status}{name}"


def exit_code(status: int) -> int:
    """Convert an exit status to a shell's exit code.

    >>> exit_code(3), exit_code(-9)
    (3, 137)
    """
    return status if status >= 0 else 128 - status


_PR_SET_PDEATHSIG = 1


def _become(arguments: list[str]) -> None:
    """Turn the new process into the user's program, which ends when its launcher does."""
    parent, command = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("tfshard launch: the launcher has ended.")  # The launcher ended before the call above.
    # clients.PID_VARIABLE: child processes of the program are not clients.
    os.execve(command[0], command, {**os.environ, "TFSHARD_PID": str(os.getpid())})


if __name__ == "__main__":
    _become(sys.argv[1:])
