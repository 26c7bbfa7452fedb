"""Pass: slice replicated values for updates when the gradient exists, not when the step begins.

At stages 1 and 2 each device updates a shard of a variable that all devices store in full. Nothing keeps the slice from
running when the step begins, so that a device would hold all slices until their updates. The read goes through a
barrier with the gradient, and so the slice waits for it.
"""

import tensorflow as tf

from tfshard.storage import barrier as barriers
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import consumers
from tfshard.storage.step_record import StepRecord
from tfshard.storage.update_order import LEAST_BYTES


def slice_with_gradient(record: StepRecord, barrier: Barrier) -> None:
    """Slice replicated reads for updates when the gradient exists."""
    del barrier  # The read itself is the first input.
    for each in record.sliced_reads:
        wait_for_gradient(each.stored, each.gradient)


def wait_for_gradient(stored: tf.Tensor, gradient: tf.Tensor) -> None:
    """Let the consumers of a read wait for the gradient of their update.

    Args:
        stored: The read of a variable.
        gradient: The gradient.
    """
    if gradient.shape.num_elements() * gradient.dtype.size < LEAST_BYTES:
        return
    slices = consumers(stored)
    read, _ = barriers.hold(stored, (gradient, consumers(gradient)))
    for each in slices:
        each.replace(read)
