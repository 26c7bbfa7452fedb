"""Move variables: plain variables to the mesh, sharded variables to another layout. Variables move one at a time."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.operations import assignments, layer_patch
from tfshard.storage import left_buffers, storage
from tfshard.storage.formats import StorageFormat
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable

Placed = tuple[keras.Variable, VariableLayout]
"""A variable, and where it goes."""


class GroupStorages:
    """The storages of the groups of a placement.

    A group keeps an existing storage if some members are stored there and the missing members still fit. Otherwise the
    group gets a new storage, and all its members move.

    Args:
        placed: The variables of a model that have values, with their layouts.
        mesh: The mesh.
    """

    def __init__(self, placed: Iterable[Placed], mesh: dtensor.Mesh):
        self._mesh = mesh
        self._storages: dict[int, Storage] = {}
        self._renewed: set[int] = set()
        groups: dict[int, list[tuple[tf.Variable, VariableLayout]]] = {}
        for variable, layout in placed:
            if layout.group is not None:
                groups.setdefault(layout.group, []).append((_private.backend_variable(variable), layout))
        for number, members in groups.items():
            there = {current.storage for current, layout in members if _rests(current, layout, mesh)}
            missing = [layout for current, layout in members if not _rests(current, layout, mesh)]
            if len(there) == 1 and not {layout.member for layout in missing} & set(next(iter(there)).members):
                self._storages[number] = next(iter(there))
            elif missing:
                self._renewed.add(number)

    def of(self, layout: VariableLayout) -> Storage | None:
        """Return the storage of the group of `layout`, or None if the layout has no group."""
        if layout.group is None:
            return None
        if layout.group not in self._storages:
            name = f"group_{layout.group}"
            self._storages[layout.group] = Storage(StorageFormat.of(layout, self._mesh), name=name)
        return self._storages[layout.group]

    def lacks(self, current: ShardedVariable, layout: VariableLayout) -> bool:
        """Return whether a variable must move to be stored in `layout`."""
        return not _rests(current, layout, self._mesh) or layout.group in self._renewed


def _rests(current: tf.Variable, layout: VariableLayout, mesh: dtensor.Mesh) -> bool:
    return isinstance(current, ShardedVariable) and current.layout == layout and current.mesh == mesh


def to_mesh(placed: Sequence[Placed], mesh: dtensor.Mesh, *, anew: bool = False) -> bool:
    """Move the variables that are not on the mesh, one after the other.

    Each plain variable frees its memory before its sharded copy is allocated. If one variable fails, the variables
    before it are restored with their values.

    Args:
        placed: Variables and their layouts.
        mesh: The mesh.
        anew: Also replace sharded variables of another mesh or layout. Their old storages are left unchanged.

    Returns:
        True if at least one variable moved.
    """
    storages = GroupStorages(placed, mesh)
    replaced: list[tuple[keras.Variable, tf.Variable]] = []
    try:
        for variable, layout in placed:
            current = _private.backend_variable(variable)
            if not isinstance(current, ShardedVariable) or (anew and storages.lacks(current, layout)):
                replace(variable, layout=layout, mesh=mesh, place=storages.of(layout))
                replaced.append((variable, current))
    except BaseException:
        for variable, before in reversed(replaced):
            value = transfer.to_host(_private.backend_variable(variable))
            _private.set_backend_variable(variable, before)
            if not isinstance(before, ShardedVariable):
                layer_patch.undo_of(layer_patch.ASSIGNED_ARRAY, variable)
                _refill(before, value)
        raise
    return bool(replaced)


def replace(
    variable: keras.Variable, *, layout: VariableLayout, mesh: dtensor.Mesh, place: Storage | None = None
) -> None:
    """Replace a variable by a sharded variable of the same value.

    Args:
        variable: A Keras variable.
        layout: The layout of the sharded variable.
        mesh: The mesh.
        place: The storage of its group, if the layout has a group.
    """
    current = _private.backend_variable(variable)

    def make(value: np.ndarray) -> ShardedVariable:
        made = sharded(value, current, layout=layout, mesh=mesh, place=place)
        # `reduction_state.update` converts it.
        made.kept = current.kept if isinstance(current, ShardedVariable) else {}
        assignments.install(variable, made)
        return made

    exchange(variable, make)


def sharded(
    value: np.ndarray, like: tf.Variable, *, layout: VariableLayout, mesh: dtensor.Mesh, place: Storage | None = None
) -> ShardedVariable:
    """Return a sharded variable of `value` with the name, id and options of the variable `like`."""
    return ShardedVariable(value, layout=layout, mesh=mesh, trainable=like.trainable, storage=place, **options_of(like))


def exchange(variable: keras.Variable, make: Callable[[np.ndarray], ShardedVariable]) -> None:
    """Replace a variable by the result of `make` on its value.

    First invalidates the plain variable, which frees its memory for the local shards. A function that still reads the
    plain variable then fails.
    """
    current = _private.backend_variable(variable)
    value = transfer.to_host(current)
    plain = _private.is_resource_variable(current)
    if plain:
        assert current is not None
        storage.invalidate(current.handle, current.dtype, current.shape, f"variable '{variable.path}'")
    try:
        _private.set_backend_variable(variable, make(value))
    except BaseException:
        if plain:
            _refill(current, value)
        raise


def _refill(plain: tf.Variable, value: np.ndarray) -> None:
    """Restore the value of an invalidated plain variable."""
    if _private.is_resource_variable(plain):
        with tf.device(plain.handle.device):
            tensor = tf.constant(value, plain.dtype)
            tf.raw_ops.AssignVariableOp(resource=plain.handle, value=tensor, validate_shape=False)
        left_buffers.forget(plain.handle)


def materialize(placed: Sequence[Placed], mesh: dtensor.Mesh, *, waiting: bool = False) -> set[Storage]:
    """Move variables that are on the mesh to their layouts, together with their slots.

    Afterwards every complete group is on the devices (unless `waiting`).

    Args:
        placed: The variables of a model and their layouts.
        mesh: The mesh.
        waiting: Move only variables that still wait on the host, and leave them waiting: the caller sets their values
            next.

    Returns:
        The storages that the variables left.
    """
    storages = GroupStorages(placed, mesh)
    left: set[Storage] = set()
    variables = []
    for variable, layout in placed:
        current = _private.backend_variable(variable)
        if not isinstance(current, ShardedVariable):
            continue
        if waiting and not current.storage.waits:
            continue
        current.stay()
        variables.append(current)
        if storages.lacks(current, layout):
            slots = dict(current.slots)
            left |= {current.storage, *(slot.storage for slot in slots.values())}
            current.move(layout, storages.of(layout))
            for key, slot in slots.items():
                slot_layout = layout.slot(slot.layout.spec)
                slot.move(slot_layout, slot_storage(current, key, slot_layout))
    if not waiting:
        for current in variables:
            for each in (current, *current.slots.values()):
                each.storage.make_if_filled()
    return left


def slot_storage(reference: ShardedVariable, key: tuple[int, int], layout: VariableLayout) -> Storage | None:
    """Return the storage of a slot in its parameter's flat form: the group's storage of slots of this kind."""
    if layout.flat is None:
        return None
    name = f"{reference.storage.name}_slot_{key[1]}"
    return reference.storage.slot_storage(key, StorageFormat.of(layout, reference.mesh), name)


def options_of(current: tf.Variable) -> dict[str, Any]:
    """Return the name, id and options that a ShardedVariable inherits from the variable it replaces."""
    return {
        "name": current.name.partition(":")[0],
        "unique_id": current._unique_id,
        "options": {"aggregation": current.aggregation, "synchronization": current.synchronization},
    }
