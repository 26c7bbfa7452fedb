"""How does a variable rest, how is it read and written?

A *storage* is one DTensor variable; a group's members live in it together. A *step* defers writes to its end. Read
`variables` first, then `steps`, whose note says why.

    formats            how a storage keeps its members: `Whole` in their own shape, `Flat` in a padded buffer
    initial_values     initial values that are not drawn before their place is known
    eight_bits         float32 elements as codes of 8 bits in blocks
    storage            `Storage`: a DTensor variable and the variables that live in it
    writes             what a step has written, and what it writes to
    steps              `Step`, which defers writes; the scopes of steps and updates
    turns              gathers that wait for their turn, and are made again for a later one
    recomputing        blocks that are computed again in the backward pass
    traced_steps       steps that were traced, and what each writes
    variables          `ShardedVariable`: a Keras variable's view of its storage
    surface            what a `tf.Variable` does besides being read and written
    outside            variables in traced functions that belong to no step
    gradient           gradients from the compute layout to the one in which a variable is updated
    touched            the rows of an embedding table that a device updates in a step
    group_update       the updates of a group's members as one
    optimizer_kinds    which optimizers update element by element
"""

from tfshard.storage.variables import ShardedVariable

__all__ = ["ShardedVariable"]
