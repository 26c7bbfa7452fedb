"""Check `rank-order`: TensorFlow ranks the devices of each mesh in the order of the mesh."""

from tfshard.devices import mesh, replicas, startup, transfer
from tfshard.doctor.check_log import CheckLog, CheckRequest, mesh_text
from tfshard.errors import MeshError


def run(log: CheckLog, started: startup.Runtime, request: CheckRequest) -> None:
    """Let the devices of each group of each mesh gather their places. Another order than the mesh's is a fault."""
    for axes in request.meshes:
        made = mesh.create_mesh(**axes)
        try:
            transfer.meet(made)
            replicas.meet(made)
        except MeshError as error:
            log.fault(f"Mesh {mesh_text(axes)}: {error}")
            log.row("Ranks", mesh=mesh_text(axes), order="permuted")
        else:
            log.row("Ranks", mesh=mesh_text(axes), order="as on the mesh")
    log.summarize(f"{len(request.meshes)} meshes of {started.num_devices} devices")
