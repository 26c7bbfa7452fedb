"""Keras losses and the divisors that reduce them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import masking as _masking
from keras.src.losses import loss as _loss

from tfshard._private.threads import in_this_thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduced:
    """A loss reduced over a batch.

    Attributes:
        loss: The loss as Keras reduced it.
        reduction: `"sum_over_batch_size"`, `"mean"`, `"mean_with_sample_weight"`, `"sum"`, `"none"` or None.
        divisor: The scalar that divided the sum, if it depends on values: the number of unmasked positions, or the sum
            of the weights. None if the divisor follows from shapes.
    """

    loss: tf.Tensor
    reduction: str | None
    divisor: tf.Tensor | None


@contextlib.contextmanager
def reduced_losses(change: Callable[[Reduced], tf.Tensor]) -> Iterator[None]:
    """Replace each reduced loss by `change(...)` inside the context (`losses.loss.reduce_weighted_values`)."""
    original = _loss.reduce_weighted_values

    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> tf.Tensor:
        loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        divisor = None
        if reduction in ("sum_over_batch_size", "mean") and mask is not None:
            divisor = keras.ops.sum(keras.ops.cast(mask, loss.dtype))
        elif reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
            weight = None if sample_weight is None else keras.ops.convert_to_tensor(sample_weight, dtype=loss.dtype)
            divisor = keras.ops.sum(_loss.apply_mask(weight, mask, dtype=loss.dtype, reduction=reduction))
        return change(Reduced(loss=loss, reduction=reduction, divisor=divisor))

    _loss.reduce_weighted_values = in_this_thread(reduce_weighted_values, original)
    try:
        yield
    finally:
        _loss.reduce_weighted_values = original


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> tf.Tensor:
    """Compute a model's loss as `train_step` does (`Trainer._compute_loss`)."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def own_losses(layer: keras.Layer) -> list[tf.Tensor]:
    """Return the list of the losses that a layer added in its calls (`Layer._losses`)."""
    losses: list[tf.Tensor] = layer._losses
    return losses


@contextlib.contextmanager
def additional_losses(model: keras.Model, losses: list[tf.Tensor]) -> Iterator[None]:
    """Replace a model's additional losses by `losses` inside the context (`Layer._losses_override`).

    The compiled loss remains. If `losses` is empty, the model keeps its additional losses.
    """
    before = model._losses_override
    vars(model)["_losses_override"] = losses
    try:
        yield
    finally:
        vars(model)["_losses_override"] = before


def track_loss(model: keras.Model, loss: tf.Tensor, samples: tf.Tensor) -> None:
    """Update a model's loss metric as `train_step` does (`Trainer._loss_tracker`)."""
    model._loss_tracker.update_state(_loss.unscale_loss_for_distribution(loss), sample_weight=samples)


def keras_logits(output: Any) -> Any:
    """Return the logits of the output of a softmax activation (`_keras_logits`); other tensors as they are."""
    return getattr(output, "_keras_logits", output)


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return the mask that Keras attached to a tensor (`masking.get_keras_mask`)."""
    return _masking.get_keras_mask(tensor)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Attach a mask to a tensor for the layers that use it (`masking.set_keras_mask`)."""
    _masking.set_keras_mask(tensor, mask)
