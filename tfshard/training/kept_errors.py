"""What the compression of gradients keeps between steps: made when a model is adopted, next to its variables."""

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
    """Gives each variable of a model whose gradients are compressed what that keeps, if it does not have it yet: zeros,
    and the first factor of PowerSGD."""
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
    """All that is kept for a model: variable, name, and what is kept."""
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
