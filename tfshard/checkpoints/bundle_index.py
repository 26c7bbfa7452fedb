"""The index of a tensor bundle: where each stored box lies in the data files.

TensorFlow's own reader opens local files only. With the index, a remote checkpoint is read by ranges of bytes. The
index is a table of LevelDB's format without compression, whose values are protocol buffers of TensorFlow. Its checksum
is in the manifest.
"""

import dataclasses
import struct
from collections.abc import Iterator, Mapping, Sequence

from tfshard import _private
from tfshard.layouts.boxes import Box

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5


class BadIndexError(Exception):
    """An index cannot be decoded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredPlace:
    """The place of a box of a variable: a run of bytes in a data file, in row-major order.

    Attributes:
        box: The box in the variable's shape.
        file: The number of the data file.
        begin: The first byte.
        bytes: The number of bytes.
    """

    box: Box
    file: int
    begin: int
    bytes: int


def places(content: bytes) -> dict[str, list[StoredPlace]]:
    """Return the places of the boxes of each tensor.

    Args:
        content: The bytes of an index file.

    Raises:
        BadIndexError: The index is damaged.
    """
    try:
        entries = dict(_entries(content))
        found: dict[str, list[StoredPlace]] = {}
        for key, value in entries.items():
            if key and not key.startswith(b"\0"):
                found[key.decode()] = list(_places(key.decode(), value, entries))
        return found
    except (ValueError, IndexError, KeyError, struct.error, _private.DecodeError) as error:
        raise BadIndexError(f"{type(error).__name__}: {error}") from error


def _places(name: str, value: bytes, entries: Mapping[bytes, bytes]) -> Iterator[StoredPlace]:
    entry = _private.bundle_entry(value)
    shape = tuple(dim.size for dim in entry.shape.dim)
    if not entry.slices:
        yield StoredPlace(box=Box(offset=(0,) * len(shape), shape=shape), file=entry.shard_id, begin=entry.offset,
                    bytes=entry.size)  # fmt: skip
    for stored in entry.slices:
        extents = [(extent.start, extent.length if extent.HasField("length") else -1) for extent in stored.extent]
        part = _private.bundle_entry(entries[_slice_key(name, extents)])
        box = Box(
            offset=tuple(start for start, _ in extents),
            shape=tuple(size if size >= 0 else dim for (_, size), dim in zip(extents, shape, strict=True)),
        )
        yield StoredPlace(box=box, file=part.shard_id, begin=part.offset, bytes=part.size)


# --- the table


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    found = shift = 0
    while True:
        byte = content[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return found, at
        if shift > 63:
            raise ValueError("a number is too long")


def _entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    footer = content[-_FOOTER_BYTES:]
    if len(footer) != _FOOTER_BYTES or struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("it does not end as a table does")
    _, at = _varint(footer, 0)
    _, at = _varint(footer, at)
    for _, handle in _pairs(content, *_handle(footer, at)):
        yield from _pairs(content, *_handle(handle, 0))


def _handle(content: bytes, at: int) -> tuple[int, int]:
    begin, at = _varint(content, at)
    size, at = _varint(content, at)
    return begin, size


def _pairs(content: bytes, begin: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block. A key shares a prefix with the key before it."""
    block = content[begin : begin + size]
    trailer = content[begin + size : begin + size + _TRAILER_BYTES]
    if len(block) != size or len(trailer) != _TRAILER_BYTES or trailer[0] != 0:
        raise ValueError("a block is cut off or compressed")
    (restarts,) = struct.unpack("<I", block[-4:])
    end = size - 4 - 4 * restarts
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        length, at = _varint(block, at)
        if shared > len(key) or at + own + length > end:
            raise ValueError("an entry is cut off")
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + length]
        at += own + length


# --- the keys of slices (TensorFlow's OrderedCode)


def _slice_key(name: str, extents: Sequence[tuple[int, int]]) -> bytes:
    # OrderedCode also escapes the byte 0xff, which UTF-8 does not have.
    escaped = name.encode().replace(b"\x00", b"\x00\xff")
    key = _unsigned(0) + escaped + b"\x00\x01" + _unsigned(len(extents))
    return key + b"".join(_signed(number) for extent in extents for number in extent)


def _unsigned(number: int) -> bytes:
    size = (number.bit_length() + 7) // 8
    return bytes([size]) + number.to_bytes(size, "big")


def _signed(number: int) -> bytes:
    """Return the code of a number: the count of its bytes in the leading bits, then the number."""
    magnitude = ~number if number < 0 else number
    if magnitude < 64:
        return bytes([0x80 ^ (number & 0xFF)])
    size = magnitude.bit_length() // 7 + 1
    code = bytearray(number.to_bytes(10, "big", signed=True)[-size:])
    header = ((1 << size) - 1) << (16 - size)
    code[0] ^= header >> 8
    code[1] ^= header & 0xFF
    return bytes(code)
