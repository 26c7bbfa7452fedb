"""Open MPI, and the PMI variables of MPICH and Intel MPI. Neither tells the address of rank 0."""

from collections.abc import Mapping

from tfshard.clusters import variables
from tfshard.clusters.cluster_run import ClusterRun, port_of
from tfshard.errors import ClusterError

OPEN_MPI = "Open MPI"
OPEN_MPI_NAMES = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE", "MASTER_ADDR",
)  # fmt: skip
PMI = "PMI"
PMI_NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR")


def read_open_mpi(environment: Mapping[str, str]) -> ClusterRun | None:
    """Return the run of `mpirun`, or None.

    >>> names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    >>> sizes = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    >>> read_open_mpi({**dict.fromkeys(names, "1"), **dict.fromkeys(sizes, "2")}).coordinator
    '127.0.0.1'

    Raises:
        ClusterError: A variable is missing or wrong, or nobody tells the address of rank 0.
    """
    if not {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= set(environment):
        return None
    return _read(environment, OPEN_MPI, *OPEN_MPI_NAMES[:4], names=OPEN_MPI_NAMES)


def read_pmi(environment: Mapping[str, str]) -> ClusterRun | None:
    """Return the run of mpiexec of MPICH or Intel MPI, or None. srun sets PMI variables, too: then None."""
    if not {"PMI_RANK", "PMI_SIZE"} <= set(environment):
        return None
    step = environment.get("SLURM_PROCID"), environment.get("SLURM_STEP_NUM_TASKS")
    if step == (environment["PMI_RANK"], environment["PMI_SIZE"]):
        return None
    return _read(environment, PMI, *PMI_NAMES[:4], names=PMI_NAMES)


def _read(
    environment: Mapping[str, str],
    system: str,
    rank: str,
    size: str,
    local_rank: str,
    local_size: str,
    names: tuple[str, ...],
) -> ClusterRun:
    count = variables.integer(environment, size, system, least=1)
    index = variables.integer(environment, rank, system, below=count)
    num_local = variables.integer({local_size: "1", **environment}, local_size, system, least=1)
    job = environment.get("PMIX_NAMESPACE", system)
    host, port = environment.get("MASTER_ADDR", ""), port_of(job)
    if not host and num_local == count:
        host = "127.0.0.1"
    if host and "MASTER_PORT" in environment:
        port = variables.integer(environment, "MASTER_PORT", system, least=1, below=1 << 16)
    if "TFSHARD_COORDINATOR" in environment:
        host, port = variables.coordinator_of(environment, port)
    if not host:
        raise ClusterError(
            f"{system} started {count} processes on several machines, and does not tell the address of rank 0. Pass "
            "it: mpirun -x TFSHARD_COORDINATOR=HOST, where HOST is the first machine of the list. "
            f"{variables.ALONE} Received: {size}={count}, {local_size}={num_local}, no TFSHARD_COORDINATOR and no "
            "MASTER_ADDR"
        )
    return ClusterRun(
        system=system,
        variables=variables.present(environment, names),
        num_members=count,
        index=index,
        coordinator=host,
        port=port,
        local_index=variables.integer({local_rank: "0", **environment}, local_rank, system, below=num_local),
        num_local=num_local,
        job=job,
        has_own_gpus=num_local == 1,
    )
