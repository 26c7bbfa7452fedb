"""Weights in safetensors files and in several HDF5 files: written and read a variable at a time, and never trusted."""

import json
import os
import struct
import sys

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tfshard
from resuming import X, Y, build
from tfshard.checkpoints import safetensors_files
from traced_memory import peak

KIB = 1 / 2**20  # In units of 2**30 bytes.


def compiled(seed: int = 0, stage: int = 3, clear: bool = True, **axes: int) -> keras.Model:
    if clear:
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
    assert any("batch" in v.value.layout.storage for v in found.trainable_variables)
    return found


def assert_same_weights(ours: keras.Model, theirs: keras.Model) -> None:
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def zeroed(model: keras.Model) -> keras.Model:
    model.set_weights([np.zeros_like(each) for each in model.get_weights()])
    return model


def test_a_file_has_the_weights_under_their_paths(model, tmp_path):
    path = tfshard.export(model, tmp_path / "m.safetensors")
    assert path == tmp_path / "m.safetensors" and os.listdir(tmp_path) == ["m.safetensors"]
    found = load_file(path)
    expected = {v.path: v.numpy() for v in model.variables if "seed" not in v.path}
    assert len(expected) > 4 and found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].tobytes() == value.tobytes()


@pytest.mark.parametrize("ending", [".safetensors", ".weights.json"])
def test_several_files_go_into_another_mesh_a_plain_model_and_a_second_model(ending, model, tmp_path):
    path = tfshard.export(model, tmp_path / f"m{ending}", max_shard_size=1.2 * KIB)
    index = json.loads(path.read_text())
    files = {name for each in index["weight_map"].values() for name in ([each] if isinstance(each, str) else each)}
    assert len(files) > 1 and {path.name, *files} == set(os.listdir(tmp_path))
    # The second model of the process: Keras gives its layers other numbers.
    for other in (compiled(seed=1, stage=1, clear=False, batch=2), build()):
        zeroed(other)
        tfshard.import_weights(other, path)
        assert_same_weights(other, model)
    if ending == ".weights.json":
        plain = zeroed(build())
        plain.load_weights(path)
        assert_same_weights(plain, model)


def test_a_sharded_model_saves_and_loads_kerass_files_with_a_maximum_size(model, tmp_path):
    plain = zeroed(build())
    plain.set_weights(model.get_weights())
    model.save_weights(tmp_path / "ours.weights.json", max_shard_size=2 * KIB)
    plain.save_weights(tmp_path / "theirs.weights.json", max_shard_size=2 * KIB)
    assert len(os.listdir(tmp_path)) > 4
    loaded = zeroed(build())
    loaded.load_weights(tmp_path / "ours.weights.json")
    assert_same_weights(loaded, model)
    with tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), {".*": ()}).scope():
        other = build()
    other.load_weights(tmp_path / "theirs.weights.json")
    assert any("batch" in v.value.layout.storage for v in other.trainable_variables)
    assert_same_weights(other, model)


def test_every_dtype_of_keras_comes_back_bit_for_bit(tmp_path):
    class Holder(keras.layers.Layer):
        def build(self, shape):
            dtypes = ("bfloat16", "float16", "float32", "uint8", "int32", "bool", "uint32", "int8", "float64")
            self.kept = [
                self.add_weight(name=f"of_{dtype}", shape=(3, 2), dtype=dtype, initializer="zeros", trainable=False)
                for dtype in dtypes
            ]
            self.scalar = self.add_weight(name="scalar", shape=(), dtype="float32")

        def call(self, x):
            return x

    def made() -> keras.Model:
        return keras.Sequential([keras.Input((2,)), Holder(name="holder")], name="all")

    model, other = made(), made()
    random = np.random.RandomState(0)
    for variable in model.variables:
        values = random.randint(0, 2, (*variable.shape, 1), np.uint8)
        variable.assign(keras.ops.cast(values[..., 0], variable.dtype))
    model.compile("sgd", "mse")
    path = tfshard.export(model, tmp_path / "m.safetensors")
    tfshard.import_weights(other, path)
    for ours, theirs in zip(other.variables, model.variables, strict=True):
        assert ours.dtype == theirs.dtype
        assert keras.ops.convert_to_numpy(ours).tobytes() == keras.ops.convert_to_numpy(theirs).tobytes(), ours.path


def test_adapters_are_merged_under_the_names_of_their_kernels(tmp_path):
    def layers() -> keras.Model:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, name="up"), keras.layers.Dense(4, use_bias=False, name="down")]
        )

    plain, model = layers(), layers()
    model.layers[0].enable_lora(2)
    model.layers[1].enable_lora(2)
    tfshard.as_distributed(model)
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), {".*": ()}))
    for layer in model.layers:
        layer.lora_kernel_b.assign(np.ones(layer.lora_kernel_b.shape))
    path = tfshard.export(model, tmp_path / "m.safetensors")
    assert load_file(path).keys() == {variable.path for variable in plain.variables}
    tfshard.import_weights(plain, path)
    for ours, theirs in zip(plain.layers, model.layers, strict=True):
        np.testing.assert_allclose(ours.kernel.numpy(), np.array(theirs.kernel), rtol=1e-6)


def test_a_bfloat16_file_goes_into_a_float32_model_as_keras_casts(tmp_path):
    keras.backend.clear_session()
    model = tfshard.Sequential([keras.Input((512,)), keras.layers.Dense(640, name="large", use_bias=False)])
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    assert model.layers[0].kernel.value.layout.storage == ("batch", None)
    random = np.random.RandomState(0).normal(size=(512, 640)).astype("float32")
    small = keras.ops.convert_to_numpy(keras.ops.cast(random, "bfloat16"))
    save_file({"sequential/large/kernel": small}, tmp_path / "m.safetensors")
    tfshard.import_weights(model, tmp_path / "m.safetensors")
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), small.astype("float32"))


@pytest.mark.parametrize("ending", [".safetensors", ".weights.json"])
def test_memory_is_bounded_by_the_largest_variable(ending, tmp_path):
    keras.backend.clear_session()
    model = tfshard.Sequential([keras.Input((512,)), *(keras.layers.Dense(512) for _ in range(16))])
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    largest = max(v.numpy().nbytes for v in model.variables)
    assert sum(v.numpy().nbytes for v in model.variables) > 15 * largest

    size = 4 * largest / 2**30
    path = tfshard.export(model, tmp_path / f"first{ending}", max_shard_size=size)  # Imports modules.
    assert peak(lambda: tfshard.export(model, tmp_path / f"m{ending}", max_shard_size=size)) < 3 * largest
    # Each device copies its own shard of a memory map.
    tfshard.import_weights(model, path)
    assert peak(lambda: tfshard.import_weights(model, path)) < (1 if ending == ".safetensors" else 5) * largest


def test_an_export_replaces_all_files_of_the_one_before(model, tmp_path):
    for size in (0.5 * KIB, 1.2 * KIB, None, 1.2 * KIB):
        path = tfshard.export(model, tmp_path / "m.safetensors", max_shard_size=size)
        files = set() if size is None else set(json.loads(path.read_text())["weight_map"].values())
        assert {path.name, *files} == set(os.listdir(tmp_path))
        # The name of the single file finds the index too.
        other = zeroed(compiled(seed=3, clear=False))
        tfshard.import_weights(other, tmp_path / "m.safetensors")
        assert_same_weights(other, model)


def test_a_failing_export_leaves_the_files_before(model, tmp_path, monkeypatch):
    path = tfshard.export(model, tmp_path / "m.safetensors", max_shard_size=KIB)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_files.Writer, "put", full)
    with pytest.raises(tfshard.errors.CheckpointError, match="could not be written.*No space left"):
        tfshard.export(model, tmp_path / "m.safetensors", max_shard_size=2 * KIB)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before and path.exists()


def test_a_kill_while_files_are_replaced_leaves_no_index_that_names_other_values(model, tmp_path, monkeypatch):
    tfshard.export(model, tmp_path / "m.safetensors", max_shard_size=KIB)
    replace = os.replace
    for kill_at in range(40):
        calls = []

        def killed(source, target, calls=calls, kill_at=kill_at):
            if len(calls) == kill_at:
                raise OSError("killed")
            calls.append(target)
            replace(source, target)

        other = compiled(seed=5, clear=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            try:
                tfshard.export(other, tmp_path / "m.safetensors", max_shard_size=KIB)
                break
            except tfshard.errors.CheckpointError:
                pass
        loaded = compiled(seed=4, clear=False)
        with pytest.raises(tfshard.errors.CheckpointError, match="does not exist"):
            tfshard.import_weights(loaded, tmp_path / "m.safetensors.index.json")
    assert kill_at > 2
    loaded = compiled(seed=4, clear=False)
    tfshard.import_weights(loaded, tmp_path / "m.safetensors")
    assert_same_weights(loaded, other)


def test_wrong_arguments_are_refused(model, tmp_path):
    for call, message in (
        (lambda: tfshard.export(model, tmp_path / "m.safetensors", max_shard_size=0), "must be a positive number"),
        (lambda: tfshard.export(model, tmp_path / "m.safetensors", max_shard_size="5GB"), "must be a positive number"),
        (lambda: tfshard.export(model, tmp_path / "m.weights.json"), "needs max_shard_size"),
        (lambda: tfshard.export(model, tmp_path / "m.keras", max_shard_size=1), "only from a path that ends in"),
        (lambda: tfshard.export(model, tmp_path / "m.weights.h5", max_shard_size=1), "only from a path that ends in"),
        (lambda: tfshard.export(model, tmp_path / "m.weights.json", max_shard_size=KIB / 1000), "largest variable"),
        (lambda: tfshard.export(model, tmp_path / "m.safetensors.index.json"), "path must end in"),
        (lambda: tfshard.export(model, tmp_path / "absent/m.safetensors"), "could not be written"),
        (lambda: tfshard.import_weights(model, tmp_path / "absent.safetensors"), "does not exist"),
        (lambda: tfshard.import_weights(model, tmp_path / "absent.safetensors.index.json"), "does not exist"),
        (lambda: tfshard.import_weights(model, tmp_path / "absent.weights.json"), "does not exist"),
    ):
        with pytest.raises(tfshard.errors.CheckpointError, match=message):
            call()
    assert os.listdir(tmp_path) == []


def test_a_dtype_that_the_format_lacks_is_refused_before_a_file_is_written():
    spec = safetensors_files.TensorSpec(name="x", shape=(1,), dtype="complex128")
    with pytest.raises(tfshard.errors.CheckpointError, match="cannot hold 'x'.*complex128"):
        safetensors_files.shards([spec], None)


def test_reading_needs_the_package_and_says_how_to_get_it(model, tmp_path, monkeypatch):
    path = tfshard.export(model, tmp_path / "m.safetensors")  # Writing does not.
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(tfshard.errors.CheckpointError, match=r"pip install 'tfshard\[safetensors\]'"):
        tfshard.import_weights(model, path)


def header(path) -> tuple[dict, bytes]:
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def rewrite(path, fields: dict, data: bytes) -> None:
    text = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def in_header(edit):
    def change(directory):
        file = sorted(directory.glob("*.safetensors"))[0]
        fields, data = header(file)
        edit(fields, next(name for name in fields if name != "__metadata__"))
        rewrite(file, fields, data)

    return change


def in_index(edit):
    def change(directory):
        path = directory / "m.safetensors.index.json"
        index = json.loads(path.read_text())
        edit(index["weight_map"], next(iter(index["weight_map"])))
        path.write_text(json.dumps(index))

    return change


def linked(directory):
    file = sorted(directory.glob("*.safetensors"))[0]
    file.rename(directory / "elsewhere")
    file.symlink_to(directory / "elsewhere")


def truncated(directory):
    file = sorted(directory.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])


HOSTILE = {
    "no header": lambda directory: sorted(directory.glob("*.safetensors"))[0].write_bytes(b"\xff" * 100),
    "truncated": truncated,
    "empty": lambda directory: sorted(directory.glob("*.safetensors"))[0].write_bytes(b""),
    "offsets outside": in_header(lambda fields, name: fields[name].update(data_offsets=[0, 1 << 40])),
    "huge shape": in_header(lambda fields, name: fields[name].update(shape=[1 << 40])),
    "unknown dtype": in_header(lambda fields, name: fields[name].update(dtype="X9")),
    "no index": lambda directory: (directory / "m.safetensors.index.json").write_text("[]"),
    "no json": lambda directory: (directory / "m.safetensors.index.json").write_bytes(b"\x80abc"),
    "file outside": in_index(lambda weight_map, name: weight_map.update({name: "../m.safetensors"})),
    "absolute file": in_index(lambda weight_map, name: weight_map.update({name: "/etc/passwd"})),
    "no name": in_index(lambda weight_map, name: weight_map.update({name: 3})),
    "file missing": in_index(lambda weight_map, name: weight_map.update({name: "absent.safetensors"})),
    "weight missing": in_index(lambda weight_map, name: weight_map.update(more=weight_map[name])),
    "weight unnamed": in_index(lambda weight_map, name: weight_map.pop(name)),
    "link": linked,
}


@pytest.mark.sweep(15)
@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_files_are_refused_before_a_variable_changes(attack, model, tmp_path):
    path = tfshard.export(model, tmp_path / "m.safetensors", max_shard_size=KIB)
    HOSTILE[attack](tmp_path)
    before = model.get_weights()
    with pytest.raises(tfshard.errors.CheckpointCorruptError):
        tfshard.import_weights(model, path)
    for ours, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, expected)
