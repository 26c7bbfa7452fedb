"""The loss of a model in a graph in which nothing is computed, for labels of which only shapes are known."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.errors import LayoutError
from tfshard.graph import adapters, inventory


class _Reads(keras.StatelessScope):  # type: ignore[misc]
    """A scope in which layers read variables from the graph, by `read`, where they use them.

    Args:
        read: Returns the value of a variable, by path.
        model: The model that owns the variables.
    """

    def __init__(self, read: Callable[[str], tf.Tensor], model: keras.Model):
        super().__init__()
        self._read = read
        self._paths = {id(variable): variable.path for variable, _ in inventory.owned_variables(model)}

    def get_current_value(self, variable: keras.Variable) -> Any:
        written = super().get_current_value(variable)
        return self._read(self._paths[id(variable)]) if written is None and id(variable) in self._paths else written


def loss_of_model(model: keras.Model, tensors: Any, read: Callable[[str], tf.Tensor]) -> tf.Tensor:
    """Call a model in the graph that is being built, and return its loss. The labels are placeholders.

    Args:
        model: The model. Without a compiled loss, the loss is the mean square of its outputs.
        tensors: The inputs of the model.
        read: Returns the value of a variable, by path.

    Raises:
        LayoutError: The model cannot be called on the tensors, or its loss does not fit its outputs.
    """
    with _Reads(read, model), adapters.apart(model):
        try:
            return _loss_of(model, model(tensors, training=True))
        # The model's code may raise anything.
        except Exception as error:
            raise LayoutError(
                f"A training step of model '{model.name}' cannot be traced: give example inputs (inputs=). The call "
                f"failed with: {error}"
            ) from error


def _loss_of(model: keras.Model, outputs: Any) -> tf.Tensor:
    """Return the compiled loss of a model; without one, a mean square.

    The labels have the shape of the output, or lack its last dim, as class numbers do: the first that the loss takes.
    """
    compiled = _private.compile_arguments(model).get("loss") if model.compiled else None
    named = keras.tree.flatten(outputs)
    losses = [compiled] * len(named)
    if isinstance(compiled, dict):
        names = list(outputs) if isinstance(outputs, dict) else list(model.output_names)
        losses = [compiled.get(name) for name in names]
    elif isinstance(compiled, (list, tuple)):
        losses = list(compiled)
    found = [
        _one_loss(loss, output)
        for loss, output in zip(losses, named, strict=True)
        if loss is not None or not any(losses)
    ]
    return tf.add_n([tf.cast(each, tf.float32) for each in (*found, *model.losses)])


def _one_loss(loss: Any, output: tf.Tensor) -> tf.Tensor:
    if loss is None:
        return tf.reduce_mean(tf.square(tf.cast(output, tf.float32)))
    function = keras.losses.get(loss)
    failure: Exception | None = None
    for shape, dtype in ((output.shape, tf.float32), (output.shape[:-1], tf.int32)):
        try:
            return tf.reduce_mean(function(tf.compat.v1.placeholder(dtype, shape), output))
        except Exception as error:  # A loss may raise anything on labels that it does not take.
            failure = failure or error
    raise LayoutError(f"Loss {loss!r} accepts no labels for outputs of shape={tuple(output.shape)}: {failure}")
