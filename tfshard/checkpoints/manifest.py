"""The manifest of a checkpoint: its contents, and the checksums that prove it complete. JSON; every field is checked.

Pure Python. A manifest holds the shape and dtype of each variable, the place and checksum of each stored box, and the
size of each file. Its checksum covers all of its contents.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfshard.checkpoints import files
from tfshard.errors import CheckpointCorruptError, CheckpointError
from tfshard.layouts.boxes import Box

FORMAT = "tfshard checkpoint"
VERSION = 1
# Room for more than a million boxes. Larger claims are not read.
MAX_BYTES = 1 << 26
MAX_CELLS = 1 << 24
DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2".split()
)
KINDS = ("parameter", "state", "slot", "seed", "metric", "compression")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredShard:
    """A box of a variable.

    Attributes:
        box: The box in the variable's shape.
        checksum: CRC-32 of the bytes of the box, in row-major order.
    """

    box: Box
    checksum: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredVariable:
    """A variable.

    Attributes:
        kind: `"parameter"`, `"state"`, `"slot"`, `"seed"`, `"metric"` or `"compression"`.
        path: The Keras path, for messages.
        shape: The shape of the full variable.
        dtype: The name of the dtype.
        layout: The mesh axis of each dim when the variable was saved; for information.
        group: The number of the group in which the variable was stored; for information.
        shards: The stored boxes. Together they cover the variable, without overlap.
    """

    kind: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: tuple[str | None, ...] | None
    group: int | None
    shards: tuple[StoredShard, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file: its size in bytes and, unless checksums of boxes cover the file, its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run in its data: what the next step reads.

    Attributes:
        epoch: The epoch, from 0.
        step: The step in the epoch, from 0; None if only the data know (a custom loop).
        consumed: Batches taken from the iterator so far; more than `step` if `steps_per_epoch` cuts epochs out of a
            longer dataset.
        num_batches: The number of batches in the dataset, if the run knows it.
        fresh: True if the next step takes its batch from a new iterator. The seeds of the new iterator follow the seeds
            of the saved one.
        clients: How many clients saved the state of their iterator: all if each client feeds its local part of a batch,
            one if all clients feed the same batch; 0 for none.
    """

    epoch: int
    step: int | None
    consumed: int
    num_batches: int | None
    fresh: bool
    clients: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step: Training steps so far.
        generation: How often this step was saved before.
        versions: The versions of tfshard, TensorFlow and Keras.
        plan: Mesh, ZeRO stage, layout map, analyzer and clients at the time of the save; for information.
        position: The position in the data, or None.
        variables: The variables by key.
        files: The files by name.
    """

    step: int
    generation: int
    versions: Mapping[str, str]
    plan: Mapping[str, object]
    position: Position | None
    variables: Mapping[str, StoredVariable]
    files: Mapping[str, StoredFile]


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest.

    Raises:
        CheckpointError: The manifest is larger than `decode` accepts.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "generation": manifest.generation,
        "versions": dict(manifest.versions),
        "plan": dict(manifest.plan),
        "position": None if manifest.position is None else dataclasses.asdict(manifest.position),
        "variables": {key: _encode_variable(variable) for key, variable in manifest.variables.items()},
        "files": {name: dataclasses.asdict(file) for name, file in manifest.files.items()},
    }
    written = _canonical({"content": content, "sha256": _digest(content)})
    if len(written) > MAX_BYTES:
        raise CheckpointError(
            f"The manifest of the checkpoint of step {manifest.step} would have {len(written)} bytes, but tfshard "
            f"reads at most {MAX_BYTES}. Received: {len(manifest.variables)} variables"
        )
    return written


def encode_part(variables: Mapping[str, StoredVariable]) -> bytes:
    """Return the bytes of one client's variables by key, with the boxes that this client wrote."""
    return _canonical({key: _encode_variable(variable) for key, variable in variables.items()})


def decode_parts(written: Sequence[bytes], where: str) -> dict[str, StoredVariable]:
    """Return the variables with the boxes of all clients.

    Args:
        written: The results of `encode_part` on all clients.
        where: The place of the parts, for messages.

    Raises:
        CheckpointCorruptError: A part is damaged, or the parts together do not cover the variables.
    """
    merged: dict[str, dict[str, Any]] = {}
    with _refused("The data that the clients wrote", where):
        for part in written:
            for key, data in _object(_parsed(part), "a part").items():
                shards = _object(data, f"variable '{key[:200]}'").get("pieces")
                if not isinstance(shards, list):
                    raise _Bad(f"variable '{key[:200]}' has no list of shards")
                merged.setdefault(key, {**data, "pieces": []})["pieces"] += shards
        return {key: _variable(data, key) for key, data in merged.items()}


def _encode_variable(variable: StoredVariable) -> dict[str, Any]:
    data = {field.name: getattr(variable, field.name) for field in dataclasses.fields(variable)}
    del data["shards"]
    data["pieces"] = [[shard.box.offset, shard.box.shape, shard.checksum] for shard in variable.shards]
    return data


def decode(written: bytes, where: str) -> Manifest:
    """Return the manifest that `encode` wrote, after checking all of its contents.

    Args:
        written: The bytes of the file.
        where: The file, for messages.

    Raises:
        CheckpointCorruptError: The file is damaged, edited or not a manifest.
        CheckpointError: The file has a later version.
    """
    with _refused("The manifest of a checkpoint", where):
        if len(written) > MAX_BYTES:
            raise _Bad(f"it has {len(written)} bytes, but tfshard reads at most {MAX_BYTES}")
        data = _parsed(written)
        outer = _fields(data, "manifest", content=dict, sha256=str)
        content = outer["content"]
        if outer["sha256"] != _digest(content) or _canonical(data) != written:
            raise _Bad("its checksum does not match its content: it was damaged or edited")
        if content.get("format") != FORMAT:
            raise _Bad(f"its format is {str(content.get('format'))[:40]!r}")
        if content.get("version") != VERSION:
            raise CheckpointError(
                "The checkpoint was written by another version of tfshard. Format versions that this tfshard reads: "
                f"{VERSION}. Received: version={str(content.get('version'))[:40]} in {where}"
            )
        return _manifest(content)


class _Bad(Exception):
    """A fault in a manifest."""


@contextlib.contextmanager
def _refused(what: str, where: str) -> Iterator[None]:
    """Raise `CheckpointCorruptError` for a fault that is found in this context."""
    try:
        yield
    except _Bad as error:
        raise CheckpointCorruptError(f"{what} cannot be used: {error}. Received: {where}") from None


def _parsed(written: bytes) -> object:
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        raise _Bad(f"it is not JSON ({str(error)[:100]})") from None


def _object(data: object, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Bad(f"{what} is not an object: {str(data)[:60]}")
    return data


def _canonical(data: object) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: object) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _fields(data: object, what: str, **types: type | tuple[type, ...]) -> dict[str, Any]:
    """Return `data` if it is an object with exactly these fields of these types, else raise."""
    if not isinstance(data, dict) or data.keys() != types.keys():
        raise _Bad(f"{what} does not have exactly the fields {sorted(types)}")
    for name, expected in types.items():
        # In Python, a bool is an int.
        if not isinstance(data[name], expected) or (isinstance(data[name], bool) and expected is not bool):
            raise _Bad(f"{what} has a wrong {name}: {str(data[name])[:60]}")
    return data


def _ints(data: object, what: str) -> tuple[int, ...]:
    if not isinstance(data, list) or len(data) > 64 or not all(type(n) is int and 0 <= n < 1 << 60 for n in data):
        raise _Bad(f"{what} is not a list of sizes: {str(data)[:60]}")
    return tuple(data)


def _natural(data: dict[str, Any], *names: str) -> None:
    for name in names:
        if data[name] is not None and not 0 <= data[name] < 1 << 60:
            raise _Bad(f"{name} is not a count: {str(data[name])[:60]}")


def _manifest(content: dict[str, Any]) -> Manifest:
    fields = _fields(
        content, "the content", format=str, version=int, step=int, generation=int, versions=dict, plan=dict,
        position=(dict, type(None)), variables=dict, files=dict,
    )  # fmt: skip
    _natural(fields, "step", "generation")
    position = None
    if fields["position"] is not None:
        optional = (int, type(None))
        types: dict[str, type | tuple[type, ...]] = {
            "epoch": int,
            "step": optional,
            "consumed": int,
            "num_batches": optional,
            "fresh": bool,
            "clients": int,
        }
        position = Position(**_fields(fields["position"], "the position", **types))
        _natural(dataclasses.asdict(position), "epoch", "step", "consumed", "num_batches", "clients")
    return Manifest(
        step=fields["step"],
        generation=fields["generation"],
        versions={str(name): str(version) for name, version in fields["versions"].items()},
        plan=fields["plan"],
        position=position,
        variables={key: _variable(data, key) for key, data in fields["variables"].items()},
        files={name: _file(data, name) for name, data in fields["files"].items()},
    )


def _variable(data: object, key: str) -> StoredVariable:
    what = f"variable '{key[:200]}'"
    optional = (list, type(None))
    fields = _fields(
        data, what, kind=str, path=str, shape=list, dtype=str, layout=optional, group=(int, type(None)), pieces=list
    )
    if fields["kind"] not in KINDS or fields["dtype"] not in DTYPES:
        raise _Bad(f"{what} has a wrong kind or dtype: {fields['kind'][:20]}, {fields['dtype'][:20]}")
    shape = _ints(fields["shape"], f"the shape of {what}")
    layout = fields["layout"]
    if layout is not None and not all(axis is None or isinstance(axis, str) for axis in layout):
        raise _Bad(f"{what} has a wrong layout")
    shards = []
    for entry in fields["pieces"]:
        if not isinstance(entry, list) or len(entry) != 3 or type(entry[2]) is not int:
            raise _Bad(f"{what} has a wrong shard: {str(entry)[:60]}")
        box = Box(offset=_ints(entry[0], f"an offset of {what}"), shape=_ints(entry[1], f"a shard's shape of {what}"))
        if not box.is_in(shape) or not box.elements:
            raise _Bad(f"{what} of shape={shape} has a shard outside of it: {box}")
        shards.append(StoredShard(box=box, checksum=entry[2]))
    _check_cover(shards, shape, what)
    return StoredVariable(
        kind=fields["kind"],
        path=fields["path"],
        shape=shape,
        dtype=fields["dtype"],
        layout=None if layout is None else tuple(layout),
        group=fields["group"],
        shards=tuple(shards),
    )


def _check_cover(shards: list[StoredShard], shape: tuple[int, ...], what: str) -> None:
    """Raise unless the boxes cover the shape without overlap."""
    if sum(shard.box.elements for shard in shards) != math.prod(shape):
        raise _Bad(f"the shards of {what} do not cover its shape={shape}")
    if not shards:
        return
    # The edges of all boxes make a grid, and each cell of the grid belongs to one box. The number of cells bounds time
    # and memory, whatever a file claims.
    edges = []
    for dim in range(len(shape)):
        ends = [(shard.box.offset[dim], shard.box.offset[dim] + shard.box.shape[dim]) for shard in shards]
        edges.append(sorted({edge for both in ends for edge in both}))
    cells = [len(edge) - 1 for edge in edges]
    if math.prod(cells) > MAX_CELLS:
        raise _Bad(f"{what} has too many shards: {len(shards)}")
    taken = np.zeros(cells, bool)
    for shard in shards:
        at = []
        for edge, begin, size in zip(edges, shard.box.offset, shard.box.shape, strict=True):
            at.append(slice(bisect.bisect_left(edge, begin), bisect.bisect_left(edge, begin + size)))
        if taken[tuple(at)].any():
            raise _Bad(f"shards of {what} overlap")
        taken[tuple(at)] = True


def _file(data: object, name: str) -> StoredFile:
    # A plain name cannot name a file outside of the checkpoint's directory.
    is_data = files.DATA_FILE.fullmatch(name) is not None
    if not is_data and not files.OTHER_FILE.fullmatch(name):
        raise _Bad(f"it names a file that no checkpoint has: {name[:100]!r}")
    fields = _fields(data, f"file '{name}'", bytes=int, sha256=(str, type(None)))
    _natural(fields, "bytes")
    if (fields["sha256"] is None) != is_data:
        raise _Bad(f"file '{name}' has no checksum where it needs one")
    return StoredFile(bytes=fields["bytes"], sha256=fields["sha256"])


def needs_sha256(name: str) -> bool:
    """Return True if no checksum of a box covers the file."""
    return not files.DATA_FILE.fullmatch(name)
