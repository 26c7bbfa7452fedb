"""The configurations of the table: model families, stages, meshes, precisions, and each option that changes a step."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import tfshard

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests"))
import families

FLAT, MODEL, HYBRID = {"batch": 4}, {"batch": 2, "model": 2}, {"replica": 2, "batch": 2}
SAMPLES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """A step to compile.

    Attributes:
        family: A key of `BUILDERS`, or of the builders in tests/families.py.
        mesh: Sizes of the mesh axes.
        strategy: Arguments of the strategy. By default, small variables share groups, and others have none.
        compile: Arguments of `compile`. XLA's programs hide their operations, so most configurations have none.
        optimizer: Returns the optimizer.
        policy: The dtype policy.
        recompute: True to recompute blocks.
        pipeline: True to cut the model into two pipeline stages.
        run: The method to call: `"fit"`, `"evaluate"` or `"predict"`.
    """

    family: str = "gpt2"
    mesh: dict[str, int] = dataclasses.field(default_factory=lambda: dict(FLAT))
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    compile: dict[str, Any] = dataclasses.field(default_factory=lambda: {"jit_compile": False})
    optimizer: Callable[[], keras.optimizers.Optimizer] = families.optimizer
    policy: str = "float32"
    recompute: bool = False
    pipeline: bool = False
    run: str = "fit"


def recurrent() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.GRU(8, return_sequences=True)(keras.layers.Embedding(56, 8)(inputs))
    return keras.Model(inputs, keras.layers.Dense(56)(keras.layers.LSTM(8, return_sequences=True)(x)))


def table() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(56, 8, name="items")(inputs)
    return keras.Model(inputs, keras.layers.Dense(56)(x))


def images() -> keras.Model:
    """Return a model with depthwise convolutions, dropout and pooling."""
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Conv2D(16, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.DepthwiseConv2D(3),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 3),
            keras.layers.AveragePooling2D(2),
            keras.layers.Dropout(0.1),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )


def experts() -> keras.Model:
    sizes = {key: value for key, value in families.SMALL.items() if key != "num_heads"}
    backbone = families.keras_hub.models.MixtralBackbone(
        **sizes, num_query_heads=4, num_key_value_heads=2, num_experts=4, top_k=2
    )
    return families.with_logits(backbone)


def adapted() -> keras.Model:
    """Return a model of kernels in int8 with LoRA adapters."""
    model = keras.Sequential([keras.Input((7,)), *(keras.layers.Dense(64) for _ in range(2)), keras.layers.Dense(3)])
    for layer in model.layers[:2]:
        layer.quantize("int8")
        layer.enable_lora(4)
    return model


def blocks() -> keras.Model:
    """Return GPT-2 with two blocks."""
    before, families.SMALL["num_layers"] = families.SMALL["num_layers"], 2
    try:
        return families.hub("gpt2")
    finally:
        families.SMALL["num_layers"] = before


BUILDERS: dict[str, Callable[[], keras.Model]] = {
    "recurrent": recurrent,
    "table": table,
    "images": images,
    "wide": lambda: families.mlp((64, 128)),  # With slots of 4096 elements and more.
    "experts": experts,
    "adapted": adapted,
    "two blocks": blocks,
    **families.BUILDERS,
}

_AUTO = {"layout_map": "auto"}


def _configurations() -> Iterator[tuple[str, Configuration]]:
    for family in (*families.BUILDERS, "recurrent", "images", "experts", "adapted"):
        yield f"{family}, stage 3", Configuration(family=family)
    for stage in range(3):
        yield f"gpt2, stage {stage}", Configuration(strategy={"zero_stage": stage})
    yield "gpt2, no groups", Configuration(strategy={"analyzer": None})
    yield "gpt2, prefetch", Configuration(strategy={"prefetch": 2})
    yield "gpt2, microbatches", Configuration(strategy={"microbatches": 2})
    yield "gpt2, recomputed", Configuration(family="two blocks", recompute=True)
    yield "gpt2, evaluate", Configuration(run="evaluate")
    yield "gpt2, predict", Configuration(run="predict")
    for family in ("gpt2", "llama", "bert", "t5", "cnn", "recurrent"):
        yield f"{family}, batch x model", Configuration(family=family, mesh=MODEL, strategy=_AUTO)
    yield "gpt2, model", Configuration(mesh={"model": 4}, strategy=_AUTO)
    yield "gpt2, sequence parallel", Configuration(mesh=MODEL, strategy=_AUTO | {"sequence_parallel": True})
    yield "gpt2, replicas", Configuration(mesh=HYBRID)
    yield "gpt2, replicas x model", Configuration(mesh={"replica": 2, "batch": 2, "model": 2}, strategy=_AUTO)
    yield "gpt2, pipeline", Configuration(family="two blocks", mesh={"pipeline": 2, "batch": 2}, pipeline=True)
    for policy in ("mixed_bfloat16", "mixed_float16", "bfloat16"):
        yield f"gpt2, {policy}", Configuration(policy=policy)
    yield "gpt2, mixed_bfloat16, batch x model", Configuration(policy="mixed_bfloat16", mesh=MODEL, strategy=_AUTO)
    yield (
        "gpt2, mixed_bfloat16, gradients in bfloat16",
        Configuration(policy="mixed_bfloat16", strategy={"reduce_dtype": "bfloat16"}),
    )
    for compression in ("bfloat16", "int8", tfshard.PowerSGD(rank=2)):
        name = compression if isinstance(compression, str) else "PowerSGD"
        yield f"gpt2, compressed by {name}", Configuration(strategy={"compression": compression})
    yield "gpt2, replicas, compressed by int8", Configuration(mesh=HYBRID, strategy={"compression": "int8"})
    yield "gpt2, slots in bfloat16", Configuration(strategy={"slot_dtype": "bfloat16"})
    yield "wide, slots in int8", Configuration(family="wide", strategy={"slot_dtype": "int8"})
    yield (
        "table",
        Configuration(family="table", strategy={"tables": "items/embeddings"}, optimizer=keras.optimizers.Adagrad),
    )
    yield "gpt2, logits by chunks", Configuration(strategy={"chunked_cross_entropy": 4})
    yield "gpt2, compiled blocks", Configuration(family="two blocks", compile={})
    yield (
        "gpt2, compiled blocks, batch x model",
        Configuration(family="two blocks", mesh=MODEL, strategy=_AUTO, compile={}),
    )
    yield "gpt2, Adafactor", Configuration(optimizer=keras.optimizers.Adafactor)
    yield "gpt2, Muon", Configuration(optimizer=lambda: keras.optimizers.Muon(exclude_layers=["embedding"]))


CONFIGURATIONS = dict(_configurations())


def build(configuration: Configuration) -> keras.Model:
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(configuration.policy)
    try:
        return BUILDERS[configuration.family]()
    finally:
        keras.config.set_dtype_policy("float32")


def batch(configuration: Configuration) -> tuple[Any, Any]:
    """Return a batch: inputs and labels."""
    rs = np.random.RandomState(0)
    if configuration.family in ("recurrent", "table"):
        return families.TOKENS, families.TOKENS
    if configuration.family == "images":
        return rs.normal(size=(SAMPLES, 16, 16, 3)).astype("float32"), families.LABELS
    if configuration.family == "experts":
        return families.batches("gpt2")[0]
    if configuration.family in ("adapted", "wide"):
        return families.batches("mlp")[0]
    if configuration.family == "two blocks":
        return families.batches("gpt2")[0]
    return families.batches(configuration.family)[0]
