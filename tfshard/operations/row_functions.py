"""TensorFlow functions that process one sample after the other. Each device calls them with its local rows (rows.py).

TensorFlow writes these functions with loops, lists and scatters. DTensor would compute them in full on every device, if
at all. A dilated convolution moves its places into the batch and back: over the rows of all devices, this would
exchange the full tensor.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.errors import UnsupportedOperationError
from tfshard.operations import (
    activations,
    attention,
    batch_moments,
    chunked_cross_entropy,
    cross_entropies,
    repeats,
    rows,
    unsized,
    vocabulary,
)
from tfshard.operations.replacing import replaced
from tfshard.storage import steps


def called_with_rows(mesh: dtensor.Mesh) -> contextlib.AbstractContextManager[None]:
    """Replace `tf.map_fn`, `tf.nn.ctc_loss` and dilated convolutions on a mesh, while a step is traced. Also replace
    some other functions: batch normalization, activations with their derivative, and cross entropy with integer labels.
    """
    return replaced((module, name, functools.partial(version, mesh)) for module, name, version in _VERSIONS)


def _map(
    mesh: dtensor.Mesh, original: Callable[..., Any], fn: Callable[..., Any], elems: Any, *args: Any, **kwargs: Any
) -> Any:
    # Each device's trace has no AutoGraph, which a Python `if` in the user's function needs.
    fn = _private.converted_by_autograph(fn)

    def call(elems: Any) -> Any:
        return original(fn, elems, *args, **kwargs)

    composite = [each for each in tf.nest.flatten((elems, args, kwargs)) if _is_composite(each)]
    if composite and steps.current() is not None and not tf.executing_eagerly():
        raise UnsupportedOperationError(
            "A compiled step on a mesh cannot have a tf.map_fn that takes or returns ragged or sparse tensors: "
            "DTensor ends the process. Use rows of equal length, together with a mask or with their lengths. "
            f"Received: {type(composite[0]).__name__} of shape {composite[0].shape}"
        )

    def call_by_rows(elems: Any) -> Any:
        result = call(elems)
        found = _private.operation_types(tf.compat.v1.get_default_graph()) & unsized.AS_MANY_AS_FOUND
        if found:
            raise UnsupportedOperationError(
                "A function that each device runs on its local rows cannot have tensors whose size depends on "
                f"values. Received: a function with {sorted(found)[0]}"
            )
        return result

    leaves = tf.nest.flatten(elems)
    if not leaves or not all(_is_of_batch(leaf, mesh) for leaf in leaves):
        return call(elems)
    try:
        return rows.local_map(call_by_rows, [elems], mesh, full_captures=True)
    except UnsupportedOperationError:
        # It draws random numbers, writes to a variable, or has tensors of unknown size: each device does it with all
        # rows.
        return call(elems)


def _is_composite(value: Any) -> bool:
    kinds = (tf.RaggedTensor, tf.RaggedTensorSpec, tf.SparseTensor, tf.SparseTensorSpec)
    return isinstance(value, kinds)


def _is_of_batch(leaf: Any, mesh: dtensor.Mesh) -> bool:
    """Return whether the rows of a tensor may be the rows of the batch. `TimeDistributed` maps over timesteps."""
    if not isinstance(leaf, tf.Tensor) or not rows.can_be(leaf, mesh):
        return False
    permutation = tf.get_static_value(leaf.op.inputs[1]) if leaf.op.type == "Transpose" else None
    return permutation is None or permutation[0] == 0


def _ctc(
    mesh: dtensor.Mesh,
    original: Callable[..., Any],
    labels: Any,
    logits: Any,
    label_length: Any,
    logit_length: Any,
    logits_time_major: bool = True,
    unique: Any = None,
    **kwargs: Any,
) -> tf.Tensor:
    def loss(labels: tf.Tensor, logits: tf.Tensor, label_length: tf.Tensor, logit_length: tf.Tensor) -> tf.Tensor:
        with _private.ctc_with_unique_names():
            return original(labels, logits, label_length, logit_length, logits_time_major=False, **kwargs)

    by_sample = tf.transpose(logits, [1, 0, 2]) if logits_time_major else logits
    if unique is not None or not tf.is_tensor(labels) or not rows.can_be(by_sample, mesh):
        return original(labels, logits, label_length, logit_length, logits_time_major, unique, **kwargs)
    return rows.local_map(loss, [labels, by_sample, label_length, logit_length], mesh)


def _convolution(mesh: dtensor.Mesh, original: Callable[..., Any], *args: Any, **kwargs: Any) -> tf.Tensor:
    given = inspect.signature(original).bind(*args, **kwargs)
    inputs, dilations = given.arguments["input"], given.arguments.get("dilations")
    is_dilated = dilations is not None and np.max(dilations) > 1
    if not is_dilated or not tf.is_tensor(inputs) or not rows.can_be(inputs, mesh):
        return original(*args, **kwargs)

    def convolve(inputs: tf.Tensor) -> tf.Tensor:
        given.arguments["input"] = inputs
        return original(*given.args, **given.kwargs)

    return rows.local_map(convolve, [inputs], mesh, full_captures=True)


def _activation(
    version: Callable[..., tf.Tensor],
    mesh: dtensor.Mesh,
    original: Callable[..., tf.Tensor],
    *args: Any,
    **kwargs: Any,
) -> tf.Tensor:
    step = steps.current()
    if step is None or step.graph is None or steps.here() is not step.graph:
        return original(*args, **kwargs)
    return version(lambda tensors: step.tie(mesh, *tensors), original, *args, **kwargs)


def _cross_entropy(
    mesh: dtensor.Mesh, original: Callable[..., tf.Tensor], labels: Any = None, logits: Any = None, name: Any = None
) -> tf.Tensor:
    step = steps.current()
    is_traced = step is not None and step.graph is not None and steps.here() is step.graph
    if is_traced:
        made = chunked_cross_entropy.cross_entropy(labels, logits, is_sparse=True)
        if made is not None:
            return made
    if not is_traced or mesh.device_type().upper() != "CPU":
        return original(labels=labels, logits=logits, name=name)
    return cross_entropies.sparse(mesh, vocabulary.sharded_axis, original, labels, logits, name)


def _dense_cross_entropy(
    mesh: dtensor.Mesh,
    original: Callable[..., tf.Tensor],
    labels: Any,
    logits: Any,
    axis: int = -1,
    name: Any = None,
) -> tf.Tensor:
    del mesh
    if axis in (-1, getattr(logits.shape, "rank", 0) - 1):
        made = chunked_cross_entropy.cross_entropy(labels, logits, is_sparse=False)
        if made is not None:
            return made
    return original(labels=labels, logits=logits, axis=axis, name=name)


_VERSIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (tf, "map_fn", _map), (tf, "vectorized_map", _map), (tf.nn, "ctc_loss", _ctc), (tf.nn, "convolution", _convolution),
    (tf.nn, "depthwise_conv2d", _convolution), (tf.nn, "separable_conv2d", _convolution),
    (tf, "repeat", repeats.repeat), (tf.nn, "moments", batch_moments.moments),
    (tf.nn, "batch_normalization", batch_moments.normalize),
    (tf.nn, "sparse_softmax_cross_entropy_with_logits", _cross_entropy),
    (_private.keras_backend_nn, "dot_product_attention", attention.dot_product_attention),
    (tf.nn, "softmax_cross_entropy_with_logits", _dense_cross_entropy),
    *((tf.nn, name, functools.partial(_activation, version)) for name, version in activations.VERSIONS.items()),
)  # fmt: skip
