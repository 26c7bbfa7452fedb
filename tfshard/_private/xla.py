"""XLA: programs in StableHLO, made of TensorFlow's operations, and the operation that runs them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as _xla
from tensorflow.core.framework import attr_value_pb2

# XLA's environment variable for flags. XLA reads it once, and ends the process on a flag that it does not know.
_FLAGS = "XLA_FLAGS"
# The schedule of a CPU program: by default, operations that do not depend on each other run on different threads.
_SCHEDULE = "--xla_cpu_enable_concurrency_optimized_scheduler"
# The series of TensorFlow that are known to know the flag.
_HAVE_SCHEDULE = ("2.21",)
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
    with tf.init_scope(), _schedule():
        traced = tf.function(function, autograph=False, jit_compile=True)
        generate = traced.experimental_get_compiler_ir(*specs)
        return bytes(generate(stage="stablehlo_serialized", platform_name=device_type))


@contextlib.contextmanager
def _schedule() -> Iterator[None]:
    """Let a CPU program run one operation after the other if an operation has one thread, until the scope ends.

    The thread is shared by the devices of the process, and devices wait for it (benchmarks/LOG.md, "Compiled blocks").
    XLA reads the flags when it makes the first program of the process. Flags of the user stay.
    """
    before = os.environ.get(_FLAGS)
    is_file = before is not None and not before.lstrip().startswith("-")
    if (
        tf.config.threading.get_intra_op_parallelism_threads() != 1
        or not tf.__version__.startswith(tuple(f"{each}." for each in _HAVE_SCHEDULE))
        or is_file
        or _SCHEDULE in (before or "")
    ):
        yield
        return
    os.environ[_FLAGS] = " ".join([*filter(None, [before]), f"{_SCHEDULE}=false"])
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FLAGS]
        else:
            os.environ[_FLAGS] = before


def call_stablehlo(
    module: bytes,
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[tf.TensorShape],
    device_type: str,
) -> list[tf.Tensor]:
    """Run a module as one operation, and return its results (the operation XlaCallModule).

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


def annotated_call(
    module: bytes,
    inputs: Sequence[tf.Tensor],
    results: Sequence[tf.TensorSpec],
    device_type: str,
    layouts: Sequence[str] = (),
) -> tf.Operation:
    """Run a module as an operation with the attributes that DTensor adds to an operation in a step.

    TensorFlow finds the compiled program of a device by all attributes except the one for colocation.

    Args:
        module: The result of `stablehlo`.
        inputs: The arguments.
        results: The shape and dtype of each result.
        device_type: As for `stablehlo`.
        layouts: The layout of each result, if an operand in the step has a parted layout. DTensor then leaves the
            layouts on the operation.
    """
    made = call_stablehlo(
        module, inputs, [each.dtype for each in results], [each.shape for each in results], device_type
    )
    operation: tf.Operation = made[0].op
    shapes = attr_value_pb2.AttrValue(
        list=attr_value_pb2.AttrValue.ListValue(shape=[each.shape.as_proto() for each in results])
    )
    for name in ("_global_shape", "_output_shapes"):
        operation._set_attr(name, shapes)
    if layouts:
        names = attr_value_pb2.AttrValue.ListValue(s=[each.encode() for each in layouts])
        operation._set_attr("_layout", attr_value_pb2.AttrValue(list=names))
    return operation


def run_always(operation: tf.Operation) -> None:
    """Make a traced function run an operation with unused results, without a further attribute."""
    with tf.control_dependencies([operation]):
        tf.raw_ops.Empty(shape=[0], dtype=tf.float32)  # TensorFlow runs all stateful operations.
    # `tf.control_dependencies` adds the attribute.
    operation._clear_attr("_has_manual_control_dependencies")


def traced_apart(function: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """Return a traced function without arguments and results, which runs outside of DTensor."""
    with tf.device(None):
        traced: Callable[[], None] = tf.function(lambda: function(*arguments), autograph=False).get_concrete_function()
    return traced
