"""The hosts of a run: this machine, a list of hosts, SLURM or Kubernetes.

tfshard was never run on SLURM or Kubernetes. The tests cover the parsing of their environment variables.
"""

import dataclasses
import os
import pathlib
import re
import stat
from collections.abc import Mapping

from tfshard.errors import LaunchError

SECRET_VARIABLE = "TFSHARD_SECRET"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        names: The names or addresses of the hosts, equal on all hosts.
        index: The index of this host.
    """

    names: tuple[str, ...] = ("127.0.0.1",)
    index: int = 0


def find_hosts(names: list[str] | None, index: int | None, environment: Mapping[str, str] | None = None) -> Hosts:
    """Return the hosts from the command line, else from SLURM's variables, else only this machine.

    Args:
        names: `--hosts`.
        index: `--host_index`. With `--hosts`, the index may come from Kubernetes or SLURM.
        environment: The environment variables.

    Raises:
        LaunchError: The variables are incomplete, or a host has several launchers.

    >>> find_hosts(None, None, {})
    Hosts(names=('127.0.0.1',), index=0)
    >>> find_hosts(["train-0.train", "train-1.train"], None, {"JOB_COMPLETION_INDEX": "1"})
    Hosts(names=('train-0.train', 'train-1.train'), index=1)
    >>> slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "gpu[1-2],login", "SLURM_PROCID": "2"}
    >>> find_hosts(None, None, slurm)
    Hosts(names=('gpu1', 'gpu2', 'login'), index=2)
    """
    environment = os.environ if environment is None else environment
    if names:
        if index is None:
            index = _index(environment)
        if index is None and len(names) > 1:
            raise LaunchError(
                "The launcher does not know which of the hosts this is. Give --host_index, or set "
                f"JOB_COMPLETION_INDEX (Kubernetes) or SLURM_PROCID. Received: hosts={names}"
            )
        return Hosts(names=tuple(names), index=index or 0)
    if index is not None:
        raise LaunchError(f"--host_index needs --hosts. Received: host_index={index}")
    # SLURM sets this only inside srun. A batch script or a shell under salloc is the only launcher.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1:
        return Hosts()
    nodes = expand_nodes(environment.get("SLURM_STEP_NODELIST", ""))
    if len(nodes) != tasks:
        raise LaunchError(
            f"SLURM runs {tasks} launchers on {len(nodes)} nodes. Run one on each, which starts the clients of its "
            f"node: srun --ntasks-per-node=1. Received: SLURM_STEP_NUM_TASKS={tasks}, nodes={nodes}"
        )
    return Hosts(names=tuple(nodes), index=int(environment["SLURM_PROCID"]))


def _index(environment: Mapping[str, str]) -> int | None:
    for name in ("JOB_COMPLETION_INDEX", "SLURM_PROCID"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return None


def expand_nodes(text: str) -> list[str]:
    """Expand SLURM's node list into node names.

    >>> expand_nodes("login,node[01-03,07],rack[1-2]n[1-2]")
    ['login', 'node01', 'node02', 'node03', 'node07', 'rack1n1', 'rack1n2', 'rack2n1', 'rack2n2']

    Raises:
        LaunchError: The list has an unknown format.
    """
    # Commas inside brackets do not separate names.
    name = r"(?:[\w.-]|\[[\d,-]+\])+"
    if not re.fullmatch(f"{name}(?:,{name})*", text):
        raise LaunchError(f"The launcher cannot parse SLURM's list of nodes. Received: {text!r}")
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
            raise LaunchError(f"The launcher cannot parse SLURM's list of nodes. Received: {part!r}")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expand(after)]


def read_secret(path: str | None, environment: Mapping[str, str] | None = None) -> str | None:
    """Read the run's secret from a file or the environment, never from the command line, which other users can see.

    Raises:
        LaunchError: The file does not exist, or other users may read it.
    """
    environment = os.environ if environment is None else environment
    if path is None:
        return environment.get(SECRET_VARIABLE)
    try:
        mode = os.stat(path).st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LaunchError(
                f"Other users can read the secret file. Run: chmod 600 {path}. Received: mode {stat.filemode(mode)}"
            )
        return pathlib.Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"The secret file cannot be read: {error}. Received: secret_file={path!r}") from None
