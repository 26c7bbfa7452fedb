"""Split an archive into pieces that fit a transfer, and join the pieces on the other machine.

An archive is compressed in blocks, each a complete xz stream, so that all cores compress and decompress. A piece holds
whole blocks. Both directions need only Python's standard library.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import lzma
import os
import pathlib
import tarfile
from collections.abc import Iterator

BLOCK_BYTES = 16 << 20
_PRESET = 6


class PieceError(RuntimeError):
    """A piece differs from its manifest."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A file of compressed blocks: its name, its checksum, and the compressed size of each block."""

    file: str
    sha256: str
    blocks: list[int]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The pieces of an archive in order, and the checksum of the uncompressed archive."""

    name: str
    sha256: str
    pieces: list[Piece]

    def write(self, path: pathlib.Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: pathlib.Path) -> "Manifest":
        read = json.loads(path.read_text())
        return cls(read["name"], read["sha256"], [Piece(**each) for each in read["pieces"]])


def split(archive: pathlib.Path, folder: pathlib.Path, limit: int, *, block_bytes: int = BLOCK_BYTES) -> Manifest:
    """Compress an archive and write its pieces of at most `limit` bytes. Returns the manifest.

    The folder of piece 1 is `folder/<name>.1`, and so on. Each folder has a copy of the manifest.
    """
    name = archive.stem
    pieces: list[Piece] = []
    blocks: list[bytes] = []
    whole = hashlib.sha256()

    def end_piece() -> None:
        file = f"{name}.{len(pieces) + 1}"
        (folder / file).mkdir(parents=True, exist_ok=True)
        content = b"".join(blocks)
        (folder / file / "piece.xz").write_bytes(content)
        pieces.append(Piece(file, hashlib.sha256(content).hexdigest(), [len(block) for block in blocks]))
        blocks.clear()

    for content, block in _compressed(archive, block_bytes):
        whole.update(content)
        if len(block) > limit:
            raise PieceError(f"A block is larger than a piece. Received: a block of {len(block)} bytes, limit={limit}")
        if sum(map(len, blocks)) + len(block) > limit:
            end_piece()
        blocks.append(block)
    end_piece()
    manifest = Manifest(name, whole.hexdigest(), pieces)
    for each in pieces:
        manifest.write(folder / each.file / "manifest.json")
    return manifest


def _compressed(archive: pathlib.Path, block_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield each block of a file, and the block compressed. lzma compresses in threads."""
    workers = os.cpu_count() or 1
    with archive.open("rb") as file, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        while contents := [block for _ in range(workers) if (block := file.read(block_bytes))]:
            yield from zip(contents, pool.map(lambda each: lzma.compress(each, preset=_PRESET), contents), strict=True)


def receive(piece: pathlib.Path, target: pathlib.Path) -> str:
    """Decompress the piece of a folder. When all pieces of the archive have come, extract the archive into `target`.

    Receiving a piece again changes nothing. Returns a line that says what is still missing.
    """
    manifest = Manifest.read(piece / "manifest.json")
    arrived = target / ".pieces"
    arrived.mkdir(parents=True, exist_ok=True)
    extracted = arrived / f"{manifest.name}.{manifest.sha256}"
    if extracted.exists():
        return f"{manifest.name}: already extracted"
    (described,) = [each for each in manifest.pieces if each.file == piece.name]
    _decompress(piece / "piece.xz", described, arrived / _part(described))
    missing = [each.file for each in manifest.pieces if not (arrived / _part(each)).exists()]
    if missing:
        return f"{described.file}: received. Missing: {', '.join(missing)}"
    _extract([arrived / _part(each) for each in manifest.pieces], manifest, target)
    extracted.touch()
    return f"{manifest.name}: all {len(manifest.pieces)} pieces received and extracted"


def _part(piece: Piece) -> str:
    return f"{piece.file}.{piece.sha256[:16]}"


def _decompress(path: pathlib.Path, piece: Piece, part: pathlib.Path) -> None:
    if part.exists():
        return
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != piece.sha256:
        raise PieceError(f"Piece '{piece.file}' is damaged: send the piece again. Received: sha256 {found}")
    starts = [sum(piece.blocks[:index]) for index in range(len(piece.blocks))]
    blocks = [content[start : start + size] for start, size in zip(starts, piece.blocks, strict=True)]
    unfinished = part.with_suffix(".unfinished")
    with unfinished.open("wb") as file, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for block in pool.map(lzma.decompress, blocks):
            file.write(block)
    unfinished.replace(part)


def _extract(parts: list[pathlib.Path], manifest: Manifest, target: pathlib.Path) -> None:
    """Join the parts into a tar file, check and extract the tar file, and remove both."""
    joined, whole = target / ".pieces" / f"{manifest.name}.tar", hashlib.sha256()
    with joined.open("wb") as file:
        for part in parts:
            content = part.read_bytes()
            whole.update(content)
            file.write(content)
    if whole.hexdigest() != manifest.sha256:
        raise PieceError(f"Archive '{manifest.name}' is damaged. Received: sha256 {whole.hexdigest()}")
    with tarfile.open(joined) as archive:
        archive.extractall(target, filter="data")
    for path in (*parts, joined):
        path.unlink()
