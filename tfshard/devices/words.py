"""Arrays as words of 32 or 64 bits, of which collectives take whatever the dtype was."""

import math
from typing import Any

import numpy as np


def to_words(value: np.ndarray, dtype: type[np.integer[Any]] = np.int32) -> np.ndarray:
    """The bytes of an array as integers, filled up with zeros."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return np.pad(data, (0, -data.size % np.dtype(dtype).itemsize)).view(dtype)


def from_words(words: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array that `to_words` took apart."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    value: np.ndarray = np.ascontiguousarray(words).view(np.uint8)[:size].view(dtype).reshape(shape)
    return value
