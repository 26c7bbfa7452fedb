"""LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685): products with an adapter's matrices, one after the other.

Keras adds the product of the matrices to the kernel, and multiplies by the sum. Then the gradient of the whole kernel
is made, and reduced over the devices, to get from it that of two narrow matrices; and the sum is made when the step
begins and kept for the backward pass. Where a kernel is quantized, Keras does it as it is done here, but for kernels of
several dims, whose sharded ones it merges.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from tfshard import _private

# What Keras calls of a layer, and of a quantized one.
METHODS = ("call", "quantized_call")


def adapted(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of a model that have LoRA and can be called as it is done here.

    The last dim of a kernel, which only the second matrix has, has to be the last of the result.
    """
    return [each for each in _private.flatten_layers(model) if type(each) in _ADDED and _has_lora(each)]


def call_function(layer: keras.layers.Layer, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for one of the `METHODS` of a layer.

    Args:
        layer: It has LoRA.
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
    """While this is open, layers with LoRA are called as in a step, also those of a model that is not sharded."""
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
    """A context in which a layer is a product with its kernel and nothing else."""
    off = {"lora_enabled": False, "bias": None, "activation": None}
    return _with_attributes(layer, {name: value for name, value in off.items() if name in vars(layer)})


@contextmanager
def _with_attributes(layer: keras.layers.Layer, attributes: dict[str, Any]) -> Iterator[None]:
    """Without Keras taking note of it: it tracks what is set on layers."""
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
    # No matrix product, which would merge dims that are sharded.
    equation = f"{letters[:-1]}{rank},{rank}{letters[-1]}->{letters}"
    return _finished(layer, _added(layer, result, keras.ops.einsum(equation, narrow, layer.lora_kernel_b)))


def _embedding(layer: keras.layers.Embedding, inputs: Any, result: Any) -> Any:
    if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
        inputs = keras.ops.cast(inputs, "int32")
    narrow = keras.ops.take(layer.lora_embeddings_a, inputs, axis=0)
    return _added(layer, result, keras.ops.matmul(narrow, layer.lora_embeddings_b))


def _letters(layer: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Of the input, of the kernel and of the result."""
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
