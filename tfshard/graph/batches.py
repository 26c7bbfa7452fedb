"""Checks of a batch that a user gives for one training step, before the step is traced."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfshard.errors import StrategyError


def check(function: str, model: keras.Model, batch: Any, *, lists_are_inputs: bool = False) -> None:
    """Raise `StrategyError` for a batch on which Keras's training step cannot run.

    Args:
        function: The public function that was given the batch, for the message.
        model: A compiled model.
        batch: The batch.
        lists_are_inputs: True if a list holds the inputs of one batch. Keras treats a list like a tuple.
    """
    if hasattr(batch, "element_spec") or isinstance(batch, (keras.utils.PyDataset, Iterator)):
        raise StrategyError(
            f"{function} takes one batch. Take one from the dataset, such as next(iter(dataset)). Received: batch of "
            f"type {type(batch).__name__}"
        )
    if not _needs_targets(model):
        return
    is_tuple = isinstance(batch, tuple) or (isinstance(batch, list) and not lists_are_inputs)
    parts = [*batch] if is_tuple else [batch]
    if len(parts) < 2 or parts[1] is None:
        raise StrategyError(
            f"Model '{model.name}' is compiled with a loss, so its step needs targets. Give {function} a tuple (x, y), "
            f"or (x, y, sample_weight). Received: {_described(batch)}"
        )


def _needs_targets(model: keras.Model) -> bool:
    """Return True if Keras computes a compiled loss from the targets, without a custom step or loss of the model."""
    cls = type(model)
    is_custom = cls.train_step is not keras.Model.train_step or cls.compute_loss is not keras.Model.compute_loss
    return not is_custom and any(loss is not None for loss in tf.nest.flatten(getattr(model, "loss", None)))


def _described(batch: Any) -> str:
    """Return a description of a batch without targets, for a message."""
    if hasattr(batch, "shape"):
        return f"an array of shape {tuple(batch.shape)}, which is taken as x alone"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}" + (" whose y is None" if len(batch) > 1 else "")
    return f"batch of type {type(batch).__name__}"
