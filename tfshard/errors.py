"""The errors that tfshard raises for user mistakes.

Each message names the fault, the choices and the received value. All errors derive from `ShardingError`, which is a
`ValueError`, so `except ValueError` catches them.
"""

import os
import sys
import warnings

from tfshard._private.versions import VersionWarning as VersionWarning


class ShardingError(ValueError):
    """The base class of every error that tfshard raises for wrong input."""

    # AutoGraph keeps the type of an error that passes through a tf.function only if it has this constructor.
    __init__ = Exception.__init__


class InitializationError(ShardingError):
    """DTensor cannot start as requested: too late, or unlike the first time."""


class MeshError(ShardingError):
    """The mesh is impossible: an unknown axis, a wrong size or too few devices."""


class LayoutError(ShardingError):
    """A layout does not fit its variable or the mesh."""


class StrategyError(ShardingError):
    """A strategy does not support this use, such as a model of another strategy."""


class DeviceMemoryError(StrategyError):
    """No mesh, stage or option makes a training step fit in the memory of the devices."""


class UnsupportedLayerError(ShardingError):
    """A layer contains an operation that DTensor cannot expand."""


class UnsupportedOperationError(ShardingError):
    """A step contains a TensorFlow operation that DTensor cannot expand to the mesh."""


class PlanMismatchError(ShardingError):
    """A step did not send what its plan predicted."""


class ConsistencyError(ShardingError):
    """Devices that should hold equal values do not."""


class VerificationError(ShardingError):
    """A sharded training step differs from the step on a single device."""


class LayoutWarning(UserWarning):
    """A layout map works but sends more bytes than necessary."""


class NumericsWarning(UserWarning):
    """A step differs from single-device Keras by at most the difference that the message names."""


class TelemetryError(ShardingError):
    """Telemetry cannot be taken or written as requested."""


class CheckpointError(ShardingError):
    """A checkpoint cannot be written, found or used."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is damaged, incomplete or edited. No variable was changed."""


class CheckpointStorageError(CheckpointError):
    """A remote file system cannot be used, or failed for longer than tfshard repeats requests."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint or a weight file does not fit the model. No variable was changed."""


class ClientError(ShardingError):
    """Clients disagree or one did not come, the run must restart after a failed step, or a spawned process failed."""


class CollectiveError(ShardingError):
    """A collective cannot take a value, or the values differ in shape or dtype between clients."""


class LaunchError(ShardingError):
    """The run cannot be launched as requested."""


class ClusterError(LaunchError):
    """A cluster's environment variables lack something or contradict each other."""


# The packages with frames between a user's line and a tfshard warning.
_BETWEEN = ("tfshard", "keras", "keras_hub", "tensorflow", "optree", "contextlib", "functools")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's line, outside tfshard, Keras and TensorFlow.

    In a launched run, only client 0 warns. All clients run the same script, so a warning concerns all of them.
    """
    if os.environ.get("TFSHARD_CLIENT_ID", "0") != "0":
        return
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, category, stacklevel=level)
