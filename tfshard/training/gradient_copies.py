"""Checks that devices with the same local shard of a gradient computed the same values."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, collectives
from tfshard.devices import batching, clients, messages, transfer
from tfshard.errors import ConsistencyError, StrategyError
from tfshard.graph import batches, inventory
from tfshard.layouts import boxes
from tfshard.layouts.axes import axis_sizes
from tfshard.operations import layer_patch
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.training import attached_model, failures

# The tolerances, relative to the largest number of a gradient. Devices may round sums in different orders.
_TOLERANCE, _TOLERANCE_OF_HALVES = 1e-5, 2e-2


def check_gradients(model: keras.Model, batch: Any, strategy: Any) -> None:
    """Compute the gradients of a batch, and raise `ConsistencyError` unless all copies of a shard are equal.

    The model runs its `train_step`, but its optimizers update nothing. Statistics, seeds and metrics get their earlier
    values back. In a launched run, all clients must call it.

    Args:
        model: A compiled model of the strategy.
        batch: As for `ShardedStrategy.check_consistency`.
        strategy: The `ShardedStrategy`.

    Raises:
        ConsistencyError: Devices or clients hold different gradients.
        StrategyError: The model is not compiled or is in a pipeline, or the batch lacks targets.
    """
    if strategy.pipeline_axes.pipeline is not None or not model.compiled:
        why = "on a pipeline" if model.compiled else "not compiled"
        raise StrategyError(
            "check_consistency computes gradients with the train_step of a compiled model on a mesh without a pipeline "
            f"axis. Leave batch= out, or compile the model on such a mesh. Received: model '{model.name}', which is "
            f"{why}"
        )
    batches.check("check_consistency", model, batch)
    with clients.here().purpose(f"check_consistency of the gradients of model '{model.name}'"):
        found = _gradients(model, batch, strategy)
        for path, gradient in found:
            _check(f"'{path}'", gradient, strategy.mesh)


def _gradients(model: keras.Model, batch: Any, strategy: Any) -> list[tuple[str, tf.Tensor]]:
    """Return (path, gradient) of the variables that a step updates, on the mesh."""
    on_mesh = batching.batch_to_mesh(batch, strategy.mesh, strategy.config.already_sharded)
    _private.symbolic_build(model, batch)
    attached_model.attached(model, strategy).refresh()
    optimizers = inventory.model_optimizers(model)
    paths: list[str] = []

    def traced(data: Any) -> list[tf.Tensor]:
        found: list[tuple[str, tf.Tensor]] = []

        def step(data: Any) -> None:
            with contextlib.ExitStack() as stack:
                for optimizer in optimizers:
                    make = _recorder(optimizer, found, strategy)
                    stack.enter_context(layer_patch.applied(layer_patch.RECORDED_GRADIENTS, optimizer, make))
                model.train_step(data)

        with strategy.extended.results_stay_sharded(), strategy.extended.sending_exactly():
            strategy.run(step, args=(data,))
        paths[:] = [path for path, _ in found]
        return [gradient for _, gradient in found]

    count, strategy.microbatches = strategy.microbatches, 1
    try:
        with _restored(model), failures.translated_errors(f"A step of model '{model.name}'"):
            function = tf.function(traced, jit_compile=False, autograph=False)
            return list(zip(paths, function(on_mesh), strict=True))
    finally:
        strategy.microbatches = count


def _recorder(
    optimizer: keras.optimizers.Optimizer, found: list[tuple[str, tf.Tensor]], strategy: Any
) -> Callable[[Any], Any]:
    """Return a patch of `optimizer.apply` that records gradients and updates nothing."""

    def make(apply: Callable[..., Any]) -> Callable[..., Any]:
        del apply

        def recorded(
            grads: Sequence[tf.Tensor | None], trainable_variables: Sequence[keras.Variable] | None = None
        ) -> Any:
            variables = trainable_variables
            if variables is None:
                variables = _private.optimizer_references(optimizer)
            for gradient, variable in zip(grads, variables, strict=True):
                path = getattr(variable, "path", variable.name)
                # The gradient of a variable of a kind, such as an embedding table, has a form of its own.
                if gradient is not None and strategy.config.kind_at(path) is None:
                    found.append((path, tf.identity(tf.convert_to_tensor(gradient))))
            return optimizer.iterations

        return recorded

    return make


@contextlib.contextmanager
def _restored(model: keras.Model) -> Iterator[None]:
    """Give statistics, seeds and metrics their values back: everything that a step without an update writes."""
    variables = [variable for variable, _ in inventory.owned_variables(model) if not variable.trainable]
    for metric in _private.compiled_metrics(model):
        variables += metric.variables
    generator = _private.global_seed_generator()
    variables += [] if generator is None else [generator.state]
    held: dict[Storage, list[np.ndarray]] = {}
    for variable in variables:
        current = _private.backend_variable(variable)
        if isinstance(current, ShardedVariable) and current.storage not in held:
            held[current.storage] = current.storage.local_copies()
    try:
        yield
    finally:
        for storage, shards in held.items():
            storage.set_local(shards)


def _check(name: str, gradient: tf.Tensor, mesh: dtensor.Mesh) -> None:
    """Raise `ConsistencyError` if two devices of any client hold different values of an element of a gradient."""
    axes = transfer.axes_of(dtensor.fetch_layout(gradient))
    is_wide = gradient.dtype == tf.float64
    dtype: Any = np.float64 if is_wide else np.float32
    tolerance = _TOLERANCE if is_wide or gradient.dtype == tf.float32 else _TOLERANCE_OF_HALVES
    shape = tuple(gradient.shape)
    # The largest and the smallest value of each element on the devices of this client, then of all clients.
    most, least = np.full(shape, -np.inf, dtype), np.full(shape, np.inf, dtype)
    held: list[tuple[str, tuple[slice, ...], np.ndarray]] = []
    for shard, location in zip(messages.unpacked(gradient), mesh.local_device_locations(), strict=True):
        value = np.asarray(shard).astype(dtype)
        value[np.isnan(value)] = np.inf
        box = boxes.shard_box(shape, axes, axis_sizes(mesh), location)
        most[box.slices] = np.maximum(most[box.slices], value)
        least[box.slices] = np.minimum(least[box.slices], value)
        held.append((shard.device.rpartition("device:")[2], box.slices, value))
    highest, lowest = collectives.all_reduce(most, "max"), collectives.all_reduce(least, "min")
    with np.errstate(invalid="ignore"):
        difference = np.where(highest == lowest, 0.0, np.abs(highest - lowest))
    magnitude = np.maximum(np.abs(highest), np.abs(lowest))
    scale = float(np.max(magnitude, initial=0.0, where=np.isfinite(magnitude)))
    if not np.any(difference > tolerance * scale):
        return
    index = np.unravel_index(int(np.argmax(difference)), shape)
    raise ConsistencyError(
        f"The gradient of variable {name} should be the same on all devices that hold it, but it differs: at index "
        f"{tuple(int(each) for each in index)}, {_values_at(index, held)}. Something wrote to only one device: custom "
        "DTensor code, a local_map whose results differ between devices, or a faulty device. Received: layout "
        f"{axes} of the gradient"
    )


def _values_at(index: tuple[Any, ...], held: Sequence[tuple[str, tuple[slice, ...], np.ndarray]]) -> str:
    """Return what each device of each client holds at an index, as text."""
    values = np.full(len(held), np.nan)
    for number, (_, box, value) in enumerate(held):
        inside = tuple(int(each) - part.start for each, part in zip(index, box, strict=True))
        if all(0 <= each < size for each, size in zip(inside, value.shape, strict=True)):
            values[number] = value[inside]
    gathered = collectives.all_gather(values).reshape(-1, len(held))
    names = [device for device, *_ in held]
    several = len(gathered) > 1
    return ", ".join(
        f"device {name}{f' of client {client}' if several else ''} has {value:.7g}"
        for client, row in enumerate(gathered)
        for name, value in zip(names, row, strict=True)
        if not np.isnan(value)
    )
