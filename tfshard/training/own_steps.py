"""Models whose class has a `train_step` or `test_step` of its own, which need not call the model on its data.

Keras builds a model under a strategy before the first step by calling it, and its losses and metrics, on what the
dataset gives. On one device it builds all of them where the step uses them, and so does this: the step is traced once
for what it makes, which comes to its place on the mesh before the step is traced to run.
"""

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.graph import inventory
from tfshard.training import attached_model, failures
from tfshard.training.strategy import ShardedStrategy

# Of each model: what a batch of its data looks like.
_batches: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()
# Its layers, as they were when a step was traced for them.
_traced: weakref.WeakKeyDictionary[keras.Model, dict[str, object]] = weakref.WeakKeyDictionary()


def has_own_steps(model: keras.Model) -> bool:
    """Whether a model's class says itself what a step does with its data."""
    cls, keras_model = type(model), keras.Model
    own = cls.train_step is not keras_model.train_step or cls.test_step is not keras_model.test_step
    return own or inventory.has_no_call(model)


def note_batch(model: keras.Model, batch: Any, size: int | None = None) -> None:
    """Remembers what a batch looks like.

    Args:
        model: The model.
        batch: Arrays, or the specs of a dataset's elements.
        size: The number of samples, where specs do not say it.
    """

    def spec(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.OptionalSpec):  # Keras has the latter where a generator yields None.
            return None
        if not hasattr(leaf, "shape") or isinstance(leaf, tf.SparseTensorSpec | tf.RaggedTensorSpec):
            return leaf
        shape = tf.TensorShape(leaf.shape)
        if shape.rank and shape[0] is None:
            shape = tf.TensorShape([size, *shape[1:]])
        return tf.TensorSpec(shape, leaf.dtype)

    _batches[model] = tf.nest.map_structure(spec, batch)


def build(model: keras.Model, strategy: ShardedStrategy, step: str) -> None:
    """Makes what a step makes of the model, and brings it to the mesh. Does nothing for a model that has been built.

    Where this does not know what a batch looks like, or steps are not traced, the first step makes it.

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
