"""Damaged and malicious checkpoints are found before a variable changes."""

import collections
import functools
import itertools
import json
import pathlib
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import tensorflow as tf

import tfshard
from resuming import X, Y, assert_same_bits, assert_unchanged, compiled, fill, filled, values
from tfshard.checkpoints import files, manifest

Files = dict[str, bytes]


def read(path: pathlib.Path) -> Files:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def write(path: pathlib.Path, wanted: Files) -> None:
    """Make a directory contain exactly the wanted files."""
    found = read(path)
    for name in found.keys() - wanted.keys():
        (path / name).unlink()
    for name, content in wanted.items():
        if found.get(name) != content:
            (path / name).write_bytes(content)


def flips(whole: Files, count: int, random: Random) -> Iterator[tuple[str, Files]]:
    """Flip single bits: in the first and last byte of each file, and in bytes spread evenly over all files."""
    total = sum(map(len, whole.values()))
    edges = [round(total * number / count) for number in range(count + 1)]
    places = {random.randrange(begin, end) for begin, end in zip(edges, edges[1:], strict=False)}
    begin = 0
    for name, content in sorted(whole.items()):
        inside = {place - begin for place in places if begin <= place < begin + len(content)}
        begin += len(content)
        for place in sorted(inside | {0, len(content) - 1}):
            damaged = bytearray(content)
            damaged[place] ^= 1 << random.randrange(8)
            yield f"a bit of byte {place} of {name}", {**whole, name: bytes(damaged)}


def files_that_are_wrong(whole: Files, random: Random) -> Iterator[tuple[str, Files]]:
    """Yield each file missing, cut, longer, or with zeros; each pair of files swapped; and foreign files."""
    for name, content in sorted(whole.items()):
        yield f"{name} is missing", {other: whole[other] for other in whole if other != name}
        for size in {0, random.randrange(1, len(content) - 1), len(content) - 1}:
            yield f"{name} is cut to {size}", {**whole, name: content[:size]}
        for more in (b"\0", bytes(random.randrange(256) for _ in range(9))):
            yield f"{name} is longer by {more!r}", {**whole, name: content + more}
        at = random.choice([place for place, byte in enumerate(content) if byte])
        zeros = content[:at] + bytes(len(content[at : at + 16])) + content[at + 16 :]
        yield f"{name} has zeros from {at}", {**whole, name: zeros}
    for one, other in itertools.combinations(sorted(whole), 2):
        yield f"{one} and {other} are exchanged", {**whole, one: whole[other], other: whole[one]}
    for number in range(1, 4):
        name = f"data.data-0000{number}-of-00001"
        yield f"{name} is added", {**whole, name: b"\0"}


def edited(value: object) -> object:
    """Return another value of the same type."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value ^ 1
    return value + "x" if isinstance(value, str) else [*value, 1]


def fields(data: object, above: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every field of a manifest, including the fields of local shards."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from fields(value, (*above, key))


def manifests_that_were_edited(whole: Files, random: Random) -> Iterator[tuple[str, Files]]:
    """Edit each field once, or one field of each kind.

    Yields edited manifests with the old and with a new signature.
    """
    text = json.loads(whole[files.MANIFEST])
    kinds = collections.defaultdict(list)
    for path in fields(text):
        variable = len(path) > 2 and path[1] == "variables"
        kinds[("variables", *path[3:4], len(path)) if variable else path].append(path)

    def changed(path: tuple, signed: bool) -> Files:
        edit = json.loads(whole[files.MANIFEST])
        owner = functools.reduce(lambda data, key: data[key], path[:-1], edit)
        if isinstance(owner[path[-1]], dict):
            del owner[path[-1]]
        else:
            owner[path[-1]] = edited(owner[path[-1]])
        if signed:
            edit["sha256"] = manifest._digest(edit["content"])
        return {**whole, files.MANIFEST: manifest._canonical(edit)}

    for paths in kinds.values():
        path = random.choice(paths)
        yield f"the manifest's {path} is edited", changed(path, False)
    # The fields that restore uses. The other fields of a manifest are only information.
    for key in sorted(text["content"]["variables"]):
        path = ("content", "variables", key, "pieces", 0, 2)
        yield f"the manifest's {path} is edited and signed", changed(path, True)
    for path in (("content", "step"), ("content", "generation"), *(p for p in kinds if p[1:2] == ("files",) and p[3:])):
        yield f"the manifest's {path} is edited and signed", changed(path, True)
    # Shards of one shape: only their values differ.
    edit = json.loads(whole[files.MANIFEST])
    variables = edit["content"]["variables"]
    one, other = (variables[f"optimizer/sequential_dense_kernel_{slot}"] for slot in ("momentum", "velocity"))
    one["pieces"], other["pieces"] = other["pieces"], one["pieces"]
    edit["sha256"] = manifest._digest(edit["content"])
    yield "pieces are exchanged", {**whole, files.MANIFEST: manifest._canonical(edit)}


def test_200_corruptions_are_found_before_a_variable_changes_and_training_goes_on(tmp_path):
    """The corruptions cover each file, bytes of all regions, and each field of the manifest. No two are equal."""
    model = filled()
    manager = tfshard.CheckpointManager(tmp_path)
    path = manager.save(model, 6, iterator=iter(tf.data.Dataset.range(9).batch(2)))
    whole, saved = read(path), values(model)
    assert len(whole) == 5
    random = Random(0)
    bits = list(flips(whole, 120, random))
    corruptions = [*bits, *files_that_are_wrong(whole, random), *manifests_that_were_edited(whole, random)]
    print(f"{len(corruptions)} corruptions, {len(bits)} of one bit")
    assert len(corruptions) == len({frozenset(damaged.items()) for _, damaged in corruptions}) >= 200
    assert whole not in [damaged for _, damaged in corruptions]
    per_file = collections.Counter(how.split()[-1] for how, _ in bits)
    total = sum(map(len, whole.values()))
    for name, content in whole.items():
        assert abs(per_file[name] - 120 * len(content) / total) <= 3.0, name
    fill(model, 2)
    expected = values(model)
    model.optimizer.learning_rate = expected["optimizer/learning_rate"] = np.float32(0.01)
    for number, (how, damaged) in enumerate(corruptions):
        write(path, damaged)
        with pytest.raises(tfshard.errors.CheckpointCorruptError):
            manager.restore(model)
            pytest.fail(how)
        if number % 50 == 0:
            assert_same_bits(values(model), expected)
    assert_same_bits(values(model), expected)
    assert np.isfinite(model.train_on_batch(X[:8], Y[:8]))
    write(path, whole)
    manager.restore(model)
    assert_unchanged(model, saved)
    assert np.isfinite(model.train_on_batch(X[:8], Y[:8]))


def test_a_corrupt_checkpoint_is_described_piece_by_piece(tmp_path):
    model = filled(stage=3)
    manager = tfshard.CheckpointManager(tmp_path)
    path = manager.save(model, 6)
    data = path / "data.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[10] ^= 1
    content[-10] ^= 1
    data.write_bytes(content)
    with pytest.raises(tfshard.errors.CheckpointCorruptError) as caught:
        manager.restore(model)
    assert str(caught.value).count("the shard of '") == 2
    with pytest.raises(tfshard.errors.CheckpointCorruptError):
        manager.open().verify()


@pytest.mark.parametrize("what", ["directory", "file", "manifest"])
def test_links_are_not_followed(what, tmp_path):
    model = filled()
    manager = tfshard.CheckpointManager(tmp_path / "run")
    path = manager.save(model, 6)
    elsewhere = tmp_path / "elsewhere"
    target = {"directory": path, "file": path / "data.index", "manifest": path / files.MANIFEST}[what]
    target.rename(elsewhere)
    target.symlink_to(elsewhere)
    with pytest.raises(tfshard.errors.CheckpointCorruptError, match="link|regular|symbolic"):
        manager.restore(model)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[" * 100_000, b'{"content":' + b"9" * 100_000 + b"}", b"\xff\xfe", b'"' + b"a" * (1 << 26) + b'"'],
    ids=["empty", "no fields", "deep", "long number", "not text", "oversized"],
)
def test_a_hostile_manifest_is_refused(content, tmp_path):
    model = compiled()
    manager = tfshard.CheckpointManager(tmp_path)
    path = manager.save(model, 6)
    (path / files.MANIFEST).write_bytes(content)
    with pytest.raises(tfshard.errors.CheckpointCorruptError, match="manifest"):
        manager.restore(model)


def test_a_signed_manifest_cannot_lead_out_or_claim_more_than_there_is(tmp_path):
    """Anyone who edits a manifest can compute its checksum."""
    model = compiled()
    manager = tfshard.CheckpointManager(tmp_path)
    path = manager.save(model, 6)
    whole = (path / files.MANIFEST).read_bytes()

    def outside(content):
        content["files"]["../../victim"] = {"bytes": 1, "sha256": "a"}

    def absolute(content):
        content["files"]["/etc/passwd"] = {"bytes": 1, "sha256": "a"}

    def pickle(content):
        content["files"]["state.pkl"] = {"bytes": 1, "sha256": "a"}

    def bomb(content):
        variable = content["variables"]["model/sequential/dense/kernel"]
        variable["shape"] = [1 << 30, 1 << 20]
        variable["pieces"] = [[[0, 0], [1 << 30, 1 << 20], 1]]

    def negative(content):
        content["variables"]["model/sequential/dense/kernel"]["pieces"][0][0] = [-1, 0]

    def dtype(content):
        content["variables"]["model/sequential/dense/kernel"]["dtype"] = "variant"

    def later(content):
        content["version"] = 99

    for edit in (outside, absolute, pickle, bomb, negative, dtype, later):
        text = json.loads(whole)
        edit(text["content"])
        text["sha256"] = manifest._digest(text["content"])
        (path / files.MANIFEST).write_bytes(manifest._canonical(text))
        with pytest.raises(tfshard.errors.CheckpointError):
            manager.restore(model)
            pytest.fail(edit.__name__)
