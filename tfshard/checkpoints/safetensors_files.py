"""Safetensors files: written one tensor at a time, and read through a memory map.

The library writes a file from tensors that are all in memory, so tfshard writes the format itself: the length of the
header in 8 bytes, the header as JSON, and the data. The library reads and checks the headers of files.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfshard.checkpoints import files
from tfshard.errors import CheckpointCorruptError, CheckpointError

ENDING, INDEX_ENDING = ".safetensors", ".safetensors.index.json"
# Keras's name of a dtype, and the format's.
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# Below this size, a copy of the array costs less than a memory map that stays open.
_MAPPED_BYTES = 1 << 20
# The files of an index are read at most up to this size.
_MAX_INDEX_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor of a file.

    Attributes:
        name: The name in the file.
        shape: The shape.
        dtype: Keras's name of the dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype:
        """The NumPy dtype."""
        dtype: np.dtype = np.dtype(tf.as_dtype(self.dtype).as_numpy_dtype)
        return dtype

    @property
    def bytes(self) -> int:
        """The size of the value."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file that exists.

    Attributes:
        spec: The name, shape and dtype in the file.
        path: The file.
        offset: The position of the value in the file.
    """

    spec: TensorSpec
    path: pathlib.Path
    offset: int

    def read(self) -> np.ndarray:
        """Return the value. A large value is a memory map, which reads only the parts that are used."""
        shape, dtype = self.spec.shape, self.spec.numpy_dtype
        if 0 in shape:
            return np.zeros(shape, dtype)
        # "c": a write to the array would stay in memory.
        found = np.memmap(self.path, dtype, "c", self.offset, shape or (1,)).reshape(shape)
        return found if found.nbytes >= _MAPPED_BYTES else np.array(found)


Shard: TypeAlias = tuple[TensorSpec, ...]


def shards(specs: Iterable[TensorSpec], max_bytes: float | None) -> list[Shard]:
    """Distribute tensors over files, in order, and sort the tensors of each file as the library does.

    Args:
        specs: The tensors.
        max_bytes: The maximum bytes of tensors in a file. A larger tensor has a file of its own. None for one file.

    Raises:
        CheckpointError: The format has no name for a dtype.
    """
    found: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if spec.dtype not in _NAMES:
            raise CheckpointError(
                f"A safetensors file cannot hold '{spec.name}': the format has no dtype {spec.dtype}. Export to "
                f"'.weights.h5' instead. Dtypes of the format: {sorted(_NAMES)}. Received: dtype='{spec.dtype}'"
            )
        if max_bytes is not None and found[-1] and size + spec.bytes > max_bytes:
            found.append([])
            size = 0
        found[-1].append(spec)
        size += spec.bytes
    # Large dtypes first, so that each tensor is aligned.
    return [tuple(sorted(each, key=lambda spec: (-spec.numpy_dtype.itemsize, spec.name))) for each in found]


class Writer:
    """Writes tensors to one file, or to several files and their index. Takes the values in any order.

    Args:
        path: The path of a single file, `NAME.safetensors`. Several files are `NAME-00001-of-00003.safetensors` and so
            on, with the index `NAME.safetensors.index.json`, as transformers names them.
        found: The tensors of each file.
    """

    def __init__(self, path: pathlib.Path, found: Sequence[Shard]):
        self._index = index_of(path)
        stem = path.name.removesuffix(ENDING)
        names = [f"{stem}-{number + 1:05}-of-{len(found):05}{ENDING}" for number in range(len(found))]
        paths = [path] if len(found) == 1 else [path.with_name(name) for name in names]
        self._shards = dict(zip(paths, found, strict=True))
        self._places: dict[str, tuple[TensorSpec, pathlib.Path, int]] = {}
        for each, shard in self._shards.items():
            self._write_header(each, shard)

    def _write_header(self, path: pathlib.Path, shard: Shard) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it.
        end = 0
        for spec in shard:
            begin, end = end, end + spec.bytes
            header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
            self._places[spec.name] = spec, path, begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        for spec in shard:
            _, _, begin = self._places[spec.name]
            self._places[spec.name] = spec, path, 8 + len(text) + begin

    def put(self, name: str, value: np.ndarray) -> None:
        """Write the value of a tensor, once."""
        spec, path, offset = self._places.pop(name)
        assert value.shape == spec.shape and value.dtype == spec.numpy_dtype, (spec, value.shape, value.dtype)
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)

    def close(self) -> list[pathlib.Path]:
        """Write the index, wait until all is on the disk, and return the paths. The last one names all values."""
        assert not self._places, f"These tensors have no values: {sorted(self._places)}"
        paths = list(self._shards)
        if len(paths) > 1:
            index = {
                "metadata": {"total_size": sum(spec.bytes for shard in self._shards.values() for spec in shard)},
                "weight_map": {spec.name: path.name for path, shard in self._shards.items() for spec in shard},
            }
            self._index.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            paths.append(self._index)
        for path in paths:
            files.sync(path)
        return paths


def index_of(path: pathlib.Path) -> pathlib.Path:
    """Return the path of the index that stands for a single file."""
    return path.with_name(path.name.removesuffix(ENDING) + INDEX_ENDING)


def shard_names(path: pathlib.Path) -> re.Pattern[str]:
    """Return a pattern for the names of the files that stand for a single file."""
    return re.compile(re.escape(path.name.removesuffix(ENDING)) + r"-\d{5}-of-\d{5}" + re.escape(ENDING))


def move_into_place(
    written: Sequence[pathlib.Path],
    *,
    index: pathlib.Path,
    single: pathlib.Path | None,
    shard_names: re.Pattern[str],
) -> pathlib.Path:
    """Move files that were written to another directory to where they belong, and delete the files that they replace.

    A kill leaves the files that were there before, or the new files, or several files without an index.

    Args:
        written: The files. The last one is the single file or the index.
        index: The path of an index.
        single: The path of a single file that stands for the same weights. None if the format always has an index.
        shard_names: A pattern for the names of the files of an index.

    Returns:
        The path of the single file or of the index.
    """
    directory = index.parent
    last = directory / written[-1].name
    before = [each for each in directory.iterdir() if shard_names.fullmatch(each.name)]
    if last == index and index.exists():
        index.unlink()  # The old index must not name new files.
        files.sync(directory)
    for each in written[:-1]:
        os.replace(each, directory / each.name)
    files.sync(directory)
    os.replace(written[-1], last)
    files.sync(directory)
    # Some readers look for an index first, others for a single file, so only one of them may stay.
    if single is not None:
        (single if last == index else index).unlink(missing_ok=True)
    names = {each.name for each in written}
    for each in before:
        if each.name not in names:
            each.unlink()
    files.sync(directory)
    return last


def corrupt(path: pathlib.Path, fault: str) -> CheckpointCorruptError:
    """Return the error for a file that cannot be used."""
    error: CheckpointCorruptError = CheckpointCorruptError(
        f"The file cannot be used: {fault}. Nothing was changed. Received: path='{path}'"
    )
    return error


def open_all(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, or of the files of an index, by name. Reads no values.

    Args:
        path: A `.safetensors` file, or a `.safetensors.index.json`.

    Raises:
        CheckpointError: The package safetensors is not installed.
        CheckpointCorruptError: The file is damaged or malicious.
        FileNotFoundError: The file does not exist.
    """
    if not path.name.endswith(INDEX_ENDING):
        return {tensor.spec.name: tensor for tensor in _open(path)}
    found: dict[str, StoredTensor] = {}
    weight_map = _weight_map(path)
    for each in index_files(path):
        try:
            tensors = _open(each)
        except FileNotFoundError:
            raise corrupt(path, f"it names a file that does not exist, '{each.name}'") from None
        for tensor in tensors:
            name = tensor.spec.name
            if weight_map.get(name) != each.name:
                raise corrupt(path, f"it does not say that '{name[:200]}' is in '{each.name}'")
            found[name] = tensor
    absent = sorted(weight_map.keys() - found.keys())
    if absent:
        raise corrupt(path, f"'{absent[0][:200]}' is not in '{weight_map[absent[0]]}'")
    return found


def index_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of an index, of transformers or of Keras."""
    names: set[str] = set()
    for each in _weight_map(path).values():
        names.update(each if isinstance(each, list) else [each])
    return [path.with_name(name) for name in sorted(names)]


def _weight_map(path: pathlib.Path) -> dict[str, str | list[str]]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_INDEX_BYTES:
            raise corrupt(path, f"an index of more than {_MAX_INDEX_BYTES} bytes is not read")
        content = file.read(size)
    try:
        found = json.loads(content)["weight_map"]
        items = list(found.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt(path, f"it is not an index of weights ({error!s:.100})") from error
    for _, names in items:
        for name in names if isinstance(names, list) else [names]:
            if not isinstance(name, str) or name != pathlib.PurePosixPath(name).name or "\\" in name or ":" in name:
                raise corrupt(path, f"it names a file outside of its directory, {str(name)[:100]!r}")
            if path.with_name(name).is_symlink():
                raise corrupt(path, f"it names a link, '{name}'")
    weight_map: dict[str, str | list[str]] = found
    return weight_map


def _open(path: pathlib.Path) -> list[StoredTensor]:
    try:
        import safetensors
    except ImportError:
        raise CheckpointError(
            "Reading a safetensors file needs the package safetensors, which is not installed. Install it with: "
            f"pip install 'tfshard[safetensors]'. Received: path='{path}'"
        ) from None
    with open(path, "rb") as file:  # Raises for a file that does not exist, as for other formats.
        start = file.read(8)
    try:
        with safetensors.safe_open(path, framework="np") as opened:
            # The library has checked that the data begins after the header and has no gaps.
            offset = 8 + int(struct.unpack("<Q", start)[0])
            found = []
            for name in opened.offset_keys():
                piece = opened.get_slice(name)
                if piece.get_dtype() not in _DTYPES:
                    raise corrupt(path, f"'{name[:200]}' has the dtype {piece.get_dtype()}, which Keras does not have")
                spec = TensorSpec(name=name, shape=tuple(piece.get_shape()), dtype=_DTYPES[piece.get_dtype()])
                found.append(StoredTensor(spec=spec, path=path, offset=offset))
                offset += spec.bytes
            return found
    except safetensors.SafetensorError as error:
        raise corrupt(path, f"it is not a safetensors file ({error!s:.100})") from error
