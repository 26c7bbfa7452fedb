"""Pass: order the updates of gradients that are reduced together.

DTensor reduces all gradients that are not scattered in one all-reduce. The gradients arrive at once, and nothing orders
the work that follows. A device would hold the buffer of the reduction until the last gradient is sliced out of it,
while it already updates other variables, several at the same time. This can be much of a step's memory, and it differs
from step to step. Therefore an update waits for two things: all gradients of its optimizer are sliced out, and the
update in front of it has computed a new value.

No number changes.
"""

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence

import tensorflow as tf

from tfshard.devices import merges
from tfshard.storage.barrier import Barrier
from tfshard.storage.graph_edits import OpInput, add_ancestors, consumers, descendants
from tfshard.storage.small_copies import is_small_copy
from tfshard.storage.step_record import JointUpdate, StepRecord
from tfshard.storage.writes import Writable

# Smaller tensors on a device are not worth the operations.
LEAST_BYTES = 1 << 18


def order_updates(record: StepRecord, barrier: Barrier) -> None:
    """Let updates wait for the gradients that are reduced together with their gradients, and for each other."""
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
    """Let updates wait for the gradients that arrive together with their gradients, and for each other.

    Args:
        updates: All updates of a step, in order.
        values: The new value of each storage, in the update layout.
        others: Other small values to write. Some, such as metrics of the loss, are reduced together with the gradients.
        barrier: Makes barriers.

    Returns:
        The tensors to write in place of new values, by reference.
    """
    batches: dict[int, list[JointUpdate]] = collections.defaultdict(list)
    for update in updates:
        batches[update.since].append(update)
    replaced: dict[Hashable, tf.Tensor] = {}
    joint: list[_JointGradients] = []
    for since in sorted(batches, reverse=True):
        joint.insert(0, _JointGradients.of(since, batches[since], joint))
    # Make all barriers before ordering updates: the order could make a later optimizer's gradient wait for an update.
    for number, batch in enumerate(joint):
        batch.hold(joint[number + 1 :], others, replaced, barrier)
    for batch in joint:
        batch.order(values, replaced, barrier)
    return replaced


@dataclasses.dataclass(frozen=True, kw_only=True)
class _JointGradients:
    """The updates of one optimizer call.

    Attributes:
        updates: The updates.
        users: For each update, the inputs that take its gradient since the optimizer began, except the inputs of later
            optimizers.
    """

    updates: Sequence[JointUpdate]
    users: Sequence[list[OpInput]]

    @classmethod
    def of(cls, since: int, updates: Sequence[JointUpdate], later: "Sequence[_JointGradients]") -> "_JointGradients":
        """Return the updates of an optimizer call.

        Args:
            since: How many operations the graph had when the optimizer began.
            updates: The updates.
            later: The updates of later optimizer calls.
        """
        begun = set(updates[0].gradient.graph.get_operations()[since:])
        begun.difference_update(*(each.updating for each in later))
        users = [[each for each in consumers(update.gradient) if each.operation in begun] for update in updates]
        return cls(updates=updates, users=users)

    @property
    def updating(self) -> set[tf.Operation]:
        """The operations that take the gradients."""
        return {each.operation for inputs in self.users for each in inputs}

    def hold(
        self,
        later: "Sequence[_JointGradients]",
        others: Sequence[tf.Tensor],
        replaced: dict[Hashable, tf.Tensor],
        barrier: Barrier,
    ) -> None:
        """Let the updates wait for all gradients, and for values that depend on no update of this or a later optimizer.

        Args:
            later: The gradients of later optimizers.
            others: Other small values to write.
            replaced: The tensors to write in place of values; the method adds to it.
            barrier: Makes barriers.
        """
        behind = descendants(set().union(*(each.updating for each in (self, *later))))
        given = [
            (update.gradient, inputs)
            for update, inputs in zip(self.updates, self.users, strict=True)
            if update.gradient.op not in behind
        ]
        # An earlier optimizer may have put the value behind its barrier.
        known = [each for each in others if each.op not in behind and each.ref() not in replaced]
        tied = barrier.hold(*given, *((each, ()) for each in known))
        replaced |= zip((each.ref() for each in known), tied[len(given) :], strict=True)

    def order(
        self,
        values: Mapping[Writable, tf.Tensor | None],
        replaced: dict[Hashable, tf.Tensor],
        barrier: Barrier,
    ) -> None:
        """Let each large update wait until the update in front of it has computed a new value.

        Args:
            values: The new value of each storage, in the update layout.
            replaced: The tensors to write in place of values; the method adds to it.
            barrier: Makes barriers.
        """
        # A group is updated when the last of its members has come.
        last: dict[Writable, list[OpInput]] = {}
        for update, inputs in zip(self.updates, self.users, strict=True):
            last.pop(update.storage, None)
            last[update.storage] = inputs
        large = [storage for storage in last if storage.updated_bytes >= LEAST_BYTES]
        before: set[tf.Operation] = set()  # The operations that compute the gradients and the new values so far.
        for earlier, storage in itertools.pairwise(large):
            value, inputs = values.get(earlier), last[storage]
            if value is None or not inputs:
                continue
            add_ancestors(before, [value, inputs[0].tensor])
            users = consumers(value)
            if any(each.operation in before for each in (*inputs, *users)):
                continue
            made, _ = barrier.hold((value, users), (inputs[0].tensor, inputs))
            replaced[value.ref()] = made
