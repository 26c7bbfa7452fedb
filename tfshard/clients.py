"""Which client of how many this process is: the one place that asks DTensor."""

from tensorflow.experimental import dtensor

BARRIER_SECONDS = 600


def rank() -> int:
    """The number of this client, from 0; 0 before DTensor is started."""
    return dtensor.client_id()


def count() -> int:
    """How many clients (processes) share the mesh."""
    return dtensor.num_clients()


def barrier(mesh: dtensor.Mesh, name: str) -> None:
    """Waits until every client has come here. With one client nothing is done."""
    if count() > 1:
        dtensor.barrier(mesh.host_mesh(), name, BARRIER_SECONDS)
