"""Import this first, and launchers and clients run without TensorFlow: they start in a fraction of a second.

What a launcher does, and what a client tells it, is the package's own code; only the `__init__` of three packages
imports TensorFlow on the way to it. Empty packages take their place in this process.
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
