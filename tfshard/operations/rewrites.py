"""Rewrite the operations of a step that DTensor expands to wrong numbers or not at all.

An operation is rewritten where TensorFlow adds it to a graph or runs it in eager code, so layers, losses and gradients
need no change. `registry.rewrite_rule` registers the rules of the modules that are imported here, and of extensions.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import expansions, transfer

# For their rules.
from tfshard.operations import (
    branches,
    candidates,
    counts,
    dims,
    draws,
    einsums,
    joins,
    loops,
    origins,
    products,
    refusals,
    registry,
    row_functions,
    row_operations,
    rows,
    scatters,
    selects,
    slices,
    unsized,
)
from tfshard.storage import steps
from tfshard.storage.write_log import Branch

# These have rules.
MODULES = (
    candidates, counts, dims, draws, einsums, joins, loops, products, refusals,
    row_operations, scatters, selects, slices, unsized,
)  # fmt: skip


@contextlib.contextmanager
def rewritten(mesh: dtensor.Mesh) -> Iterator[None]:
    """Open a scope in which a step on a mesh is traced, or run in eager code, with rewritten operations."""

    def bring(tensor: tf.Tensor) -> tf.Tensor:
        if transfer.is_dtensor(tensor):
            return transfer.replicate(tensor, mesh)
        return dtensor.copy_to_mesh(tensor, transfer.layout((None,) * tensor.shape.rank, mesh))

    def note(operation: tf.Operation) -> None:
        origins.note(operation)
        expansions.allow(operation)

    is_eager = _private.is_eager()
    types = registry.rewritten_operations(eager=True) if is_eager else None
    origins.forget()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_private.rewritten_operations(lambda call: rewrite(call, mesh), types, bring, note))
        if not is_eager:
            stack.enter_context(_private.constants_brought(bring))
            # DTensor ends the process as it expands a tf.cond's gradient that takes tensors from optionals.
            stack.enter_context(_private.gradients_without_optionals())
            # DTensor refuses lists, such as the lists of `tf.map_fn`, if it does not know the shape of an element.
            stack.enter_context(_private.lists_with_known_elements())
            stack.enter_context(_private.known_branches(branches.value_of, _both_branches))
            stack.enter_context(row_functions.called_with_rows(mesh))
        yield


def rewrite(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Return the tensors that replace the outputs of an operation, or None to leave the operation."""
    is_local = rows.is_inside(call)
    is_unsized = not is_local and unsized.is_unsized(call)
    rules = [
        rule
        for rule in registry.rules_of(call.type, eager=call.is_eager)
        if rule.sizes == "any" or (rule.sizes == "known" and not is_unsized)
        if rule.local == "also" or is_local == (rule.local == "only")
    ]
    result = registry.first_rewrite(rules, call, mesh)
    return unsized.rewrite(call, mesh) if result is None and is_unsized else result


def _both_branches(fns: tuple[Branch, Branch], cond: Callable[[Branch, Branch], Any]) -> Any:
    step = steps.current()
    return cond(*fns) if step is None else step.writes.both_branches(fns, cond)
