"""The local shards of a training run's variables: out of the devices' tensors, and back into them."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from tfshard.checkpoints.training_state import StateVariable
from tfshard.layouts import boxes
from tfshard.layouts.boxes import Box, Shard
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable

Read = Callable[[StateVariable, Box], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeldShard:
    """A box of a variable that a device of this client holds.

    Attributes:
        variable: The variable.
        box: The box in the variable's shape.
        tensor: The device's local tensor, on the host. The tensor keeps its value: TensorFlow copies a variable that is
            written while somebody holds its value.
        begin: The first element of the box in the tensor. The elements of a box are contiguous.
    """

    variable: StateVariable
    box: Box
    tensor: tf.Tensor
    begin: int

    @property
    def is_tensor(self) -> bool:
        """True if the box is the full tensor."""
        return tuple(self.tensor.shape) == self.box.shape

    def array(self) -> np.ndarray:
        """Return the values of the box, in row-major order and in the shape of the box."""
        array = np.asarray(self.tensor).reshape(-1)[self.begin : self.begin + self.box.elements]
        return np.ascontiguousarray(array).reshape(self.box.shape)


def held(variables: Iterable[StateVariable], *, first_client: bool) -> list[HeldShard]:
    """Return the boxes that this client writes. Exactly one of the devices that hold a box writes the box.

    Args:
        variables: The variables, in the same order on every client.
        first_client: True on the client that writes the variables that are on no mesh.
    """
    found = []
    for number, (storage, members) in enumerate(_by_storage(variables)):
        if storage is None:
            if first_client:
                (variable,) = members.values()
                tensor = _on_host(tf.convert_to_tensor(variable.value))
                box = boxes.full_box(variable.shape)
                found.append(HeldShard(variable=variable, box=box, tensor=tensor, begin=0))
            continue
        sizes = storage.format.mesh_axes
        for location, tensor in storage.local_tensors():
            if boxes.owner(storage.format.storage, sizes, location, number) != location:
                continue
            tensor = storage.format.decode_local(_on_host(tensor))
            for shard in _shards(storage, members, location):
                found.append(HeldShard(variable=members[shard.member], box=shard.box, tensor=tensor, begin=shard.begin))
    return [shard for shard in found if shard.box.elements]


def _on_host(tensor: tf.Tensor) -> tf.Tensor:
    if "CPU" in tensor.device:
        return tensor
    with tf.device("CPU:0"):
        return tf.identity(tensor)


def assign(variables: Iterable[StateVariable], read: Read) -> None:
    """Assign variables, one storage at a time. Only the local shard of each device is read.

    Args:
        variables: The variables, in the same order on every client.
        read: Returns a box of a variable as an array.
    """
    for storage, members in _by_storage(variables):
        if storage is None:
            (variable,) = members.values()
            assert variable.value is not None
            variable.value.assign(read(variable, boxes.full_box(variable.shape)))
            continue
        known: dict[tuple[int, ...], np.ndarray] = {}
        shards = []
        for location, tensor in storage.local_tensors():
            # Devices with equal shards share one array.
            key = tuple(location[axis] for axis in storage.mesh.dim_names if axis in storage.format.storage)
            if key not in known:
                known[key] = _local(storage, members, location, tensor, read)
            shards.append(known[key])
        storage.set_local(shards)


def _local(
    storage: Storage, members: dict[int, StateVariable], location: Mapping[str, int], tensor: tf.Tensor, read: Read
) -> np.ndarray:
    shards = _shards(storage, members, location)
    values = storage.format.decode_local(tensor)
    if [shard.box.shape for shard in shards] == [tuple(values.shape)]:
        return storage.format.encode_local(read(members[shards[0].member], shards[0].box))
    # Padding, and members that are not among the variables, keep their values.
    local = np.array(values)
    flat = local.reshape(-1)
    for shard in shards:
        flat[shard.begin : shard.end] = read(members[shard.member], shard.box).reshape(-1)
    return storage.format.encode_local(local)


def _shards(storage: Storage, members: dict[int, StateVariable], location: Mapping[str, int]) -> list[Shard]:
    """Return the boxes of these members that the device at `location` holds."""
    return [shard for shard in storage.format.shards_at(location) if shard.member in members]


def _by_storage(variables: Iterable[StateVariable]) -> Iterator[tuple[Storage | None, dict[int, StateVariable]]]:
    """Yield each storage with its variables by member number; a variable without a storage comes alone."""
    storages: dict[int, tuple[Storage, dict[int, StateVariable]]] = {}
    alone = []
    for variable in variables:
        if isinstance(variable.value, ShardedVariable):
            storage = variable.value.storage
            storages.setdefault(id(storage), (storage, {}))[1][variable.value.member] = variable
        else:
            alone.append(variable)
    yield from storages.values()
    for variable in alone:
        yield None, {0: variable}
