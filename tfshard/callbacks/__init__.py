"""Keras callbacks that measure a run while it trains.

Read `telemetry` first.

    telemetry    `Telemetry`: measurements of each epoch for logs, CSV and TensorBoard
    pace         step times of an epoch
    sinks        CSV and TensorBoard output
"""

from tfshard.callbacks.telemetry import Telemetry

__all__ = ["Telemetry"]
