"""Run each check in separate processes: one process, or a launched run of several."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator

from tfshard.clusters import variables
from tfshard.command_line import DEFAULT_PORT
from tfshard.doctor.check_list import PlannedCheck, processes_of
from tfshard.doctor.check_log import LOG_FILE, CheckRequest
from tfshard.doctor.check_process import stacks_file
from tfshard.doctor.outcome import OUTPUT_FILE, CheckState, Outcome, outcome_of
from tfshard.errors import LaunchError
from tfshard.launch import launcher
from tfshard.launch.options import Launch, log
from tfshard.launch.processes import Processes

_MODULE = "tfshard.doctor.check_process"
# The seconds beyond a check's limit until its process is ended from outside. The process ends itself at the limit.
_BEYOND = 15.0
_GRACE = 3.0
_SIGNALS = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of a run of all checks.

    Attributes:
        folder: The folder of the report.
        names: The names of the checks to run. Empty for all.
        seconds: The time limit of a check.
        num_devices: The number of devices, without a launcher. None for all.
        launch: The options of launched runs, with `devices_per_process`. None to run each check in one process.
        expected: The file with the bandwidths that the user expects, or None.
    """

    folder: pathlib.Path
    names: tuple[str, ...] = ()
    seconds: float = 120.0
    num_devices: int | None = None
    launch: Launch | None = None
    expected: str | None = None


class CheckRuns:
    """Runs checks, one after the other."""

    def __init__(self, options: DoctorOptions):
        self._options = options
        self._between_hosts = 0

    def run(self, check: PlannedCheck) -> Outcome:
        """Run a check to its end or its time limit.

        Raises:
            KeyboardInterrupt: A signal ended the check.
        """
        folder = self._options.folder / check.name
        folder.mkdir(parents=True, exist_ok=True)
        _remove_results(folder)
        launch = self._options.launch
        request = CheckRequest(
            function=check.function,
            folder=str(folder.absolute()),
            seconds=self._options.seconds,
            num_devices=(check.devices or self._options.num_devices) if launch is None else None,
            meshes=check.meshes,
            case=check.case,
            expected=self._options.expected,
            baseline=str((self._options.folder / check.baseline).absolute()) if check.baseline else None,
        )
        command = (sys.executable, "-m", _MODULE, request.to_json())
        begin = time.monotonic()
        if launch is None:
            with _environment(check):
                code, clients = self._run_alone(command, folder), 1
        else:
            hosts, processes, local = self._place_of(check, launch)
            if launch.host_index >= hosts:
                return Outcome(check=check, state=CheckState.ELSEWHERE)
            planned = dataclasses.replace(
                launch,
                command=command,
                hosts=launch.hosts[:hosts],
                num_processes=processes,
                devices_per_process=local,
                port=self._port(launch, hosts),
                step_timeout=self._options.seconds / 2,
                first_step_timeout=self._options.seconds / 2,
                # The other hosts wait while host 0 runs checks alone.
                startup_timeout=max(launch.startup_timeout, 5 * self._options.seconds),
                allocator="tensorflow" if check.traces_memory else launch.allocator,
            )
            with _environment(check):
                code, clients = self._run_launched(planned, folder), processes * hosts
        return outcome_of(check, folder, code, time.monotonic() - begin, clients)

    def _run_alone(self, command: tuple[str, ...], folder: pathlib.Path) -> int | None:
        """Run a process. Returns its exit code, or None if the time limit ended it."""
        processes = Processes(_GRACE)
        is_late = False
        with _output_to(folder / OUTPUT_FILE):
            process = processes.start(0, command, {"PYTHONUNBUFFERED": "1"}, 1)
            deadline = time.monotonic() + self._options.seconds + _BEYOND
            try:
                while not processes.poll():
                    if time.monotonic() > deadline:
                        is_late = True
                        processes.stop()
                    time.sleep(0.05)
            finally:
                processes.kill()
        return None if is_late else process.status

    def _run_launched(self, planned: Launch, folder: pathlib.Path) -> int:
        """Run a launched run. Returns its exit code."""
        with _output_to(folder / OUTPUT_FILE):
            try:
                code = launcher.launch(planned)
            except LaunchError as error:
                log(str(error))
                code = 2
        if code in _SIGNALS:
            raise KeyboardInterrupt
        return code

    def _place_of(self, check: PlannedCheck, launch: Launch) -> tuple[int, int, int]:
        """Return the hosts, the processes of each host and the devices of each process."""
        local = launch.devices_per_process
        assert local is not None
        if check.devices is None:
            return len(launch.hosts), launch.num_processes, local
        found = processes_of(check.devices, (local, local * launch.num_processes))
        assert found is not None, check
        return found

    def _port(self, launch: Launch, hosts: int) -> int:
        """Return the leader's port.

        Two ports alternate, so that followers never meet the leader of the previous run.
        """
        if hosts == 1:
            return 0
        self._between_hosts += 1
        return (launch.port or DEFAULT_PORT) + self._between_hosts % 2


def _remove_results(folder: pathlib.Path) -> None:
    """Remove the log and the stacks that an earlier run left in the folder of a check."""
    for path in (folder / LOG_FILE, *folder.glob(stacks_file("*"))):
        path.unlink(missing_ok=True)


# On CPU, oneDNN's allocator reports what a step allocates. TensorFlow uses it by itself only on newer processors.
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"


@contextlib.contextmanager
def _environment(check: PlannedCheck) -> Iterator[None]:
    """Set the environment for the processes of a check."""
    given = {_ONEDNN: os.environ.get(_ONEDNN, "1")} if check.traces_memory else {}
    with variables.temporary(**given):
        yield


@contextlib.contextmanager
def _output_to(path: pathlib.Path) -> Iterator[None]:
    """Write what this process and its processes print to a file."""
    with path.open("w", encoding="utf-8") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield
