"""Batches from the host to the mesh."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, placement
from tfshard.errors import StrategyError
from tfshard.layouts import Axes
from tfshard.mesh import BATCH_AXIS, axis_sizes


def batch_axes(shape: tuple[int, ...], mesh: dtensor.Mesh) -> Axes:
    """The layout of a batch: its first dim over the batch axis when that divides, else whole on every device.

    A whole batch is computed by every device, which gives the numbers of one device without padding or masks:
    no sample is dropped and none counted twice, batch statistics and custom losses included.
    """
    if not shape or shape[0] == 0 or shape[0] % axis_sizes(mesh).get(BATCH_AXIS, 1):
        return (None,) * len(shape)
    batch = BATCH_AXIS if BATCH_AXIS in mesh.dim_names else None
    return (batch, *(None,) * (len(shape) - 1))


def to_mesh(value: Any, mesh: dtensor.Mesh) -> Any:
    """One leaf of a batch as a DTensor; None and what is one already stay as they are."""
    if value is None or placement.is_dtensor(value) or isinstance(value, tf.experimental.Optional):
        return value
    if isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
        raise StrategyError(
            "Sparse and ragged batches cannot be put on a mesh. Make them dense in the input pipeline, for example "
            f"with tf.sparse.to_dense or RaggedTensor.to_tensor. Received: a {type(value).__name__} of "
            f"shape={value.shape}"
        )
    host = _host_array(value)
    return placement.host_to_mesh(host, batch_axes(host.shape, mesh), mesh)


def _host_array(value: Any) -> np.ndarray:
    if tf.is_tensor(value):
        return value.numpy()
    array = np.asarray(value)
    # What tf.convert_to_tensor makes of Python numbers: float32 and int32.
    if not isinstance(value, (np.ndarray, np.generic)) and array.dtype in (np.float64, np.int64):
        array = array.astype({"f": np.float32, "i": np.int32}[array.dtype.kind])
    return array


def batch_to_mesh(batch: Any, mesh: dtensor.Mesh) -> Any:
    """A (nested) batch as DTensors."""
    return tf.nest.map_structure(lambda leaf: to_mesh(leaf, mesh), batch)


def is_whole(batch: Any, mesh: dtensor.Mesh) -> bool:
    """Whether a batch is one that the batch axis does not divide."""
    size = axis_sizes(mesh).get(BATCH_AXIS, 1)
    leading = [leaf.shape[0] for leaf in tf.nest.flatten(batch) if tf.is_tensor(leaf) and leaf.shape.rank]
    return any(dim is None or dim % size for dim in leading)


class ShardedDataset:
    """An iterable over the batches of a dataset, each put on the mesh.

    Iterate it in eager Python code; each batch is the whole (global) batch.
    """

    def __init__(self, dataset: Iterable, mesh: dtensor.Mesh):
        self._dataset = dataset
        self._mesh = mesh

    def __iter__(self) -> Iterator:
        if not _private.is_eager():
            raise StrategyError(
                "A sharded dataset is iterated in Python, not inside a tf.function. Move the loop over batches out "
                "of the tf.function, and pass each batch to it."
            )
        return (batch_to_mesh(batch, self._mesh) for batch in self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    @property
    def element_spec(self):
        return self._dataset.element_spec  # type: ignore[attr-defined]
