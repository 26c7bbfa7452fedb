"""The errors tfshard raises for a user's mistake.

Each message names the fault, the choices and what was received. They all derive from
`ShardingError`, which is a `ValueError`, so that `except ValueError` keeps working.
"""

import os
import sys
import warnings

from tfshard._private.versions import VersionWarning as VersionWarning


class ShardingError(ValueError):
    """Base class of every error that tfshard raises for wrong input."""

    # AutoGraph keeps the type of an error that passes through a tf.function only if it has this constructor.
    __init__ = Exception.__init__


class InitializationError(ShardingError):
    """DTensor cannot be started as asked: too late, or differently from the first time."""


class MeshError(ShardingError):
    """A mesh that cannot exist: unknown axis, wrong size, too few devices."""


class LayoutError(ShardingError):
    """A layout that does not fit its variable or the mesh."""


class StrategyError(ShardingError):
    """A strategy used in a way it does not support, such as on another strategy's model."""


class UnsupportedLayerError(ShardingError):
    """A layer with an operation that DTensor cannot expand."""


class UnsupportedOperationError(ShardingError):
    """A step has a TensorFlow operation that DTensor cannot expand to the mesh."""


class PlanMismatchError(ShardingError):
    """A step did not send what its plan predicted."""


class ConsistencyError(ShardingError):
    """Devices that should hold the same values do not."""


class VerificationError(ShardingError):
    """A sharded training step does something else than one on one device."""


class LayoutWarning(UserWarning):
    """A layout map that works, and sends more than it has to."""


class NumericsWarning(UserWarning):
    """A step computes what Keras on one device computes, up to a difference that the message names."""


class TelemetryError(ShardingError):
    """Telemetry that cannot be taken or written as asked."""


class CheckpointError(ShardingError):
    """A checkpoint cannot be written, found or used."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is not what was written: damaged, incomplete or edited. No variable was changed."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint, or a file of weights, does not fit the model. No variable was changed."""


class ClientError(ShardingError):
    """Clients of a launched run disagree, or one of them did not come."""


class CollectiveError(ShardingError):
    """A value that a collective cannot take, or that differs in shape or dtype from client to client."""


class LaunchError(ShardingError):
    """A run that cannot be launched as asked."""


# Packages whose frames lie between a user's line and a warning of tfshard.
_BETWEEN = ("tfshard", "keras", "keras_hub", "tensorflow", "optree", "contextlib", "functools")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's line, outside of tfshard, Keras and TensorFlow.

    Of a launched run only client 0 warns: the clients run the same script, so a warning concerns all of them.
    """
    if os.environ.get("TFSHARD_CLIENT_ID", "0") != "0":
        return
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, category, stacklevel=level)
