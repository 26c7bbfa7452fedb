"""Pass: write counters, seeds, statistics and metrics only if the step succeeds on all devices.

Small copies depend on little. When a step fails on one device, other devices could have counted the step already, and
devices that should hold equal copies would differ.
"""

import tensorflow as tf

from tfshard import _private
from tfshard.storage import barrier as barriers
from tfshard.storage.barrier import Barrier
from tfshard.storage.step_record import StepRecord
from tfshard.storage.writes import Writable

_SMALL_BYTES = 1 << 20


def hold_small_copies(record: StepRecord, barrier: Barrier) -> None:
    """Let counters, seeds, statistics and metrics wait for each other and for one large value.

    They also wait for the new values of variables of a kind (`KindState.known`). The large value is the value of the
    first layer: its gradient comes last. A value that operations take from its storage once it is written
    (`StepRecord.takers`) cannot wait.

    The pass uses the tokens of the step. A step that writes nothing returns their sum to its caller.
    """
    if not record.values:
        record.token = tf.add_n(record.tokens) if record.tokens else None
        return
    if _private.is_eager():
        return  # In eager code a failure ends the step before the first write.
    small = [storage for storage, value in record.values.items() if is_small_copy(storage, value)]
    large = [storage for storage in record.values if storage not in small and not record.takers.get(storage)]
    waiting = small + large[:1]
    known = [each for state in record.kinds.values() for each in state.known()]
    tied = barrier.tie(*(record.values[storage] for storage in waiting), *known)
    record.values |= zip(waiting, tied, strict=False)
    barriers.use(next(iter(record.values)).mesh, [*record.tokens, *tied[len(waiting) :]])


def is_small_copy(storage: Writable, value: tf.Tensor) -> bool:
    """Return whether a value is small and replicated, as counters, seeds, statistics and metrics are."""
    return not any(storage.format.storage) and bool(value.shape.num_elements() * value.dtype.size < _SMALL_BYTES)
