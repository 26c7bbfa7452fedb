"""In which order a step updates variables, and when what it replaces is freed.

DTensor reduces all gradients that are not scattered as one, so that they come at once, and nothing orders what becomes
of them. A device would hold what they were joined in until the last of them is cut out of it, while others are updated
already; would update several variables at the same time; and would have a slot's old value besides its new one until a
thread has time to assign it, which may be after the update where devices outnumber cores. Of large groups that is much
of what a step holds, and differs from step to step. So the graph of a step is changed once it is traced:

- No update begins before all gradients are cut out that its optimizer was given (`one_after_the_other`),
- nor before the update in front of it has made a new value.
- What uses a slot's new value takes it from the slot once it is written (`taking_over`): the old one is free by then.
- At stages 1 and 2 a device's part of a variable is cut out when there is its gradient, not when the step begins
  (`cut_when_used`).

DTensor sorts operations by their operands when it merges all-reduces, and a read without operands would move in front
of the write (the note in steps.py). So the handle that is read goes through an IdentityN with what is written.

No number changes: all operations that are added give what they take.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

import tensorflow as tf

from tfshard.storage.turns import Slot, is_made_of, users_of
from tfshard.storage.writes import Recorded, Writable

# What is smaller on a device is not worth the operations.
LEAST_BYTES = 1 << 18

# What a new value goes through before it is written, if that is its layout already.
_SAME = frozenset(("Identity", "IdentityN", "Relayout"))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """An update of a variable with a gradient that is reduced together with others.

    Attributes:
        storage: What is updated: that of a group for each of its members.
        gradient: As the optimizer was given it.
        since: How many operations the graph had when the optimizer began.
    """

    storage: Writable
    gradient: tf.Tensor
    since: int


def new_value(storage: Writable, recorded: Recorded) -> tf.Tensor | None:
    """What an update has made of all that a storage has; None if only of some of it."""
    if not recorded.written:
        return recorded.base
    return None if storage.is_group else recorded.written[0]


def one_after_the_other(
    updates: Sequence[Update],
    values: Mapping[Writable, tf.Tensor | None],
    others: Sequence[tf.Tensor],
    token: Callable[[], tf.Tensor],
) -> tuple[dict[Hashable, tf.Tensor], list[tf.Tensor]]:
    """Lets updates wait for the gradients that come with theirs, and for each other.

    Args:
        updates: All of a step, in order.
        values: New values of what is updated, in the layout of the update.
        others: What else is to be written, and is small: some of it, as metrics of the loss, is made of what is reduced
            with the gradients. What is not made of updates is there before them.
        token: Reads a variable: a number that nobody needs.

    Returns:
        What has to be written in the place of new values, by their references, and numbers that have to be used for
        something.
    """
    batches: dict[int, list[Update]] = collections.defaultdict(list)
    for update in updates:
        batches[update.since].append(update)
    replaced: dict[Hashable, tf.Tensor] = {}
    tokens: list[tf.Tensor] = []
    for since, batch in batches.items():
        operations = batch[0].gradient.graph.get_operations()
        begun = set(operations[since:])
        users = [[slot for slot in users_of(update.gradient) if slot.operation in begun] for update in batch]
        given = list(zip((update.gradient for update in batch), users, strict=True))
        updating = {slot.operation for slots in users for slot in slots}
        known = [each for each in others if not is_made_of(each, updating, begun.__contains__)]
        tied = _tied(token(), *given, *((each, ()) for each in known))
        tokens.append(tied[0])
        replaced |= zip((each.ref() for each in known), tied[1 + len(given) :], strict=True)
        # That of a group runs when the last of its members has come.
        last: dict[Writable, list[Slot]] = {}
        for update, slots in zip(batch, users, strict=True):
            last.pop(update.storage, None)
            last[update.storage] = slots
        large = [storage for storage in last if storage.updated_bytes >= LEAST_BYTES]
        for before, storage in itertools.pairwise(large):
            value, slots = values.get(before), last[storage]
            if value is None or not slots or is_made_of(value, {slot.operation for slot in slots}, begun.__contains__):
                continue
            number, made, _ = _tied(token(), (value, users_of(value)), (slots[0].tensor, slots))
            tokens.append(number)
            replaced[value.ref()] = made
    return replaced, tokens


def cut_when_used(stored: tf.Tensor, gradient: tf.Tensor) -> None:
    """Lets what is read whole be cut when there is the gradient that an update works on.

    Args:
        stored: What was read.
        gradient: In the shape of what is cut.
    """
    if gradient.shape.num_elements() * gradient.dtype.size < LEAST_BYTES:
        return
    cuts = users_of(stored)
    read, _ = _tied(stored, (gradient, users_of(gradient)))
    for slot in cuts:
        slot.fill(read)


def _tied(read: tf.Tensor, *others: tuple[tf.Tensor, Sequence[Slot]]) -> list[tf.Tensor]:
    """The same tensors, of which none is there before all are: what was read, and others, which their uses take then.

    TensorFlow's dependency optimizer leaves an IdentityN alone if its first input is what was read of a variable.
    """
    tied: list[tf.Tensor] = tf.raw_ops.IdentityN(input=[read, *(tensor for tensor, _ in others)])
    for (_, slots), tensor in zip(others, tied[1:], strict=True):
        for slot in slots:
            slot.fill(tensor)
    return tied


def taking_over(storage: Writable, made: tf.Tensor | None, value: tf.Tensor) -> list[Slot]:
    """The uses of a new value that can take it from where it is written: there it has the same layout and dtype.

    Args:
        storage: Where it is written.
        made: What an update has made.
        value: The same, as it is written.
    """
    is_traced = made is not None and hasattr(made, "graph")
    if not is_traced or not storage.rests_as_updated or storage.updated_bytes < LEAST_BYTES:
        return []
    way: set[tf.Operation] = set()
    while value is not made:
        if value.op.type not in _SAME:
            return []
        way.add(value.op)
        value = value.op.inputs[value.value_index if value.op.type == "IdentityN" else 0]
    return [slot for slot in users_of(value) if slot.operation not in way]
