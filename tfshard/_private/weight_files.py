"""Read and write Keras weight files, one weight at a time."""

import dataclasses
import math
import pathlib
import tempfile
import zipfile
from typing import Any

import h5py
import keras
import tensorflow as tf
from keras.src.saving import saving_lib as _saving_lib

# The weight file in a `.keras` archive.
WEIGHTS_MEMBER = _saving_lib._VARS_FNAME_H5
# The name of a group of weights in a weight file, and the maximum depth and number of objects in a model's file.
_WEIGHTS = "vars"
_MAX_DEPTH, _MAX_OBJECTS = 200, 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """A weight as Keras saves it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class _Visit(_saving_lib.H5IOStore):  # type: ignore[misc]
    """Stands in for the file when Keras saves weights (`H5IOStore`), and records what Keras would save."""

    def __init__(self, read: bool):
        self.found: dict[str, WeightSpec] = {}
        self._read = read
        self._path = ""

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_Visit":
        self._path = path
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        if self._read:
            keras.ops.convert_to_numpy(value)
        shape, dtype = tuple(value.shape), keras.backend.standardize_dtype(value.dtype)
        name = f"{self._path}/{_WEIGHTS}/{key}".removeprefix("/")
        path = getattr(value, "path", self._path)
        size = math.prod(shape) * tf.as_dtype(dtype).size
        self.found[name] = WeightSpec(path=path, shape=shape, dtype=dtype, bytes=size)


def visit_weights(model: keras.Model, *, read: bool = False, optimizer: bool = False) -> dict[str, WeightSpec]:
    """List the weights that Keras saves for a model, by their names in the file (`saving_lib._save_state`).

    Args:
        model: The model.
        read: If True, read the values as saving does. Clients that do not write use this to match the writing client.
        optimizer: If True, include the optimizer.
    """
    visit = _Visit(read)
    skipped = set() if optimizer else {id(getattr(model, "optimizer", None))}
    _saving_lib._save_state(model, weights_store=visit, assets_store=None, inner_path="", visited_saveables=skipped)
    return visit.found


def read_as_written(model: keras.Model, *, full_model: bool) -> None:
    """Read a model's values in the order in which `write_keras_file` or `write_weights_file` reads them.

    Clients that do not write call this while another client writes.
    """
    if full_model:
        _saving_lib._serialize_model_as_json(model)  # Reads the learning rate.
    visit_weights(model, read=True, optimizer=True)


def write_weights_file(model: keras.Model, path: pathlib.Path) -> None:
    """Save weights like `model.save_weights`, to any file name, one variable at a time (`saving_lib._save_state`)."""
    store = _saving_lib.H5IOStore(path, mode="w")
    try:
        _saving_lib._save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    finally:
        store.close()


def write_keras_file(model: keras.Model, path: pathlib.Path) -> None:
    """Save a model like `model.save`, without a copy of all weights in memory (`saving_lib._save_model_to_fileobj`)."""
    config, metadata = _saving_lib._serialize_model_as_json(model)
    with zipfile.ZipFile(path, "w") as archive, tempfile.NamedTemporaryFile(dir=path.parent) as weights:
        archive.writestr(_saving_lib._METADATA_FILENAME, metadata)
        archive.writestr(_saving_lib._CONFIG_FILENAME, config)
        store = _saving_lib.H5IOStore(weights.name, mode="w")
        assets = _saving_lib.DiskIOStore(_saving_lib._ASSETS_DIRNAME, archive=archive, mode="w")
        try:
            _saving_lib._save_state(
                model, weights_store=store, assets_store=assets, inner_path="", visited_saveables=set()
            )
        finally:
            store.close()
            assets.close()
        archive.write(weights.name, WEIGHTS_MEMBER)


def open_weights_file(path: pathlib.Path) -> h5py.File:
    """Open a weight file for inspection (by `h5py`, which Keras requires)."""
    return h5py.File(path, "r")


def find_weights(file: h5py.File) -> dict[str, h5py.Dataset]:
    """Return the weights in a file by name, without the optimizer's weights. Reads no values.

    Raises:
        ValueError: The file has links, or is deeper or larger than any model.
    """
    found, waiting, seen = {}, [("", file, 0)], 0
    while waiting:
        prefix, group, depth = waiting.pop()
        for name in group:
            seen += 1
            if depth > _MAX_DEPTH or seen > _MAX_OBJECTS:
                raise ValueError("it has more groups than a model can have")
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise ValueError(f"'{prefix}{name}' is a link")
            member = group[name]
            if isinstance(member, h5py.Group):
                if (prefix, name) != ("", "optimizer"):
                    waiting.append((f"{prefix}{name}/", member, depth + 1))
            elif isinstance(member, h5py.Dataset):
                found[prefix + name] = member
            else:
                raise ValueError(f"'{prefix}{name}' is neither a group nor an array")
    return found


def weight_dtype(dataset: h5py.Dataset) -> str:
    """Return the dtype of a weight in a file. Keras marks bfloat16, which HDF5 lacks (`H5IOStore.__getitem__`)."""
    marked = dataset.attrs.get("dtype")
    return "bfloat16" if isinstance(marked, str) and marked == "bfloat16" else str(dataset.dtype.name)


def read_weights_file(model: keras.Model, path: pathlib.Path) -> None:
    """Load weights like `model.load_weights`, from a file of any name, without the optimizer
    (`saving_lib._load_state`)."""
    store = _saving_lib.H5IOStore(path, mode="r")
    skipped = {id(getattr(model, "optimizer", None))}
    failed: set[int] = set()
    errors: dict[int, Any] = {}
    try:
        _saving_lib._load_state(
            model, weights_store=store, assets_store=None, inner_path="", visited_saveables=skipped,
            failed_saveables=failed, error_msgs=errors,
        )  # fmt: skip
    finally:
        store.close()
    if failed:
        _saving_lib._raise_loading_failure(errors)
