"""What does a run measure while it trains?

Read `telemetry` first.

    telemetry    `Telemetry`: measures of each epoch, for logs, CSV and TensorBoard
    pace         the times of an epoch's steps
    sinks        where measures are written
"""

from tfshard.callbacks.telemetry import Telemetry

__all__ = ["Telemetry"]
