"""How often a step gathers what rests sharded: the turns of its uses (`tfshard.storage.turns`), by the graph."""

import collections
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard.errors import LayoutError
from tfshard.graph.model_graph import ModelGraph, trace
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout, itemsize
from tfshard.operations import blocks, loops
from tfshard.planning import training_graph, variable_traffic
from tfshard.storage import turns

# Operations whose gradients do not take their operands.
_WITHOUT_OPERANDS = frozenset(
    ("Add", "AddN", "AddV2", "BiasAdd", "ConcatV2", "GatherV2", "Pack", "ResourceGather", "Sub", "Sum")
)

_LOOPS = frozenset(("StatelessWhile", "While"))


def gathers_of(
    model: ModelOrSpecs, placement: ModelPlacement, gathering: turns.Gathering, inputs: Any = None
) -> dict[str, variable_traffic.Gathers]:
    """How a step of stage 3 gathers each variable and group, by its name in a plan.

    Args:
        model: A built model. Of a list of specs, and of a model that cannot be called on inputs that are made up for
            it, each variable is taken to be used once, in the order of the list, and once more in the backward pass.
        placement: Where its variables go.
        gathering: How steps gather.
        inputs: What a step calls the model on.
    """
    planned, mesh_shape = placement.variables, placement.mesh_shape
    gathered = [each for each in planned if placement.zero_stage == 3 and variable_traffic.is_gathered(each, 3)]
    units = variable_traffic.members_of(gathered)
    if not units or mesh_shape.data_size == 1:
        return {}
    stored = {
        name: turns.Stored(
            key=name,
            bytes=variable_traffic.whole_bytes(members[0], mesh_shape),
            itemsize=itemsize(members[0].spec.dtype),
            keeps=gathering.keeps(each.spec.path for each in members),
        )
        for name, members in units.items()
    }
    if isinstance(model, keras.Model) and blocks.has_marked(model):
        return _of_blocks(model, placement, gathering, inputs)
    name_of = {each.spec.path: name for name, members in units.items() for each in members}
    uses, sent = _uses(model, planned, name_of, inputs)
    stored = {name: each.sent_as(sent.get(name)) for name, each in stored.items()}
    order = [[stored[name] for name in dict.fromkeys(names)] for names in uses]
    begins = turns.begun(order, gathering.kept_bytes(stored.values()), gathering.prefetch)
    counted = collections.Counter(name for names in begins for name in names)
    # What is not used in the forward pass has no turn, as far as the graph tells; a step gathers what it reads.
    return {
        name: variable_traffic.Gathers(count=max(1, counted[name]), itemsize=each.itemsize)
        for name, each in stored.items()
    }


def _of_blocks(
    model: keras.Model, placement: ModelPlacement, gathering: turns.Gathering, inputs: Any
) -> dict[str, variable_traffic.Gathers]:
    """Of a step that computes blocks again: only its own graph tells when."""
    graph = training_graph.trace(model, placement, gathering=gathering, inputs=inputs)
    return {
        name: variable_traffic.Gathers(count=count, itemsize=graph.itemsizes[name])
        for name, count in graph.gathers().items()
    }


def _uses(
    model: ModelOrSpecs, planned: Sequence[VariableLayout], name_of: Mapping[str, str], inputs: Any
) -> tuple[list[list[str]], dict[Hashable, tf.DType]]:
    """The names of what each operation of a step takes, forward and backward; and `turns.sent_dtypes`."""
    try:
        graph = trace(model, inputs) if isinstance(model, keras.Model) else None
    except LayoutError:
        graph = None
    if graph is None:
        forward = [[name_of[each.spec.path]] for each in planned if each.spec.path in name_of]
        return forward + forward[::-1], {}
    values = turns.Values(
        (name_of[spec.path], graph.operations[0].graph.get_tensor_by_name(tensor))
        for tensor, spec in graph.variables.items()
        if spec.path in name_of
    )
    uses = list(values.uses(graph.operations[0].graph.get_operations()))
    handed_on = {name_of.get(path) for path in loops.gathered_once(model)}
    forward, backward = [], []
    for use in uses:
        # Keras also takes the first turn of a recurrent loop before the loop, to learn the shapes of its results.
        forward.append([str(key) for key in use.numbers if key not in handed_on or use.operation.type in _LOOPS])
        again = (key for key, numbers in use.numbers.items() if _is_needed_again(use, numbers, graph))
        backward.append([str(key) for key in again if key not in handed_on])
    return forward + [names for names in backward[::-1] if names], turns.sent_dtypes(uses)


def _is_needed_again(use: turns.Use, numbers: Sequence[int], graph: ModelGraph) -> bool:
    """Whether a gradient through an operation takes the value of these of its inputs."""
    others = [each for number, each in enumerate(use.operation.inputs) if number not in numbers]
    if use.operation.type in _WITHOUT_OPERANDS:
        return False
    return not others or any(each.name in graph.trained for each in others)
