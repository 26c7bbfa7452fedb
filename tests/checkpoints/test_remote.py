"""Checkpoints on remote file systems: in memory, and on a local S3 server behind a proxy that injects faults."""

import collections
import functools
import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid

import fsspec
import keras
import numpy as np
import pytest
import tensorflow as tf
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from test_resharding import BY_NAME, EVEN_LAYOUTS, LAYOUTS, cycle

import s3_server
import sweeps
import tfshard
from fault_proxy import control
from resuming import assert_same_bits, drawn, fill, filled, script, values
from tfshard.checkpoints import bundle_index, byte_ranges, files, leases, remote_files, remote_store, staging
from tfshard.checkpoints.bundle_index import BadIndexError, Place
from tfshard.checkpoints.leases import Lease
from tfshard.checkpoints.remote_files import RemoteDirectory
from tfshard.errors import CheckpointCorruptError, CheckpointError, CheckpointStorageError
from tfshard.layouts.boxes import Box


@pytest.fixture
def url():
    """A new directory in memory."""
    yield f"memory://{uuid.uuid4().hex}/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def server():
    with s3_server.running() as found:
        yield found


@pytest.fixture
def bucket(server):
    """A new directory on the S3 server, and the options with which the proxy is used."""
    control(server.doors[0])
    return f"s3://{s3_server.BUCKET}/{uuid.uuid4().hex}", server.options(0)


@pytest.fixture
def quick(monkeypatch):
    """Short times for leases and retries."""
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.6)
    monkeypatch.setattr(leases, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(remote_files, "RETRY_SECONDS", 0.4)
    monkeypatch.setattr(remote_files, "_PROBE_SECONDS", 0.4)
    monkeypatch.setattr(remote_files, "_FIRST_PAUSE", 0.05)


# --- saving and restoring


def test_a_run_that_resumes_from_a_remote_directory_has_the_bits_of_one_that_never_stopped(url):
    whole = script("tf.data")
    stopped = script("tf.data", url, stop_after=4)
    assert tfshard.CheckpointManager(url).steps(), "premise: it was saved"
    resumed = script("tf.data", url)
    assert 0 < len(resumed.losses) < len(whole.losses), "premise: it did not begin again"
    assert_same_bits(resumed.values, whole.values)
    assert stopped.losses + resumed.losses[-(len(whole.losses) - len(stopped.losses)) :] == whole.losses


@functools.cache
def of_layout(name: str) -> keras.Model:
    return filled(**BY_NAME[name])


def assert_reshards(source: str, target: str, manager: tfshard.CheckpointManager) -> None:
    fill(of_layout(source), 1)
    manager.save(of_layout(source), 6)
    fill(of_layout(target), 2)
    assert manager.restore(of_layout(target)).step == 6
    assert_same_bits(values(of_layout(target)), drawn(of_layout(target), 1))


PAIRS = [*cycle(LAYOUTS, 1), *cycle(EVEN_LAYOUTS, 7)]


@sweeps.table("remote checkpoints from layout to layout", ("source", "target"), PAIRS, sample=2)
def test_a_layout_restores_bit_for_bit_in_another_from_a_real_server(source, target, bucket, monkeypatch):
    """27 pairs with TFSHARD_SWEEP=1."""
    monkeypatch.setattr(remote_store, "CHUNK_BYTES", 1000)
    url, options = bucket
    assert_reshards(source, target, tfshard.CheckpointManager(url, storage_options=options))


def test_a_remote_checkpoint_is_a_local_one_and_the_other_way_round(url, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_store, "CHUNK_BYTES", 1000)
    model = filled(stage=3)
    place = tfshard.CheckpointManager(url).save(model, 6)
    assert place == f"{url}/step-00000006"
    fsspec.filesystem("memory").get(place, str(tmp_path / "step-00000006"), recursive=True)
    assert len(list((tmp_path / "step-00000006").glob("data.data-*"))) > 2, "premise: several data files"
    reader = tf.train.load_checkpoint(str(tmp_path / "step-00000006" / "data"))
    for key, value in values(model).items():
        np.testing.assert_array_equal(reader.get_tensor(key), value)
    fill(model, 2)
    tfshard.CheckpointManager(tmp_path).restore(model)
    assert_same_bits(values(model), drawn(model, 1))
    fill(model, 3)
    local = tfshard.CheckpointManager(tmp_path).save(model, 7)
    fsspec.filesystem("memory").put(str(local), f"{url}/step-00000007", recursive=True)
    fill(model, 2)
    tfshard.CheckpointManager(url).restore(model, 7)
    assert_same_bits(values(model), drawn(model, 3))


def test_local_files_are_few_and_are_deleted(url, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_store, "CHUNK_BYTES", 500)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = filled(stage=3)
    largest = []
    upload = RemoteDirectory.upload

    def watched(self, name, path):
        largest.append(sum(each.stat().st_size for each in tmp_path.rglob("*.data-*")))
        return upload(self, name, path)

    monkeypatch.setattr(RemoteDirectory, "upload", watched)
    manager = tfshard.CheckpointManager(url)
    manager.save(model, 1)
    held = sum(value.nbytes for value in values(model).values())
    assert held > 3000, "premise"
    box = max(variable.nbytes for variable in values(model).values())
    assert max(largest) <= (remote_store.UPLOADS + 1) * max(500, box)
    assert not list(tmp_path.glob("tfshard-staging-*"))
    # A killed process leaves its directory. The next save deletes it, but not that of a process that lives.
    dead = subprocess.run(
        [sys.executable, "-c", "import os, fcntl, sys, pathlib; d = pathlib.Path(sys.argv[1]); d.mkdir();"
         "f = os.open(d / 'lock', os.O_CREAT | os.O_RDWR); fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), 9)",
         str(tmp_path / "tfshard-staging-dead")],
    )  # fmt: skip
    assert dead.returncode == -9
    alive = staging.Staging()
    assert not (tmp_path / "tfshard-staging-dead").exists()
    manager.save(model, 2)
    assert alive.directory.exists()
    alive.delete()


def test_retention_deletes_the_manifest_first(url, monkeypatch):
    model, manager = filled(), tfshard.CheckpointManager(url, keep=1)
    manager.save(model, 1)
    deleted = []
    delete = MemoryFileSystem.rm_file
    monkeypatch.setattr(MemoryFileSystem, "rm_file", lambda fs, path: (deleted.append(path), delete(fs, path)))
    manager.save(model, 2)
    ours = [path for path in deleted if "step-00000001" in path]
    assert len(ours) >= 3
    assert ours[0].endswith(files.MANIFEST)
    assert manager.steps() == [2]


# --- reading


def test_each_device_reads_only_the_bytes_that_it_needs(url, monkeypatch):
    monkeypatch.setattr(remote_store, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(byte_ranges, "_GAP_BYTES", 64)
    model = filled(stage=3)
    manager = tfshard.CheckpointManager(url)
    manager.save(model, 1)
    checkpoint = manager.open()
    key = max((key for key in values(model) if key.endswith("kernel")), key=lambda key: values(model)[key].size)
    expected = values(model)[key]
    read: list[int] = []
    real = RemoteDirectory.read

    def counted(self, name, begin=None, end=None):
        if ".data-" in name:
            read.append(end - begin)
        return real(self, name, begin, end)

    monkeypatch.setattr(RemoteDirectory, "read", counted)
    box = Box(offset=(2, 0), shape=(3, expected.shape[1]))
    np.testing.assert_array_equal(checkpoint.read(key, box), expected[2:5])
    assert 0 < sum(read) <= 3 * expected.shape[1] * expected.itemsize + 4 * 64 < expected.nbytes
    before = sum(read)
    np.testing.assert_array_equal(checkpoint.read(key, box), expected[2:5])
    assert sum(read) - before <= before, "blocks are kept"


def test_ranges_contain_every_element_of_a_box_once():
    rs = np.random.RandomState(0)
    for _ in range(200):
        dims = rs.randint(1, 4)
        shape = tuple(int(n) for n in rs.randint(1, 9, dims))

        def random_box(shape):
            begin = [int(rs.randint(0, size)) for size in shape]
            return Box(
                offset=tuple(begin),
                shape=tuple(int(rs.randint(1, size - b + 1)) for size, b in zip(shape, begin, strict=True)),
            )

        stored, wanted = random_box(shape), random_box(shape)
        full = rs.rand(*shape).astype("float32")
        content = b"x" * 7 + np.ascontiguousarray(full[stored.slices]).tobytes()
        place = Place(box=stored, file=0, begin=7, bytes=len(content) - 7)
        array = np.full(wanted.shape, -1, "float32")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(byte_ranges, "_GAP_BYTES", int(rs.choice([4, 16, 1000])))
            patch.setattr(byte_ranges, "_RANGE_BYTES", int(rs.choice([4, 32, 1000])))
            for each in byte_ranges.ranges(place, wanted, array):
                assert 7 <= each.begin < each.end <= len(content)
                each.copy(content[each.begin : each.end])
        expected = np.full(shape, -1, "float32")
        expected[stored.slices] = full[stored.slices]
        np.testing.assert_array_equal(array, expected[wanted.slices])


def test_the_index_of_tensorflow_is_read(tmp_path):
    """Slices at offsets of each length of TensorFlow's code for numbers, many names, and odd names."""
    names, specs, tensors, expected = [], [], [], {}
    for offset in (0, 1, 63, 64, 65, 8191, 8192, 1 << 20, 1 << 27, 1 << 34, 1 << 41, 1 << 50):
        name = f"a/{offset}/\xe9\x00b"
        names.append(name)
        specs.append(f"{offset + 5} 3 {offset},2:0,3")
        tensors.append(tf.ones((2, 3)))
        expected[name] = Box(offset=(offset, 0), shape=(2, 3))
    for number in range(500):
        names.append(f"layer/{number}/kernel")
        specs.append("")
        tensors.append(tf.ones((number % 3, 2)))
        expected[names[-1]] = Box(offset=(0, 0), shape=(number % 3, 2))
    tf.raw_ops.SaveV2(prefix=str(tmp_path / "data"), tensor_names=names, shape_and_slices=specs, tensors=tensors)
    content = (tmp_path / "data.index").read_bytes()
    found = bundle_index.places(content)
    assert {name: [place.box for place in places] for name, places in found.items()} == {
        name: [box] for name, box in expected.items()
    }
    begins = sorted((place.begin, place.bytes) for places in found.values() for place in places if place.bytes)
    assert all(begin + size == after for (begin, size), (after, _) in zip(begins, begins[1:], strict=False))
    # Damage gives an error or other places, but no crash and no other error. The manifest has a checksum of the index.
    draws = random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        try:
            bundle_index.places(bytes(damaged[: draws.choice([len(content), draws.randrange(len(content))])]))
        except BadIndexError:
            pass


@pytest.mark.parametrize("what", ["data", "index", "manifest", "missing", "longer", "foreign"])
def test_damage_of_remote_files_is_found_before_a_variable_changes(what, url):
    model, manager = filled(), tfshard.CheckpointManager(url)
    manager.save(model, 1)
    root = RemoteDirectory(url)
    name = {"index": "data.index", "manifest": files.MANIFEST}.get(what, "data.data-00000-of-00001")
    path = f"step-00000001/{name}"
    content = bytearray(root.read(path))
    content[len(content) // 2] ^= 1
    if what == "missing":
        root.delete([path])
    else:
        root.write("step-00000001/other" if what == "foreign" else path, bytes(content) + b"x" * (what == "longer"))
    fill(model, 2)
    with pytest.raises(CheckpointCorruptError, match=r"step-00000001"):
        manager.restore(model)
    assert_same_bits(values(model), drawn(model, 2))


# --- one writer at a time


def claim(root: RemoteDirectory, *, process: str, attempt: str = "step-00000009", renewals: int = 0) -> str:
    name = f"{leases.DIRECTORY}/other.json"
    root.write(name, json.dumps({"attempt": attempt, "renewals": renewals, "process": process}).encode())
    return name


def test_a_second_writer_is_an_error_and_the_first_is_not_disturbed(url):
    first, second = Lease(RemoteDirectory(url)), Lease(RemoteDirectory(url))
    first.acquire()
    first.announce("step-00000001")
    with pytest.raises(CheckpointError, match="Another process, or another CheckpointManager, is saving"):
        second.acquire()
    first.check()
    first.release()
    second.acquire()
    second.release()
    assert not RemoteDirectory(url).find()


def test_a_writer_on_another_host_that_renews_its_claim_is_left_alone(url, quick):
    root = RemoteDirectory(url)
    claim(root, process="another host/1/2")
    stop = threading.Event()

    def renew() -> None:
        number = 0
        while not stop.wait(0.05):
            claim(root, process="another host/1/2", renewals=(number := number + 1))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        root.write("step-00000009/data.data-00000-of-00001", b"live")
        with pytest.raises(CheckpointError, match="Another process"):
            tfshard.CheckpointManager(url).save(filled(), 1)
        assert root.read("step-00000009/data.data-00000-of-00001") == b"live"
    finally:
        stop.set()
        thread.join()


def test_what_a_dead_writer_left_is_deleted_and_its_name_is_not_used_again(url, quick):
    root, model = RemoteDirectory(url), filled()
    manager = tfshard.CheckpointManager(url)
    manager.save(model, 1)
    for process in ("another host/1/2", f"{leases._host()}/{dead_process()}/123"):
        claim(root, process=process, attempt="step-00000002")
        root.write("step-00000002/data.data-00001-of-00002", b"left")
        root.write("step-00000002/notes.txt", b"a user's")
        begun = time.monotonic()
        place = manager.save(model, 2)
        assert (time.monotonic() - begun > 0.5) == process.startswith("another")
        assert place == f"{url}/step-00000002.1"
        found = root.find()
        assert "step-00000002/data.data-00001-of-00002" not in found
        assert "step-00000002/notes.txt" in found
        assert not [path for path in found if path.startswith(leases.DIRECTORY)]
        root.delete([path for path in found if path.startswith("step-00000002")])


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_save_that_others_took_for_dead_does_not_commit(url, quick, monkeypatch):
    model, manager = filled(), tfshard.CheckpointManager(url)
    manager.save(model, 1)
    root = RemoteDirectory(url)
    write = RemoteDirectory.write

    def slow(self, name, content, **options):
        if name.endswith(files.MANIFEST):
            root.delete(path for path in root.find(leases.DIRECTORY))
        write(self, name, content, **options)

    monkeypatch.setattr(RemoteDirectory, "write", slow)
    with pytest.raises(leases.LeaseLostError, match="was not committed"):
        manager.save(model, 2)
    assert manager.steps() == [1]
    monkeypatch.setattr(leases, "FENCE_SECONDS", -1.0)
    monkeypatch.setattr(RemoteDirectory, "write", write)
    with pytest.raises(leases.LeaseLostError, match="could not be written to for"):
        manager.save(model, 3)
    assert manager.steps() == [1]


def test_of_many_writers_at_once_at_most_one_holds_the_lease(url, quick, monkeypatch):
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 60.0)
    holding, most, held = [], [], collections.Counter()

    def work(number: int) -> None:
        for _ in range(3):
            lease = Lease(RemoteDirectory(url))
            try:
                lease.acquire()
                lease.announce(f"step-{number:08d}")
            except CheckpointError:
                continue
            holding.append(number)
            most.append(len(holding))
            time.sleep(0.01)
            holding.remove(number)
            held["times"] += 1
            lease.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held["times"] >= 3
    assert set(most) == {1}


# --- failing networks


def refuse(monkeypatch, count: int, error: Exception, match: str = "") -> list[str]:
    """Make the first `count` changes of files with `match` in their path fail, after or before they are made."""
    failed: list[str] = []
    for name in ("pipe_file", "rm_file"):
        real = getattr(MemoryFileSystem, name)

        def call(fs, path, *args, real=real, **kwargs):
            if len(failed) < count and match in path:
                failed.append(path)
                if len(failed) % 2:
                    real(fs, path, *args, **kwargs)
                raise error
            return real(fs, path, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, call)
    return failed


def test_transient_errors_are_repeated(url, quick, monkeypatch):
    monkeypatch.setattr(remote_files, "RETRY_SECONDS", 20.0)
    model, manager = filled(), tfshard.CheckpointManager(url)
    failed = refuse(monkeypatch, 4, ConnectionResetError("peer"), match="data.")
    manager.save(model, 1)
    assert len(failed) == 4, "premise"
    fill(model, 2)
    manager.restore(model)
    assert_same_bits(values(model), drawn(model, 1))


def test_an_error_that_stays_is_named_and_what_was_committed_is_there(url, quick, monkeypatch):
    model, manager = filled(), tfshard.CheckpointManager(url)
    manager.save(model, 1)
    refuse(monkeypatch, 10**6, OSError(16, "SlowDown"), match="step-00000002/data")
    message = (
        r"The remote file system failed: writing 'step-00000002/data.data-00000-of-00001' \(\d+ bytes\), after [2-9] "
        r"tries: OSError: .*SlowDown.*check the network.*Received: 'memory://"
    )
    with pytest.raises(CheckpointStorageError, match=message):
        manager.save(model, 2)
    manager.save(model, 2, wait=False)
    with pytest.raises(CheckpointStorageError, match=message):
        manager.wait()
    monkeypatch.undo()
    assert manager.steps() == [1]
    fill(model, 2)
    manager.restore(model)
    assert_same_bits(values(model), drawn(model, 1))
    manager.save(model, 2)
    assert manager.steps() == [1, 2]


class _Answer(Exception):
    def __init__(self, **fields):
        super().__init__(str(fields))
        vars(self).update(fields)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError(), True),
        (ConnectionRefusedError(), True),
        (OSError(16, "SlowDown"), True),
        (_Answer(status=503), True),
        (_Answer(code=429), True),
        (_Answer(code="500"), True),
        (_Answer(response={"ResponseMetadata": {"HTTPStatusCode": 502}}), True),
        (_Answer(status_code=404), False),
        (_Answer(code=403), False),
        (PermissionError(13, "Forbidden"), False),
        (FileNotFoundError(), False),
        (ValueError("wrong"), False),
        (OSError(28, "No space left on device"), False),
        (type("EndpointConnectionError", (Exception,), {})(), True),
    ],
)
def test_only_errors_that_may_pass_are_repeated(error, expected):
    assert remote_files.is_transient(error) == expected
    outer = RuntimeError("outer")
    outer.__cause__ = error
    assert remote_files.is_transient(outer) == expected


@pytest.mark.parametrize("seconds", sweeps.taken("seconds of refusal", [2, 20], always=[2]))
def test_a_server_that_drops_connections_and_answers_503_delays_a_save_and_a_restore(seconds, bucket, server):
    url, options = bucket
    model = filled()
    manager = tfshard.CheckpointManager(url, storage_options=options)
    manager.save(model, 1)
    for number in (2, 3):
        fill(model, number)
        begun = time.monotonic()
        control(server.doors[0], refuse=float(seconds), drop=number == 3)
        manager.save(model, number, wait=number == 2)
        manager.wait()
        assert time.monotonic() - begun >= seconds
        fill(model, 100)
        control(server.doors[0], refuse=float(seconds), drop=number == 3)
        manager.restore(model)
        assert_same_bits(values(model), drawn(model, number))
        assert control(server.doors[0])["refused"] > 3
    assert manager.steps() == [1, 2, 3]


# --- what is refused before training starts


def test_a_missing_package_an_unknown_protocol_and_a_missing_bucket_are_named(bucket, monkeypatch):
    url, options = bucket
    with pytest.raises(CheckpointStorageError, match="fsspec knows no protocol 'nothing'"):
        tfshard.CheckpointManager("nothing://bucket/run")
    with pytest.raises(CheckpointStorageError, match="must have a protocol, a bucket"):
        tfshard.CheckpointManager("s3://")
    with pytest.raises(CheckpointStorageError, match="no chain"):
        tfshard.CheckpointManager("simplecache::s3://bucket/run")
    with pytest.raises(CheckpointStorageError, match=r"Check the URL: the bucket or the host must exist.*s3://no-such"):
        tfshard.CheckpointCallback("s3://no-such-bucket/run", every_steps=1, storage_options=options)
    with pytest.raises(CheckpointStorageError, match="Check the URL"):
        tfshard.CheckpointManager("s3://no-such-bucket/run", storage_options=options, read_only=True)
    with pytest.raises(CheckpointError, match="storage_options belong to a remote directory"):
        tfshard.CheckpointManager("run", storage_options={"key": "secret word"})
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CheckpointStorageError, match=r"not installed.*pip install 'tfshard\[gcs\]'.*gs://bucket/run"):
        tfshard.CheckpointManager("gs://bucket/run")


def test_credentials_that_are_refused_are_named(bucket, monkeypatch):
    url, options = bucket
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    without = {"client_kwargs": options["client_kwargs"], "anon": False}
    with pytest.raises(CheckpointStorageError, match="Check the credentials"):
        tfshard.CheckpointManager(url, storage_options=without)


def test_a_read_only_manager_restores_and_writes_nothing(url, monkeypatch):
    model = filled()
    tfshard.CheckpointManager(url).save(model, 1)
    for name in ("pipe_file", "rm_file", "mkdir"):
        monkeypatch.setattr(MemoryFileSystem, name, lambda *_, **__: pytest.fail("it writes"))
    reading = tfshard.CheckpointManager(url, read_only=True)
    fill(model, 2)
    reading.restore(model)
    assert_same_bits(values(model), drawn(model, 1))
    with pytest.raises(CheckpointError, match="read_only=True does not save"):
        reading.save(model, 2)


def test_file_urls_are_local_paths(tmp_path):
    manager = tfshard.CheckpointManager(f"file://{tmp_path}/run")
    assert manager.directory == tmp_path / "run"
    for call in (tfshard.export, tfshard.import_weights):
        with pytest.raises(CheckpointError, match="path must be local"):
            call(filled(), "s3://bucket/model.keras")


def test_large_files_are_uploaded_in_parts_and_unfinished_uploads_are_aborted(bucket, server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_files, "_PART_BYTES", 5 << 20)
    url, options = bucket
    root = RemoteDirectory(url, options)
    path = tmp_path / "large"
    path.write_bytes(np.random.RandomState(0).bytes(12 << 20))
    control(server.doors[0])
    assert root.upload("large", path) == 12 << 20
    assert len([each for each in control(server.doors[0])["seen"] if "partNumber" in each]) == 3
    assert root.read("large") == path.read_bytes()
    unfinished = root._fs.open(root._path("step-00000001/data"), "wb", block_size=5 << 20)
    unfinished.write(path.read_bytes())

    def uploads() -> list:
        return root._fs.call_s3("list_multipart_uploads", Bucket=s3_server.BUCKET).get("Uploads", [])

    assert len(uploads()) == 1, "premise"
    tfshard.CheckpointManager(url, storage_options=options).save(filled(), 1)
    assert not uploads()
    unfinished.closed = True


def test_a_file_system_with_directories_is_used_too(tmp_path, monkeypatch):
    """HDFS has directories. The local file system of fsspec stands for it."""

    class Directories(LocalFileSystem):
        protocol = "directories"

    fsspec.register_implementation("directories", Directories, clobber=True)
    monkeypatch.setattr(
        RemoteDirectory, "_connect", lambda self, options: (Directories(auto_mkdir=False), str(tmp_path / "a" / "run"))
    )
    model, manager = filled(), tfshard.CheckpointManager("directories://a/run", keep=1)
    for step in (1, 2):
        manager.save(model, step)
    assert [path.name for path in (tmp_path / "a" / "run").glob("step-*")] == ["step-00000002"]
    fill(model, 2)
    manager.restore(model)
    assert_same_bits(values(model), drawn(model, 1))


ENDING = """
import sys
import tfshard
from resuming import filled
tfshard.initialize(num_devices=4, device_type="CPU")
manager = tfshard.CheckpointManager(sys.argv[1])
manager.save(filled(), 1, wait=False)
print("end", flush=True)
"""


@pytest.mark.slow
def test_a_program_that_ends_waits_for_its_last_remote_checkpoint(bucket, server):
    """New connections to a host name need Python's thread pools, which end before other threads do."""
    url, _ = bucket
    environment = {**os.environ, **server.environment(0), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["AWS_ENDPOINT_URL"] = f"http://localhost:{server.doors[0]}"
    control(server.doors[0], refuse=1.0, drop=True)
    done = subprocess.run(
        [sys.executable, "-c", ENDING, url], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert tfshard.CheckpointManager(url, storage_options=server.options()).steps() == [1]
