"""Gradients that devices sum compressed, with error feedback: a later step sends the residual.

Seide et al. 2014, "1-Bit Stochastic Gradient Descent", and Karimireddy et al. 2019, "Error Feedback Fixes SignSGD"
(https://arxiv.org/abs/1901.09847). Each device adds its error-feedback residual to its local gradient, sends the sum
encoded (`gradient_codes`), and keeps the difference. An all-to-all gives each device its chunk of all local gradients,
and the device sums the chunk in float32. If every device needs the full gradient, the devices also encode the summed
chunks and gather them. The device that summed a chunk keeps the chunk's residual, as in Tang et al. 2021, "1-bit Adam"
(https://arxiv.org/abs/2102.02888).

`PowerSGD` sums two factors of the gradient instead. Both factors are linear in the gradient: over replicas, the sum
equals the result of an exact sum in each replica first. All devices send, and each residual belongs to the device's
local gradient (line 8 of Algorithm 2).

A layer that is used several times has several gradients. Each takes the residual of the gradient before.
"""

import numpy as np
import tensorflow as tf

from tfshard.contrib.compression import gradient_codes
from tfshard.contrib.compression.compressed_form import ERROR, FACTOR, STEPS, SUM_ERROR, CompressedForm
from tfshard.contrib.compression.options import PowerSGD
from tfshard.devices import local_shards, replicas, transfer
from tfshard.operations import rows
from tfshard.storage.variables import ShardedVariable


def reduce_local(local: tf.Tensor, form: CompressedForm, variable: ShardedVariable) -> tf.Tensor:
    """Sum local gradients in a traced step.

    Args:
        local: The local gradient of each device, which DTensor treats as replicated.
        form: How the gradient is compressed.
        variable: The variable of the gradient, on a mesh with a data axis only.

    Returns:
        The sum, in the layout that the variable needs.
    """
    with local_shards.scope():
        result = _Reduction(form, variable).reduce(tf.cast(local, tf.float32))
    return tf.cast(result, local.dtype)


class _Reduction:
    """The reduction of one gradient of a variable."""

    def __init__(self, form: CompressedForm, variable: ShardedVariable):
        self._form = form
        self._variable = variable
        self._kept = variable.kept
        self._mesh = variable.mesh

    def reduce(self, local: tf.Tensor) -> tf.Tensor:
        """Return the float32 sum of the local gradients."""
        return self._low_rank(local) if isinstance(self._form.compression, PowerSGD) else self._encoded(local)

    # --- the residuals

    def _residual(self, name: str) -> tf.Tensor:
        """Return this device's residual, `(1, elements)`."""
        return self._parted(rows.to_local(self._kept[name].storage.update_value(), self._mesh))

    def _keep(self, name: str, error: tf.Tensor) -> None:
        """Replace the residual. Numbers that are not finite become zero: otherwise later residuals would not be
        finite either."""
        error = tf.where(tf.math.is_finite(error), error, tf.zeros_like(error))
        self._kept[name].assign(rows.from_local(self._replicated(error), self._mesh))

    # --- codes

    def _encoded(self, local: tf.Tensor) -> tf.Tensor:
        form = self._form
        line = self._parted(tf.reshape(local, (-1,)))
        if form.adders > 1:
            line = replicas.sum_in_replica(line, self._mesh)
        pending = tf.reshape(self._residual(ERROR), (-1,)) + line
        chunks = self._cut(pending)
        encoded = self._encode(chunks)
        self._keep(ERROR, tf.reshape(pending - self._joined(self._decode(encoded)), (1, -1)))
        received = self._decode(replicas.exchanged(encoded, self._mesh))
        chunk = tf.reduce_sum(received, 0, keepdims=True)
        if form.dim is not None:
            return self._shard(chunk, form.dim)
        pending = self._residual(SUM_ERROR) + chunk
        encoded = self._encode(pending)
        self._keep(SUM_ERROR, pending - self._decode(encoded))
        line = self._joined(self._decode(replicas.gathered_rows(encoded, self._mesh)))
        if form.adders > 1:
            line = replicas.gathered_in_replica(line, self._mesh)
        return self._replicated(tf.reshape(line[: form.elements], form.shape))

    def _encode(self, chunks: tf.Tensor) -> tf.Tensor:
        assert isinstance(self._form.compression, str)
        return gradient_codes.encode(chunks, self._form.compression)

    def _decode(self, encoded: tf.Tensor) -> tf.Tensor:
        assert isinstance(self._form.compression, str)
        return gradient_codes.decode(encoded, self._form.compression, self._form.chunk)

    def _cut(self, line: tf.Tensor) -> tf.Tensor:
        """Cut a local gradient into chunks, a row for each device that exchanges. Zeros fill up the last chunk."""
        form, count = self._form, self._form.exchanging
        if form.dim is None:
            return tf.reshape(tf.pad(line, [[0, count * form.chunk - form.sent_elements]]), (count, form.chunk))
        return tf.reshape(tf.transpose(tf.reshape(line, self._split), (1, 0, 2)), (count, form.chunk))

    def _joined(self, chunks: tf.Tensor) -> tf.Tensor:
        """Invert `_cut`."""
        form = self._form
        if form.dim is None:
            return tf.reshape(chunks, (-1,))[: form.sent_elements]
        before, count, behind = self._split
        return tf.reshape(tf.transpose(tf.reshape(chunks, (count, before, behind)), (1, 0, 2)), (-1,))

    @property
    def _split(self) -> tuple[int, int, int]:
        """The gradient's shape with the exchanging devices as the middle dim: `(before, devices, behind)`."""
        form = self._form
        assert form.dim is not None
        before = int(np.prod(form.shape[: form.dim], dtype=int))
        return before, form.exchanging, form.elements // (before * form.exchanging)

    # --- layouts

    def _parted(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a local tensor in a parted layout: each device runs the next operation on its local value."""
        return local_shards.varying(tensor, self._mesh)

    def _replicated(self, tensor: tf.Tensor) -> tf.Tensor:
        return transfer.relayout(tensor, (None,) * tensor.shape.rank, self._mesh)

    def _shard(self, chunk: tf.Tensor, dim: int) -> tf.Tensor:
        """Return the tensor that the data axis shards in `dim`, from each device's chunk."""
        form = self._form
        size = form.shape[dim] // form.devices
        axes = tuple(form.axis if each == dim else None for each in range(len(form.shape)))
        shard = tf.reshape(chunk, (*form.shape[:dim], size, *form.shape[dim + 1 :]))
        return local_shards.from_local(shard, axes, self._mesh)

    # --- low rank

    def _low_rank(self, local: tf.Tensor) -> tf.Tensor:
        form, power = self._form, self._form.compression
        assert isinstance(power, PowerSGD)
        error = self._replicated(self._residual(ERROR))
        local = self._replicated(local)
        factor = self._kept[FACTOR].storage.update_value()
        steps = self._kept[STEPS].storage.update_value()

        def compressed() -> tuple[tf.Tensor, ...]:
            return self._iterated(local, error, factor)

        def exact() -> tuple[tf.Tensor, ...]:
            return self._added_up(local), tf.identity(error), tf.identity(factor)

        if power.warm_up_steps:
            result, error, factor = tf.cond(steps < power.warm_up_steps, exact, compressed)
            self._kept[STEPS].assign(self._replicated(tf.minimum(steps + 1, power.warm_up_steps)))
        else:
            result, error, factor = compressed()
        self._keep(ERROR, error)
        self._kept[FACTOR].assign(self._replicated(factor))
        result = self._replicated(tf.reshape(result, form.shape))
        return result if form.dim is None else transfer.scatter(result, self._variable.layout.gradient, self._mesh)

    def _added_up(self, local: tf.Tensor) -> tf.Tensor:
        """Return the exact sum, as a matrix."""
        add_up = replicas.all_reduce if self._form.adders > 1 else replicas.sum_over_devices
        return self._replicated(tf.reshape(add_up(self._parted(local), self._mesh), self._form.matrix))

    def _iterated(self, local: tf.Tensor, error: tf.Tensor, factor: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Run one power iteration. Return the sum of rank `rank`, this device's residual, and the next factor."""
        matrix = tf.reshape(self._parted(local), self._form.matrix) + tf.reshape(self._parted(error), self._form.matrix)
        before = self._parted(factor)
        left, _ = tf.linalg.qr(replicas.sum_over_devices(tf.matmul(matrix, before), self._mesh))
        part = tf.matmul(matrix, left, transpose_a=True)
        right = replicas.sum_over_devices(part, self._mesh)
        result = tf.matmul(left, right, transpose_b=True)
        error = tf.reshape(matrix - tf.matmul(left, part, transpose_b=True), (1, -1))
        # Keep the last factor if the new factor is not finite: otherwise later factors would not be finite either.
        factor = tf.where(tf.reduce_all(tf.math.is_finite(right), keepdims=True), right, before)
        return self._replicated(result), self._replicated(error), self._replicated(factor)
