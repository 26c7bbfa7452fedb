"""Run Keras's tests of layers and of training twice: with every `compile` under a ShardedStrategy, and without.

    tools/keras_tests.sh                        # keras/src/layers and keras/src/trainers
    tools/keras_tests.sh --tests=layers/rnn

The program prints how many tests pass without a strategy and how many of them pass under it, and lists the others.
`--log` names a file for the output of pytest in the run under the strategy.
"""

import os
import pathlib
import re
import subprocess
import sys

import keras
from absl import app, flags

_TESTS = flags.DEFINE_list("tests", ["layers", "trainers"], "Files or folders below keras/src.")
_LOG = flags.DEFINE_string("log", None, "A file for the output of pytest in the sharded run.")
_PROCESSES = flags.DEFINE_integer("processes", 2, "Number of pytest processes.")

_HERE = pathlib.Path(__file__).parent
_KERAS = pathlib.Path(keras.__file__).parent / "src"


def run(*options: str) -> dict[str, str]:
    """Run the tests, and return the outcome of each test by name."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider",
        "-n", str(_PROCESSES.value), "--rootdir", str(_KERAS), "-c", os.devnull, "--import-mode=importlib", *options,
        *(str(_KERAS / name) for name in _TESTS.value),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        # The tests import the conftest in this folder.
        "PYTHONPATH": os.pathsep.join((str(_HERE), os.environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=_HERE)
    if _LOG.value and options:
        pathlib.Path(_LOG.value).write_text(done.stdout)
    found = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"(PASSED|FAILED|ERROR) (\S+?::\S+?)(?: - .*)?$", line):
            found[match[2].rpartition("keras/src/")[2]] = match[1]
    return found


def main(argv: list[str]) -> None:
    del argv
    plain, sharded = run(), run("-p", "plugin")
    passed = {name for name, how in plain.items() if how == "PASSED"}
    lost = sorted(name for name in passed if sharded.get(name) != "PASSED")
    share = 1 - len(lost) / max(len(passed), 1)
    print(
        f"plain Keras passes {len(passed)} of {len(plain)}; "
        f"of these {len(passed) - len(lost)} under the strategy ({share:.1%})"
    )
    for name in lost:
        print(f"{sharded.get(name, 'not run')}: {name}")


if __name__ == "__main__":
    app.run(main)
