"""In which dtype DTensor adds bfloat16 gradients of several devices up.

On CPU it always does so in float32. Elsewhere it takes bfloat16, unless its pass for mixed precision is on, which
adds in float32 in groups of more than a number of devices (dtensor_mixed_precision_reduce.cc). It leaves float16 as it
is.
"""

import os

SWITCH = "DTENSOR_ENABLE_MIXED_PRECISION_REDUCE"
SIZE = "DTENSOR_REDUCE_IN_BFLOAT16_MAX_GROUP_SIZE"
# A user may turn a switch on to look into a problem.
_is_ours = SWITCH not in os.environ and SIZE not in os.environ


def choose(dtype: str) -> None:
    """Sets the switches for what DTensor compiles next. It reads them whenever it compiles."""
    if not _is_ours:
        return
    if (dtype == "float32") == (os.environ.get(SWITCH) == os.environ.get(SIZE) == "1"):
        return  # A switch that is set while TensorFlow reads another one may end the process.
    if dtype == "float32":
        os.environ |= {SWITCH: "1", SIZE: "1"}
    else:
        os.environ.pop(SWITCH, None)
        os.environ.pop(SIZE, None)
