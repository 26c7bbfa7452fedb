"""The files of a checkpoint: their names, and the few file operations that must be right.

All changes of the disk, here and in `writer`, call functions of `os` by their names, or one of the two operations with
which TensorFlow writes tensors. A test can therefore intercept each change, and kill the process there.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from typing import IO

from tfshard.layouts.boxes import Box

MANIFEST = "manifest.json"
DATA = "data"
LOCK = ".lock"
_ITERATOR = "iterator"
_PART = "part"
_TEMPORARY = ".tmp-"
# The files that a manifest may name: the data of variables, and other files.
DATA_FILE = re.compile(rf"{DATA}\.data-\d{{5}}-of-\d{{5}}")
OTHER_FILE = re.compile(rf"{DATA}\.index|{_ITERATOR}-\d{{5}}\.(index|data-00000-of-00001)")
_BLOCK_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def name_of(step: int, generation: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"step-{step:08d}" + (f".{generation}" if generation else "")


def parse(name: str) -> tuple[int, int] | None:
    """Return step and generation of a checkpoint from the name of its directory; None for other names.

    >>> parse("step-00000012.1"), parse("step-12")
    ((12, 1), None)
    """
    match = _NAME.fullmatch(name)
    if match is None or name_of(int(match[1]), int(match[2] or 0)) != name:
        return None
    return int(match[1]), int(match[2] or 0)


def temporary_name(step: int) -> str:
    """Return the name of a checkpoint's directory until the checkpoint is committed."""
    return f"{_TEMPORARY}{name_of(step, 0)}"


def is_temporary(name: str) -> bool:
    """Return True for a directory of a checkpoint that is being written or deleted, or was until a kill."""
    return name.startswith(_TEMPORARY)


def checkpoints(root: pathlib.Path) -> list[tuple[int, int]]:
    """Return step and generation of each checkpoint in a directory, in order."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(FileNotFoundError):
        found = [parsed for name in os.listdir(root) if (parsed := parse(name)) is not None]
    return sorted(found)


def committed(root: pathlib.Path) -> dict[int, int]:
    """Return the committed steps, with the highest generation of each."""
    return dict(checkpoints(root))


def sync(path: pathlib.Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make(path: pathlib.Path) -> None:
    """Make a directory with its missing parents, and wait until their names are on the disk."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # Another process may make the directory, too.
            os.mkdir(directory)
        sync(directory.parent)


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(path: pathlib.Path, content: bytes) -> None:
    """Write a new file that other processes wait for. They see only the finished file."""
    unfinished = path.with_suffix(".tmp")
    write(unfinished, content)
    os.rename(unfinished, path)


@contextlib.contextmanager
def open_regular(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Open a regular file of a checkpoint, without following a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"not a regular file: {path.name}")
        yield file


def sha256(file: IO[bytes]) -> str:
    """Return the SHA-256 of an open file, in hexadecimal. (Python 3.10 does not have `hashlib.file_digest`.)"""
    digest = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def remove(path: pathlib.Path) -> None:
    """Delete a checkpoint; while it is deleted, it has a temporary name."""
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def spec(shape: Sequence[int], box: Box) -> str:
    """Return a box in the syntax of TensorFlow's `shape_and_slices`."""
    if not shape:
        return ""
    ranges = ":".join(f"{begin},{size}" for begin, size in zip(box.offset, box.shape, strict=True))
    return " ".join(map(str, shape)) + " " + ranges


def part_prefix(client: int) -> str:
    """Return the name of the files with the shards that a client wrote, without a suffix. They are merged."""
    return f"{_PART}-{client:05d}"


def part_list(client: int) -> str:
    """Return the name of the file that lists the shards that a client wrote."""
    return f"{part_prefix(client)}.json"


def with_prefix(directory: pathlib.Path, prefix: str) -> list[pathlib.Path]:
    """Return the files in a directory that have a prefix and any suffix."""
    return list(directory.glob(f"{prefix}.*"))


def holds_tensors(prefix: pathlib.Path) -> bool:
    """Return True if TensorFlow has written tensors to the files with a prefix."""
    return prefix.with_name(f"{prefix.name}.index").exists()


def iterator_prefix(client: int) -> str:
    """Return the name of the files with the state of a client's iterators, without TensorFlow's suffix."""
    return f"{_ITERATOR}-{client:05d}"


def state_name(number: int) -> str:
    """Return the name of the state of one of a client's iterators, inside their file."""
    return f"state_{number}"
