"""The messages of TensorFlow's errors."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from tensorflow.python.framework import error_interpolation as _error_interpolation

_NAME = r"[A-Za-z0-9_.][A-Za-z0-9_.\-/]*"
_TAG = re.compile(rf"\{{\{{(?P<type>{_NAME}) (?P<name>{_NAME})\}}\}}")


@contextlib.contextmanager
def quickly_parsed() -> Iterator[None]:
    """A context in which TensorFlow finds the tags in an error's message in linear time
    (`error_interpolation.parse_message`).

    Its own regular expression begins anew at each character behind the last tag: minutes for the program of a step,
    which DTensor's compiler has in its messages.
    """
    before = _error_interpolation.parse_message
    _error_interpolation.parse_message = _parse
    try:
        yield
    finally:
        _error_interpolation.parse_message = before


def _parse(message: str) -> tuple[str, list[Any], list[Any]]:
    """The message without tags of functions; the tags of functions, and of nodes."""
    functions, nodes = [], []

    def take(match: re.Match[str]) -> str:
        tag = _error_interpolation._ParseTag(match["type"], match["name"])
        if tag.type != "function_node":
            nodes.append(tag)
            return match[0]
        functions.append(tag)
        return ""

    return _TAG.sub(take, message), functions, nodes
