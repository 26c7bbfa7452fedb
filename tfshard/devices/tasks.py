"""The TensorFlow cluster task of each client.

TensorFlow ranks the devices of a group by the names of their tasks, compared as text (EstablishGlobalRank in TensorFlow
2.21's collective_param_resolver_local.cc): task 10 comes before task 2. DTensor assumes that a device's rank is its
position on a mesh. Clients therefore take tasks in the order of the task names, so both orders equal the order of the
clients.
"""

import functools
from collections.abc import Sequence


@functools.cache
def order(num_clients: int) -> tuple[int, ...]:
    """Return the task of each client.

    >>> order(3)
    (0, 1, 2)
    >>> order(12)
    (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)
    """
    return tuple(sorted(range(num_clients), key=str))


def of_client(client: int, num_clients: int) -> int:
    """Return the task of a client."""
    return order(num_clients)[client]


def client_of(task: int, num_clients: int) -> int:
    """Return the client of a task. A number without a client is returned unchanged."""
    return order(num_clients).index(task) if task < num_clients else task


def by_task(values: Sequence[str], num_clients: int) -> list[str]:
    """Return the clients' values in the order of their tasks."""
    return [values[client_of(task, num_clients)] for task in range(num_clients)]
