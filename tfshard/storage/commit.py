"""Passes that write what a step has recorded: the last operations of the step."""

import tensorflow as tf

from tfshard import _private
from tfshard.storage import barrier as barriers
from tfshard.storage import traced_steps
from tfshard.storage.barrier import Barrier
from tfshard.storage.step_record import StepRecord
from tfshard.storage.update_order import is_small_copy
from tfshard.storage.writes import Writable


def hold_small_copies(record: StepRecord, barrier: Barrier) -> None:
    """Let counters, seeds, statistics and metrics wait for each other and for one large value.

    Small copies depend on little. When a step fails on one device, other devices could have counted the step already,
    and devices that should hold equal copies would differ. So small copies wait for each other, for the new rows of
    embedding tables, and for the first large value: that of the first layer, whose gradient comes last. A value that
    operations take from its storage once it is written (`StepRecord.takers`) cannot wait.

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
    known = [update.known() for update in record.row_updates.values()]
    tied = barrier.tie(*(record.values[storage] for storage in waiting), *known)
    record.values |= zip(waiting, tied, strict=False)
    barriers.use(next(iter(record.values)).mesh, [*record.tokens, *tied[len(waiting) :]])


def write(record: StepRecord, barrier: Barrier) -> None:
    """Assign each storage once. Last in the step: DTensor could move a later read in front of an assignment."""
    del barrier
    for storage, value in record.values.items():
        storage.write_stored(_behind_earlier_step(record, storage, value), record.takers.get(storage, ()))
    for (host, axes), tokens in record.host_tokens.items():
        barriers.use(host, tokens, axes)
    for storage, update in record.row_updates.items():
        update.write(record.rows_read[storage])


def _behind_earlier_step(record: StepRecord, storage: Writable, value: tf.Tensor) -> tf.Tensor:
    """Return a value that is written behind the value that an earlier step of the same function wrote.

    DTensor orders the two writes by their operands only. So the earlier value is written once more, and both values
    wait for each other.
    """
    earlier = traced_steps.written_before(record.graph, storage)
    if earlier is None:
        return value
    token, earlier, value = barriers.tie(barriers.read_token(storage.mesh), earlier, value)
    barriers.use(storage.mesh, [token])
    storage.write_stored(earlier)
    return value
