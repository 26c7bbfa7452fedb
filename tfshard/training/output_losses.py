"""Metrics of the losses of several outputs: how much a batch counts in them.

Keras weighs a batch by its size where its traced step knows the size, and else counts it once: `fit` on arrays with a
remainder, a dataset without `drop_remainder=True`, `train_on_batch` from the second size on. Steps on the mesh know all
sizes. So the step is told what Keras would know.
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
        """Whether Keras's function for batches of this size knows it.

        Args:
            size: The size, or None where the dataset does not tell.
        """
        if size is None or (size not in self._traced and (self._traced or self._has_open)):
            self._has_open = True
            return False
        self._traced.add(size)
        return True


def size_of(batches: Any, batch: Any) -> int | None:
    """Return the size that Keras knows of a batch before it is there, or None.

    Args:
        batches: What Keras gave to its step function: an iterator over a dataset, or batches.
        batch: The next of them.
    """
    specs = getattr(batches, "element_spec", batch)
    shapes = [tf.TensorShape(leaf.shape) for leaf in tf.nest.flatten(specs) if hasattr(leaf, "shape")]
    size: int | None = shapes[0][0] if shapes and shapes[0].rank else None
    return size


class _Counting(threading.local):
    """Of how many rows is the batch that counts once; None: batches count by their rows."""

    rows: int | None = None


_counting = _Counting()


@contextlib.contextmanager
def counted_once(rows: int | None) -> Iterator[None]:
    """A context in which a batch of this many rows counts once; None: by its rows."""
    _counting.rows, before = rows, _counting.rows
    try:
        yield
    finally:
        _counting.rows = before


def install(model: keras.Model) -> bool:
    """Let the metrics of a model's losses count batches as Keras does. Returns whether it has some."""
    metrics = _private.output_losses(model)
    for metric in metrics:
        layer_patch.apply(layer_patch.OUTPUT_LOSS, metric, _counted)
    return bool(metrics)


def _counted(update: layer_patch.Method) -> layer_patch.Method:
    @functools.wraps(update)
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        if _counting.rows is not None and sample_weight is not None:
            sample_weight = sample_weight / _counting.rows  # Of a microbatch, its share of the batch.
        return update(values, sample_weight=sample_weight)

    return update_state
