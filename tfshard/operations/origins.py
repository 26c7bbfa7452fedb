"""Find the layer, loss or metric that made an operation of a step, and the user's line, for errors about the operation.

DTensor's errors name only the line that started the step.
"""

import functools
import pathlib
import sys
import sysconfig
import threading
import types
from typing import Any

import keras
import tensorflow as tf

_MOST = 3  # The number of recorded operations of one type.
# The folder of tfshard.
PACKAGE = pathlib.Path(__file__).parents[1].as_posix()
# Packages without lines of the user. `optree` calls the functions of `keras.tree.map_structure`.
_PACKAGES = (PACKAGE, *(pathlib.Path(package.__file__).parent.as_posix() for package in (tf, keras)))
_NAMES = ("keras_hub", "optree", "wrapt")
_STANDARD_LIBRARY = pathlib.Path(sysconfig.get_path("stdlib")).as_posix()
# The file names of code that was typed into Python or a notebook.
_TYPED = ("<stdin>", "<ipython-input", "<python-input")
_METHODS = ("call", "__call__", "update_state", "result", "get_config", "compute_loss", "apply")


class _Origins(threading.local):
    def __init__(self) -> None:
        self.places: dict[str, dict[str, None]] = {}


_origins = _Origins()


def forget() -> None:
    """Forget the operations of the last step. The trace of a step calls this at its start."""
    _origins.places.clear()


def note(operation: tf.Operation) -> None:
    """Record the origin of an operation of the step that is being traced."""
    places = _origins.places.setdefault(operation.type, {})
    if len(places) < _MOST:
        places[_describe(operation)] = None


def find(operation_type: str) -> list[str]:
    """Return the origins of the first operations of a type in the last traced step."""
    return list(_origins.places.get(operation_type, {}))


def _describe(operation: tf.Operation) -> str:
    owner = _owner()
    kinds = {keras.metrics.Metric: "metric", keras.losses.Loss: "loss", keras.Layer: "layer"}
    kind = next((name for cls, name in kinds.items() if isinstance(owner, cls)), None)
    text = f"operation '{operation.name}'"
    if owner is not None and kind is not None:
        text = f"{kind} '{owner.name}' ({type(owner).__name__})"
    line = _line(operation)
    return text if line is None else f"{text}, {line}"


def _owner() -> keras.metrics.Metric | keras.losses.Loss | keras.Layer | None:
    """Return the innermost metric, loss or layer with a running method."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _METHODS:
            owner = frame.f_locals.get("self")
            # Users do not know Keras's containers of their losses and metrics.
            if isinstance(owner, (keras.metrics.Metric, keras.losses.Loss, keras.Layer)):
                return None if isinstance(owner, keras.Model) else owner
        frame = frame.f_back
    return None


def described(operation: tf.Operation) -> str:
    """Return the name and type of an operation in a trace of a block, and the line of the block that made it."""
    return f"operation '{operation.name}' ({operation.type}{block_line(operation)})"


def block_line(operation: tf.Operation) -> str:
    """Return the user's line in a block that made an operation, after a comma; an empty text if there is none."""
    for frame in reversed(list(operation.traceback)):
        if frame.filename == _TRACES:
            break
        if _is_users(frame.filename):
            return f", {_line_of(frame)}"
    return ""


# The file that calls blocks to trace them.
_TRACES = str(pathlib.Path(__file__).parent / "local_traces.py")


def _line(operation: tf.Operation) -> str | None:
    frame = user_frame(operation)
    return None if frame is None else _line_of(frame)


def _line_of(frame: Any) -> str:
    return f"{pathlib.Path(frame.filename).name}:{frame.lineno}, in {frame.name}"


def user_frame(operation: tf.Operation) -> Any:
    """Return the innermost frame of the user's code in which an operation was made, or None."""
    return next((frame for frame in reversed(list(operation.traceback)) if _is_users(frame.filename)), None)


@functools.cache
def _is_users(filename: str) -> bool:
    """Return whether a file is a user's: outside of Python's library and of the packages that call operations."""
    if filename.startswith("<"):
        return filename.startswith(_TYPED)
    path = pathlib.PurePath(filename).as_posix()
    _, _, installed = path.rpartition("-packages/")
    if installed and installed.partition("/")[0] in _NAMES:
        return False
    is_standard = not installed and path.startswith(f"{_STANDARD_LIBRARY}/")
    return not is_standard and not path.startswith(tuple(f"{package}/" for package in _PACKAGES))
