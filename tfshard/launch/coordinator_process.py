"""The program of the coordinator's process. It takes options from stdin, and writes where it listens to stdout.

The process does not import TensorFlow, which would take seconds and hundreds of MB. The `__init__` of three packages
imports TensorFlow, so the process replaces these packages with empty ones.
"""

import json
import pathlib
import sys
import types

if __name__ == "__main__":
    _PACKAGE = pathlib.Path(__file__).resolve().parents[1]
    # Python has put the folder of this file first, whose modules are no top-level modules.
    sys.path.pop(0)
    for _name in ("tfshard", "tfshard._private", "tfshard.devices"):
        _empty = types.ModuleType(_name)
        _empty.__path__ = [str(_PACKAGE.joinpath(*_name.split(".")[1:]))]
        sys.modules[_name] = _empty

from tfshard.errors import ShardingError  # noqa: E402
from tfshard.launch import coordinator  # noqa: E402


def main() -> int:
    """Coordinate a run to its end. Returns the exit code."""

    def tell(address: str, secret: str) -> None:
        print(json.dumps({"address": address, "secret": secret}), flush=True)

    try:
        return coordinator.serve(json.load(sys.stdin), tell)
    except ShardingError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
