"""Hugging Face weights go into sharded models, and come out, a tensor at a time and bit for bit."""

import json
import os
import pathlib

import huggingface_hub
import keras
import keras_hub
import numpy as np
import pytest
from safetensors.numpy import load_file

import tfshard
import transformers_directories
from tfshard.operations import layer_patch
from tfshard.storage.variables import ShardedVariable
from traced_memory import peak

EXPORTED = ("gpt2", "llama", "mistral", "gemma")


def strategy(**axes: int) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(**(axes or {"batch": 4})), {".*": ()})


def assert_sharded(model: keras.Model) -> None:
    stored = [variable.value for variable in model.trainable_variables]
    assert stored and all(isinstance(each, ShardedVariable) for each in stored)
    assert any("batch" in each.layout.storage for each in stored)


def tensors_of(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_same_tensors(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and ours[name].shape == value.shape, name
        assert ours[name].tobytes() == value.tobytes(), name


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype, files", [("float32", 1), ("bfloat16", 3)])
@pytest.mark.parametrize("name", transformers_directories.MODELS)
def test_a_sharded_model_has_the_bits_of_the_file_as_a_plain_model_has(name, dtype, files, tmp_path):
    directory = transformers_directories.write(name, tmp_path / name, dtype=dtype, files=files)
    backbone = transformers_directories.MODELS[name][1]
    plain = backbone.from_preset(str(directory))
    with strategy().scope():
        model = backbone.from_preset(str(directory))
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        assert ours.path == theirs.path and ours.numpy().tobytes() == theirs.numpy().tobytes(), ours.path
    assert_sharded(model)


def test_a_model_of_the_hub_has_the_bits_of_the_same_directory(tmp_path, monkeypatch):
    directory = transformers_directories.write("llama", tmp_path / "llama", files=3)
    downloaded = []

    def download(repo_id: str, filename: str) -> str:
        assert repo_id == "owner/llama"
        if not (directory / filename).exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError(filename)
        downloaded.append(filename)
        return str(directory / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    backbone = keras_hub.models.Llama3Backbone
    plain = backbone.from_preset(str(directory))
    assert not downloaded, "premise"
    with strategy().scope():
        model = backbone.from_preset("hf://owner/llama")
    assert {path.name for path in directory.iterdir()} == set(downloaded)
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        assert ours.numpy().tobytes() == theirs.numpy().tobytes(), ours.path
    assert_sharded(model)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("shard_size", [None, 2000 / 2**30])
@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_has_the_files_that_kerashub_writes_from_a_plain_model(name, shard_size, tmp_path):
    directory = transformers_directories.write(name, tmp_path / name)
    backbone = transformers_directories.MODELS[name][1]
    plain = backbone.from_preset(str(directory))
    plain.export_to_transformers(str(tmp_path / "plain"))
    with strategy().scope():
        model = backbone.from_preset(str(directory))
    path = tfshard.export_to_transformers(model, tmp_path / "ours", max_shard_size=shard_size)
    assert_sharded(model)
    expected, found = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "ours")
    assert_same_tensors(found, expected)
    assert json.loads((tmp_path / "ours/config.json").read_text()) == json.loads(
        (tmp_path / "plain/config.json").read_text()
    )
    if shard_size is None:
        assert path.name == "model.safetensors"
        assert sorted(os.listdir(tmp_path / "ours")) == ["config.json", "model.safetensors"]
    else:
        assert path.name == "model.safetensors.index.json"
        index = json.loads(path.read_text())
        assert len(set(index["weight_map"].values())) > 3
        assert index["weight_map"].keys() == expected.keys()
        for file in (tmp_path / "ours").glob("*.safetensors"):
            values = load_file(file)
            assert len(values) == 1 or sum(value.nbytes for value in values.values()) <= 2000
    # The other backbones have the head's weights, and KerasHub exports them with the language model only.
    if name in ("gpt2", "gemma"):
        again = backbone.from_preset(str(tmp_path / "ours"))
        for ours, theirs in zip(again.weights, plain.weights, strict=True):
            assert ours.numpy().tobytes() == theirs.numpy().tobytes(), ours.path


def test_the_method_of_a_sharded_language_model_and_of_its_backbone_exports(tmp_path):
    directory = transformers_directories.write("llama", tmp_path / "llama")
    plain = keras_hub.models.Llama3CausalLM(
        backbone=keras_hub.models.Llama3Backbone.from_preset(str(directory)), preprocessor=None
    )
    plain.export_to_transformers(str(tmp_path / "plain"))
    model = keras_hub.models.Llama3CausalLM(
        backbone=keras_hub.models.Llama3Backbone.from_preset(str(directory)), preprocessor=None
    )
    tfshard.as_distributed(model).compile("adam", strategy=strategy())
    assert_sharded(model)
    for each in (model, model.backbone):
        assert "export_to_transformers" in [patch.change.attribute for patch in layer_patch.patches_on(each)]
    model.export_to_transformers(str(tmp_path / "method"))
    assert_same_tensors(tensors_of(tmp_path / "method"), tensors_of(tmp_path / "plain"))
    assert "lm_head.weight" in tensors_of(tmp_path / "method")
    plain.backbone.export_to_transformers(str(tmp_path / "plain backbone"))
    model.backbone.export_to_transformers(str(tmp_path / "backbone"))
    assert_same_tensors(tensors_of(tmp_path / "backbone"), tensors_of(tmp_path / "plain backbone"))
    assert "lm_head.weight" not in tensors_of(tmp_path / "backbone")


def test_an_export_with_adapters_merges_them_as_kerashub_does(tmp_path):
    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = keras_hub.models.GemmaBackbone(
            vocabulary_size=40, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=16,
            intermediate_dim=64, head_dim=8,
        )  # fmt: skip
        model.enable_lora(2)
        for variable in model.variables:
            if variable.name.startswith("lora_"):
                variable.assign(np.random.RandomState(1).normal(size=variable.shape))
        return model

    plain = build()
    plain.export_to_transformers(str(tmp_path / "plain"))
    model = tfshard.as_distributed(build())
    model.compile("adam", strategy=strategy())
    tfshard.export_to_transformers(model, tmp_path / "ours")
    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "plain")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def big_llama() -> keras.Model:
    """Return a model of 49 MiB whose largest variables have 4 MiB."""
    return keras_hub.models.Llama3Backbone(
        vocabulary_size=512, num_layers=3, num_query_heads=8, num_key_value_heads=8, hidden_dim=512,
        intermediate_dim=2048, tie_word_embeddings=True,
    )  # fmt: skip


def test_the_host_holds_a_tensor_at_a_time(tmp_path):
    big_llama().export_to_transformers(str(tmp_path / "plain"))
    config = json.loads((tmp_path / "plain/config.json").read_text())
    (tmp_path / "plain/config.json").write_text(json.dumps({**config, "rope_scaling": None}))
    with strategy().scope():
        model = keras_hub.models.Llama3Backbone.from_preset(str(tmp_path / "plain"))
    sizes = [4 * int(np.prod(variable.shape)) for variable in model.variables]
    assert sum(sizes) > 10 * max(sizes), "premise"
    export = peak(lambda: tfshard.export_to_transformers(model, tmp_path / "ours"))
    whole = peak(lambda: type(model).export_to_transformers(model, str(tmp_path / "theirs")))
    # This counts NumPy's memory. tools/transformers_check.sh measures the memory of the process.
    assert export < 3 * max(sizes) and whole > sum(sizes)
    assert_same_tensors(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))

    def load() -> None:
        with strategy().scope():
            keras_hub.models.Llama3Backbone.from_preset(str(tmp_path / "plain"))

    assert peak(load) < 4 * max(sizes)


def test_a_second_export_replaces_the_files_of_the_first(tmp_path):
    keras.utils.set_random_seed(0)
    model = big_llama()
    (tmp_path / "notes.txt").write_text("kept")
    for shard_size in (0.008, 0.016, None, 0.016):
        path = tfshard.export_to_transformers(model, tmp_path, max_shard_size=shard_size)
        named = {path.name, "config.json", "notes.txt"}
        if shard_size is not None:
            named |= set(json.loads(path.read_text())["weight_map"].values())
        assert set(os.listdir(tmp_path)) == named


def test_models_that_kerashub_does_not_export_are_refused(tmp_path):
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    bert = keras_hub.models.BertBackbone(
        vocabulary_size=10, num_layers=1, num_heads=1, hidden_dim=4, intermediate_dim=8
    )
    for model in (plain, bert):
        with pytest.raises(tfshard.errors.CheckpointError, match="exports only some models.*GPT2Backbone.*Received"):
            tfshard.export_to_transformers(model, tmp_path / "out")
    with pytest.raises(tfshard.errors.CheckpointError, match="max_shard_size must be a positive number"):
        tfshard.export_to_transformers(bert, tmp_path / "out", max_shard_size="5GB")
    (tmp_path / "file").write_text("")
    with pytest.raises(tfshard.errors.CheckpointError, match="could not be written"):
        tfshard.export_to_transformers(big_llama(), tmp_path / "file" / "out")
    assert os.listdir(tmp_path) == ["file"]
