"""The state that reductions of gradients keep between steps (`GradientReduction.state`)."""

import keras
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.graph import inventory
from tfshard.layouts.axes import axis_sizes
from tfshard.storage.initial_values import HostValue, InitialValue
from tfshard.storage.variables import ShardedVariable


def make(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Create the state of each variable with a reduction in its layout, unless the variable already has its state."""
    axes = axis_sizes(mesh)
    for variable, _ in inventory.owned_variables(model):
        current = _private.backend_variable(variable)
        if not isinstance(current, ShardedVariable) or current.layout.reduction is None or current.kept:
            continue
        reduction = current.layout.reduction
        for name, layout in reduction.state(current.layout, axes).items():
            value: HostValue | None = reduction.first_value(name, current.layout, axes)
            if value is None:
                value = InitialValue.of(keras.initializers.Zeros(), layout.spec.shape, "float32")
            assert value is not None
            current.kept[name] = ShardedVariable(value, layout=layout, mesh=mesh, trainable=False)
