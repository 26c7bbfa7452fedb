"""Operations that DTensor expands to wrong numbers or not at all, exchanged for others in a step.

Each is exchanged where it is added to a graph or run in eager code, so that layers, losses and gradients need not know.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import expansions, transfer
from tfshard.errors import UnsupportedOperationError
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import (
    branches,
    candidates,
    counts,
    dims,
    draws,
    einsums,
    embedding_lookups,
    embedding_updates,
    joins,
    loops,
    origins,
    products,
    row_functions,
    row_operations,
    rows,
    scatters,
    selects,
    slices,
    unsized,
)
from tfshard.operations.row_operations import ROW_OPERATIONS
from tfshard.storage import steps
from tfshard.storage.write_log import Branch

# What stands for the output of an operation, or None to leave the operation as it is.
Exchange = Callable[[_private.Call], tf.Tensor | list[tf.Tensor] | None]

_SLICES: dict[str, Exchange] = {
    "StridedSlice": slices.full_slice,
    "StridedSliceGrad": slices.full_slice_gradient,
    "XlaDynamicUpdateSlice": slices.slice_update,
}
# DTensor expands them for sizes that it knows.
_UNSIZED_GRADIENTS = ("Conv2DBackpropInput", "Conv3DBackpropInputV2")
_FUNCTIONS = ("If", "StatelessIf", "While", "StatelessWhile")
_DIMS: dict[str, Callable[..., list[tf.Tensor] | None]] = {
    "Split": dims.split,
    "SplitV": dims.split,
    "Pad": dims.pad,
    "PadV2": dims.pad,
}
_SCATTERS: dict[str, Callable[..., tf.Tensor | list[tf.Tensor] | None]] = {
    "ScatterNd": scatters.scatter,
    "TensorScatterUpdate": scatters.tensor_scatter,
    "TensorScatterAdd": scatters.tensor_scatter,
    "GatherNd": scatters.gather,
    "GatherV2": scatters.gather_with_batch_dims,
    "TopKV2": scatters.top_k,
    "Where": scatters.where,
    "SparseToDense": scatters.whole,
    "ComputeAccidentalHits": scatters.whole,
}


# These are exchanged alike where a shape depends on values (unsized.py).
_WITH_ANY_SIZE = frozenset(
    (*_SLICES, *_SCATTERS, *_UNSIZED_GRADIENTS, *draws.TYPES, *candidates.SAMPLERS, "DenseBincount", "TensorListStack")
)


@contextlib.contextmanager
def exchanged(mesh: dtensor.Mesh) -> Iterator[None]:
    """A context for a step on a mesh: while it is traced, or run in eager code."""
    exchange: dict[str, Exchange] = {
        **_SLICES, "Einsum": einsums.without_ellipsis, "Select": selects.with_dims, "SelectV2": selects.with_dims,
    }  # fmt: skip
    if not _private.is_eager():
        exchange["BatchMatMulV3"] = products.of_integers
        exchange["MatMul"] = functools.partial(products.of_samples, mesh=mesh)
        exchange["BatchMatMulV2"] = functools.partial(products.of_twice_the_same, mesh=mesh)
        exchange["Einsum"] = functools.partial(_einsum, mesh=mesh)
        exchange.update(dict.fromkeys(products.COMPARISONS, functools.partial(products.of_each_with_each, mesh=mesh)))
        exchange.update(dict.fromkeys(ROW_OPERATIONS, functools.partial(row_operations.exchange, mesh=mesh)))
        exchange["Tile"] = functools.partial(dims.tile, mesh=mesh)
        for operation, dims_of in _DIMS.items():
            exchange[operation] = functools.partial(dims_of, mesh=mesh)
        exchange["DenseBincount"] = functools.partial(counts.counted, mesh=mesh)
        exchange["ConcatV2"] = functools.partial(embedding_lookups.joined, mesh=mesh)
        exchange.update(dict.fromkeys(dims.OF_SAMPLES, functools.partial(dims.of_samples, mesh=mesh)))
        exchange.update(dict.fromkeys(_UNSIZED_GRADIENTS, functools.partial(_by_each_device, mesh=mesh)))
        exchange["TensorListStack"] = loops.stack
        exchange.update(dict.fromkeys(_REFUSED, _refuse))
    exchange.update(dict.fromkeys(draws.TYPES, functools.partial(draws.draw, mesh=mesh)))
    for operation, function in _SCATTERS.items():
        exchange[operation] = functools.partial(_scattered, function, mesh)
    axes = axis_sizes(mesh)
    if any(axes[axis] > 1 for axis in axes.tensor) and not _private.is_eager():
        exchange["OneHot"] = selects.one_hot
        exchange["Sum"] = dims.sum_of_tiles

    def listed(function: Exchange, call: _private.Call) -> list[tf.Tensor] | None:
        if rows.is_inside(call):
            # Nothing is sharded in there. But DTensor reads beyond the layout of what gets a new axis.
            cut = slices.full_slice(call) if call.type == "StridedSlice" and not unsized.is_unsized(call) else None
            return None if cut is None else [cut]
        is_unsized = unsized.is_unsized(call)
        is_left = is_unsized and call.type not in _WITH_ANY_SIZE and call.type not in _REFUSED
        result = None if is_left else function(call)
        if result is None and is_unsized:
            return unsized.exchange(call, mesh)
        return [result] if tf.is_tensor(result) else result

    otherwise = functools.partial(listed, lambda call: None)

    def bring(tensor: tf.Tensor) -> tf.Tensor:
        if transfer.is_dtensor(tensor):
            return transfer.whole(tensor, mesh)
        return dtensor.copy_to_mesh(tensor, transfer.layout((None,) * tensor.shape.rank, mesh))

    if not _private.is_eager():
        by_rows = functools.partial(joins.rows, mesh=mesh)
        for operation in joins.OPERATIONS:
            before = exchange.get(operation)
            if operation in _SLICES:
                assert before is not None
                exchange[operation] = _first_of(functools.partial(joins.rows_by, before, mesh=mesh), before)
            elif operation in ("ConcatV2", "GatherV2"):
                assert before is not None
                others: list[Exchange] = [functools.partial(dims.concat, mesh=mesh)] if operation == "ConcatV2" else []
                segments: list[Exchange] = [functools.partial(dims.of_segments, mesh=mesh)] if not others else []
                exchange[operation] = _first_of(before, *segments, by_rows, *others)
            else:
                exchange[operation] = by_rows if before is None else _first_of(by_rows, before)
        exchange |= dict.fromkeys(candidates.SAMPLERS, functools.partial(candidates.drawn, mesh=mesh))
        exchange["Pack"] = functools.partial(joins.stack, mesh=mesh)
        exchange["Unpack"] = functools.partial(joins.unstack, mesh=mesh)
        exchange["Reshape"] = functools.partial(joins.reshape, mesh=mesh)

    table: dict[str, Callable[[_private.Call], list[tf.Tensor] | None]] = {
        op: functools.partial(listed, function) for op, function in exchange.items()
    }
    if not _private.is_eager():
        # Of the gradient of a table, also where each device has its own rows.
        table["Square"] = lambda call: embedding_updates.square(call) or otherwise(call)
        table |= loops.EXCHANGES
        table |= dict.fromkeys(_FUNCTIONS, functools.partial(unsized.refuse_function, mesh=mesh))

    def note(operation: tf.Operation) -> None:
        origins.note(operation)
        expansions.allow(operation)

    origins.forget()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_private.exchanged_operations(table, bring, note, otherwise))
        if not _private.is_eager():
            stack.enter_context(_private.constants_brought(bring))
            # DTensor ends the process as it expands a tf.cond's gradient that takes tensors from optionals.
            stack.enter_context(_private.gradients_without_optionals())
            # DTensor refuses lists of which it does not know the shape of an element, such as those of `tf.map_fn`.
            stack.enter_context(_private.lists_with_known_elements())
            stack.enter_context(_private.known_branches(branches.value_of, _both_branches))
            stack.enter_context(row_functions.called_with_rows(mesh))
        yield


def _both_branches(fns: tuple[Branch, Branch], cond: Callable[[Branch, Branch], Any]) -> Any:
    step = steps.current()
    return cond(*fns) if step is None else step.writes.both_branches(fns, cond)


def _scattered(
    function: Callable[..., tf.Tensor | list[tf.Tensor] | None], mesh: dtensor.Mesh, call: _private.Call
) -> tf.Tensor | list[tf.Tensor] | None:
    scatters.check_ranks(call)
    return function(call, mesh=mesh)


def _by_each_device(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor | list[tf.Tensor] | None:
    """The gradient of a convolution of samples whose number depends on values: each device computes all of it."""
    sizes, kernel, gradient = call.inputs
    if not gradient.shape.rank or not unsized.depends_on_values(gradient):
        return dims.of_samples(call, mesh)
    whole = (None,) * gradient.shape.rank

    def all_of_it(gradient: tf.Tensor) -> tf.Tensor:
        return _private.same_operation(call, [sizes, kernel, gradient])[0]

    return transfer.by_device(all_of_it, gradient, whole, whole, mesh)


def _einsum(call: _private.Call, mesh: dtensor.Mesh) -> tf.Tensor | list[tf.Tensor] | None:
    spelled = einsums.without_ellipsis(call)
    return products.of_samples(call, mesh) if spelled is None else spelled


def _first_of(*functions: Exchange) -> Exchange:
    """The first of several that does not leave an operation as it is."""

    def exchange(call: _private.Call) -> tf.Tensor | list[tf.Tensor] | None:
        return next((found for function in functions if (found := function(call)) is not None), None)

    return exchange


_EAGERLY = "Compile the model with run_eagerly=True"
_REFUSED = {
    "PrintV2": f"tf.print: every device would print. {_EAGERLY}, where it prints once, or print in a callback",
    **dict.fromkeys(
        ("PyFunc", "PyFuncStateless", "EagerPyFunc"),
        "a Python function (tf.py_function, tf.numpy_function): every device would call it, with its part of the "
        "values. Write it with TensorFlow operations, or do it in the input pipeline",
    ),
}


def _refuse(call: _private.Call) -> None:
    place = origins.find(call.type)
    raise UnsupportedOperationError(
        f"A compiled step on a mesh cannot have {_REFUSED[call.type]}. It is in {place[-1] if place else 'the step'}"
    )
