"""export and import_weights: a sharded model to Keras's file formats and back, one variable at a time.

Nothing in a file is executed or trusted: no model is made from a file, and all sizes in a file must match the model.
"""

import contextlib
import math
import os
import pathlib
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfshard import _private
from tfshard.checkpoints import remote_files, training_state
from tfshard.devices import clients
from tfshard.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

# The bytes that a file may hold in addition to the variables: names, and the HDF5 tree.
_EXTRA_BYTES = 1 << 26
# A file may also hold optimizer slots, which are ignored. No optimizer of Keras has more slots for each parameter.
_COPIES = 16


def export(model: keras.Model, path: str | os.PathLike[str]) -> pathlib.Path:
    """Write a model as a file that plain Keras loads, without tfshard.

    The function gathers one variable at a time on the host, and writes it to disk before the next: you can export a
    model that fits on no device. With several clients, each client calls the function, and the first client writes.

    Args:
        model: A built model, under a `ShardedStrategy` or not.
        path: Ends in `".keras"` for the model with its optimizer (`keras.models.load_model`), or in `".weights.h5"` for
            the variables (`model.load_weights`). An existing file is replaced atomically when the new file is complete.

    Returns:
        The path.

    Raises:
        CheckpointError: Another ending, a model that is not built, or the file cannot be written.

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
    path = _checked_path(path)
    _check_built(model)
    if path.suffix == ".keras":
        # Keras builds the optimizer when it loads the model, and then needs its state.
        training_state.build_optimizer(model)
    with clients.here().purpose(f"tfshard.export of model '{model.name}'"):
        _export_together(model, path)
    return path


def _export_together(model: keras.Model, path: pathlib.Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        if clients.here().rank > 0:
            # All clients must take part in reading a variable.
            _private.read_as_written(model, full_model=path.suffix == ".keras")
        else:
            if path.suffix == ".keras":
                _private.write_keras_file(model, temporary)
            else:
                _private.write_weights_file(model, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(f"The model could not be written: {error}. Received: path='{path}'") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    clients.here().barrier("an exported model")  # Afterwards the file exists for all clients.


def import_weights(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Load the weights of a file that Keras or `tfshard.export` wrote. The optimizer does not change.

    The function compares every name, shape and dtype before it changes the first variable. It reads one variable at a
    time, and each device gets its local shard.

    Args:
        model: A built model, under a `ShardedStrategy` or not.
        path: A `.keras` or `.weights.h5` file. Only the weights of a `.keras` file are read, not the description of the
            model. Nothing in the file is executed, not even a `Lambda` layer.

    Raises:
        CheckpointError: Another ending, no such file, or a model that is not built.
        CheckpointCorruptError: The file is damaged or malicious: names outside of the archive, links, data in other
            files, compressed data, sizes that differ from the model's.
        CheckpointMismatchError: The file does not fit the model. The message names every variable; no variable changed.
    """
    path = _checked_path(path)
    _check_built(model)
    expected = _private.visit_weights(model)
    try:
        with contextlib.ExitStack() as stack:
            source = path if path.suffix != ".keras" else stack.enter_context(_weights_of_archive(path, expected))
            _check_file(source, path, expected, model)
            _private.read_weights_file(model, source)
    except FileNotFoundError:
        raise CheckpointError(f"The file does not exist. Received: path='{path}'") from None


def _checked_path(path: str | os.PathLike[str]) -> pathlib.Path:
    if not isinstance(path, (str, os.PathLike)) or not str(path).endswith((".keras", ".weights.h5")):
        raise CheckpointError(f"path must end in '.keras' or '.weights.h5'. Received: path={path!r}")
    if remote_files.is_url(path):
        raise CheckpointError(f"path must be local. Copy the file to or from a remote place. Received: path={path!r}")
    return remote_files.local_path(path)


def _check_built(model: keras.Model) -> None:
    if not isinstance(model, keras.Model) or not model.built:
        raise CheckpointError(
            "The model must be a keras.Model that is built. Give it a keras.Input, or call model.build(input_shape). "
            f"Received: model={model!r}"
        )


Expected = Mapping[str, _private.WeightSpec]


def _corrupt(path: pathlib.Path, fault: str) -> CheckpointCorruptError:
    error: CheckpointCorruptError = CheckpointCorruptError(
        f"The file cannot be used: {fault}. Nothing was changed. Received: path='{path}'"
    )
    return error


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
                raise _corrupt(path, f"it has no '{_private.WEIGHTS_MEMBER}'")
            if members[0].compress_type != zipfile.ZIP_STORED or members[0].file_size > limit:
                raise _corrupt(
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
            raise _corrupt(path, f"it is not an archive of a Keras model ({error!s:.100})") from error
        yield pathlib.Path(target.name)


def _check_members(path: pathlib.Path, members: list[zipfile.ZipInfo]) -> None:
    """Raise for members that Keras never writes. Only the weights are read."""
    names = [member.filename for member in members]
    for member in members:
        parts = member.filename.replace("\\", "/").split("/")
        if member.filename.startswith(("/", "\\")) or ".." in parts or ":" in parts[0]:
            raise _corrupt(path, f"its member {member.filename[:100]!r} has a path outside of the archive")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise _corrupt(path, f"its member {member.filename[:100]!r} is a link")
    if len(set(names)) != len(names):
        raise _corrupt(path, "two of its members have the same name")


def _check_file(source: pathlib.Path, path: pathlib.Path, expected: Expected, model: keras.Model) -> None:
    """Compare the names, shapes and dtypes in a weights file with the model, without reading a value."""
    lines = []
    try:
        with _private.open_weights_file(source) as file:
            found = _private.find_weights(file)
            for name, dataset in found.items():
                fault = _fault(dataset)
                if fault is not None:
                    raise _corrupt(path, f"'{name[:200]}' {fault}")
                if name not in expected:
                    lines.append(f"'{name}' of shape={dataset.shape} is not in the model")
            for name, spec in expected.items():
                if name not in found:
                    lines.append(f"'{name}' ({spec.path}) of shape={spec.shape} is not in the file")
                    continue
                shape, dtype = tuple(found[name].shape), _private.weight_dtype(found[name])
                if shape != spec.shape:
                    lines.append(f"'{name}' ({spec.path}) has shape={shape} in the file and {spec.shape} in the model")
                elif not _fits(dtype, spec.dtype):
                    lines.append(f"'{name}' ({spec.path}) is {dtype} in the file and {spec.dtype} in the model")
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, (CheckpointError, FileNotFoundError)):
            raise
        raise _corrupt(path, f"it is not a file of Keras weights ({error!s:.200})") from error
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
