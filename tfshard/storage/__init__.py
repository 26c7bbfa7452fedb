"""How is a variable stored, read and written?

A *storage* is one DTensor variable, shared by the members of a group. A *step* defers writes to its end. Read
`variables` and `access` first. Then read `steps` (its note says why writes are deferred) and `passes`.

    formats            how a storage keeps its members: `Unpacked` in the variable's shape, `Flat` in a padded buffer
    initial_values     initial values that are not drawn before their place is known
    eight_bits         float32 elements as codes of 8 bits in blocks
    storage            `Storage`: a DTensor variable and the variables that it holds
    variables          `ShardedVariable`: a Keras variable's view of its storage
    access             how a variable is read and written in each context
    surface            the other methods of a `tf.Variable`
    outside            variables in traced functions that belong to no step
    left_buffers       buffers that their variables have left, which no function may read
    gradient           gradients from the compute layout to the update layout

    steps              `Step`, which records reads and writes, and the open step and update of a thread
    write_log          the writes of a step, in its graph, its branches and its functions
    writes             a recorded write, and the storage that it goes to
    microbatch         the batch of a step, and its microbatch
    microbatch_step    `MicrobatchStep`: the step of one microbatch
    traced_steps       steps that were traced, and their writes

    step_record        `StepRecord`: the data of a step
    passes             the passes that change the graph of a step, in order; the last assigns its storages
    recomputing        pass: compute blocks again in the backward pass
    unshard_schedule   pass: gather sharded values shortly before each use, and free them
    late_slices        pass: slice replicated values for updates when the gradient exists
    update_order       pass: order the updates of gradients that are reduced together
    slot_reads         pass: read a slot's new value from the slot once it is written
    small_copies       pass: write counters and metrics only if the step succeeds on all devices
    barrier            order operations of a step that no data connects
    graph_edits        follow and replace the tensors of a traced graph

    group_update       the updates of a group's members as one
    optimizer_kinds    which optimizers update element by element
"""

from tfshard.storage.variables import ShardedVariable

__all__ = ["ShardedVariable"]
