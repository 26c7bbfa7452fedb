"""The layer graph of Functional and Sequential Keras models."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.models.functional import Functional
from keras.src.models.sequential import Sequential


def functional_of(model: keras.Model) -> keras.Model | None:
    """Return the Functional model that computes a model's outputs, or None.

    This is the model itself if it is a Functional, and the inner model of a built Sequential
    (`Sequential._functional`). Returns None if a subclass overrides `call`.
    """
    if isinstance(model, Sequential):
        found: keras.Model | None = model._functional if type(model).call is Sequential.call else None
        return found
    return model if isinstance(model, Functional) and type(model).call is Functional.call else None


def run_through(model: keras.Model, inputs: Sequence[Any], call: Callable[..., Any]) -> list[Any]:
    """Run a functional model's layer graph on inputs (`Function._run_through_graph`).

    Args:
        model: A Functional model.
        inputs: The values of the model's `inputs`, in their order.
        call: Called with each operation and its arguments instead of the operation.

    Returns:
        The values of the model's `outputs`, in their order.
    """
    flat: list[Any] = keras.tree.flatten(model._run_through_graph(list(inputs), call_fn=call))
    return flat


def flat_inputs(model: keras.Model, given: Any) -> list[Any]:
    """Flatten a functional model's input into the order of `inputs` (`Function._inputs_struct`).

    The input is a dict by name, or has the structure of the model's input.
    """
    structure = model._inputs_struct
    if isinstance(structure, dict) and isinstance(given, dict):
        given = {name: given[name] for name in structure}
    flat: list[Any] = keras.tree.flatten(given)
    return flat


def standardized_inputs(model: keras.Model, given: Any) -> list[Any]:
    """Flatten a batch and cast it to a functional model's dtypes and ranks (`Functional._standardize_inputs`)."""
    standardized: list[Any] = model._standardize_inputs(given)
    return standardized


def packed_outputs(model: keras.Model, flat: Sequence[Any]) -> Any:
    """Pack flat results into a functional model's output structure (`Function._outputs_struct`).

    Returns a list of one result as the result itself.
    """
    packed = keras.tree.pack_sequence_as(model._outputs_struct, list(flat))
    return packed[0] if isinstance(packed, list) and len(packed) == 1 else packed


@contextlib.contextmanager
def without_input_spec(model: keras.Model) -> Iterator[None]:
    """Let a functional model take inputs of other shapes than it was built for (`Functional.input_spec`)."""
    had = hasattr(model, "_manual_input_spec")
    before = model._manual_input_spec if had else None
    model.input_spec = None
    try:
        yield
    finally:
        if had:
            model.input_spec = before
        else:
            del model._manual_input_spec
