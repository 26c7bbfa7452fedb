"""Put variables on the mesh that belong to no layer: those of metrics and optimizers, and Keras's global seed."""

import collections
import functools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.devices import transfer
from tfshard.graph import inventory
from tfshard.layouts import placement
from tfshard.layouts.layout_map import VariableSpec
from tfshard.operations import averages
from tfshard.storage.initial_values import HostValue
from tfshard.storage.variables import ShardedVariable
from tfshard.training import reshard
from tfshard.training.strategy_base import StrategyBase


def attach_variables(variables: Iterable[keras.Variable], strategy: StrategyBase) -> None:
    """Reshard variables that belong neither to a layer nor to a parameter."""
    for variable in variables:
        if _is_elsewhere(variable, strategy):
            layout = strategy.plan_variable(inventory.variable_spec(variable, None))
            reshard.replace(variable, layout=layout, mesh=strategy.mesh)


def attach_global_seed(strategy: StrategyBase) -> None:
    """Put Keras's global seed generator on the mesh, if it was created elsewhere.

    Random operations without a seed use it. On the host, every device would draw from it in an undefined order.
    """
    generator = _private.global_seed_generator()
    if generator is None or not _is_elsewhere(generator.state, strategy):
        return
    current = _private.backend_variable(generator.state)
    layout = strategy.plan_variable(inventory.variable_spec(generator.state, None))
    # The variable on the host keeps its value: functions that run under no strategy may draw from it.
    seed = reshard.sharded(transfer.to_host(current), current, layout=layout, mesh=strategy.mesh)
    _private.set_backend_variable(generator.state, seed)


def _is_elsewhere(variable: keras.Variable, strategy: StrategyBase) -> bool:
    """Return True if a variable has a value and the value is not on the mesh of the strategy."""
    current = _private.backend_variable(variable)
    return current is not None and not (isinstance(current, ShardedVariable) and current.mesh == strategy.mesh)


def attach_optimizer(optimizer: keras.optimizers.Optimizer, strategy: StrategyBase) -> None:
    """Put an optimizer that was created outside of the scope on the mesh. It may be trained already.

    Slots of variables that are on the mesh take the layouts of these variables.
    """
    for part in _private.optimizer_chain(optimizer):
        averages.install(part)
        _private.set_distribute_strategy(part, strategy)
        references: dict[str, list[tf.Variable]] = {}
        for variable in _private.optimizer_references(part):
            references.setdefault(variable.path.replace("/", "_"), []).append(_private.backend_variable(variable))
        seen: collections.Counter[str] = collections.Counter()
        for variable in _private.variables_of_optimizer(part):
            current = _private.backend_variable(variable)
            owner = _private.slot_owner(variable.name, references)
            # Variables with equal paths have slots with equal names, in the same order.
            reference = None if owner is None else references[owner][seen[variable.name] % len(references[owner])]
            seen[variable.name] += 1
            if not isinstance(reference, ShardedVariable):
                reference = None
            mesh = strategy.mesh if reference is None else reference.mesh
            if current is None or (
                # A slot may have been created on the mesh before its variable came there.
                isinstance(current, ShardedVariable)
                and current.mesh == mesh
                and (reference is None or _is_slot_of(current, reference))
            ):
                continue
            spec = inventory.variable_spec(variable, None)
            options = reshard.options_of(current)
            make = functools.partial(
                create_slot, spec=spec, reference=reference, optimizer=part, strategy=strategy, **options
            )
            reshard.exchange(variable, make)


def _is_slot_of(slot: ShardedVariable, reference: ShardedVariable) -> bool:
    """Return True if a slot is stored where `create_slot` would store it."""
    follows = placement.follows(slot.layout.spec, reference.layout)
    return not follows or any(known is slot for known in reference.slots.values())


def create_slot(
    value: HostValue,
    spec: VariableSpec,
    reference: ShardedVariable | None,
    optimizer: keras.optimizers.Optimizer,
    strategy: StrategyBase,
    **options: Any,
) -> ShardedVariable:
    """Create a variable of an optimizer. A slot with the shape of its parameter takes the parameter's layout.

    Args:
        value: The initial value.
        spec: The variable.
        reference: The parameter, if the variable is a slot.
        optimizer: The optimizer.
        strategy: The strategy.
        **options: As for `ShardedVariable`.
    """
    owner = None if reference is None else reference.layout
    layout = placement.slot_layout(spec, owner, strategy.config, mesh_shape=strategy.mesh_shape)
    # The parameters of a pipelined model are on several meshes.
    mesh = strategy.mesh if reference is None else reference.mesh
    if reference is None or not placement.follows(spec, reference.layout):
        return ShardedVariable(value, layout=layout, mesh=mesh, trainable=False, **options)
    number = sum(owner == id(optimizer) for owner, _ in reference.slots)
    key = (id(optimizer), number)
    place = reshard.slot_storage(reference, key, layout)
    slot = ShardedVariable(value, layout=layout, mesh=mesh, trainable=False, storage=place, **options)
    reference.slots[key] = slot
    return slot
