"""Checks on Keras models before anything is done to them, and what a model consists of."""

import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfshard import _private
from tfshard.errors import StrategyError, UnsupportedLayerError
from tfshard.layout_map import VariableSpec
from tfshard.variables import ShardedVariable

# What DTensor cannot expand in built-in layers, with the remedy: docs/layers.md, from tests/test_layers.py.
_RNN_REMEDY = "pass unroll=True to the layer (its number of timesteps must be fixed)"


def unsupported_reason(layer: keras.Layer) -> str | None:
    """Why DTensor cannot expand this layer, or None."""
    if isinstance(layer, keras.layers.ConvLSTM1D | keras.layers.ConvLSTM2D | keras.layers.ConvLSTM3D):
        return "its time loop is a tf.while_loop, which DTensor cannot expand; there is no unrolled form"
    if isinstance(layer, keras.layers.RNN) and not layer.unroll:
        return f"its time loop is a tf.while_loop, which DTensor cannot expand; {_RNN_REMEDY}"
    return None


def check_layers(model: keras.Model) -> None:
    """Raises `UnsupportedLayerError` naming every layer that DTensor cannot expand, with the remedy."""
    found = [(layer, unsupported_reason(layer)) for layer in _private.flatten_layers(model)]
    lines = [f"- '{layer.name}' ({type(layer).__name__}): {reason}" for layer, reason in found if reason]
    if lines:
        raise UnsupportedLayerError(
            f"Model '{model.name}' has layers that cannot be sharded:\n" + "\n".join(lines) + "\nSee docs/layers.md."
        )


def owned_variables(model: keras.Model) -> list[tuple[keras.Variable, keras.Layer]]:
    """Each variable of a model once, with the layer that owns it."""
    owned, seen = [], set()
    for layer in _private.flatten_layers(model):
        for variable in _private.own_variables(layer):
            if id(variable) not in seen:
                seen.add(id(variable))
                owned.append((variable, layer))
    return owned


def variable_spec(variable: keras.Variable, layer: keras.Layer | None) -> VariableSpec:
    """What a layout is decided from, for a Keras variable."""
    return VariableSpec(
        path=variable.path,
        shape=tuple(variable.shape),
        dtype=keras.backend.standardize_dtype(_private.backend_variable(variable).dtype),
        trainable=variable.trainable,
        layer=layer,
    )


def check_not_elsewhere(model: keras.Model, strategy: Any) -> None:
    """Raises `StrategyError` when the model belongs to another strategy."""
    other = _private.distribute_strategy(model)
    if other is not None and other is not strategy:
        raise StrategyError(
            f"Model '{model.name}' was built or compiled under another strategy. Build a new model, or compile it "
            f"with that strategy. Its strategy: {other!r}. Received: strategy={strategy!r}"
        )
    for variable, _ in owned_variables(model):
        current = _private.backend_variable(variable)
        if isinstance(current, ShardedVariable) and current.mesh != strategy.mesh:
            raise StrategyError(
                f"Variable '{variable.path}' of model '{model.name}' lives on another mesh. Build a new model. "
                f"Its mesh: {current.mesh}. Received: strategy={strategy!r}"
            )


def check_step_function(fn: Callable, strategy: Any) -> None:
    """Checks a Keras model once, when the strategy first runs one of its step functions."""
    model = getattr(fn, "__self__", None)
    if isinstance(model, keras.Model):
        check_ready(model, strategy)


_ready: "weakref.WeakKeyDictionary[keras.Model, int]" = weakref.WeakKeyDictionary()


def check_ready(model: keras.Model, strategy: Any) -> None:
    """Raises unless the model can run under the strategy: layers, layout map, no XLA compilation."""
    if _ready.get(model) == id(strategy):
        return
    if model.compiled and model.jit_compile:
        raise_jit_compile(model)
    check_layers(model)
    strategy.plan_model(model)
    _ready[model] = id(strategy)


def raise_jit_compile(model: keras.Model) -> None:
    raise StrategyError(
        f"Model '{model.name}' cannot be compiled with jit_compile=True under a ShardedStrategy: XLA does not see "
        "the mesh, DTensor compiles the step itself. Leave jit_compile out. Received: jit_compile=True"
    )


# --- Models born under `strategy.scope()` -----------------------------------------------------------

# trainer.py adds the function that gives a model a compile() with strategy= and on-mesh step functions.
model_adopters: list[Callable[[keras.Model], Any]] = []
_created: "weakref.WeakSet[Any]" = weakref.WeakSet()


def note_created(strategy: Any) -> None:
    """Remembers that a variable was born under the strategy, so that its model is looked for."""
    _created.add(strategy)


def adopt_models(strategy: Any) -> None:
    """Gives the models that were born under the strategy the behaviour of `as_distributed`."""
    if strategy not in _created or not _private.is_eager():
        return
    _created.discard(strategy)
    for model in _private.live_models(strategy):
        for adopt in model_adopters:
            adopt(model)
