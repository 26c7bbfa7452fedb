"""The hosts of a launch: this machine, a list of hosts, or the members of a cluster's run (tfshard.clusters)."""

import dataclasses
import os
from collections.abc import Mapping

from tfshard.clusters import ClusterRun, find_run
from tfshard.clusters.variables import ALONE
from tfshard.errors import ClusterError, LaunchError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        names: The names or addresses of the hosts, equal on all hosts. Empty where the cluster does not tell them.
        index: The index of this host.
        port: The port of the first host's launcher. 0: the default.
        identity: The facts that are equal on all launchers of a cluster's run (`ClusterRun.identity`), or None.
    """

    names: tuple[str, ...] = ("127.0.0.1",)
    index: int = 0
    port: int = 0
    identity: Mapping[str, object] | None = None


def find_hosts(names: list[str] | None, index: int | None, environment: Mapping[str, str] | None = None) -> Hosts:
    """Return the hosts from the command line, else from the cluster's variables, else only this machine.

    Args:
        names: `--hosts`.
        index: `--host_index`. With `--hosts`, the index may come from the cluster.
        environment: The environment variables.

    Raises:
        LaunchError: The variables are incomplete or contradict each other, or a host has several launchers.

    >>> find_hosts(None, None, {})
    Hosts(names=('127.0.0.1',), index=0, port=0, identity=None)
    >>> find_hosts(["train-0.train", "train-1.train"], None, {"JOB_COMPLETION_INDEX": "1"}).index
    1
    >>> slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "gpu[1-2],login", "SLURM_PROCID": "2"}
    >>> find_hosts(None, None, slurm).names
    ('gpu1', 'gpu2', 'login')
    """
    environment = os.environ if environment is None else environment
    if names:
        if index is None:
            index = _index(environment, len(names))
        if index is None and len(names) > 1:
            raise LaunchError(
                "The launcher does not know which of the hosts this is. Give --host_index, or set "
                f"JOB_COMPLETION_INDEX (Kubernetes) or SLURM_PROCID. Received: hosts={names}"
            )
        return Hosts(names=tuple(names), index=index or 0)
    if index is not None:
        raise LaunchError(f"--host_index needs --hosts. Received: host_index={index}")
    run = find_run(environment)
    if run is None:
        return Hosts()
    _check_one_launcher(run)
    return Hosts(names=run.names, index=run.index, port=run.port, identity=run.identity)


def _check_one_launcher(run: ClusterRun) -> None:
    # TF_CONFIG and Ray may put several tasks on one machine, each with its own port.
    if run.num_local > 1 and run.system != "TF_CONFIG":
        raise ClusterError(
            f"{run.system} started {run.num_local} launchers on this machine. Start one on each machine, which starts "
            "the clients of its machine (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node, torchrun "
            "--nproc-per-node=1); or start the script itself, without tfshard launch, and call tfshard.initialize() in "
            f"it. {ALONE} Received: {', '.join(run.variables)}"
        )


def _index(environment: Mapping[str, str], num_hosts: int) -> int | None:
    for name in ("JOB_COMPLETION_INDEX", "SLURM_PROCID"):
        if environment.get(name, "").isdecimal() and int(environment[name]) < num_hosts:
            return int(environment[name])
    return None
