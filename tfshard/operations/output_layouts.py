"""Layouts that a user gives to the outputs of layers (`keras.distribution.LayoutMap`, "layer/output")."""

from collections.abc import Callable

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.storage import steps


def pinned(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a tensor of a step in a layout, with the gradient in the same layout.

    An axis that does not divide its dim, or a dim of unknown size, does not shard it. Inside of code that runs on local
    shards, the tensor stays as it is.

    Args:
        tensor: The tensor.
        axes: The mesh axis, or None, of each dim.
        mesh: The mesh of the step.
    """
    if steps.context().local is not None:
        return tensor
    sizes = axis_sizes(mesh)
    fitting = tuple(
        axis if axis is not None and size is not None and size % sizes[axis] == 0 else None
        for axis, size in zip(axes, tensor.shape, strict=True)
    )

    def apply(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return _in_turn(value, fitting, mesh), lambda upstream: _in_turn(upstream, fitting, mesh)

    return tf.custom_gradient(apply)(tensor)


def _in_turn(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Relayout a tensor of any layout.

    DTensor refuses a gather over two axes at once, and carries a layout with two sharded dims into a reshape before,
    with wrong values. The dims that `axes` does not shard are therefore gathered first. The last dim keeps the axis
    that it has if `axes` shards it over a model axis: a kernel sharded by column leaves it so.
    """
    sizes, rank = axis_sizes(mesh), len(axes)
    if rank > 1 and sizes.shards_by_several:
        moves = axes[0] not in (None, sizes.data) or sizes.data in axes[1:]
        if axes[-1] in sizes.tensor and not moves:
            tensor = _relayout(tensor, [axes[0] or dtensor.UNSHARDED, *_unsharded(rank - 2), dtensor.MATCH], mesh)
        else:
            tensor = _relayout(tensor, [dtensor.MATCH, *_unsharded(rank - 1)], mesh)
        if moves:
            tensor = _relayout(tensor, _unsharded(rank), mesh)
    return transfer.relayout(tensor, axes, mesh)


def _unsharded(rank: int) -> list[str]:
    return [dtensor.UNSHARDED] * rank


def _relayout(tensor: tf.Tensor, specs: list[str], mesh: dtensor.Mesh) -> tf.Tensor:
    if _private.is_eager():
        # An eager relayout matches nothing.
        current = dtensor.fetch_layout(tensor).sharding_specs
        specs = [now if spec == dtensor.MATCH else spec for spec, now in zip(specs, current, strict=True)]
    return dtensor.relayout(tensor, dtensor.Layout(specs, mesh))
