"""Build DTensor meshes from the names and sizes of axes."""

import collections
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, messages, startup
from tfshard.errors import MeshError
from tfshard.layouts.axes import BATCH_AXIS, MODEL_AXIS, MeshAxes, axis_sizes, mesh_name, plain, roles_of


# Any: for mypy, a caller's `**sizes` may contain roles too.
def create_mesh(*unnamed: object, roles: Any = None, **sizes: int) -> dtensor.Mesh:
    """Arrange the devices in a grid with named axes, in the given order.

    An axis with the role `"data"` carries data parallelism and ZeRO sharding. An axis with the role `"tensor"` carries
    the layout map. By default, axes named `batch`, `data`, `dp` or `fsdp` have the role `"data"`, and all other axes
    (usually `model`) have the role `"tensor"`. `roles` overrides the default. If the script has not called
    `tfshard.initialize()`, `create_mesh` starts DTensor with as many devices as the mesh has. In a launched run, the
    mesh spans the devices of all clients, client 0's first: the last axes lie within a client, the first axes span
    clients.

    An axis `replica` (role `"replica"`) selects hybrid sharding. Every device has different samples. Each replica
    stores a full set of the shards, so no all-gather crosses replicas. Gradients of 64 KiB and more are reduced within
    each replica first, then between replicas. The devices of a replica are consecutive: if a replica has as many
    devices as a host, the replica is a host. In the returned mesh, the axis `batch` spans the devices of all replicas.

    An axis `context` (role `"context"`) splits sequences: its devices have different positions of the same samples. It
    needs a data axis, which spans the devices of both in the returned mesh. The devices that share sequences are
    consecutive.

    An axis `pipeline` (role `"pipeline"`) is for models that `tfshard.pipeline` has cut into stages. Each position on
    the axis has different layers, on a mesh of all other axes.

    Args:
        *unnamed: Not allowed. Each size needs the name of its axis.
        roles: Axis name to role, for axes whose role does not follow from their name, such as `{"outer": "data",
            "inner": "tensor"}`.
        **sizes: The size of each axis, a positive integer. One axis may be -1 for "the remaining devices".

    Returns:
        A `tf.experimental.dtensor.Mesh`.

    Raises:
        MeshError: No axis, a size without a name, a size that is not a positive integer or -1, more than one -1, or a
            mesh larger than the devices. An unknown role, a role for an unknown axis, or two data axes. In a launched
            run, clients that ask for different meshes.

    Example:

    >>> import tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> mesh = tfshard.create_mesh(batch=2, model=-1)
    >>> mesh.dim_names, mesh.shape()
    (['batch', 'model'], [2, 2])
    >>> mesh = tfshard.create_mesh(dp=2, tp=2)  # `dp` is for data.
    >>> mesh = tfshard.create_mesh(outer=2, inner=2, roles={"outer": "data", "inner": "tensor"})
    >>> hybrid = tfshard.create_mesh(replica=2, batch=2)
    >>> hybrid.dim_names, hybrid.shape()
    (['batch'], [4])
    """
    if unnamed:
        raise MeshError(
            f"create_mesh takes each size with the name of its axis, such as {_named(unnamed)}. Received: "
            f"create_mesh({', '.join(map(repr, unnamed))})"
        )
    if not sizes:
        raise MeshError("A mesh needs at least one axis, such as create_mesh(batch=4). Received: no axes")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise MeshError(
                f"The size of mesh axis '{name}' must be a positive integer, or -1 for the remaining devices. "
                f"Received: {name}={size!r}"
            )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise MeshError(f"At most one mesh axis may be -1. Received: axes={sizes}")
    roles = roles_of(sizes, roles)  # Check before the devices start, which happens only once.
    fixed = math.prod(size for size in sizes.values() if size != -1)
    started = startup.current()
    if started is None:
        started = startup.initialize(num_devices=None if open_axes else _default_devices(fixed))
    if open_axes:
        if started.num_devices % fixed:
            raise MeshError(
                f"The remaining axes ({fixed} devices) do not divide the {started.num_devices} devices. "
                f"Received: axes={sizes}"
            )
        sizes = {**sizes, open_axes[0]: started.num_devices // fixed}
    size = math.prod(sizes.values())
    if size > started.num_devices:
        raise MeshError(
            f"The mesh needs {size} devices, but only {started.num_devices} {started.device_type} devices exist. "
            f"Make the mesh smaller, or call tfshard.initialize(num_devices={size}) at the start of the program. "
            f"Received: axes={sizes}"
        )
    mesh_axes = MeshAxes.of(sizes, roles)
    if started.num_clients > 1:
        return agreed_mesh(mesh_axes, started)
    devices = [f"{started.device_type}:{i}" for i in range(size)]
    with _private.without_log():
        return dtensor.create_mesh(
            list(mesh_axes.items()), mesh_name=mesh_name(mesh_axes), devices=devices, device_type=started.device_type
        )


def _named(unnamed: Sequence[object]) -> str:
    """Return the call of `create_mesh` that the sizes without names probably mean."""
    first = unnamed[0]
    if len(unnamed) == 1 and isinstance(first, Mapping) and all(str(name).isidentifier() for name in first):
        return f"create_mesh({', '.join(f'{name}={size!r}' for name, size in first.items())})"
    values = [*first] if len(unnamed) == 1 and isinstance(first, (list, tuple)) else [*unnamed]
    if len(values) in (1, 2) and all(isinstance(size, int) for size in values):
        pairs = zip((BATCH_AXIS, MODEL_AXIS), values, strict=False)
        return f"create_mesh({', '.join(f'{name}={size}' for name, size in pairs)})"
    return "create_mesh(batch=4)"


def rank_meshes(mesh: dtensor.Mesh) -> tuple[dtensor.Mesh, ...]:
    """Return the meshes of the positions on the pipeline axis, in order. Without a pipeline axis, return the mesh
    itself.

    Each mesh has all other axes. In a launched run, every client makes every mesh, even without local devices in it.
    """
    axes = axis_sizes(mesh)
    if axes.pipeline is None:
        return (mesh,)
    devices = np.array(messages.devices_of(mesh)).reshape(mesh.shape())
    by_rank = np.moveaxis(devices, list(axes).index(axes.pipeline), 0)
    of_a_rank, local = axes.of_a_rank, {str(device) for device in mesh.local_devices()}
    with _private.without_log():
        meshes = tuple(_mesh_of(of_a_rank, list(each.flatten()), local) for each in by_rank)
    for each in meshes:
        _private.give_separate_device(each)
    return meshes


def _mesh_of(axes: MeshAxes, devices: list[str], local: Collection[str]) -> dtensor.Mesh:
    """Make a mesh of some devices of a run, possibly without local devices.

    Args:
        axes: The axes of the mesh.
        devices: The devices of the mesh, in order.
        local: The devices of this client.
    """
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    here = [number for number, device in enumerate(devices) if device in local]
    return dtensor.Mesh(
        list(axes),
        np.arange(len(devices)).reshape(list(axes.values())),
        here,
        [specs[number] for number in here],
        mesh_name=mesh_name(axes),
        global_devices=specs,
    )


def agreed_mesh(mesh_axes: MeshAxes, started: startup.Runtime) -> dtensor.Mesh:
    """Make a mesh over all clients, with equally many devices of each client. Client 0's devices come first."""
    if math.prod(mesh_axes.values()) % started.num_clients:
        raise MeshError(
            f"A mesh must have the same number of devices from each of the {started.num_clients} clients. "
            f"Received: axes={mesh_axes}"
        )
    check_ranks(mesh_axes, started.num_clients)
    agreed = {"axes": list(mesh_axes.given.items()), "roles": plain(mesh_axes.roles)}
    clients.here().agree("the mesh", agreed, error=MeshError)
    return distributed_mesh(mesh_axes, started)


def check_ranks(mesh_axes: MeshAxes, num_clients: int) -> None:
    """Check that each position on the pipeline axis has equally many devices of every client that it includes.

    DTensor supports no other meshes ("Uneven local clusters" in TensorFlow 2.21's dtensor/cc/tensor_layout.cc).

    Args:
        mesh_axes: The axes of a mesh with equally many devices of all clients, client 0's first.
        num_clients: The number of clients.

    Raises:
        MeshError: The numbers differ. The message names a pipeline axis that works.
    """
    if mesh_axes.pipeline is None:
        return
    count = math.prod(mesh_axes.values())
    owners = np.arange(count).reshape(list(mesh_axes.values())) // (count // num_clients)
    by_rank = np.moveaxis(owners, list(mesh_axes).index(mesh_axes.pipeline), 0)
    for rank, each in enumerate(by_rank):
        counts = collections.Counter(int(owner) for owner in each.flatten())
        if len(set(counts.values())) > 1:
            raise MeshError(
                f"Rank {rank} of the axis '{mesh_axes.pipeline}' would have {dict(counts)} devices by client, but a "
                f"rank must have the same number of devices from each of its clients. Give the axis {num_clients} "
                "ranks, one for each client, or name the axis last: then each rank has devices of all clients. "
                f"Received: axes={mesh_axes.given}"
            )


def distributed_mesh(sizes: Mapping[str, int], started: startup.Runtime) -> dtensor.Mesh:
    """Make a mesh over all clients, without a check that all clients make it."""
    mesh_axes = MeshAxes.of(sizes)
    if started.device_type == "TPU":
        # A TPU mesh takes all devices. Never tested on TPUs.
        with _private.without_log():
            return dtensor.create_distributed_mesh(
                list(mesh_axes.items()), mesh_name=mesh_name(mesh_axes), device_type=started.device_type
            )
    size = math.prod(mesh_axes.values())
    local = size // started.num_clients
    devices = dtensor.local_devices(started.device_type)[:local]
    # `dtensor.create_distributed_mesh` would treat a task's number as a client's number (tasks.py).
    numbers = range(started.client_id * local, (started.client_id + 1) * local)
    return dtensor.Mesh(
        list(mesh_axes),
        np.arange(size).reshape(list(mesh_axes.values())),
        list(numbers),
        devices,
        mesh_name=mesh_name(mesh_axes),
    )


def _default_devices(size: int) -> int | None:
    """Return the mesh's size as the number of logical CPU devices, or None for accelerators."""
    return size if dtensor.preferred_device_type() == "CPU" else None
