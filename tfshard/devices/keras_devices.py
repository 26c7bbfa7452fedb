"""The devices and meshes of `keras.distribution` on TensorFlow."""

import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import startup
from tfshard.devices.mesh import agreed_mesh
from tfshard.errors import InitializationError, LayoutError, MeshError
from tfshard.layouts.axes import MeshAxes, Role, mesh_name

_DEVICE = re.compile(r"(?:.*/device:)?([A-Za-z]+)(?::(\d+))?")

# The mesh of each DeviceMesh, by the axis that shards the data.
_meshes: "_private.WeakIdentityDict[keras.distribution.DeviceMesh, dict[str, dtensor.Mesh]]" = (
    _private.WeakIdentityDict()
)


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the names of the devices of a type, such as `"cpu:0"`: the backend of `keras.distribution.list_devices`.

    The first call starts the devices, as `tfshard.initialize()` does, if TensorFlow has not fixed its devices. It
    starts nothing if `device_type` is not the type that `tfshard.initialize()` would choose.

    Args:
        device_type: `"cpu"`, `"gpu"` or `"tpu"`. By default the type of the started devices. In a launched run, the
            devices of all clients.

    Raises:
        InitializationError: The type is unknown, or the devices cannot start.
    """
    kind = None if device_type is None else _kind_of(device_type)
    started, fixed = startup.current(), _private.context_is_initialized()
    if started is None and not fixed and kind in (None, dtensor.preferred_device_type()):
        started = startup.start_for("keras.distribution.list_devices()")
    if started is not None and kind in (None, started.device_type):
        return [f"{started.device_type.lower()}:{number}" for number in range(started.num_devices)]
    if kind is not None and not fixed and started is None:
        # Listing logical devices would fix them.
        return [f"{kind.lower()}:{number}" for number, _ in enumerate(tf.config.list_physical_devices(kind))]
    found = [(device.device_type, device.name) for device in tf.config.list_logical_devices(kind)]
    if kind is None and any(each != "CPU" for each, _ in found):
        found = [(each, name) for each, name in found if each != "CPU"]
    return [f"{each.lower()}:{name.rpartition(':')[2]}" for each, name in found]


def get_device_count(device_type: str | None = None) -> int:
    """Return the number of devices of a type: the backend of `keras.distribution.get_device_count`."""
    return len(list_devices(device_type))


def num_processes() -> int:
    """Return the number of clients of the run, also before the clients have met."""
    place = startup.place_in_run()
    return 1 if place is None else place[1]


def process_id() -> int:
    """Return the number of this client, from 0."""
    place = startup.place_in_run()
    return 0 if place is None else place[0]


def initialize(
    job_addresses: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Start the devices: the backend of `keras.distribution.initialize`.

    In a run of `tfshard launch` or of a cluster, the client joins the run. The arguments are compared with the run.

    Raises:
        InitializationError: The arguments ask for several processes, and no launcher started this one. Or they
            contradict each other or the run.
    """
    addresses = [] if not job_addresses else [each.strip() for each in job_addresses.split(",")]
    if len(addresses) > 1 and num_processes not in (None, len(addresses)):
        raise InitializationError(
            f"The provided job_addresses {addresses} has {len(addresses)} jobs, but num_processes is {num_processes}. "
            "Give one address for each process, or leave num_processes out."
        )
    count = num_processes or len(addresses) or 1
    place = startup.place_in_run()
    if place is None:
        if count > 1:
            hosts = sorted({each.rpartition(":")[0] for each in addresses})
            flags = f"--num_processes={count}" if len(hosts) < 2 else f"--hosts={','.join(hosts)} --host_index=..."
            raise InitializationError(
                f"keras.distribution.initialize asks for {count} processes, but neither a launcher nor a cluster that "
                "tfshard knows started this process. "
                "Without a launcher, nothing stops the others when one dies. Start the script with 'tfshard launch "
                f"{flags} SCRIPT' (see: tfshard docs launching), and call keras.distribution.initialize() without "
                f"arguments. Received: job_addresses={job_addresses!r}, num_processes={num_processes}, "
                f"process_id={process_id}"
            )
    elif num_processes not in (None, place[1]) or process_id not in (None, place[0]):
        raise InitializationError(
            f"'tfshard launch' or a cluster started this process as client {place[0]} of {place[1]}. Call "
            "keras.distribution.initialize() without arguments, or unset KERAS_DISTRIBUTION_NUM_PROCESSES and "
            "KERAS_DISTRIBUTION_PROCESS_ID. Received: "
            f"num_processes={num_processes}, process_id={process_id}"
        )
    startup.start_for("keras.distribution.initialize()")


def _kind_of(device_type: str) -> str:
    kind = str(device_type).upper()
    if kind not in startup.DEVICE_TYPES:
        raise InitializationError(
            f"Unknown device type. Device types: {[each.lower() for each in startup.DEVICE_TYPES]}. Received: "
            f"device_type={device_type!r}"
        )
    return kind


def logical_device(device: Any) -> tf.config.LogicalDevice:
    """Return TensorFlow's device with a name of `list_devices`, such as `"cpu:0"`.

    Raises:
        MeshError: This process has no such device.
    """
    kind, number = _parsed(device)
    found = {each.name.rpartition(":")[2]: each for each in tf.config.list_logical_devices(kind)}
    if str(number) not in found:
        raise MeshError(f"Device not found: {device!r}. Devices of this type: {list_devices(kind)}")
    return found[str(number)]


def _parsed(device: Any) -> tuple[str, int]:
    match = _DEVICE.fullmatch(str(device))
    if match is None or match[1].upper() not in startup.DEVICE_TYPES:
        raise MeshError(
            "A device of a keras.distribution.DeviceMesh is a name such as 'gpu:0' from "
            f"keras.distribution.list_devices(). Received: {device!r}"
        )
    return match[1].upper(), int(match[2] or 0)


def mesh_of(device_mesh: keras.distribution.DeviceMesh, batch_dim_name: str | None = None) -> dtensor.Mesh:
    """Return the DTensor mesh of a Keras mesh, with its axes in its order. Starts the devices, if need be.

    Args:
        device_mesh: The Keras mesh.
        batch_dim_name: The axis that shards the data. By default that of the active distribution if it has this mesh,
            else the first axis, as in `keras.distribution.ModelParallel`.

    Raises:
        MeshError: The mesh has devices that do not exist, or of another type than the started devices. In a launched
            run: it does not have all devices in order.
        InitializationError: The devices cannot start.
    """
    active = keras.distribution.distribution()
    if batch_dim_name is None and active is not None and active.device_mesh is device_mesh:
        batch_dim_name = active.batch_dim_name
    batch = str(batch_dim_name or device_mesh.axis_names[0])
    known = _meshes.get(device_mesh)
    if known is None:
        known = _meshes[device_mesh] = {}
    if batch not in known:
        known[batch] = _made(device_mesh, batch)
    return known[batch]


def _made(device_mesh: keras.distribution.DeviceMesh, batch: str) -> dtensor.Mesh:
    devices = [_parsed(device) for device in np.asarray(device_mesh.devices).flatten()]
    kinds, numbers = {kind for kind, _ in devices}, [number for _, number in devices]
    received = f"Received: {device_mesh!r} with the devices {[str(each) for each in device_mesh.devices.flatten()]}"
    if len(kinds) > 1 or len(set(numbers)) < len(numbers):
        raise MeshError(f"The devices of a DeviceMesh must be of one type, each once. {received}")
    (kind,) = kinds
    given_names = [str(name) for name in device_mesh.axis_names]
    if len(set(given_names)) < len(given_names):
        raise MeshError(f"The axes of a DeviceMesh must have different names. {received}")
    if batch not in given_names:
        raise MeshError(
            f"batch_dim_name must be an axis of the DeviceMesh, which shards the data. Axes: {tuple(given_names)}. "
            f"Received: batch_dim_name={batch!r}"
        )
    is_launched = startup.place_in_run() is not None
    # On CPUs, as many logical devices as the mesh names.
    count = max(numbers) + 1 if kind == "CPU" and not is_launched else None
    started = startup.start_for("The first use of a keras.distribution.DeviceMesh", count, kind)
    if kind != started.device_type or max(numbers) >= started.num_devices:
        raise MeshError(
            f"The DeviceMesh has devices that do not exist. {started.num_devices} {started.device_type} devices are "
            f"started. Call tfshard.initialize(num_devices={max(numbers) + 1}, device_type={kind!r}) at the start of "
            f"the program, right after the import. {received}"
        )
    roles = {name: Role.DATA if name == batch else Role.TENSOR for name in given_names}
    sizes = {name: int(size) for name, size in zip(given_names, device_mesh.devices.shape, strict=True)}
    axes = MeshAxes.of(sizes, roles)
    if started.num_clients > 1:
        if numbers != list(range(started.num_devices)):
            raise MeshError(
                f"In a launched run, a DeviceMesh must have all {started.num_devices} devices in the order of "
                f"keras.distribution.list_devices(). {received}"
            )
        return agreed_mesh(axes, started)
    with _private.without_log():
        return dtensor.create_mesh(
            list(axes.items()),
            mesh_name=mesh_name(axes),
            devices=[f"{kind}:{number}" for number in numbers],
            device_type=kind,
        )


def layout_of(tensor_layout: keras.distribution.TensorLayout) -> dtensor.Layout:
    """Return the DTensor layout of a Keras layout.

    Raises:
        LayoutError: The layout has no mesh.
    """
    if tensor_layout.device_mesh is None:
        raise LayoutError(
            "Cannot create sharding when device mesh is not set for TensorLayout. Give it one: "
            f"keras.distribution.TensorLayout(axes, device_mesh). Received: {tensor_layout!r}"
        )
    specs = [dtensor.UNSHARDED if axis is None else axis for axis in tensor_layout.axes]
    return dtensor.Layout(specs, tensor_layout.device_mesh.backend_mesh)
