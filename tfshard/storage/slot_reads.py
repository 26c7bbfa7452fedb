"""Pass: read a slot's new value from the slot once it is written.

A device would hold a slot's old value beside the new one until a thread assigns the slot. If devices outnumber cores,
this may happen only after the update. Operations that use the new value therefore wait for the assignment and read the
slot (`barrier.write_then_read`). The old value is free by then.
"""

import tensorflow as tf

from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import OpInput, consumers
from tfshard.storage.small_copies import is_small_copy
from tfshard.storage.step_record import StepRecord
from tfshard.storage.update_order import LEAST_BYTES
from tfshard.storage.writes import Recorded, Writable

# Operations between a new value and its write. They leave a value of the right layout unchanged.
_SAME = frozenset(("Identity", "IdentityN", "Relayout"))


def read_slots_after_write(record: StepRecord, barrier: Barrier) -> None:
    """Find the operations that can take a new value from its storage once it is written (`StepRecord.takers`)."""
    del barrier  # `Storage.write_stored` makes one.
    record.takers = {
        storage: takers_of(storage, record.updated[storage], value)
        for storage, value in record.values.items()
        if not is_small_copy(storage, value)
    }


def takers_of(storage: Writable, updated: tf.Tensor | None, value: tf.Tensor) -> list[OpInput]:
    """Return the inputs that can take a new value from its storage, which has the same layout and dtype.

    Args:
        storage: The storage.
        updated: The new value as the update computed it.
        value: The value that is written: the new value behind identities and pins.
    """
    is_traced = updated is not None and hasattr(updated, "graph")
    if not is_traced or not storage.is_stored_as_updated or storage.updated_bytes < LEAST_BYTES:
        return []
    way: set[tf.Operation] = set()
    while value is not updated:
        if value.op.type not in _SAME:
            return []
        way.add(value.op)
        value = value.op.inputs[value.value_index if value.op.type == "IdentityN" else 0]
    return [each for each in consumers(value) if each.operation not in way]


def new_value(storage: Writable, recorded: Recorded) -> tf.Tensor | None:
    """Return the new value of a storage as an update computed it; None if the update wrote only some members."""
    if not recorded.written:
        return recorded.base
    return None if storage.is_group else recorded.written[0]
