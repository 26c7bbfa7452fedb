"""`keras.distribution` on TensorFlow: each Keras distribution has a strategy, which is in use while it is active.

Keras on JAX asks the active distribution for the layout of each new variable, of each layer's output and of each batch.
On TensorFlow, new variables, new models and `compile` ask for the strategy here. `devices/keras_devices.py` has the
devices and meshes.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import batching, keras_devices, mesh_tensors, process_lock, transfer
from tfshard.errors import LayoutError, StrategyError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.parameter_analyzer import DEFAULT
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import output_layouts
from tfshard.storage import steps
from tfshard.training import births
from tfshard.training.strategy import ShardedStrategy

# A strategy refers to no distribution: it has its own copy of the layouts.
_strategies: "_private.WeakIdentityDict[_private.Distribution, ShardedStrategy]" = _private.WeakIdentityDict()

# The arguments of a strategy that the distribution decides.
_DECIDED = ("mesh", "layout_map", "already_sharded")


def keras_distribution(distribution: _private.Distribution, **options: Any) -> _private.Distribution:
    """Give a Keras distribution the options of a `tfshard.ShardedStrategy`, such as `zero_stage=3`.

    Without this call, a distribution stores variables as Keras on JAX does (`zero_stage=0`): in the layouts of its
    layout map, which may shard them over the data axis too, and all others replicated.

    Args:
        distribution: A `keras.distribution.DataParallel` or `ModelParallel` that has no variables yet.
        **options: The arguments of `tfshard.ShardedStrategy`, except `mesh`, `layout_map` and `already_sharded`, which
            the distribution decides.

    Returns:
        The same object.

    Raises:
        StrategyError: An option is unknown, or the distribution is in use already.

    Example:

    >>> import keras, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> mesh = keras.distribution.DeviceMesh((4,), ["data"], [f"cpu:{i}" for i in range(4)])
    >>> distribution = tfshard.keras_distribution(keras.distribution.DataParallel(mesh), zero_stage=3)
    >>> with distribution.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    ...     model.compile("sgd", "mse")
    >>> tfshard.strategy_of(distribution).zero_stage
    3
    """
    if not isinstance(distribution, _private.Distribution):
        raise StrategyError(
            "keras_distribution takes a keras.distribution.DataParallel or ModelParallel. Received: "
            f"distribution={distribution!r} (of type {type(distribution)})"
        )
    known = [name for name in inspect.signature(ShardedStrategy).parameters if name not in _DECIDED]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise StrategyError(
            f"Unknown options of a Keras distribution: {unknown}. Options: {known}. The distribution itself decides "
            f"{_DECIDED}. Received: {options}"
        )
    if distribution in _strategies:
        raise StrategyError(
            "The distribution is in use already. Call tfshard.keras_distribution before set_distribution, and before "
            f"the first model. Received: distribution={distribution!r}, options={options}"
        )
    _strategies[distribution] = _strategy(distribution, options)
    return distribution


def strategy_of(distribution: _private.Distribution | None = None) -> ShardedStrategy:
    """Return the `tfshard.ShardedStrategy` of a Keras distribution, for `report`, `plan`, `run` and others.

    Args:
        distribution: The distribution. By default the active one.

    Raises:
        StrategyError: No distribution is active.
        MeshError: The devices of its mesh do not exist.
        LayoutError: Its layout map does not fit its mesh.
    """
    distribution = keras.distribution.distribution() if distribution is None else distribution
    if distribution is None:
        raise StrategyError(
            "No Keras distribution is active. Call keras.distribution.set_distribution(distribution), or give one to "
            "strategy_of. Received: distribution=None"
        )
    found = _strategies.get(distribution)
    if found is None:
        found = _strategies[distribution] = _strategy(distribution, {})
    return found


def _strategy(distribution: _private.Distribution, options: dict[str, Any]) -> ShardedStrategy:
    batch = distribution.batch_dim_name
    mesh = keras_devices.mesh_of(distribution.device_mesh, batch)
    axes = axis_sizes(mesh)
    if isinstance(distribution, keras.distribution.ModelParallel):
        layout_map = LayoutMap.from_any(distribution, axes).storing()
    else:
        layout_map = LayoutMap()
        layout_map.replicated(".*", optional=True)
    # A group is stored in one way, and the layout map may store each variable in another.
    by_rule = any(axes.data in rule.axes for rule in layout_map.values())
    chosen = {"zero_stage": 0, "analyzer": None if by_rule else DEFAULT, **options}
    return ShardedStrategy(mesh, layout_map, already_sharded=keras_devices.num_processes() > 1, **chosen)


def active_strategy() -> ShardedStrategy | None:
    """Return the strategy of the active Keras distribution. None without one, or under another strategy's scope."""
    if keras.distribution.distribution() is None or tf.distribute.has_strategy():
        return None
    return strategy_of()


@contextlib.contextmanager
def _creating(variable: keras.Variable) -> Iterator[None]:
    """Create the value of a new variable under the strategy of the active distribution."""
    strategy = strategy_of()
    if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not strategy:
        yield
        return
    _note_layout(variable, strategy)
    # Not `strategy.scope()`, which attaches all models when it ends: they may not be complete.
    with tf.distribute.Strategy.scope(strategy):
        yield


def _note_layout(variable: keras.Variable, strategy: ShardedStrategy) -> None:
    """Give a new variable the layout of the active distribution.

    The strategy's layout map gets a rule for the variable if the map would give another layout. This happens if the
    user gave the variable a layout, if the distribution is of a user's class, or if its layout map has changed.
    """
    if any(isinstance(caller, keras.optimizers.Optimizer) for caller in _private.scope_callers()):
        return
    distribution = keras.distribution.distribution()
    layout = distribution.get_variable_layout(variable)
    if layout is None:
        return
    spec = VariableSpec(path=variable.path, shape=tuple(variable.shape))
    given, mesh = getattr(layout, "axes", None), getattr(layout, "device_mesh", None)
    if given is None or len(given) > len(spec.shape):
        raise LayoutError(
            f"The layout of variable '{variable.path}' must be a keras.distribution.TensorLayout with at most "
            f"{len(spec.shape)} axes, for shape={spec.shape}. Received: {layout!r}"
        )
    if mesh is not None and _sizes(mesh) != _sizes(distribution.device_mesh):
        raise LayoutError(
            f"The layout of variable '{variable.path}' has another mesh than the active distribution. Give it the "
            f"distribution's mesh: {distribution.device_mesh!r}. Received: {layout!r}"
        )
    _private.set_explicit_layout(variable, layout)
    axes = (*given, *(None,) * (len(spec.shape) - len(given)))
    match = strategy.layout_map.match(spec)
    if axes != (match[1] if match else (None,) * len(axes)):
        strategy.layout_map.pin(variable.path, axes)


def _sizes(mesh: keras.distribution.DeviceMesh) -> dict[str, int]:
    return {str(name): int(size) for name, size in zip(mesh.axis_names, mesh.shape, strict=True)}


def _note_model(model: keras.Model) -> None:
    """Put a new model under the strategy of the active distribution."""
    strategy = active_strategy()
    if strategy is not None and _private.distribute_strategy(model) is None:
        _private.set_distribute_strategy(model, strategy)


def _prepare(model: keras.Model) -> bool:
    """Give a model that was built under a distribution the methods of sharded models. Returns True if it had none."""
    if not isinstance(_private.distribute_strategy(model), ShardedStrategy):
        return False
    before = type(model)
    for prepare in births.model_preparers:
        prepare(model)
    return type(model) is not before


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Bring a tensor to a layout: the backend of `keras.distribution.distribute_tensor`, and of layers' outputs.

    In a step, this is a DTensor relayout, and the gradient gets the same layout. In eager code, the result is a
    `MeshTensor`. In other functions, and in layers that eager code calls, tensors are on one device, and stay there.

    Args:
        tensor: A tensor or array, or a structure of them.
        layout: A `keras.distribution.TensorLayout` or a DTensor layout. Its axes belong to the first dims; the other
            dims are not sharded. In a step, an axis that does not divide its dim does not shard it.

    Raises:
        LayoutError: The layout has more axes than the tensor has dims; it names an axis that the mesh does not have;
            or, in eager code, an axis does not divide its dim.
    """
    if isinstance(tensor, (list, tuple, dict)):
        return keras.tree.map_structure(lambda each: distribute_tensor(each, layout), tensor)
    if isinstance(tensor, keras.KerasTensor) or _private.in_symbolic_scope():
        return tensor
    if steps.current() is not None:
        strategy = tf.distribute.get_strategy()
        mesh = strategy.mesh if isinstance(strategy, ShardedStrategy) else _mesh_of(layout)
        return output_layouts.pinned(tensor, _axes_of(layout, tensor, mesh), mesh) if tf.is_tensor(tensor) else tensor
    if not _private.is_eager() or _private.current_path():
        return tensor
    mesh = _mesh_of(layout)
    value = tensor.numpy() if isinstance(tensor, mesh_tensors.MeshTensor) else np.asarray(tensor)
    axes = _axes_of(layout, value, mesh)
    sizes = axis_sizes(mesh)
    for dim, axis in enumerate(axes):
        if axis is not None and value.shape[dim] % sizes[axis]:
            raise LayoutError(
                f"Axis '{axis}' of size {sizes[axis]} does not divide dim {dim} of the tensor, which has shape="
                f"{value.shape}. Received: {layout!r}"
            )
    with process_lock.held():
        return mesh_tensors.MeshTensor(transfer.host_to_mesh(value, axes, mesh))


def _mesh_of(layout: Any) -> dtensor.Mesh:
    return layout.mesh if isinstance(layout, dtensor.Layout) else keras_devices.layout_of(layout).mesh


def _axes_of(layout: Any, tensor: Any, mesh: dtensor.Mesh) -> Axes:
    given = transfer.axes_of(layout) if isinstance(layout, dtensor.Layout) else tuple(layout.axes)
    rank = len(tensor.shape)
    sizes = axis_sizes(mesh)
    named = [axis for axis in given if axis is not None]
    if len(given) > rank or any(axis not in sizes for axis in named) or len(set(named)) < len(named):
        raise LayoutError(
            f"The layout does not fit a tensor of shape={tuple(tensor.shape)} on a mesh with the axes {tuple(sizes)}: "
            "it needs at most one axis for each dim, each axis once, and axes of the mesh. Received: "
            f"{layout!r}"
        )
    return (*given, *(None,) * (rank - len(given)))


def distribute_data_input(per_process_batch: Any, layout: Any, batch_dim_name: str | None = None) -> Any:
    """Make a batch on the mesh from the rows of this client: the backend of Keras's function with this name.

    Args:
        per_process_batch: The rows.
        layout: A layout that shards the first dim over the data axis, or nothing.
        batch_dim_name: Not used.
    """
    del batch_dim_name
    if keras_devices.num_processes() == 1:
        return distribute_tensor(per_process_batch, layout)
    mesh = _mesh_of(layout)
    axes = _axes_of(layout, per_process_batch, mesh)
    if axes != batching.batch_axes(tuple(per_process_batch.shape), mesh) or not any(axes):
        raise LayoutError(
            "In a launched run, a batch can be sharded over the data axis in its first dim only. Received: "
            f"{layout!r} for a batch of shape={tuple(per_process_batch.shape)}"
        )
    with process_lock.held():
        on_mesh, _ = batching.batch_to_mesh((per_process_batch, {}), mesh, True)
    return mesh_tensors.wrapped(on_mesh)


_private.set_distribution_backend(
    {
        "list_devices": keras_devices.list_devices,
        "get_device_count": keras_devices.get_device_count,
        "initialize": keras_devices.initialize,
        "num_processes": keras_devices.num_processes,
        "process_id": keras_devices.process_id,
        "distribute_tensor": distribute_tensor,
        "distribute_variable": distribute_tensor,
        "distribute_value": distribute_tensor,
        "distribute_data_input": distribute_data_input,
        "_to_backend_device": keras_devices.logical_device,
        "_to_backend_mesh": keras_devices.mesh_of,
        "_to_backend_layout": keras_devices.layout_of,
    }
)
_private.around_new_variables(_creating)
_private.when_model_is_made(_note_model)
_private.before_first_use_of_models(_prepare)
