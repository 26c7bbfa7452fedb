"""A step computes the functions of keras.ops as docs/operations.md says."""

import types

import keras
import pytest

from built_in_operations import MESHES, calls, documented, name_of, outcome, short
from sweeps import table

# No functions of tensors in a step: classes, settings, and functions of NumPy arrays.
NOT_TRIED = {"convert_to_numpy", "device_scope"}


def functions(module: types.ModuleType, prefix: str = "") -> set[str]:
    return {prefix + name for name, each in vars(module).items() if isinstance(each, types.FunctionType)}


def test_every_function_of_keras_ops_is_tried():
    names = functions(keras.ops) | functions(keras.ops.image, "image.")
    tried = {name_of(call) for call in calls()}
    # A function may have several names, in `keras.ops` and in `keras.ops.numpy`.
    missing = {name for name in names - tried - NOT_TRIED if f"image.{name}" not in tried}
    assert not missing


def test_the_docs_list_every_call():
    assert sorted(documented()) == sorted(calls()), "Write the table again: python tests/built_in_operations.py"


def test_nothing_is_wrong():
    wrong = [
        (call, found) for call, outcomes in documented().items() for found in outcomes.values() if "wrong" in found
    ]
    assert not wrong


@pytest.mark.parametrize("mesh", MESHES)
def test_at_least_95_percent_of_the_functions_are_right(mesh):
    refused = {name_of(call) for call, outcomes in documented().items() if "refused" in outcomes[mesh]}
    assert len(refused) <= 0.05 * len({name_of(call) for call in documented()}), refused


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mesh", MESHES)
@table("functions of keras.ops", "call", calls(), sample=25)
def test_a_function_does_what_the_docs_say(mesh, call):
    assert short(outcome(call, mesh)) == documented()[call][mesh]
