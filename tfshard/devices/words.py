"""Convert arrays of any dtype to 32-bit or 64-bit words, which all collectives support."""

import math
from typing import Any

import numpy as np


def to_words(value: np.ndarray, dtype: type[np.integer[Any]] = np.int32) -> np.ndarray:
    """Return the bytes of an array as integers, padded with zeros."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return np.pad(data, (0, -data.size % np.dtype(dtype).itemsize)).view(dtype)


def from_words(words: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Restore the array that `to_words` converted."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    value: np.ndarray = np.ascontiguousarray(words).view(np.uint8)[:size].view(dtype).reshape(shape)
    return value
