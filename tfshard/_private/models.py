"""Keras models, layers and metrics: their parts, names, strategies and step functions."""

import contextlib
import functools
import gc
import math
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, BinaryIO

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv
from keras.src.saving import object_registration as _object_registration
from keras.src.utils import naming as _naming

from tfshard._private import patches
from tfshard._private.weak import WeakIdentitySet


def add_to_compile(make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replace Keras's `compile` by `make(compile)`.

    Changes the class that defines `compile` (`Trainer.compile`), because Keras compares a model's class with this class
    when it compiles a saved model.
    """
    (trainer,) = (cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    patches.replace(trainer, "compile", make(trainer.compile), "takes strategy=")


def add_to_class_compiles(make: Callable[[type], None]) -> None:
    """Call `make` with each present or future model class that defines `compile` (`keras.Model.__init_subclass__`)."""

    def visit(cls: type) -> None:
        if "compile" in vars(cls):
            make(cls)
        subclasses: list[type] = cls.__subclasses__()
        for each in subclasses:
            visit(each)

    for known in keras.Model.__subclasses__():
        visit(known)
    original = vars(keras.Model).get("__init_subclass__")

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        if original is None:
            super(keras.Model, cls).__init_subclass__(**kwargs)
        else:
            original.__get__(None, cls)(**kwargs)
        if "compile" in vars(cls):
            make(cls)

    reason = "adds strategy= to a compile method that a class defines"
    patches.replace(keras.Model, "__init_subclass__", classmethod(init_subclass), reason)


def set_distribute_strategy(
    owner: keras.Model | keras.optimizers.Optimizer, strategy: tf.distribute.Strategy | None
) -> None:
    """Set the strategy of a Keras model or optimizer (`_distribute_strategy`, `_distribution_strategy`)."""
    if isinstance(owner, keras.optimizers.Optimizer):
        owner._distribution_strategy = strategy
    else:
        owner._distribute_strategy = strategy


def distribute_strategy(model: keras.Model | keras.optimizers.Optimizer) -> tf.distribute.Strategy | None:
    """Return the strategy under which a Keras model or optimizer was built or compiled, or None."""
    if isinstance(model, keras.optimizers.Optimizer):
        return model._distribution_strategy
    return getattr(model, "_distribute_strategy", None)


def clone_being_made() -> keras.Model | bool | None:
    """Return the clone that `keras.models.clone_model` is making. Call this only from a model's `get_compile_config`.

    Returns a local variable of `cloning._clone_sequential_model` or `_clone_functional_model`, True if the clone does
    not exist yet (`clone_model` calls `serialize_keras_object`), or None if the model is not being cloned.
    """
    caller = sys._getframe(2)
    names = {"_clone_sequential_model": "cloned_model", "_clone_functional_model": "new_model"}
    name = names.get(caller.f_code.co_name)
    if name is not None and caller.f_globals.get("__name__") == "keras.src.models.cloning":
        return caller.f_locals[name]
    above = [caller.f_back, caller.f_back and caller.f_back.f_back]
    return True if any(frame and frame.f_code is keras.models.clone_model.__code__ for frame in above) else None


def unpickle_model(file: BinaryIO) -> keras.Model:
    """Load a pickled Keras model (`KerasSaveable._unpickle_model`)."""
    return keras.Model._unpickle_model(file)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return the objects that a model was compiled with (`Trainer._compile_config`)."""
    return dict(model._compile_config.config)


def set_compile_argument(model: keras.Model, name: str, value: Any) -> None:
    """Replace an argument in the compile config that Keras saves and clones (`Trainer._compile_config`)."""
    model._compile_config.config[name] = value


def symbolic_build(model: keras.Model, batch: Any) -> None:
    """Build everything that `fit` builds before its first step (`Trainer._maybe_symbolic_build`)."""
    model._maybe_symbolic_build(data_batch=batch)


def make_step_function(model: keras.Model, step: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return Keras's function for one execution of a step, such as `model.train_step` (`Trainer._make_function`)."""
    function: Callable[..., Any] = model._make_function(step)
    return function


def remat_mode(operation: keras.Operation) -> str | None:
    """Return the mode of the `keras.RematScope` in which a layer was made, or None (`Layer._remat_mode`)."""
    found = getattr(operation, "_remat_mode", None)
    return None if found is None else found.mode


def flatten_layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Return a model and every layer below it, each once, in creation order (`Layer._layers`).

    Keras's `Layer._flatten_layers` reverses the order of sublayers.
    """
    found, waiting = {}, [model]
    while waiting:
        layer = waiting.pop()
        if id(layer) not in found:
            found[id(layer)] = layer
            waiting += reversed(layer._layers)
    return list(found.values())


def structure(model: keras.layers.Layer) -> tuple[Hashable, ...]:
    """Return a key that changes when a layer below a model is added, built or gets a variable. Fast to compute."""
    return tuple(
        (id(layer), layer.built, len(layer._trainable_variables), len(layer._non_trainable_variables))
        for layer in flatten_layers(model)
    )


def layer_uses(layer: keras.layers.Layer) -> list[Any]:
    """Return a layer's calls on symbolic tensors (`Operation._inbound_nodes`). Empty in a subclassed model."""
    return list(getattr(layer, "_inbound_nodes", []))


@contextlib.contextmanager
def symbolic_calls_undone(model: keras.Model) -> Iterator[None]:
    """Forget the symbolic calls of a model's layers that are made inside the context (`Operation._inbound_nodes`,
    `Operation._outbound_nodes`). The layers' `output` and `input` stay those of the model."""
    operations = {id(each): each for each in flatten_layers(model)}
    for each in [*operations.values()]:
        for operation in getattr(each, "operations", ()):
            operations[id(operation)] = operation
    before = [(each, len(each._inbound_nodes), len(each._outbound_nodes)) for each in operations.values()]
    try:
        yield
    finally:
        for each, inbound, outbound in before:
            del each._inbound_nodes[inbound:]
            del each._outbound_nodes[outbound:]


def is_convolution(layer: keras.layers.Layer) -> bool:
    """Return whether a layer is a convolution (`BaseConv` and related classes)."""
    return isinstance(layer, (BaseConv, BaseConvTranspose, BaseDepthwiseConv, BaseSeparableConv))


def can_shard_convolution(layer: keras.layers.Layer) -> bool:
    """Return whether tfshard can run a layer's `BaseConv.convolution_op` with a sharded kernel.

    Conv1D calls the operation directly, and groups mix channels in blocks.
    """
    plain = isinstance(layer, (keras.layers.Conv2D, keras.layers.Conv3D))
    return bool(plain and layer.groups == 1 and layer.data_format == "channels_last")


def layer_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the variables of a layer without its sublayers' variables.

    These are weights, seed generator states and metric variables, in creation order.
    """
    variables = list(layer._trainable_variables) + list(layer._non_trainable_variables)
    variables += [generator.state for generator in layer._seed_generators]
    for metric in layer._metrics:
        variables += metric.variables
    return variables


def model_parallel_layout_map(distribution: Any) -> Any:
    """Return the layout map of a `keras.distribution.ModelParallel` (`_layout_map`), or any other object unchanged."""
    is_distribution = isinstance(distribution, keras.distribution.ModelParallel)
    return distribution._layout_map if is_distribution else distribution


def compiled_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return a compiled model's metrics, including metrics given as objects (`_loss_tracker`, `_compile_metrics`)."""
    metrics = [model._loss_tracker] if getattr(model, "_loss_tracker", None) is not None else []
    compile_metrics = getattr(model, "_compile_metrics", None)
    if compile_metrics is not None:
        given = [compile_metrics._user_metrics, compile_metrics._user_weighted_metrics]
        metrics += [m for m in keras.tree.flatten(given) if isinstance(m, keras.Metric)]
        # Metrics given by name exist once Keras has built them.
        metrics += [m for m in compile_metrics.metrics if all(m is not known for known in metrics)]
    return [*metrics, *(m for m in listed_metrics(model) if all(m is not known for known in metrics))]


def listed_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that the `metrics` property of a model's class lists, if the class defines the property.

    The listed metrics may be global names. The list is empty while the property fails, because `compile` may not yet
    have set the attributes that the property reads.
    """
    if type(model).metrics is keras.Model.metrics:
        return []
    try:
        return [metric for metric in keras.tree.flatten(model.metrics) if isinstance(metric, keras.Metric)]
    except (AttributeError, KeyError, TypeError):
        return []


def output_losses(model: keras.Model) -> list[keras.Metric]:
    """Return the loss metrics of a model's outputs (`_compile_loss`). Empty for one output and before Keras builds
    them."""
    compile_loss = getattr(model, "_compile_loss", None)
    return [] if compile_loss is None else list(compile_loss.metrics)


def loss_count(model: keras.Model) -> float:
    """Return the number of samples in the epoch so far, which Keras counts to average the loss (`_loss_tracker`).

    Returns NaN if Keras does not count, or if each replica of a model counts separately.
    """
    tracker = getattr(model, "_loss_tracker", None)
    strategy = distribute_strategy(model)
    if tracker is None or (strategy is not None and strategy.num_replicas_in_sync > 1):
        return math.nan
    return float(tracker.count.numpy()) or math.nan


def metric_function(metric: keras.Metric) -> Callable[..., Any] | None:
    """Return the function of (y_true, y_pred) that a metric averages, or None (`MeanMetricWrapper._fn`)."""
    function: Callable[..., Any] | None = getattr(metric, "_fn", None)
    return function


def set_metric_function(metric: keras.Metric, function: Callable[..., Any]) -> None:
    """Replace the function that a metric averages (`MeanMetricWrapper._fn`)."""
    metric._fn = function


def auto_name(layer: Any) -> str:
    """Return Keras's default name of a layer, metric or seed generator, without the counter."""
    return str(_naming.to_snake_case(type(layer).__name__))


def register_same_name(cls: type, original: type) -> None:
    """Make Keras serialize `cls` under the registered name of `original`."""
    registered = _object_registration.GLOBAL_CUSTOM_NAMES.get(original)
    if registered is not None:
        _object_registration.GLOBAL_CUSTOM_NAMES[cls] = registered


_recorded_models: WeakIdentitySet[keras.Model] = WeakIdentitySet()
# Called with each new model, before its layers exist.
_when_made: list[Callable[[keras.Model], None]] = []


def when_model_is_made(callback: Callable[[keras.Model], None]) -> None:
    """Call `callback` with each new Keras model when its constructor has stored the strategy, after `record_models`."""
    _when_made.append(callback)


def record_models() -> None:
    """Record every Keras model from now on, weakly, when its constructor stores the strategy (`Trainer.__init__`).

    Keras tells a strategy nothing about its models. Models that exist already are found among all objects, once.
    """
    trainer = next(cls for cls in keras.Model.__mro__ if "__init__" in vars(cls) and "fit" in vars(cls))
    init = trainer.__init__

    @functools.wraps(init)
    def recorded_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _record(self)
        if issubclass(type(self), keras.Model):
            for callback in _when_made:
                callback(self)

    patches.replace(trainer, "__init__", recorded_init, "records each model, to find the models of a strategy")
    for found in gc.get_referrers(*_subclasses(keras.Model)):
        if issubclass(type(found), keras.Model):
            _record(found)


def _record(model: Any) -> None:
    if issubclass(type(model), keras.Model):
        _recorded_models.add(model)


def _subclasses(cls: type) -> list[type]:
    below: list[type] = cls.__subclasses__()
    return [cls, *(found for each in below for found in _subclasses(each))]


def traced_models() -> list[keras.Model]:
    """Return the Keras models that have made a step function (such as `Trainer.train_function`)."""
    names = ("train_function", "test_function", "predict_function")
    return [model for model in _recorded_models if any(getattr(model, name, None) is not None for name in names)]


def models_under(strategy: tf.distribute.Strategy) -> list[keras.Model]:
    """Return the Keras models that were built or compiled under `strategy` (`_distribute_strategy`)."""
    return [model for model in _recorded_models if getattr(model, "_distribute_strategy", None) is strategy]


def lookup_table(layer: keras.layers.IntegerLookup) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the keys and values of a layer's vocabulary, and the value of an unknown token."""
    keys, values = layer.lookup_table.export()
    return keys.numpy(), values.numpy(), layer._default_value


@contextlib.contextmanager
def replaced_lookup_table(
    layer: keras.layers.IntegerLookup, lookup: Callable[[tf.Tensor], tf.Tensor]
) -> Iterator[None]:
    """Look up a layer's tokens by `lookup` inside the context."""
    attributes = vars(layer)
    table = attributes["lookup_table"]
    attributes["lookup_table"] = types.SimpleNamespace(lookup=lookup)
    try:
        yield
    finally:
        attributes["lookup_table"] = table
