"""Operations without a DTensor expansion that DTensor may compute in full on every device.

DTensor refuses an operation that it cannot expand, unless an environment variable names the operation
(`EnableReplicatedSpmdAsDefault` in TensorFlow 2.21's dtensor/cc/dtensor_utils.cc). Then DTensor all-gathers the
operands, every device computes the full operation, and the results are replicated. The results match a single device.
The cost is the gather and the repeated work. An operation may be listed here only if its result follows from its
operands. Random and stateful operations would differ between devices.
"""

import os

import tensorflow as tf

from tfshard import _private

# tests/operations/test_replicated_operations.py tests each of these.
REPLICATED_OPERATIONS = (
    # The number of results depends on values. (DTensor expands Unique. For Where, see scatters.py.)
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
    # Operations on tensors with these dynamic shapes.
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
    # Counts, and positions in sorted values.
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
    """Let DTensor compute a step's operation in full on every device, if it has no expansion for the operation.

    Ignores stateful operations.
    """
    if operation.type not in _allowed and not _private.is_stateful(operation):
        os.environ[_switch(operation.type)] = "1"
        _allowed.add(operation.type)


def allow_local(*names: str) -> None:
    """Let each device run operations on its local shard (devices/replicas.py), even without a DTensor expansion."""
    for name in names:
        os.environ[_switch(name)] = "1"


_allowed: set[str] = set()


def _switch(name: str) -> str:
    return f"DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.{name.upper()}"


def switches() -> dict[str, str]:
    """Return the environment variables, which DTensor reads when it first meets each operation."""
    return {_switch(name): "1" for name in REPLICATED_OPERATIONS}
