"""Vocabulary parallelism: embedding lookups and metrics that leave tables and logits sharded over the vocabulary.

DTensor gathers the full table for a lookup along a sharded dim, and full logits for an argmax or a top-k. The functions
here compute the same results with operations that DTensor expands without these gathers. Loss functions send three
numbers for each token (cross_entropies.py; DTensor's expansion of the other losses does so, too).
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import batching, transfer
from tfshard.graph import dim_rules
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import chunked_cross_entropy, layer_patch
from tfshard.storage import steps
from tfshard.storage.variables import ShardedVariable


def is_vocabulary_layout(axes: Axes) -> bool:
    """Return whether a table `(rows, width)` in this compute layout is sharded by rows."""
    return len(axes) == 2 and axes[0] is not None and axes[1] is None


def lookup(table: tf.Tensor, ids: tf.Tensor, *, axis: str, mesh: dtensor.Mesh) -> tf.Tensor:
    """Look up rows of a table that is sharded by rows (Megatron-LM, Shoeybi et al. 2019, section 3).

    Each device looks up `id mod rows-of-a-device` in its local rows, and sets the rows of other devices to zero. An
    all-reduce sums the results. Each device sums the gradient of its local rows, and sends nothing over `axis`.

    Args:
        table: `(rows, width)`, its compute layout `(axis, None)`.
        ids: Integers of any shape, from 0 to rows - 1, sharded over the batch axis or replicated.
        axis: The mesh axis of the rows.
        mesh: The mesh.

    Returns:
        `(*ids.shape, width)`, sharded like `ids`.
    """
    devices = axis_sizes(mesh)[axis]
    rows, width = table.shape[0] // devices, table.shape[1]
    of_ids = _batch_axes(ids, mesh)
    row = ids % rows
    # DTensor expands no one_hot with a sharded depth.
    numbers = transfer.relayout(tf.range(devices, dtype=ids.dtype), (axis,), mesh)
    owner = transfer.relayout(tf.cast((ids // rows)[..., None] == numbers, table.dtype), (*of_ids, axis), mesh)

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        # The dim of the devices follows the dim of the segments, and DTensor keeps it sharded. The segments are the
        # same on all devices.
        mine = transfer.relayout(owner[..., None] * tf.expand_dims(upstream, -2), (*of_ids, axis, None), mesh)
        summed = transfer.relayout(tf.math.unsorted_segment_sum(mine, row, rows), (None, axis, None), mesh)
        summed = transfer.relayout(tf.transpose(summed, (1, 0, 2)), (axis, None, None), mesh)
        return transfer.relayout(tf.reshape(summed, table.shape), (axis, None), mesh)

    def apply(table: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        split = transfer.relayout(tf.reshape(table, (devices, rows, width)), (axis, None, None), mesh)
        found = transfer.relayout(tf.gather(split, row, axis=1), (axis, *of_ids, None), mesh)
        rank = ids.shape.rank
        mine = transfer.relayout(tf.transpose(owner, (rank, *range(rank))), (axis, *of_ids), mesh)
        return transfer.relayout(tf.reduce_sum(found * mine[..., None], axis=0), (*of_ids, None), mesh), gradient

    return tf.custom_gradient(apply)(table)


def _batch_axes(tensor: tf.Tensor, mesh: dtensor.Mesh) -> Axes:
    """Return the layout of a tensor that is computed from a batch: data.batch_axes, unless its first dim is unknown."""
    axes: Axes = (None,) * tensor.shape.rank
    return batching.batch_axes(tuple(tensor.shape), mesh) if axes and tensor.shape[0] is not None else axes


def _read_function(variable: keras.Variable, original: None) -> Callable[..., tf.Tensor]:
    """`sparse_read`, which Keras's variables do not have."""
    assert original is None
    return functools.partial(_read_rows, variable)


def _read_rows(variable: keras.Variable, ids: Any, name: str | None = None) -> tf.Tensor:
    """Replace the method that `tf.gather(variable, ids)` calls (TensorFlow's protocol for resource variables)."""
    current = _private.backend_variable(variable)
    inside = steps.current() is not None and steps.open_update() is None
    if not inside or not isinstance(current, ShardedVariable) or not is_vocabulary_layout(current.layout.compute):
        # tf.gather then reads the full variable.
        raise AttributeError("sparse_read")
    del name
    axis = current.layout.compute[0]
    assert axis is not None
    # Read through Keras's variable: mixed precision casts it.
    with current.read_for_lookup():
        table = tf.convert_to_tensor(variable)
    return lookup(table, tf.convert_to_tensor(ids), axis=axis, mesh=current.mesh)


# --- Metrics -----------------------------------------------------------------------------------------


def _places(labels: tf.Tensor, scores: tf.Tensor, axis: str, mesh: dtensor.Mesh) -> tuple[tf.Tensor, ...]:
    """Return how many classes score above the label's class, how many earlier classes equal it, and the label's score.

    The devices send the label's score and the counts: two numbers for each sample.
    """
    classes = scores.shape[-1]
    scores = transfer.relayout(scores, (*_batch_axes(scores, mesh)[:-1], axis), mesh)
    numbers = transfer.relayout(tf.range(classes, dtype=labels.dtype), (axis,), mesh)
    labels = labels[..., None]
    label_score = tf.reduce_sum(tf.where(labels == numbers, scores, tf.zeros_like(scores)), axis=-1, keepdims=True)
    above = tf.reduce_sum(tf.cast(scores > label_score, tf.float32), axis=-1)
    before = tf.reduce_sum(tf.cast((scores == label_score) & (numbers < labels), tf.float32), axis=-1)
    return above, before, tf.squeeze(label_score, -1)


def _labels(y_true: Any, y_pred: tf.Tensor, *, sparse: bool) -> tf.Tensor:
    labels = tf.convert_to_tensor(y_true)
    if not sparse:
        return tf.argmax(labels, axis=-1, output_type=tf.int32)
    if labels.shape.rank == y_pred.shape.rank and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    return tf.cast(labels, tf.int32)


def sharded_axis(scores: Any, dim: int = -1) -> str | None:
    """Return the model axis that shards a dim of a tensor of a step, by default the last; None if no axis does.

    In a graph, tensors have no layouts yet. The function follows the dim back to its kernel or table: a `Relayout`
    brings each variable that a step reads to its compute layout.
    """
    if not isinstance(scores, tf.Tensor) or not scores.shape.rank or scores.shape[dim] is None:
        return None
    if _private.is_eager():
        return _model_axis(dtensor.fetch_layout(scores), dim) if transfer.is_dtensor(scores) else None
    for tensor, place in dim_rules.way_back(scores, dim % scores.shape.rank):
        if tensor.op.type == "Relayout":
            axis = _model_axis(dtensor.Layout.from_string(tensor.op.get_attr("layout").decode()), place)
            if axis is not None:
                return axis
    return None


def _model_axis(layout: dtensor.Layout, dim: int) -> str | None:
    axis: str = layout.sharding_specs[dim]
    return axis if axis in axis_sizes(layout.mesh).tensor else None


# A function of labels and predictions, with options.
_Function = Callable[..., tf.Tensor]


def _accuracy(y_true: Any, y_pred: Any, *, keras_function: _Function, sparse: bool, mesh: dtensor.Mesh) -> tf.Tensor:
    """1 where the label is the first of the highest scores: Keras's accuracy without an argmax."""
    if chunked_cross_entropy.is_used(y_pred):
        is_best = chunked_cross_entropy.is_best(_labels(y_true, y_pred, sparse=sparse), y_pred)
        return tf.cast(is_best, keras.config.floatx())
    axis = sharded_axis(y_pred)
    if axis is None:
        return keras_function(y_true, y_pred)
    labels = _labels(y_true, y_pred, sparse=sparse)
    above, before, _ = _places(labels, y_pred, axis, mesh)
    known = (labels >= 0) & (labels < y_pred.shape[-1])
    return tf.cast((above + before == 0) & known, keras.config.floatx())


def _top_k(
    y_true: Any,
    y_pred: Any,
    k: int = 5,
    *,
    keras_function: _Function,
    sparse: bool,
    mesh: dtensor.Mesh,
    **options: Any,
) -> tf.Tensor:
    """Return 1 for samples with fewer than k classes that score above the label's class: `tf.math.in_top_k`."""
    if chunked_cross_entropy.is_used(y_pred) and not any(options.values()):
        is_among_best = chunked_cross_entropy.is_among_best(_labels(y_true, y_pred, sparse=sparse), y_pred, k)
        return tf.cast(is_among_best, keras.config.floatx())
    axis = sharded_axis(y_pred)
    if axis is None or any(options.values()):
        return keras_function(y_true, y_pred, k=k, **options)
    labels = _labels(y_true, y_pred, sparse=sparse)
    above, _, label_score = _places(labels, y_pred, axis, mesh)
    known = (labels >= 0) & (labels < y_pred.shape[-1]) & tf.math.is_finite(label_score)
    return tf.cast((above < k) & known, keras.config.floatx())


_METRICS: dict[_Function, _Function] = {
    keras.metrics.sparse_categorical_accuracy: functools.partial(_accuracy, sparse=True),
    keras.metrics.categorical_accuracy: functools.partial(_accuracy, sparse=False),
    keras.metrics.sparse_top_k_categorical_accuracy: functools.partial(_top_k, sparse=True),
    keras.metrics.top_k_categorical_accuracy: functools.partial(_top_k, sparse=False),
}


def _update_function(metric: keras.Metric, update: layer_patch.Method, mesh: dtensor.Mesh) -> layer_patch.Method:
    """Replace a metric's `update_state`: inside a step, it runs with tfshard's function.

    The metric has tfshard's function only while it runs: its config holds the function, and clones and files are made
    from the config.
    """
    keras_function = _private.metric_function(metric)
    assert keras_function is not None
    ours = functools.partial(_METRICS[keras_function], keras_function=keras_function, mesh=mesh)

    def update_state(*args: Any, **kwargs: Any) -> Any:
        if steps.current() is None:
            return update(*args, **kwargs)
        _private.set_metric_function(metric, ours)
        try:
            return update(*args, **kwargs)
        finally:
            _private.set_metric_function(metric, keras_function)

    return update_state


def install(model: keras.Model, variables: list[keras.Variable], mesh: dtensor.Mesh) -> None:
    """Patch the reads of vocabulary-sharded tables, and the model's compiled metrics, to use the functions above.

    Args:
        model: A model under a strategy.
        variables: Its variables, all on the mesh.
        mesh: The mesh.
    """
    for variable in variables:
        current = _private.backend_variable(variable)
        if not isinstance(current, ShardedVariable) or current.layout.kind is not None:
            continue
        if is_vocabulary_layout(current.layout.compute):
            layer_patch.apply(layer_patch.TABLE_READ, variable, functools.partial(_read_function, variable))
    for metric in _private.compiled_metrics(model):
        if _private.metric_function(metric) in _METRICS:
            make = functools.partial(_update_function, metric, mesh=mesh)
            layer_patch.apply(layer_patch.METRIC_UPDATE, metric, make)
