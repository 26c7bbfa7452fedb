"""How DTensor gathers: by a gather collective on meshes with one axis, by an all-reduce of zero-padded shards on
others.

A `CollectiveGatherV2` sends half the bytes of the all-reduce. For gathers over two mesh axes at once, TensorFlow 2.21
builds a wrong one: the devices of both axes form one group in a different order, and the sizes of dims that are not
gathered are ignored. In most cases, TensorFlow then refuses the step. If a dim has size 1, or if the second axis shards
the first dim, the results are wrong (tests/devices/test_gathers.py). Only DTensor knows which gathers a step contains.
On these meshes, tfshard gathers variables over the data axis itself (`replicas.gathered`).

Values for the host are gathered over one axis at a time, which is correct on any mesh. Host values are integers. An
all-reduce sends 64 bits for each integer: four times the bytes, by the counters of tests/launch/test_hosts.py.
"""

import contextlib
import os
from collections.abc import Iterator

from tensorflow.experimental import dtensor

from tfshard.layouts.axes import axis_sizes

SWITCH = "LOWER_DTENSOR_GATHER_TO_COLLECTIVE_GATHER_V2"
# A user may set the switch to debug a problem.
_is_ours = SWITCH not in os.environ


def choose(mesh: dtensor.Mesh) -> None:
    """Set the switch for the next compilation on a mesh. DTensor reads the switch whenever it compiles."""
    gathering = not axis_sizes(mesh).shards_by_several
    if not _is_ours or gathering == (SWITCH in os.environ):
        return
    if gathering:
        os.environ[SWITCH] = "1"
    else:
        del os.environ[SWITCH]


@contextlib.contextmanager
def one_axis_at_once() -> Iterator[None]:
    """Use the gather collective for eager gathers over single axes inside the context, on any mesh."""
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
