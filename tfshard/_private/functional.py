"""Functional and Sequential Keras models: the graph of their layers."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.src.models.functional import Functional
from keras.src.models.sequential import Sequential


def functional_of(model: keras.Model) -> keras.Model | None:
    """The model of layers of which TensorFlow computes a model's results, or None: a Functional as it is, what a
    built Sequential has (`Sequential._functional`), nothing with a `call` of its own."""
    if isinstance(model, Sequential):
        found: keras.Model | None = model._functional if type(model).call is Sequential.call else None
        return found
    return model if isinstance(model, Functional) and type(model).call is Functional.call else None


def run_through(model: keras.Model, inputs: Sequence[Any], call: Callable[..., Any]) -> list[Any]:
    """What a functional model makes of inputs (`Function._run_through_graph`).

    Args:
        model: A Functional.
        inputs: As its `inputs`.
        call: Called with each operation and its arguments, in place of it.

    Returns:
        As its `outputs`.
    """
    flat: list[Any] = keras.tree.flatten(model._run_through_graph(list(inputs), call_fn=call))
    return flat


def flat_inputs(model: keras.Model, given: Any) -> list[Any]:
    """What a functional model is given, in the order of its `inputs`: by names, or in its structure
    (`Function._inputs_struct`)."""
    structure = model._inputs_struct
    if isinstance(structure, dict) and isinstance(given, dict):
        given = {name: given[name] for name in structure}
    flat: list[Any] = keras.tree.flatten(given)
    return flat


def standardized_inputs(model: keras.Model, given: Any) -> list[Any]:
    """Tensors of a batch as a functional model takes them: flat, and with its dtypes and ranks
    (`Functional._standardize_inputs`)."""
    standardized: list[Any] = model._standardize_inputs(given)
    return standardized


def packed_outputs(model: keras.Model, flat: Sequence[Any]) -> Any:
    """Results of a functional model, in its structure (`Function._outputs_struct`, one of one as itself)."""
    packed = keras.tree.pack_sequence_as(model._outputs_struct, list(flat))
    return packed[0] if isinstance(packed, list) and len(packed) == 1 else packed
