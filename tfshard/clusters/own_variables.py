"""tfshard's own variables, for systems that this package does not know.

All three together name a run. One or two of them add what another system leaves out: the address of Open MPI's member
0, or the number of pods of a Kubernetes Job.
"""

from collections.abc import Mapping

from tfshard.clusters import variables
from tfshard.clusters.cluster_run import DEFAULT_PORT, ClusterRun

SYSTEM = "TFSHARD_COORDINATOR"
COORDINATOR, COUNT, INDEX = NAMES = ("TFSHARD_COORDINATOR", "TFSHARD_NUM_PROCESSES", "TFSHARD_PROCESS_ID")


def read(environment: Mapping[str, str]) -> ClusterRun | None:
    """Return the run, or None unless all three variables are set.

    >>> read({"TFSHARD_COORDINATOR": "10.0.0.1:1234", "TFSHARD_NUM_PROCESSES": "2", "TFSHARD_PROCESS_ID": "1"}).port
    1234
    """
    if not all(name in environment for name in NAMES):
        return None
    count = variables.integer(environment, COUNT, SYSTEM, least=1)
    host, port = variables.coordinator_of(environment, DEFAULT_PORT)
    return ClusterRun(
        system=SYSTEM,
        variables=NAMES,
        num_members=count,
        index=variables.integer(environment, INDEX, SYSTEM, below=count),
        coordinator=host,
        port=port,
        job=f"{host}:{port}",
        has_own_gpus=True,
    )
