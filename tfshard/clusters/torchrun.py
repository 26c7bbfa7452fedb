"""The variables of torchrun, which PyTorch's operators on Kubernetes and many scripts also set."""

from collections.abc import Mapping

from tfshard.clusters import variables
from tfshard.clusters.cluster_run import ClusterRun
from tfshard.errors import ClusterError

SYSTEM = "torchrun"
NAMES = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


def read(environment: Mapping[str, str]) -> ClusterRun | None:
    """Return the run, or None unless RANK and WORLD_SIZE are set.

    torchrun itself listens on MASTER_PORT. The control channel then takes the next port.

    Raises:
        ClusterError: A variable is missing or wrong.

    >>> torch = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
    >>> read(torch).port, read({**torch, "TORCHELASTIC_USE_AGENT_STORE": "True"}).port
    (29400, 29401)
    """
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return None
    count = variables.integer(environment, "WORLD_SIZE", SYSTEM, least=1)
    index = variables.integer(environment, "RANK", SYSTEM, below=count)
    host, port = environment.get("MASTER_ADDR", ""), 0
    if not host and count > 1:
        raise ClusterError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR is not: the members do not know where to meet. Set "
            f"MASTER_ADDR and MASTER_PORT to the address of rank 0 and a free port. {variables.ALONE} "
            f"Received: RANK={index}, WORLD_SIZE={count}"
        )
    if count > 1:
        port = variables.integer(environment, "MASTER_PORT", SYSTEM, least=1, below=(1 << 16) - 1)
        port += environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
    num_local = variables.integer({"LOCAL_WORLD_SIZE": "1", **environment}, "LOCAL_WORLD_SIZE", SYSTEM, least=1)
    return ClusterRun(
        system=SYSTEM,
        variables=variables.present(environment, NAMES),
        num_members=count,
        index=index,
        coordinator=host,
        port=port,
        local_index=variables.integer({"LOCAL_RANK": "0", **environment}, "LOCAL_RANK", SYSTEM, below=num_local)
        if "LOCAL_WORLD_SIZE" in environment
        else 0,
        num_local=num_local,
        job=f"{host}:{port}/{environment.get('TORCHELASTIC_RUN_ID', '')}",
        # All processes of a machine see the GPUs of torchrun.
        has_own_gpus=num_local == 1,
    )
