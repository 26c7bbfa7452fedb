"""`tfshard doctor --all-devices`: run all checks, and report each as it ends."""

import os
import shlex
import sys

from tfshard.command_line import UsageError
from tfshard.devices import clients
from tfshard.doctor.check_list import FIRST, PlannedCheck, checks_of, selected
from tfshard.doctor.check_runs import CheckRuns, DoctorOptions
from tfshard.doctor.outcome import CheckState, Outcome
from tfshard.doctor.written_report import MARKDOWN, DoctorReport


def check_all_devices(options: DoctorOptions) -> int:
    """Run the checks, write the report, and print one line for each check.

    This process starts no device, so that each check can.

    Args:
        options: The options.

    Returns:
        0, or 1 if a check found a fault, failed or hung.

    Raises:
        UsageError: A name is the name of no check, or a launcher started this process.
    """
    if clients.is_to_join():
        raise UsageError(
            "The doctor launches each check by itself. Start it without 'tfshard launch', and give it --num_processes "
            f"and --devices_per_process. Received: a client of a launcher ({os.environ['TFSHARD_CONTROL']})"
        )
    if options.launch is not None:
        # Wrong names are an error before anything runs.
        _chosen(options, _launched_devices(options))
    options.folder.mkdir(parents=True, exist_ok=True)
    report, runs = DoctorReport(options.folder, shlex.join(["tfshard", *sys.argv[1:]])), CheckRuns(options)
    report.expect([FIRST])
    outcome = _run(runs, report, FIRST)
    # All hosts go on or stop alike: the exit code of a launched run is the same everywhere.
    if outcome.state in (CheckState.OK, CheckState.FAULT):
        checks = _chosen(options, _launched_devices(options) or len(outcome.log.tables["Devices"]))
        report.expect(checks)
        for each in checks:
            if _run(runs, report, each).state is CheckState.INTERRUPTED:
                break
    print(report.summary())
    print(f"Report: {options.folder / MARKDOWN}")
    return int(any(each.is_bad for each in report.outcomes))


def _run(runs: CheckRuns, report: DoctorReport, check: PlannedCheck) -> Outcome:
    print(f"tfshard doctor: {check.name} ...", file=sys.stderr, flush=True)
    try:
        outcome = runs.run(check)
    except KeyboardInterrupt:
        outcome = Outcome(check=check, state=CheckState.INTERRUPTED)
    report.add(outcome)
    return outcome


def _launched_devices(options: DoctorOptions) -> int:
    """Return the number of devices of launched runs, or 0."""
    launch = options.launch
    if launch is None or launch.devices_per_process is None:
        return 0
    return len(launch.hosts) * launch.num_processes * launch.devices_per_process


def _chosen(options: DoctorOptions, devices: int) -> list[PlannedCheck]:
    """Return the checks that the options select, without the first."""
    launch, layout = options.launch, (devices, devices)
    if launch is not None and launch.devices_per_process is not None:
        layout = (launch.devices_per_process, launch.devices_per_process * launch.num_processes)
    checks = checks_of(devices, layout, is_launched=launch is not None)
    for name in options.names:
        if not selected(checks, [name]):
            raise UsageError(
                f"There is no check '{name}'. Checks: {[each.name for each in checks]}. A name also selects all checks "
                f"that begin with the name and a hyphen. Received: checks={list(options.names)}"
            )
    return [each for each in selected(checks, options.names) if each != FIRST]
