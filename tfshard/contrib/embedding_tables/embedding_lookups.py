"""Lookups in embedding tables that are stored sharded by rows over the batch axis: devices ask each other for rows.

Each device looks up the ids of its local shard of the batch. It sends each distinct id once, to the device that stores
the row (exchanges.py), and receives the row: two all-to-all, and the maximum of a number. As on one device, the
gradient of a lookup is `IndexedSlices` of the rows that were looked up, sharded like the batch. An update sends the
gradient (`embedding_updates`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.contrib.embedding_tables import exchanges, sparse_rows
from tfshard.contrib.embedding_tables.exchanges import ids_of_a_device
from tfshard.contrib.embedding_tables.table_reads import check_compiled, reads_of
from tfshard.contrib.embedding_tables.table_rows import TableRows
from tfshard.devices import local_shards, transfer
from tfshard.errors import StrategyError
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import layer_patch, rows
from tfshard.operations.conditions import batch_axis_has_devices
from tfshard.operations.registry import rewrite_rule
from tfshard.storage import recomputing, steps
from tfshard.storage.steps import Step
from tfshard.storage.variables import ShardedVariable

# In the names of gradients of lookups.
_GRADIENT = "gradient_of_rows"


ROWS_READ = layer_patch.register(
    layer_patch.Change(
        of="embedding tables of `tables=`",
        attribute="sparse_read",
        why="asks the devices that have the rows, where `tf.gather` would gather the table",
        module="embedding_lookups",
        knows_mesh=True,
    )
)


def install(variable: keras.Variable) -> None:
    """Patch an embedding table on a mesh: lookups ask other devices for rows."""
    layer_patch.apply(ROWS_READ, variable, functools.partial(_read_function, variable))


def is_table(variable: Any) -> TypeGuard[ShardedVariable]:
    """Return True if a backend variable is stored as an embedding table."""
    return isinstance(variable, ShardedVariable) and isinstance(variable.storage.format, TableRows)


def _read_function(variable: keras.Variable, original: None) -> Callable[..., tf.Tensor]:
    """Return the method `sparse_read`, which Keras's variables do not have."""
    assert original is None
    return functools.partial(_read_rows, variable)


def _read_rows(variable: keras.Variable, ids: Any, name: str | None = None) -> tf.Tensor:
    """Replace the method that `tf.gather(variable, ids)` calls (TensorFlow's protocol for resource variables)."""
    del name
    current = _private.backend_variable(variable)
    step = steps.current()
    if step is None or not is_table(current):
        # tf.gather then reads the full variable: Keras learns shapes, or no strategy runs the function.
        raise AttributeError("sparse_read")
    try:
        found = lookup(current, tf.convert_to_tensor(ids))
    except AttributeError as error:
        # tf.gather would take an AttributeError for a variable without `sparse_read`.
        raise RuntimeError(f"A lookup in embedding table '{current.path}' failed") from error
    # Under mixed precision, Keras casts a variable when it reads it. The lookup casts the rows.
    return tf.cast(found, variable.value.dtype)


def lookup(table: ShardedVariable, ids: tf.Tensor) -> tf.Tensor:
    """Look up rows of an embedding table, in a traced step.

    Args:
        table: The table, `(rows, width)`.
        ids: Integers of any shape, sharded over the batch axis or replicated. An id outside of 0 to rows - 1 raises a
            TensorFlow error when the step runs on CPU, and gives zeros on GPU, as on one device.

    Returns:
        `(*ids.shape, width)`, sharded like `ids`.

    Raises:
        StrategyError: The step is eager, has microbatches, has updated the table, or looks up in a loop, a branch or a
            function; or the shape of the ids is unknown.
    """
    check_compiled(table)
    step = steps.current()
    assert step is not None
    _check(table, ids, step)
    with tf.name_scope(recomputing.STAYS):
        return _looked_up(table, ids, step)


def _looked_up(table: ShardedVariable, ids: tf.Tensor, step: Step) -> tf.Tensor:
    mesh, shape, width = table.mesh, tuple(ids.shape), table.layout.spec.shape[1]
    devices, count = axis_sizes(mesh).data_size, math.prod(shape)
    total = ids_of_a_device(shape, devices) * devices
    # Position ids do not come from the batch: ids that are the same for all samples are replicated.
    is_shared_out = bool(shape) and shape[0] % devices == 0 and rows.comes_from_batch(ids)
    line = _in_line(tf.cast(ids, tf.int64), is_shared_out, mesh)
    if total > count:  # Filled up with the first ids, with zero gradients.
        line = transfer.replicate(tf.gather(line, np.arange(total) % count), mesh)
    line = _sharded(line, mesh)

    def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
        with tf.name_scope(_GRADIENT):
            values = _in_line(tf.cast(upstream, table.dtype), is_shared_out, mesh, inner=1)
            if total > count:
                values = transfer.replicate(tf.pad(values, [[0, total - count], [0, 0]]), mesh)
            return tf.IndexedSlices(
                tf.identity(_sharded(values, mesh)),
                tf.identity(_sharded(line, mesh)),
                tf.constant(table.layout.spec.shape, tf.int32),
            )

    def apply(source: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.IndexedSlices]]:
        del source
        with _private.stop_recording():
            found = _found(table, line, step)
            if not is_shared_out:
                found = transfer.relayout(found, (None, None), mesh)[:count]
            found = tf.reshape(found, (*shape, width))
            axis = axis_sizes(mesh).data if is_shared_out and devices > 1 else None
            return transfer.relayout(found, (axis, *(None,) * len(shape)), mesh), gradient

    source = reads_of(table, step).gradient_source(table)
    if table.trainable:
        step.reads.note(table, source)
        _private.record_variable_access(table)
    return tf.custom_gradient(apply)(source)


def _check(table: ShardedVariable, ids: tf.Tensor, step: Step) -> None:
    """Raise `StrategyError` if the step cannot look up these ids."""
    what = None
    if step.is_microbatch:
        what = "in a step with microbatches. Set strategy.microbatches = 1"
    elif steps.here() is not step.graph:
        what = "in a loop, a branch or a function within a step. Look up its rows before it"
    elif table.storage in reads_of(table, step).updates or steps.open_update() is not None:
        what = "after its update in the same step. Look up its rows before it"
    elif not ids.shape.is_fully_defined():
        what = f"with ids of a shape that is not known while the step is traced: {ids.shape}. Give them a shape"
    if what is not None:
        raise StrategyError(f"Embedding table '{table.path}' is looked up {what}, or take it out of tables=.")


def _in_line(tensor: tf.Tensor, is_shared_out: bool, mesh: dtensor.Mesh, inner: int = 0) -> tf.Tensor:
    """Merge the dims of a tensor in front of the last `inner` ones into one."""
    tensor = transfer.by_sample(tensor, mesh) if is_shared_out else transfer.replicate(tensor, mesh)
    kept = tensor.shape[tensor.shape.rank - inner :]
    return tf.reshape(tensor, (math.prod(tensor.shape[: tensor.shape.rank - inner]), *kept))


def _sharded(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """Shard a tensor over the batch axis, which divides the first dim."""
    axis = axis_sizes(mesh).data if axis_sizes(mesh).data_size > 1 else None
    return transfer.relayout(tensor, (axis, *(None,) * (tensor.shape.rank - 1)), mesh)


def owners(ids: tf.Tensor, format: TableRows, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the device that stores the row of each id, and the row's number on that device: int64.

    An invalid id gives a row number that no device has, and TensorFlow's kernel names it in its error.

    Args:
        ids: Any int64 numbers.
        format: The format of the table.
        count: The number of rows of the table.
    """
    each = format.rows_of_a_device
    owner = tf.clip_by_value(ids // each, 0, format.devices - 1)
    is_one = (ids >= 0) & (ids < count)
    local_row = tf.where(is_one, ids - owner * each, tf.clip_by_value(tf.where(ids < 0, _NO_ROW, ids), each, _NO_ROW))
    return owner, local_row


_NO_ROW = np.int64(np.iinfo(np.int32).max - 1)


def _found(table: ShardedVariable, line: tf.Tensor, step: Step) -> tf.Tensor:
    """Exchange ids and rows. Return the rows of the ids, one behind the other, sharded like the ids."""
    mesh, format, width = table.mesh, table.storage.format, table.layout.spec.shape[1]
    assert isinstance(format, TableRows)
    devices = axis_sizes(mesh).data_size
    each = line.shape[0] // devices
    with local_shards.scope():
        ids, where = exchanges.distinct(local_shards.local_rows(line, mesh))
        owner, local_row = owners(ids, format, table.layout.spec.shape[0])
        lists = exchanges.Lists.to(owner, each, mesh)
        # Ids are sent plus one, since the lists end with zeros.
        asked = lists.sent_numbers(local_row + 1) - 1
        given = sparse_rows.read(table.storage, tf.maximum(asked, 0))
        reads_of(table, step).rows_read[table.storage].append(given)
        found = tf.ensure_shape(tf.gather(lists.answered(given), where), (each, width))
        found = transfer.relayout(found, (None, None), mesh)
        return rows.from_local(found, mesh) if devices > 1 else found


# TensorFlow's tape concatenates the values and the indices of `IndexedSlices` in the same order. Any order would do.
@rewrite_rule(
    "ConcatV2", graph=True, eager=False, gradient="registered", when=batch_axis_has_devices,
    fault="gathers the gradients of several lookups in an embedding table", cases=("two lookups in a table",),
)  # fmt: skip
def concat_gradients(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor | None:
    """Concatenate the local rows of the gradients on each device."""
    parts, axis = call.inputs[:-1], tf.get_static_value(call.inputs[-1])
    is_gradient = all(isinstance(each, tf.Tensor) and _GRADIENT in each.op.name for each in parts)
    if axis != 0 or not is_gradient:
        return None
    with local_shards.scope():
        line = tf.concat([local_shards.local_rows(each, mesh) for each in parts], axis=0)
        line = transfer.relayout(line, (None,) * line.shape.rank, mesh)
        return rows.from_local(line, mesh)
