"""Clear the GPU code of other architectures in a shared library, which then compresses to a fraction of its size.

A fatbin is a header and a list of entries. An entry is a cubin (machine code of one architecture) or PTX (text that
the driver compiles). CUDA documents neither structure; both are the same since CUDA 9:

    header: magic (4 bytes), version (2), size of the header (2), size of the entries (8)
    entry:  kind (2), version (2), size of the entry's header (4), size of the code (8), ..., architecture (4, at 28)

Clearing keeps all headers and offsets. The driver chooses an entry by its header and does not read the others.
"""

import dataclasses
import mmap
import pathlib
import struct
from collections.abc import Iterator, Sequence

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
# ".nv_fatbin" holds linked code, "__nv_relfatbin" code that nvcc links with other device code.
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
HEADER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
ARCHITECTURE, ARCHITECTURE_OFFSET = struct.Struct("<I"), 28
# Fatbins are aligned in their section.
_ALIGNMENT = 8
# A 64-bit ELF header up to the index of the section names, and a section header.
_ELF, _SECTION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")


class FatbinError(ValueError):
    """A library's fatbin section has a structure that this module does not know."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The code of one architecture, at its place in the file."""

    kind: int
    architecture: int
    offset: int
    size: int


def sections(data: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield the offset and the size of each fatbin section of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise FatbinError(f"A 64-bit little-endian ELF file is needed. Received: a file that begins with {data[:6]!r}")
    header = _ELF.unpack_from(data)
    first, size, count, names_index = header[6], header[11], header[12], header[13]
    headers = [_SECTION.unpack_from(data, first + index * size) for index in range(count)]
    if not headers:
        return
    names = headers[names_index][4]
    for name, _, _, _, offset, length, *_ in headers:
        start = names + name
        if data[start : data.find(b"\0", start)] in SECTIONS:
            yield offset, length


def fatbins(data: bytes | mmap.mmap, offset: int, length: int) -> Iterator[list[Entry]]:
    """Yield the entries of each fatbin of a section."""
    position, end = offset, offset + length
    while position + HEADER.size <= end:
        magic, _, header_size, size = HEADER.unpack_from(data, position)
        if magic == 0:
            position += _ALIGNMENT
            continue
        if magic != MAGIC or header_size < HEADER.size or position + header_size + size > end:
            raise FatbinError(f"No fatbin at byte {position}. Received: {data[position : position + HEADER.size]!r}")
        start = position + header_size
        yield list(_entries(data, start, start + size))
        position = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT


def _entries(data: bytes | mmap.mmap, position: int, end: int) -> Iterator[Entry]:
    while position < end:
        if end - position < ARCHITECTURE_OFFSET + ARCHITECTURE.size:
            raise FatbinError(f"A fatbin ends inside the header of an entry. Received: an entry at byte {position}")
        kind, _, header_size, size = ENTRY.unpack_from(data, position)
        (architecture,) = ARCHITECTURE.unpack_from(data, position + ARCHITECTURE_OFFSET)
        if header_size < ARCHITECTURE_OFFSET + ARCHITECTURE.size or position + header_size + size > end:
            raise FatbinError(f"An entry is larger than its fatbin. Received: an entry at byte {position}")
        yield Entry(kind, architecture, position + header_size, size)
        position += header_size + size


def needed(entries: Sequence[Entry], architecture: int) -> list[Entry]:
    """Return the entries that a GPU of an architecture may load.

    These are its cubins, or, if the fatbin has none, the newest PTX that the driver can compile for the GPU. An entry
    that is neither a cubin nor PTX is kept.
    """
    cubins = [each for each in entries if each.kind == CUBIN and each.architecture == architecture]
    texts = [each for each in entries if each.kind == PTX and each.architecture <= architecture]
    newest = max((each.architecture for each in texts), default=None)
    others = [each for each in entries if each.kind not in (PTX, CUBIN)]
    return others + (cubins or [each for each in texts if each.architecture == newest])


def clear(path: pathlib.Path, architecture: int) -> tuple[int, int]:
    """Clear the code that a GPU of an architecture (90 for sm_90) does not load. Returns the bytes kept and cleared."""
    kept = cleared = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for section in list(sections(data)):
            for entries in fatbins(data, *section):
                keep = needed(entries, architecture)
                kept += sum(each.size for each in keep)
                for each in entries:
                    if each not in keep:
                        data[each.offset : each.offset + each.size] = bytes(each.size)
                        cleared += each.size
    return kept, cleared
