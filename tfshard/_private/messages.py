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
    """Make TensorFlow find the tags in an error message in linear time (`error_interpolation.parse_message`).

    TensorFlow's regular expression starts over at each character after the last tag. It takes minutes for a step's
    program, which DTensor's compiler puts into its messages.
    """
    before = _error_interpolation.parse_message
    _error_interpolation.parse_message = _parse
    try:
        yield
    finally:
        _error_interpolation.parse_message = before


def _parse(message: str) -> tuple[str, list[Any], list[Any]]:
    """Return the message without function tags, the function tags, and the node tags."""
    functions, nodes = [], []

    def take(match: re.Match[str]) -> str:
        tag = _error_interpolation._ParseTag(match["type"], match["name"])
        if tag.type != "function_node":
            nodes.append(tag)
            return match[0]
        functions.append(tag)
        return ""

    return _TAG.sub(take, message), functions, nodes
