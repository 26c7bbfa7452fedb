"""export and import_weights: a sharded model to Keras's file formats and safetensors, and back, a variable at a time.

Nothing in a file is executed or trusted: no model is made from a file, and all sizes in a file must match the model.
"""

import contextlib
import functools
import math
import os
import pathlib
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from tfshard import _private
from tfshard.checkpoints import files, remote_files, safetensors_files, training_state, weight_names
from tfshard.checkpoints.written_files import GIB, Files, Put, check_shard_size, tensor_files, write_together
from tfshard.devices import clients, process_lock
from tfshard.errors import CheckpointError, CheckpointMismatchError

# The bytes that a file may hold in addition to the variables: names, and the HDF5 tree.
_EXTRA_BYTES = 1 << 26
# A file may also hold optimizer slots, which are ignored. No optimizer of Keras has more slots for each parameter.
_COPIES = 16
# The ending of Keras's index of several weight files.
_SHARDED = ".weights.json"
_WRITTEN = (".keras", ".weights.h5", _SHARDED, safetensors_files.ENDING)
_READ = (*_WRITTEN, safetensors_files.INDEX_ENDING)

Expected: TypeAlias = Mapping[str, _private.WeightSpec]
"""The weights that Keras saves for a model, by their places in its file."""


def export(model: keras.Model, path: str | os.PathLike[str], max_shard_size: float | None = None) -> pathlib.Path:
    """Write a model as a file, or as several files, that plain Keras or the safetensors library load without tfshard.

    The function gathers one variable at a time on the host, and writes it to disk before the next: you can export a
    model that fits on no device. With several clients, each client calls the function, and the first client writes.

    Args:
        model: A built model, under a `ShardedStrategy` or not.
        path: Chooses the format by its ending:
            `".keras"`: the model with its optimizer, for `keras.models.load_model`;
            `".weights.h5"`: the variables, for `model.load_weights`;
            `".weights.json"`: the variables in several HDF5 files and their index, for `model.load_weights`;
            `".safetensors"`: the weights under their Keras paths, in one file or in several files and their index.
        max_shard_size: The maximum size of one of several files, in GiB, as in Keras's `save_weights`.
            Required for `".weights.json"`, optional for `".safetensors"`, where a larger tensor has a file of its own.

    Returns:
        The path. With several safetensors files, the path of their index, `NAME.safetensors.index.json`. Existing
        files are replaced when the new files are complete: a single file atomically. If the process is killed while it
        replaces several files, they may have no index.

    Raises:
        CheckpointError: Another ending, a model that is not built, a variable that the format cannot hold, or a file
            that cannot be written.

    Example:

    >>> import keras, numpy as np, os, tempfile, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    >>> path = tfshard.export(model, os.path.join(tempfile.mkdtemp(), "model.keras"))
    >>> plain = keras.models.load_model(path)
    >>> bool((plain.layers[0].kernel.numpy() == model.layers[0].kernel.numpy()).all())
    True
    """
    path = _checked_path(path, _WRITTEN)
    _check_shard_size(path, max_shard_size)
    _check_built(model)
    if path.suffix == ".keras":
        # Keras builds the optimizer when it loads the model, and then needs its state.
        training_state.build_optimizer(model)
    with process_lock.held(), clients.here().purpose(f"tfshard.export of model '{model.name}'"):
        if path.name.endswith(safetensors_files.ENDING):
            planned = _safetensors_of(model, path, max_shard_size)
        elif max_shard_size is not None:
            planned = _sharded_h5_of(model, path, max_shard_size)
        else:
            planned = _single_file_of(model, path)
        return write_together(planned, path.parent)


def _check_shard_size(path: pathlib.Path, max_shard_size: float | None) -> None:
    check_shard_size(max_shard_size)
    if path.name.endswith(_SHARDED):
        if max_shard_size is None:
            raise CheckpointError(
                f"A '{_SHARDED}' export needs max_shard_size, in units of 2**30 bytes, such as max_shard_size=5. "
                f"Received: path='{path}', max_shard_size=None"
            )
    elif max_shard_size is not None and not path.name.endswith(safetensors_files.ENDING):
        raise CheckpointError(
            f"Keras reads weights in several files only from a path that ends in '{_SHARDED}'. Use this ending or "
            f"'{safetensors_files.ENDING}', or leave out max_shard_size. Received: path='{path}', "
            f"max_shard_size={max_shard_size}"
        )


def _single_file_of(model: keras.Model, path: pathlib.Path) -> Files:
    is_full = path.suffix == ".keras"

    def write(directory: pathlib.Path) -> list[pathlib.Path]:
        written = directory / path.name
        (_private.write_keras_file if is_full else _private.write_weights_file)(model, written)
        files.sync(written)
        return [written]

    return Files(
        result=path,
        write=write,
        read=lambda: _private.read_as_written(model, full_model=is_full),
        move=lambda written: os.replace(written[0], path),
    )


def _sharded_h5_of(model: keras.Model, path: pathlib.Path, max_shard_size: float) -> Files:
    sizes = {name: spec.bytes for name, spec in _private.visit_weights(model, optimizer=True).items()}
    largest = max(sizes, key=sizes.__getitem__)
    if sizes[largest] > max_shard_size * GIB:
        raise CheckpointError(
            f"max_shard_size must be at least the size of the largest variable, '{largest}', which has "
            f"{sizes[largest] / GIB:.3g} * 2**30 bytes. Received: max_shard_size={max_shard_size}"
        )

    def write(directory: pathlib.Path) -> list[pathlib.Path]:
        index = directory / path.name
        _private.write_sharded_weights(model, index, max_shard_size)
        written = [*safetensors_files.index_files(index), index]
        for each in written:
            files.sync(each)
        return written

    names = re.compile(re.escape(path.name.removesuffix(_SHARDED)) + r"_\d{5}\.weights\.h5")
    return Files(
        result=path,
        write=write,
        read=lambda: _private.read_as_written(model, full_model=False),
        move=functools.partial(safetensors_files.move_into_place, index=path, single=None, shard_names=names),
    )


def _safetensors_of(model: keras.Model, path: pathlib.Path, max_shard_size: float | None) -> Files:
    expected = _private.visit_weights(model)
    names = weight_names.names_of(model, expected)
    specs = [
        safetensors_files.TensorSpec(name=names[place], shape=spec.shape, dtype=spec.dtype)
        for place, spec in expected.items()
    ]

    def put_all(put: Put) -> None:
        _private.visit_weights(
            model, values=lambda place, value: put(names[place], np.asarray(keras.ops.convert_to_numpy(value)))
        )

    return tensor_files(specs, put_all, path, max_shard_size)


def import_weights(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Load the weights of files that Keras or `tfshard.export` wrote. The optimizer does not change.

    The function compares every name, shape and dtype before it changes the first variable. It reads one variable at a
    time, and each device gets its local shard. Of a large variable in a safetensors file, a client reads only what its
    own devices store.

    Args:
        model: A built model, under a `ShardedStrategy` or not.
        path: A `.keras`, `.weights.h5`, `.weights.json`, `.safetensors` or `.safetensors.index.json` file. Only the
            weights of a `.keras` file are read, not the description of the model. Nothing in a file is executed, not
            even a `Lambda` layer.

    Raises:
        CheckpointError: Another ending, no such file, a model that is not built, or safetensors is not installed.
        CheckpointCorruptError: A file is damaged or malicious: names outside of the archive or directory, links, data
            in other files, compressed data, sizes that differ from the model's.
        CheckpointMismatchError: The file does not fit the model. The message names every variable; no variable changed.
    """
    path = _checked_path(path, _READ)
    _check_built(model)
    expected = _private.visit_weights(model)
    try:
        if path.name.endswith((safetensors_files.ENDING, safetensors_files.INDEX_ENDING)):
            _import_safetensors(model, path, expected)
            return
        if path.name.endswith(_SHARDED):
            _check_files(safetensors_files.index_files(path), path, expected, model)
            _private.read_sharded_weights(model, path)
            return
        with contextlib.ExitStack() as stack:
            source = path if path.suffix != ".keras" else stack.enter_context(_weights_of_archive(path, expected))
            _check_files([source], path, expected, model)
            _private.read_weights_file(model, source)
    except FileNotFoundError:
        raise CheckpointError(f"The file does not exist. Received: path='{path}'") from None


def _import_safetensors(model: keras.Model, path: pathlib.Path, expected: Expected) -> None:
    index = safetensors_files.index_of(path)
    found = safetensors_files.open_all(index if not path.exists() and index.exists() else path)
    names = weight_names.names_of(model, expected)
    # A weight that was computed from variables when it was written has the name of its place.
    sources = {name: names[name] if names[name] in found else weight_names.place_of(name) for name in expected}
    taken = set(sources.values())
    lines = [
        f"'{name}' of shape={tensor.spec.shape} is not in the model"
        for name, tensor in found.items()
        if name not in taken
    ]
    for name, spec in expected.items():
        stored = found[sources[name]].spec if sources[name] in found else None
        lines += _misfits(f"'{names[name]}'", spec, None if stored is None else (stored.shape, stored.dtype))
    _raise_for(lines, path, model)
    _private.read_weights(model, expected, lambda name: found[sources[name]].read())


def _checked_path(path: str | os.PathLike[str], endings: tuple[str, ...]) -> pathlib.Path:
    if not isinstance(path, (str, os.PathLike)) or not str(path).endswith(endings):
        choices = ", ".join(f"'{each}'" for each in endings[:-1]) + f" or '{endings[-1]}'"
        raise CheckpointError(f"path must end in {choices}. Received: path={path!r}")
    if remote_files.is_url(path):
        raise CheckpointError(f"path must be local. Copy the file to or from a remote place. Received: path={path!r}")
    return remote_files.local_path(path)


def _check_built(model: keras.Model) -> None:
    if not isinstance(model, keras.Model) or not model.built:
        raise CheckpointError(
            "The model must be a keras.Model that is built. Give it a keras.Input, or call model.build(input_shape). "
            f"Received: model={model!r}"
        )


@contextlib.contextmanager
def _weights_of_archive(path: pathlib.Path, expected: Expected) -> Iterator[pathlib.Path]:
    """Extract the weights of a `.keras` archive to a temporary file."""
    limit = _COPIES * sum(spec.bytes for spec in expected.values()) + _EXTRA_BYTES
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(path))
            members = [member for member in archive.infolist() if member.filename == _private.WEIGHTS_MEMBER]
            _check_members(path, archive.infolist())
            if len(members) != 1:
                raise safetensors_files.corrupt(path, f"it has no '{_private.WEIGHTS_MEMBER}'")
            if members[0].compress_type != zipfile.ZIP_STORED or members[0].file_size > limit:
                raise safetensors_files.corrupt(
                    path,
                    f"'{_private.WEIGHTS_MEMBER}' is compressed or claims {members[0].file_size} bytes, but the "
                    f"weights of this model need at most {limit}",
                )
            # The directory of the archive may be read-only. TMPDIR names a directory with room for large weights.
            target = stack.enter_context(tempfile.NamedTemporaryFile(prefix="tfshard-", suffix=".h5"))
            # zipfile reads no more than the member's claimed size, and compares its checksum at the end.
            with archive.open(members[0]) as source:
                shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise safetensors_files.corrupt(path, f"it is not an archive of a Keras model ({error!s:.100})") from error
        yield pathlib.Path(target.name)


def _check_members(path: pathlib.Path, members: list[zipfile.ZipInfo]) -> None:
    """Raise for members that Keras never writes. Only the weights are read."""
    names = [member.filename for member in members]
    for member in members:
        parts = member.filename.replace("\\", "/").split("/")
        if member.filename.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
            raise safetensors_files.corrupt(
                path, f"its member {member.filename[:100]!r} has a path outside of the archive"
            )
        if stat.S_ISLNK(member.external_attr >> 16):
            raise safetensors_files.corrupt(path, f"its member {member.filename[:100]!r} is a link")
    if len(set(names)) != len(names):
        raise safetensors_files.corrupt(path, "two of its members have the same name")


def _check_files(sources: Sequence[pathlib.Path], path: pathlib.Path, expected: Expected, model: keras.Model) -> None:
    """Compare the names, shapes and dtypes in weights files with the model, without reading a value."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    try:
        for source in sources:
            with _private.open_weights_file(source) as file:
                for name, dataset in _private.find_weights(file).items():
                    fault = _fault(dataset)
                    if fault is None and name in found:
                        fault = "is in two of its files"
                    if fault is not None:
                        raise safetensors_files.corrupt(path, f"'{name[:200]}' {fault}")
                    found[name] = tuple(dataset.shape), _private.weight_dtype(dataset)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, (CheckpointError, FileNotFoundError)):
            raise
        raise safetensors_files.corrupt(path, f"it is not a file of Keras weights ({error!s:.200})") from error
    lines = [
        f"'{name}' of shape={shape} is not in the model" for name, (shape, _) in found.items() if name not in expected
    ]
    for name, spec in expected.items():
        lines += _misfits(f"'{name}' ({spec.path})", spec, found.get(name))
    _raise_for(lines, path, model)


def _misfits(name: str, spec: _private.WeightSpec, found: tuple[tuple[int, ...], str] | None) -> list[str]:
    """Return what keeps a weight of a file from being assigned, as lines of an error."""
    if found is None:
        return [f"{name} of shape={spec.shape} is not in the file"]
    shape, dtype = found
    if shape != spec.shape:
        return [f"{name} has shape={shape} in the file and {spec.shape} in the model"]
    if not _fits(dtype, spec.dtype):
        return [f"{name} is {dtype} in the file and {spec.dtype} in the model"]
    return []


def _raise_for(lines: list[str], path: pathlib.Path, model: keras.Model) -> None:
    if lines:
        raise CheckpointMismatchError(
            f"The weights do not fit model '{model.name}', and nothing was changed:\n"
            + "".join(f"- {line}\n" for line in lines)
            + f"Received: path='{path}'"
        )


def _fits(stored: str, wanted: str) -> bool:
    """Return True if values can be assigned: equal dtypes, or two floating dtypes, such as float32 to bfloat16."""
    return stored == wanted or ("float" in stored and "float" in wanted)


def _fault(dataset: Any) -> str | None:
    """Return a fault of a dataset, or None.

    A fault is something that Keras never writes, and that can make reading cost more than the size of the dataset, or
    read another file.
    """
    if dataset.external or dataset.is_virtual:
        return "is stored in another file"
    if dataset.chunks is not None or dataset.compression is not None:
        return "is stored compressed or in chunks"
    if not isinstance(dataset.dtype, np.dtype) or dataset.dtype.hasobject or dataset.dtype.kind not in "biufcV":
        return f"has dtype={dataset.dtype}"
    size = math.prod(dataset.shape) * dataset.dtype.itemsize
    if dataset.id.get_storage_size() != size:
        return f"claims {size} bytes and has {dataset.id.get_storage_size()}"
    return None
