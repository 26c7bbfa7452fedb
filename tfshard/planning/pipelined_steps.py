"""The extension point for predictions of pipelined steps: `advise` and `simulate` ask whether a model could be cut.

An extension appends a function to `PREDICTORS` when it is imported. `contrib/pipeline` does.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import keras

from tfshard.graph.model_specs import OptimizerLike
from tfshard.layouts.config import ShardingConfig
from tfshard.planning.links import Links
from tfshard.planning.machine import Machine
from tfshard.planning.peak import Peak


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineQuestion:
    """A step of a model on a mesh with a pipeline axis.

    Attributes:
        model: A built model. It is not changed.
        ranks: The size of the pipeline axis.
        data_size: The size of the batch axis.
        microbatches: The number of microbatches. It divides the rows of a device.
        config: The settings, as without a pipeline.
        inputs: The shapes and dtypes of the batch over all devices.
        optimizer: The optimizer.
        recompute: Blocks to compute again in addition to the marked blocks; None for none.
        links: The links between devices, if they are known.
        machine: The machine, if it is known.
        traced: Keeps what is traced between questions about the same model and settings.
    """

    model: keras.Model
    ranks: int
    data_size: int
    microbatches: int
    config: ShardingConfig
    inputs: Any
    optimizer: OptimizerLike
    recompute: str | None = None
    links: Links | None = None
    machine: Machine | None = None
    traced: dict[Hashable, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelinePrediction:
    """The prediction of a pipelined step.

    Attributes:
        peak: Bytes of the fullest device at the peak of a step.
        bubble: The share of time in which pipeline ranks wait.
        seconds: The time of a step; None without a machine.
        compute_seconds: The time in which the busiest device computes; None without a machine.
        collective_seconds: The time of the collectives of the busiest rank, and of the activations that it sends; None
            without links.
        unknown: Traffic with unknown bytes, or an empty text.
    """

    peak: Peak
    bubble: float
    seconds: float | None = None
    compute_seconds: float | None = None
    collective_seconds: float | None = None
    unknown: str = ""


# Each returns None if the model cannot be a pipeline like this.
PREDICTORS: list[Callable[[PipelineQuestion], PipelinePrediction | None]] = []

# The most pipeline ranks that are considered, and microbatches for each rank.
MOST_RANKS = 8
_MICROBATCHES_OF_A_RANK, _MOST_MICROBATCHES_OF_A_RANK = 4, 16
# The rows that a device has of a microbatch, if the batch allows it: few numbers, so that few steps are traced.
_ROWS = (1, 2, 4, 8, 16)


def sizes(devices: int) -> list[int]:
    """Return the sizes of a pipeline axis to consider for a number of devices.

    >>> sizes(24)
    [2, 4, 8]
    """
    return [size for size in (2, 4, MOST_RANKS) if devices % size == 0]


def microbatches_of(ranks: int, data_size: int, batch: int) -> int | None:
    """Return the number of microbatches to consider, near four for each rank; None if the batch cannot fill the ranks.

    >>> microbatches_of(ranks=2, data_size=4, batch=64)
    8
    """
    if batch % data_size:
        return None
    rows, aim = batch // data_size, _MICROBATCHES_OF_A_RANK * ranks
    counts = [each for each in range(ranks, _MOST_MICROBATCHES_OF_A_RANK * ranks + 1) if rows % each == 0]
    preferred = [each for each in counts if rows // each in _ROWS]
    return min(preferred or counts, key=lambda each: abs(math.log(each / aim)), default=None)


def predict(question: PipelineQuestion) -> PipelinePrediction | None:
    """Return the prediction of the first extension that has one; None if the model cannot be a pipeline like this."""
    return next((found for each in PREDICTORS if (found := each(question)) is not None), None)
