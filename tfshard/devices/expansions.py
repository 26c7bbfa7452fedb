"""Operations that DTensor has no expansion for, and computes whole on every device if it is told to.

DTensor refuses an operation that it has no expansion for, unless an environment variable names it
(`EnableReplicatedSpmdAsDefault` in TensorFlow 2.21's dtensor/cc/dtensor_utils.cc): then its operands are gathered,
every device computes all of it, and its results are whole. The numbers are those of one device, at the price of the
gather and of work that is not shared out. Only operations whose result follows from their operands may be here: one
that draws numbers, or that holds state, would differ from device to device.
"""

import os

import tensorflow as tf

from tfshard import _private

# Each is tried in tests/operations/test_whole.py.
COMPUTED_WHOLE = (
    # The number of results depends on values. (Unique is among those that DTensor expands; Where: scatters.py.)
    "UniqueV2",
    "UniqueWithCounts",
    "UniqueWithCountsV2",
    "ListDiff",
    "DynamicPartition",
    "NonMaxSuppressionV2",
    "NonMaxSuppressionV3",
    "NonMaxSuppressionV4",
    "NonMaxSuppressionV5",
    "CombinedNonMaxSuppression",
    # What is done with tensors of such shapes.
    "Size",
    "ConcatOffset",
    "Empty",
    "EnsureShape",
    # Scatters, and sums and extrema of segments.
    "TensorScatterSub",
    "TensorScatterMax",
    "TensorScatterMin",
    "DynamicStitch",
    "ParallelDynamicStitch",
    "SegmentSum",
    "SegmentMean",
    "UnsortedSegmentMax",
    "UnsortedSegmentMin",
    "UnsortedSegmentProd",
    # Counts and places among sorted values.
    "Bincount",
    "DenseBincount",
    "Bucketize",
    "LowerBound",
    "UpperBound",
    # Diagonals.
    "MatrixDiagV3",
    "MatrixDiagPartV3",
    "MatrixSetDiagV3",
    "MatrixBandPart",
    # Order.
    "ReverseV2",
    "ReverseSequence",
    "Roll",
    "Cumprod",
    "CumulativeLogsumexp",
)


def allow(operation: tf.Operation) -> None:
    """Lets DTensor compute an operation of a step whole on every device, if it has no expansion for it."""
    if operation.type not in _allowed and not _private.is_stateful(operation):
        os.environ[_switch(operation.type)] = "1"
        _allowed.add(operation.type)


def allow_local(*names: str) -> None:
    """Lets each device do operations on what it has (devices/replicas.py), though DTensor has no expansion for them."""
    for name in names:
        os.environ[_switch(name)] = "1"


_allowed: set[str] = set()


def _switch(name: str) -> str:
    return f"DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.{name.upper()}"


def switches() -> dict[str, str]:
    """The environment variables, which DTensor reads when it first meets each operation."""
    return {_switch(name): "1" for name in COMPUTED_WHOLE}
