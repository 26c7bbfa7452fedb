"""Predict the traffic and the operations of layers that normalize by the batch. A step waits for their small tensors
(`operations.batch_moments`)."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import keras

from tfshard import _private
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import itemsize
from tfshard.planning.variable_traffic import Collective

# Operations for the local rows, and for the results of all devices, in addition to the layer's operations on one
# device.
_OPERATIONS = 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """The mean and the variance of a layer's normalization.

    Attributes:
        path: The path of the layer.
        uses: How often a step calls it.
        bytes: Bytes of both.
    """

    path: str
    uses: int
    bytes: int


def statistics_of(model: keras.Model) -> tuple[Statistics, ...]:
    """Return the statistics of each layer that normalizes by the batch: a layer does unless it is frozen."""
    return tuple(
        Statistics(
            path=layer.path,
            uses=max(1, len(_private.layer_uses(layer))),
            # In half precision the layer computes them in float32.
            bytes=2 * max(4, itemsize(layer.compute_dtype)) * math.prod(layer.moving_mean.shape),
        )
        for layer in _private.flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and layer.built
    )


def operations(statistics: Iterable[Statistics], mesh_shape: Mapping[str, int]) -> int:
    """Return the number of operations that a device executes in addition to the layers' operations on one device.

    Args:
        statistics: The statistics of a model.
        mesh_shape: Axis name to size.
    """
    return _OPERATIONS * sum(each.uses for each in statistics) if MeshAxes.of(mesh_shape).data_size > 1 else 0


def collectives(statistics: Iterable[Statistics], mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Return the collectives of a step for statistics: forward the local statistics, backward their gradients.

    Args:
        statistics: The statistics of a model.
        mesh_shape: Axis name to size, without model axes: there DTensor decides.
    """
    mesh_axes = MeshAxes.of(mesh_shape)
    axis = mesh_axes.data
    if axis is None or mesh_axes.data_size == 1:
        return []
    by_device, gradients = "bytes(mean and variance of each device's rows)", "bytes(gradients of mean and variance)"
    one = functools.partial(Collective, axis=axis)
    found = []
    for each in statistics:
        gathered = mesh_axes.shards * each.bytes
        found += [
            one(kind="all-gather", what=each.path, count=each.uses, bytes=gathered, formula=f"{by_device} over {axis}"),
            # DTensor merges the all-reduces of layers that do not follow each other.
            one(
                kind="all-reduce",
                what=each.path,
                count=each.uses,
                bytes=each.bytes,
                formula=f"{gradients} over {axis}",
                merges=True,
            ),
        ]
    return found
