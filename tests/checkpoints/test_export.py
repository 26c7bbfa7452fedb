"""Keras's files are written and read one variable at a time, and never trusted."""

import io
import os
import pickle
import zipfile

import h5py
import keras
import numpy as np
import pytest

import tfshard
from resuming import X, Y, build
from traced_memory import peak

EXTENSIONS = ["keras", "weights.h5"]


def compiled(seed: int = 0, stage: int = 3, **axes: int) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = build()
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**(axes or {"batch": 4})), {".*": ()}, zero_stage=stage)
    model.compile(keras.optimizers.Adam(1e-2), "mse", strategy=strategy)
    return model


@pytest.fixture(scope="module")
def model():
    found = compiled()
    found.fit(X, Y, batch_size=8, verbose=0)
    return found


def assert_same_weights(ours: keras.Model, theirs: keras.Model) -> None:
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_plain_keras_loads_an_export_and_import_gives_it_back_on_another_mesh(extension, model, tmp_path):
    assert any("batch" in v.value.layout.storage for v in model.trainable_variables)
    path = tfshard.export(model, tmp_path / f"m.{extension}")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    if extension == "keras":
        plain = keras.models.load_model(path)
        assert type(plain) is keras.Sequential
        for ours, theirs in zip(plain.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    else:
        plain = keras.models.clone_model(model)
        plain.load_weights(path)
    assert_same_weights(plain, model)
    other = compiled(seed=1, stage=1, batch=2)
    tfshard.import_weights(other, path)
    assert_same_weights(other, model)
    assert not other.optimizer.built or int(other.optimizer.iterations.numpy()) == 0
    other.train_on_batch(X[:8], Y[:8])
    # A file of plain Keras can be imported, too.
    plain.save(tmp_path / "p.keras") if extension == "keras" else plain.save_weights(tmp_path / "p.weights.h5")
    other = compiled(seed=2)
    tfshard.import_weights(other, tmp_path / f"p.{extension}")
    assert_same_weights(other, model)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("extension", EXTENSIONS)
def test_memory_is_bounded_by_the_largest_variable(extension, tmp_path):
    keras.backend.clear_session()
    layers = [keras.layers.Dense(512) for _ in range(16)]
    model = tfshard.Sequential([keras.Input((512,)), *layers])
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    largest = max(v.numpy().nbytes for v in model.variables)
    assert sum(v.numpy().nbytes for v in model.variables) > 15 * largest

    path = tmp_path / f"m.{extension}"
    tfshard.export(model, tmp_path / f"first.{extension}")  # Modules are imported before the measurement.
    assert peak(lambda: tfshard.export(model, path)) < 3 * largest
    tfshard.import_weights(model, path)
    assert peak(lambda: tfshard.import_weights(model, path)) < 5 * largest


def test_an_export_replaces_a_file_at_once_or_not_at_all(model, tmp_path, monkeypatch):
    path = tmp_path / "m.keras"
    path.write_bytes(b"before")
    with monkeypatch.context() as patch:

        def full(*args):
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises(tfshard.errors.CheckpointError, match="could not be written.*No space left"):
            tfshard.export(model, path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.keras"] and path.read_bytes() == b"before"


def test_wrong_arguments_are_refused(model, tmp_path):
    for call, message in (
        (lambda: tfshard.export(model, tmp_path / "m.h5"), "must end in"),
        (lambda: tfshard.export(model, 3), "must end in"),
        (lambda: tfshard.export(keras.Sequential([keras.layers.Dense(2)]), tmp_path / "m.keras"), "that is built"),
        (lambda: tfshard.import_weights(model, tmp_path / "absent.keras"), "file does not exist"),
        (lambda: tfshard.import_weights(model, tmp_path / "absent.weights.h5"), "file does not exist"),
        (lambda: tfshard.export(model, tmp_path / "absent" / "m.keras"), "could not be written"),
    ):
        with pytest.raises(tfshard.errors.CheckpointError, match=message):
            call()


@pytest.mark.parametrize(
    "name, lines",
    [
        (
            "m.weights.h5",
            [
                "'layers/dense/vars/0' (sequential/dense/kernel) has shape=(13, 17) in the file and "
                "(13, 16) in the model",
                "'layers/dense_2/vars/1' (sequential/dense_2/bias) of shape=(3,) is not in the file",
                "'layers/batch_normalization/vars/0' of shape=(17,) is not in the model",
            ],
        ),
        (
            "m.safetensors",
            [
                "'sequential/dense/kernel' has shape=(13, 17) in the file and (13, 16) in the model",
                "'sequential/dense_2/bias' of shape=(3,) is not in the file",
                "'sequential/batch_normalization/gamma' of shape=(17,) is not in the model",
            ],
        ),
    ],
)
def test_every_mismatch_is_named_at_once_and_nothing_is_changed(name, lines, model, tmp_path):
    path = tfshard.export(model, tmp_path / name)
    keras.backend.clear_session()
    other = keras.Sequential([keras.Input((13,)), keras.layers.Dense(16), keras.layers.Dense(3), keras.layers.Dense(3)])
    before = other.get_weights()
    with pytest.raises(tfshard.errors.CheckpointMismatchError) as caught:
        tfshard.import_weights(other, path)
    for line in lines:
        assert line in str(caught.value)
    for ours, expected in zip(other.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, expected)


# --- hostile files -------------------------------------------------------------------------------------


class Payload:
    """Creates a directory when it is unpickled."""

    def __init__(self, victim):
        self.victim = str(victim)

    def __reduce__(self):
        return (os.mkdir, (self.victim,))


def rewritten(path, edit) -> None:
    """Rewrite a `.keras` archive: `edit` gets its members as a dict. Values may be arguments of `ZipFile.writestr`."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    edit(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            if isinstance(content, bytes):
                archive.writestr(name, content)
            else:
                archive.writestr(*content)


def weights(edit):
    """Return an edit that changes the weights file in the archive."""

    def change(members):
        buffer = io.BytesIO(members["model.weights.h5"])
        with h5py.File(buffer, "r+") as file:
            edit(file)
        members["model.weights.h5"] = buffer.getvalue()

    return change


def link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("assets/link")
    info.external_attr = 0o120777 << 16
    return info


def shape_bomb(file):
    del file["layers/dense/vars/0"]
    file.create_dataset("layers/dense/vars/0", shape=(1 << 20, 1 << 20), dtype="f4", chunks=(1, 1 << 20))


def compressed(file):
    del file["layers/dense/vars/0"]
    options = {"maxshape": (None, None), "chunks": (1 << 12, 1 << 12), "compression": "gzip"}
    file.create_dataset("layers/dense/vars/0", data=np.zeros((13, 17), "f4"), **options)


def unwritten(file):
    del file["layers/dense/vars/0"]
    file.create_dataset("layers/dense/vars/0", shape=(13, 17), dtype="f4")


def external(file):
    del file["layers/dense/vars/0"]
    file.create_dataset("layers/dense/vars/0", (13, 17), "f4", external=[("/etc/passwd", 0, 884)])


def soft_link(file):
    del file["layers/dense/vars/0"]
    file["layers/dense/vars/0"] = h5py.SoftLink("/layers/dense_1/vars/0")


def external_link(file):
    del file["layers/dense/vars/0"]
    file["layers/dense/vars/0"] = h5py.ExternalLink("/etc/passwd", "/x")


def strings(file):
    del file["layers/dense/vars/0"]
    file.create_dataset("layers/dense/vars/0", data=np.array([b"a"] * 3, object), dtype=h5py.string_dtype())


def cycle(file):
    file["layers/again"] = file["layers"]


def bomb(members):
    members["model.weights.h5"] = ("model.weights.h5", b"\0" * (1 << 26), zipfile.ZIP_DEFLATED)


HOSTILE = {
    "path traversal": lambda members: members.update({"../escaped": b"x"}),
    "absolute path": lambda members: members.update({"/tmp/escaped": b"x"}),
    "windows path": lambda members: members.update({"..\\escaped": b"x"}),
    "symlink": lambda members: members.update(link=(link(), "/etc/passwd")),
    "archive bomb": bomb,
    "no weights": lambda members: members.pop("model.weights.h5"),
    "pickle instead of weights": lambda members: members.update(
        {"model.weights.h5": pickle.dumps(Payload("unpickled"))}
    ),
    "shape bomb": weights(shape_bomb),
    "chunk bomb": weights(compressed),
    "unwritten data": weights(unwritten),
    "external data": weights(external),
    "soft link": weights(soft_link),
    "external link": weights(external_link),
    "strings": weights(strings),
    "cycle": weights(cycle),
    "truncated weights": lambda members: members.update({"model.weights.h5": members["model.weights.h5"][:3000]}),
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_archive_is_refused_before_a_variable_changes(attack, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "in"
    place.mkdir()
    path = tfshard.export(model, place / "m.keras")
    rewritten(path, HOSTILE[attack])
    before = model.get_weights()
    with pytest.raises(tfshard.errors.CheckpointCorruptError):
        tfshard.import_weights(model, path)
    for ours, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "m.keras"]


def test_a_damaged_archive_is_refused(model, tmp_path):
    path = tfshard.export(model, tmp_path / "m.keras")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(tfshard.errors.CheckpointCorruptError):
        tfshard.import_weights(model, path)
    path.write_bytes(content[:-1000])
    with pytest.raises(tfshard.errors.CheckpointCorruptError):
        tfshard.import_weights(model, path)


def test_nothing_in_an_archive_is_run(model, tmp_path, monkeypatch):
    """The archive has fitting weights, but also a Lambda layer that would run on loading, and a pickle."""
    monkeypatch.chdir(tmp_path)
    path = tfshard.export(model, tmp_path / "m.keras")
    lambda_model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Lambda(lambda x: __import__("os").mkdir("ran") or x)]
    )
    (tmp_path / "ran").rmdir()
    config = lambda_model.to_json()
    assert "__lambda__" in config
    rewritten(
        path,
        lambda members: members.update({"config.json": config.encode(), "state.pkl": pickle.dumps(Payload("ran"))}),
    )
    other = compiled(seed=3)
    tfshard.import_weights(other, path)
    assert_same_weights(other, model)
    assert not (tmp_path / "ran").exists()
