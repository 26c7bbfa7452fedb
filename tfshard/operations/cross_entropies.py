"""Cross entropy of logits with integer labels, by operations that pass over the logits a few times.

TensorFlow's kernel on CPU takes about 5 ns for each logit: it computes exponentials one by one, twice. Vectorized
operations take a third of the time. They also keep logits sharded if a model axis shards the classes, and need no
one-hot vectors as large as the logits. With a large vocabulary, the kernel takes a good part of a step.

With z, the logits of a token, and y, its label:

    loss = log(sum(exp(z - max(z)))) + max(z) - z[y]
    gradient = exp(z - max(z)) / sum(exp(z - max(z))), less 1 at y

Each device reads and changes the logits at y in its local shard.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import batching, expansions, local_shards, transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import rows
from tfshard.operations.replacing import replaced

# Logits of a device's rows, from which on a dozen operations cost less than one.
LEAST_ELEMENTS = 1 << 16

_Gradient = Callable[[tf.Tensor], tf.Tensor]


def sparse(
    mesh: dtensor.Mesh | None,
    class_axis: Callable[[tf.Tensor], str | None],
    original: Callable[..., tf.Tensor],
    labels: Any = None,
    logits: Any = None,
    name: Any = None,
) -> tf.Tensor:
    """`tf.nn.sparse_softmax_cross_entropy_with_logits` in a traced step.

    Args:
        mesh: The mesh; None on a single device.
        class_axis: Returns the mesh axis that shards the last dim of a tensor; None if no axis does.
        original: TensorFlow's function, for small logits and other dtypes.
        labels: Integers `(d_0, ..., d_r)`, from 0 to classes - 1.
        logits: `(d_0, ..., d_r, classes)`.
        name: The name of the operation.

    Returns:
        `(d_0, ..., d_r)`, in the dtype of the logits.
    """
    if not _can_be(labels, logits, mesh):
        return original(labels=labels, logits=logits, name=name)
    labels = tf.convert_to_tensor(labels)
    with tf.name_scope(name or "SparseSoftmaxCrossEntropyWithLogits"):
        at = _Labels.of(labels, logits, mesh, None if mesh is None else class_axis(logits))

        def loss(logits: tf.Tensor) -> tuple[tf.Tensor, _Gradient]:
            most, label_logit = tf.reduce_max(logits, -1), at.take(logits)
            # The label's logit is at most `most`, so it changes nothing. But the exponential waits for it: nothing
            # needs the logits any more, and TensorFlow overwrites them.
            shares = tf.exp(logits - tf.maximum(most, label_logit)[..., None])
            total = tf.reduce_sum(shares, -1)

            def derivative(upstream: tf.Tensor, logits: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Any]]:
                def second(above: tf.Tensor) -> list[tf.Tensor]:
                    with tf.GradientTape() as tape:
                        tape.watch([upstream, logits])
                        with tf.GradientTape() as inner:
                            inner.watch(logits)
                            value = original(labels=labels, logits=logits)
                        value = inner.gradient(value, logits, upstream)
                    found: list[tf.Tensor] = tape.gradient(value, [upstream, logits], above)
                    return found

                return at.less(shares * (upstream / total)[..., None], upstream), second

            return tf.math.log(total) + (most - label_logit), lambda upstream: tf.custom_gradient(derivative)(
                upstream, logits
            )

        result: tf.Tensor = tf.custom_gradient(loss)(logits)
        return result


def of_one_device() -> contextlib.AbstractContextManager[None]:
    """Return a context in which a step is traced as one device computes it, without a mesh."""
    version = functools.partial(sparse, None, lambda tensor: None)
    return replaced([(tf.nn, "sparse_softmax_cross_entropy_with_logits", version)])


def _can_be(labels: Any, logits: Any, mesh: dtensor.Mesh | None) -> bool:
    if tf.executing_eagerly() or not isinstance(logits, tf.Tensor) or not isinstance(labels, tf.Tensor | np.ndarray):
        return False
    if logits.dtype not in (tf.float32, tf.float64) or not tf.as_dtype(labels.dtype).is_integer:
        return False
    if not logits.shape.is_fully_defined() or logits.shape.rank < 2 or logits.shape[:-1] != labels.shape:
        return False
    return bool(math.prod(logits.shape) // _shares(logits, mesh) >= LEAST_ELEMENTS)


def _shares(tensor: tf.Tensor, mesh: dtensor.Mesh | None) -> int:
    """Among how many devices the rows of a tensor are shared out."""
    return axis_sizes(mesh).data_size if mesh is not None and rows.are_sharded(tensor, mesh) else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Labels:
    """The places of the labels in the local shards of the logits.

    Attributes:
        places: `(*labels.shape, devices, rank)`: for each device of the axis that shards the classes, the index of the
            label's logit in the local shard. The index of any logit, if the shard does not contain the label's.
        has: `(*labels.shape, devices)`: whether the local shard contains the label's logit; None if all shards do.
        axes: The layout of the logits.
        mesh: The mesh.
    """

    places: tf.Tensor
    has: tf.Tensor | None
    axes: Axes
    mesh: dtensor.Mesh | None

    @classmethod
    def of(cls, labels: tf.Tensor, logits: tf.Tensor, mesh: dtensor.Mesh | None, axis: str | None) -> "_Labels":
        shape, classes = tuple(labels.shape), logits.shape[-1]
        labels = tf.cast(labels, tf.int32)[..., None]
        if mesh is None:
            numbers = [np.arange(size, dtype="int32") for size in shape]
            return cls(places=_tuples(numbers, labels), has=None, axes=(None,) * logits.shape.rank, mesh=None)
        axes = (*batching.batch_axes(shape, mesh), axis)
        labels, has = transfer.relayout(labels, (*axes[:-1], None), mesh), None
        if axis is not None:
            devices = axis_sizes(mesh)[axis]
            its = classes // devices
            first = transfer.relayout(its * tf.range(devices, dtype=tf.int32), (axis,), mesh)
            is_known = (labels >= 0) & (labels < classes)
            # DTensor knows that devices have different values of `first`, so the comparison is sharded.
            has = transfer.relayout((labels >= first) & (labels < first + its), axes, mesh)
            # A label that is no class stays unchanged: the step fails and names it.
            labels = transfer.relayout(tf.where(has, labels - first, tf.where(is_known, 0, labels)), axes, mesh)
        shares = _shares(logits, mesh)
        local_rows = np.tile(np.arange(shape[0] // shares, dtype="int32"), shares)
        numbers = [
            transfer.relayout(tf.constant(local_rows), axes[:1], mesh),
            *(np.arange(n, dtype="int32") for n in shape[1:]),
        ]
        places = transfer.relayout(_tuples(numbers, labels), (*axes, None), mesh)
        return cls(places=places, has=has, axes=axes, mesh=mesh)

    def take(self, logits: tf.Tensor) -> tf.Tensor:
        """Return the logit of each label."""
        if self.mesh is None:
            return tf.gather_nd(logits, self.places)[..., 0]
        expansions.allow_local("GatherNd")
        with local_shards.scope(), tf.name_scope("logit_of_each_label"):
            found = tf.gather_nd(self._parted(logits, self.axes), self._parted(self.places, (*self.axes, None)))
        found = transfer.relayout(found, self.axes, self.mesh)
        if self.has is None:
            return tf.squeeze(found, -1)
        return tf.reduce_sum(tf.where(self.has, found, tf.zeros_like(found)), -1)

    def less(self, shares: tf.Tensor, amounts: tf.Tensor) -> tf.Tensor:
        """Subtract an amount from the share of each label."""
        amounts = -amounts[..., None]
        if self.mesh is None:
            return _add(shares, self.places, amounts)
        if self.has is not None:
            amounts = tf.where(self.has, amounts, tf.zeros_like(amounts))
        expansions.allow_local("ScatterNdNonAliasingAdd")
        with local_shards.scope():
            result = _add(
                self._parted(shares, self.axes),
                self._parted(self.places, (*self.axes, None)),
                self._parted(amounts, self.axes),
            )
        return transfer.relayout(result, self.axes, self.mesh)

    def _parted(self, tensor: tf.Tensor, axes: Axes) -> tf.Tensor:
        return local_shards.parted(transfer.relayout(tensor, axes, self.mesh), axes, self.mesh)


def _add(tensor: tf.Tensor, places: tf.Tensor, amounts: tf.Tensor) -> tf.Tensor:
    """Add amounts at places. It overwrites a tensor that nothing else needs; TensorScatterSub would copy the tensor."""
    result: tf.Tensor = tf.raw_ops.ScatterNdNonAliasingAdd(input=tensor, indices=places, updates=amounts)
    return result


def _tuples(numbers: list[Any], last: tf.Tensor) -> tf.Tensor:
    """Index tuples `(*last.shape, rank)` of places that have numbers along all dims but the last, and `last` there."""
    rank = last.shape.rank
    spread = [
        tf.reshape(each, [-1 if dim == place else 1 for dim in range(rank)]) for place, each in enumerate(numbers)
    ]
    return tf.stack([*(each + tf.zeros_like(last) for each in spread), last], -1)
