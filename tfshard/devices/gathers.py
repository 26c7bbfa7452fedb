"""How DTensor gathers: by collectives that gather on meshes of one axis, by all-reduces of zeros and a piece on others.

A `CollectiveGatherV2` sends half the bytes. Over two axes of a mesh at once TensorFlow 2.21 makes a wrong one: the
devices of both axes are one group, in an order of their own, and the sizes of dims that are not gathered are left out.
Mostly the step is refused then; where a dim has size 1, or where the first dim is sharded by the second axis, the
numbers are wrong (tests/devices/test_gathers.py). Which gathers a step has, only DTensor knows. Those of variables over
the data axis are our own there (`replicas.gathered`).

Values for the host are gathered over one axis after the other, which is right on any mesh. They are integers, of which
an all-reduce sends 64 bits each: four times the bytes, by the counters of tests/launch/test_hosts.py.
"""

import contextlib
import os
from collections.abc import Iterator

from tensorflow.experimental import dtensor

from tfshard.layouts.axes import axis_sizes

SWITCH = "LOWER_DTENSOR_GATHER_TO_COLLECTIVE_GATHER_V2"
# A user may turn a switch on to look into a problem.
_is_ours = SWITCH not in os.environ


def choose(mesh: dtensor.Mesh) -> None:
    """Sets the switch for what DTensor compiles next, on a mesh. It reads it whenever it compiles."""
    gathering = not axis_sizes(mesh).shards_by_several
    if not _is_ours or gathering == (SWITCH in os.environ):
        return
    if gathering:
        os.environ[SWITCH] = "1"
    else:
        del os.environ[SWITCH]


@contextlib.contextmanager
def one_axis_at_once() -> Iterator[None]:
    """A context: eager gathers over one axis each, on any mesh. They gather; then the switch is as before."""
    before = os.environ.get(SWITCH)
    if _is_ours:
        os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = before
