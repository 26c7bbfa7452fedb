"""Files of weights that the first client writes, while the others take part in reading the variables."""

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from tfshard.checkpoints import safetensors_files
from tfshard.devices import clients
from tfshard.errors import CheckpointError

GIB = 1 << 30

Put: TypeAlias = Callable[[str, np.ndarray], object]
"""Receives the name and the value of a tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """How a model is written to files.

    Attributes:
        result: The file that names all values, in its place.
        write: Writes the files to a directory and returns their paths.
        read: Reads the values in the same order, for clients that do not write.
        move: Moves the written files into place.
    """

    result: pathlib.Path
    write: Callable[[pathlib.Path], Sequence[pathlib.Path]]
    read: Callable[[], object]
    move: Callable[[Sequence[pathlib.Path]], object]


def check_shard_size(max_shard_size: object) -> None:
    """Raise `CheckpointError` unless `max_shard_size` is a positive number or None."""
    is_number = isinstance(max_shard_size, (int, float)) and not isinstance(max_shard_size, bool) and max_shard_size > 0
    if max_shard_size is not None and not is_number:
        raise CheckpointError(
            "max_shard_size must be a positive number, in units of 2**30 bytes, or None. Received: "
            f"max_shard_size={max_shard_size!r}"
        )


def tensor_files(
    specs: Iterable[safetensors_files.TensorSpec],
    put_all: Callable[[Put], object],
    path: pathlib.Path,
    max_shard_size: float | None,
) -> Files:
    """Return how to write tensors to a safetensors file, or to several files and their index.

    Args:
        specs: The tensors.
        put_all: Passes each tensor's value to its argument. All clients call the function.
        path: The path of the single file.
        max_shard_size: The maximum size of one of several files, in units of 2**30 bytes. None for a single file.
    """
    shards = safetensors_files.shards(specs, None if max_shard_size is None else max_shard_size * GIB)
    index = safetensors_files.index_of(path)

    def write(directory: pathlib.Path) -> list[pathlib.Path]:
        writer = safetensors_files.Writer(directory / path.name, shards)
        put_all(writer.put)
        return writer.close()

    return Files(
        result=path if len(shards) == 1 else index,
        write=write,
        read=lambda: put_all(lambda name, value: None),
        move=functools.partial(
            safetensors_files.move_into_place,
            index=index,
            single=path,
            shard_names=safetensors_files.shard_names(path),
        ),
    )


def write_together(planned: Files, parent: pathlib.Path) -> pathlib.Path:
    """Write files on the first client, while the other clients read the variables. Return the path of the result.

    Args:
        planned: The files.
        parent: An existing directory on the file system of the result.

    Raises:
        CheckpointError: The files cannot be written.
    """
    here = clients.here()
    try:
        if here.rank > 0:
            # All clients must take part in reading a variable.
            planned.read()
        else:
            with tempfile.TemporaryDirectory(dir=parent, prefix=f".{planned.result.name}.tmp-") as temporary:
                planned.move(planned.write(pathlib.Path(temporary)))
    except OSError as error:
        raise CheckpointError(f"The model could not be written: {error}. Received: path='{planned.result}'") from error
    here.barrier("an exported model")  # Afterwards the files exist for all clients.
    return planned.result
