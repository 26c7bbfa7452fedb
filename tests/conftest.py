"""Four logical CPU devices for every test of a process (TensorFlow fixes them once), quick tests, and how much ran."""

import collections
import gc
import importlib.util
import pathlib
import sys

import keras
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import quick  # noqa: E402
import sweeps  # noqa: E402
import tfshard  # noqa: E402

tfshard.initialize(num_devices=4, device_type="CPU")

# Cases of each table that ran, and all that it has.
_RAN: collections.Counter[str] = collections.Counter()
_ALL: dict[str, int] = {}


def pytest_ignore_collect(collection_path, config):
    """With `-m quick`, files without a quick test are not imported, nor those that need KerasHub where it is not."""
    if config.option.markexpr != "quick" or not collection_path.name.startswith("test_"):
        return None
    missing = "\nimport keras_hub\n" in collection_path.read_text() and not importlib.util.find_spec("keras_hub")
    return True if missing or collection_path.name not in quick.QUICK else None


def pytest_collection_modifyitems(items):
    for item in items:
        if quick.is_quick(item.path.name, getattr(item, "originalname", item.name), item.name):
            item.add_marker(pytest.mark.quick)
        if table := item.get_closest_marker("table"):
            item.user_properties.append(("table", table.args))


def pytest_collection_finish():
    """What was imported stays: garbage is no longer looked for among half a million of its objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def heap():
    """What a file of tests leaves behind, the models that it caches above all, is not looked through in later ones."""
    yield
    keras.backend.clear_session()
    gc.freeze()


def pytest_runtest_logreport(report):
    """Called in the process that prints, with the reports of all."""
    for name, value in report.user_properties:
        if name == "table" and report.when == "call" and not report.skipped:
            _RAN[value[0]] += 1
            _ALL[value[0]] = value[1]


def pytest_terminal_summary(terminalreporter):
    if not _RAN:
        return
    terminalreporter.section("tables")
    for name, ran in sorted(_RAN.items()):
        terminalreporter.write_line(f"{name}: {ran} of {_ALL[name]} cases ({ran / _ALL[name]:.0%})")
    if not sweeps.SWEEP:
        terminalreporter.write_line(
            f"The others: TFSHARD_SWEEP=1. The same again: TFSHARD_SAMPLE_SEED={sweeps.SEED}. See docs/testing.md."
        )
