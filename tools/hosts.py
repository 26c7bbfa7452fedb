"""Launch a script on several hosts, which are network namespaces of this machine with links of one rate.

    python -m tools.hosts --rate=1gbit examples/train_lm.py --mesh=batch:4 --steps=20
    python -m tools.hosts --num_hosts=4 --devices_per_process=1 --rate=100mbit examples/train_lm.py --mesh=batch:4
    python -m tools.hosts --rate=100mbit --delay_ms=5 examples/train_lm.py --mesh=batch:4
    python -m tools.hosts --launch_flags=--module tfshard profile-network
    python -m tools.hosts --down=1@40 examples/train_lm.py --mesh=batch:4       # cuts the link of host 1 after 40 s
    python -m tools.hosts --down=1@40+3 examples/train_lm.py --mesh=batch:4     # and restores it 3 s later
    python -m tools.hosts --clean                                               # removes the remains of dead runs

A `tfshard launch` runs on each host. Its output is printed after `[host 1]`. At the end, the bytes that each host's
interface sent and received are printed, and the network is removed, even after SIGINT, SIGTERM and SIGHUP. These
signals are passed to the launchers; a second signal kills the launchers.

The exit code comes from the launcher of host 0, or from the first other launcher that failed. It is 77 if the machine
cannot create such a network, which takes root, `ip`, `tc` and `setpriv`. tools/hosts.sh sets the environment up and
calls this module.
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from absl import app, flags

from tools.host_runs import network
from tools.host_runs.network import Network, NetworkError

_NUM_HOSTS = flags.DEFINE_integer("num_hosts", 2, "Number of hosts.", 2, network.MAX_HOSTS)
_RATE = flags.DEFINE_string(
    "rate", "10gbit", "Rate of each host's link in both directions, such as 10gbit, 1gbit, 100mbit."
)
_DELAY = flags.DEFINE_float("delay_ms", 0.0, "Milliseconds that a packet takes from host to host.", 0.0)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Number of clients on each host.", 1)
_DEVICES = flags.DEFINE_integer("devices_per_process", 2, "Number of devices of each client.", 1)
_LAUNCH_FLAGS = flags.DEFINE_list(
    "launch_flags", [], "Additional flags of 'tfshard launch', such as --step_timeout=20."
)
_DOWN = flags.DEFINE_multi_string(
    "down", [], "HOST@SECONDS or HOST@SECONDS+SECONDS: the link of HOST goes down at a time, for a duration."
)
_CLEAN = flags.DEFINE_boolean("clean", False, "Remove the remains of dead runs, and do nothing else.")

flags.register_validator(
    "rate", network.RATE.fullmatch, "The rate must be a number and kbit, mbit or gbit, such as 1gbit."
)

# The exit code if the machine cannot create such a network.
UNAVAILABLE = 77
# The time in s that launchers may take to end after a signal.
_ENDING_SECONDS = 30.0
_LOOK_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Change:
    """A link that goes up or down, `at` seconds after the start."""

    at: float
    host: int
    up: bool


def changes(text: str, num_hosts: int) -> list[Change]:
    """Parse an argument of `--down`.

    Raises:
        UsageError: The text is not a host and seconds.

    >>> for change in changes("1@20+5", 2):
    ...     print(change)
    Change(at=20.0, host=1, up=False)
    Change(at=25.0, host=1, up=True)
    """
    match = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?", text)
    if match is None or int(match[1]) >= num_hosts:
        raise app.UsageError(f"Write HOST@SECONDS, HOST from 0 to {num_hosts - 1}. Received: down={text}")
    host, at = int(match[1]), float(match[2])
    down = Change(at=at, host=host, up=False)
    return [down] if match[3] is None else [down, Change(at=at + float(match[3]), host=host, up=True)]


def say(text: str) -> None:
    print(f"hosts: {text}", flush=True)


class _Launcher:
    """The launcher of a host. Its output is printed."""

    def __init__(self, host: int, command: tuple[str, ...], environment: dict[str, str]):
        self.host = host
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment,
            # A ^C at the terminal comes through this process.
            start_new_session=True,
        )  # fmt: skip
        self.signal: Callable[[int], None] = self._process.send_signal
        self.poll: Callable[[], int | None] = self._process.poll
        self._reader = threading.Thread(target=self._copy, daemon=True)
        self._reader.start()

    def _copy(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"[host {self.host}] {line}", end="", flush=True)

    def drain(self) -> None:
        """Wait until all output is printed."""
        self._reader.join(2.0)


def commands(hosts: Network, arguments: list[str]) -> list[tuple[str, ...]]:
    """Return the command of each host."""
    launch = (
        sys.executable, "-m", "tfshard", "launch", f"--hosts={','.join(hosts.addresses)}",
        f"--num_processes={_NUM_PROCESSES.value}", f"--devices_per_process={_DEVICES.value}", *_LAUNCH_FLAGS.value,
    )  # fmt: skip
    return [hosts.on(host, *launch, f"--host_index={host}", *arguments) for host in range(len(hosts.addresses))]


def watch(hosts: Network, launchers: list[_Launcher], planned: list[Change], received: list[int]) -> list[int]:
    """Wait until all launchers have ended, and return their exit codes.

    Args:
        hosts: The network of the hosts.
        launchers: The launcher of each host.
        planned: The changes of the links.
        received: The signals that this process has received so far.
    """
    begin, codes = time.monotonic(), {}
    asked, passed_on, cut = None, 0, None
    while len(codes) < len(launchers):
        now = time.monotonic() - begin
        while planned and planned[0].at <= now:
            change = planned.pop(0)
            hosts.set_link(change.host, up=change.up)
            cut = cut or now
            say(f"the link of host {change.host} is {'up' if change.up else 'down'}, {now:.1f} s after the start.")
        if len(received) > passed_on:
            for launcher in launchers:
                launcher.signal(signal.SIGKILL if passed_on else received[0])
            passed_on, asked = len(received), asked or now
        if asked is not None and now - asked > _ENDING_SECONDS:
            say(f"a launcher did not end within {_ENDING_SECONDS:.0f} s.")
            for launcher in launchers:
                launcher.signal(signal.SIGKILL)
            asked = now
        for launcher in launchers:
            if launcher.host not in codes and (code := launcher.poll()) is not None:
                launcher.drain()
                codes[launcher.host] = code
                after = "" if cut is None else f", {now - cut:.1f} s after the first link went down"
                say(f"the launcher of host {launcher.host} ended with {code} after {now:.1f} s{after}.")
        time.sleep(_LOOK_SECONDS)
    return [codes[launcher.host] for launcher in launchers]


def run(arguments: list[str], received: list[int]) -> int:
    """Launch on all hosts, remove the hosts, and return the exit code."""
    planned = sorted(change for text in _DOWN.value for change in changes(text, _NUM_HOSTS.value))
    environment = {**os.environ, "TFSHARD_SECRET": os.urandom(32).hex()}
    with network.connected(_NUM_HOSTS.value, _RATE.value, 1e-3 * _DELAY.value) as hosts:
        delay = f" and {_DELAY.value:g} ms" if _DELAY.value else ""
        say(f"{', '.join(hosts.addresses)}, with links of {_RATE.value}{delay}")
        launchers = [_Launcher(host, command, environment) for host, command in enumerate(commands(hosts, arguments))]
        codes = watch(hosts, launchers, planned, received)
        for host, address in enumerate(hosts.addresses):
            counted = hosts.traffic(host)
            say(
                f"host {host} ({address}) sent {counted.sent:,} bytes in {counted.packets:,} packets, "
                f"and received {counted.received:,} bytes"
            )
    code = next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code


def main(argv: list[str]) -> int:
    if bool(argv[1:]) == _CLEAN.value:
        raise app.UsageError("Give a script, or --clean.")
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        if _CLEAN.value:
            for name in network.clean():
                say(f"removed {name}")
            return 0
        return run(argv[1:], received)
    except NetworkError as error:
        print(f"tools/hosts: cannot make a network here: {error}", file=sys.stderr)
        return UNAVAILABLE


if __name__ == "__main__":
    # Arguments after the script belong to the script.
    flags.FLAGS.set_gnu_getopt(False)
    app.run(main)
