"""CRC-32 checksums to compare values between clients, and between a checkpoint and the values read from it."""

import zlib

import numpy as np


def of_array(array: np.ndarray) -> int:
    """Return the checksum of an array's bytes in row-major order, or of its elements' text if they are Python objects.

    >>> of_array(np.array([1, 2], np.int32)) == of_array(np.array([[1], [2]], np.int32))
    True
    """
    if array.dtype.hasobject:  # Strings.
        return of_text(repr(array.tolist()))
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def of_text(text: str) -> int:
    """Return the checksum of a text in UTF-8."""
    return zlib.crc32(text.encode())
