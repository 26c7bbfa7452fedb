"""Models that are built under `strategy.scope()`: their variables are created sharded, and the model is attached later.

Keras names no model when it creates variables. A functional model is constructed after its layers, the constructor
only stores `tf.distribute.get_strategy()`, and the first call that gives a strategy a model is `run`, in `fit`, after
`compile`. So `_private.models_under` keeps a weak set of the models that stored a strategy.
"""

from collections.abc import Callable

import keras

from tfshard import _private
from tfshard.graph import inventory
from tfshard.storage.variables import ShardedVariable
from tfshard.training.attached_model import attached, outermost_first
from tfshard.training.strategy_base import StrategyBase

# Functions that give a model a `compile` with `strategy=` and step functions on the mesh (models.py).
model_preparers: list[Callable[[keras.Model], keras.Model]] = []


def note_birth(variable: ShardedVariable, strategy: StrategyBase, *, in_step: bool) -> None:
    """Record that a variable was created under a strategy.

    Args:
        variable: The variable.
        strategy: The strategy.
        in_step: True if a step was being traced. The function of that step reads the variable's storage.
    """
    if in_step:
        strategy.born_in_steps[id(variable)] = variable
    else:
        strategy.has_births = True


def move_waiting(variable: ShardedVariable, strategy: StrategyBase) -> None:
    """Move a variable that waits on the host, and the other variables of its model, to their layouts.

    Called before the first value is set: weights may be loaded before the scope ends. Does nothing if no model with the
    variable is built.
    """
    if not strategy.has_births or variable.layout.spec.layer is None:
        return  # The variable belongs to a metric or to no layer.
    for model in outermost_first(_private.models_under(strategy)):
        if model in strategy.pipelined_models:
            continue
        owned = [_private.backend_variable(owned) for owned, _ in inventory.owned_variables(model)]
        if model.built and any(each is variable for each in owned):
            attached(model, strategy).move_waiting()
            return


def attach_born(strategy: StrategyBase) -> None:
    """Attach the models that were built under a strategy, as `as_distributed` and `compile` would."""
    if not strategy.has_births or not _private.is_eager():
        return
    strategy.has_births = False
    models = [
        model
        for model in _private.models_under(strategy)
        if model not in strategy.pipelined_models and not _is_in_functions(model, strategy)
    ]
    # The outer model first: variables in a group of an inner model would stay in that group.
    for model in outermost_first(models):
        for prepare in model_preparers:
            prepare(model)
        attached(model, strategy).attach()


def _is_in_functions(model: keras.Model, strategy: StrategyBase) -> bool:
    """Return True if a custom loop's step created the variables of a model: its function must go on reading them."""
    variables = (_private.backend_variable(variable) for variable, _ in inventory.owned_variables(model))
    return not model.compiled and any(strategy.born_in_steps.get(id(each)) is each for each in variables)
