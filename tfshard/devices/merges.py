"""Which all-reduces DTensor merges.

Its pass that merges independent ones (dtensor_allreduce_combine_optimization.cc) does not see that an operation with a
body, a loop or a branch, depends on what the body takes from outside. On meshes of several axes a gather is an
all-reduce too: merged with one behind the loop that uses it, it comes too late ("operand #0 does not dominate this
use"). There each all-reduce of such a step stays alone.
"""

import os

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.layouts.axes import axis_sizes

SWITCH = "DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE"
# A user may turn a switch on to look into a problem.
_is_ours = SWITCH not in os.environ

_WITH_BODIES = ("Case", "If", "While")


def happen(mesh: dtensor.Mesh) -> bool:
    """Whether gradients that are not scattered are reduced as one, in what DTensor compiles next."""
    return os.environ.get(SWITCH) != "1" and axis_sizes(mesh).data_size > 1


def choose(mesh: dtensor.Mesh, graph: tf.Graph) -> None:
    """Sets the switch for what DTensor compiles next: a step on a mesh, with this graph."""
    if not _is_ours:
        return
    if axis_sizes(mesh).shards_by_several and any(
        each.endswith(_WITH_BODIES) for each in _private.operation_types(graph)
    ):
        os.environ[SWITCH] = "1"
    else:
        os.environ.pop(SWITCH, None)
