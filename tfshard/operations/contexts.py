"""Chunks of sequences in a step: positions, and the exchange of heads for positions (Ulysses).

Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models". Between attention layers each device has a chunk of the positions and all heads. An all-to-all between the
devices of a context turns queries, keys and values into all positions of some heads, and another all-to-all turns the
result back. The backward pass has the same collectives the other way round.

layouts/sequence_chunks.py says which device has which chunk. While a model is checked (`recorded`), attention and
position embeddings return placeholders, and a `CallRecorder` notes what they take.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import batching, replicas, transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.sequence_chunks import SequenceChunks
from tfshard.storage import steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedAttention:
    """A call of attention.

    Attributes:
        query: The queries, `(B, T, N, H)`.
        key: The keys.
        value: The values.
        mask: The mask; None without one.
    """

    query: tf.Tensor
    key: tf.Tensor
    value: tf.Tensor
    mask: Any


class CallRecorder:
    """Notes where the tokens of a model enter and leave attention and position embeddings.

    Attributes:
        is_passive: True to note calls of attention only, and compute as without a recorder.
        sources: The names of the results.
        sinks: The names of the operands, by the layer that takes them.
        attentions: The calls of attention.
    """

    def __init__(self, *, is_passive: bool = False) -> None:
        self.is_passive = is_passive
        self.sources: set[str] = set()
        self.sinks: dict[str, str] = {}
        self.attentions: list[RecordedAttention] = []

    def took(self, tensors: list[tf.Tensor], layer: str) -> None:
        """Note operands of attention or of a position embedding."""
        for tensor in tensors:
            # The name of an identity, because an input of the model may be an operand of several layers.
            self.sinks[tf.identity(tensor).name] = layer

    def gave(self, shape: Any, dtype: Any) -> tf.Tensor:
        """Return a placeholder for a result."""
        made: tf.Tensor = tf.compat.v1.placeholder(dtype, shape)
        self.sources.add(made.name)
        return made


class _Recording(threading.local):
    recorder: CallRecorder | None = None


_state = _Recording()


def recorder() -> CallRecorder | None:
    """Return the recorder of the check that runs in this thread, or None."""
    return _state.recorder


@contextlib.contextmanager
def recorded(*, is_passive: bool = False) -> Iterator[CallRecorder]:
    """Record attention and position embeddings of a model that is called in this context, in a graph."""
    _state.recorder = CallRecorder(is_passive=is_passive)
    try:
        yield _state.recorder
    finally:
        _state.recorder = None


# --- positions ---------------------------------------------------------------------------------------


def sequence_positions(x: Any) -> Any:
    """Return the position in its sequence of each token of a tensor, from 0.

    Use it in layers that embed positions, in place of `keras.ops.arange(length)`. On a mesh with a context axis, a step
    sees each sequence as rows of chunks, and the positions are those in the full sequence.

    Args:
        x: A tensor of shape `(batch, sequence, ...)`.

    Returns:
        An int32 tensor of shape `(batch, sequence)`.

    Example:

    >>> import numpy as np, tfshard
    >>> tfshard.sequence_positions(np.zeros((2, 3, 8))).numpy().tolist()
    [[0, 1, 2], [0, 1, 2]]
    """
    x = keras.ops.convert_to_tensor(x)
    recording = _state.recorder
    if recording is not None and not recording.is_passive:
        return recording.gave(x.shape[:2], tf.int32)
    mesh = _mesh_of_step()
    if mesh is None:
        batch, length = keras.ops.shape(x)[:2]
        return keras.ops.broadcast_to(keras.ops.arange(length, dtype="int32"), (batch, length))
    rows, length = x.shape[:2]
    return positions(rows, length, mesh)


def positions(rows: int, length: int, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the position in its sequence of each element of `(rows, length)` of a step, int32, as batches are sharded.

    Args:
        rows: The rows of the tensor: chunks of sequences.
        length: The positions of a chunk.
        mesh: A mesh with a context axis.
    """
    made = tf.constant(SequenceChunks.of(axis_sizes(mesh)).positions(rows, length))
    return transfer.relayout(made, batching.batch_axes((rows, length), mesh), mesh)


def with_dense_gradient(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor whose gradient is dense, also where rows of it are looked up."""
    dense: tf.Tensor = tf.custom_gradient(lambda each: (tf.identity(each), tf.convert_to_tensor))(tensor)
    return dense


def _mesh_of_step() -> dtensor.Mesh | None:
    """Return the mesh of the open step if it has a context axis, or None."""
    if steps.current() is None:
        return None
    mesh = getattr(tf.distribute.get_strategy(), "mesh", None)
    return mesh if mesh is not None and axis_sizes(mesh).contexts > 1 else None


# --- local functions of a device ---------------------------------------------------------------------


class Exchange:
    """The exchange of heads for positions, on local tensors in a `local_map`.

    Args:
        mesh: A mesh with a context axis.
        is_sharded: True if the batch axis shards the rows. Otherwise every device has all chunks of all samples.
    """

    def __init__(self, mesh: dtensor.Mesh, *, is_sharded: bool):
        self._mesh, self._is_sharded = mesh, is_sharded
        self._contexts = axis_sizes(mesh).contexts

    def to_heads(self, tensor: tf.Tensor) -> tf.Tensor:
        """Exchange `(rows, T / c, N, H)` for `(rows, T, N / c, H)`: all positions of this device's heads.

        If every device has all chunks, join them to `(rows / c, T, N, H)` without communication.
        """
        if not self._is_sharded:
            return self._joined(tensor)
        return _with_gradient(self._to_heads, self._to_positions, tensor)

    def to_positions(self, tensor: tf.Tensor) -> tf.Tensor:
        """Exchange all positions of some heads for all heads of this device's positions: the way back."""
        if not self._is_sharded:
            return self._split(tensor)
        return _with_gradient(self._to_positions, self._to_heads, tensor)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Gather `(rows, T / c, K, H)` to `(rows, T, K, H)`. You cannot differentiate it."""
        if not self._is_sharded:
            return self._joined(tensor)
        rows, length, *rest = tensor.shape
        is_brain = tensor.dtype == tf.bfloat16
        chunks = self._gathered(tf.bitcast(tensor, tf.float16) if is_brain else tensor)
        chunks = tf.bitcast(chunks, tf.bfloat16) if is_brain else chunks
        return tf.reshape(tf.transpose(chunks, (1, 0, 2, 3, 4)), (rows, self._contexts * length, *rest))

    def scatter(self, gradient: tf.Tensor) -> tf.Tensor:
        """Return this device's chunk of the sum of gradients: the gradient of `gather`."""
        if not self._is_sharded:
            return self._split(gradient)
        rows, length, *rest = gradient.shape
        split = tf.reshape(gradient, (rows, self._contexts, length // self._contexts, *rest))
        return tf.reduce_sum(self._exchanged(tf.transpose(split, (1, 0, 2, 3, 4))), 0)

    def all_positions(self, part: tf.Tensor) -> tf.Tensor:
        """Gather a part of a mask, `(rows, 1, T / c or 1, T / c or 1)`, along its positions.

        At most one of the last two dims is larger than 1.
        """
        dim = 2 if part.shape[2] > 1 else 3
        line = tf.reshape(part, (part.shape[0], part.shape[dim], 1, 1))
        if self._is_sharded:
            is_known = line.dtype in (tf.float32, tf.float64, tf.int32, tf.int64, tf.float16)
            chunks = self._gathered(line if is_known else tf.cast(line, tf.int32))
            rows = tf.reshape(tf.transpose(chunks, (1, 0, 2, 3, 4)), (part.shape[0], -1, 1, 1))
            line = rows if is_known else tf.cast(rows, part.dtype)
        else:
            line = self._joined(line)
        shape = [line.shape[0], 1, 1, 1]
        shape[dim] = self._contexts * part.shape[dim]
        return tf.reshape(line, shape)

    def _gathered(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._local(replicas.gathered_in_context(tf.expand_dims(tensor, 0), self._mesh))

    def _local(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the result of a collective as the other local tensors of a `local_map`, in a replicated layout."""
        return transfer.relayout(tensor, (None,) * tensor.shape.rank, self._mesh)

    def _to_heads(self, tensor: tf.Tensor) -> tf.Tensor:
        rows, length, heads, width = tensor.shape
        split = tf.reshape(tensor, (rows, length, self._contexts, heads // self._contexts, width))
        chunks = self._exchanged(tf.transpose(split, (2, 0, 1, 3, 4)))
        return tf.reshape(
            tf.transpose(chunks, (1, 0, 2, 3, 4)), (rows, length * self._contexts, heads // self._contexts, width)
        )

    def _to_positions(self, tensor: tf.Tensor) -> tf.Tensor:
        rows, length, heads, width = tensor.shape
        split = tf.reshape(tensor, (rows, self._contexts, length // self._contexts, heads, width))
        parts = self._exchanged(tf.transpose(split, (1, 0, 2, 3, 4)))
        return tf.reshape(
            tf.transpose(parts, (1, 2, 0, 3, 4)), (rows, length // self._contexts, heads * self._contexts, width)
        )

    def _exchanged(self, chunks: tf.Tensor) -> tf.Tensor:
        is_brain = chunks.dtype == tf.bfloat16
        sent = tf.bitcast(chunks, tf.float16) if is_brain else chunks
        found = self._local(tf.ensure_shape(replicas.exchanged_in_context(sent, self._mesh), chunks.shape))
        return tf.bitcast(found, tf.bfloat16) if is_brain else found

    def _joined(self, tensor: tf.Tensor) -> tf.Tensor:
        rows, length, *rest = tensor.shape
        split = tf.reshape(tensor, (self._contexts, rows // self._contexts, length, *rest))
        order = (1, 0, *range(2, split.shape.rank))
        return tf.reshape(tf.transpose(split, order), (rows // self._contexts, self._contexts * length, *rest))

    def _split(self, tensor: tf.Tensor) -> tf.Tensor:
        batch, length, *rest = tensor.shape
        split = tf.reshape(tensor, (batch, self._contexts, length // self._contexts, *rest))
        order = (1, 0, *range(2, split.shape.rank))
        return tf.reshape(tf.transpose(split, order), (batch * self._contexts, length // self._contexts, *rest))


def _with_gradient(
    forward: Callable[[tf.Tensor], tf.Tensor], backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor
) -> tf.Tensor:
    def apply(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return forward(tensor), lambda upstream: _with_gradient(backward, forward, upstream)

    found: tf.Tensor = tf.custom_gradient(apply)(tensor)
    return found
