"""local_map: run a function on each device's local shards. psum: sum local tensors over devices.

PyTorch calls it `local_map` (torch.distributed.tensor.experimental), JAX "shard_map".

devices/local_shards.py keeps DTensor from expanding local operations. operations/rows.py is the same for functions of
the rows of a batch, which need no collective.

Gradients follow the rule of JAX's "shard_map". The gradient of an output is divided by the number of devices that hold
the same shard of the output. The gradient of an input is summed over the devices that hold the same shard of the input.
The gradient of `psum` is `psum`.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.errors import LayoutError, UnsupportedOperationError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import programs

Layouts: TypeAlias = Sequence[Sequence[str | None] | None]


@dataclasses.dataclass(frozen=True)
class _Map:
    """A call of `local_map` while it is traced.

    Attributes:
        mesh: The mesh; None on one device.
        sizes: The size of each axis that the layouts name. It is 1 on one device, and if the axis does not divide a dim
            that it should shard.
        is_compiled: True if XLA compiles the function.
    """

    mesh: dtensor.Mesh | None
    sizes: dict[str, int]
    is_compiled: bool = False

    def copies(self, layout: Axes) -> int:
        """Return how many devices hold the same shard of a tensor in `layout`."""
        return math.prod(size for axis, size in self.sizes.items() if axis not in layout)

    def sharded(self, layout: Axes) -> Axes:
        """Return the layout without the axes that have size 1 here."""
        return tuple(None if axis is None or self.sizes[axis] == 1 else axis for axis in layout)


_state = threading.local()


@contextlib.contextmanager
def _tracing(call: _Map) -> Iterator[None]:
    outer = getattr(_state, "call", None)
    _state.call = call
    try:
        yield
    finally:
        _state.call = outer


def local_map(
    fn: Callable[..., Any],
    in_layouts: Layouts,
    out_layouts: Layouts,
    mesh: dtensor.Mesh | None = None,
    *,
    jit_compile: bool = False,
) -> Callable[..., Any]:
    """Wrap a function so that each device runs it on its local shards.

    Use it for an operation that DTensor cannot expand, or for custom communication. Inside `fn`, tensors have their
    local shapes, and no tensor moves between devices except by `tfshard.psum`. Call the result in a compiled step: in a
    layer, a loss, or a `strategy.run`. If no ShardedStrategy is active and `mesh` is None, the result calls `fn` on the
    full tensors. The model then gives the same numbers on one device.

    An axis may not divide the dim that it should shard, as with the last batch of an epoch. Then every device computes
    with the full dim, and `psum` over that axis returns its argument.

    Args:
        fn: Takes one tensor for each entry of `in_layouts`, and returns one tensor, or a list or tuple with one for
            each entry of `out_layouts`. It may not use tensors or variables from outside, draw random numbers, or
            write to a variable: pass values as arguments.
        in_layouts: For each argument, the mesh axis that shards each dim, or None for a dim that is not sharded.
            Missing entries at the end are None; `()` or None is a replicated tensor.
        out_layouts: The layout of each result. `fn` must return equal values on all devices along axes that a result's
            layout does not name.
        mesh: The mesh. By default the mesh of the strategy in scope.
        jit_compile: True if XLA compiles `fn`, for the mesh's type of device: each device then runs it as one program,
            and its gradient as another, which computes `fn` again. All shapes must be known, and `fn` may not call
            `psum`.

    Returns:
        A function of global tensors that returns global tensors. You can differentiate it to any order.

    Raises:
        LayoutError: An axis that the mesh does not have, a layout longer than the tensor's rank, or a layout that names
            an axis twice; a wrong number of arguments or results.
        UnsupportedOperationError: `fn` uses a tensor from outside or draws random numbers; an eager step calls it; XLA
            cannot compile it.

    Example: a normalization by the norm of the full batch.

    >>> import tensorflow as tf, tfshard
    >>> def normalize(x, scale):
    ...     total = tfshard.psum(tf.reduce_sum(x * x), "batch")
    ...     return x * scale / tf.sqrt(total)
    >>> normalize = tfshard.local_map(normalize, in_layouts=[("batch", None), ()], out_layouts=[("batch", None)])
    >>> normalize(tf.constant([[3.0], [4.0]]), tf.constant(10.0)).numpy().tolist()
    [[6.0], [8.0]]
    """
    ins = _checked_list("in_layouts", in_layouts)
    outs = _checked_list("out_layouts", out_layouts)

    compiled = tf.function(fn, autograph=False, jit_compile=True) if jit_compile else fn

    def mapped(*arguments: Any) -> Any:
        if len(arguments) != len(ins):
            raise LayoutError(
                f"local_map needs one argument for each entry of in_layouts, {len(ins)}. Received: {len(arguments)}"
            )
        tensors = [tf.convert_to_tensor(each) for each in arguments]
        on = _mesh_of_scope() if mesh is None else mesh
        given = [
            _padded(layout, tensor.shape, "argument", n)
            for n, (layout, tensor) in enumerate(zip(ins, tensors, strict=True))
        ]
        if on is None:
            with _tracing(_Map(None, dict.fromkeys(_named([*ins, *outs]), 1), jit_compile)):
                return compiled(*tensors)
        call = _call(on, given, outs, tensors, jit_compile)
        if tf.executing_eagerly():
            raise UnsupportedOperationError(
                "local_map runs in compiled steps: DTensor has no local shards in eager code. Compile the model "
                "without run_eagerly=True, or give strategy.run a tf.function."
            )
        return _run(fn, call, given, outs, tensors)

    return mapped


def psum(value: Any, axis: str) -> Any:
    """Sum a local tensor over the devices along a mesh axis. Call it inside a function of `tfshard.local_map`.

    Args:
        value: A tensor of a floating or integer dtype, or a structure of them, in local shapes.
        axis: An axis that the layouts of the `local_map` name.

    Returns:
        The sum, of the same shape and dtype, on each of these devices.

    Raises:
        LayoutError: The call is not inside `local_map`, or no layout of it names `axis`.
    """
    call: _Map | None = getattr(_state, "call", None)
    if call is None:
        raise LayoutError("psum adds up local tensors: call it inside a function of tfshard.local_map.")
    if axis not in call.sizes:
        raise LayoutError(
            f"psum needs an axis that a layout of this local_map names. Axes in the layouts: {tuple(call.sizes)}. "
            f"Received: axis={axis!r}"
        )
    on = call.mesh
    if on is None or call.sizes[axis] == 1:
        return value
    if call.is_compiled:
        raise UnsupportedOperationError(
            "psum cannot run in a function that XLA compiles: a program of one device sends nothing. Return the local "
            "tensor with a layout that names the axis, and sum it after local_map, or leave out jit_compile=True. "
            f"Received: axis={axis!r}"
        )
    return tf.nest.map_structure(lambda each: _psum(tf.convert_to_tensor(each), (axis,), on), value)


# --- checks ------------------------------------------------------------------------------------------


def _checked_list(name: str, layouts: Any) -> list[Axes]:
    is_iterable = isinstance(layouts, Iterable) and not isinstance(layouts, str)
    given = list(layouts) if is_iterable else [layouts]
    if not is_iterable or any(isinstance(each, str) for each in given):
        raise LayoutError(
            f"{name} must be a list of layouts, one for each {'argument' if name == 'in_layouts' else 'result'}: for "
            "a single one, [('batch',)]. A layout is a tuple with a mesh axis or None for each dim. "
            f"Received: {name}={layouts!r}"
        )
    return [_checked(layout) for layout in given]


def _checked(layout: Sequence[str | None] | None) -> Axes:
    if not (layout is None or isinstance(layout, (list, tuple))):
        raise LayoutError(
            "A layout of local_map is a tuple with a mesh axis or None for each dim, such as ('batch', None). "
            f"Received: {layout!r}"
        )
    axes = tuple(layout or ())
    named = [axis for axis in axes if axis is not None]
    if len(named) != len(set(named)):
        raise LayoutError(f"An axis can shard only one dim of a tensor. Received: {axes}")
    return axes


def _padded(layout: Axes, shape: tf.TensorShape, what: str, number: int) -> Axes:
    if shape.rank is None or len(layout) > shape.rank:
        raise LayoutError(
            f"The layout of {what} {number} of local_map has more entries than the tensor has dims. "
            f"Received: layout={layout}, shape={shape}"
        )
    return (*layout, *(None,) * (shape.rank - len(layout)))


def _named(layouts: Sequence[Axes]) -> list[str]:
    return list(dict.fromkeys(axis for layout in layouts for axis in layout if axis is not None))


def _call(
    mesh: dtensor.Mesh, ins: Sequence[Axes], outs: Sequence[Axes], tensors: Sequence[tf.Tensor], is_compiled: bool
) -> _Map:
    known, named = axis_sizes(mesh), _named([*ins, *outs])
    for axis in named:
        if axis not in known:
            raise LayoutError(
                f"A layout of local_map names axis {axis!r}, which the mesh does not have. Mesh axes: {tuple(known)}. "
                f"Received: in_layouts={list(ins)}, out_layouts={list(outs)}"
            )
    sizes = {axis: known[axis] for axis in named}
    for layout, tensor in zip(ins, tensors, strict=True):
        for sharding, size in zip(layout, tensor.shape, strict=True):
            if sharding is not None and (size is None or size % known[sharding]):
                sizes[sharding] = 1
    return _Map(mesh, sizes, is_compiled)


def _mesh_of_scope() -> dtensor.Mesh | None:
    return getattr(tf.distribute.get_strategy(), "mesh", None)


# --- running -----------------------------------------------------------------------------------------


def _run(
    fn: Callable[..., Any], call: _Map, ins: Sequence[Axes], outs: Sequence[Axes], tensors: Sequence[tf.Tensor]
) -> Any:
    assert call.mesh is not None
    mesh = call.mesh
    used = [call.sharded(layout) for layout in ins]
    specs = [
        tf.TensorSpec(
            [size if axis is None else size // call.sizes[axis] for size, axis in zip(t.shape, layout, strict=True)],
            t.dtype,
        )
        for t, layout in zip(tensors, used, strict=True)
    ]

    def local(*arguments: tf.Tensor) -> Any:
        with _tracing(call):
            return fn(*arguments)

    local.__name__ = local_shards.NAME
    traced = tf.function(local, autograph=False).get_concrete_function(*specs)
    _check_function(traced)
    results = tf.nest.flatten(traced.structured_outputs)
    if len(results) != len(outs):
        raise LayoutError(
            f"The function of local_map returned {len(results)} tensors for {len(outs)} entries of out_layouts."
        )
    leaving = [
        call.sharded(_padded(layout, result.shape, "result", number))
        for number, (layout, result) in enumerate(zip(outs, results, strict=True))
    ]
    with local_shards.scope():
        entered = [_to_local(each, layout, call, mesh) for each, layout in zip(tensors, used, strict=True)]
        if call.is_compiled:
            made = programs.call(local, entered, mesh)
        else:
            made = tf.nest.flatten(traced(*entered))
        left = [_from_local(each, layout, call, mesh) for each, layout in zip(made, leaving, strict=True)]
    return tf.nest.pack_sequence_as(traced.structured_outputs, left)


def _check_function(traced: Any) -> None:
    if traced.captured_inputs:
        found = list(dict.fromkeys(map(_described, traced.captured_inputs)))
        raise UnsupportedOperationError(
            "The function of local_map uses a tensor or variable from outside. Inside, tensors have local shapes: pass "
            f"the value as an argument, with its layout. Received: a function that captures {', '.join(found[:3])}"
        )
    types = _private.operation_types(traced.graph)
    random = sorted(types & _private.ALL_RANDOM_OPS)
    if random:
        raise UnsupportedOperationError(
            "The function of local_map draws random numbers: all devices would draw the same. Draw them before the "
            f"call, and pass them as an argument. Received: a function with {random[0]}"
        )


def _described(captured: Any) -> str:
    """Return a captured tensor in words: by its name, which eager tensors lack."""
    if captured.dtype == tf.resource:
        return "a variable"
    name = getattr(captured, "name", None)
    return f"tensor '{name}'" if name else f"a tensor of shape={tuple(captured.shape)}, dtype={captured.dtype.name}"


def _to_local(tensor: tf.Tensor, axes: Axes, call: _Map, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the local shard. Its gradient is summed over the devices that hold the same shard."""
    over = tuple(axis for axis, size in call.sizes.items() if size > 1 and axis not in axes)

    def shard(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
        if not any(axes):
            return transfer.replicate(tensor, mesh)
        with local_shards.scope():
            return local_shards.to_local(transfer.relayout(tensor, axes, mesh), axes, mesh)

    return local_shards.with_gradient(
        shard, lambda upstream, mesh: _from_local(_psum(upstream, over, mesh), axes, call, mesh), tensor, mesh
    )


def _from_local(tensor: tf.Tensor, axes: Axes, call: _Map, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the global tensor. Its gradient is divided by the number of devices that hold the same shard."""
    copies = call.copies(axes)

    def gradient(upstream: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
        local = _to_local(upstream, axes, call, mesh)
        return local / tf.cast(copies, local.dtype) if copies > 1 else local

    return local_shards.with_gradient(
        lambda tensor, mesh: local_shards.from_local(tensor, axes, mesh), gradient, tensor, mesh
    )


def _psum(tensor: tf.Tensor, axes: tuple[str, ...], mesh: dtensor.Mesh) -> tf.Tensor:
    if not axes:
        return tensor

    def total(tensor: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
        replicated = (None,) * tensor.shape.rank
        with local_shards.scope():
            for axis in axes:
                stacked = local_shards.from_local(tf.expand_dims(tensor, 0), (axis, *replicated), mesh)
                tensor = transfer.relayout(tf.reduce_sum(stacked, 0), replicated, mesh)
        return tensor

    return local_shards.with_gradient(total, lambda upstream, mesh: _psum(upstream, axes, mesh), tensor, mesh)
