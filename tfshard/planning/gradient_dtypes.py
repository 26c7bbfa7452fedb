"""Find the dtype in which a step reduces each gradient: the dtype of the operation that takes the variable."""

import collections
from collections.abc import Sequence
from typing import Any

import keras

from tfshard import _private
from tfshard.errors import LayoutError
from tfshard.graph.model_graph import trace
from tfshard.graph.model_specs import ModelOrSpecs, OptimizerLike
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.planning.variable_traffic import Reductions
from tfshard.storage import unshard_schedule


def reductions_of(
    model: ModelOrSpecs, planned: Sequence[VariableLayout], optimizer: OptimizerLike, inputs: Any = None
) -> Reductions:
    """Return how a step reduces the gradients of a model.

    Args:
        model: A built model. For a list of specs, or a model that cannot be called on made-up inputs, gradients have
            the dtypes of the variables.
        planned: The layouts of its variables.
        optimizer: An optimizer or its name, if any.
        inputs: The inputs of a step.
    """
    if not isinstance(model, keras.Model):
        return Reductions(scales_loss=_scales(optimizer))
    # `compile` wraps an optimizer that is not the model's.
    wraps = optimizer is not getattr(model, "optimizer", None) and model.dtype_policy.name == "mixed_float16"
    is_mixed = any(getattr(each.spec.layer, "compute_dtype", None) not in (None, each.spec.dtype) for each in planned)
    dtypes = _dtypes(model, inputs) if is_mixed else {}
    return Reductions(dtypes=dtypes, scales_loss=wraps or _scales(optimizer))


def _scales(optimizer: OptimizerLike) -> bool:
    """Return whether an optimizer scales the loss: it then looks at all gradients before it updates."""
    chain = _private.optimizer_chain(None if optimizer is None else keras.optimizers.get(optimizer))
    return any(isinstance(each, keras.optimizers.LossScaleOptimizer) for each in chain)


def _dtypes(model: keras.Model, inputs: Any) -> dict[str, str]:
    """Return the dtype in which the model uses each trained variable, by path. A variable with several dtypes is left
    out."""
    try:
        graph = trace(model, inputs)
    except LayoutError:
        return {}
    operations = graph.operations[0].graph.get_operations()
    tensors = {name: graph.operations[0].graph.get_tensor_by_name(name) for name in graph.variables}
    values = unshard_schedule.StoredValues(
        (spec.path, tensors[name]) for name, spec in graph.variables.items() if spec.trainable
    )
    found: dict[str, set[str]] = collections.defaultdict(set)
    for use in values.uses(operations):
        for path, numbers in use.numbers.items():
            found[str(path)].update(use.operation.inputs[number].dtype.name for number in numbers)
    return {path: dtype for path, (dtype, *others) in found.items() if not others}
