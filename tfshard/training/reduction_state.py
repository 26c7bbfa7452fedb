"""The state that reductions of gradients keep between steps (`GradientReduction.state`)."""

import keras
import numpy as np
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.errors import warn
from tfshard.graph import inventory
from tfshard.layouts import gradient_reduction
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.storage.initial_values import HostValue, InitialValue
from tfshard.storage.variables import ShardedVariable


def update(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Give each variable the state that the reduction in its layout keeps.

    State in other layouts, or on another mesh, is converted (`GradientReduction.restored`). The state of variables that
    no longer have a reduction is dropped, with a warning. A variable without state gets the first values.
    """
    axes = axis_sizes(mesh)
    dropped = []
    for variable, _ in inventory.owned_variables(model):
        current = _private.backend_variable(variable)
        if not isinstance(current, ShardedVariable):
            continue
        reduction = current.layout.reduction
        layouts = {} if reduction is None else reduction.state(current.layout, axes)
        if {name: each.layout for name, each in current.kept.items()} == layouts and all(
            each.mesh == mesh for each in current.kept.values()
        ):
            continue
        stored = {name: transfer.to_host(each) for name, each in current.kept.items()}
        values: dict[str, np.ndarray | None] = dict.fromkeys(layouts)
        if reduction is None:
            dropped.append(current.path)
        elif stored:
            values |= reduction.restored(current.layout, axes, stored)
        else:
            values |= {name: reduction.first_value(name, current.layout, axes) for name in layouts}
        # A new dict: a step function of the old layout may hold the old one.
        current.kept = {
            name: ShardedVariable(_value(values[name], layout), layout=layout, mesh=mesh, trainable=False)
            for name, layout in layouts.items()
        }
    if dropped:
        warn(f"Model '{model.name}' {gradient_reduction.text_of_dropped(dropped)}")


def _value(value: np.ndarray | None, layout: VariableLayout) -> HostValue:
    """Return the value. None stands for zeros, which are never full on the host."""
    if value is not None:
        return value
    zeros = InitialValue.of(keras.initializers.Zeros(), layout.spec.shape, "float32")
    assert zeros is not None
    return zeros
