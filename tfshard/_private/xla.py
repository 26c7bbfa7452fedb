"""XLA: programs in StableHLO, made of TensorFlow's operations, and the operation that runs them."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as _xla

# The version of XlaCallModule's calling convention. Version 9 has no list of disabled checks.
_VERSION = 9


def stablehlo(function: Callable[..., Any], specs: Sequence[tf.TensorSpec], device_type: str) -> bytes:
    """Return the serialized StableHLO module of a function (`experimental_get_compiler_ir`).

    No device of that type is needed.

    Args:
        function: A function of tensors that returns tensors.
        specs: Its arguments, with static shapes.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
    """
    with tf.init_scope():
        traced = tf.function(function, autograph=False, jit_compile=True)
        generate = traced.experimental_get_compiler_ir(*specs)
        return bytes(generate(stage="stablehlo_serialized", platform_name=device_type))


def call_stablehlo(
    module: bytes,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[tf.TensorShape],
    device_type: str,
) -> list[tf.Tensor]:
    """Run a module as one operation, and return its results (`xla.call_module`, the operation XlaCallModule).

    Args:
        module: The result of `stablehlo`.
        inputs: The arguments.
        dtypes: The dtype of each result.
        shapes: The shape of each result, with None for an unknown size.
        device_type: As for `stablehlo`.
    """
    results = _xla.call_module(
        list(inputs),
        version=_VERSION,
        module=module,
        Tout=list(dtypes),
        Sout=list(shapes),
        platforms=["CUDA" if device_type == "GPU" else device_type],
    )
    return list(results)
