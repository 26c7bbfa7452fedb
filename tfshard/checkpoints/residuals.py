"""Restores error-feedback residuals of compressed gradients from a checkpoint of any mesh and compression."""

import collections
from collections.abc import Iterable, Mapping

import numpy as np

from tfshard.checkpoints.reader import Checkpoint
from tfshard.checkpoints.training_state import COMPRESSION, StateVariable
from tfshard.errors import warn
from tfshard.layouts import compressed_form
from tfshard.layouts.axes import axis_sizes
from tfshard.storage.variables import ShardedVariable


def restore(checkpoint: Checkpoint, variables: Iterable[StateVariable]) -> None:
    """Restore the compression state of variables with compressed gradients.

    With an equal number of devices and replicas, each device gets its residual back. Otherwise only the sum of the
    residuals matters, and the devices share the sum evenly. State that was not saved gets its initial value. Residuals
    of gradients that are no longer compressed are dropped, with a warning.

    Args:
        checkpoint: The checkpoint, which was verified.
        variables: The result of `training_state.collect`.
    """
    stored: dict[str, set[str]] = collections.defaultdict(set)
    for key, each in checkpoint.manifest.variables.items():
        if each.kind == COMPRESSION:
            owner, _, name = key.rpartition("/")
            stored[owner].add(name)
    for variable in [each for each in variables if each.kind == "parameter"]:
        owner = f"{COMPRESSION}/{variable.key.partition('/')[2]}"
        if isinstance(variable.value, ShardedVariable) and variable.value.layout.compression is not None:
            _restore(checkpoint, variable.value, {name: f"{owner}/{name}" for name in stored.pop(owner, ())})
    if stored:
        first = next(iter(stored)).partition("/")[2]
        warn(
            f"The checkpoint of step {checkpoint.step} was saved with compressed gradients. What devices had not sent "
            f"of those of {len(stored)} variables, such as '{first}', is left out: they are not compressed here."
        )


def _restore(checkpoint: Checkpoint, variable: ShardedVariable, keys: Mapping[str, str]) -> None:
    """Restore the compression state of a variable.

    Args:
        checkpoint: The checkpoint.
        variable: The variable.
        keys: The keys of the variable's stored state, by name.
    """
    form = compressed_form.of(variable.layout, axis_sizes(variable.mesh))
    assert form is not None, variable
    kept, stored = variable.kept, checkpoint.manifest.variables
    errors = {name for name in _ERRORS if name in keys}
    new = {name: np.zeros(kept[name].shape, np.float32) for name in kept}
    new |= {compressed_form.FACTOR: form.first_factor()} if compressed_form.FACTOR in kept else {}
    fits = {name for name in keys if name in kept and stored[keys[name]].shape == tuple(kept[name].shape)}
    new |= {name: checkpoint.read(keys[name]) for name in fits - errors}
    if errors <= fits and errors == {name for name in _ERRORS if name in kept}:
        new |= {name: checkpoint.read(keys[name]) for name in errors}
    elif errors:
        read = {name: checkpoint.read(keys[name]) for name in errors}
        new |= compressed_form.shared_out(compressed_form.total_error(read, form.shape), form)
    for name, value in new.items():
        kept[name].assign(value)


_ERRORS = (compressed_form.ERROR, compressed_form.SUM_ERROR)
