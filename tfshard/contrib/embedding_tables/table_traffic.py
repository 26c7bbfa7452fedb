"""Predict the largest traffic of embedding tables in a step: ids, rows and their gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfshard.contrib.embedding_tables import sparse_optimizers
from tfshard.contrib.embedding_tables.exchanges import ids_of_a_device
from tfshard.errors import LayoutError
from tfshard.graph.model_graph import ModelGraph, trace
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning.variable_traffic import Collective

# The bytes of a row's number, of the length of the longest list, and of an element.
_BYTES = 4


def collectives(
    model: ModelOrSpecs,
    planned: Sequence[VariableLayout],
    mesh_shape: Mapping[str, int],
    *,
    optimizer: Any,
    inputs: Any,
    is_lazy: bool,
) -> list[Collective]:
    """Predict the collectives of embedding tables in a training step.

    A device sends every other device a list of the distinct ids that it looks up there. The bytes assume the longest
    possible list: all ids of a device are different, and one device stores all their rows. A step sends its actual
    longest list, about a fraction `1 / devices` of the bytes if the ids are spread evenly.

    Args:
        model: A built model. For a list of specs, each table is looked up once.
        planned: The layouts of the tables.
        mesh_shape: Axis name to size.
        optimizer: As for `plan`.
        inputs: The inputs of a step. Without them, bytes are unknown.
        is_lazy: True if the optimizer squares the sum of a row's gradients, so that devices send no squares.
    """
    axes = MeshAxes.of(mesh_shape)
    if axes.data is None or axes.data_size == 1:
        return []
    shapes = _lookups(model, inputs)
    found = []
    for layout in planned:
        width, path, devices = layout.spec.shape[1], layout.spec.path, axes.data_size
        ids = [ids_of_a_device(shape, devices) for shape in shapes.get(path, ((),))]
        each = devices * sum(ids) // len(ids) * _BYTES
        total_bytes = devices * sum(ids) * _BYTES
        squares = not is_lazy and _squares(optimizer)
        sent = [
            ("all-reduce", len(ids), _BYTES, "the longest list of ids, for each lookup"),
            ("all-to-all", len(ids), each, "4 bytes x devices x ids of a device, for each lookup, at most"),
            (
                "all-to-all",
                len(ids),
                each * width,
                "bytes(row) x devices x ids of a device, for each lookup, at most",
            ),
        ]
        if layout.spec.trainable:
            what = "bytes(row of gradients and squares)" if squares else "bytes(row of gradients)"
            sent += [
                ("all-reduce", 1, _BYTES, "the longest list of gradients"),
                ("all-to-all", 1, total_bytes, "4 bytes x devices x ids of a device, for the update, at most"),
                (
                    "all-to-all",
                    1,
                    total_bytes * width * (2 if squares else 1),
                    f"{what} x devices x ids of a device, for the update, at most",
                ),
            ]
        found += [
            Collective(
                kind=kind,
                what=path,
                axis=axes.data,
                count=count,
                bytes=bytes_ if inputs is not None or kind == "all-reduce" else None,
                formula=formula,
                at_most=kind == "all-to-all",
            )
            for kind, count, bytes_, formula in sent
        ]
    return found


def _squares(optimizer: Any) -> bool:
    if isinstance(optimizer, (str, dict)):
        optimizer = keras.optimizers.get(optimizer)
    return isinstance(optimizer, keras.optimizers.Optimizer) and sparse_optimizers.squares(optimizer)


def _lookups(model: ModelOrSpecs, inputs: Any) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the shapes of the ids of each lookup, by the path of the variable."""
    try:
        graph = trace(model, inputs) if isinstance(model, keras.Model) else None
    except LayoutError:
        graph = None
    return {} if graph is None else _lookups_in(graph)


def _lookups_in(graph: ModelGraph) -> dict[str, tuple[tuple[int, ...], ...]]:
    paths = {name: spec.path for name, spec in graph.variables.items()}
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for operation in graph.operations:
        if operation.type in ("Cast", "Identity") and operation.inputs[0].name in paths:
            paths[operation.outputs[0].name] = paths[operation.inputs[0].name]
        if operation.type in ("GatherV2", "ResourceGather") and operation.inputs[0].name in paths:
            path = paths[operation.inputs[0].name]
            found[path] = (*found.get(path, ()), tuple(operation.inputs[1].shape))
    return found
