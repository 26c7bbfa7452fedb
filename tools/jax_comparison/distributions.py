"""Run one script of `keras.distribution` on JAX and on TensorFlow with tfshard, and compare losses and layouts.

    tools/jax_comparison.sh

The script is distribution_script.py. The program exits with 1 if a relative difference of losses is more than
`--tolerance`, or if a variable is sharded otherwise.
"""

import json
import os
import subprocess
import sys

from absl import app, flags

from tools.jax_comparison import distribution_script as script

_JAX_PYTHON = flags.DEFINE_string("jax_python", None, "Python of the environment with JAX.", required=True)
_TOLERANCE = flags.DEFINE_float("tolerance", 1e-4, "Largest relative difference of two losses.")


def _run(python: str, backend: str) -> dict:
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={script.DEVICES}",
    }
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "tools.jax_comparison.distribution_script"],
        stdout=subprocess.PIPE, text=True, check=True, env=environment,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["backend"] == backend
    return found


def main(argv: list[str]) -> None:
    del argv
    jax, ours = _run(_JAX_PYTHON.value, "jax"), _run(sys.executable, "tensorflow")
    print(f"Keras {jax['keras']} on JAX and {ours['keras']} on TensorFlow with tfshard; {script.DEVICES} CPU devices")
    print(f"{'case':<48} {'first loss':>11} {'last loss':>11} {'largest difference':>19} {'sharded':>8}")
    is_same = True
    for name, theirs in jax["cases"].items():
        mine = ours["cases"][name]
        pairs = list(zip(mine["losses"], theirs["losses"], strict=True))
        difference = max(abs(a - b) / abs(b) for a, b in pairs)
        # JAX leaves out dims at the end that are not sharded.
        layouts = {
            path: axes + [None] * (len(mine["sharded"].get(path, axes)) - len(axes))
            for path, axes in theirs["sharded"].items()
        }
        same = mine["sharded"] == layouts
        is_same = is_same and same and difference <= _TOLERANCE.value
        count = f"{len(layouts)}" if same else f"{mine['sharded']} != {layouts}"
        print(f"{name:<48} {pairs[0][1]:11.7f} {pairs[-1][1]:11.7f} {difference:19.1e} {count:>8}")
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    app.run(main)
