"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): multiply by the two matrices of an adapter, one by one.

Keras adds the product of the matrices to the kernel, and multiplies the input by the sum. Then the backward pass makes
the gradient of the full kernel, and reduces it over the devices, only to get the gradients of two narrow matrices.
A step also makes the sum at its start and keeps the sum for the backward pass. For quantized kernels, Keras multiplies
by the matrices as this module does, except that it merges sharded dims of kernels with several dims.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from tfshard import _private

# The methods of a layer, and of a quantized layer, that Keras calls.
METHODS = ("call", "quantized_call")


def adapted(model: keras.Model) -> list[keras.layers.Layer]:
    """Return the layers of a model with LoRA that this module can call.

    For EinsumDense, the last dim of the kernel must be the last dim of the result, and must not be an input dim: only
    the second matrix has it.
    """
    return [each for each in _private.flatten_layers(model) if type(each) in _ADDED and _has_lora(each)]


def call_function(layer: keras.layers.Layer, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of one of the `METHODS` of a layer.

    Args:
        layer: A layer with LoRA.
        original: The method.
    """

    def call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not layer.lora_enabled:
            return original(inputs, *args, **kwargs)
        with _bare(layer):
            result = original(inputs, *args, **kwargs)
        return _ADDED[type(layer)](layer, inputs, result)

    return call


@contextmanager
def apart(model: keras.Model) -> Iterator[None]:
    """Call the layers with LoRA as in a step while this context is open, even if the model is not sharded."""
    with ExitStack() as stack:
        for layer in adapted(model):
            for method in METHODS:
                if method not in vars(layer):
                    ours = call_function(layer, getattr(layer, method))
                    stack.enter_context(_with_attributes(layer, {method: ours}))
        yield


def _has_lora(layer: keras.layers.Layer) -> bool:
    if not layer.lora_enabled:
        return False
    if not isinstance(layer, keras.layers.EinsumDense):
        return True
    inputs, kernel, result = _letters(layer)
    return kernel[-1] == result[-1] and kernel[-1] not in inputs


def _bare(layer: keras.layers.Layer) -> Any:
    """Return a context in which a layer only multiplies by its kernel."""
    off = {"lora_enabled": False, "bias": None, "activation": None}
    return _with_attributes(layer, {name: value for name, value in off.items() if name in vars(layer)})


@contextmanager
def _with_attributes(layer: keras.layers.Layer, attributes: dict[str, Any]) -> Iterator[None]:
    """Set attributes of a layer for a while, bypassing Keras, which tracks attributes of layers."""
    before = {name: vars(layer)[name] for name in attributes if name in vars(layer)}
    vars(layer).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(layer)[name]
        vars(layer).update(before)


def _dense(layer: keras.layers.Dense, inputs: Any, result: Any) -> Any:
    narrow = keras.ops.matmul(inputs, layer.lora_kernel_a)
    return _finished(layer, _added(layer, result, keras.ops.matmul(narrow, layer.lora_kernel_b)))


def _einsum_dense(layer: keras.layers.EinsumDense, inputs: Any, result: Any) -> Any:
    narrow = keras.ops.einsum(layer.equation, inputs, layer.lora_kernel_a)
    letters = _letters(layer)[2]
    rank = next(letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter not in letters)
    # An einsum, because a matrix product would merge sharded dims.
    equation = f"{letters[:-1]}{rank},{rank}{letters[-1]}->{letters}"
    return _finished(layer, _added(layer, result, keras.ops.einsum(equation, narrow, layer.lora_kernel_b)))


def _embedding(layer: keras.layers.Embedding, inputs: Any, result: Any) -> Any:
    if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
        inputs = keras.ops.cast(inputs, "int32")
    narrow = keras.ops.take(layer.lora_embeddings_a, inputs, axis=0)
    return _added(layer, result, keras.ops.matmul(narrow, layer.lora_embeddings_b))


def _letters(layer: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Return the letters of the input, of the kernel and of the result."""
    operands, result = layer.equation.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    return inputs, kernel, result


def _added(layer: keras.layers.Layer, result: Any, adapted: Any) -> Any:
    total = keras.ops.add(result, getattr(layer, "lora_alpha", layer.lora_rank) / layer.lora_rank * adapted)
    return keras.ops.cast(total, layer.compute_dtype)


def _finished(layer: keras.layers.Dense | keras.layers.EinsumDense, result: Any) -> Any:
    if layer.bias is not None:
        result = keras.ops.add(result, layer.bias)
    return result if layer.activation is None else layer.activation(result)


_ADDED: dict[type[keras.layers.Layer], Callable[[Any, Any, Any], Any]] = {
    keras.layers.Dense: _dense,
    keras.layers.EinsumDense: _einsum_dense,
    keras.layers.Embedding: _embedding,
}
