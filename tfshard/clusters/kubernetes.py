"""Indexed Jobs and JobSets of Kubernetes with a headless service.

`tf.distribute.cluster_resolver.KubernetesClusterResolver` is not used: it needs the Kubernetes client and the right to
list pods, returns the addresses of nodes instead of pods, and does not know which pod this is.
"""

import socket
from collections.abc import Mapping

from tfshard.clusters import variables
from tfshard.clusters.cluster_run import DEFAULT_PORT, ClusterRun
from tfshard.errors import ClusterError

SYSTEM = "Kubernetes"
NAMES = ("JOB_COMPLETION_INDEX", "HOSTNAME", "TFSHARD_NUM_PROCESSES", "TFSHARD_COORDINATOR")


def read(environment: Mapping[str, str], full_name: str | None = None) -> ClusterRun | None:
    """Return the run of an Indexed Job, or None.

    The pods of an Indexed Job are called JOB-0, JOB-1, ..., those of a JobSet SET-JOB-0-0, SET-JOB-0-1, .... With a
    headless service, the name of pod 0 resolves. No variable tells how many pods there are.

    Args:
        environment: The environment variables.
        full_name: The full name of this machine. By default it is asked.

    Raises:
        ClusterError: TFSHARD_NUM_PROCESSES is missing, or the pod's name does not end with its index.

    >>> pod = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1", "TFSHARD_NUM_PROCESSES": "2"}
    >>> read(pod, "train-1.workers.default.svc.cluster.local").coordinator
    'train-0.workers.default.svc.cluster.local'
    """
    if "JOB_COMPLETION_INDEX" not in environment:
        return None
    if "TFSHARD_NUM_PROCESSES" not in environment:
        raise ClusterError(
            "An Indexed Job does not tell its pods how many they are. Set the environment variable "
            "TFSHARD_NUM_PROCESSES in the pod's template to the Job's completions. "
            f"{variables.ALONE} Received: JOB_COMPLETION_INDEX={environment['JOB_COMPLETION_INDEX']}, no "
            "TFSHARD_NUM_PROCESSES"
        )
    count = variables.integer(environment, "TFSHARD_NUM_PROCESSES", SYSTEM, least=1)
    index = variables.integer(environment, "JOB_COMPLETION_INDEX", SYSTEM, below=count)
    pod = environment.get("HOSTNAME") or socket.gethostname()
    job, dash, number = pod.rpartition("-")
    if "TFSHARD_COORDINATOR" in environment:
        host, port = variables.coordinator_of(environment, DEFAULT_PORT)
        if number != str(index):
            job = f"{host}:{port}"  # The pods' names may have nothing in common.
    else:
        if not dash or number != str(index):
            raise ClusterError(
                f"The pod's name must end with its index, as in JOB-{index}, to tell the name of pod 0. Set "
                "TFSHARD_COORDINATOR to the name of pod 0 in the pod's template. "
                f"Received: HOSTNAME={pod}, JOB_COMPLETION_INDEX={index}"
            )
        full = socket.getfqdn(pod) if full_name is None else full_name
        subdomain = full.removeprefix(pod) if full.startswith(f"{pod}.") else ""
        host, port = f"{job}-0{subdomain}", DEFAULT_PORT
    return ClusterRun(
        system=SYSTEM,
        variables=variables.present(environment, NAMES),
        num_members=count,
        index=index,
        coordinator=host,
        port=port,
        job=job or pod,
    )
