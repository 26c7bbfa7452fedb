"""Find the run that a cluster started this process for, from environment variables. Imports no TensorFlow.

A *member* is what the cluster starts: a launcher on each host (`tfshard launch`), or each process of the run
(`tfshard.initialize`). Member 0 is the *coordinator*: the control channel listens at its address.

    cluster_run   `ClusterRun`: the members of a run and this member
    variables     integers, lists and addresses in environment variables, with errors that name the variable
    own_variables TFSHARD_COORDINATOR, TFSHARD_NUM_PROCESSES, TFSHARD_PROCESS_ID
    tf_config     TF_CONFIG: Vertex AI, Kubeflow TFJob, Ray, and resolvers of TensorFlow
    torchrun      RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    mpi           Open MPI, MPICH and Intel MPI
    slurm         steps of SLURM
    sagemaker     SM_HOSTS, SM_CURRENT_HOST, SM_RESOURCE_CONFIG
    kubernetes    Indexed Jobs and JobSets
    finding       the precedence of the systems, and contradictions
    cluster_report    what `tfshard doctor --cluster` prints
    run_secret    the run's secret, from a file or the environment
"""

from tfshard.clusters.cluster_run import ClusterRun
from tfshard.clusters.finding import find_run

__all__ = ["ClusterRun", "find_run"]
