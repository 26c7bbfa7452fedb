"""All collectives in every graph of a device have one order, as NCCL needs between processes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import control_flow_util_v2

import collective_order
import sweeps
import tfshard
from tfshard.devices import startup
from tfshard.layouts import variable_layout

RS = np.random.RandomState(0)
TOKENS = RS.randint(0, 64, (8, 8)).astype("int32")
CLASSES = (TOKENS * 7) % 64


@pytest.fixture(autouse=True)
def every_gradient_by_replicas(monkeypatch):
    """Reduce gradients by replicas and compress them for small kernels, too."""
    monkeypatch.setattr(variable_layout, "LEAST_BY_REPLICAS_BYTES", 200)


def block() -> keras.Model:
    """Return a transformer block."""
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(64, 32, name="items")(inputs)
    y = keras.layers.LayerNormalization(name="first")(x)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(4, 8, name="attention")(y, y, use_causal_mask=True)])
    y = keras.layers.LayerNormalization(name="second")(x)
    y = keras.layers.Dense(32, name="down")(keras.layers.Dense(64, activation="gelu", name="up")(y))
    x = keras.layers.LayerNormalization(name="last")(keras.layers.Add()([x, y]))
    return keras.Model(inputs, keras.layers.Dense(64, name="head")(x), name="net")


def feed_forward(width: int = 32) -> keras.Model:
    """Return the half of a transformer block without attention."""
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(64, width, name="items")(inputs)
    y = keras.layers.LayerNormalization(name="second")(x)
    y = keras.layers.Dense(width, name="down")(keras.layers.Dense(2 * width, activation="gelu", name="up")(y))
    return keras.Model(inputs, keras.layers.Dense(64, name="head")(keras.layers.Add()([x, y])), name="net")


def wide() -> keras.Model:
    """Return kernels that are large enough to be gathered in codes."""
    return feed_forward(64)


@keras.saving.register_keras_serializable("test_collective_order")
class Looped(keras.layers.Layer):
    """Two products in each iteration of a loop, with rows that a model axis shards, and other products in branches."""

    def build(self, shape):
        for name in ("left", "right"):
            setattr(self, name, self.add_weight(shape=(shape[-1], shape[-1]), name=name))

    def call(self, x):
        def body(i, a, b):
            return i + 1, tf.tanh(tf.matmul(a, self.left)), tf.tanh(tf.matmul(b, self.right))

        _, a, b = tf.while_loop(lambda i, a, b: i < 3, body, (0, x, x), maximum_iterations=3)
        return tf.cond(tf.reduce_sum(a) > 0, lambda: tf.matmul(a, self.right) + b, lambda: tf.matmul(b, self.left))


def looped() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(64, 4, name="items")(inputs))
    x = keras.layers.Dense(8 * 64, name="head")(Looped(name="looped")(x))
    return keras.Model(inputs, keras.layers.Reshape((8, 64))(x), name="net")


def recurrent() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(64, 16, name="items")(inputs)
    x = keras.layers.GRU(16, return_sequences=True, name="gru")(x)
    return keras.Model(inputs, keras.layers.Dense(64, name="head")(x), name="net")


def images() -> keras.Model:
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Reshape((8, 8, 8))(keras.layers.Embedding(64, 64, name="items")(inputs))
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(16, 3, padding="same", use_bias=False, name="up")(x))
    x = keras.layers.Conv2D(16, 3, padding="same", name="down")(keras.layers.ReLU()(x))
    x = keras.layers.Dropout(0.1, seed=1)(keras.layers.Reshape((8, 128))(x))
    return keras.Model(inputs, keras.layers.Dense(64, name="head")(x), name="net")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        mesh: Sizes of its axes.
        strategy: Options of the strategy; `layout_map` may be a function that makes one.
        build: Makes the model.
        optimizer: Makes the optimizer.
        recompute: True to recompute its blocks.
        parts: The number of pipeline stages.
        policy: The dtype policy.
        bodies: True if loops or branches contain collectives, which are ordered on GPUs of several processes.
    """

    mesh: dict[str, int]
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    build: Callable[[], keras.Model] = block
    optimizer: Callable[[], keras.optimizers.Optimizer] = keras.optimizers.Adam
    recompute: bool = False
    parts: int | None = None
    policy: str = "float32"
    bodies: bool = False


def by_hand() -> tfshard.LayoutMap:
    layout_map = tfshard.LayoutMap()
    layout_map.column("up", optional=True)
    layout_map.row("(down|looped/.*)", optional=True)
    layout_map.replicated(".*", optional=True)
    return layout_map


def adagrad() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(0.01)


def accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(global_clipnorm=1.0, gradient_accumulation_steps=2)


FLAT, MODEL = {"batch": 4}, {"batch": 2, "model": 2}
HYBRID, THREE = {"replica": 2, "batch": 2}, {"replica": 2, "batch": 1, "model": 2}
AUTO = {"layout_map": "auto"}
CASES = {
    "flat": Case(FLAT),
    **{f"flat, stage {stage}": Case(FLAT, {"zero_stage": stage}) for stage in range(3)},
    "flat, no groups": Case(FLAT, {"analyzer": None}),
    "flat, prefetch": Case(FLAT, {"prefetch": 2}),
    "flat, recompute": Case(FLAT, recompute=True),
    "flat, microbatches": Case(FLAT, {"microbatches": 2}),
    "flat, reduced once": Case(FLAT, {"microbatches": 2, "reduce_once": True}),
    "flat, accumulation": Case(FLAT, optimizer=accumulating, bodies=True),
    "flat, float16": Case(FLAT, policy="mixed_float16"),
    "flat, bfloat16": Case(FLAT, policy="mixed_bfloat16"),
    "flat, slots in int8": Case(FLAT, {"slot_dtype": "int8"}),
    "flat, slots in bfloat16": Case(FLAT, {"slot_dtype": "bfloat16"}),
    "flat, gathers in int8": Case(FLAT, {"gather_dtype": "int8"}, build=wide),
    "flat, gathers in float8": Case(FLAT, {"gather_dtype": "float8_e4m3fn", "microbatches": 2}, build=wide),
    "flat, recurrent": Case(FLAT, build=recurrent),
    "flat, images": Case(FLAT, build=images),
    "table": Case(FLAT, {"tables": "items/embeddings"}, optimizer=adagrad),
    "int8": Case(FLAT, {"compression": "int8"}),
    "in bfloat16": Case(FLAT, {"compression": "bfloat16"}),
    "powersgd": Case(FLAT, {"compression": tfshard.PowerSGD(rank=2)}),
    "int8, microbatches": Case(FLAT, {"compression": "int8", "microbatches": 2}),
    "model": Case(MODEL, AUTO),
    "model, stage 1": Case(MODEL, {**AUTO, "zero_stage": 1}),
    "model, by hand": Case(MODEL, {"layout_map": by_hand}),
    "model, no groups": Case(MODEL, {**AUTO, "analyzer": None}),
    "model, prefetch": Case(MODEL, {**AUTO, "prefetch": 2}),
    "model, recompute": Case(MODEL, AUTO, recompute=True),
    "model, microbatches": Case(MODEL, {**AUTO, "microbatches": 2}),
    "model, accumulation": Case(MODEL, AUTO, optimizer=accumulating, bodies=True),
    "model, sequence": Case(MODEL, {**AUTO, "sequence_parallel": True}),
    "model, loops": Case(MODEL, {"layout_map": by_hand}, build=looped, bodies=True),
    "model, recurrent": Case(MODEL, AUTO, build=recurrent),
    "model, images": Case(MODEL, AUTO, build=images),
    "model only": Case({"model": 4}, {"layout_map": by_hand}),
    "hybrid": Case(HYBRID),
    **{f"hybrid, stage {stage}": Case(HYBRID, {"zero_stage": stage}) for stage in range(3)},
    "hybrid, no groups": Case(HYBRID, {"analyzer": None}),
    "hybrid, prefetch": Case(HYBRID, {"prefetch": 2}),
    "hybrid, recompute": Case(HYBRID, recompute=True),
    "hybrid, microbatches": Case(HYBRID, {"microbatches": 2}),
    "hybrid, accumulation": Case(HYBRID, optimizer=accumulating, bodies=True),
    "hybrid, float16": Case(HYBRID, policy="mixed_float16"),
    "hybrid, slots in int8": Case(HYBRID, {"slot_dtype": "int8"}),
    "hybrid, int8": Case(HYBRID, {"compression": "int8"}, build=feed_forward),
    "hybrid, powersgd": Case(HYBRID, {"compression": tfshard.PowerSGD(rank=2)}),
    "hybrid, gathers in int8": Case(HYBRID, {"gather_dtype": "int8"}, build=wide),
    "hybrid, recurrent": Case(HYBRID, build=recurrent),
    "hybrid, images": Case(HYBRID, build=images),
    "hybrid, model": Case(THREE, AUTO),
    "hybrid, loops": Case(THREE, {"layout_map": by_hand}, build=looped, bodies=True),
    "pipeline": Case({"pipeline": 2, "batch": 2}, parts=2),
    "pipeline, model": Case({"pipeline": 2, "model": 2}, {"layout_map": by_hand}, parts=2),
}


def compiled(case: Case) -> keras.Model:
    options = {"zero_stage": 3, "analyzer": tfshard.ParameterAnalyzer(group_threshold_bytes=1 << 10), **case.strategy}
    if callable(options.get("layout_map")):
        options["layout_map"] = options["layout_map"]()
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**case.mesh), **options)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(case.policy)
    try:
        model = case.build()
    finally:
        keras.config.set_dtype_policy("float32")
    model = tfshard.as_distributed(model) if case.parts is None else tfshard.pipeline(model, case.parts, microbatches=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(case.optimizer(), loss, metrics=["accuracy"], strategy=strategy)
    if case.recompute:
        strategy.recompute(model, [".*attention", "up"])
    return model


@pytest.mark.sweep(1)
@sweeps.table("collectives in an order", "name", CASES, always=["model", "hybrid, int8"], sample=1)
def test_collectives_of_a_step_are_in_an_order(name, monkeypatch):
    if CASES[name].bodies:
        monkeypatch.setattr(control_flow_util_v2, "maybe_set_lowering_attr", None)  # To restore it afterwards.
        startup._keep_order(of_bodies=True)
    model = compiled(CASES[name])
    steps = {
        "train": lambda: model.fit(TOKENS, CLASSES, batch_size=8, verbose=0),
        "evaluate": lambda: model.evaluate(TOKENS, CLASSES, batch_size=8, verbose=0),
        "predict": lambda: model.predict(TOKENS, batch_size=8, verbose=0),
    }
    for kind, step in steps.items():
        with collective_order.collected() as graphs:
            step()
        least = 1 if name == "flat, stage 0" else 2  # There, all gradients are reduced at once.
        assert kind != "train" or any(len(graph.collectives) >= least for graph in graphs), "premise"
        for graph in graphs:
            assert not graph.unordered, f"{kind}: {len(graph.unordered)} pairs, as {graph.unordered[0]}"
