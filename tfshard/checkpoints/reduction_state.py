"""Restores the state that reductions of gradients keep between steps, from a checkpoint of any mesh and reduction."""

import collections
from collections.abc import Iterable

from tfshard.checkpoints.reader import Checkpoint
from tfshard.checkpoints.training_state import REDUCTION, StateVariable
from tfshard.errors import warn
from tfshard.layouts import gradient_reduction
from tfshard.layouts.axes import axis_sizes
from tfshard.storage.variables import ShardedVariable


def restore(checkpoint: Checkpoint, variables: Iterable[StateVariable]) -> None:
    """Restore the state of each variable with a reduction (`GradientReduction.restored`).

    The state of variables that no longer have a reduction is dropped, with a warning.

    Args:
        checkpoint: The checkpoint, which was verified.
        variables: The result of `training_state.collect`.
    """
    names: dict[str, set[str]] = collections.defaultdict(set)
    for key, each in checkpoint.manifest.variables.items():
        if each.kind == REDUCTION:
            owner, _, name = key.rpartition("/")
            names[owner].add(name)
    for variable in [each for each in variables if each.kind == "parameter"]:
        owner, value = f"{REDUCTION}/{variable.key.partition('/')[2]}", variable.value
        if isinstance(value, ShardedVariable) and value.layout.reduction is not None:
            stored = {name: checkpoint.read(f"{owner}/{name}") for name in names.pop(owner, ())}
            new = value.layout.reduction.restored(value.layout, axis_sizes(value.mesh), stored)
            for name, array in new.items():
                value.kept[name].assign(array)
    if names:
        paths = [name.partition("/")[2] for name in names]
        warn(f"The checkpoint of step {checkpoint.step} {gradient_reduction.text_of_dropped(paths)}")
