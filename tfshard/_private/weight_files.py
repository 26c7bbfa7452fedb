"""Read and write Keras weight files, one weight at a time."""

import dataclasses
import math
import pathlib
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.saving import saving_lib as _saving_lib

# The weight file in a `.keras` archive.
WEIGHTS_MEMBER = _saving_lib._VARS_FNAME_H5
# The name of a group of weights in a weight file, and the maximum depth and number of objects in a model's file.
_WEIGHTS = "vars"
_MAX_DEPTH, _MAX_OBJECTS = 200, 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """A weight as Keras saves it.

    Attributes:
        path: The path of the variable. The place in Keras's file if the weight is computed from variables, as a kernel
            with a merged adapter is.
        layer: The name of the layer that saves the weight. None if Keras does not tell.
        variable: The Keras variable. None if the weight is computed from variables.
        shape: The shape of the full weight.
        dtype: The name of the dtype.
        bytes: The size of the full weight.
    """

    path: str
    layer: str | None
    variable: keras.Variable | None
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class _Visit(_saving_lib.H5IOStore):  # type: ignore[misc]
    """Stands in for the file when Keras saves weights (`H5IOStore`), and records what Keras would save."""

    def __init__(self, values: Callable[[str, Any], object] | None):
        self.found: dict[str, WeightSpec] = {}
        self._values = values
        self._path = ""
        self._layer: str | None = None

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> "_Visit":
        self._path = path
        self._layer = (metadata or {}).get("name")
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        shape, dtype = tuple(value.shape), keras.backend.standardize_dtype(value.dtype)
        name = f"{self._path}/{_WEIGHTS}/{key}".removeprefix("/")
        variable = value if isinstance(value, keras.Variable) else None
        self.found[name] = WeightSpec(
            path=self._path if variable is None else variable.path,
            layer=self._layer,
            variable=variable,
            shape=shape,
            dtype=dtype,
            bytes=math.prod(shape) * tf.as_dtype(dtype).size,
        )
        if self._values is not None:
            self._values(name, value)


def visit_weights(
    model: keras.Model, *, values: Callable[[str, Any], object] | None = None, optimizer: bool = False
) -> dict[str, WeightSpec]:
    """List the weights that Keras saves for a model, by their names in the file (`saving_lib._save_state`).

    Args:
        model: The model.
        values: If given, receives each weight's name in the file and its value: a variable, a tensor or an array.
        optimizer: If True, include the optimizer.
    """
    visit = _Visit(values)
    skipped = set() if optimizer else {id(getattr(model, "optimizer", None))}
    _saving_lib._save_state(model, weights_store=visit, assets_store=None, inner_path="", visited_saveables=skipped)
    return visit.found


def read_as_written(model: keras.Model, *, full_model: bool) -> None:
    """Read a model's values in the order in which `write_keras_file` or `write_weights_file` reads them.

    Clients that do not write call this while another client writes.
    """
    if full_model:
        _saving_lib._serialize_model_as_json(model)  # Reads the learning rate.
    visit_weights(model, values=lambda _, value: keras.ops.convert_to_numpy(value), optimizer=True)


def write_sharded_weights(model: keras.Model, path: pathlib.Path, max_shard_size: float) -> None:
    """Save weights like `model.save_weights(path, max_shard_size=...)` (`saving_lib.ShardedH5IOStore`).

    Args:
        model: The model.
        path: Ends in `.weights.json`.
        max_shard_size: In units of 2**30 bytes.
    """
    store = _saving_lib.ShardedH5IOStore(path, max_shard_size, mode="w")
    try:
        _saving_lib._save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    finally:
        store.close()


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
    _load(model, _saving_lib.H5IOStore(path, mode="r"))


def read_sharded_weights(model: keras.Model, path: pathlib.Path) -> None:
    """Load weights like `model.load_weights("....weights.json")`, without the optimizer."""
    _load(model, _saving_lib.ShardedH5IOStore(path, mode="r"))


class _WeightSource(_saving_lib.H5IOStore):  # type: ignore[misc]
    """Stands in for the file when Keras loads weights (`H5IOStore`), and reads them by their names in the file."""

    def __init__(self, names: Iterable[str], read: Callable[[str], np.ndarray]):
        self._weights: dict[str, list[str]] = {}
        for name in names:
            place, _, key = name.rpartition(f"{_WEIGHTS}/")
            self._weights.setdefault(place.removesuffix("/"), []).append(key)
        self._read = read
        self._path = ""

    def __bool__(self) -> bool:
        return True

    def get(self, path: str) -> "_WeightSource":
        self._path = path
        return self

    def has_path(self, path: str) -> bool:
        return any(place == path or place.startswith(f"{path}/") for place in self._weights)

    def close(self) -> None:
        pass

    def keys(self) -> list[str]:
        return self._weights.get(self._path, [])

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def __getitem__(self, key: str) -> np.ndarray:
        if key not in self:
            raise KeyError(key)
        return self._read(f"{self._path}/{_WEIGHTS}/{key}".removeprefix("/"))


def read_weights(model: keras.Model, names: Iterable[str], read: Callable[[str], np.ndarray]) -> None:
    """Load weights like `model.load_weights`, from any source, without the optimizer.

    Args:
        model: The model.
        names: The names of the weights in a file of Keras.
        read: Returns the value of a name.
    """
    _load(model, _WeightSource(names, read))


def _load(model: keras.Model, store: _saving_lib.H5IOStore) -> None:
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
