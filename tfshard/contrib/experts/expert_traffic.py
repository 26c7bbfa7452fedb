"""Predict the largest traffic of experts in a step: tokens, results and their gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfshard.contrib.experts import parallel_experts
from tfshard.contrib.experts.parallel_experts import Mixture
from tfshard.errors import LayoutError
from tfshard.graph.model_graph import ModelGraph, trace
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning.variable_traffic import Collective

_COUNT_BYTES, _LOSS_BYTES = 8, 4
_COUNTS = "8 bytes x devices x experts x top_k"
_LISTS = "bytes(token) x devices x top_k x tokens of a device, at most"


def collectives(
    model: ModelOrSpecs,
    planned: Sequence[VariableLayout],
    mesh_shape: Mapping[str, int],
    *,
    inputs: Any,
) -> list[Collective]:
    """Predict the collectives of experts in a training step.

    A device sends a list of tokens to each device. All lists have the length of the longest one. The bytes assume that
    all tokens of a device go to one device. If the router spreads tokens evenly, a step sends about `1 / devices` of
    these bytes.

    Args:
        model: A built model. For a list of specs, only the number of collectives is known.
        planned: The layouts of the variables of experts.
        mesh_shape: Axis name to size.
        inputs: The inputs of a step. Without them, bytes are unknown.
    """
    axes = MeshAxes.of(mesh_shape)
    if axes.data is None or axes.data_size == 1:
        return []
    paths = {layout.spec.path for layout in planned}
    if not isinstance(model, keras.Model):
        owners = dict.fromkeys(path.rpartition("/")[0] for path in sorted(paths))
        sent = (("all-gather", 1, None, _COUNTS), ("all-to-all", 4, None, _LISTS))
        return [_collective(owner, axes.data, *each) for owner in owners for each in sent]
    try:
        graph = None if inputs is None else trace(model, inputs)
    except LayoutError:
        graph = None
    found = []
    for mixture in parallel_experts.mixtures_of(model):
        if mixture.variables[0].path in paths:
            found += _of_mixture(mixture, graph, axes)
    return found


def _of_mixture(mixture: Mixture, graph: ModelGraph | None, axes: MeshAxes) -> list[Collective]:
    assert axes.data is not None
    experts, devices = mixture.variables[0].shape[0], axes.data_size
    sent = []
    # A layer that the model calls several times sends its tokens at each call.
    for count in [None] if graph is None else _tokens(graph, mixture.multiplied.path):
        lists = None
        if count is not None:
            items = -(-count // devices) * mixture.choices
            capacity = parallel_experts.capacity_of(mixture.capacity_factor, count, mixture.choices, experts)
            most = items if capacity is None else min(items, capacity * experts // devices)
            lists = devices * most * mixture.width * variable_layout.itemsize(mixture.dtype)
        sent += [
            ("all-gather", 1, devices * experts * mixture.choices * _COUNT_BYTES, _COUNTS),
            ("all-to-all", 4, lists, _LISTS),
        ]
        if mixture.sums:
            sent.append(("all-reduce", mixture.sums, mixture.choices * experts * _LOSS_BYTES, "sums of router losses"))
    return [_collective(mixture.name, axes.data, *each) for each in sent]


def _collective(name: str, axis: str, kind: str, count: int, bytes_: int | None, formula: str) -> Collective:
    """Return a collective of a mixture of experts."""
    is_exact = kind == "all-gather"
    return Collective(
        kind=kind,
        what=name,
        axis=axis,
        count=count,
        bytes=bytes_,
        formula=formula,
        # DTensor merges sums, and leaves out collectives that no gradient needs.
        merges=not is_exact,
        at_most=not is_exact,
    )


def _tokens(graph: ModelGraph, path: str) -> list[int]:
    """Return the number of tokens of each product with the variable at `path`: one for each call of the layer."""
    names = [name for name, spec in graph.variables.items() if spec.path == path]
    found = []
    while names:
        for place, number in graph.consumers.get(names.pop(), ()):
            operation = graph.operations[place]
            if operation.type in ("Cast", "Identity", "ReadVariableOp"):
                names.append(operation.outputs[0].name)
            elif operation.type in ("Einsum", "MatMul") and number == 1:
                found.append(int(operation.inputs[0].shape[0]))
    return found
