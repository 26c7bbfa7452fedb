"""Check the process and the arguments of a step."""

import math
from collections.abc import Callable

import tensorflow as tf

from tfshard import _private
from tfshard.devices import transfer
from tfshard.errors import StrategyError, UnsupportedOperationError


def check_process() -> None:
    """Raise `UnsupportedOperationError` if `tf.debugging.enable_check_numerics` is on.

    DTensor cannot expand the operations that it adds.
    """
    if _private.checks_all_numbers():
        raise UnsupportedOperationError(
            "tf.debugging.enable_check_numerics() adds an operation that DTensor cannot expand after each "
            "operation. Call tf.debugging.disable_check_numerics(). To end training at a loss that is NaN or "
            "infinite, give fit keras.callbacks.TerminateOnNaN(). To find where such a number comes from, put "
            "tf.debugging.check_numerics(tensor, message) into a layer's call or a train_step, or train a few steps "
            "on one device. Received: check_numerics enabled"
        )


def check_traced_arguments(fn: Callable[..., object]) -> None:
    """Raise `StrategyError` if the tf.function around a step was called on a batch that is not on the mesh.

    DTensor would refuse the batch, too, but with a less helpful message.
    """
    with tf.init_scope():
        for tensor in _private.traced_arguments():
            shape = tuple(tensor.shape)  # NumPy would ask a sharded tensor for its value.
            # DTensor broadcasts small integers.
            broadcast = not shape or (math.prod(shape) <= 128 and not tf.as_dtype(tensor.dtype).is_floating)
            if not broadcast and not transfer.is_dtensor(tensor):
                raise StrategyError(
                    "A tf.function that calls strategy.run was given a batch that is not on the mesh. Take its "
                    "batches from strategy.experimental_distribute_dataset(dataset), or call "
                    "strategy.run(step_function, args=(batch,)) outside of a tf.function, which moves the batch to "
                    f"the mesh. Received: a tensor of shape={shape} for a function that runs {fn!r}"
                )


def check_captures(graph: tf.Graph) -> None:
    """Raise `StrategyError` if a step uses a variable that is not on the mesh.

    DTensor would let every device read and write the variable independently, in no certain order.
    """
    with tf.init_scope():
        strangers = [handle for handle in _private.captured_resources(graph) if not transfer.is_dtensor(handle)]
    if strangers:
        raise StrategyError(
            f"A step uses variable {_private.resource_name(strangers[0])}, which is not on the mesh. Make the "
            "optimizer, metric or layer that owns the variable under strategy.scope(), or an attribute of the model "
            "before compile. Make a plain tf.Variable under strategy.scope(), or with the model's add_weight."
        )
