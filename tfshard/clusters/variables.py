"""Read and set environment variables. An error names the variable, the choices and the remedy."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfshard.errors import ClusterError

# How to run alone where a cluster's variables are set.
ALONE = "To ignore the cluster and run alone, set TFSHARD_CLUSTER=none."


@contextlib.contextmanager
def temporary(**values: str) -> Iterator[None]:
    """Set environment variables, and restore them at the end.

    Example:

    >>> import os
    >>> with temporary(TFSHARD_CLUSTER="none"):
    ...     os.environ["TFSHARD_CLUSTER"]
    'none'
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def integer(environment: Mapping[str, str], name: str, system: str, *, least: int = 0, below: int | None = None) -> int:
    """Return an integer variable that must be set.

    Raises:
        ClusterError: The variable is missing, no integer, or out of range.
    """
    text = environment.get(name)
    limit = f"at least {least}" if below is None else f"from {least} to {below - 1}"
    if text is None:
        raise ClusterError(f"{system} needs {name}, an integer {limit}, on every member. {ALONE} Received: not set")
    if not text.strip().isdecimal() or int(text) < least or (below is not None and int(text) >= below):
        raise ClusterError(f"{name} must be an integer {limit}. {ALONE} Received: {name}={text!r}")
    return int(text)


def value(environment: Mapping[str, str], name: str, kind: type, example: str) -> Any:
    """Return the JSON value of a variable that is set.

    Raises:
        ClusterError: The variable is not JSON, or of another type.
    """
    text = environment[name]
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ClusterError(f"{name} is not JSON: {error}. It must look like {example}. Received: {text!r}") from None
    if not isinstance(found, kind):
        raise ClusterError(f"{name} must look like {example}. Received: {text!r}")
    return found


def host_and_port(text: str, name: str) -> tuple[str, int]:
    """Split `host:port`.

    Raises:
        ClusterError: The port is missing or no port.

    >>> host_and_port("[fd00::2]:2222", "TF_CONFIG"), host_and_port("train-0.train:2222", "TF_CONFIG")
    (('fd00::2', 2222), ('train-0.train', 2222))
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ClusterError(
            f"{name} must give each address as HOST:PORT, with a port from 1 to 65535, such as worker-0:2222. "
            f"Received: {text!r}"
        )
    return host, int(port)


def present(environment: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the variables that are set."""
    return tuple(name for name in names if name in environment)


def coordinator_of(environment: Mapping[str, str], port: int) -> tuple[str, int]:
    """Return the address and port of TFSHARD_COORDINATOR.

    Args:
        environment: The environment variables.
        port: The port if the variable has none.

    >>> coordinator_of({"TFSHARD_COORDINATOR": "node1"}, 29870), coordinator_of({"TFSHARD_COORDINATOR": "node1:5"}, 1)
    (('node1', 29870), ('node1', 5))
    """
    text = environment["TFSHARD_COORDINATOR"].strip()
    has_port = "]:" in text if text.startswith("[") else text.count(":") == 1
    if text and not has_port:
        return text.strip("[]"), port
    return host_and_port(text, "TFSHARD_COORDINATOR")
