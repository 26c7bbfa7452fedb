"""The hooks through which tf.distribute and Keras reach a ShardedStrategy."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.devices import batching, mesh_tensors, process_lock, transfer
from tfshard.errors import NumericsWarning, StrategyError, warn
from tfshard.graph import inventory
from tfshard.layouts.gradient_reduction import GradientReduction
from tfshard.layouts.layout_map import VariableSpec
from tfshard.operations import (
    assignments,
    chunked_cross_entropy,
    compiled_updates,
    context_parallel,
    partial_sums,
    rewrites,
)
from tfshard.storage import group_update, optimizer_kinds
from tfshard.storage.initial_values import HostValue, InitialValue
from tfshard.storage.steps import ReduceGradient, current, is_outside, step_scope, update_scope
from tfshard.storage.variables import ShardedVariable
from tfshard.training import births, datasets, microbatches, readiness
from tfshard.training.attached_variables import create_slot
from tfshard.training.strategy_base import StrategyBase


class _ReplicaContext(tf.distribute.ReplicaContext):  # type: ignore[misc]  # TensorFlow has no types.
    """The replica context of a step. The only replica sees the full batch."""

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy, replica_id_in_sync_group=0)

    def all_reduce(self, reduce_op: object, value: Any, options: object = None) -> Any:
        """Return `value`: values are global, and gradients were reduced when they were computed."""
        del reduce_op, options
        return value

    def all_gather(self, value: Any, axis: object, options: object = None) -> Any:
        del axis, options
        return value

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Collect the updates of Keras's optimizers, so that all members of a group are updated at once."""
        with group_update.UpdateBatch(compiled_updates.run):
            return merge_fn(self.strategy, *args, **(kwargs or {}))


class _RunOptions(threading.local):
    """The settings of the steps of this thread."""

    results_stay_sharded = False
    sends_exactly = False


class ShardedExtended(tf.distribute.StrategyExtended):  # type: ignore[misc]  # TensorFlow has no types.
    """The hooks through which tf.distribute and Keras reach the strategy."""

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy)
        self._run = _RunOptions()

    def _strategy(self) -> StrategyBase:
        """Return the strategy, typed as the base class that the hooks need."""
        strategy: StrategyBase = self._container_strategy()
        return strategy

    @contextlib.contextmanager
    def results_stay_sharded(self) -> Iterator[None]:
        """Make `run` return results in the layouts in which they were computed."""
        self._run.results_stay_sharded = True
        try:
            yield
        finally:
            self._run.results_stay_sharded = False

    def to_user(self, results: Any) -> Any:
        """Return results of a step in the form that a user's eager code gets."""
        return results if self._run.results_stay_sharded or not is_outside() else mesh_tensors.wrapped(results)

    @contextlib.contextmanager
    def sending_exactly(self) -> Iterator[None]:
        """Reduce all gradients and gather all variables exactly in steps that are traced in this context."""
        self._run.sends_exactly = True
        try:
            yield
        finally:
            self._run.sends_exactly = False

    # --- variables

    def _create_variable(self, next_creator: object, **kwargs: Any) -> ShardedVariable:
        del next_creator
        is_traced = current() is not None and not _private.is_eager()
        # A step function may build its optimizer while it is traced. The variables must be made outside the graph.
        with process_lock.held(), tf.init_scope():
            return self._create_sharded(is_traced=is_traced, **kwargs)

    def _create_sharded(
        self,
        *,
        is_traced: bool,
        initial_value: Any,
        name: str | None = None,
        trainable: bool | None = None,
        dtype: tf.DType | str | None = None,
        colocate_with: tf.Variable | None = None,
        **kwargs: Any,
    ) -> ShardedVariable:
        strategy = self._strategy()
        owner, host = _initial_value(initial_value, dtype)
        callers = _private.scope_callers()
        layer = callers[-1] if callers and isinstance(callers[-1], keras.Layer) else None
        spec = VariableSpec(
            path="/".join(part for part in (_private.current_path(), name) if part) or "variable",
            shape=tuple(host.shape),
            dtype=tf.as_dtype(host.dtype).name,
            trainable=trainable is not False,
            layer=layer,
        )
        options = {key: kwargs[key] for key in ("aggregation", "synchronization") if kwargs.get(key) is not None}
        optimizer = next((c for c in callers if isinstance(c, keras.optimizers.Optimizer)), None)
        if optimizer is not None:
            reference = colocate_with if isinstance(colocate_with, ShardedVariable) else None
            inventory.note_optimizer(callers)
            return create_slot(host, spec, reference, optimizer, strategy, name=name, options=options)
        layout = strategy.plan_variable(spec)
        # A large variable is placed now. A small one waits for its group, until the scope ends or the variable is used.
        waits = strategy.may_move(layout)
        if waits and isinstance(host, np.ndarray):
            host = np.array(host)  # Copy the view.
        born = ShardedVariable(
            host, layout=layout, mesh=strategy.mesh, trainable=spec.trainable, name=name, options=options,
            waits=functools.partial(births.move_waiting, strategy=strategy) if waits else None,
        )  # fmt: skip
        births.note_birth(born, strategy, in_step=is_traced)
        if owner is not None:
            assignments.install(owner, born)
        return born

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: object) -> Iterator[None]:
        """Let an optimizer of this strategy create slots, so that `optimizer.build` needs no scope after compile."""
        strategy = self._container_strategy()
        with contextlib.ExitStack() as stack:
            if tf.distribute.get_strategy() is not strategy:
                stack.enter_context(strategy.scope())
            stack.enter_context(super().colocate_vars_with(colocate_with_variable))
            yield

    def _validate_colocate_with_variable(self, colocate_with_variable: object) -> None:
        del colocate_with_variable  # Any variable will do: a slot takes the layout of a sharded one.

    def variable_created_in_scope(self, v: object) -> bool:
        return isinstance(v, ShardedVariable) and v.mesh == self._strategy().mesh

    def read_var(self, v: tf.Variable) -> tf.Tensor:
        return v.value()

    def value_container(self, value: Any) -> Any:
        return value

    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run `fn(*args, **kwargs)` for the only replica."""
        del colocate_with, group
        return fn(*args, **(kwargs or {}))

    def _update_non_slot(
        self, colocate_with: object, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], group: bool
    ) -> Any:
        return self.update_non_slot(colocate_with, fn, args, kwargs, group)

    def _replica_ctx_all_reduce(self, reduce_op: object, value: Any, options: object = None) -> Any:
        """Return `value`, which is global."""
        del reduce_op, options
        return value

    def _replica_ctx_update(
        self,
        var: tf.Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        return self.update(var, fn, args, kwargs, group)

    def update(
        self,
        var: tf.Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run `fn(var, *args)` with gradient, slots and parameter in one layout.

        If the optimizer's arithmetic is elementwise, a variable in a flat form is updated in that form. A group is
        updated at once when updates of all its members have come (group_update.py).
        """
        del group
        if not isinstance(var, ShardedVariable):
            return fn(var, *args, **(kwargs or {}))
        if is_outside():
            # In a callback or at the end of fit, variables and arguments are read and set on the host.
            args, kwargs = transfer.map_tensors(transfer.eager_on_host, (args, kwargs or {}))
            return fn(var, *args, **kwargs)
        callers = _private.scope_callers()
        inventory.note_optimizer(callers)
        step = current()
        if step is not None and step.is_microbatch:
            raise StrategyError(
                f"Variable '{var.path}' is updated in a microbatch, by a step function or an optimizer whose `apply` "
                "was replaced on the object. Override `apply` in a class, or set strategy.microbatches = 1."
            )
        optimizer = next((c for c in reversed(callers) if isinstance(c, keras.optimizers.Optimizer)), None)
        if kwargs:
            fn = functools.partial(fn, **kwargs)
        batch = group_update.open_here()
        if optimizer is not None and args and _is_gradient(args[0], var):
            var.note_gradient(args[0])
            _warn_of_sparse(var, optimizer)
            if batch is not None and isinstance(args[0], tf.Tensor):
                batch.note(var, args[0])
        kind = var.layout.partial_kind
        if kind is not None:
            return kind.update(var, fn, tuple(args), optimizer)
        if var.storage.format.packed and optimizer_kinds.is_elementwise(optimizer):
            if not var.storage.is_group:
                return group_update.run_alone(var, fn, tuple(args), optimizer, compiled_updates.run)
            if batch is not None:
                return batch.add(var, fn, tuple(args), optimizer)

        def convert(arg: Any) -> Any:
            if not tf.is_tensor(arg) or isinstance(arg, (tf.Variable, keras.Variable)):
                return arg
            # A sparse gradient (IndexedSlices) is one leaf here: `to_update` makes it dense.
            return var.to_update(arg) if arg.shape.rank and arg.shape == var.shape else arg

        converted = [convert(arg) for arg in args]
        gradient = converted[0] if converted and _is_gradient(converted[0], var) else None
        with update_scope(gradient=gradient, axes=var.storage.format.members[var.member].update):
            return compiled_updates.run(optimizer, fn, var, converted)

    # --- running

    def _use_merge_call(self) -> bool:
        return isinstance(tf.distribute.get_replica_context(), _ReplicaContext)

    def _default_device_scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Open a step in this context, to run or to trace it."""
        strategy = self._container_strategy()
        mesh_tensors.note_step()
        models = list(strategy.attached) if strategy.mesh_shape.contexts > 1 else []
        with (
            context_parallel.any_length(models),
            strategy.scope(),
            _ReplicaContext(strategy),
            step_scope(
                strategy.config.reshard,
                _gradient_reducer(strategy, exactly=self._run.sends_exactly),
                only_mesh=strategy.mesh,
                rounds_gathers=not self._run.sends_exactly,
            ),
            rewrites.rewritten(strategy.mesh),
        ):
            yield

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(tf.distribute.get_replica_context(), _ReplicaContext):
            return fn(*args, **(kwargs or {}))  # Called from within `merge_call`: the step is open.
        strategy = self._container_strategy()
        with self.step():
            step = current()
            assert step is not None
            step.batch.note((args, kwargs))
            parts = microbatches.parts_of(
                fn,
                args,
                kwargs or {},
                count=strategy.microbatches,
                reduce_once=strategy.config.microbatches.reduce_once,
                mesh=strategy.mesh,
            )
            if parts is None:
                result = fn(*args, **(kwargs or {}))
                chunked_cross_entropy.settle(result)
            else:
                result = parts.run(args, kwargs or {})
            if not _private.is_eager():
                readiness.check_captures(tf.compat.v1.get_default_graph())
            if self._run.results_stay_sharded:
                return result
            return transfer.map_tensors(self.replicate, result)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.call_for_each_replica(fn, args, kwargs)

    def replicate(self, value: Any) -> Any:
        """Replicate a result of a step, so that `.numpy()` and the next step can use it."""
        if not isinstance(value, tf.Tensor) or value.shape.rank is None:
            return value
        return transfer.replicate(value, self._strategy().mesh)

    def _local_results(self, val: Any) -> tuple[Any, ...]:
        return (mesh_tensors.on_host(val) if is_outside() else val,)

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return replica_id

    def broadcast_to(self, tensor: Any, destinations: object) -> Any:
        """Return `tensor`: all devices see it."""
        del destinations
        return tensor

    def _broadcast_to(self, tensor: Any, destinations: object) -> Any:
        return self.broadcast_to(tensor, destinations)

    def _gather_to(self, value: Any, destinations: object, axis: int, options: object = None) -> Any:
        """Return `value`, which is global."""
        del destinations, axis, options
        return value

    def _gather_to_implementation(self, value: Any, destinations: object, axis: int, options: object) -> Any:
        return self._gather_to(value, destinations, axis, options)

    def _reduce_to(self, reduce_op: object, value: Any, destinations: object, options: object) -> Any:
        del reduce_op, destinations, options
        return value

    def _batch_reduce_to(
        self, reduce_op: object, value_destination_pairs: Iterable[tuple[Any, object]], options: object
    ) -> list[Any]:
        del reduce_op, options
        return [value for value, _ in value_destination_pairs]

    def _experimental_distribute_values_from_function(
        self, value_fn: Callable[[tf.distribute.experimental.ValueContext], Any]
    ) -> Any:
        strategy = self._strategy()
        values = value_fn(_ValueContext())
        return mesh_tensors.wrapped(batching.batch_to_mesh(values, strategy.mesh, strategy.config.already_sharded))

    def _experimental_distribute_dataset(self, dataset: Iterable[Any], options: object) -> Any:
        return self._container_strategy().experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], Iterable[Any]], options: object
    ) -> datasets.ShardedDataset:
        strategy, context = self._strategy(), tf.distribute.InputContext()
        if strategy.config.already_sharded:
            part = batching.InputShard.of(strategy.mesh)
            context = tf.distribute.InputContext(num_input_pipelines=part.count, input_pipeline_id=part.index)
        prefetch = datasets.prefetch_of(options, strategy.mesh)
        return datasets.ShardedDataset(dataset_fn(context), strategy.mesh, strategy.config.already_sharded, prefetch)

    # --- properties

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return tuple(self._strategy().mesh.local_devices())

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self.worker_devices

    def non_slot_devices(self, var_list: object) -> tuple[str, ...]:
        del var_list
        return self.worker_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        return False

    @property
    def experimental_between_graph(self) -> bool:
        return False

    @property
    def experimental_should_init(self) -> bool:
        return True

    @property
    def should_checkpoint(self) -> bool:
        return True

    @property
    def should_save_summary(self) -> bool:
        return True

    def _in_multi_worker_mode(self) -> bool:
        """Return False: to Keras and tf.data one worker feeds the full batch, even in a launched run."""
        return False

    @property
    def _global_batch_size(self) -> bool:
        return True

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        return (self.worker_devices,)


def _initial_value(given: Any, dtype: tf.DType | str | None) -> tuple[keras.Variable | None, HostValue]:
    """Return the Keras variable behind an initial value, if any, and the value or its initializer."""
    found = _private.initializer_of(given)
    owner = None
    if found is not None:
        owner, initializer = found
        value = InitialValue.of(initializer, tuple(owner.shape), _private.variable_dtype(owner))
        if value is not None:
            return owner, value
    # Initializers run on the host as on one device, to draw the same numbers.
    with tf.device("CPU:0"):
        value = given() if callable(given) else given
        if not transfer.is_dtensor(value):
            value = tf.convert_to_tensor(value, dtype=dtype)
    # A constant that Keras put into the graph of a step, as Nadam does if it is built there.
    constant = tf.get_static_value(value) if hasattr(value, "graph") else None
    host = transfer.host_view(value) if constant is None else np.asarray(constant)
    if dtype is not None:
        host = host.astype(tf.as_dtype(dtype).as_numpy_dtype, copy=False)
    return owner, host


def _is_gradient(value: Any, variable: ShardedVariable) -> bool:
    """Return whether `value` is a gradient: a tensor of the variable's shape.

    Averages that overwrite the variable are variables.
    """
    is_tensor = tf.is_tensor(value) and not isinstance(value, (tf.Variable, keras.Variable))
    return bool(is_tensor and value.shape == variable.shape)


def _warn_of_sparse(variable: ShardedVariable, optimizer: keras.optimizers.Optimizer) -> None:
    """Warn once about an embedding with a sparse gradient: Keras on one device would square it per lookup."""
    if not variable.pop_sparse() or optimizer_kinds.adds_up_rows(optimizer) or variable.told_of_sparse:
        return
    variable.told_of_sparse = True
    has_rule = any(variable.layout.compute)
    warn(
        f"Optimizer {type(optimizer).__name__} updates embedding '{variable.path}' by a dense gradient, as Keras on "
        "JAX does. Keras on TensorFlow squares a sparse gradient once for each lookup. Rows that occur several "
        "times in a batch differ there, by up to about the learning rate in a step. To match Keras on TensorFlow, give "
        f"ShardedStrategy(tables='{variable.path}'){' and take its rule out of the layout map' if has_rule else ''}. "
        "To keep the dense gradient, ignore this warning.",
        NumericsWarning,
    )


class _ValueContext(tf.distribute.experimental.ValueContext):  # type: ignore[misc]  # TensorFlow has no types.
    """The context of `experimental_distribute_values_from_function`, with one replica."""

    def __init__(self) -> None:
        super().__init__(replica_id_in_sync_group=0, num_replicas_in_sync=1)


def _gradient_reducer(strategy: StrategyBase, *, exactly: bool) -> ReduceGradient | None:
    """Return a function that reduces gradients in a traced step; None if DTensor reduces all gradients."""
    mesh, has_replicas = strategy.mesh, strategy.mesh_shape.replicas > 1
    has_reduction = strategy.config.reduction is not None and not exactly
    if _private.is_eager() or not (has_replicas or has_reduction):
        return None

    def add_up(gradient: tf.Tensor, variable: ShardedVariable) -> tf.Tensor | None:
        if has_reduction and variable.layout.reduction is not None:
            return _reduced(gradient, variable, variable.layout.reduction)
        return partial_sums.by_replicas(gradient, variable.layout.compute, mesh) if has_replicas else None

    return add_up


def _reduced(gradient: tf.Tensor, variable: ShardedVariable, reduction: GradientReduction) -> tf.Tensor | None:
    """Reduce a gradient by the reduction of its variable.

    Returns None if DTensor has already summed the gradient, or if the devices have no local gradients.
    """
    with _private.stop_recording():
        local = partial_sums.found_of(gradient, variable.mesh)
        return None if local is None else reduction.reduce_local(local, variable)
