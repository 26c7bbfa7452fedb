"""The passes that change the graph of a step once it is traced, and write its values.

A pass is a function of the step's record (data) and of the barrier that makes its ordering operations. It changes the
graph, and replaces tensors in the record. No pass calls another. Their order matters:

1. `recompute_blocks` adds copies of operations, and says where they run. Copies use stored values, so the schedule of
   unshards must see them.
2. `schedule_unshards` lets gathers wait for their use, and the backward pass for updates (`StepRecord.values`).
3. `slice_with_gradient`, 4. `order_updates` order the updates of gradients that are reduced together.
5. `read_slots_after_write` looks for the consumers of new values. Operations that later passes add are no consumers.
6. `hold_small_copies` ties the small values, and uses all tokens of the barriers before it.
7. `write` assigns the values. Nothing may follow.

A microbatch writes nothing, so it runs the first two only. Its step runs the others when all microbatches have ended.
In eager code most passes do nothing.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import tensorflow as tf

from tfshard.storage import barrier as barriers
from tfshard.storage.barrier import Barrier
from tfshard.storage.commit import write
from tfshard.storage.late_slices import slice_with_gradient
from tfshard.storage.recomputing import recompute_blocks
from tfshard.storage.slot_reads import read_slots_after_write
from tfshard.storage.small_copies import hold_small_copies
from tfshard.storage.step_record import StepRecord
from tfshard.storage.unshard_schedule import schedule_unshards
from tfshard.storage.update_order import order_updates

Pass: TypeAlias = Callable[[StepRecord, Barrier], None]

MICROBATCH_PASSES: tuple[Pass, ...] = (recompute_blocks, schedule_unshards)
PASSES: tuple[Pass, ...] = (
    *MICROBATCH_PASSES,
    slice_with_gradient,
    order_updates,
    read_slots_after_write,
    hold_small_copies,
    write,
)


def run(passes: Iterable[Pass], record: StepRecord) -> None:
    """Run passes over the record of a step."""

    def read_token() -> tf.Tensor:
        assert record.mesh is not None, "A pass orders reads and writes of variables, which have a mesh."
        return barriers.read_token(record.mesh)

    barrier = Barrier(read_token=read_token, tokens=record.tokens)
    for each in passes:
        each(record, barrier)
