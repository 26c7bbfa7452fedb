"""TF_CONFIG, which Vertex AI, Kubeflow's TFJob and Ray Train set, and the resolvers of `tf.distribute`.

`tf.distribute.cluster_resolver.TFConfigClusterResolver` reads the same variable. It is not used here because a launcher
does not import TensorFlow, and because the resolver accepts a task that is not in the cluster.
"""

from collections.abc import Mapping
from typing import Any

from tfshard.clusters import variables
from tfshard.clusters.cluster_run import ClusterRun
from tfshard.errors import ClusterError

SYSTEM = "TF_CONFIG"
NAMES = ("TF_CONFIG",)
_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
# In the order of the members. `master` is the older name of the chief.
_TRAINING = ("chief", "master", "worker")
_ROLES = (*_TRAINING, "ps", "evaluator")


def read(environment: Mapping[str, str]) -> ClusterRun | None:
    """Return the run, or None if TF_CONFIG is not set or has no cluster.

    Raises:
        ClusterError: TF_CONFIG is no such JSON, or its task does not train.

    >>> task = '"task": {"type": "worker", "index": 0}'
    >>> read({"TF_CONFIG": f'{{"cluster": {{"chief": ["a:1"], "worker": ["b:2"]}}, {task}}}'}).index
    1
    """
    if not environment.get("TF_CONFIG", "").strip():
        return None
    config = variables.value(environment, "TF_CONFIG", dict, _EXAMPLE)
    cluster = config.get("cluster")
    if not cluster:
        return None
    if not isinstance(cluster, dict) or not isinstance(config.get("task"), dict):
        raise ClusterError(f"TF_CONFIG must look like {_EXAMPLE}. Received: {environment['TF_CONFIG']!r}")
    task = config["task"]
    return of_cluster(cluster, task.get("type"), task.get("index"), SYSTEM, NAMES)


def of_cluster(
    cluster: Mapping[str, Any], task_type: object, task_index: object, system: str, names: tuple[str, ...]
) -> ClusterRun:
    """Return the run of a cluster in TensorFlow's form.

    Args:
        cluster: The addresses of the tasks of each type: a list, or a dict by index.
        task_type: The type of this task.
        task_index: The index of this task.
        system: The name of the system, for messages.
        names: The variables that the values come from.

    Raises:
        ClusterError: This task does not train, or is not in the cluster.
    """
    addresses, places = [], []
    for role in _TRAINING:
        for index, address in _tasks(cluster, role, system):
            addresses.append(variables.host_and_port(address, f"{system} (cluster, {role} {index})"))
            places.append((role, index))
    this = (task_type, int(str(task_index)) if str(task_index).isdecimal() else task_index)
    _check_role(task_type, system)
    if not addresses:
        raise ClusterError(
            f"{system} has no task that trains. Its cluster needs addresses for 'chief' or 'worker'. "
            f"Received: cluster={dict(cluster)}"
        )
    if this not in places:
        raise ClusterError(
            f"{system} does not list this task in its cluster. Tasks: {places}. Correct the task's type and index, or "
            f"the lists of the cluster; all tasks need the same lists. {variables.ALONE} Received: task={this}"
        )
    index = places.index(this)
    hosts = [host for host, _ in addresses]
    here = [number for number, host in enumerate(hosts) if host == hosts[index]]
    left_out = [role for role in cluster if role not in _TRAINING]
    note = f"tasks of the types {left_out} take no part: tfshard has no parameter servers, and evaluates in `fit`."
    return ClusterRun(
        system=system,
        variables=names,
        num_members=len(places),
        index=index,
        coordinator=hosts[0],
        port=addresses[0][1],
        addresses=tuple(hosts),
        local_index=here.index(index),
        num_local=len(here),
        job=",".join(f"{host}:{port}" for host, port in addresses),
        notes=(note,) if left_out else (),
    )


def _tasks(cluster: Mapping[str, Any], role: str, system: str) -> list[tuple[int, str]]:
    found = cluster.get(role, [])
    if isinstance(found, dict):  # tf.train.ClusterSpec allows tasks by index.
        found = [found[key] for key in sorted(found, key=int)] if all(str(k).isdecimal() for k in found) else None
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ClusterError(
            f"{system} must have a list of HOST:PORT for the tasks of type '{role}'. Received: {cluster[role]!r}"
        )
    return list(enumerate(found))


def _check_role(role: object, system: str) -> None:
    if role in _TRAINING:
        return
    if role == "evaluator":
        raise ClusterError(
            f"{system} says that this task is an evaluator. tfshard has none: the tasks that train also evaluate, with "
            "fit(validation_data=...). Ask the cluster for no evaluator, or let the evaluator's task run a script "
            f"that evaluates checkpoints, with TFSHARD_CLUSTER=none. Received: task type {role!r}"
        )
    if role == "ps":
        raise ClusterError(
            f"{system} says that this task is a parameter server. tfshard has none: the chief and the workers store "
            f"the parameters in shards. Ask the cluster for workers instead. Received: task type {role!r}"
        )
    raise ClusterError(f"{system} must give the task a type. Types: {_ROLES}. Received: {role!r}")
