"""The all-reduces that DTensor merges.

DTensor's pass that merges independent all-reduces (dtensor_allreduce_combine_optimization.cc) has a bug. It ignores
that a loop or branch depends on the tensors that its body captures. On meshes with several axes, a gather is an
all-reduce too. If DTensor merges such a gather with an all-reduce after the loop that uses it, the gather comes too
late ("operand #0 does not dominate this use"). tfshard disables merging for such a step.
"""

import os

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.layouts.axes import axis_sizes

SWITCH = "DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE"
# A user may set the switch to debug a problem.
_is_ours = SWITCH not in os.environ

_WITH_BODIES = ("Case", "If", "While")


def happen(mesh: dtensor.Mesh) -> bool:
    """Return whether the next compilation merges the all-reduces of gradients that are not scattered."""
    return os.environ.get(SWITCH) != "1" and axis_sizes(mesh).data_size > 1


def choose(mesh: dtensor.Mesh, graph: tf.Graph) -> None:
    """Set the switch for the next compilation: a step on `mesh` with the graph `graph`."""
    if not _is_ours:
        return
    if axis_sizes(mesh).shards_by_several and any(
        each.endswith(_WITH_BODIES) for each in _private.operation_types(graph)
    ):
        os.environ[SWITCH] = "1"
    else:
        os.environ.pop(SWITCH, None)
