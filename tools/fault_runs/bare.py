"""Let launchers and clients run without TensorFlow, which starts them in a fraction of a second. Import this first.

The launcher and its messages to clients do not need TensorFlow, but the `__init__` of three packages imports it. This
module replaces these three packages with empty packages in this process.
"""

import pathlib
import sys
import types

_PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "tfshard"


def _install() -> None:
    assert "tfshard" not in sys.modules
    for name in ("tfshard", "tfshard._private", "tfshard.devices"):
        package = types.ModuleType(name)
        package.__path__ = [str(_PACKAGE.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


_install()
