"""Which task of TensorFlow's cluster each client is.

TensorFlow gives ranks to the devices of a group by the names of their tasks, compared as text (EstablishGlobalRank in
TensorFlow 2.21's collective_param_resolver_local.cc): task 10 comes before task 2. DTensor takes a device's rank for
its place on a mesh. So clients take the tasks in the order of their names, and both orders are that of the clients.
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
    """Return the client that is a task; a task without a client has the number that it would have."""
    return order(num_clients).index(task) if task < num_clients else task


def by_task(values: Sequence[str], num_clients: int) -> list[str]:
    """Return values of the clients in the order of their tasks."""
    return [values[client_of(task, num_clients)] for task in range(num_clients)]
