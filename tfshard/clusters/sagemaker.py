"""SageMaker's training toolkit. TensorFlow's resolver for it is no public name."""

from collections.abc import Mapping

from tfshard.clusters import variables
from tfshard.clusters.cluster_run import DEFAULT_PORT, ClusterRun
from tfshard.errors import ClusterError

SYSTEM = "SageMaker"
NAMES = ("SM_HOSTS", "SM_CURRENT_HOST", "SM_RESOURCE_CONFIG")
_HOSTS = '["algo-1", "algo-2"]'


def read(environment: Mapping[str, str]) -> ClusterRun | None:
    """Return the run, or None if neither SM_HOSTS nor SM_RESOURCE_CONFIG is set.

    Raises:
        ClusterError: A variable is no such JSON, or this host is not in the list.

    >>> read({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}).index
    1
    """
    if not {"SM_HOSTS", "SM_RESOURCE_CONFIG"} & set(environment):
        return None
    config = {}
    if "SM_RESOURCE_CONFIG" in environment:
        example = f'{{"current_host": "algo-1", "hosts": {_HOSTS}}}'
        config = variables.value(environment, "SM_RESOURCE_CONFIG", dict, example)
    hosts = variables.value(environment, "SM_HOSTS", list, _HOSTS) if "SM_HOSTS" in environment else config.get("hosts")
    here = environment.get("SM_CURRENT_HOST", config.get("current_host"))
    if config and (
        config.get("current_host", here) != here or set(config.get("hosts", hosts or ())) != set(hosts or ())
    ):
        raise ClusterError(
            f"SM_RESOURCE_CONFIG contradicts SM_HOSTS or SM_CURRENT_HOST. SM_RESOURCE_CONFIG: {config}. Unset the ones "
            f"that are wrong. {variables.ALONE} Received: SM_HOSTS={hosts}, SM_CURRENT_HOST={here}"
        )
    if not hosts or not all(isinstance(host, str) for host in hosts):
        raise ClusterError(f"SM_HOSTS must look like {_HOSTS}. Received: {hosts!r}")
    # The number of algo-10 follows that of algo-9.
    hosts = sorted(hosts, key=lambda host: (len(host), host))
    if here not in hosts:
        raise ClusterError(
            f"SM_CURRENT_HOST is not one of the hosts. Hosts: {hosts}. {variables.ALONE} Received: {here!r}"
        )
    return ClusterRun(
        system=SYSTEM,
        variables=variables.present(environment, NAMES),
        num_members=len(hosts),
        index=hosts.index(here),
        coordinator=hosts[0],
        port=DEFAULT_PORT,
        addresses=tuple(hosts),
        job=",".join(hosts),
    )
