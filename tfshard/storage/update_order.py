"""Passes that order the updates of a step, and free what updates replace.

DTensor reduces all gradients that are not scattered as one, so that they arrive at once, and nothing orders the work
that follows. A device would hold the buffer of the reduction until the last gradient is sliced out of it, while it
updates other variables already. It would update several variables at the same time. It would hold a slot's old value
beside the new one until a thread has time to assign the slot, which may be after the update where devices outnumber
cores. This can be much of a step's memory, and it differs from step to step. So these passes change the traced graph:

- `order_updates`: no update begins before all gradients of its optimizer are sliced out, nor before the update in front
  of it has computed a new value.
- `read_slots_after_write`: operations that use a slot's new value read it from the slot once it is written. The old
  value is free by then.
- `slice_with_gradient`: at stages 1 and 2 a device slices its shard of a variable when the gradient exists, not when
  the step begins.

No number changes.
"""

import collections
import itertools
from collections.abc import Hashable, Mapping, Sequence

import tensorflow as tf

from tfshard.devices import merges
from tfshard.storage import barrier as barriers
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import OpInput, consumers, depends_on
from tfshard.storage.step_record import JointUpdate, StepRecord
from tfshard.storage.writes import Recorded, Writable

# Smaller tensors on a device are not worth the operations.
LEAST_BYTES = 1 << 18
_SMALL_BYTES = 1 << 20

# Operations between a new value and its write that leave a value of the right layout as it is.
_SAME = frozenset(("Identity", "IdentityN", "Relayout"))


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


def order_updates(record: StepRecord, barrier: Barrier) -> None:
    """Let updates wait for the gradients that are reduced with theirs, and for each other."""
    if not record.updates or not merges.happen(record.updates[0].storage.mesh):
        return
    mesh = record.updates[0].storage.mesh
    storages = {update.storage for update in record.updates}
    others = [
        value
        for storage, value in record.values.items()
        if storage not in storages and storage.mesh is mesh and is_small_copy(storage, value)
    ]
    replaced = one_after_the_other(record.updates, record.updated, others, barrier)
    for storage, each in record.updated.items():
        record.updated[storage] = None if each is None else replaced.get(each.ref(), each)
    for storage, value in record.values.items():
        record.values[storage] = replaced.get(value.ref(), value)


def one_after_the_other(
    updates: Sequence[JointUpdate],
    values: Mapping[Writable, tf.Tensor | None],
    others: Sequence[tf.Tensor],
    barrier: Barrier,
) -> dict[Hashable, tf.Tensor]:
    """Let updates wait for the gradients that arrive with theirs, and for each other.

    Args:
        updates: All updates of a step, in order.
        values: The new value of each storage, in the update layout.
        others: Other small values to write. Some, such as metrics of the loss, are reduced together with the gradients.
            Values that do not depend on updates exist before them.
        barrier: Makes barriers.

    Returns:
        The tensors to write in place of new values, by reference.
    """
    batches: dict[int, list[JointUpdate]] = collections.defaultdict(list)
    for update in updates:
        batches[update.since].append(update)
    replaced: dict[Hashable, tf.Tensor] = {}
    for since, batch in batches.items():
        operations = batch[0].gradient.graph.get_operations()
        begun = set(operations[since:])
        users = [[each for each in consumers(update.gradient) if each.operation in begun] for update in batch]
        given = list(zip((update.gradient for update in batch), users, strict=True))
        updating = {each.operation for inputs in users for each in inputs}
        known = [each for each in others if not depends_on(each, updating, begun.__contains__)]
        tied = barrier.hold(*given, *((each, ()) for each in known))
        replaced |= zip((each.ref() for each in known), tied[len(given) :], strict=True)
        # A group is updated when the last of its members has come.
        last: dict[Writable, list[OpInput]] = {}
        for update, inputs in zip(batch, users, strict=True):
            last.pop(update.storage, None)
            last[update.storage] = inputs
        large = [storage for storage in last if storage.updated_bytes >= LEAST_BYTES]
        for before, storage in itertools.pairwise(large):
            value, inputs = values.get(before), last[storage]
            if value is None or not inputs:
                continue
            if depends_on(value, {each.operation for each in inputs}, begun.__contains__):
                continue
            made, _ = barrier.hold((value, consumers(value)), (inputs[0].tensor, inputs))
            replaced[value.ref()] = made
    return replaced


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
        value: The same value as it is written.
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


def is_small_copy(storage: Writable, value: tf.Tensor) -> bool:
    """Return whether a value is small and replicated, as counters, seeds, statistics and metrics are."""
    return not any(storage.format.storage) and bool(value.shape.num_elements() * value.dtype.size < _SMALL_BYTES)
