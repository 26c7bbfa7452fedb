"""Microbatches as a step sees them: the shapes of its batch, and which rows of the full batch it has."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
    """The microbatch that a step takes.

    Attributes:
        number: A scalar, from 0.
        count: The number of microbatches.
        rows: The rows of each microbatch, over all devices.
        is_of_each_device: True if each microbatch takes some of each device's local rows. Otherwise the rows of a
            microbatch follow each other in the batch.
    """

    number: tf.Tensor
    count: int
    rows: int
    is_of_each_device: bool = True

    def blocks(self, devices: int) -> np.ndarray:
        """Return `(devices, count)`: the number of the block that a device takes in a microbatch. The batch has
        `devices * count` equal blocks."""
        shape = (devices, self.count) if self.is_of_each_device else (self.count, devices)
        blocks: np.ndarray = np.arange(devices * self.count).reshape(shape)
        return blocks if self.is_of_each_device else blocks.T


@dataclasses.dataclass(kw_only=True)
class BatchShapes:
    """The batch of a step.

    Attributes:
        rows: The numbers of rows of its tensors.
        other_dims: The sizes of the other dims of its tensors.
        seconds: The sizes of dim 1 of its tensors.
        microbatch: The microbatch; None if the step takes the full batch.
    """

    rows: frozenset[int] = frozenset()
    other_dims: frozenset[int] = frozenset()
    seconds: frozenset[int] = frozenset()
    microbatch: Microbatch | None = None

    def note(self, batch: Any) -> None:
        """Record the shapes of the tensors of a batch."""
        shapes = [leaf.shape.as_list() for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf) and leaf.shape.rank]
        self.rows = frozenset(shape[0] for shape in shapes if shape[0] is not None)
        self.other_dims = frozenset(size for shape in shapes for size in shape[1:] if size is not None)
        self.seconds = frozenset(shape[1] for shape in shapes if len(shape) > 1 and shape[1] is not None)
