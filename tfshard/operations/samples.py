"""Find the dims of the tensors of a step that hold its samples."""

import functools
import weakref

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.graph import dim_rules
from tfshard.layouts.axes import axis_sizes
from tfshard.storage import steps

# Part of the names of operations that give samples in dim 0.
_NAME = "rows_of_samples"

# For each graph, names and dims of tensors with samples, and of tensors without samples: each is followed back once.
_found: weakref.WeakKeyDictionary[tf.Graph, set[tuple[str, int]]] = weakref.WeakKeyDictionary()
_others: weakref.WeakKeyDictionary[tf.Graph, set[tuple[str, int]]] = weakref.WeakKeyDictionary()


def are_in(tensor: tf.Tensor, dim: int) -> bool:
    """Return whether a dim of a tensor of a step holds the samples.

    Followed back, the dim is the first dim of an input of the step, or a dim that tfshard has pinned as samples.
    """
    if isinstance(tensor, tf.__internal__.EagerTensor):
        return False  # A constant from outside of the step.
    found, others = _found.setdefault(tensor.graph, set()), _others.setdefault(tensor.graph, set())
    seen: set[tuple[str, int]] = set()
    for source, place in dim_rules.way_back(tensor, dim, others):
        if (source.name, place) in found or _begins(source, place):
            found.add((tensor.name, dim))
            return True
        seen.add((source.name, place))
    others |= seen
    return False


def may_be_in(tensor: tf.Tensor, dim: int) -> bool:
    """Return whether a dim holds the samples, or is as large as the batch and comes from an operation without a rule.

    Loops, branches and sorts have no rule. For code that gives the right numbers in either case.
    """
    if are_in(tensor, dim):
        return True
    step = steps.current()
    return (
        step is not None
        and tensor.shape[dim] in step.batch.rows
        and any(_has_no_rule(source.op) for source, _ in dim_rules.way_back(tensor, dim))
    )


def _has_no_rule(operation: tf.Operation) -> bool:
    return operation.type not in ("Const", "Placeholder", "Relayout") and not dim_rules.has_rule(operation)


def _begins(source: tf.Tensor, place: int) -> bool:
    """Return whether samples come into the step by a dim of a tensor: of an input, or of a pinned tensor."""
    if source.op.type == "Placeholder":
        outer = _private.captured(source)
        return place == 0 if outer is None else are_in(outer, place)
    if source.op.type != "Relayout":
        return False
    axis, data = _axes(source.op.get_attr("layout").decode(), place)
    if axis == data or (place == 0 and _NAME in source.op.name):
        return True
    return axis == dtensor.MATCH and are_in(source.op.inputs[0], place)


def is_on_model_axis(tensor: tf.Tensor, dim: int, mesh: dtensor.Mesh) -> bool:
    """Return whether a model axis may shard a dim of a tensor of a step, as far as the dim can be followed back."""
    axes = axis_sizes(mesh).tensor
    for source, place in dim_rules.way_back(tensor, dim):
        if source.op.type == "Placeholder":
            outer = _private.captured(source)
            if outer is not None and is_on_model_axis(outer, place, mesh):
                return True
        elif source.op.type == "Relayout":
            axis, _ = _axes(source.op.get_attr("layout").decode(), place)
            if axis in axes or (axis == dtensor.MATCH and is_on_model_axis(source.op.inputs[0], place, mesh)):
                return True
    return False


def by_row(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a tensor with samples in dim 0, sharded over the data axis if the axis divides them, else replicated."""
    with tf.name_scope(_NAME):
        return transfer.by_sample(tensor, mesh)


def layout_replicated_along(tensor: tf.Tensor, dim: int, mesh: dtensor.Mesh) -> dtensor.Layout:
    """Return a layout for a tensor that no axis shards along a dim.

    A single dim stays sharded as before ("match"; a layout may have one). If samples are known to be in one dim, and a
    model axis shards another, the dim of the model axis stays, and the data axis shards the samples. Otherwise the dim
    of the samples stays, or the first dim.
    """
    sizes, others = axis_sizes(mesh), [each for each in range(tensor.shape.rank) if each != dim]
    specs = dict.fromkeys(range(tensor.shape.rank), dtensor.UNSHARDED)
    of_samples = next((each for each in others if are_in(tensor, each)), None)
    on_model = next((each for each in others if is_on_model_axis(tensor, each, mesh) and each != of_samples), None)
    if on_model is not None and of_samples is not None:
        specs[on_model] = dtensor.MATCH
        if sizes.data_size > 1 and tensor.shape[of_samples] % sizes.data_size == 0:
            specs[of_samples] = sizes.data
    else:
        kept = next((each for each in (of_samples, on_model, *others) if each is not None), None)
        specs |= {} if kept is None else {kept: dtensor.MATCH}
    return dtensor.Layout(list(specs.values()), mesh)


def replicated_along(tensor: tf.Tensor, dim: int, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a tensor with samples in a dim, replicated along the dim.

    Another dim stays sharded as before: a dim that is known to be sharded by a model axis, otherwise the first.
    """
    others = [each for each in range(tensor.shape.rank) if each != dim and tensor.shape[each] > 1]
    on_model = [each for each in others if is_on_model_axis(tensor, each, mesh)]
    kept = next(iter((*on_model, *others)), None)
    specs = [dtensor.MATCH if each == kept else dtensor.UNSHARDED for each in range(tensor.shape.rank)]
    return dtensor.relayout(tensor, dtensor.Layout(specs, mesh))


def sharded_along(tensor: tf.Tensor, dim: int, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return a tensor with samples in a dim, sharded along it over the data axis if the axis divides them."""
    sizes = axis_sizes(mesh)
    axis = sizes.data if sizes.data_size > 1 and tensor.shape[dim] % sizes.data_size == 0 else None
    dim %= tensor.shape.rank
    return transfer.relayout(tensor, tuple(axis if each == dim else None for each in range(tensor.shape.rank)), mesh)


@functools.cache
def _axes(layout: str, dim: int) -> tuple[str, str | None]:
    """Return the axis that shards a dim in a layout, and the data axis of its mesh."""
    found = dtensor.Layout.from_string(layout)
    return found.sharding_specs[dim], axis_sizes(found.mesh).data
