"""Build models of classes that override `train_step` or `test_step`, and that may not call the model on its data.

Under a strategy, Keras builds a model before the first step: it calls the model, the losses and the metrics on the
data. On one device, a custom step builds each of them at its first use. This module does the same: it traces the step
once to create the variables, moves them to the mesh, and only then traces the step that runs.
"""

from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.graph import inventory
from tfshard.training import attached_model, failures
from tfshard.training.strategy import ShardedStrategy

# The specs of a batch of each model's data.
_batches: _private.WeakIdentityDict[keras.Model, Any] = _private.WeakIdentityDict()
# The layers of each model when a step was traced to build them.
_traced: _private.WeakIdentityDict[keras.Model, dict[str, object]] = _private.WeakIdentityDict()


def has_custom_steps(model: keras.Model) -> bool:
    """Return whether the class of a model overrides a step, or has no `call`."""
    cls, keras_model = type(model), keras.Model
    has_step = cls.train_step is not keras_model.train_step or cls.test_step is not keras_model.test_step
    return has_step or inventory.has_no_call(model)


def note_batch(model: keras.Model, batch: Any, size: int | None = None) -> None:
    """Record the specs of a batch.

    Args:
        model: The model.
        batch: Arrays, or the specs of a dataset's elements.
        size: The number of samples, if the specs do not contain it.
    """

    def spec(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.OptionalSpec):  # For generators that yield None.
            return None
        if not hasattr(leaf, "shape") or isinstance(leaf, tf.SparseTensorSpec | tf.RaggedTensorSpec):
            return leaf
        shape = tf.TensorShape(leaf.shape)
        if shape.rank and shape[0] is None:
            shape = tf.TensorShape([size, *shape[1:]])
        return tf.TensorSpec(shape, leaf.dtype)

    _batches[model] = tf.nest.map_structure(spec, batch)


def build(model: keras.Model, strategy: ShardedStrategy, step: str) -> None:
    """Create the variables that a step creates, and move them to the mesh. Does nothing for a built model.

    If the specs of a batch are unknown, or the model runs eagerly, the first step creates the variables.

    Args:
        model: The model.
        strategy: Its strategy.
        step: `"train_step"` or `"test_step"`.
    """
    layers = [layer for layer in _private.flatten_layers(model) if layer is not model]
    if model.run_eagerly or all(layer.built for layer in layers):
        return
    batch, traced = _batches.get(model), _traced.setdefault(model, {})
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    is_known = all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves)
    structure = _private.structure(model)
    if not leaves or not is_known or traced.get(step) == structure:
        return
    with (
        failures.translated_errors(f"A step of model '{model.name}'"),
        _private.func_graph("tfshard_build").as_default(),
        strategy.extended.step(),
    ):
        data = tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.compat.v1.placeholder(leaf.dtype, leaf.shape), batch
        )
        getattr(model, step)(data)
    traced[step] = _private.structure(model)
    attached_model.attached(model, strategy).refresh()
