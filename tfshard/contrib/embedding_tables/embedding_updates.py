"""Updates of embedding tables by the rows that a step has looked up.

The gradient of a table is sharded like the batch (`embedding_lookups`). Each device sums its local gradients of each
row and sends the sum to the device that stores the row (exchanges.py). Each device runs the optimizer's update function
on its local rows: these rows are all that the function reads and writes of the table and of its slots (`SparseRows`).

Keras squares a sparse gradient before it sums repeated rows. With `sparse="keras"` the devices also send the sums of
these squares. The sums replace the square that the update function computes.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.contrib.embedding_tables import embedding_lookups, exchanges, sparse_optimizers
from tfshard.contrib.embedding_tables.sparse_rows import SparseRows
from tfshard.contrib.embedding_tables.table_reads import check_compiled, reads_of
from tfshard.contrib.embedding_tables.table_rows import TableRows
from tfshard.devices import local_shards
from tfshard.errors import StrategyError
from tfshard.layouts.axes import axis_sizes
from tfshard.operations.registry import rewrite_rule
from tfshard.storage import optimizer_kinds, steps
from tfshard.storage.steps import Step
from tfshard.storage.variables import ShardedVariable


def check(optimizer: keras.optimizers.Optimizer, table: ShardedVariable, *, is_lazy: bool) -> None:
    """Raise `StrategyError` if an optimizer, without the optimizers that it wraps, cannot update a table."""
    what = None
    if not optimizer_kinds.is_elementwise(optimizer):
        what = (
            "is not known to update element by element. Use SGD, Adagrad, Adam or another elementwise optimizer of "
            "keras.optimizers. If your own class updates element by element, set its tfshard_elementwise = True"
        )
    elif getattr(optimizer, "gradient_accumulation_steps", None):
        what = "adds up full gradients over several steps. Leave out gradient_accumulation_steps"
    elif getattr(optimizer, "use_ema", False):
        what = "averages full weights. Leave out use_ema"
    elif _clips_full_gradients(optimizer):
        what = "clips gradients by value or by their global norm, which needs full gradients. Use clipnorm, or none"
    elif not is_lazy and not sparse_optimizers.is_known_sparse(optimizer):
        what = "updates rows that occur twice in a batch in a way that tfshard does not know. Use sparse='lazy'"
    elif is_lazy and _private.decays(optimizer, table):
        what = (
            "decays all rows, and with sparse='lazy' a step updates only the rows that it looked up. Call the "
            "optimizer's exclude_from_weight_decay(var_list=[table]) before you build it, leave out weight_decay, or "
            "use sparse='keras'"
        )
    if what is not None:
        raise StrategyError(
            f"Optimizer {type(optimizer).__name__} cannot update embedding table '{table.path}': it {what}; or take "
            "the table out of tables=."
        )


def _clips_full_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    return any(getattr(optimizer, name, None) is not None for name in ("clipvalue", "global_clipnorm"))


def update(
    table: ShardedVariable,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    optimizer: keras.optimizers.Optimizer | None,
    *,
    is_lazy: bool,
) -> Any:
    """Run an optimizer's update function on each device's local rows, in a traced step.

    Args:
        table: The table.
        fn: Takes the table and `args`.
        args: The gradient and other arguments. Empty for a decay of all rows.
        optimizer: The optimizer of the update.
        is_lazy: True to update only the rows that the batch looked up.

    Raises:
        StrategyError: The optimizer or the gradient does not fit an update by rows.
    """
    step = _check_here(table)
    if optimizer is None:
        raise StrategyError(
            f"Embedding table '{table.path}' is updated by something other than a Keras optimizer. Use a Keras "
            "optimizer, or take the table out of tables=."
        )
    check(optimizer, table, is_lazy=is_lazy)
    if args and not isinstance(args[0], tf.IndexedSlices):
        raise StrategyError(
            f"The gradient of embedding table '{table.path}' reached the optimizer as a full matrix. Give the "
            "optimizer the IndexedSlices that the tape returned, or take the table out of tables=. "
            f"Received: {args[0]!r}"
        )
    every = not is_lazy and not sparse_optimizers.leaves_others(optimizer, table)
    if not args and not _private.decays(optimizer, table):
        return None  # The call is weight decay, and the optimizer does not decay the table.
    with local_shards.scope():
        if not args:
            with steps.update_scope(part=_rows_to_update(table, step, None)):
                return fn(table)
        squares = not is_lazy and sparse_optimizers.squares(optimizer)
        local_rows, sums = _sent_to_owners(table, args[0], squares=squares)
        different, where = (None, local_rows) if every else exchanges.distinct(local_rows)
        found = _rows_to_update(table, step, different)
        gradient, *squared = (tf.math.unsorted_segment_sum(each, where, found.count) for each in sums)
        with steps.update_scope(part=found), _squared(gradient, squared):
            return fn(table, gradient, *args[1:])


def _rows_to_update(table: ShardedVariable, step: Step, different: tf.Tensor | None) -> SparseRows:
    """Return the rows that an update changes. If `different` is None, these are all local rows."""
    updates = reads_of(table, step).updates
    found = updates.get(table.storage)
    if different is None:
        if found is None:
            format = table.storage.format
            assert isinstance(format, TableRows)
            found = SparseRows(local_shards.varying(tf.range(format.rows_of_a_device), table.mesh))
    elif found is None:
        found = SparseRows(local_shards.varying(different, table.mesh))
    else:
        raise StrategyError(
            f"Embedding table '{table.path}' is updated twice in a step. Update the table once, or take it out of "
            "tables=."
        )
    updates[table.storage] = found
    return found


@contextlib.contextmanager
def _squared(gradient: tf.Tensor, squared: Sequence[tf.Tensor]) -> Iterator[None]:
    """Open a scope in which an optimizer that squares the gradient gets the sums of Keras's squares of a sparse
    gradient."""
    if not squared:
        yield
        return
    _squares.values = {gradient.ref(): squared[0]}
    try:
        yield
        assert not _squares.values, "Keras's optimizer squares the gradient that it was given, once."
    finally:
        _squares.values = {}


class _Squares(threading.local):
    """The square of a gradient, until the update function asks for it."""

    values: dict[Hashable, tf.Tensor]

    def __init__(self) -> None:
        self.values = {}


_squares = _Squares()


def _updates_table(call: _private.Call) -> bool:
    """An optimizer updates an embedding table with `sparse="keras"`."""
    del call
    return bool(_squares.values)


@rewrite_rule(
    "Square", graph=True, eager=False, gradient="registered", when=_updates_table, sizes="any", local="also",
    fault="squares the sum of the gradients of a row; Keras sums the squares", cases=("two lookups in a table",),
)  # fmt: skip
def square(call: _private.Call) -> tf.Tensor | None:
    """Return the sum of the squares of the gradients that the lookups of a row have."""
    return _squares.values.pop(call.inputs[0].ref(), None)


def _check_here(table: ShardedVariable) -> Step:
    check_compiled(table)
    step = steps.current()
    if step is None or steps.here() is not step.graph:
        raise StrategyError(
            f"Embedding table '{table.path}' is updated in a loop, a branch or a function within a step. An "
            "optimizer that scales the loss does so. Update the table in the step itself, or take it out of tables=."
        )
    return step


def _sent_to_owners(
    table: ShardedVariable, gradient: tf.IndexedSlices, *, squares: bool
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Send a gradient to the devices that store its rows.

    Args:
        table: The table.
        gradient: The gradient, sharded like the batch.
        squares: True to send the sums of the squares, too.

    Returns:
        Numbers of local rows, `(items,)`, int64; and `(items, width)` tensors with the sums of each device for each
        row: of the gradients and, with `squares`, of their squares.
    """
    mesh, format = table.mesh, table.storage.format
    assert isinstance(format, TableRows)
    devices = axis_sizes(mesh).data_size
    ids, where = exchanges.distinct(local_shards.local_rows(gradient.indices, mesh))
    values = local_shards.local_rows(gradient.values, mesh)
    parts = [values, tf.square(values)] if squares else [values]
    sums = [tf.math.unsorted_segment_sum(each, where, tf.size(ids)) for each in parts]
    owner, local_row = embedding_lookups.owners(ids, format, table.layout.spec.shape[0])
    lists = exchanges.Lists.to(owner, math.prod(gradient.indices.shape) // devices, mesh)
    # Rows are sent plus one, since the lists end with zeros.
    came = lists.sent_numbers(local_row + 1)
    given = tf.split(lists.sent(tf.concat(sums, axis=1)), len(sums), axis=2)
    local_rows, *sums = exchanges.flattened(came, given, came > 0)
    return local_rows - 1, sums
