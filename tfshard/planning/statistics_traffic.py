"""What layers that normalize by the batch send: small tensors, for which a step waits (`operations.batch_moments`); and
what they execute for that."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import keras

from tfshard import _private
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import itemsize
from tfshard.planning.variable_traffic import Collective

# Of the rows of a device, and of what all devices have found: besides the operations of the layer on one device.
_OPERATIONS = 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """The mean and the variance of what a layer normalizes.

    Attributes:
        path: The layer's.
        uses: How often a step calls it.
        bytes: Of both.
    """

    path: str
    uses: int
    bytes: int


def statistics_of(model: keras.Model) -> tuple[Statistics, ...]:
    """Those of each layer that takes them of the batch, as it does unless it is frozen."""
    return tuple(
        Statistics(
            path=layer.path,
            uses=max(1, len(_private.layer_uses(layer))),
            # Of half precision they are taken in float32.
            bytes=2 * max(4, itemsize(layer.compute_dtype)) * math.prod(layer.moving_mean.shape),
        )
        for layer in _private.flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and layer.built
    )


def operations(statistics: Iterable[Statistics], mesh_shape: Mapping[str, int]) -> int:
    """How many operations a device executes besides those of the layers on one device.

    Args:
        statistics: Those of a model.
        mesh_shape: Axis name to size.
    """
    return _OPERATIONS * sum(each.uses for each in statistics) if MeshAxes.of(mesh_shape).data_size > 1 else 0


def collectives(statistics: Iterable[Statistics], mesh_shape: Mapping[str, int]) -> list[Collective]:
    """What a step sends of them: forward those of each device's rows, backward their gradients.

    Args:
        statistics: Those of a model.
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
            # Those of layers that are not behind each other DTensor merges.
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
