"""The package lists every process-wide replacement in TensorFlow and Keras, and every search of objects or frames."""

import ast
import os
import subprocess
import sys

import keras

from test_design import MODULES
from tfshard._private import patches

_SEARCHES = {"gc.get_objects", "gc.get_referrers", "gc.collect", "sys._getframe", "_private.scope_callers"}

# The functions of the backend of keras.distribution.
_DISTRIBUTION = (
    "list_devices", "get_device_count", "initialize", "num_processes", "process_id", "distribute_tensor",
    "distribute_variable", "distribute_value", "distribute_data_input", "_to_backend_device", "_to_backend_mesh",
    "_to_backend_layout",
)  # fmt: skip

_SCRIPT = """
import sys, types
import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.debug.lib import check_numerics_callback
from tensorflow.python.ops import ctc_ops

def state():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("tensorflow", "keras") or type(module) is not types.ModuleType:
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__") and key.endswith("__"):
                continue
            if callable(value) or isinstance(value, frozenset):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for each, member in list(vars(value).items()):
                    if callable(member) or isinstance(member, (classmethod, staticmethod, property)):
                        found[f"{name}.{value.__qualname__}.{each}"] = member
    return found

before = state()
import tfshard
from tfshard._private import patches
imported = {each.target for each in patches.made()}
tfshard.initialize(num_devices=2, device_type="CPU")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=2)))
model.fit(np.zeros((4, 4)), np.zeros((4, 2)), verbose=0)
after = state()
modules = {key.rpartition(".")[0] for key in before}
for key, value in after.items():
    is_new = key not in before and key.rpartition(".")[0] in modules and key.endswith("__")
    if (key in before and before[key] is not value) or is_new:
        print("CHANGED", key)
for each in patches.made():
    print("LISTED", each.target)
for each in imported:
    print("IMPORT", each)
"""


def _name(cls):
    return f"{cls.__module__}.{cls.__qualname__}"


def test_every_patch_that_stays_after_a_training_is_listed():
    """Compares TensorFlow's and Keras's modules and classes before `import tfshard` and after a training."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split(" ", 1) for line in done.stdout.splitlines() if " " in line]
    found = {key: {name for kind, name in lines if kind == key} for key in ("CHANGED", "LISTED", "IMPORT")}
    # Keras's versions have different names for the base classes of keras.Model.
    trainer = next(cls for cls in keras.Model.__mro__ if "make_predict_function" in vars(cls))
    base = next(cls for cls in trainer.__mro__[1:] if "compile" in vars(cls))
    assert found["IMPORT"] == {
        *(f"keras.src.backend.tensorflow.distribution_lib.{name}" for name in _DISTRIBUTION),
        f"{_name(keras.Variable)}._initialize",
        f"{_name(trainer)}.make_predict_function",
        "keras.src.models.model.Model.export",
        "keras.src.models.model.Model.save",
        "keras.src.models.model.Model.save_weights",
        f"{_name(trainer)}.__init__",
        f"{_name(base)}.compile",
        "keras.src.models.model.Model.__init_subclass__",
    }
    assert found["CHANGED"], "premise"
    assert sorted(found["CHANGED"] - found["LISTED"]) == []


def _searches(module):
    """Yield the functions of a module that search, with the names they use."""

    def visit(node, place):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # A nested function belongs to the outer function.
                yield from visit(child, place if place and not place.endswith(".") else f"{place}{child.name}")
            else:
                if isinstance(child, ast.Call) and ast.unparse(child.func) in _SEARCHES:
                    yield f"{module}:{place}", ast.unparse(child.func)
                yield from visit(child, place)

    return set(visit(ast.parse(MODULES[module].read_text()), ""))


def test_every_search_of_the_interpreter_is_listed_with_its_reason():
    found = {each for module in MODULES for each in _searches(module)}
    assert found == {(each.function, each.uses) for each in patches.SEARCHES}
    assert all(each.reason for each in patches.SEARCHES)
