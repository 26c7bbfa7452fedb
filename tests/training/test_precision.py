"""Mixed precision: losses, weights, slots, loss scale and skipped steps match one device."""

import contextlib
import dataclasses
import functools
import itertools

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import sweeps
import tfshard

RS = np.random.RandomState(0)
ROWS, RATE = 8, 0.25
X = RS.normal(size=(ROWS, 8)).astype("float32")
Y = RS.normal(size=(ROWS, 4)).astype("float32")
# An overflow in the last row, which belongs to the last of four devices.
OVERFLOW = np.where(np.arange(X.size).reshape(X.shape) == X.size - 3, 3e5, X).astype("float32")
# Input for poisoned layers of `build`: outside the range of ordinary batches.
POISONED = np.where(np.arange(X.size).reshape(X.shape) == X.size - 3, 100.0, X).astype("float32")

GROWTH, SCALE = 2, 8.0
# The fourth of seven steps overflows. The scales after each step follow Keras's rule: doubled after two steps, halved
# by an overflow.
STEPS = (X, X, X, OVERFLOW, X, X, X)
SKIPPED = 3
SCALES = [8.0, 16.0, 16.0, 8.0, 8.0, 16.0, 16.0]

MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}
EPSILON = {"mixed_float16": np.finfo(np.float16).eps, "mixed_bfloat16": ml_dtypes.finfo(ml_dtypes.bfloat16).eps}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The state after a step. Arrays are in the order of Keras's lists."""

    loss: float
    weights: list[np.ndarray]
    optimizer: dict[str, np.ndarray]


class Poisoned(keras.layers.Dense):
    """The gradient of one kernel element is infinite if an input is above 50. The output is finite."""

    def call(self, inputs):
        @tf.custom_gradient
        def poisoned(kernel):
            last = tf.reshape(tf.one_hot(7 * 8, 64, dtype=kernel.dtype), kernel.shape)
            wrong = tf.reduce_max(tf.cast(inputs, tf.float32)) > 50
            infinite = tf.constant(np.inf, kernel.dtype)
            return tf.identity(kernel), lambda upstream: upstream + tf.where(wrong & (last > 0), infinite, 0)

        bounded = tf.clip_by_value(inputs, -3.0, 3.0)
        return tf.tanh(tf.matmul(bounded, poisoned(tf.cast(self.kernel, inputs.dtype))) + self.bias)


def build(policy: str, first: type = keras.layers.Dense) -> keras.Model:
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(8, name="down", dtype=policy)(first(8, "tanh", name="up", dtype=policy)(inputs))
    return keras.Model(inputs, keras.layers.Dense(4, name="head", dtype="float32")(hidden))


def trained(policy: str, inputs: tuple, strategy: tfshard.ShardedStrategy | None, **options) -> tuple:
    """Return the model after a step on each of `inputs`, and the state before and after each step."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = tfshard.as_distributed(build(policy, **options))
    optimizer = keras.optimizers.SGD(RATE, momentum=0.5)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=SCALE, dynamic_growth_steps=GROWTH)
    model.compile(optimizer, "mse", strategy=strategy, jit_compile=False)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        optimizer.build(model.trainable_variables)
    steps = [noted(model, np.nan)]
    for x in inputs:
        steps.append(noted(model, model.train_on_batch(x, Y)))
    return model, steps


def noted(model: keras.Model, loss: float) -> Step:
    # Keyed by the index in the list: several variables have the same path.
    state = {f"{i} {v.path}": np.array(v.numpy()) for i, v in enumerate(model.optimizer.variables)}
    return Step(loss=float(loss), weights=[np.array(w) for w in model.get_weights()], optimizer=state)


@functools.cache
def reference(policy: str, inputs: str, **options) -> list[Step]:
    return trained(policy, INPUTS[inputs], None, **options)[1]


INPUTS = {"overflow": STEPS, "poison": (X, POISONED, X), "plain": tuple(x for x in STEPS if x is X)}


def strategy_of(mesh: str, stage: int, grouped: bool) -> tfshard.ShardedStrategy:
    layout_map = None
    if "model" in MESHES[mesh]:
        layout_map = tfshard.LayoutMap()
        layout_map.column("up")
        layout_map.row("down")
        layout_map.replicated(".*", optional=True)
    analyzer = tfshard.ParameterAnalyzer() if grouped else None
    return tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=stage, analyzer=analyzer)


def assert_sharded(model: keras.Model, mesh: str, stage: int, grouped: bool) -> None:
    """Premise: the policy and the sharding are as expected."""
    assert model.layers[1].compute_dtype in ("float16", "bfloat16")
    layouts = {v.path: v.value.layout for v in model.trainable_variables}
    assert all(("batch" in layout.storage) == (stage == 3) for layout in layouts.values())
    assert all((layout.group is not None) == grouped for layout in layouts.values())
    if "model" in MESHES[mesh]:
        assert layouts["up/kernel"].compute == (None, "model") and layouts["down/kernel"].compute == ("model", None)
    slots = [v for v in model.optimizer.variables if v.path.endswith("momentum")]
    assert len(slots) == len(layouts)
    assert all(("batch" in v.value.layout.storage) == (stage > 0) for v in slots)


def assert_close(ours: list[Step], theirs: list[Step], policy: str) -> None:
    """Assert that losses, weights and slots agree within the rounding of the policy's format.

    A gradient is a sum over devices of rounded terms, and the sum is rounded, too, while plain Keras rounds once. The
    sum is therefore off by at most epsilon times the largest element, and the next steps see weights that are off by as
    much again. A weight may be off by twice epsilon times the path length of the variable's weights (the sum over steps
    of the largest change), and must have moved much further.
    """
    epsilon = EPSILON[policy]
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(our.loss, their.loss, rtol=2 * epsilon, err_msg=f"loss of step {number}")
        assert our.optimizer.keys() == their.optimizer.keys()
    values = [step.weights for step in theirs], [step.weights for step in ours]
    slots = [{k: v for k, v in step.optimizer.items() if k.endswith("momentum")} for step in (theirs[-1], ours[-1])]
    for i, slot in enumerate(slots[0]):
        on_one, on_mesh = ([step[i] for step in steps] for steps in values)
        way = sum(np.abs(after - before).max() for before, after in itertools.pairwise(on_one))
        tolerance = 2 * epsilon * way
        assert np.abs(on_one[-1] - on_one[0]).max() > (100 if policy == "mixed_float16" else 20) * tolerance, slot
        for number, (our, their) in enumerate(zip(on_mesh, on_one, strict=True)):
            np.testing.assert_allclose(our, their, rtol=0, atol=tolerance, err_msg=f"{slot}, step {number}")
        np.testing.assert_allclose(slots[1][slot], slots[0][slot], rtol=0, atol=tolerance, err_msg=slot)


def assert_skipped(before: Step, after: Step) -> None:
    """Assert bit-identical weights, slots, step count and rate. The counter of the loss scale is at zero."""
    for ours, theirs in zip(after.weights, before.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name, value in after.optimizer.items():
        if not name.endswith(("dynamic_scale", "step_counter")):
            np.testing.assert_array_equal(value, before.optimizer[name], err_msg=name)
    assert counters(after)["step_counter"] == 0
    assert counters(after)["dynamic_scale"] == counters(before)["dynamic_scale"] / 2


def counters(step: Step) -> dict[str, float]:
    names = ("dynamic_scale", "step_counter", "iteration")
    return {n: float(v) for k, v in step.optimizer.items() for n in names if k.endswith(n)}


CASES = list(itertools.product(EPSILON, (0, 2, 3), (True, False), MESHES))
# The cases cover each pair of precision, stage, groups and mesh.
ALWAYS = [
    ("mixed_float16", 0, True, "batch4"), ("mixed_float16", 2, False, "batch2_model2"),
    ("mixed_float16", 3, True, "batch2_model2"), ("mixed_bfloat16", 0, False, "batch2_model2"),
    ("mixed_bfloat16", 2, True, "batch4"), ("mixed_bfloat16", 3, False, "batch4"),
]  # fmt: skip


@pytest.mark.sweep(1)
@sweeps.table("mixed precision", ("policy", "stage", "grouped", "mesh"), CASES, always=ALWAYS, sample=1)
def test_mixed_precision_trains_as_on_one_device(policy: str, stage: int, grouped: bool, mesh: str):
    """With a loss scale, one middle step overflows in one device's rows."""
    inputs = "overflow" if policy == "mixed_float16" else "plain"
    model, steps = trained(policy, INPUTS[inputs], strategy_of(mesh, stage, grouped))
    expected = reference(policy, inputs)
    assert_sharded(model, mesh, stage, grouped)
    assert_close(steps, expected, policy)
    assert [counters(step) for step in steps] == [counters(step) for step in expected]
    if policy == "mixed_float16":
        assert [counters(step)["dynamic_scale"] for step in steps[1:]] == SCALES
        # The loss is finite, because tanh is bounded.
        assert_skipped(steps[SKIPPED], steps[SKIPPED + 1])
        assert not np.array_equal(steps[SKIPPED + 2].weights[0], steps[SKIPPED + 1].weights[0]), "the next one trains"
    assert counters(steps[-1])["iteration"] == 6


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("stage", "grouped", "mesh"), [(3, False, "batch4"), (2, True, "batch2_model2")])
def test_one_element_that_is_not_finite_on_one_device_skips_the_step_on_all(stage: int, grouped: bool, mesh: str):
    model, steps = trained("mixed_float16", INPUTS["poison"], strategy_of(mesh, stage, grouped), first=Poisoned)
    expected = reference("mixed_float16", "poison", first=Poisoned)
    assert_sharded(model, mesh, stage, grouped)
    assert np.isfinite([step.loss for step in steps[1:]]).all(), "premise: only a gradient is not finite"
    assert_skipped(steps[1], steps[2])
    assert_close(steps, expected, "mixed_float16")
    assert [counters(step) for step in steps] == [counters(step) for step in expected]
    assert [counters(step)["dynamic_scale"] for step in steps[1:]] == [8.0, 4.0, 4.0]
    model._distribute_strategy.check_consistency(model)
