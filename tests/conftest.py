"""Choose the tests of a run, and clean the process up between tests. (The conftest.py above sets up the devices.)"""

import gc
import importlib.util
import logging
import os
import pathlib
import re
import sys

import keras
import numpy as np
import pytest
from tensorflow.python.framework import ops

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import quick  # noqa: E402
import sweeps  # noqa: E402
from mutations import MUTATIONS  # noqa: E402
from tfshard.devices import startup  # noqa: E402
from tools.bench import common  # noqa: E402


def pytest_report_header():
    return None if sweeps.SWEEP else "tests: ordinary run; TFSHARD_SWEEP=1 takes every case (docs/testing.md)"


def pytest_ignore_collect(collection_path, config):
    """With `-m quick`, import only files with a quick test.

    Also skips files that need KerasHub if it is not installed.
    """
    if config.option.markexpr != "quick" or not collection_path.name.startswith("test_"):
        return None
    missing = "\nimport keras_hub\n" in collection_path.read_text() and not importlib.util.find_spec("keras_hub")
    return True if missing or collection_path.name not in quick.QUICK else None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if quick.is_quick(item.path.name, getattr(item, "originalname", item.name), item.name):
            item.add_marker(pytest.mark.quick)
        if common.DEVICE_TYPE != "CPU" and (on_cpu := item.get_closest_marker("on_cpu")):
            item.add_marker(pytest.mark.skip(reason=f"on CPU devices: {on_cpu.args[0]}"))
    is_named = config.option.keyword or any("::" in each for each in config.args)
    if not (sweeps.SWEEP or is_named or {"slow", "sweep"} & set(re.findall(r"\w+", config.option.markexpr))):
        out = sweeps.left_out(items, named={mutation.killed_by for mutation in MUTATIONS})
        config.stash[sweeps.LEFT_OUT] = out
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]
    if hasattr(config, "workerinput"):
        items.sort(key=sweeps.place)


def pytest_collection_finish():
    """Exclude the imported objects, half a million, from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_kept_gradients():
    """Drop the custom gradients that a test registered.

    TensorFlow keeps each traced custom gradient, and with it the graph of the step, for the life of the process. The
    graphs take some megabytes per test, and slow down each garbage collection.
    """
    yield
    entries = ops.gradient_registry._registry
    for name in [name for name in entries if name.startswith("CustomGradient-")]:
        del entries[name]


def _process_state() -> dict[str, object]:
    """Return what a test can change for the tests that follow it in the process."""
    # Switches of DTensor are set by the first operation that needs them.
    environment = {name: value for name, value in os.environ.items() if "DTENSOR_" not in name}
    environment.pop("PYTEST_CURRENT_TEST", None)
    return {
        **{f"${name}": value for name, value in environment.items()},
        "level of tfshard's logger": logging.getLogger("tfshard").level,
        "dtype policy": keras.config.dtype_policy().name,
        "floatx": keras.config.floatx(),
        "distribution": keras.distribution.distribution(),
        "working directory": os.getcwd(),
        "runtime": startup.current(),
    }


@pytest.fixture(autouse=True)
def no_changed_process():
    """Fail a test that leaves the process changed: the tests that follow it would run under the change."""
    before = _process_state()
    yield
    after = _process_state()
    names = before.keys() | after.keys()
    changed = {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
    assert not changed, f"The test left these changed, as (before, after): {changed}"


@pytest.fixture(autouse=True)
def numbers_of_its_own(request):
    """Reseed the module's random states, so that a test draws the same numbers in any order of tests."""
    for value in vars(request.module).values():
        if isinstance(value, np.random.RandomState):
            value.seed(0)


@pytest.fixture(scope="module", autouse=True)
def heap(request):
    """Free the models that a file of tests caches, and exclude all other remains from later garbage collections."""
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
    keras.backend.clear_session()
    gc.collect()
    gc.freeze()
