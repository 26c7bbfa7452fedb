"""Quick tests, what is drawn of slow ones, and how much ran. (The devices of all tests: the conftest.py above.)"""

import collections
import gc
import importlib.util
import pathlib
import sys

import keras
import numpy as np
import pytest
from tensorflow.python.framework import ops

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import portions  # noqa: E402
import quick  # noqa: E402
import sweeps  # noqa: E402
from tools.bench import common  # noqa: E402
from tools.mutations import MUTATIONS  # noqa: E402

# Cases of each table that ran, and all that it has.
_RAN: collections.Counter[str] = collections.Counter()
_ALL: dict[str, int] = {}
# Slow tests of which some cases ran, and how many they have.
_PORTIONS: dict[str, int] = {}
_RAN_OF_PORTIONS: set[str] = set()
# Long tests that ran, and how many there are.
_LONG: dict[str, int] = {}
_SECONDS: collections.Counter[str] = collections.Counter()


def pytest_ignore_collect(collection_path, config):
    """With `-m quick`, files without a quick test are not imported, nor those that need KerasHub where it is not."""
    if config.option.markexpr != "quick" or not collection_path.name.startswith("test_"):
        return None
    missing = "\nimport keras_hub\n" in collection_path.read_text() and not importlib.util.find_spec("keras_hub")
    return True if missing or collection_path.name not in quick.QUICK else None


def pytest_collection_modifyitems(config, items):
    for item in items:
        if quick.is_quick(item.path.name, getattr(item, "originalname", item.name), item.name):
            item.add_marker(pytest.mark.quick)
        if table := item.get_closest_marker("table"):
            item.user_properties.append(("table", table.args))
        if common.DEVICE_TYPE != "CPU" and (on_cpu := item.get_closest_marker("on_cpu")):
            item.add_marker(pytest.mark.skip(reason=f"on CPU devices: {on_cpu.args[0]}"))
    if not (sweeps.SWEEP or portions.WRITES or config.option.keyword or any("::" in each for each in config.args)):
        _take_portions(config, items)
    if hasattr(config, "workerinput"):
        items[:] = portions.longest_first(items, key=lambda item: item.nodeid)


def _take_portions(config, items):
    """Of slow tests, those cases that an ordinary run takes; and a third of the long ones."""
    cases, seconds = [item.nodeid for item in items], portions.known()
    always = {item.nodeid for item in items if item.get_closest_marker("quick")}
    named = {mutation.killed_by for mutation in MUTATIONS}
    # The others are drawn: tools/mutate.sh runs all.
    always |= {case for case in named if seconds.get(portions.test_of(case), 0.0) <= portions.LONG}
    out = portions.left_out(cases, always, seconds, sweeps.SEED)
    counts = collections.Counter(map(portions.test_of, cases))
    long = portions.long_tests(cases, seconds)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    cut = {portions.test_of(case) for case in out}
    items[:] = [item for item in items if item.nodeid not in out]
    for item in items:
        test = portions.test_of(item.nodeid)
        if test in cut:
            item.user_properties.append(("portion", (test, counts[test])))
        if test in long:
            item.user_properties.append(("long", len(long)))


def pytest_collection_finish():
    """What was imported stays: garbage is no longer looked for among half a million of its objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_kept_gradients():
    """TensorFlow keeps each custom gradient that is traced, and with it the graph of the step, for as long as a process
    lives: some megabytes for a test, which each collection of garbage looks through."""
    yield
    entries = ops.gradient_registry._registry
    for name in [name for name in entries if name.startswith("CustomGradient-")]:
        del entries[name]


@pytest.fixture(autouse=True)
def numbers_of_its_own(request):
    """A test draws the same numbers whichever ran before it."""
    for value in vars(request.module).values():
        if isinstance(value, np.random.RandomState):
            value.seed(0)


@pytest.fixture(scope="module", autouse=True)
def heap(request):
    """What a file of tests leaves behind is not looked through in later ones; the models that it caches are freed."""
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
    keras.backend.clear_session()
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report):
    """Called in the process that prints, with the reports of all."""
    for name, value in report.user_properties:
        if name == "table" and report.when == "call" and not report.skipped:
            _RAN[value[0]] += 1
            _ALL[value[0]] = value[1]
        if name == "portion" and report.when == "call":
            _PORTIONS[value[0]] = value[1]
            _RAN_OF_PORTIONS.add(report.nodeid)
        if name == "long" and report.when == "call":
            _LONG[report.nodeid] = value
    _SECONDS[report.nodeid] += report.duration


def pytest_sessionfinish(session):
    """Called in the process that prints, too."""
    if portions.WRITES and not hasattr(session.config, "workerinput"):
        portions.write(_SECONDS.items())


def pytest_terminal_summary(terminalreporter):
    if _PORTIONS:
        terminalreporter.section("portions of slow tests")
        terminalreporter.write_line(
            f"{len(_RAN_OF_PORTIONS)} of {sum(_PORTIONS.values())} cases of {len(_PORTIONS)} tests (tests/portions.py)"
        )
    if _LONG:
        terminalreporter.write_line(f"{len(_LONG)} of {max(_LONG.values())} long tests without cases")
    if not _RAN:
        return
    terminalreporter.section("tables")
    for name, ran in sorted(_RAN.items()):
        terminalreporter.write_line(f"{name}: {ran} of {_ALL[name]} cases ({ran / _ALL[name]:.0%})")
    if not sweeps.SWEEP:
        terminalreporter.write_line(
            f"The others: TFSHARD_SWEEP=1. The same again: TFSHARD_SAMPLE_SEED={sweeps.SEED}. See docs/testing.md."
        )
