"""Variables in traced functions that belong to no step: `tf.function(model)(x)`, `predict` of a plain model around it.

The function computes on one device, with ordinary tensors. A read joins the devices' shards, and a write assigns them,
as operations of the function. Every call therefore sees the current values, and TensorFlow orders the reads and writes
as for any variable. Tapes differentiate by variables and by activations. An optimizer's update raises an error: a
strategy must say on which mesh to train.
"""

from typing import Protocol

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.devices import clients, transfer
from tfshard.errors import StrategyError, warn
from tfshard.layouts import boxes
from tfshard.layouts.axes import axis_sizes
from tfshard.storage import steps, traced_steps
from tfshard.storage.storage import Storage


class View(Protocol):
    """A variable that lives in a storage: a `ShardedVariable`, as far as it is seen here."""

    path: str
    storage: Storage
    member: int
    trainable: bool

    @property
    def outside_handle(self) -> tf.Tensor:
        """The tensor that tapes watch."""


def is_here() -> bool:
    """Return whether a function is being traced that belongs to no step, and that will run.

    Keras calls layers in separate graphs to learn the shapes of their results. These graphs never run.
    """
    return steps.current() is None and not _private.is_eager() and not _private.in_symbolic_scope()


def is_around_steps() -> bool:
    """Return whether the function that is being traced computes on the mesh, around steps that a strategy runs.

    Its steps and its arguments tell. A function without arguments on the mesh that reads a variable before its first
    step is taken for one that no strategy runs.
    """
    if traced_steps.is_around_steps(tf.compat.v1.get_default_graph()):
        return True
    with tf.init_scope():
        return any(map(transfer.is_dtensor, _private.traced_arguments()))


def read(variable: View) -> tf.Tensor:
    """Return the full value, as an ordinary tensor of the function that is being traced.

    Raises:
        StrategyError: This client of a launched run does not hold all shards of the variable.
    """
    storage = variable.storage
    if not transfer.is_local(_used_axes(storage), storage.mesh):
        raise StrategyError(
            f"Variable '{variable.path}' is read in a function that no ShardedStrategy runs, and no client of a "
            f"launched run holds all of it. {_HOW_TO_RUN}"
        )
    return storage.format.extract(_assembled(storage), variable.member)


def write(variable: View, value: tf.Tensor) -> None:
    """Set the full value in the function that is being traced.

    Raises:
        StrategyError: An optimizer trains the variable, or the run is launched: its clients would not agree on the
            value.
    """
    storage = variable.storage
    if _is_updated(variable):
        raise StrategyError(
            f"Variable '{variable.path}' is sharded, and an optimizer updates it in a function that no "
            f"ShardedStrategy runs. {_HOW_TO_RUN} To exclude it from training, set layer.trainable = False. "
            f"Received: {variable!r}"
        )
    if clients.here().is_launched:
        raise StrategyError(
            f"Variable '{variable.path}' is written in a function that no ShardedStrategy runs, which the clients of a "
            f"launched run cannot do together. {_HOW_TO_RUN}"
        )
    format, sizes = storage.format, axis_sizes(storage.mesh)
    stored = format.insert(lambda: _assembled(storage), variable.member, value)
    for location, handle in storage.handles:
        part = boxes.shard_box(format.shape, format.storage, sizes, location)
        with tf.device(handle.device):
            tf.raw_ops.AssignVariableOp(resource=handle, value=stored[part.slices])


def watched(variable: View, value: tf.Tensor) -> tf.Tensor:
    """Return a value that was read, with the gradient of a read of a `tf.Variable`.

    Tapes watch a trainable variable. They then record the operations that use it, and differentiate by it and by
    activations.
    """
    if not variable.trainable:
        return value
    variable.storage.read_by_eager_step = False  # A gradient is taken by the last read.
    _private.record_outside_access(variable)
    if _private.is_eager():
        return _private.with_gradient_to(variable.outside_handle, value)
    graph = tf.compat.v1.get_default_graph()
    function = _private.function_of_flow(graph)
    if function is graph:
        return _private.with_gradient_to(variable.outside_handle, value)
    # The gradient of a loop or a branch begins with zeros in the shape of its inputs. A resource without a value has no
    # shape for the zeros. The loop therefore takes a value that was read in front of it.
    with function.as_default():
        before = watched(variable, read(variable))
    return _private.with_gradient_to(before, value)


def warn_of_update(variable: View) -> None:
    """Warn once that an optimizer updates sharded variables in eager code that is no step."""
    global _has_warned
    if _has_warned or not _is_updated(variable):
        return
    _has_warned = True
    warn(
        f"An optimizer updates variable '{variable.path}' in eager code that no ShardedStrategy runs: each value is "
        f"gathered on the host and sent back, one after the other. {_HOW_TO_RUN}"
    )


def _is_updated(variable: View) -> bool:
    """Return whether an optimizer is updating, and the variable is trainable."""
    return variable.trainable and any(isinstance(c, keras.optimizers.Optimizer) for c in _private.scope_callers())


_has_warned = False
_HOW_TO_RUN = (
    "Compile the model that is called with the same strategy, tfshard.as_distributed(model).compile(..., "
    "strategy=strategy), and use its fit, evaluate and predict; or call your function with strategy.run(...)."
)


def _used_axes(storage: Storage) -> tuple[str, ...]:
    return tuple(axis for axis in storage.mesh.dim_names if axis in storage.format.storage)


def _in_shape(shard: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Return a shard that was read from its resource, with the shape of the shard.

    DTensor describes the resource as one of the full variable, and TensorFlow uses the shapes that it knows before a
    function runs. The gradient by a convolution's kernel would then take a shard for several kernels that were joined.
    An optional value has the shape that its reader asks for.
    """
    optional = tf.raw_ops.OptionalFromValue(components=[shard])
    (known,) = tf.raw_ops.OptionalGetValue(optional=optional, output_types=[shard.dtype], output_shapes=[shape])
    return known


def _assembled(storage: Storage) -> tf.Tensor:
    """Return the full stored tensor. If devices store equal shards, only the first of these shards is read."""
    used = _used_axes(storage)
    shards: dict[tuple[int, ...], tf.Tensor] = {}
    for location, handle in storage.handles:
        part = tuple(location[axis] for axis in used)
        if part not in shards:
            with tf.device(handle.device):
                shard = tf.raw_ops.ReadVariableOp(resource=handle, dtype=storage.buffer.dtype)
                shards[part] = _in_shape(shard, storage.shard_shape)
    # Join along the last axis first. The remaining shards are then sharded over the axes before it.
    for number in reversed(range(len(used))):
        dim = storage.format.storage.index(used[number])
        joined: dict[tuple[int, ...], list[tf.Tensor]] = {}
        for part in sorted(shards):
            joined.setdefault(part[:number], []).append(shards[part])
        shards = {part: tf.concat(parts, axis=dim) for part, parts in joined.items()}
    (full,) = shards.values()
    full.set_shape(storage.buffer.shape)
    return full
