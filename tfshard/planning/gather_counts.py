"""How often a step gathers each sharded value, counted in a graph with its unshard schedule (`unshard_schedule`)."""

import collections
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfshard.errors import LayoutError
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout, itemsize
from tfshard.planning import step_graph, variable_traffic
from tfshard.planning.step_graph import StepGraph
from tfshard.storage import unshard_schedule


def gathers_of(
    model: ModelOrSpecs,
    placement: ModelPlacement,
    inputs: Any = None,
    *,
    graph: StepGraph | None = None,
) -> dict[str, variable_traffic.Gathers]:
    """Return how a step of stage 3 gathers each variable and group, by its name in a plan.

    A list of specs, or a model that cannot be called on made-up inputs, counts as follows: the forward pass uses each
    variable once, in the order of the list, and the backward pass once more.

    Args:
        model: A built model, or specs.
        placement: The layouts of its variables.
        inputs: The batch of the step.
        graph: The graph of the step, if it is traced already.
    """
    placed = placement.variables
    zero_stage = placement.config.zero_stage
    gathered = [each for each in placed if variable_traffic.is_gathered(each, zero_stage)]
    if not zero_stage.shard_params or not gathered or placement.mesh_shape.data_size == 1:
        return {}
    if graph is None and isinstance(model, keras.Model):
        with contextlib.suppress(LayoutError):
            graph = step_graph.trace(model, placement, inputs=inputs)
    if graph is not None:
        return _of(variable_traffic.members_of(gathered), graph.gathers(), graph.itemsizes)
    return _of_list(gathered, placement)


def _of_list(gathered: Sequence[VariableLayout], placement: ModelPlacement) -> dict[str, variable_traffic.Gathers]:
    reshard = placement.config.reshard
    units = variable_traffic.members_of(gathered)
    stored = {
        name: unshard_schedule.StoredBuffer(
            key=name,
            bytes=variable_traffic.whole_bytes(members[0], placement.mesh_shape),
            itemsize=itemsize(members[0].spec.dtype),
            keeps=reshard.keeps(each.spec.path for each in members),
        )
        for name, members in units.items()
    }
    forward = [[stored[variable_traffic.unit_name(each)]] for each in gathered]
    begins = unshard_schedule.unshards(
        forward + forward[::-1], unshard_schedule.kept_bytes_of(stored.values()), reshard.prefetch
    )
    return _of(units, collections.Counter(str(name) for names in begins for name in names), {})


def _of(
    units: Mapping[str, Sequence[VariableLayout]], counted: Mapping[str, int], itemsizes: Mapping[str, int]
) -> dict[str, variable_traffic.Gathers]:
    # The graph has no gather of a variable that only other code reads, but a step gathers every variable that it reads.
    return {
        name: variable_traffic.Gathers(
            count=max(1, counted.get(name, 0)), itemsize=itemsizes.get(name, itemsize(members[0].spec.dtype))
        )
        for name, members in units.items()
    }
