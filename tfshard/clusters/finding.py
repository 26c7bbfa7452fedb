"""Choose the run among the systems whose variables are set.

The first system of `SYSTEMS` that names a run decides: systems that start processes inside others come first. A system
behind it with as many members but another index for this process is a contradiction.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping

from tfshard.clusters import kubernetes, mpi, own_variables, sagemaker, slurm, tf_config, torchrun, variables
from tfshard.clusters.cluster_run import ClusterRun
from tfshard.errors import ClusterError

CHOICE = "TFSHARD_CLUSTER"
NONE = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """A system that starts runs.

    Attributes:
        name: Its name in TFSHARD_CLUSTER.
        title: Its name in messages.
        names: The environment variables that are read.
        read: Returns the run that the variables describe, or None.
    """

    name: str
    title: str
    names: tuple[str, ...]
    read: Callable[[Mapping[str, str]], ClusterRun | None]


# In the order of precedence.
SYSTEMS = (
    System(name="tfshard", title=own_variables.SYSTEM, names=own_variables.NAMES, read=own_variables.read),
    System(name="tf_config", title=tf_config.SYSTEM, names=tf_config.NAMES, read=tf_config.read),
    System(name="torchrun", title=torchrun.SYSTEM, names=torchrun.NAMES, read=torchrun.read),
    System(name="open_mpi", title=mpi.OPEN_MPI, names=mpi.OPEN_MPI_NAMES, read=mpi.read_open_mpi),
    System(name="pmi", title=mpi.PMI, names=mpi.PMI_NAMES, read=mpi.read_pmi),
    System(name="slurm", title=slurm.SYSTEM, names=slurm.NAMES, read=slurm.read),
    System(name="sagemaker", title=sagemaker.SYSTEM, names=sagemaker.NAMES, read=sagemaker.read),
    System(name="kubernetes", title=kubernetes.SYSTEM, names=kubernetes.NAMES, read=kubernetes.read),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemFinding:
    """The run that a system's variables describe, or the error in them.

    Attributes:
        system: The system.
        run: The run, or None if the variables describe none.
        error: Why the variables cannot be read, or an empty text.
        state: `"chosen"`, or why the system was ignored.
    """

    system: System
    run: ClusterRun | None = None
    error: str = ""
    state: str = ""


def find_run(environment: Mapping[str, str] | None = None) -> ClusterRun | None:
    """Return the run that a cluster started this process for, or None if this process runs alone.

    Args:
        environment: The environment variables. By default those of this process.

    Raises:
        ClusterError: The variables lack something or contradict each other.

    >>> find_run({}) is None
    True
    >>> find_run({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}).coordinator
    'algo-1'
    """
    environment = os.environ if environment is None else environment
    chosen = next((found for found in findings(environment) if found.state == "chosen"), None)
    if chosen is None:
        return None
    if chosen.error:
        raise ClusterError(chosen.error)
    assert chosen.run is not None
    return None if chosen.run.num_members == 1 else chosen.run


@contextlib.contextmanager
def outside_clusters() -> Iterator[None]:
    """Ignore the cluster that started this process, unless the environment chooses one.

    Example:

    >>> import os
    >>> with outside_clusters():
    ...     os.environ["TFSHARD_CLUSTER"]
    'none'
    """
    with variables.temporary(**{CHOICE: os.environ.get(CHOICE, NONE)}):
        yield


def findings(environment: Mapping[str, str]) -> list[SystemFinding]:
    """Return the finding of each system, in the order of precedence. At most one system is chosen.

    Raises:
        ClusterError: TFSHARD_CLUSTER names no system.
    """
    choice = environment.get(CHOICE, "auto").lower()
    names = ("auto", NONE, *(system.name for system in SYSTEMS))
    if choice not in names:
        raise ClusterError(f"TFSHARD_CLUSTER must be one of {names}. Received: TFSHARD_CLUSTER={choice!r}")
    found = [_read(system, environment) for system in SYSTEMS]
    if choice not in ("auto", NONE):
        named = next(each for each in found if each.system.name == choice)
        if named.run is None and not named.error:
            error = (
                f"TFSHARD_CLUSTER chooses {named.system.title}, whose variables describe no run of several members. "
                f"It reads {', '.join(named.system.names)}. Received: {_values(named.system, environment)}"
            )
            found[found.index(named)] = dataclasses.replace(named, error=error)
    chosen: SystemFinding | None = None
    for place, each in enumerate(found):
        state = _state(each, choice, chosen)
        found[place] = each = dataclasses.replace(each, state=state)
        if state == "chosen":
            chosen = each
    return [_checked(each, found, environment, choice) if each.state == "chosen" else each for each in found]


def _read(system: System, environment: Mapping[str, str]) -> SystemFinding:
    try:
        return SystemFinding(system=system, run=system.read(environment))
    except ClusterError as error:
        return SystemFinding(system=system, error=str(error))


def _state(found: SystemFinding, choice: str, chosen: SystemFinding | None) -> str:
    if found.run is None and not found.error:
        return "not set"
    if choice == NONE:
        return "ignored: TFSHARD_CLUSTER=none"
    if choice not in ("auto", found.system.name):
        return f"ignored: TFSHARD_CLUSTER={choice}"
    if chosen is None:
        return "chosen"
    if found.run is not None and chosen.run is not None and found.run.num_members != chosen.run.num_members:
        return f"ignored: {chosen.system.title} decides, which started its members inside"
    return f"ignored: {chosen.system.title} decides"


def _checked(
    chosen: SystemFinding, found: list[SystemFinding], environment: Mapping[str, str], choice: str
) -> SystemFinding:
    """Apply tfshard's own variables to the chosen run, and compare it with the other systems."""
    if chosen.run is None:
        return chosen
    try:
        run = _completed(chosen.run, environment)
        if choice == "auto":
            _check_others(run, chosen, found)
        return dataclasses.replace(chosen, run=run)
    except ClusterError as error:
        return dataclasses.replace(chosen, error=str(error))


def _completed(run: ClusterRun, environment: Mapping[str, str]) -> ClusterRun:
    for name, value in ((own_variables.COUNT, run.num_members), (own_variables.INDEX, run.index)):
        if name in environment and variables.integer(environment, name, own_variables.SYSTEM) != value:
            raise ClusterError(
                f"{name} contradicts {run.system} ({', '.join(run.variables)}), which says {value}. Unset one of them, "
                f"or choose with TFSHARD_CLUSTER. Received: {name}={environment[name]!r}"
            )
    if own_variables.COORDINATOR in environment:
        host, port = variables.coordinator_of(environment, run.port)
        if (host, port) != (run.coordinator, run.port):
            names = dict.fromkeys((*run.variables, own_variables.COORDINATOR))
            # The other members' names may be of another network.
            run = dataclasses.replace(run, coordinator=host, port=port, addresses=(), variables=tuple(names))
    return run


def _check_others(run: ClusterRun, chosen: SystemFinding, found: list[SystemFinding]) -> None:
    for other in found:
        theirs = other.run
        if other is chosen or theirs is None or other.system is chosen.system:
            continue
        if theirs.num_members == run.num_members > 1 and theirs.index != run.index:
            raise ClusterError(
                f"{chosen.system.title} and {other.system.title} both describe a run of {run.num_members} members, and "
                f"disagree on which of them this is. Choose one with TFSHARD_CLUSTER={chosen.system.name} or "
                f"TFSHARD_CLUSTER={other.system.name}, the same on all members. Received: "
                f"{chosen.system.title}: {run.index}, {other.system.title}: {theirs.index}"
            )


def _values(system: System, environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in variables.present(environment, system.names)}
