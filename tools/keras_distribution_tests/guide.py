"""Run the official guide of Keras's distribution API on TensorFlow, on 8 logical CPU devices.

    python -m tools.keras_distribution_tests.guide FILE

FILE is a copy of guides/distribution.py of github.com/keras-team/keras-io (Apache License 2.0), which is not part of
this repository. The guide runs as it is, but for the lines in `SUBSTITUTIONS`, which name the JAX backend, and for one
line in front, which starts the devices of a machine without accelerators.
"""

import os
import pathlib
import re
import subprocess
import sys

from absl import app

# Lines of the guide that cannot stand on TensorFlow, or, for the last one, with the Keras of today on any backend.
SUBSTITUTIONS = (
    (r'^os\.environ\["KERAS_BACKEND"\] = "jax"$', "import tfshard"),
    (r"^import jax$", ""),
    (r'jax\.devices\("gpu"\)', "keras.distribution.list_devices()"),
    (r"ModelParallel\(layout_map, ", "ModelParallel(layout_map=layout_map, "),
)
# What XLA_FLAGS=--xla_force_host_platform_device_count=8 is to JAX.
START = 'import tfshard; tfshard.initialize(num_devices=8, device_type="CPU")\n'


def substituted(guide: str) -> tuple[str, list[str]]:
    """Return the guide for TensorFlow, and the substitutions that it needed."""
    needed = []
    for pattern, text in SUBSTITUTIONS:
        guide, count = re.subn(pattern, text, guide, flags=re.MULTILINE)
        if count:
            needed.append(f"{count} x {pattern} -> {text!r}")
    return START + guide, needed


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError(f"Give the file of the guide. Received: {argv[1:]}")
    code, needed = substituted(pathlib.Path(argv[1]).read_text())
    print("\n".join(["Substituted:", *needed]))
    done = subprocess.run(
        [sys.executable, "-"], input=code, text=True, env={**os.environ, "KERAS_BACKEND": "tensorflow"}
    )
    print("The guide runs." if done.returncode == 0 else "The guide fails.")
    sys.exit(done.returncode)


if __name__ == "__main__":
    app.run(main)
