"""The passes that change the graph of a step once it is traced, and write its values.

A pass takes the record of the step and a `Barrier`, which makes ordering operations. It may edit the graph and update
the record. No pass calls another. Their order matters:

1. `recompute_blocks` adds copies of operations, and says where they run. Copies use stored values, so the schedule of
   unshards must see them.
2. `schedule_unshards` delays each gather until shortly before its use, and makes the backward pass wait for updates.
3. `slice_with_gradient` delays the slice of a replicated value until its gradient exists.
4. `order_updates` runs the updates of gradients that are reduced together one after another.
5. `read_slots_after_write` finds the consumers of new values. It runs before passes that add more consumers.
6. `hold_small_copies` puts the small values behind a barrier, and assigns the sum of all tokens: no compiler then drops
   a barrier.
7. `write` assigns the values. Nothing may follow. Only this pass is in this file.

Each pass reads and replaces these fields of `StepRecord`:

    | pass                     | reads                                                  | replaces          |
    |--------------------------|--------------------------------------------------------|-------------------|
    | `recompute_blocks`       | `graph`, `reshard`, `reads`, `blocks`                  | `operations`      |
    | `schedule_unshards`      | `graph`, `reshard`, `reads`, `gradients`, `operations` | `values`,         |
    |                          |                                                        | `results`         |
    | `slice_with_gradient`    | `sliced_reads`                                         |                   |
    | `order_updates`          | `updates`                                              | `values`,         |
    |                          |                                                        | `updated`         |
    | `read_slots_after_write` | `values`, `updated`                                    | `takers`          |
    | `hold_small_copies`      | `takers`, `kinds`, `tokens`                            | `values`, `token` |
    | `write`                  | `graph`, `values`, `takers`, `host_tokens`, `kinds`    |                   |

A pass also reads the fields that it replaces. A barrier that a pass makes with its `Barrier` appends to
`tokens`. `Step.finish` fills `writes`, `values` and `updated` before the first pass.

A microbatch writes nothing, so it runs only the first two, on the graph of the microbatch. The step then runs all
seven on its graph. In eager code only `write` has an effect.

`hooks.ShardedExtended.step` opens a step, `Step` records, and `Step.finish` runs the passes. docs/design.md follows a
batch through a step.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import tensorflow as tf

from tfshard.storage import barrier as barriers
from tfshard.storage import traced_steps
from tfshard.storage.barrier import Barrier
from tfshard.storage.late_slices import slice_with_gradient
from tfshard.storage.recomputing import recompute_blocks
from tfshard.storage.slot_reads import read_slots_after_write
from tfshard.storage.small_copies import hold_small_copies
from tfshard.storage.step_record import StepRecord
from tfshard.storage.unshard_schedule import schedule_unshards
from tfshard.storage.update_order import order_updates
from tfshard.storage.writes import Writable


def write(record: StepRecord, barrier: Barrier) -> None:
    """Pass: assign each storage once. Last in the step: DTensor could move a later read in front of an assignment."""
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
        assert record.mesh is not None, "A pass made a barrier in a step that uses no variable, and so has no mesh."
        return barriers.read_token(record.mesh)

    barrier = Barrier(read_token=read_token, tokens=record.tokens)
    for each in passes:
        each(record, barrier)
