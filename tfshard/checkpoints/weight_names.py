"""The names of weights in safetensors files: the paths of the variables."""

import collections
from collections.abc import Mapping

import keras

from tfshard import _private
from tfshard.checkpoints import training_state


def place_of(name: str) -> str:
    """Return the name of a weight that has no variable: its place in Keras's weight file.

    >>> place_of("layers/dense/vars/0")
    'layers/dense/0'
    """
    place, _, key = name.rpartition("vars/")
    return place + key


def names_of(model: keras.Model, expected: Mapping[str, _private.WeightSpec]) -> dict[str, str]:
    """Return the names of a model's weights in a safetensors file, by their places in Keras's weight file.

    The name is the path of the variable. Keras numbers the layers that it names over the whole process; here they are
    numbered within the model, so that a second model of the same kind has the same names. A weight that Keras computes
    from variables, such as a kernel with a merged adapter, has the name of the variable that it replaces.
    """
    path_of = training_state.path_names(model)
    used: collections.Counter[str] = collections.Counter()
    written = {id(spec.variable) for spec in expected.values()}
    left = [variable for variable in model.variables if id(variable) not in written]
    found = {}
    for place, spec in expected.items():
        replaced = [variable for variable in left if spec.variable is None and _is_replaced(variable, spec)]
        if spec.variable is None and len(replaced) != 1:
            found[place] = place_of(place)
            continue
        name = path_of(spec.path if spec.variable is not None else replaced[0].path)
        used[name] += 1
        found[place] = name if used[name] == 1 else f"{name}#{used[name]}"
    return found


def _is_replaced(variable: keras.Variable, spec: _private.WeightSpec) -> bool:
    """Return whether a weight without a variable may stand for a variable that Keras does not save."""
    owner = variable.path.split("/")[-2:-1]
    is_adapter = variable.name.startswith("lora_")
    same = tuple(variable.shape) == spec.shape and keras.backend.standardize_dtype(variable.dtype) == spec.dtype
    return same and not is_adapter and owner == [spec.layer]
