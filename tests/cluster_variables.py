"""The environment variables of a run of two members, as each system sets them.

Recorded from `mpirun` of Open MPI 4.1.8 and 5.0.11. For the other systems, from their documentation: Vertex AI's and
Kubeflow's TF_CONFIG, SageMaker's training toolkit, SLURM's srun, torchrun, Kubernetes's Indexed Jobs and JobSets, and
Ray Train 2.60's source.
"""

import json
from collections.abc import Callable


def vertex_ai(index: int, hosts: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables of worker pools 0 (the chief) and 1."""
    cluster = {"chief": [f"{hosts[0]}:{port}"], "worker": [f"{hosts[1]}:{port + 1}"]}
    task = {"type": ("chief", "worker")[index], "index": 0, "trial": "", "cloud": "abcdef"}
    config = {"cluster": cluster, "task": task, "environment": "cloud", "job": "{}"}
    pool = {"workerpool0": cluster["chief"], "workerpool1": cluster["worker"]}
    spec = {"cluster": pool, "environment": "cloud", "task": {"type": f"workerpool{index}", "index": 0}, "job": "{}"}
    return {"TF_CONFIG": json.dumps(config), "CLUSTER_SPEC": json.dumps(spec), "CLOUD_ML_JOB_ID": "4711"}


def kubeflow(index: int, hosts: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables of the workers of a TFJob without a chief."""
    cluster = {"worker": [f"{hosts[0]}:{port}", f"{hosts[1]}:{port + 1}"]}
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}


def ray(index: int, hosts: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables of the workers of Ray Train's TensorflowTrainer."""
    cluster = {"worker": [f"{hosts[0]}:{port}", f"{hosts[1]}:{port + 1}"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
    return {"TF_CONFIG": json.dumps(config), "TF_USE_LEGACY_KERAS": "1"}


def sagemaker(index: int, hosts: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables of the training toolkit on two instances."""
    del port
    config = {
        "current_group_name": "homogeneousCluster", "current_host": hosts[index],
        "current_instance_type": "ml.c5.xlarge", "hosts": list(hosts), "instance_groups": [],
        "network_interface_name": "eth0",
    }  # fmt: skip
    return {
        "SM_HOSTS": json.dumps(list(hosts)), "SM_CURRENT_HOST": hosts[index], "SM_RESOURCE_CONFIG": json.dumps(config),
        "SM_NETWORK_INTERFACE_NAME": "eth0", "SM_NUM_GPUS": "0", "SM_NUM_CPUS": "4",
    }  # fmt: skip


def slurm(index: int, hosts: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables of a step with one task on each of two nodes."""
    del port
    same = hosts[0] == hosts[1]
    nodes = hosts[0] if same else ",".join(hosts)
    return {
        "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1" if same else "2",
        "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": "2" if same else "1(x2)", "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index) if same else "0", "SLURM_NODEID": "0" if same else str(index),
        "SLURMD_NODENAME": hosts[index], "SLURM_LAUNCH_NODE_IPADDR": hosts[0],
    }  # fmt: skip


def torchrun(index: int, hosts: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables of torchrun --nnodes=2, or of --nproc-per-node=2 on one machine."""
    same = hosts[0] == hosts[1]
    return {
        "RANK": str(index), "WORLD_SIZE": "2", "LOCAL_RANK": str(index) if same else "0",
        "LOCAL_WORLD_SIZE": "2" if same else "1", "GROUP_RANK": "0" if same else str(index),
        "GROUP_WORLD_SIZE": "1" if same else "2", "ROLE_RANK": str(index), "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": hosts[0], "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def open_mpi(index: int, hosts: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables of mpirun -n 2, with -x TFSHARD_COORDINATOR between two machines."""
    del port
    same = hosts[0] == hosts[1]
    return {
        "OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_UNIVERSE_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index) if same else "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2" if same else "1",
        "OMPI_COMM_WORLD_NODE_RANK": str(index) if same else "0", "PMIX_RANK": str(index),
        "PMIX_NAMESPACE": "prterun-node-7949@1", "PMIX_HOSTNAME": hosts[index],
        **({} if same else {"TFSHARD_COORDINATOR": hosts[0]}),
    }  # fmt: skip


def kubernetes(index: int, hosts: tuple[str, str], port: int) -> dict[str, str]:
    """Return the variables of an Indexed Job, and of the template of docs/clusters.md."""
    return {
        "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"train-{index}", "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443", "TFSHARD_NUM_PROCESSES": "2", "TFSHARD_COORDINATOR": f"{hosts[0]}:{port}",
    }  # fmt: skip


SYSTEMS: dict[str, Callable[[int, tuple[str, str], int], dict[str, str]]] = {
    "Vertex AI": vertex_ai, "Kubeflow TFJob": kubeflow, "Ray Train": ray, "SageMaker": sagemaker, "SLURM": slurm,
    "torchrun": torchrun, "Open MPI": open_mpi, "Kubernetes": kubernetes,
}  # fmt: skip
