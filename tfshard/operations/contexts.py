"""Chunks of sequences in a step: their positions, and the collectives of attention between their devices.

Between attention layers each device has a chunk of the positions and all heads. layouts/sequence_chunks.py says which
device has which chunk. `Exchange` has the collectives for both ways of attention:

- Ulysses: an all-to-all gives each device all positions of some heads, and another one brings the result back (Jacobs
  et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
  Models"). The gradient of each all-to-all is the other one.
- Gather: each device gathers all keys and values. The gradient is a reduce-scatter.

While a model is checked (`recorded`), attention and position embeddings return placeholders, and a `CallRecorder` notes
their operands.
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
        is_passive: True to note calls of attention only. The model then computes as without a recorder.
        sources: The names of the placeholders for results.
        sinks: The name of each operand, and a description of the layer that takes the operand, for messages.
        attentions: The calls of attention.
    """

    def __init__(self, *, is_passive: bool = False) -> None:
        self.is_passive = is_passive
        self.sources: set[str] = set()
        self.sinks: dict[str, str] = {}
        self.attentions: list[RecordedAttention] = []

    def note_operands(self, tensors: list[tf.Tensor], layer: str) -> None:
        """Note operands of attention or of a position embedding."""
        for tensor in tensors:
            # The name of an identity, because an input of the model may be an operand of several layers.
            self.sinks[tf.identity(tensor).name] = layer

    def new_result(self, shape: Any, dtype: Any) -> tf.Tensor:
        """Return a placeholder for a result of attention or of a position embedding, and note it."""
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
        return recording.new_result(x.shape[:2], tf.int32)
    mesh = _mesh_of_step()
    if mesh is None:
        batch, length = keras.ops.shape(x)[:2]
        return keras.ops.broadcast_to(keras.ops.arange(length, dtype="int32"), (batch, length))
    rows, length = x.shape[:2]
    return positions(rows, length, mesh)


def positions(rows: int, length: int, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the position of each token in its sequence, int32, `(rows, length)`, in the layout of a batch.

    Args:
        rows: The rows of the batch: chunks of sequences.
        length: The number of positions of a chunk.
        mesh: A mesh with a context axis.
    """
    made = tf.constant(SequenceChunks.of(axis_sizes(mesh)).positions(rows, length))
    return transfer.relayout(made, batching.batch_axes((rows, length), mesh), mesh)


def with_dense_gradient(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor with a dense gradient, also where a step looks up some of its rows."""
    dense: tf.Tensor = tf.custom_gradient(lambda each: (tf.identity(each), tf.convert_to_tensor))(tensor)
    return dense


def _mesh_of_step() -> dtensor.Mesh | None:
    """Return the mesh of the open step if it has a context axis, or None."""
    if steps.current() is None:
        return None
    mesh = getattr(tf.distribute.get_strategy(), "mesh", None)
    return mesh if mesh is not None and axis_sizes(mesh).contexts > 1 else None


# --- collectives of attention ------------------------------------------------------------------------

# The dtypes that devices gather. Other dtypes, such as bool, are gathered as int32.
_GATHERED_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64, tf.float16, tf.bfloat16)


def gathered_dtype(dtype: tf.DType) -> tf.DType:
    """Return the dtype in which devices gather a part of a mask of this dtype."""
    return dtype if dtype in _GATHERED_DTYPES else tf.int32


class Exchange:
    """The collectives between the devices that share sequences, on local tensors in a `local_map`.

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
        """Exchange `(rows, T, N / c, H)` for `(rows, T / c, N, H)`: all heads of this device's positions."""
        if not self._is_sharded:
            return self._split(tensor)
        return _with_gradient(self._to_positions, self._to_heads, tensor)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Gather `(rows, T / c, K, H)` to `(rows, T, K, H)`. `scatter` is the gradient: tapes do not see it."""
        if not self._is_sharded:
            return self._joined(tensor)
        rows, length, *rest = tensor.shape
        chunks = self._gathered(tensor)
        return tf.reshape(tf.transpose(chunks, (1, 0, 2, 3, 4)), (rows, self._contexts * length, *rest))

    def scatter(self, gradient: tf.Tensor) -> tf.Tensor:
        """Return this device's chunk of the sum of all devices' gradients: the gradient of `gather`."""
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
        line = tf.cast(self.gather(tf.cast(line, gathered_dtype(part.dtype))), part.dtype)
        shape = [line.shape[0], 1, 1, 1]
        shape[dim] = self._contexts * part.shape[dim]
        return tf.reshape(line, shape)

    def _gathered(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensors of all devices, `(c, ...)`, in the order of their chunks."""
        return self._bit_by_bit(
            lambda sent: replicas.gathered_in_context(tf.expand_dims(sent, 0), self._mesh),
            tensor,
        )

    def _exchanged(self, chunks: tf.Tensor) -> tf.Tensor:
        """Send `chunks[i]` to device i, and return the tensors from all devices, `(c, ...)`."""
        return self._bit_by_bit(
            lambda sent: tf.ensure_shape(replicas.exchanged_in_context(sent, self._mesh), chunks.shape),
            chunks,
        )

    def _bit_by_bit(self, collective: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
        """Run a collective that only copies. Devices send bfloat16 as float16, because collectives take no bfloat16.

        Returns:
            The result in a replicated layout, as other local tensors of a `local_map`.
        """
        is_brain = tensor.dtype == tf.bfloat16
        found = collective(tf.bitcast(tensor, tf.float16) if is_brain else tensor)
        found = transfer.relayout(found, (None,) * found.shape.rank, self._mesh)
        return tf.bitcast(found, tf.bfloat16) if is_brain else found

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

    def _joined(self, tensor: tf.Tensor) -> tf.Tensor:
        """Join the chunks of a device that has all rows: `(c * B, T / c, ...)` to `(B, T, ...)`."""
        rows, length, *rest = tensor.shape
        split = tf.reshape(tensor, (self._contexts, rows // self._contexts, length, *rest))
        order = (1, 0, *range(2, split.shape.rank))
        return tf.reshape(tf.transpose(split, order), (rows // self._contexts, self._contexts * length, *rest))

    def _split(self, tensor: tf.Tensor) -> tf.Tensor:
        """Split sequences into rows of chunks: the inverse of `_joined`."""
        batch, length, *rest = tensor.shape
        split = tf.reshape(tensor, (batch, self._contexts, length // self._contexts, *rest))
        order = (1, 0, *range(2, split.shape.rank))
        return tf.reshape(tf.transpose(split, order), (batch * self._contexts, length // self._contexts, *rest))


def _with_gradient(
    forward: Callable[[tf.Tensor], tf.Tensor], backward: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor
) -> tf.Tensor:
    """Return `forward(tensor)`, with `backward` as the gradient. `forward` is the gradient of `backward`."""

    def apply(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return forward(tensor), lambda upstream: _with_gradient(backward, forward, upstream)

    found: tf.Tensor = tf.custom_gradient(apply)(tensor)
    return found
