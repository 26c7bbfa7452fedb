"""Checks that copies on different devices are bitwise equal."""

import hashlib

import keras

from tfshard import _private
from tfshard.devices import clients
from tfshard.errors import ConsistencyError
from tfshard.graph import inventory
from tfshard.layouts import boxes
from tfshard.storage.variables import ShardedVariable


def check_consistency(model: keras.Model) -> None:
    """Raise `ConsistencyError` unless devices with copies of a shard hold the same bits.

    In a launched run, the check covers devices of all clients; all clients must call it.
    """
    with clients.here().purpose(f"check_consistency of model '{model.name}'"):
        _check_consistency(model)


def _check_consistency(model: keras.Model) -> None:
    rows = [variable for variable, _ in inventory.owned_variables(model)] + inventory.optimizer_variables(model)
    checked = set()
    digests: dict[str, str] = {}
    for variable in rows:
        current = _private.backend_variable(variable)
        if not isinstance(current, ShardedVariable) or id(current.storage) in checked:
            continue
        checked.add(id(current.storage))
        first: dict[tuple[int, ...], tuple[str, bytes]] = {}
        for location, shard in current.storage.local_tensors():
            part = boxes.part(current.layout.storage, boxes.in_replica(location, current.storage.format.mesh_axes))
            device = shard.device.rpartition("device:")[2]
            expected = first.setdefault(part, (device, shard.numpy().tobytes()))
            if shard.numpy().tobytes() != expected[1]:
                group = f" and the other members of group {current.layout.group}" if current.layout.grouped else ""
                raise ConsistencyError(
                    f"Variable '{variable.path}'{group} should be the same on devices {expected[0]} and {device}, "
                    "but it differs. Load a checkpoint, or set the weights again (model.set_weights). Received: "
                    f"storage layout {current.layout.storage}"
                )
        for part, (_, data) in first.items():
            digest = hashlib.blake2b(data, digest_size=8).hexdigest()
            digests[f"{variable.path}, storage {len(checked)}, part {part}"] = digest
    clients.here().agree("copies of variables", digests, error=ConsistencyError, hint="Load a checkpoint.")
