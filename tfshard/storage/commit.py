"""Pass: assign the storages that a step has written. These are the last operations of the step."""

import tensorflow as tf

from tfshard.storage import barrier as barriers
from tfshard.storage import traced_steps
from tfshard.storage.barrier import Barrier
from tfshard.storage.step_record import StepRecord
from tfshard.storage.writes import Writable


def write(record: StepRecord, barrier: Barrier) -> None:
    """Assign each storage once. Last in the step: DTensor could move a later read in front of an assignment."""
    del barrier
    for storage, value in record.values.items():
        storage.write_stored(_behind_earlier_step(record, storage, value), record.takers.get(storage, ()))
    for (host, axes), tokens in record.host_tokens.items():
        barriers.use(host, tokens, axes)
    for state in record.kinds.values():
        state.write()


def _behind_earlier_step(record: StepRecord, storage: Writable, value: tf.Tensor) -> tf.Tensor:
    """Return a value that is written behind the value that an earlier step of the same function wrote.

    DTensor orders the two writes by their operands only. This function therefore writes the earlier value once more,
    behind a barrier with the new value.
    """
    earlier = traced_steps.written_before(record.graph, storage)
    if earlier is None:
        return value
    token, earlier, value = barriers.tie(barriers.read_token(storage.mesh), earlier, value)
    barriers.use(storage.mesh, [token])
    storage.write_stored(earlier)
    return value
