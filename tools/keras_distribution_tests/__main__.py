"""Run Keras's own tests of `keras.distribution` on TensorFlow with tfshard, on 8 logical CPU devices.

    python -m tools.keras_distribution_tests

The tests are read from the installed wheel of Keras: in keras/src, distribution/distribution_lib_test.py, and
backend/jax/distribution_lib_test.py for the JAX backend. plugin.py lets the tests for JAX run. While pytest imports the
tests, `keras.backend.backend()` says "jax", and a stand-in for the module `jax` has TensorFlow's objects. The program
prints each test that does not pass, and exits with 1 if one of them is not explained in docs/keras_distribution.md.
"""

import os
import pathlib
import re
import subprocess
import sys

import keras
from absl import app

_HERE = pathlib.Path(__file__).parent
_DOC = _HERE.parents[1] / "docs" / "keras_distribution.md"
_KERAS = pathlib.Path(keras.__file__).parent / "src"
TESTS = ("distribution/distribution_lib_test.py", "backend/jax/distribution_lib_test.py")


def outcomes() -> tuple[dict[str, str], str]:
    """Return the outcome of each test by name, and pytest's output."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-rA", "--tb=short", "-p", "no:cacheprovider", "-p", "plugin",
        "--rootdir", str(_KERAS), "--confcutdir", str(_KERAS), "-c", os.devnull, "--import-mode=importlib",
        *(str(_KERAS / name) for name in TESTS),
    ]  # fmt: skip
    paths = os.pathsep.join((str(_HERE), str(_HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=_HERE)
    found = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"(PASSED|FAILED|ERROR|SKIPPED) (\S+?::\S+?)(?: - .*)?$", line):
            found[match[2].rpartition("src/")[2]] = match[1]
    return found, done.stdout + done.stderr


def main(argv: list[str]) -> None:
    del argv
    found, output = outcomes()
    passed = sum(how == "PASSED" for how in found.values())
    others = {name: how for name, how in found.items() if how != "PASSED"}
    if not found or others:
        print(output)
    print(f"Keras {keras.__version__}: {passed} of {len(found)} tests of keras.distribution pass on TensorFlow")
    doc = _DOC.read_text()
    unexplained = [name for name in others if f"`{name.rpartition('::')[2]}`" not in doc]
    for name, how in others.items():
        print(f"{how}: {name}{' (not explained)' if name in unexplained else ''}")
    sys.exit(1 if unexplained or not found else 0)


if __name__ == "__main__":
    app.run(main)
