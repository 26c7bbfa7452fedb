"""Activations that compute their derivative in the forward pass, together with the result.

TensorFlow's GELU keeps three or four tensors of each activation until the backward pass; its SiLU keeps two or three.
The number depends on the executor: a product that could run early waits in a queue until a thread is free, and its
factors wait with it. In a transformer these are the largest activations. The functions here compute result and
derivative together. They keep two tensors, on every device and in every order of execution.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfshard import _private
from tfshard.operations.replacing import replaced

# Returns the same tensors behind one barrier: none exists before all do.
Together: TypeAlias = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]
_Function: TypeAlias = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

# The constant of the approximation by a tanh (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2).
_CUBIC = 0.044715


def with_derivatives(together: Together) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `VERSIONS` compute their derivatives in the forward pass."""
    return replaced((tf.nn, name, functools.partial(version, together)) for name, version in VERSIONS.items())


def gelu(
    together: Together,
    original: Callable[..., tf.Tensor],
    features: Any,
    approximate: bool = False,
    name: Any = None,
) -> tf.Tensor:
    """`tf.nn.gelu`: where a tape may record it, with its derivative."""
    if not _can_be(features):
        return original(features, approximate, name)
    with tf.name_scope(name or "Gelu"):
        return _kept(_approximate if approximate else _exact, features, together)


def silu(together: Together, original: Callable[..., tf.Tensor], features: Any, beta: Any = 1.0) -> tf.Tensor:
    """`tf.nn.silu`, with its derivative."""
    if not _can_be(features) or tf.is_tensor(beta) or beta != 1:
        return original(features, beta)
    with tf.name_scope("Silu"):
        return _kept(_sigmoid_weighted, features, together)


VERSIONS: Mapping[str, Callable[..., tf.Tensor]] = {"gelu": gelu, "silu": silu}


def _can_be(features: Any) -> bool:
    return tf.is_tensor(features) and features.dtype.is_floating and _private.could_record()


def _kept(function: _Function, x: tf.Tensor, together: Together) -> tf.Tensor:
    """Apply an elementwise function, and keep its derivative for the backward pass.

    Args:
        function: Returns the result and the derivative.
        x: The argument of the function.
        together: As for `with_derivatives`.
    """

    def apply(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        result, derivative = together(function(x))

        def product(upstream: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
            def gradient(above: tf.Tensor) -> list[tf.Tensor]:
                with tf.GradientTape() as tape:
                    tape.watch([upstream, x])
                    value = upstream * function(x)[1]
                found: list[tf.Tensor] = tape.gradient(value, [upstream, x], above)
                return found

            return upstream * derivative, gradient

        return result, lambda upstream: tf.custom_gradient(product)(upstream, x)

    return tf.custom_gradient(apply)(x)


def _exact(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    below = 0.5 * tf.math.erfc(-x * math.sqrt(0.5))
    return x * below, below + x * (tf.exp(-0.5 * tf.square(x)) / math.sqrt(2 * math.pi))


def _approximate(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    scale, squared = math.sqrt(2 / math.pi), tf.square(x)
    tanh = tf.tanh(scale * x * (1 + _CUBIC * squared))
    below = 0.5 * (1 + tanh)
    return x * below, below + 0.5 * x * (1 - tf.square(tanh)) * scale * (1 + 3 * _CUBIC * squared)


def _sigmoid_weighted(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    below = tf.sigmoid(x)
    return x * below, below * (1 + x * (1 - below))
