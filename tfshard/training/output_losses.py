"""The weight of a batch in the loss metrics of a model with several outputs.

Keras weights a batch by its size if the traced step knows the size. Otherwise Keras counts the batch once: in `fit` on
arrays with a remainder, for a dataset without `drop_remainder=True`, and in `train_on_batch` from the second size on.
A step on the mesh knows all sizes. This module therefore tells the step which sizes Keras would know.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.operations import layer_patch


class KnownSizes:
    """The batch sizes that a step function of Keras knows, as `tf.function(reduce_retracing=True)` traces it."""

    def __init__(self) -> None:
        self._traced: set[int] = set()
        self._has_open = False

    def is_known(self, size: int | None) -> bool:
        """Return whether Keras's function for batches of this size knows the size.

        Args:
            size: The size, or None if the dataset does not tell it.
        """
        if size is None or (size not in self._traced and (self._traced or self._has_open)):
            self._has_open = True
            return False
        self._traced.add(size)
        return True


def size_of(batches: Any, batch: Any) -> int | None:
    """Return the size that Keras knows before it reads a batch, or None.

    Args:
        batches: The argument of Keras's step function: an iterator over a dataset, or batches.
        batch: The next batch.
    """
    specs = getattr(batches, "element_spec", batch)
    shapes = [tf.TensorShape(leaf.shape) for leaf in tf.nest.flatten(specs) if hasattr(leaf, "shape")]
    size: int | None = shapes[0][0] if shapes and shapes[0].rank else None
    return size


class _Counting(threading.local):
    """The rows of a batch that counts once. None if batches count by their rows."""

    rows: int | None = None


_counting = _Counting()


@contextlib.contextmanager
def counted_once(rows: int | None) -> Iterator[None]:
    """Count a batch of `rows` rows once in this context. With None, batches count by their rows."""
    _counting.rows, before = rows, _counting.rows
    try:
        yield
    finally:
        _counting.rows = before


def install(model: keras.Model) -> bool:
    """Make the metrics of a model's losses count batches as Keras does.

    Returns False if the model has no such metrics.
    """
    metrics = _private.output_losses(model)
    for metric in metrics:
        layer_patch.apply(layer_patch.OUTPUT_LOSS, metric, _counted)
    return bool(metrics)


def _counted(update: layer_patch.Method) -> layer_patch.Method:
    @functools.wraps(update)
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        if _counting.rows is not None and sample_weight is not None:
            sample_weight = sample_weight / _counting.rows  # A microbatch counts by its share of the batch.
        return update(values, sample_weight=sample_weight)

    return update_state
