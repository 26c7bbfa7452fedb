"""KerasHub's generate() on a sharded model gives the tokens of one device."""

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable

import keras
import keras_hub
import numpy as np
import pytest
from tensorflow.experimental import dtensor

import parity
import sweeps
import tfshard
from tfshard.training import generation

VOCABULARY, LENGTH, SEED = 32, 10, 3
MESHES = {"batch x model": {"batch": 2, "model": 2}, "model": {"model": 4}, "batch": {"batch": 4}}


def gpt2() -> keras.Model:
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY, num_layers=1, num_heads=4, hidden_dim=16, intermediate_dim=32,
        max_sequence_length=LENGTH,
    )  # fmt: skip
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def llama() -> keras.Model:
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY, num_layers=1, num_query_heads=4, num_key_value_heads=4, hidden_dim=16,
        intermediate_dim=32,
    )  # fmt: skip
    return keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)


def gemma() -> keras.Model:
    """Return a model with multi-query attention: its single key and value head is replicated."""
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=VOCABULARY, num_layers=1, num_query_heads=4, num_key_value_heads=1, hidden_dim=16,
        intermediate_dim=64, head_dim=8,
    )  # fmt: skip
    return keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)


def strategy_of(mesh: dict, stage: int = 3) -> tfshard.ShardedStrategy:
    layout_map = "auto" if "model" in mesh else None
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), layout_map, zero_stage=stage)
    assert strategy.mesh.size == 4
    return strategy


def made(build: Callable) -> keras.Model:
    """Return a model with large weights, so no two tokens are about equally likely."""
    model = build()
    for variable in (v for v in model.trainable_variables if len(v.shape) > 1):
        rs = np.random.RandomState(SEED + sum(map(ord, variable.path)))
        variable.assign(rs.normal(size=variable.shape) * 0.5)
    return model


def prompts(rows: int = 4) -> dict[str, np.ndarray]:
    """Return prompts of three tokens; the second has five."""
    mask = np.zeros((rows, LENGTH), bool)
    mask[:, :3] = mask[1, :5] = True
    tokens = np.random.RandomState(0).randint(1, VOCABULARY, (rows, LENGTH))
    return {"token_ids": np.where(mask, tokens, 0), "padding_mask": mask}


def generated(model: keras.Model, stop: int | None = None, rows: int = 4) -> dict[str, np.ndarray]:
    outputs = model.generate(prompts(rows), stop_token_ids=None if stop is None else [stop])
    return {name: np.array(value) for name, value in outputs.items()}


@functools.cache
def on_one_device(build: Callable, sampler: Callable = lambda: "greedy", stop: int | None = None) -> dict:
    model = made(build)
    model.compile(sampler=sampler(), jit_compile=False)
    return generated(model, stop)


@functools.cache
def greedy(build: Callable, mesh: str) -> keras.Model:
    """Return a greedy model on a mesh. Several tests share it, and none trains it."""
    model = tfshard.as_distributed(made(build))
    model.compile(sampler="greedy", strategy=strategy_of(MESHES[mesh]))
    return model


def assert_same(ours: dict, theirs: dict) -> None:
    assert len(np.unique(theirs["token_ids"][:, 5:])) > 3, "different tokens are needed to compare"
    for name, expected in theirs.items():
        np.testing.assert_array_equal(ours[name], expected, err_msg=name)


CASES = list(itertools.product(("llama", "gemma", "gpt2"), MESHES))
ALWAYS = [("llama", "batch x model"), ("llama", "batch"), ("gpt2", "model"), ("gemma", "model")]


@pytest.mark.sweep(1)
@sweeps.table("generation", ("family", "mesh"), CASES, always=ALWAYS, sample=1)
def test_greedy_tokens_are_those_of_one_device(family: str, mesh: str):
    build = {"llama": llama, "gemma": gemma, "gpt2": gpt2}[family]
    model = greedy(build, mesh)
    assert parity.shard_axes(model) == set(MESHES[mesh])
    assert all(parity.sharded_share(model, axis) > 0.5 for axis in MESHES[mesh])
    assert_same(generated(model), on_one_device(build))


def test_generation_stops_at_stop_tokens_as_on_one_device():
    model = greedy(llama, "batch x model")
    stop = int(on_one_device(llama)["token_ids"][0, 6])
    expected = on_one_device(llama, stop=stop)
    assert not expected["padding_mask"].all()
    assert_same(generated(model, stop), expected)


SAMPLERS = {
    "top k": lambda: keras_hub.samplers.TopKSampler(k=5, seed=1),
    "top p": lambda: keras_hub.samplers.TopPSampler(p=0.5, seed=1),
    "random": lambda: keras_hub.samplers.RandomSampler(seed=1, temperature=0.7),
}


@pytest.mark.sweep(1)
@sweeps.table("samplers", "name", SAMPLERS, always=["top p"], sample=1)
def test_a_seeded_sampler_draws_the_tokens_of_one_device(name: str):
    sampler = SAMPLERS[name]
    model = tfshard.as_distributed(made(llama))
    model.compile(sampler=sampler(), strategy=strategy_of({"batch": 2, "model": 2}))
    assert_same(generated(model), on_one_device(llama, sampler))


def test_a_batch_that_the_batch_axis_does_not_divide_is_generated_on_every_device():
    model = greedy(llama, "batch x model")
    # Rows are independent, but generation starts after the shortest prompt.
    assert_same(generated(model, rows=3), {name: value[:3] for name, value in on_one_device(llama).items()})


def test_the_cache_stays_on_the_mesh_sharded_by_batch_and_heads(monkeypatch: pytest.MonkeyPatch):
    model = greedy(llama, "batch x model")
    strategy = model.distribute_strategy
    layouts = []
    run = strategy.run

    def recorded(*args, **kwargs):
        results = run(*args, **kwargs)
        layouts.append((tuple(results[2].shape), tuple(dtensor.fetch_layout(results[2]).sharding_specs)))
        return results

    monkeypatch.setattr(strategy, "run", recorded)
    generated(model)
    whole = dtensor.UNSHARDED
    assert len(layouts) == 1 + LENGTH - 3
    assert set(layouts) == {((4, 1, 2, LENGTH, 4, 4), ("batch", whole, whole, whole, "model", whole))}


def test_a_model_born_under_scope_generates_before_and_after_training():
    def trained(model: keras.Model) -> keras.Model:
        data = prompts()
        model.compile(
            keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            sampler="greedy", jit_compile=False,
        )  # fmt: skip
        model.train_on_batch(data, np.roll(data["token_ids"], -1, 1))
        return model

    strategy = strategy_of({"model": 4}, stage=0)
    with strategy.scope():
        model = made(llama)
        model.compile(sampler="greedy", jit_compile=False)
    assert "model" in parity.shard_axes(model)
    before = generated(model)
    assert_same(before, on_one_device(llama))
    after = generated(trained(model))
    assert not np.array_equal(before["token_ids"], after["token_ids"])
    assert_same(after, generated(trained(made(llama))))


def test_a_model_that_is_not_sharded_generates_as_keras_hub_does():
    model = tfshard.as_distributed(made(llama))
    model.compile(sampler="greedy", jit_compile=False)
    assert_same(generated(model), on_one_device(llama))
    assert model not in generation._steps


@pytest.mark.parametrize("sampler", ["beam", "contrastive"])
def test_samplers_that_reorder_the_cache_are_refused(sampler: str):
    model = tfshard.as_distributed(made(gpt2))
    chosen = {"beam": keras_hub.samplers.BeamSampler(), "contrastive": keras_hub.samplers.ContrastiveSampler()}[sampler]
    model.compile(sampler=chosen, strategy=strategy_of({"model": 4}))
    with pytest.raises(
        tfshard.errors.UnsupportedOperationError, match="choose from one position's probabilities: greedy"
    ):
        generated(model)


def test_encoder_decoder_models_are_refused():
    backbone = keras_hub.models.BartBackbone(
        vocabulary_size=VOCABULARY, num_layers=1, num_heads=4, hidden_dim=16, intermediate_dim=32, max_sequence_length=8
    )
    model = keras_hub.models.BartSeq2SeqLM(backbone=backbone, preprocessor=None)
    tfshard.as_distributed(model).compile(strategy=strategy_of({"batch": 4}))
    tokens = np.ones((4, 8), int)
    inputs = {f"{part}_{name}": tokens for part in ("encoder", "decoder") for name in ("token_ids", "padding_mask")}
    with pytest.raises(tfshard.errors.UnsupportedOperationError, match="decoder-only language models.*BartSeq2SeqLM"):
        model.generate(inputs, stop_token_ids=None)


@pytest.mark.slow
def test_tfshard_works_without_keras_hub():
    program = (
        "import sys; sys.modules['keras_hub'] = None; import keras, tfshard; tfshard.initialize(1, 'CPU');"
        "model = tfshard.as_distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]));"
        "model.compile('sgd', 'mse', strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=1)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


class EqualGPT2(keras_hub.models.GPT2CausalLM):
    """All objects of this class are equal."""

    def __eq__(self, other):
        return isinstance(other, EqualGPT2)

    def __hash__(self):
        return 0


@pytest.mark.slow
def test_equal_models_generate_what_each_generates_on_one_device():
    def models():
        for number in range(2):
            keras.utils.set_random_seed(number)
            made = gpt2()
            yield EqualGPT2(backbone=made.backbone, preprocessor=None)

    prompt = {"token_ids": np.array([[3, 4, 0, 0, 0, 0]] * 4), "padding_mask": np.array([[1, 1, 0, 0, 0, 0]] * 4)}
    strategy, expected, found = strategy_of(MESHES["batch"]), [], []
    for plain, model in zip(models(), models(), strict=True):
        for variable, other in zip(plain.trainable_variables, model.trainable_variables, strict=True):
            variable.assign(10 * variable)
            other.assign(variable)
        plain.compile(sampler="greedy")
        expected.append(plain.generate(prompt, stop_token_ids=None)["token_ids"])
        model.compile("sgd", "mse", sampler="greedy", strategy=strategy)
        found.append(model.generate(prompt, stop_token_ids=None)["token_ids"])
    assert model == plain and not np.array_equal(*expected), "premise"
    np.testing.assert_array_equal(found, expected)
