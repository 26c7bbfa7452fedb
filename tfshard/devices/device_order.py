"""The device order of a group: on the mesh, and in TensorFlow.

A gather joins the devices' local shards in the order of TensorFlow's ranks. TensorFlow orders devices by the names of
their tasks (tasks.py). It orders the GPUs of a process by which GPUs reach each other's memory (OrderTaskDeviceMap in
TensorFlow 2.21's collective_param_resolver_local.cc; read in the source, not observed). DTensor assumes that a rank is
a position on the mesh. If the two orders differ, nothing fails and every result is wrong. Therefore each group gathers
its devices' positions when it first meets.
"""

import os
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import clients, gpus, messages
from tfshard.errors import MeshError


def check(
    gathered: tf.Tensor, axis: str, mesh: dtensor.Mesh, members: Callable[[int], slice] = lambda place: slice(None)
) -> None:
    """Check that TensorFlow orders the groups of devices along an axis like the mesh.

    Args:
        gathered: The positions in its group that each device has gathered. A DTensor, in eager code.
        axis: The axis.
        mesh: The mesh.
        members: Returns the slice of positions that form the group of a position on the axis.

    Raises:
        MeshError: The orders differ.
    """
    names = np.array(messages.devices_of(mesh)).reshape(mesh.shape())
    for places, location in zip(messages.unpacked(gathered), mesh.local_device_locations(), strict=True):
        index = tuple(members(location[name]) if name == axis else location[name] for name in mesh.dim_names)
        check_group(f"axis '{axis}'", [str(name) for name in names[index]], np.asarray(places))


def check_group(group: str, devices: Sequence[str], gathered: np.ndarray) -> None:
    """Check one group, as `check` does.

    Args:
        group: The name of the group, for the error.
        devices: The names of the group's devices, in mesh order.
        gathered: The position of each device in `devices`, in TensorFlow's order.

    Raises:
        MeshError: TensorFlow has another order.
    """
    places = [int(place) for place in gathered.flatten()]
    if places == list(range(len(devices))):
        return
    found = [devices[place] if 0 <= place < len(devices) else f"(not a place: {place})" for place in places]
    raise MeshError(
        f"TensorFlow ranks the devices of {group} in another order than the mesh, so gathered values would be in the "
        f"wrong order. {_remedy(list(devices), found)} Received: a mesh with the devices {list(devices)}, which "
        f"TensorFlow ranks as {found}"
    )


def _remedy(devices: list[str], found: list[str]) -> str:
    specs = {name: tf.DeviceSpec.from_string(name) for name in devices}
    first = next((name for name in devices if messages.is_here(name)), devices[0])
    by_task: dict[int, list[int]] = {}
    for name in found:
        if name in specs:
            by_task.setdefault(specs[name].task, []).append(specs[name].device_index)
    is_sorted = {task: numbers == sorted(numbers) for task, numbers in by_task.items()}
    if specs[first].device_type != "GPU" or sorted(found) != sorted(devices) or all(is_sorted.values()):
        return "Make the mesh with tfshard.create_mesh, which has the devices in TensorFlow's order."
    if is_sorted[specs[first].task]:
        return f"The GPUs of this process are in the right order. The error of another names the {gpus.VISIBLE} to use."
    numbers = by_task[specs[first].task]
    value = os.environ.get(gpus.VISIBLE)
    visible = value.split(",") if value else [str(number) for number in range(max(numbers) + 1)]
    if max(numbers) >= len(visible) or any(map(_is_split, tf.config.list_physical_devices("GPU"))):
        return (
            "Several devices of the mesh are parts of one GPU. Start each process with GPUs that are not split, "
            f"named in TensorFlow's order by {gpus.VISIBLE}."
        )
    ordered = list(visible)
    for place, number in zip(sorted(numbers), numbers, strict=True):
        ordered[place] = visible[number]
    right = f"{gpus.VISIBLE}={','.join(ordered)}"
    if clients.here().is_launched:
        return (
            f"Name the GPUs of each client in TensorFlow's order: start 'tfshard launch' with {gpus.VISIBLE}, which it "
            f"divides among the clients, so that this client has {right}."
        )
    return f"Name the GPUs of each process in TensorFlow's order: start it with {right}."


def _is_split(gpu: tf.config.PhysicalDevice) -> bool:
    return len(tf.config.get_logical_device_configuration(gpu) or ()) > 1
