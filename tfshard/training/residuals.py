"""Error-feedback residuals and PowerSGD factors, which gradient compression keeps between steps."""

from collections.abc import Iterator

import keras
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.graph import inventory
from tfshard.layouts import compressed_form
from tfshard.layouts.axes import axis_sizes
from tfshard.storage.initial_values import HostValue, InitialValue
from tfshard.storage.variables import ShardedVariable


def make(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Create the compression state of each variable with compressed gradients, unless the variable already has it.

    Residuals start at zero, and PowerSGD starts with its first factor.
    """
    for current in _compressed(model):
        form = compressed_form.of(current.layout, axis_sizes(mesh))
        if form is None or current.kept:
            continue
        for name, layout in form.state(current.path).items():
            value: HostValue | None = InitialValue.of(keras.initializers.Zeros(), layout.spec.shape, "float32")
            if name == compressed_form.FACTOR:
                value = form.first_factor()
            assert value is not None
            current.kept[name] = ShardedVariable(value, layout=layout, mesh=mesh, trainable=False)


def of_model(model: keras.Model) -> Iterator[tuple[keras.Variable, str, ShardedVariable]]:
    """Yield each variable of a model that has compression state, with the name of each state and the state."""
    for variable, _ in inventory.owned_variables(model):
        current = _private.backend_variable(variable)
        if isinstance(current, ShardedVariable):
            for name, kept in current.kept.items():
                yield variable, name, kept


def _compressed(model: keras.Model) -> Iterator[ShardedVariable]:
    for variable, _ in inventory.owned_variables(model):
        current = _private.backend_variable(variable)
        if isinstance(current, ShardedVariable) and current.layout.compression is not None:
            yield current
