"""RemoteStore: checkpoints on a remote file system, committed by an object that is written last.

An object store cannot rename a directory, so the files of a checkpoint are written under their final names, and its
manifest is written last. A checkpoint without a manifest does not exist. Retention deletes the manifest first.

Each checkpoint has the files that a local checkpoint has, so it can be copied to a disk and back. Data go through the
disk in chunks of `CHUNK_BYTES`: TensorFlow writes a chunk to a local file, which is uploaded while the next chunk is
written, and each chunk is a data file of the bundle. A save therefore needs little disk and memory for a model of any
size, and can repeat a failed upload. TensorFlow merges the indices of the chunks at the end.

A lease (`leases`) lets one save write at a time. A save never uses the generation of a killed save again, because a
client of the killed save may still upload.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfshard.checkpoints import bundle_index, bundles, byte_ranges, files, leases, manifest, remote_files, stores
from tfshard.checkpoints.bundle_index import BadIndexError, StoredPlace
from tfshard.checkpoints.held_shards import HeldShard
from tfshard.checkpoints.leases import Lease, LeaseLostError
from tfshard.checkpoints.manifest import StoredFile, StoredVariable
from tfshard.checkpoints.remote_files import RemoteDirectory
from tfshard.checkpoints.staging import Staging
from tfshard.checkpoints.stores import Wanted
from tfshard.errors import CheckpointError
from tfshard.layouts.boxes import Box

# A data file has this many bytes, or one box if that is larger.
CHUNK_BYTES = 128 << 20
# How many data files are uploaded at a time. The local disk holds so many, and one that is being written.
UPLOADS = 4
# How many ranges are read at a time.
READS = 8
# Short ranges are read in blocks of this size, several neighbours by one request.
_BLOCK_BYTES = 1 << 20
# The number of blocks that stay in memory.
_KEPT_BLOCKS = 64
_BLOCKS_READ = 16
_FILE_BYTES = 16 << 20
_PROBE = ".probe-"
# Every file that a save writes to the directory of a checkpoint.
_OURS = re.compile(
    rf"{files.DATA_FILE.pattern}|{files.OTHER_FILE.pattern}"
    rf"|(part-\d{{5}}\.(json|count|indices)|{files.MANIFEST})({re.escape(remote_files.UNPUBLISHED)})?"
)


class _Uploads:
    """Uploads of chunks by threads, of which at most `UPLOADS` work at a time."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(UPLOADS)
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, upload: Any) -> None:
        """Call a function in a thread, when one is free.

        Raises:
            BaseException: The error of an earlier upload.
        """
        self._free.acquire()

        def run() -> None:
            try:
                upload()
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._free.release()

        if not self._errors:
            # Not a thread pool: a thread of a program that ends may still save.
            self._threads.append(threading.Thread(target=run, name=threading.current_thread().name))
            self._threads[-1].start()
        else:
            self._free.release()
            self.finish()

    def finish(self) -> None:
        """Wait for all uploads.

        Raises:
            BaseException: The error of an upload.
        """
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


class RemoteAttempt(stores.Attempt):
    """A directory of a checkpoint that has no manifest yet."""

    def __init__(self, root: RemoteDirectory, step: int):
        self.root = root
        self.step = step
        self._lease: Lease | None = None
        self._claim = ""
        self._name = ""
        self._staging: Staging | None = None
        self._files: dict[str, StoredFile] = {}
        # The chunks of this client: the local prefixes of their indices.
        self._chunks: list[pathlib.Path] = []
        self._commits = False

    @property
    def place(self) -> str:
        return self.root.address(self._name or files.name_of(self.step, 0))

    @property
    def generation(self) -> int:
        parsed = files.parse(self._name)
        return parsed[1] if parsed is not None else 0

    def _path(self, name: str) -> str:
        return f"{self._name}/{name}"

    def begin(self) -> None:
        lease = Lease(self.root)
        lease.acquire()
        self._lease, self._claim = lease, lease.path
        found = self.root.find()
        taken = [files.parse(name) for name in {path.partition("/")[0] for path in found} | set(lease.abandoned)]
        generations = [each[1] for each in taken if each is not None and each[0] == self.step]
        self._name = files.name_of(self.step, max(generations, default=-1) + 1)
        lease.announce(self._name)
        self._delete_leftovers(found)

    def _delete_leftovers(self, found: Mapping[str, int]) -> None:
        """Delete the files of checkpoints that no manifest has committed. No other save is at work."""
        present = {path.rpartition("/")[0] for path in found if path.endswith(f"/{files.MANIFEST}")}
        left: dict[str, list[str]] = {}
        for path in found:
            directory, _, name = path.rpartition("/")
            if files.parse(directory) is not None and directory not in present and _OURS.fullmatch(name):
                left.setdefault(directory, []).append(path)
        for directory, paths in left.items():
            self.root.delete(paths)
            self.root.delete_directory(directory)
        self.root.delete(path for path in found if path.startswith(_PROBE))
        self.root.abort_uploads("")

    def join(self, rank: int) -> None:
        if rank:
            claim = leases.claim_of(self.root)
            if claim is None:
                raise CheckpointError(
                    "The first client does not save to this directory. All clients must save to one directory. "
                    f"Received: directory='{self.root.url}'"
                )
            self._claim, self._name = claim
        self._staging = Staging()

    def _check(self) -> None:
        """Raise `LeaseLostError` if the save is over for other saves."""
        if self._lease is not None:
            self._lease.check()
        elif not self.root.exists(self._claim):
            raise LeaseLostError(
                "The first client has ended its save, or another save took it for dead. Received: "
                f"directory='{self.root.url}'"
            )

    # --- every client

    def write_shards(self, rank: int, count: int, held: Sequence[HeldShard], wait: stores.Wait) -> None:
        assert self._staging is not None
        chunks = _chunks(held)
        first, total = self._numbers(rank, count, len(chunks), wait)
        uploads = _Uploads()
        try:
            for number, chunk in enumerate(chunks):
                prefix = self._staging / f"chunk-{rank:05d}-{number:05d}"
                bundles.save_shards(prefix, chunk)
                self._chunks.append(prefix)
                target = f"{files.DATA}{bundles.data_file(first + number, total)}"
                uploads.start(lambda prefix=prefix, target=target: self._upload_chunk(prefix, target))
        finally:
            uploads.finish()

    def _numbers(self, rank: int, count: int, own: int, wait: stores.Wait) -> tuple[int, int]:
        """Return the number of this client's first data file, and how many data files all clients write."""
        if count == 1:
            return 0, own
        self.root.write(self._path(_part(rank, "count")), str(own).encode(), publishes=True)
        wait(lambda: self._has_each(count, "count"), "the other clients to count their files")
        counts = [int(self.root.read(self._path(_part(each, "count")))) for each in range(count)]
        return sum(counts[:rank]), sum(counts)

    def _has_each(self, count: int, ending: str) -> bool:
        found = self.root.find(self._name)
        return all(self._path(_part(rank, ending)) in found for rank in range(count))

    def _upload_chunk(self, prefix: pathlib.Path, target: str) -> None:
        self._check()
        local = prefix.with_name(f"{prefix.name}{bundles.data_file(0, 1)}")
        size = self.root.upload(self._path(target), local)
        self._files[target] = StoredFile(bytes=size, sha256=None)
        os.truncate(local, 0)  # The index is still needed, and names the file.

    def write_states(self, prefix: str, states: Sequence[tf.Tensor]) -> None:
        assert self._staging is not None
        bundles.save_states(self._staging / prefix, states)
        for path in sorted(files.with_prefix(self._staging.directory, prefix)):
            self._upload(path, path.name)
            path.unlink()

    def _upload(self, path: pathlib.Path, name: str) -> None:
        self._check()
        with open(path, "rb") as file:
            digest = files.sha256(file)
        self._files[name] = StoredFile(bytes=self.root.upload(self._path(name), path), sha256=digest)

    def publish(self, rank: int, listed: bytes) -> None:
        told = {
            "variables": listed.decode(),
            "files": {name: [file.bytes, file.sha256] for name, file in self._files.items()},
        }
        if rank:
            self.root.write(self._path(_part(rank, "indices")), _packed(self._chunks))
        self.root.write(self._path(_part(rank, "json")), json.dumps(told).encode(), publishes=True)

    # --- the first client

    def has_published(self, count: int) -> bool:
        return self._has_each(count, "json")

    def gather(self, count: int) -> list[bytes]:
        assert self._staging is not None
        listed = []
        for rank in range(count):
            told = json.loads(self.root.read(self._path(_part(rank, "json"))))
            listed.append(told["variables"].encode())
            for name, (size, digest) in told["files"].items():
                self._files[name] = StoredFile(bytes=size, sha256=digest)
            if rank:
                packed = self.root.read(self._path(_part(rank, "indices")))
                self._chunks += _unpacked(packed, self._staging.directory, rank)
        endings = ("json", "count", "indices")
        self.root.delete(self._path(_part(rank, ending)) for rank in range(count) for ending in endings)
        return listed

    def files(self) -> dict[str, StoredFile]:
        assert self._staging is not None
        if self._chunks:
            bundles.merge(self._chunks, self._staging / files.DATA)
            index = self._staging / f"{files.DATA}.index"
            self._check_index(index.read_bytes())
            self._upload(index, index.name)
        # Every file was uploaded, so a listing has it.
        found = self.root.find(self._name)
        expected = {self._path(name): file.bytes for name, file in self._files.items()}
        if found != expected:
            differing = sorted(set(found.items()) ^ set(expected.items()))
            raise CheckpointError(
                "The files of the checkpoint are not those that its clients wrote, so it was not committed: "
                f"{differing[:10]}. Received: directory='{self.root.url}'"
            )
        return dict(sorted(self._files.items()))

    def _check_index(self, content: bytes) -> None:
        """Check that TensorFlow has numbered the data files as they were uploaded."""
        sizes: dict[int, int] = {}
        with contextlib.suppress(BadIndexError):
            for place in itertools.chain(*bundle_index.places(content).values()):
                sizes[place.file] = sizes.get(place.file, 0) + place.bytes
        count = len(self._chunks)
        uploaded = {i: self._files[f"{files.DATA}{bundles.data_file(i, count)}"].bytes for i in range(count)}
        if sizes != uploaded:
            raise CheckpointError(
                f"TensorFlow numbered the data files in another order: {sizes} instead of {uploaded}. "
                f"Received: directory='{self.root.url}'"
            )

    def commit(self, content: bytes) -> None:
        self._commits = True
        # Before this object appears nothing is committed; after it, everything is.
        self.root.write(self._path(files.MANIFEST), content, publishes=True, before=self._check)
        try:
            self._check()
        except LeaseLostError:
            # The object was written long after the request, when another save may have deleted the data.
            self.root.delete([self._path(files.MANIFEST)])
            raise

    def is_committed(self) -> bool:
        return self.root.exists(self._path(files.MANIFEST))

    def is_given_up(self) -> bool:
        return not self.root.exists(self._claim)

    def end(self, *, failed: bool) -> None:
        if self._staging is not None:
            self._staging.delete()
            self._staging = None
        lease, self._lease = self._lease, None
        if lease is None:
            return
        # If the commit itself failed, the manifest may be there or not. The next save sees which.
        if failed and self._name and not self._commits:
            with contextlib.suppress(CheckpointError):
                lease.check()
                self.root.delete(list(self.root.find(self._name)))
                self.root.delete_directory(self._name)
                self.root.abort_uploads(self._name)
        lease.release()


def _part(rank: int, ending: str) -> str:
    return f"{files.part_prefix(rank)}.{ending}"


def _chunks(held: Sequence[HeldShard]) -> list[list[HeldShard]]:
    """Return the boxes in chunks of at most `CHUNK_BYTES`, or of one box."""
    found: list[list[HeldShard]] = []
    room = 0
    for shard in held:
        size = shard.box.elements * int(tf.as_dtype(shard.variable.dtype).size)
        if not found or size > room:
            found.append([])
            room = CHUNK_BYTES
        found[-1].append(shard)
        room -= size
    return found


def _packed(prefixes: Sequence[pathlib.Path]) -> bytes:
    """Return the index files of bundles in one text of bytes."""
    contents = [prefix.with_name(f"{prefix.name}.index").read_bytes() for prefix in prefixes]
    return json.dumps([len(content) for content in contents]).encode() + b"\n" + b"".join(contents)


def _unpacked(packed: bytes, directory: pathlib.Path, rank: int) -> list[pathlib.Path]:
    """Write the index files in a result of `_packed`, each with an empty data file, and return their prefixes."""
    header, _, rest = packed.partition(b"\n")
    found = []
    for number, size in enumerate(json.loads(header)):
        prefix = directory / f"chunk-{rank:05d}-{number:05d}"
        prefix.with_name(f"{prefix.name}.index").write_bytes(rest[:size])
        prefix.with_name(f"{prefix.name}{bundles.data_file(0, 1)}").touch()
        found.append(prefix)
        rest = rest[size:]
    return found


class RemoteStore(stores.Store):
    """A directory on a remote file system.

    Args:
        url: Its URL.
        options: The keyword arguments of the fsspec file system.
        writes: True to check at once that it can be written to.

    Raises:
        CheckpointStorageError: The directory cannot be used.
    """

    directory: str
    poll_seconds = 0.5
    shares_verification = True

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, writes: bool = True):
        self.root = RemoteDirectory(url, options)
        self.directory = self.root.url
        self.root.probe(f"{_PROBE}{uuid.uuid4().hex}", write=writes)
        # The checkpoint that is read: its name, the places of its boxes, the sizes of its files; blocks of its files.
        self._index: tuple[str, dict[str, list[StoredPlace]], dict[str, int]] | None = None
        self._blocks: dict[tuple[str, int], bytes] = {}

    def checkpoints(self) -> list[tuple[int, int]]:
        found = []
        for path in self.root.find():
            directory, _, name = path.rpartition("/")
            parsed = files.parse(directory)
            if name == files.MANIFEST and parsed is not None:
                found.append(parsed)
        return sorted(found)

    def place(self, name: str) -> str:
        return self.root.address(name)

    def attempt(self, step: int) -> RemoteAttempt:
        return RemoteAttempt(self.root, step)

    def remove(self, name: str) -> None:
        found = self.root.find(name)
        self.root.delete([f"{name}/{files.MANIFEST}"])
        self.root.delete(path for path in found if _OURS.fullmatch(path.rpartition("/")[2]))
        self.root.delete_directory(name)

    # --- reading

    def manifest(self, name: str, limit: int) -> bytes:
        self._index, self._blocks = None, {}
        size = self.sizes(name).get(files.MANIFEST)
        if size is None:
            raise FileNotFoundError(f"{self.place(name)}/{files.MANIFEST} does not exist")
        return self.root.read(f"{name}/{files.MANIFEST}", 0, min(size, limit))

    def sizes(self, name: str) -> dict[str, int | None]:
        return {path[len(name) + 1 :]: size for path, size in self.root.find(name).items()}

    def sha256(self, name: str, file: str) -> str:
        digest = hashlib.sha256()
        size = self.sizes(name).get(file)
        if size is None:
            raise FileNotFoundError(file)
        for begin in range(0, size, _FILE_BYTES):
            digest.update(self.root.read(f"{name}/{file}", begin, min(size, begin + _FILE_BYTES)))
        return digest.hexdigest()

    def _places(self, name: str) -> tuple[dict[str, list[StoredPlace]], dict[str, int]]:
        """Return the places of all boxes of a checkpoint, and the sizes of its files."""
        if self._index is None or self._index[0] != name:
            sizes = self.root.find(name)
            index = f"{name}/{files.DATA}.index"
            size = sizes.get(index, 0)
            if size > manifest.MAX_BYTES:
                raise BadIndexError(f"the index has {size} bytes")
            self._index = name, bundle_index.places(self.root.read(index, 0, size)), sizes
        return self._index[1], self._index[2]

    def read(self, name: str, wanted: Sequence[Wanted]) -> list[np.ndarray]:
        places, sizes = self._places(name)
        count = sum(files.DATA_FILE.fullmatch(path.rpartition("/")[2]) is not None for path in sizes)
        found: list[np.ndarray] = []
        reads: list[tuple[str, byte_ranges.Range]] = []
        for key, stored, box in wanted:
            array = np.empty(box.shape, tf.as_dtype(stored.dtype).as_numpy_dtype)
            found.append(array)
            for place in _covering(places.get(key, ()), key, stored, box):
                target = f"{name}/{files.DATA}{bundles.data_file(place.file, count)}"
                if place.begin + place.bytes > sizes.get(target, 0):
                    raise BadIndexError(f"'{target}' is shorter than its index says")
                reads += [(target, each) for each in byte_ranges.ranges(place, box, array)]

        self._fetch(reads, sizes)
        return found

    def _fetch(self, reads: Sequence[tuple[str, byte_ranges.Range]], sizes: Mapping[str, int]) -> None:
        """Read ranges, several at a time. Short ranges are read in blocks, which the next ranges may need, too."""
        short = [(target, each) for target, each in reads if each.end - each.begin <= _BLOCK_BYTES]
        needed = {
            (target, block)
            for target, each in short
            for block in range(each.begin // _BLOCK_BYTES, (each.end - 1) // _BLOCK_BYTES + 1)
        }
        blocks = {key: self._blocks[key] for key in needed if key in self._blocks}

        def read(target: str, begin: int, end: int) -> bytes:
            content = self.root.read(target, begin, end)
            if len(content) != end - begin:
                raise BadIndexError(f"'{target}' is shorter than its index says")
            return content

        def read_blocks(target: str, first: int, count: int) -> None:
            begin = first * _BLOCK_BYTES
            content = read(target, begin, min(begin + count * _BLOCK_BYTES, sizes[target]))
            for number in range(count):
                part = content[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES]
                blocks[target, first + number] = self._blocks[target, first + number] = part

        def copy(target: str, each: byte_ranges.Range) -> None:
            each.copy(read(target, each.begin, each.end))

        tasks: list[Callable[[], None]] = [
            functools.partial(read_blocks, *run) for run in _runs(sorted(needed - blocks.keys()))
        ]
        tasks += [functools.partial(copy, *each) for each in reads if each[1].end - each[1].begin > _BLOCK_BYTES]
        if len(tasks) == 1:
            tasks[0]()
        elif tasks:
            with concurrent.futures.ThreadPoolExecutor(READS) as pool:
                for _ in pool.map(lambda task: task(), tasks):
                    pass
        for target, each in short:
            first = each.begin // _BLOCK_BYTES
            last = (each.end - 1) // _BLOCK_BYTES
            content = b"".join(blocks[target, number] for number in range(first, last + 1))
            each.copy(content[each.begin - first * _BLOCK_BYTES : each.end - first * _BLOCK_BYTES])
        while len(self._blocks) > _KEPT_BLOCKS:
            del self._blocks[next(iter(self._blocks))]

    @contextlib.contextmanager
    def bundle(self, name: str, prefix: str) -> Iterator[pathlib.Path]:
        staging = Staging()
        try:
            for file, size in self.sizes(name).items():
                if file.startswith(f"{prefix}.") and files.OTHER_FILE.fullmatch(file):
                    with open(staging / file, "wb") as target:
                        for begin in range(0, size or 0, _FILE_BYTES):
                            end = min(size or 0, begin + _FILE_BYTES)
                            target.write(self.root.read(f"{name}/{file}", begin, end))
            yield staging / prefix
        finally:
            staging.delete()


def _runs(blocks: Sequence[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Return file, first block and count of each run of neighbouring blocks, of at most `_BLOCKS_READ`.

    >>> _runs([("a", 1), ("a", 2), ("a", 4), ("b", 5)])
    [('a', 1, 2), ('a', 4, 1), ('b', 5, 1)]
    """
    found: list[tuple[str, int, int]] = []
    for target, block in blocks:
        if found:
            before, first, count = found[-1]
            if before == target and first + count == block and count < _BLOCKS_READ:
                found[-1] = target, first, count + 1
                continue
        found.append((target, block, 1))
    return found


def _covering(places: Sequence[StoredPlace], key: str, stored: StoredVariable, box: Box) -> list[StoredPlace]:
    """Return the places that a box needs, after checking them against the manifest."""
    size = int(tf.as_dtype(stored.dtype).size)
    found, elements = [], 0
    for place in places:
        if not place.box.is_in(stored.shape) or place.bytes != place.box.elements * size or place.begin < 0:
            raise BadIndexError(f"a place of '{key}' does not fit the variable")
        common = byte_ranges.intersection(place.box, box)
        if common is not None:
            found.append(place)
            elements += common.elements
    if elements != box.elements:
        raise BadIndexError(f"the index has {elements} of {box.elements} elements of '{key}'")
    return found
