"""Keras optimizers: nested optimizers, variables and slot names."""

import contextlib
import functools
import re
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers import base_optimizer as _base_optimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfshard._private.models import auto_name
from tfshard._private.threads import in_this_thread


def optimizer_chain(optimizer: keras.optimizers.Optimizer | None) -> list[keras.optimizers.Optimizer]:
    """Return the optimizer and all optimizers it wraps.

    Follows `LossScaleOptimizer.inner_optimizer` and `MultiOptimizer.optimizers`.
    """
    chain: list[keras.optimizers.Optimizer] = []
    waiting = [optimizer]
    while waiting:
        part = waiting.pop(0)
        if part is not None and all(part is not known for known in chain):
            chain.append(part)
            waiting += [getattr(part, "inner_optimizer", None), *getattr(part, "optimizers", [])]
    return chain


def variables_of_optimizer(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that an optimizer created itself (`BaseOptimizer._variables`)."""
    return list(optimizer._variables)


def slot_owner(slot_name: str, names: Container[str]) -> str | None:
    """Return the name among `names` that a slot belongs to, or None. `names` are variable paths with "_" for "/".

    Keras names a slot after its variable's path: "dense/kernel" has "dense_kernel_momentum".
    """
    prefixes = (slot_name[:i] for i, letter in enumerate(slot_name) if letter == "_")
    return max((prefix for prefix in prefixes if prefix in names), key=len, default=None)


def uses_weight_decay(
    optimizer: keras.optimizers.Optimizer, fn: Callable[..., Any], variable: tf.Variable
) -> bool | None:
    """Return whether `fn`, Keras's weight decay, decays `variable` (`_apply_weight_decay`). None for any other `fn`."""
    if getattr(fn, "__name__", "") != "weight_decay_fn":
        return None
    return bool(optimizer._use_weight_decay(variable))


def decays(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Return whether an optimizer's weight decay applies to `variable`."""
    return bool(getattr(optimizer, "weight_decay", None)) and bool(optimizer._use_weight_decay(variable))


def optimizer_references(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the trainable variables that an optimizer was built with (`BaseOptimizer._trainable_variables`)."""
    return list(getattr(optimizer, "_trainable_variables", []))


def given_name(optimizer: keras.optimizers.Optimizer) -> str:
    """Return the name given to an optimizer, or the class's default name without Keras's counter."""
    base = auto_name(optimizer)
    name: str = optimizer.name
    return base if re.fullmatch(rf"{re.escape(base)}(_\d+)?", name) else name


@contextlib.contextmanager
def only_for(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> Iterator[None]:
    """Restrict an optimizer's weight averages and gradient sums to some variables inside the context.

    Changes `_trainable_variables`, `_model_variables_moving_average` and `_accumulated_gradients`. The optimizer still
    finds slots through `_get_variable_index`, which does not change.
    """
    wanted = {id(variable) for variable in variables}
    every = optimizer_references(optimizer)
    kept = [id(variable) in wanted for variable in every]
    changed: dict[str, list[Any]] = {
        "_trainable_variables": [each for each, keep in zip(every, kept, strict=True) if keep]
    }
    if optimizer.use_ema:
        averages = optimizer._model_variables_moving_average
        changed["_model_variables_moving_average"] = [each for each, keep in zip(averages, kept, strict=True) if keep]
    if optimizer.gradient_accumulation_steps:
        sums = optimizer._accumulated_gradients
        changed["_accumulated_gradients"] = [each if keep else None for each, keep in zip(sums, kept, strict=True)]
    before = {name: getattr(optimizer, name) for name in changed}
    # setattr would track the lists.
    vars(optimizer).update(changed)
    try:
        yield
    finally:
        vars(optimizer).update(before)


@contextlib.contextmanager
def known_global_norm(norm: tf.Tensor | None) -> Iterator[None]:
    """Use `norm` as the global gradient norm inside the context (`base_optimizer.global_norm`). None has no effect."""
    original = _base_optimizer.global_norm
    if norm is not None:
        _base_optimizer.global_norm = in_this_thread(lambda values: norm, original)
    try:
        yield
    finally:
        _base_optimizer.global_norm = original


@contextlib.contextmanager
def applied_by(
    apply: Callable[[keras.optimizers.Optimizer, Sequence[Any], Sequence[Any]], object],
    scaled: Callable[[keras.optimizers.Optimizer, tf.Tensor], tf.Tensor],
) -> Iterator[None]:
    """Replace the updates of all optimizers by `apply` inside the context.

    Changes every class that defines `BaseOptimizer.apply`, which `apply_gradients` calls, or
    `BaseOptimizer.scale_loss`.

    Args:
        apply: Called with an optimizer, gradients and variables instead of the update.
        scaled: Maps an optimizer and its scaled loss to the loss to use.
    """
    scaling: list[keras.optimizers.Optimizer] = []

    def applied(self: keras.optimizers.Optimizer, grads: Any, trainable_variables: Any = None) -> None:
        gradients = list(grads)
        variables = optimizer_references(self) if trainable_variables is None else list(trainable_variables)
        if len(gradients) != len(variables):
            raise ValueError(
                f"Optimizer '{self.name}' was given {len(gradients)} gradients for {len(variables)} variables."
            )
        apply(self, gradients, variables)

    def scale(original: Callable[..., tf.Tensor], self: keras.optimizers.Optimizer, loss: tf.Tensor) -> tf.Tensor:
        if scaling:  # Called by the superclass or an inner optimizer.
            return original(self, loss)
        scaling.append(self)
        try:
            return scaled(self, original(self, loss))
        finally:
            scaling.clear()

    classes = [BaseOptimizer]
    for cls in classes:
        classes += [each for each in cls.__subclasses__() if each not in classes]
    with contextlib.ExitStack() as stack:
        for cls in classes:
            for name in {"apply", "scale_loss"} & vars(cls).keys():
                original = vars(cls)[name]
                stack.callback(setattr, cls, name, original)
                changed = applied if name == "apply" else functools.partial(scale, original)
                setattr(cls, name, in_this_thread(changed, original))
        yield
