"""Checks for GPUs that need no GPU.

python -m tools.gpu lower                      # compile all configurations for GPUs and print a table: minutes
python -m tools.gpu lower --only=compressed    # those with this text in their names, with their copies
python -m tools.gpu lower --write              # write benchmarks/gpu_lowering.md
"""

import sys

from absl import app, flags

_ONLY = flags.DEFINE_multi_string("only", [], "Compile the configurations with this text in their names. May repeat.")
_WRITE = flags.DEFINE_bool("write", False, "Write benchmarks/gpu_lowering.md.")


def main(argv: list[str]) -> None:
    if argv[1:] != ["lower"]:
        sys.exit(__doc__)
    from tools.gpu import lower  # Starts TensorFlow.

    sys.exit(lower.main(_ONLY.value, write=_WRITE.value))


if __name__ == "__main__":
    app.run(main)
