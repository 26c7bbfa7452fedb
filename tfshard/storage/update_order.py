"""Pass: order the updates of gradients that are reduced together.

DTensor reduces all gradients that are not scattered in one all-reduce. The gradients arrive at once, and nothing orders
the work that follows. A device would hold the buffer of the reduction until the last gradient is sliced out of it,
while it already updates other variables, several at the same time. This can be much of a step's memory, and it differs
from step to step. Therefore an update waits for two things: all gradients of its optimizer are sliced out, and the
update in front of it has computed a new value.

No number changes.
"""

import collections
import itertools
from collections.abc import Hashable, Mapping, Sequence

import tensorflow as tf

from tfshard.devices import merges
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import OpInput, consumers, depends_on
from tfshard.storage.small_copies import is_small_copy
from tfshard.storage.step_record import JointUpdate, StepRecord
from tfshard.storage.writes import Writable

# Smaller tensors on a device are not worth the operations.
LEAST_BYTES = 1 << 18


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
