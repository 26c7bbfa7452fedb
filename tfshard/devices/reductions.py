"""The dtype in which DTensor sums bfloat16 gradients of several devices.

On CPUs and GPUs, DTensor always sums in float32 (dtensor_collective_type_lowering.cc; `python -m tools.gpu lower`
shows steps for GPUs). On TPUs it sums in bfloat16, unless its mixed-precision pass is on. The pass sums in float32 in
groups of more than a given number of devices (dtensor_mixed_precision_reduce.cc). It leaves float16 unchanged.
"""

import os

SWITCH = "DTENSOR_ENABLE_MIXED_PRECISION_REDUCE"
SIZE = "DTENSOR_REDUCE_IN_BFLOAT16_MAX_GROUP_SIZE"
# A user may set the switch to debug a problem.
_is_ours = SWITCH not in os.environ and SIZE not in os.environ


def choose(dtype: str) -> None:
    """Set the switches for the next compilation. DTensor reads them whenever it compiles."""
    if not _is_ours:
        return
    if (dtype == "float32") == (os.environ.get(SWITCH) == os.environ.get(SIZE) == "1"):
        return  # Setting a variable while TensorFlow reads another may crash.
    if dtype == "float32":
        os.environ |= {SWITCH: "1", SIZE: "1"}
    else:
        os.environ.pop(SWITCH, None)
        os.environ.pop(SIZE, None)
