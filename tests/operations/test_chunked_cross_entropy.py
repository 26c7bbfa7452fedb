"""Cross entropy by chunks of tokens trains as plain Keras on one device, without whole logits."""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from sweeps import table
from tfshard.errors import StrategyError, UnsupportedOperationError
from tfshard.operations import chunked_logits, programs, projection_heads

# Optimizers update the small tables by dense gradients; a test shards classes although that sends more.
pytestmark = [
    pytest.mark.filterwarnings("ignore:transposed"),
    pytest.mark.filterwarnings("ignore:Optimizer .* updates embedding"),
]
RS = np.random.RandomState(0)
CLASSES, WIDTH, LENGTH = 24, 8, 6
X, Y = RS.randint(0, CLASSES, (16, LENGTH)), RS.randint(0, CLASSES, (16, LENGTH))
X[:, 4:] = 0  # Masked, in models with a mask.
WEIGHTS = RS.uniform(size=Y.shape).astype("float32")
DENSE = np.eye(CLASSES, dtype="float32")[Y]
BY_CLASS = tfshard.LayoutMap()
BY_CLASS.column("out")
BY_CLASS.replicated("(hidden|table|layer_.*)/.*")
BY_ROW = tfshard.LayoutMap({"table/embeddings": ("model", None)})
BY_ROW.replicated("(hidden|layer_.*)/.*")


class Block(keras.layers.Layer):
    def build(self, shape):
        self.up, self.down = keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(WIDTH)
        self.up.build(shape)
        self.down.build((*shape[:-1], 16))

    def call(self, x):
        return x + self.down(self.up(x))


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and how it is compiled and fed."""

    head: str = "dense"
    activation: str | None = None
    blocks: int = 0
    mask_zero: bool = False
    loss: str = "sparse"
    metrics: str = "accuracy"
    optimizer: str = "adam"
    dtype: str = "float32"
    weighted: bool = False
    batch_size: int = 8
    compiled: bool = False
    steps_per_execution: int = 1

    def build(self) -> keras.Model:
        cap = 2.0 if self.head == "capped" else None
        embedding = keras.layers.ReversibleEmbedding(
            CLASSES, WIDTH, self.head != "untied", logit_soft_cap=cap, mask_zero=self.mask_zero, name="table"
        )
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = embedding(inputs)
        for number in range(self.blocks):
            x = Block(name=f"layer_{number}")(x)
        x = keras.layers.Dense(WIDTH, "tanh", name="hidden")(x)
        if self.head == "dense":
            return keras.Model(inputs, keras.layers.Dense(CLASSES, self.activation, name="out")(x))
        return keras.Model(inputs, embedding(x, reverse=True))


LOSSES: dict[str, Callable[[], keras.losses.Loss]] = {
    "sparse": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "sum": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
    "ignored": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3),
    "probabilities": keras.losses.SparseCategoricalCrossentropy,
    "dense": lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
}
METRICS: dict[str, Callable[[], list[Any]]] = {
    "accuracy": lambda: ["accuracy"],
    "sparse": lambda: [
        "accuracy",
        keras.metrics.SparseTopKCategoricalAccuracy(3),
        keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
        keras_hub.metrics.Perplexity(from_logits=True, mask_token_id=0),
    ],
    "dense": lambda: ["accuracy", keras.metrics.TopKCategoricalAccuracy(3)],
}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "adam": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3),
    "accumulation": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-3, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0),
}


@dataclasses.dataclass(frozen=True)
class Run:
    model: keras.Model
    numbers: dict[str, Any]


def run(
    how: Model,
    strategy: tfshard.ShardedStrategy | None = None,
    *,
    epochs: int = 2,
    prepare: Callable[..., object] | None = None,
) -> Run:
    """Train, evaluate and predict, on one device or under a strategy."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(how.dtype)
    try:
        model, optimizer = how.build(), OPTIMIZERS[how.optimizer]()
        more = {"strategy": strategy} if strategy is not None else {}
        model.compile(
            optimizer if strategy is not None else parity.dense_gradients(optimizer), LOSSES[how.loss](),
            metrics=METRICS[how.metrics](), weighted_metrics=["accuracy"] if how.weighted else None,
            jit_compile=how.compiled and strategy is not None, steps_per_execution=how.steps_per_execution, **more,
        )  # fmt: skip
        if prepare is not None:
            prepare(strategy, model)
        y = DENSE if how.loss == "dense" else Y
        given = {"sample_weight": WEIGHTS if how.weighted else None, "batch_size": how.batch_size, "verbose": 0}
        numbers = model.fit(X, y, epochs=epochs, shuffle=False, **given).history
        if how.metrics == "sparse":
            evaluated = model.evaluate(X, y, return_dict=True, **given)
            numbers |= {f"evaluated {name}": [value] for name, value in evaluated.items()}
    finally:
        keras.config.set_dtype_policy(before)
    return Run(model, numbers)


@functools.cache
def reference(how: Model, epochs: int = 2) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    of = run(how, epochs=epochs)
    return of.numbers, {each.path: np.array(each.numpy()) for each in of.model.weights}


def strategy_of(
    mesh: dict[str, int] | None = None, chunked_cross_entropy: int | str = 4, **options: Any
) -> tfshard.ShardedStrategy:
    made = tfshard.create_mesh(**(mesh or {"batch": 4}))
    return tfshard.ShardedStrategy(made, chunked_cross_entropy=chunked_cross_entropy, **options)


def heads(model: keras.Model) -> list[tuple[int, str]]:
    return [(each.tokens, each.reason) for each in projection_heads.chunked_heads(model)]


@dataclasses.dataclass(frozen=True)
class Case:
    model: Model = Model()
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[..., object] | None = None
    tolerance: float = 1e-6


BY_CLASSES = {"mesh": {"batch": 2, "model": 2}, "layout_map": BY_CLASS}
BY_ROWS = {"mesh": {"batch": 2, "model": 2}, "layout_map": BY_ROW}
TIED = Model(head="tied", metrics="sparse")
CASES = {
    "stage 0": Case(strategy={"zero_stage": 0}),
    "stage 1": Case(strategy={"zero_stage": 1}),
    "stage 2": Case(strategy={"zero_stage": 2}),
    "stage 3": Case(model=Model(metrics="sparse")),
    "no groups": Case(strategy={"analyzer": None}),
    "two devices": Case(strategy={"mesh": {"batch": 2}}),
    "one chunk": Case(strategy={"chunked_cross_entropy": 1000}),
    "a token a chunk": Case(strategy={"chunked_cross_entropy": 1}),
    "a last chunk that is not full": Case(strategy={"chunked_cross_entropy": 5}),
    "a batch that the axis does not divide": Case(model=Model(batch_size=7), strategy={"chunked_cross_entropy": 5}),
    "classes on a model axis": Case(model=Model(metrics="sparse"), strategy=BY_CLASSES),
    "classes on the only axis": Case(strategy={"mesh": {"model": 4}, "layout_map": BY_CLASS}),
    "tied": Case(model=TIED),
    "tied, rows on a model axis": Case(model=Model(head="tied"), strategy=BY_ROWS | {"chunked_cross_entropy": 5}),
    "tied, rows on a model axis, all metrics": Case(model=TIED, strategy=BY_ROWS | {"chunked_cross_entropy": 5}),
    "soft cap": Case(model=Model(head="capped")),
    "soft cap, rows on a model axis": Case(model=Model(head="capped"), strategy=BY_ROWS),
    "untied": Case(model=Model(head="untied")),
    "softmax": Case(model=Model(activation="softmax", loss="probabilities")),
    "dense labels": Case(model=Model(loss="dense", metrics="dense")),
    "dense labels, classes on a model axis": Case(model=Model(loss="dense", metrics="dense"), strategy=BY_CLASSES),
    "ignored class": Case(model=Model(loss="ignored")),
    "ignored class, classes on a model axis": Case(model=Model(loss="ignored"), strategy=BY_CLASSES),
    "sum": Case(model=Model(loss="sum")),
    "weights": Case(model=Model(weighted=True, metrics="sparse")),
    "mask": Case(model=Model(mask_zero=True)),
    "microbatches": Case(strategy={"microbatches": 2}),
    "microbatches, reduced once": Case(strategy={"microbatches": 2, "reduce_once": True}),
    "microbatches, classes on a model axis": Case(strategy=BY_CLASSES | {"microbatches": 2}),
    "replicas": Case(strategy={"mesh": {"replica": 2, "batch": 2}}),
    "accumulation": Case(model=Model(optimizer="accumulation")),
    "steps per execution": Case(model=Model(steps_per_execution=2)),
    "recomputed blocks": Case(model=Model(blocks=2), prepare=lambda strategy, model: strategy.recompute(model)),
    "bfloat16": Case(model=Model(dtype="mixed_bfloat16"), tolerance=3e-3),
    "bfloat16, rows on a model axis": Case(
        model=Model(head="tied", dtype="mixed_bfloat16"), strategy=BY_ROWS, tolerance=3e-3
    ),
    "float16 with a scaled loss": Case(model=Model(dtype="mixed_float16", optimizer="scaled"), tolerance=1e-3),
}
# XLA compiles the chunks of these.
COMPILED = (
    "stage 3", "classes on a model axis", "tied, rows on a model axis, all metrics", "soft cap", "weights", "replicas",
    "dense labels, classes on a model axis", "ignored class", "microbatches", "a last chunk that is not full",
    "recomputed blocks", "steps per execution", "bfloat16", "float16 with a scaled loss",
)  # fmt: skip
for _name in COMPILED:
    _model = dataclasses.replace(CASES[_name].model, blocks=2, compiled=True)
    CASES[f"compiled, {_name}"] = dataclasses.replace(CASES[_name], model=_model)


@table(
    "chunked cross entropy",
    "name",
    CASES,
    always=["stage 0", "tied, rows on a model axis", "compiled, classes on a model axis"],
)
def test_training_matches_one_device(name):
    case = CASES[name]
    strategy = strategy_of(**case.strategy)
    ours = run(case.model, strategy, prepare=case.prepare)
    assert all(tokens and not reason for tokens, reason in heads(ours.model)), "premise: by chunks"
    assert len(heads(ours.model)) == 1, "premise: by chunks"
    assert projection_heads.chunked_heads(ours.model)[0].compiled == case.model.compiled
    numbers, weights = reference(case.model)
    assert ours.numbers.keys() == numbers.keys()
    for key, value in ours.numbers.items():
        np.testing.assert_allclose(value, numbers[key], rtol=case.tolerance, atol=case.tolerance, err_msg=key)
    for each in ours.model.weights:
        np.testing.assert_allclose(each.numpy(), weights[each.path], atol=10 * case.tolerance, err_msg=each.path)


PEAK = """
import keras, numpy as np, pathlib, tfshard
def resident():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10
tfshard.initialize(num_devices=4, device_type="CPU")
inputs = keras.Input((8,))
model = keras.Model(inputs, keras.layers.Dense(1 << 15, name="out")(inputs))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), chunked_cross_entropy=64)
model.compile("sgd", loss, metrics=["accuracy"], strategy=strategy)
x, y = np.ones((8192, 8), "float32"), np.zeros(8192, int)
before = resident()
model.train_on_batch(x, y)
print(resident() - before)
"""


@pytest.mark.slow
def test_a_step_does_not_hold_logits():
    environment = {**os.environ, "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
    made = subprocess.run([sys.executable, "-c", PEAK], env=environment, capture_output=True, text=True, check=True)
    logits = 8192 * (1 << 15) * 4
    assert int(made.stdout.splitlines()[-1]) < logits / 2


@pytest.mark.parametrize("chunked", [0, -1, True, 2.0, "always"])
def test_option_is_checked(chunked):
    with pytest.raises(StrategyError, match=r"None, 'auto', or the tokens of a chunk.*Received: chunked_cross_entropy"):
        strategy_of(chunked_cross_entropy=chunked)


def test_pipelines_are_refused():
    with pytest.raises(StrategyError, match="does not work with a pipeline axis"):
        strategy_of(mesh={"pipeline": 2, "batch": 2})


def _mean_logit(y_true: Any, y_pred: Any) -> Any:
    del y_true
    return keras.ops.mean(y_pred, axis=-1)


UNMET: dict[str, tuple[dict[str, Any], str]] = {
    "another loss": ({"loss": "mse"}, "it has none"),
    "a metric of logits": (
        {"metrics": [lambda: keras.metrics.MeanMetricWrapper(_mean_logit)]},
        "uses the output of layer '.*out' in operation",
    ),
    "eager steps": ({"run_eagerly": True}, "run_eagerly=True"),
}


@pytest.mark.parametrize("name", UNMET)
def test_steps_without_chunks_are_refused_before_they_train(name):
    options, reason = UNMET[name]
    metrics = [make() for make in options.get("metrics", ())]
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(CLASSES, name="out")])
    model.compile("sgd", **{"loss": LOSSES["sparse"](), **options, "metrics": metrics}, strategy=strategy_of())
    before = model.get_weights()
    y = np.zeros((8, CLASSES)) if options.get("loss") == "mse" else np.zeros(8, int)
    with pytest.raises(StrategyError, match=f"cannot compute its cross entropy by chunks: .*{reason}.*'auto'"):
        model.train_on_batch(np.ones((8, 8)), y)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_auto_keeps_small_logits_and_says_so():
    strategy = strategy_of(chunked_cross_entropy="auto")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(CLASSES, name="out")])
    model.compile("sgd", LOSSES["sparse"](), strategy=strategy)
    model.train_on_batch(np.ones((8, 8)), np.zeros(8, int))
    ((tokens, reason),) = heads(model)
    assert tokens == 0
    assert "'auto' makes chunks from 67,108,864 bytes on" in reason
    assert any("out' are whole: a device's logits take" in note for note in strategy.report(model).notes)


@pytest.mark.slow
def test_auto_takes_chunks_of_large_logits(monkeypatch):
    monkeypatch.setattr(projection_heads, "LEAST_BYTES", 1)
    monkeypatch.setattr(projection_heads, "LEAST_KERNELS", 0)
    monkeypatch.setattr(projection_heads, "LEAST_CHUNK", 4)
    strategy = strategy_of(chunked_cross_entropy="auto")
    ours = run(Model(), strategy)
    assert heads(ours.model) == [(WIDTH // 2, "")]
    np.testing.assert_allclose(ours.numbers["loss"], reference(Model())[0]["loss"], rtol=1e-6)
    assert any("in 3 chunks of 4 tokens" in note for note in strategy.report(ours.model).notes)


@pytest.mark.slow
def test_predict_returns_logits():
    ours, theirs = run(Model(), strategy_of()).model, run(Model()).model
    np.testing.assert_allclose(ours.predict(X, verbose=0), theirs.predict(X, verbose=0), atol=1e-5)


@pytest.mark.slow
def test_auto_stays_right_where_a_metric_needs_logits(monkeypatch):
    monkeypatch.setattr(projection_heads, "LEAST_BYTES", 1)
    monkeypatch.setattr(projection_heads, "LEAST_KERNELS", 0)
    monkeypatch.setitem(METRICS, "needs logits", lambda: [keras.metrics.MeanMetricWrapper(_mean_logit)])
    how = Model(metrics="needs logits")
    ours, theirs = run(how, strategy_of(chunked_cross_entropy="auto")), run(how)
    ((_, reason),) = heads(ours.model)
    assert "the step uses them in operation" in reason
    for key, value in theirs.numbers.items():
        np.testing.assert_allclose(ours.numbers[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("returns_logits", [False, True])
def test_custom_loops_compute_chunks(returns_logits):
    keras.utils.set_random_seed(0)
    model = tfshard.as_distributed(Model().build())
    strategy, loss = strategy_of(), LOSSES["sparse"]()
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    model.compile(keras.optimizers.SGD(0.1), strategy=strategy)

    def step_of(model: keras.Model) -> Callable[..., Any]:
        def step(x, y):
            with tf.GradientTape() as tape:
                logits = model(x)
                value = loss(y, logits)
            gradients = tape.gradient(value, model.trainable_variables)
            found = [tf.convert_to_tensor(each) for each in gradients]
            return (value, found, logits) if returns_logits else (value, found)

        return step

    ours = strategy.run(tf.function(step_of(model)), args=(X, Y))
    assert heads(model) == [(4, "" if not returns_logits else "the step uses them as a result")]
    for our, their in zip(tf.nest.flatten(ours), tf.nest.flatten(step_of(plain)(X, Y)), strict=True):
        np.testing.assert_allclose(our.numpy(), their.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_second_derivatives_are_refused():
    model = tfshard.as_distributed(Model().build())
    strategy, loss = strategy_of(), LOSSES["sparse"]()
    model.compile(keras.optimizers.SGD(0.1), strategy=strategy)
    kernel = model.get_layer("out").kernel

    def step(x, y):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                value = loss(y, model(x))
            inner = tf.reduce_sum(tape.gradient(value, kernel) ** 2)
        return outer.gradient(inner, kernel)

    with pytest.raises(UnsupportedOperationError, match="by chunks of layer 'out' has no second derivative"):
        strategy.run(tf.function(step), args=(X, Y))


@pytest.mark.slow
def test_verify_accepts_chunks_and_finds_a_wrong_one(monkeypatch):
    keras.utils.set_random_seed(0)
    model = Model().build()
    model.compile(keras.optimizers.SGD(0.1), LOSSES["sparse"](), strategy=strategy_of())
    assert tfshard.verify(model, (X, Y)).ok
    assert heads(model)[0][0] == 4, "premise"
    right = chunked_logits.ChunkedLogits.backward

    def wrong(self, *tensors):
        hidden, *others = right(self, *tensors)
        return [hidden, *(2 * each for each in others)]

    monkeypatch.setattr(chunked_logits.ChunkedLogits, "backward", wrong)
    verdict = tfshard.verify(model, (X, Y))
    assert not verdict.ok
    assert "out" in str(verdict)


@pytest.mark.slow
def test_chunks_that_xla_cannot_compile_run_without_it(monkeypatch):
    class Failing(programs.ProgramCache):
        def find(self, key, make):
            raise programs.NotCompiledError("no kernel")

    monkeypatch.setattr(chunked_logits, "_programs", Failing(programs.NotCompiledError))
    how = Model(blocks=2, compiled=True)
    with pytest.warns(UserWarning, match="XLA cannot compile the cross entropy by chunks.*no kernel"):
        ours = run(how, strategy_of(), epochs=1)
    (head,) = projection_heads.chunked_heads(ours.model)
    assert head.tokens and not head.compiled
    np.testing.assert_allclose(ours.numbers["loss"], reference(how, 1)[0]["loss"], rtol=1e-6)


@pytest.mark.slow
def test_lora_head_is_refused():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(CLASSES, name="out")])
    model.get_layer("out").enable_lora(2)
    model.compile("sgd", LOSSES["sparse"](), strategy=strategy_of())
    with pytest.raises(StrategyError, match="without LoRA"):
        model.train_on_batch(np.ones((8, 8)), np.zeros(8, int))


@pytest.mark.slow
def test_label_that_is_no_class_fails():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(CLASSES, name="out")])
    model.compile("sgd", LOSSES["sparse"](), strategy=strategy_of())
    with pytest.raises(tf.errors.InvalidArgumentError, match=str(CLASSES)):
        model.train_on_batch(np.ones((8, 8)), np.full(8, CLASSES))


@pytest.mark.slow
def test_label_that_is_no_class_has_no_loss_where_xla_compiles():
    model = Model(blocks=2).build()
    model.compile("sgd", LOSSES["sparse"](), strategy=strategy_of(), jit_compile=True)
    labels = Y[:8].copy()
    labels[0] = CLASSES
    assert np.isnan(model.train_on_batch(X[:8], labels))
