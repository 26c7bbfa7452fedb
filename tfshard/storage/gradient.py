"""Gradients of variables: bring them from the compute layout to the update layout, and find their layout in a graph."""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import replicas, transfer
from tfshard.layouts import boxes
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes


def with_pinned_gradient(
    value: tf.Tensor,
    *,
    forward: Axes,
    backward: Axes,
    mesh: dtensor.Mesh,
    note: Callable[[tf.Tensor], object] = lambda gradient: None,
    local_gradient: Callable[[tf.Tensor], tf.Tensor | None] | None = None,
    stored: Axes | None = None,
    note_kind: Callable[[bool], object] = lambda is_sparse: None,
    codes: str | None = None,
) -> tf.Tensor:
    """Return a value in one layout. Its gradient gets another layout as soon as the gradient exists.

    A sparse gradient (IndexedSlices) becomes dense here.

    Args:
        value: The value.
        forward: The layout of the result.
        backward: The layout of the gradient.
        mesh: The mesh.
        note: Called with the gradient in the layout `backward`.
        local_gradient: Returns the unreduced local gradient, or a custom reduction of it. If it returns None, DTensor
            reduces the gradient as usual.
        stored: The layout of `value`, if it is known.
        note_kind: Called with whether the gradient arrives as IndexedSlices.
        codes: The dtype of codes in which `value` is gathered (`replicas.gather`). The gradient is taken at the rounded
            value.
    """

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        is_sparse = isinstance(upstream, tf.IndexedSlices)
        note_kind(is_sparse)
        if not is_sparse and not upstream.shape.is_fully_defined():
            # TensorFlow may not know the shape of a gradient by a tensor if the tensor's size depends on values.
            upstream = tf.raw_ops.EnsureShape(input=upstream, shape=value.shape)
        made = None if local_gradient is None else local_gradient(upstream)
        if made is not None:
            return made
        # Pinned to the forward layout first. The backward one alone would travel up into the operations that compute
        # the gradient, and many cannot be expanded with it: convolutions, attention, batch normalization, concat.
        if backward == forward:
            brought = transfer.relayout(upstream, forward, mesh)
        else:
            brought = scatter(upstream, forward=forward, backward=backward, mesh=mesh)
        note(brought)
        return brought

    def apply(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return replicas.gathered(x, stored or forward, forward, mesh, codes), gradient

    return tf.custom_gradient(apply)(value)


def scatter(gradient: tf.Tensor, *, forward: Axes, backward: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Shard a full gradient, and apply the operations behind its all-reduce to the shards.

    DTensor fuses the all-reduce of a gradient with a scatter that follows it directly. It merges other all-reduces with
    each other. But several operations may separate the two: EinsumDense multiplies matrices and reshapes, mixed
    precision casts, and logits of a transposed table transpose their gradient. A shard that is cast or transposed is a
    shard of the full result. A reshaped shard is one, too, if a sharded dim stays the first of the dims that it
    becomes. These operations can therefore follow the scatter.
    """
    # The operations to repeat on the shards, each with the layout of its result.
    redo: list[tuple[Callable[[tf.Tensor], tf.Tensor], Axes]] = []
    gradient = _without_identities(gradient)
    while not _private.is_eager() and isinstance(gradient, tf.Tensor):
        forward_before, backward_before = (
            layout_before(gradient, forward, mesh),
            layout_before(gradient, backward, mesh),
        )
        if forward_before is None or backward_before is None:
            break
        operation = gradient.op
        if operation.type == "Cast":
            redo.append((functools.partial(tf.cast, dtype=gradient.dtype), backward))
        elif operation.type == "Transpose":
            redo.append((functools.partial(tf.transpose, perm=operation.inputs[1]), backward))
        elif operation.type == "Reshape":
            redo.append((functools.partial(tf.reshape, shape=gradient.shape), backward))
        gradient, forward, backward = operation.inputs[0], forward_before, backward_before
    scattered = transfer.scatter(transfer.relayout(gradient, forward, mesh), backward, mesh)
    for step, layout in reversed(redo):
        scattered = transfer.relayout(step(scattered), layout, mesh)
    return scattered


def layout_before(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> Axes | None:
    """Return the layout of the input of a cast, transpose or reshape with which each device rearranges its local shard.
    None if no layout does."""
    source = tensor.op.inputs[0] if tensor.op.inputs else tensor
    if tensor.op.type in ("Cast", "Relayout"):
        return axes
    if tensor.op.type == "Transpose":
        order = _transposed_order(tensor.op)
        return None if order is None else tuple(axes[order.index(dim)] for dim in range(len(order)))
    if tensor.op.type == "Reshape" and source.shape.is_fully_defined() and source.shape.rank:
        return boxes.axes_before_reshape(tuple(tensor.shape), axes, tuple(source.shape), axis_sizes(mesh))
    return None


def _transposed_order(transpose: tf.Operation) -> list[int] | None:
    """Return the order of a transpose's dims, if it is known. The order of a gradient is the inverse of another
    order."""
    given = transpose.inputs[1]
    if given.op.type == "InvertPermutation":
        inverse = tf.get_static_value(given.op.inputs[0])
        return None if inverse is None else [int(dim) for dim in np.argsort(inverse)]
    found = tf.get_static_value(given)
    return None if found is None else [int(dim) for dim in found]


def _without_identities(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """Return a gradient in front of the operations of custom gradients, which serve other tapes. These operations would
    separate an all-reduce from the scatter that DTensor fuses with it."""
    while not (_private.is_eager() or _private.could_record()) and isinstance(gradient, tf.Tensor):
        if gradient.op.type not in ("Identity", "IdentityN"):
            break
        gradient = gradient.op.inputs[gradient.value_index]
    return gradient


def layout_of(tensor: tf.Tensor | tf.IndexedSlices) -> Axes | None:
    """Return the layout of a gradient that an optimizer receives.

    In eager code a tensor has a layout. In a graph it has none yet: `with_pinned_gradient` pins each gradient to one.
    Later operations (clipping, scaling, sums) work element by element, and DTensor computes them in the layout of their
    operands. This function therefore follows operands of the same shape back to where they are pinned. A sharded
    operand makes the result sharded.

    Returns:
        The mesh axis of each dim. None if the operations pin no layout, or contradict each other.
    """
    if not isinstance(tensor, tf.Tensor):
        return None
    if _private.is_eager():
        return transfer.axes_of(dtensor.fetch_layout(tensor)) if transfer.is_dtensor(tensor) else None
    merged: list[str | None] = [None] * tensor.shape.rank
    waiting, seen, pinned = [tensor], {tensor.ref()}, False
    while waiting:
        current = waiting.pop()
        axes = _pinned_axes(current)
        if axes is not None:
            pinned = True
            for dim, axis in enumerate(axes):
                if None not in (axis, merged[dim]) and axis != merged[dim]:
                    return None
                merged[dim] = axis or merged[dim]
            continue
        if current.op.type.endswith("If"):
            continue  # The input of a branch says nothing about its result.
        sources = [_private.captured(current)] if current.op.type == "Placeholder" else current.op.inputs
        for source in sources:
            if source is not None and source.shape == tensor.shape and source.ref() not in seen:
                seen.add(source.ref())
                waiting.append(source)
    return tuple(merged) if pinned else None


def _pinned_axes(tensor: tf.Tensor) -> Axes | None:
    """Return the layout that a tensor of a graph is pinned to, or None."""
    if tensor.op.type != "Relayout":
        return None
    axes = transfer.axes_of(dtensor.Layout.from_string(tensor.op.get_attr("layout").decode()))
    return None if dtensor.MATCH in axes else axes
