"""Steps of SLURM, which `srun` starts.

`tf.distribute.cluster_resolver.SlurmClusterResolver` reads the same variables, but tfshard does not use it. The
resolver sorts the nodes by name (n10 before n2), while SLURM numbers its tasks in the order of the list. It refuses
names such as rack1n[1-2]x and rack[1-2]n[1-2], runs nvidia-smi, and sets CUDA_VISIBLE_DEVICES.
"""

import re
from collections.abc import Mapping

from tfshard.clusters import variables
from tfshard.clusters.cluster_run import ClusterRun, port_of
from tfshard.errors import ClusterError

SYSTEM = "SLURM"
NAMES = (
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID",
    "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK",
)  # fmt: skip


def read(environment: Mapping[str, str]) -> ClusterRun | None:
    """Return the run of a step, or None. A batch script, or a shell under salloc, is no step of several tasks.

    Raises:
        ClusterError: A variable is missing or wrong.

    >>> step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    >>> run = read({**step, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    >>> run.coordinator, run.index, run.local_index, run.num_local
    ('gpu1', 1, 1, 2)
    """
    if "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    count = variables.integer(environment, "SLURM_STEP_NUM_TASKS", SYSTEM, least=1)
    if count == 1:
        return None
    index = variables.integer(environment, "SLURM_PROCID", SYSTEM, below=count)
    nodes = expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))
    if not nodes:
        raise ClusterError(f"SLURM needs SLURM_STEP_NODELIST. {variables.ALONE} Received: not set")
    tasks = _tasks_per_node(environment, count, nodes)
    node = environment.get("SLURM_NODEID", "")
    if node.isdecimal() and int(node) < len(nodes):
        num_local = tasks[int(node)]
    else:  # srun's default distribution fills a node before the next one.
        num_local = next(number for place, number in enumerate(tasks) if index < sum(tasks[: place + 1]))
    job = f"{environment.get('SLURM_JOB_ID', '0')}.{environment.get('SLURM_STEP_ID', '0')}"
    return ClusterRun(
        system=SYSTEM,
        variables=variables.present(environment, NAMES),
        num_members=count,
        index=index,
        # Every distribution of tasks begins on the first node.
        coordinator=nodes[0],
        port=port_of(job),
        # The distribution decides which task runs on which node, unless each node has one task.
        addresses=tuple(nodes) if len(nodes) == count else (),
        local_index=variables.integer({"SLURM_LOCALID": "0", **environment}, "SLURM_LOCALID", SYSTEM, below=num_local),
        num_local=num_local,
        job=job,
        has_own_gpus=num_local == 1
        or "SLURM_GPUS_PER_TASK" in environment
        or "gpu" in environment.get("SLURM_TRES_PER_TASK", ""),
    )


def _tasks_per_node(environment: Mapping[str, str], count: int, nodes: list[str]) -> list[int]:
    """Return the number of tasks of each node.

    >>> _tasks_per_node({"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, 5, ["a", "b", "c"])
    [2, 2, 1]
    """
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        found += [int(match[1])] * int(match[2] or 1) if match else [0]
    if not text and count % len(nodes) == 0:
        found = [count // len(nodes)] * len(nodes)
    if len(found) != len(nodes) or sum(found) != count:
        raise ClusterError(
            f"SLURM's variables contradict each other: {count} tasks on {len(nodes)} nodes. SLURM_STEP_TASKS_PER_NODE "
            f"must give the tasks of each node of SLURM_STEP_NODELIST, such as 2(x3),1. {variables.ALONE} Received: "
            f"SLURM_STEP_NUM_TASKS={count}, SLURM_STEP_TASKS_PER_NODE={text!r}, nodes={nodes}"
        )
    return found


def expand_nodes(text: str) -> list[str]:
    """Expand SLURM's node list into node names.

    >>> expand_nodes("login,node[01-03,07],rack[1-2]n[1-2]")
    ['login', 'node01', 'node02', 'node03', 'node07', 'rack1n1', 'rack1n2', 'rack2n1', 'rack2n2']

    Raises:
        ClusterError: The list has an unknown format.
    """
    if not text:
        return []
    # Commas inside brackets do not separate names.
    name = r"(?:[\w.-]|\[[\d,-]+\])+"
    if not re.fullmatch(f"{name}(?:,{name})*", text):
        raise ClusterError(f"SLURM's list of nodes cannot be parsed. Received: SLURM_STEP_NODELIST={text!r}")
    return [node for part in re.findall(name, text) for node in _expand(part)]


def _expand(part: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, ranges, after = match.groups()
    numbers = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ClusterError(f"SLURM's list of nodes cannot be parsed. Received: SLURM_STEP_NODELIST={part!r}")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expand(after)]
