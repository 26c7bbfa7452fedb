"""Make sharded models: `as_distributed`, `tfshard.Model` and `tfshard.Sequential`."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.devices import clients, process_lock, startup
from tfshard.errors import StrategyError
from tfshard.graph import inventory
from tfshard.layouts.axes import axis_sizes
from tfshard.training import (
    attached_model,
    automatic,
    births,
    custom_steps,
    datasets,
    distributions,
    generation,
    readiness,
    watching,
    written_once,
)
from tfshard.training.step_functions import MeshStep, StepFunction
from tfshard.training.strategy import ShardedStrategy

# Makes mypy take the `super()` of a mixin for the Keras model that follows in the bases.
_KerasModel: Any = object


class Distributed(_KerasModel):  # type: ignore[misc]  # Keras has no types.
    """Mixed into a Keras model's class: `compile` takes `strategy=`, and steps move their batches to the mesh."""

    # Attributes of Keras: a step function, or None.
    train_function: Any
    test_function: Any
    predict_function: Any

    def compile(self, *args: Any, strategy: ShardedStrategy | str | None = None, **kwargs: Any) -> None:
        """Compile the model as Keras does, with one more argument.

        Args:
            *args: As in `keras.Model.compile`.
            strategy: A `tfshard.ShardedStrategy`. Reshards the variables of the model, the optimizer and the metrics in
                place, and keeps their values, even if another ShardedStrategy held them. `"auto"` chooses a strategy
                for the memory of all devices before the first batch of `fit`, `train_on_batch`, `evaluate` or
                `test_on_batch`, and prints the choice; until then the model is a plain Keras model. With None, the
                model goes to the strategy of the active `keras.distribution`, if one is active. Otherwise, a sharded
                model stays under its strategy, and any other model is compiled as in plain Keras.
            **kwargs: As in `keras.Model.compile`. With `jit_compile=True` each device runs the blocks of the model as
                XLA programs. Blocks are repeated layers with sublayers, such as transformer layers, and the layers
                with sublayers that `strategy.recompute` marked. `"auto"`, the default, compiles on GPUs, and nothing
                on CPUs and TPUs.

        Raises:
            StrategyError: `strategy` is neither a ShardedStrategy nor `"auto"`, or the model belongs to a strategy of
                another kind.
            InitializationError: With `"auto"`: DTensor cannot start, because TensorFlow has fixed its devices.
            LayoutError: The layout map does not fit the model.
            UnsupportedLayerError: The model has a layer that DTensor cannot expand.
        """
        if strategy is None and automatic.state_of(self) is not None:
            strategy = automatic.AUTO
        if strategy is None:
            strategy = _current_strategy(self)
        if strategy is None:
            super().compile(*args, **kwargs)
            return
        _compile_with(self, strategy, functools.partial(super().compile, *args), kwargs)

    def get_compile_config(self) -> Any:
        strategy, clone = _current_strategy(self), _private.clone_being_made()
        if isinstance(clone, keras.Model) and strategy is None and (state := automatic.state_of(self)) is not None:
            if self._prepares(clone):
                automatic.expect(clone, state.jit_compile)
        if clone is None or strategy is None:
            return super().get_compile_config()
        if not isinstance(clone, keras.Model) or not self._prepares(clone):
            # Keras makes a subclassed model's clone from its config: leave the clone uncompiled rather than unsharded.
            return None
        # Keras then calls clone.compile_from_config(), which shards the clone.
        _private.set_distribute_strategy(clone, strategy)
        return super().get_compile_config()

    def _prepares(self, clone: keras.Model) -> bool:
        """Give a clone the `compile` of this model. Returns False if that is impossible."""
        as_distributed(clone)
        return True

    def compile_from_config(self, config: dict[str, Any]) -> None:
        inherited = super().compile_from_config
        if inherited.__func__ is not keras.Model.compile_from_config:
            inherited(config)
            return
        # Keras's method does nothing for a class that overrides `compile`.
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built and self.optimizer is not None:
            strategy = _private.distribute_strategy(self)
            with strategy.scope() if isinstance(strategy, ShardedStrategy) else contextlib.nullcontext():
                self.optimizer.build(self.trainable_variables)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if automatic.state_of(self) is not None:
            data_batch = self._choose_strategy(iterator, data_batch)
        if isinstance(_private.distribute_strategy(self), ShardedStrategy):
            readiness.check_process()
        # Keras passes the iterator that counts the steps of the epochs here (callback.py).
        if iterator is not None:
            datasets.note_epochs(self, iterator)
        if custom_steps.has_custom_steps(self):
            self._note_batch(iterator, data_batch)
            return
        build = super()._maybe_symbolic_build
        if data_batch is not None:
            build(data_batch=data_batch)
            return
        # Keras has an `OptionalSpec` where a generator yields None.
        spec = tf.nest.map_structure(
            lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf,
            _private.EpochIterator(iterator).dataset.element_spec,
        )
        if _is_known(spec):
            # Keras would read a batch. Training would then see the data as after an epoch, shuffled once more.
            build(data_batch=spec)
            return
        try:
            build(iterator=iterator)
        except StopIteration:  # No data: the caller reports it as Keras does. Build the metrics anyway.
            build(data_batch=spec)

    def _choose_strategy(self, iterator: Any, data_batch: Any) -> Any:
        """Choose the strategy of a model with `strategy="auto"`, if its choice is missing or too small for a batch.

        Returns:
            The batch, if it is known now.
        """
        epochs = None if iterator is None else datasets.EpochBatches(iterator)
        batch = data_batch if epochs is None else epochs.spec()
        inputs = None if batch is None else keras.utils.unpack_x_y_sample_weight(batch)[0]
        if not automatic.needs_choice(self, inputs):
            return data_batch
        if epochs is not None and batch is None:
            batch = epochs.first()
            if batch is None:
                return data_batch  # No data: the caller reports it as Keras does.
            inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
            if not automatic.needs_choice(self, inputs):
                return batch
        state = automatic.state_of(self)
        strategy = automatic.choose(self, inputs)
        if strategy is not None and state is not None:
            chosen = state.chosen
            options = {"jit_compile": state.jit_compile, "run_eagerly": self.run_eagerly}
            _compile_under(self, strategy, functools.partial(_take_strategy, self), options)
            if chosen is not None and chosen.recompute:
                strategy.recompute(self)
            if epochs is not None:
                epochs.distribute(strategy)
            if state.on_choice is not None:
                state.on_choice(strategy)
        return batch

    def _note_batch(self, iterator: Any, data_batch: Any) -> None:
        """Record the batch of a model with custom steps, which is built when its step functions are made."""
        if data_batch is not None:
            custom_steps.note_batch(self, data_batch)
        else:
            epochs = _private.EpochIterator(iterator)
            custom_steps.note_batch(self, epochs.dataset.element_spec, epochs.batch_size)
        strategy = _private.distribute_strategy(self)
        if inventory.has_no_call(self) or not isinstance(strategy, ShardedStrategy):
            return  # Many such models have custom optimizers, and never use the optimizer that Keras gives them.
        is_built = all(layer.built for layer in _private.flatten_layers(self))
        if is_built and self.optimizer is not None and not self.optimizer.built:
            with process_lock.held(), strategy.scope():
                self.optimizer.build(self.trainable_variables)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        callbacks = watching.callbacks_of(self, args, kwargs)
        if clients.here().is_launched:
            for callback in callbacks:
                if isinstance(callback, keras.callbacks.BackupAndRestore):
                    raise StrategyError(
                        "The clients of a launched run would overwrite each other's backups. Use "
                        f"tfshard.CheckpointCallback, which also restores. Received: callback={callback!r}"
                    )
        strategy = _private.distribute_strategy(self)
        if not isinstance(strategy, ShardedStrategy) and automatic.state_of(self) is None:
            return super().fit(*args, **kwargs)
        kwargs = _quiet(keras.Model.fit, args, kwargs)
        watching.check_can_write(callbacks)
        watchers = [each for each in callbacks if isinstance(each, watching.StepWatcher)]
        with contextlib.ExitStack() as stack:

            def watch(strategy: ShardedStrategy) -> None:
                stack.enter_context(strategy.watched.by(watchers))

            if isinstance(strategy, ShardedStrategy):
                watch(strategy)
            stack.enter_context(automatic.choices_told(self, watch))
            stack.enter_context(datasets.read_ahead_dropped(self))
            return super().fit(*args, **kwargs)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with datasets.read_ahead_dropped(self), automatic.evaluating(self):
            return super().evaluate(*args, **_quiet(keras.Model.evaluate, args, kwargs))

    @functools.wraps(keras.Model.test_on_batch)
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        with automatic.evaluating(self):
            return super().test_on_batch(*args, **kwargs)

    @functools.wraps(keras.Model.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict(*args, **_quiet(keras.Model.predict, args, kwargs))

    def _build_by(self, step: str) -> None:
        strategy = _private.distribute_strategy(self)
        if not isinstance(strategy, ShardedStrategy):
            return
        attached_model.attached(self, strategy).take_jit_compile()
        if custom_steps.has_custom_steps(self):
            custom_steps.build(self, strategy, step)

    @process_lock.locked
    def make_train_function(self, force: bool = False) -> None:
        self._build_by("train_step")
        super().make_train_function(force)
        self.train_function = _on_mesh(
            self, self.train_function, "training step", lambda: _private.make_step_function(self, self.train_step)
        )

    @process_lock.locked
    def make_test_function(self, force: bool = False) -> None:
        self._build_by("test_step")
        super().make_test_function(force)
        self.test_function = _on_mesh(
            self, self.test_function, "evaluation step", lambda: _private.make_step_function(self, self.test_step)
        )

    @process_lock.locked
    def make_predict_function(self, force: bool = False) -> None:
        strategy = _private.distribute_strategy(self)
        if isinstance(strategy, ShardedStrategy):
            attached_model.attached(self, strategy).take_jit_compile()
        super().make_predict_function(force)
        again = functools.partial(_predict_function, self)
        self.predict_function = _on_mesh(self, self.predict_function, "prediction step", again)

    @functools.wraps(keras.Model.save)
    def save(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        with written_once.file(self, "save", filepath) as path:
            super().save(path, *args, **kwargs)

    @functools.wraps(keras.Model.save_weights)
    def save_weights(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        with written_once.file(self, "save_weights", filepath) as path:
            super().save_weights(path, *args, **kwargs)

    @functools.wraps(keras.Model.export)
    def export(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        if not isinstance(_private.distribute_strategy(self), ShardedStrategy):
            super().export(filepath, *args, **kwargs)
            return
        with written_once.file(self, "export", filepath) as path:
            # Export an unsharded model.
            _plain_copy(self).export(path, *args, **kwargs)

    @functools.wraps(keras.Model.get_weights)
    def get_weights(self) -> list[np.ndarray]:
        with process_lock.held(), clients.here().purpose(f"get_weights of model '{self.name}'"):
            weights: list[np.ndarray] = super().get_weights()
        return weights

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "savedmodel" and isinstance(_private.distribute_strategy(self), ShardedStrategy):
            # Called by tf.saved_model.save, to save an unsharded model. Repeated calls must return the same children.
            cache = kwargs.get("cache")
            known = cache if isinstance(cache, dict) else {}
            key = id(self), "tfshard"
            if key not in known:
                known[key] = _plain_copy(self)
            return known[key]._trackable_children(save_type, **kwargs)
        return super()._trackable_children(save_type, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickle as a plain model, as loading from a file does.
        reduced: Any = super().__reduce__()
        return _private.unpickle_model, reduced[1]


def _quiet(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with which only client 0 of a launched run prints progress by default."""
    by_position = list(inspect.signature(method).parameters)[1 : len(args) + 1]
    if clients.here().rank == 0 or kwargs.get("verbose", "auto") != "auto" or "verbose" in by_position:
        return kwargs
    return {**kwargs, "verbose": 0}


def _is_known(spec: Any) -> bool:
    """Return whether the specs of a dataset's elements suffice to build a model.

    They do if each is None, or a dense tensor of known rank.
    """
    leaves = [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]
    return all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank is not None for leaf in leaves)


def _current_strategy(model: keras.Model) -> ShardedStrategy | None:
    """Return the ShardedStrategy with an open scope, of the active Keras distribution, or of the model."""
    scope, active = tf.distribute.get_strategy(), distributions.active_strategy()
    for strategy in (scope, active, _private.distribute_strategy(model)):
        if isinstance(strategy, ShardedStrategy):
            return strategy
    return None


@_private.without_distribution()
def _plain_copy(model: keras.Model) -> keras.Model:
    """Return a copy of a model with full weights on the host, under no strategy."""
    compiled, model.compiled = model.compiled, False
    try:
        copy = keras.models.clone_model(model)  # Without an optimizer and its slots.
    finally:
        model.compiled = compiled
    # A subclassed model is built by its first call, and Keras exports only called models.
    signature = _private.input_signature(model)
    copy(*keras.tree.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype), signature))
    # Match by path: a layer that was quantized after it was built has its variables in another order.
    values = {variable.path: variable for variable in model.weights}
    by_path = len(values) == len(model.weights) and values.keys() == {ours.path for ours in copy.weights}
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        ours.assign((values[ours.path] if by_path else theirs).numpy())
    return copy


def _on_mesh(
    model: keras.Model,
    function: StepFunction,
    kind: str,
    make_again: Callable[[], StepFunction],
) -> StepFunction:
    """Return the `MeshStep` of a Keras step function, or the function itself if it is a `MeshStep` already.

    Args:
        model: The model.
        function: The step function that Keras made.
        kind: As for `MeshStep`.
        make_again: As for `MeshStep`.
    """
    strategy = _private.distribute_strategy(model)
    if not isinstance(strategy, ShardedStrategy) or isinstance(function, MeshStep):
        return function
    return MeshStep(model, strategy, function=function, kind=kind, make_again=make_again)


def _predict_function(model: Distributed) -> StepFunction:
    """Return a new prediction step function of Keras."""
    mine = model.predict_function
    try:
        super(Distributed, model).make_predict_function(force=True)
        function: StepFunction = model.predict_function
    finally:
        model.predict_function = mine
    return function


@functools.cache
def _distributed_class(cls: type) -> type:
    """Return the subclass of a Keras model class that `as_distributed` gives a model.

    The subclass has the name and module of its parent, so that a saved model loads in a plain Keras process.
    """
    bases = (Distributed, *generation.mixins(cls), cls)
    created = type(cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    _private.register_same_name(created, cls)
    return created


def as_distributed(model: keras.Model) -> keras.Model:
    """Give a Keras model a `compile` that takes `strategy=`, and steps that move batches to the mesh.

    `keras.Model.compile(strategy=)` calls this function itself. Call it first if the model's class overrides `compile`
    without `**kwargs`, as many GANs do: variables that such a `compile` creates are then created on the mesh.

    Args:
        model: Any `keras.Model`: Sequential, functional, subclassed, or from KerasHub, built or not.

    Returns:
        The same object, still an instance of its class.

    Raises:
        StrategyError: `model` is not a Keras model.

    Example:

    >>> import keras, tfshard
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> tfshard.as_distributed(model) is model
    True
    >>> isinstance(model, keras.Sequential)
    True
    """
    if not isinstance(model, keras.Model):
        raise StrategyError(f"as_distributed takes a keras.Model. Received: {model!r} (of type {type(model)})")
    if not isinstance(model, Distributed):
        cls: Any = type(model)  # A type is hashable, but mypy does not know that.
        model.__class__ = _distributed_class(cls)
    return model


births.model_preparers.append(as_distributed)


def _compile_with(model: keras.Model, strategy: Any, compile_: Callable[..., None], options: dict[str, Any]) -> None:
    """Compile a model with the argument `strategy` of `compile`."""
    if isinstance(strategy, str) and strategy == automatic.AUTO:
        _compile_automatically(model, compile_, options)
        return
    if not isinstance(strategy, ShardedStrategy):
        raise StrategyError(
            "strategy must be a tfshard.ShardedStrategy, or 'auto' to choose one when the first batch is known. Other "
            "tf.distribute strategies are used through their "
            f"scope(). Received: strategy={strategy!r} (of type {type(strategy)})"
        )
    automatic.forget(model)
    _compile_under(model, strategy, compile_, options)


@process_lock.locked
def _compile_automatically(model: keras.Model, compile_: Callable[..., None], options: dict[str, Any]) -> None:
    """Compile a model whose strategy is chosen when its first batch is known."""
    for opened in (tf.distribute.get_strategy(), distributions.active_strategy()):
        if isinstance(opened, ShardedStrategy):
            raise StrategyError(
                "strategy='auto' chooses a strategy, and the scope of another one is open, or a keras.distribution is "
                "active. Compile the model outside of it, or leave strategy='auto' out. Received: strategy='auto' "
                f"beside {opened}"
            )
    readiness.check_process()
    if startup.current() is None:
        startup.initialize()
    current = _private.distribute_strategy(model)
    if isinstance(current, ShardedStrategy):
        _compile_under(model, current, compile_, options)
    else:
        compile_(**options)
    automatic.expect(model, options.get("jit_compile", automatic.AUTO))


def _take_strategy(model: keras.Model, **options: Any) -> None:
    """Take the place of `compile` for a compiled model that gets a strategy: XLA compiles no step on a mesh, and step
    functions of an earlier strategy are dropped."""
    del options
    model.jit_compile = False
    model.train_function = model.test_function = model.predict_function = None


@process_lock.locked
def _compile_under(
    model: keras.Model, strategy: ShardedStrategy, compile_: Callable[..., None], options: dict[str, Any]
) -> None:
    readiness.check_process()
    attached = attached_model.attached(model, strategy)
    attached.compiles()
    attached.move_from_other()
    attached.reshard_layers()
    _private.set_distribute_strategy(model, strategy)
    asked = options.get("jit_compile", "auto")
    if asked is True:
        attached_model.check_can_compile_blocks(strategy)
    attached.compiles_blocks = asked is True or (asked == "auto" and _compiles_by_itself(strategy, options))
    attached.warns_of_blocks = asked is True
    if attached.compiles_blocks:
        options = {**options, "jit_compile": False}
    with strategy.scope():
        compile_(**options)
    attached.take_jit_compile()
    if attached.compiles_blocks:
        _private.set_compile_argument(model, "jit_compile", asked)
    inventory.note_compiled(model.optimizer)
    attached.compiled_again()
    attached.attach()
    written_once.start()


def _compiles_by_itself(strategy: ShardedStrategy, options: Mapping[str, Any]) -> bool:
    """Return whether `jit_compile="auto"` compiles blocks: on GPUs, as Keras does on one GPU."""
    axes = axis_sizes(strategy.mesh)
    can_compile = axes.pipeline is None and axes.contexts == 1
    return strategy.mesh.device_type() == "GPU" and can_compile and not options.get("run_eagerly")


def _with_strategy(keras_compile: Callable[..., None]) -> Callable[..., None]:
    """Return a `keras.Model.compile` that calls `as_distributed` if it gets a strategy.

    A class's `compile` that passes unknown arguments to `super().compile` also ends here, after its other work.
    """

    @functools.wraps(keras_compile)
    def compile_(self: keras.Model, *args: Any, strategy: ShardedStrategy | str | None = None, **kwargs: Any) -> None:
        strategy = distributions.active_strategy() if strategy is None else strategy
        if strategy is None:
            keras_compile(self, *args, **kwargs)
            return
        as_distributed(self)
        _compile_with(self, strategy, functools.partial(keras_compile, self, *args), kwargs)

    return compile_


_private.record_models()
_private.add_to_compile(_with_strategy)


def _let_take_strategy(cls: type) -> None:
    """Make the `compile` that a class defines take `strategy=`, unless it takes the argument already."""
    class_compile: Any = vars(cls)["compile"]
    if not inspect.isfunction(class_compile) or issubclass(cls, Distributed):
        return
    parameters = inspect.signature(class_compile).parameters
    if "strategy" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return

    @functools.wraps(class_compile)
    def compile_(self: keras.Model, *args: Any, strategy: ShardedStrategy | str | None = None, **kwargs: Any) -> Any:
        if strategy is None:
            return class_compile(self, *args, **kwargs)
        return as_distributed(self).compile(*args, strategy=strategy, **kwargs)

    cls.compile = compile_  # type: ignore[attr-defined]


_private.add_to_class_compiles(_let_take_strategy)


class Model(Distributed, keras.Model):  # type: ignore[misc]  # Keras has no types.
    """A `keras.Model` with a `compile` that takes `strategy=`, for functional and subclassed models.

    >>> import keras, tfshard
    >>> inputs = keras.Input((8,))
    >>> model = tfshard.Model(inputs, keras.layers.Dense(4)(inputs))
    >>> isinstance(model, tfshard.Model), isinstance(model, keras.Model)
    (True, True)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Model and _private.functional_init_arguments(args, kwargs):
            return _Functional.__new__(_Functional, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any):
        functional = _private.functional_init_arguments(args, kwargs)
        if functional and not isinstance(self, _private.Functional):
            # Keras would add Functional to the bases of this class, for every model that derives from it.
            cls: Any = type(self)
            self.__class__ = _functional_subclass(cls)
        super().__init__(*args, **kwargs)


class _Functional(Model, _private.Functional):  # type: ignore[misc]  # Keras has no types.
    """The class of `tfshard.Model(inputs, outputs)`."""


_Functional.__name__ = _Functional.__qualname__ = _private.Functional.__name__
_Functional.__module__ = _private.Functional.__module__


@functools.cache
def _functional_subclass(cls: type) -> type:
    return type(
        cls.__name__, (cls, _private.Functional), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )


class Sequential(Distributed, keras.Sequential):  # type: ignore[misc]  # Keras has no types.
    """A `keras.Sequential` with a `compile` that takes `strategy=`.

    >>> import keras, tfshard
    >>> model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> isinstance(model, keras.Sequential)
    True
    """


# Saved models name keras.Sequential, so that a process without tfshard loads them.
Sequential.__module__ = keras.Sequential.__module__
