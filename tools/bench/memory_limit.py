"""Trains an MLP with Adam under a limit of memory, too little for MirroredStrategy and for gathering all at once.

    python tools/bench/memory_limit.py
    python tools/bench/memory_limit.py --limit_gb=3.5

Each way runs in a process of its own, on four logical CPU devices. The limit is of what a process may write to
(RLIMIT_DATA, as `ulimit -d`); Linux counts what is asked for, so a little more than is resident.
"""

import pathlib
import resource
import subprocess
import sys

from absl import app, flags

_LIMIT = flags.DEFINE_float("limit_gb", 2.9, "Of each process, 1e9 bytes.")
_LAYERS = flags.DEFINE_integer("layers", 16, "Dense layers of 2048 units.")

WAYS = ("sharded", "gathered once", "mirrored")


def main(argv):
    del argv
    memory = str(pathlib.Path(__file__).with_name("memory.py"))
    limit = int(_LIMIT.value * 1e9)
    for way in WAYS:
        run = subprocess.run(
            [sys.executable, memory, f"--way={way}", f"--layers={_LAYERS.value}"],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )
        lines = (run.stderr.strip() or "no message").splitlines()
        told = next((line for line in reversed(lines) if "OOM" in line or "memory" in line.lower()), lines[-1])
        outcome = "trains" if run.returncode == 0 else f"exit code {run.returncode}: {told.strip()[:120]}"
        print(f"{way:>14}, {_LIMIT.value:.1f} GB: {outcome}", flush=True)


if __name__ == "__main__":
    app.run(main)
