"""List the checks for a number of devices, and the devices of each check."""

import dataclasses
from collections.abc import Sequence

from tfshard.doctor import failing_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedCheck:
    """A check, which runs in separate processes.

    Attributes:
        name: The name, which `--checks` selects.
        title: The subject of the check.
        function: The name of its function in `check_process.FUNCTIONS`.
        devices: The number of devices. None for all.
        meshes: The meshes to check.
        case: The part of the check to run. Empty for all parts.
        ends_with: The type of the error that has to end the run, and words of its message. None if the run has to
            succeed.
        baseline: The name of the check to compare with, or empty.
        traces_memory: True if the check reads the allocator's events from a trace.
    """

    name: str
    title: str
    function: str
    devices: int | None = None
    meshes: tuple[dict[str, int], ...] = ()
    case: str = ""
    ends_with: tuple[str, str] | None = None
    baseline: str = ""
    traces_memory: bool = False


# Its log also gives the number of devices.
FIRST = PlannedCheck(name="environment", title="versions, hosts and devices", function="environment")

# The functions of checks that one device cannot run.
_NEEDS_SEVERAL_DEVICES = ("rank-order", "collective-values", "device-pairs", "axis-bandwidth", "overlap")


def meshes_of(devices: int) -> list[dict[str, int]]:
    """Return one mesh of each kind that fits a number of devices.

    >>> meshes_of(4)
    [{'batch': 4}, {'batch': 2, 'model': 2}, {'replica': 2, 'batch': 2}, {'pipeline': 2, 'batch': 2}]
    >>> meshes_of(3)
    [{'batch': 3}]
    """
    found = [{"batch": devices}]
    if devices % 2 == 0:
        half = devices // 2
        found += [{"batch": half, "model": 2}, {"replica": 2, "batch": half}, {"pipeline": 2, "batch": half}]
    return found


def device_counts(devices: int, layout: Sequence[int]) -> list[int]:
    """Return the numbers of devices to time: powers of two, and all devices.

    Leaves out numbers that do not fill processes or hosts.

    Args:
        devices: The number of all devices.
        layout: The devices of a process, and of a host.

    >>> device_counts(8, (8, 8)), device_counts(6, (3, 6))
    ([1, 2, 4, 8], [1, 2, 6])
    """
    powers = (1 << power for power in range(devices.bit_length()))
    return [count for count in sorted({*powers, devices}) if processes_of(count, layout) is not None]


def processes_of(count: int, layout: Sequence[int]) -> tuple[int, int, int] | None:
    """Return the hosts, the processes of each host and the devices of each process that have a number of devices.

    Returns None if the devices do not fill processes or hosts.

    >>> processes_of(1, (2, 4)), processes_of(4, (2, 4)), processes_of(8, (2, 4)), processes_of(6, (2, 4))
    ((1, 1, 1), (1, 2, 2), (2, 2, 2), None)
    """
    of_process, of_host = layout
    if count <= of_process:
        return 1, 1, count
    if count <= of_host:
        return None if count % of_process else (1, count // of_process, of_process)
    return None if count % of_host else (count // of_host, of_host // of_process, of_process)


def checks_of(devices: int, layout: Sequence[int], *, is_launched: bool) -> list[PlannedCheck]:
    """Return the checks for a run.

    Args:
        devices: The number of all devices.
        layout: The devices of a process, and of a host.
        is_launched: True if several processes run each check.
    """
    meshes = meshes_of(devices)
    flat = tuple(axes for axes in meshes if "pipeline" not in axes)
    without_replicas = tuple(axes for axes in flat if "replica" not in axes)
    found = [
        FIRST,
        PlannedCheck(name="rank-order", title="order of the devices", function="rank-order", meshes=flat),
        PlannedCheck(
            name="collective-values", title="results of collectives", function="collective-values",
            meshes=without_replicas,
        ),
        PlannedCheck(name="device-pairs", title="links between pairs of devices", function="device-pairs"),
        PlannedCheck(name="axis-bandwidth", title="bandwidth of collectives", function="axis-bandwidth"),
    ]  # fmt: skip
    for axes in meshes:
        name = "parity-" + "-".join(f"{axis}{size}" for axis, size in axes.items())
        found.append(PlannedCheck(name=name, title="weights of one device", function="parity", meshes=(axes,)))
    counts = device_counts(devices, layout)
    found += [
        PlannedCheck(
            name=f"scaling-{count}", title="step time", function="scaling", devices=count,
            baseline="" if count == counts[0] else f"scaling-{counts[0]}",
        )
        for count in counts
    ]  # fmt: skip
    found += [
        PlannedCheck(name="peak-memory", title="peak beside the plan", function="peak-memory", traces_memory=True),
        PlannedCheck(name="overlap", title="hidden communication", function="overlap"),
    ]
    if devices == 1:
        found = [each for each in found if each.function not in _NEEDS_SEVERAL_DEVICES]
    if not is_launched:
        return [*found, PlannedCheck(name="failing-steps", title="steps that fail", function="failing-steps")]
    # A failed step ends a run of several processes.
    return found + [
        PlannedCheck(
            name=f"failing-steps-{case}", title=step.title, function="failing-steps", case=case,
            ends_with=(step.error, step.words),
        )
        for case, step in failing_steps.STEPS.items()
    ]  # fmt: skip


def selected(checks: Sequence[PlannedCheck], names: Sequence[str]) -> list[PlannedCheck]:
    """Return the checks with some names: `"parity"` also selects `"parity-batch4"`. No names select all checks."""
    if not names:
        return list(checks)
    wanted = {each.name for each in checks for name in names if each.name == name or each.name.startswith(f"{name}-")}
    # Checks that others compare with.
    wanted |= {each.baseline for each in checks if each.name in wanted}
    return [each for each in checks if each.name in wanted]
