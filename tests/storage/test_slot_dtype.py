"""Optimizer slots stored in bfloat16 or in 8-bit codes take fewer bytes, and stay close to float32."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from sweeps import table
from tfshard.layouts import boxes
from tfshard.storage import eight_bits

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(32, 96)).astype("float32"), RS.normal(size=(32, 3)).astype("float32")
ANALYZERS = {"groups": tfshard.ParameterAnalyzer(), "alone": None}
STORED = {"bfloat16": tf.bfloat16, "int8": tf.uint8}
# A kernel with dims that four devices do not divide, and kernels with a divisible first or second dim.
WIDTHS = (66, 64, 65)


def build() -> keras.Model:
    layers = [keras.layers.Dense(width, activation="tanh", name=f"hidden_{width}") for width in WIDTHS]
    return keras.Sequential([keras.Input((96,)), *layers, keras.layers.Dense(3, name="head")], name="net")


def strategy_of(slot_dtype, stage=3, analyzer=None, mesh=None, layout_map=None):
    whole = tfshard.LayoutMap()
    whole.replicated(".*")
    mesh = tfshard.create_mesh(**(mesh or {"batch": 4}))
    return tfshard.ShardedStrategy(
        mesh, layout_map or whole, zero_stage=stage, analyzer=analyzer, slot_dtype=slot_dtype
    )


def train(slot_dtype, optimizer, steps=12, eager=False, **options):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model, strategy = tfshard.as_distributed(build()), strategy_of(slot_dtype, **options)
    model.compile(optimizer(), "mse", strategy=strategy, run_eagerly=eager)
    losses = [float(model.train_on_batch(X, Y)) for _ in range(steps)]
    return model, strategy, losses


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "adamw_ema": lambda: keras.optimizers.AdamW(1e-3, use_ema=True),
    "momentum": lambda: keras.optimizers.SGD(1e-2, momentum=0.9),
    "accumulation": lambda: keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2),
    "clipped": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=0.1),
    "lion": lambda: keras.optimizers.Lion(1e-4),
    "lamb": lambda: keras.optimizers.Lamb(1e-3),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)),
}


@functools.cache
def in_float32(name, grouping, stage):
    return train(None, OPTIMIZERS[name], stage=stage, analyzer=ANALYZERS[grouping])[2]


def is_moment(variable) -> bool:
    return len(variable.shape) > 0 and not variable.path.endswith(("gradient_accumulator", "_average"))


def is_narrow(variable, slot_dtype) -> bool:
    return is_moment(variable) and (slot_dtype == "bfloat16" or np.prod(variable.shape) >= 4096)


CASES = list(itertools.product(STORED, OPTIMIZERS, ANALYZERS, (0, 1, 3)))
# Each optimizer with each dtype, once in groups and once alone.
ALWAYS = [
    (dtype, name, list(ANALYZERS)[(i + j) % 2], (3, 1, 3, 0)[(2 * i + j) % 4])
    for (i, dtype), (j, name) in itertools.product(enumerate(STORED), enumerate(OPTIMIZERS))
]


@pytest.mark.sweep(1)
@table("slots in few bits", ("slot_dtype", "name", "grouping", "stage"), CASES, always=ALWAYS, sample=2)
def test_training_stays_near_float32(slot_dtype, name, grouping, stage):
    expected = in_float32(name, grouping, stage)
    model, strategy, losses = train(slot_dtype, OPTIMIZERS[name], stage=stage, analyzer=ANALYZERS[grouping])
    slots = [each for each in model.optimizer.variables if len(each.shape)]
    assert {each.value.buffer.dtype for each in slots if is_narrow(each, slot_dtype)} == {STORED[slot_dtype]}, "premise"
    assert {each.value.buffer.dtype for each in slots if not is_narrow(each, slot_dtype)} <= {tf.float32}
    assert {each.value.dtype for each in slots} == {tf.float32}
    assert {each.value.buffer.dtype for each in model.trainable_variables} == {tf.float32}
    assert losses[0] == expected[0]
    assert expected[-1] < 0.98 * expected[0], "premise: it learns"
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    plan, report = strategy.plan(model), strategy.report(model)
    assert plan.bytes_per_device("slot") == pytest.approx(report.bytes_per_device("slot"), abs=64)


@pytest.mark.slow
def test_an_eager_step_is_a_traced_one():
    losses = {eager: train("int8", OPTIMIZERS["adam"], eager=eager, steps=4)[2] for eager in (True, False)}
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-5)


# --- elements of a block ------------------------------------------------------------------------------


def in_blocks(values: np.ndarray) -> np.ndarray:
    """Round a local shard in blocks."""
    line = np.pad(values.reshape(-1), (0, -values.size % 256)).reshape(-1, 256)
    return eight_bits.decode(eight_bits.encode(tf.constant(line))).numpy().reshape(-1)[: values.size]


def rounded(value: np.ndarray, axes: tuple, sizes: dict) -> np.ndarray:
    """Round an ungrouped slot shard by shard."""
    result = value.copy()
    for location in itertools.product(*(range(size) for size in sizes.values())):
        box = boxes.shard_box(value.shape, axes, sizes, dict(zip(sizes, location, strict=True)))
        result[box.slices] = in_blocks(value[box.slices]).reshape(box.shape)
    return result


def doubled(slot) -> None:
    """Double a slot outside a step: the stored form is gathered, decoded, encoded, and cut."""
    slot.assign(2 * slot.value())


SHARDED = {
    "batch4": {"batch": 4},
    "batch2_model2": {"batch": 2, "model": 2},
    "model2_batch2": {"model": 2, "batch": 2},
    "model2": {"batch": 1, "model": 2},
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mesh", SHARDED)
def test_blocks_are_of_what_a_device_holds(mesh, stage):
    """Values set from the host equal the values that each device encodes separately, and that a step reads."""
    sizes, layout_map = SHARDED[mesh], tfshard.LayoutMap()
    if sizes.get("model"):
        layout_map.column("net/hidden_66")
        layout_map.row("net/hidden_64")
    layout_map.replicated(".*", optional=True)
    model, strategy, _ = train("int8", OPTIMIZERS["momentum"], steps=1, stage=stage, mesh=sizes, layout_map=layout_map)
    slots = {each.path: each.value for each in model.optimizer.variables if is_narrow(each, "int8")}
    assert len(slots) == 3, "premise"
    layouts = {slot.layout.spec.shape: slot.layout.update for slot in slots.values() if slot.layout.flat is None}
    if mesh == "batch2_model2" and stage == 3:
        # The column kernel has both dims sharded, in both orders, and so has the row kernel.
        assert layouts == {(96, 66): ("batch", "model"), (66, 64): ("model", "batch"), (64, 65): ("batch", None)}
    random = np.random.RandomState(1)
    values = {
        path: (random.normal(size=slot.shape) * 10 ** random.uniform(-3, 3, size=slot.shape)).astype("float32")
        for path, slot in slots.items()
    }
    for path, slot in slots.items():
        slot.assign(values[path])

    @tf.function
    def read():
        return [tf.identity(slot.value()) for slot in slots.values()]

    in_step = strategy.run(read)
    for (path, slot), read_in_step in zip(slots.items(), in_step, strict=True):
        if slot.layout.flat is None:
            expected = rounded(values[path], slot.layout.update, sizes)
        else:
            line = np.pad(values[path].reshape(-1), (0, slot.layout.flat.padding)).reshape(sizes["batch"], -1)
            expected = np.concatenate([in_blocks(row) for row in line])[: values[path].size].reshape(slot.shape)
        assert 0 < np.abs(expected - values[path]).max(), "premise: something is rounded"
        np.testing.assert_array_equal(slot.numpy(), expected, err_msg=path)
        np.testing.assert_array_equal(read_in_step.numpy(), expected, err_msg=path)
        np.testing.assert_array_equal(tf.function(slot.value)(), expected, err_msg=path)
        tf.function(functools.partial(doubled, slot))()
        np.testing.assert_array_equal(slot.numpy(), 2 * expected, err_msg=path)


def test_updates_are_those_of_one_device_whose_slots_are_rounded_after_each():
    """An update uses the unrounded new slots, and the next update uses the stored slots."""
    model, _, losses = train("int8", OPTIMIZERS["adam"])
    assert sum(is_narrow(each, "int8") for each in model.optimizer.variables) == 6, "premise"
    axes = {tuple(each.shape): each.value.layout.update for each in model.optimizer.variables if is_moment(each)}
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    plain = build()
    plain.compile(OPTIMIZERS["adam"](), "mse", jit_compile=False)
    expected = []
    for _ in losses:
        expected.append(float(plain.train_on_batch(X, Y)))
        for slot in plain.optimizer.variables:
            if is_narrow(slot, "int8"):
                slot.assign(rounded(np.array(slot), axes[tuple(slot.shape)], {"batch": 4}))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # An element between two codes may be rounded to either.
    ours, theirs = ([np.array(each) for each in of.optimizer.variables] for of in (model, plain))
    for our, their, slot in zip(ours, theirs, model.optimizer.variables, strict=True):
        same = np.isclose(our, their, rtol=1e-3, atol=1e-4 * np.abs(their).max())
        assert np.mean(same) > 0.99, slot.path


def test_gradients_of_all_sizes_never_divide_by_a_second_moment_of_zero():
    """Inputs of 1e-8 to 1e2 in one block give second moments of 20 decades."""
    inputs = (RS.normal(size=(32, 256)) * 10 ** RS.permutation(np.linspace(-8, 2, 256))).astype("float32")
    moved, velocities = {}, {}
    for dtype in (None, "int8"):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        # Its rows have 32 elements: a block has the gradients of eight inputs.
        model = tfshard.as_distributed(keras.Sequential([keras.Input((256,)), keras.layers.Dense(32)]))
        model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-30), "mse", strategy=strategy_of(dtype))
        before = np.array(model.trainable_variables[0])
        random = np.random.RandomState(1)
        for _ in range(10):
            model.train_on_batch(inputs, random.normal(size=(32, 32)).astype("float32"))
        moved[dtype] = np.abs(np.array(model.trainable_variables[0]) - before)
        velocity = next(each for each in model.optimizer.variables if each.path.endswith("kernel_velocity"))
        velocities[dtype] = np.array(velocity)
    assert velocity.value.buffer.dtype == tf.uint8, "premise"
    blocks = velocities[None].reshape(-1, 256)
    assert np.median(blocks.max(-1) / blocks.min(-1)) > 1e10, "premise"
    assert velocities["int8"].min() > 0
    # Ten steps of Adam move a weight by at most about ten times the rate.
    assert moved[None].max() < 1.5e-2, "premise"
    assert moved["int8"].max() < 1.5e-2


# --- bytes, checkpoints, refusals ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("grouping", ANALYZERS)
@pytest.mark.parametrize(("slot_dtype", "share"), [("bfloat16", 1 / 2), ("int8", 260 / 1024)])
def test_slots_take_fewer_bytes(slot_dtype, share, grouping):
    held = {}
    for dtype in (None, slot_dtype):
        model, strategy, _ = train(dtype, OPTIMIZERS["adam"], steps=1, analyzer=ANALYZERS[grouping])
        rows = strategy.report(model).variables
        moments = {each.path for each in model.optimizer.variables if is_narrow(each, slot_dtype)}
        held[dtype] = sum(row.bytes_per_device for row in rows if row.kind == "slot" and row.path in moments)
    # The last block of a local shard is padded.
    assert share * held[None] - 16 <= held[slot_dtype] <= share * held[None] + 6 * 260
    groups = {each.value.storage for each in model.optimizer.variables if each.value.storage.is_group}
    if slot_dtype == "int8" and grouping == "groups":
        assert {storage.buffer.dtype for storage in groups} == {tf.uint8, tf.float32}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("grouping", ANALYZERS)
@pytest.mark.parametrize("slot_dtype", STORED)
def test_slots_survive_a_checkpoint(slot_dtype, grouping, tmp_path):
    model, _, _ = train(slot_dtype, OPTIMIZERS["adam"], steps=4, analyzer=ANALYZERS[grouping])
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    before = [np.array(each) for each in model.optimizer.variables]
    after = [float(model.train_on_batch(X, Y)) for _ in range(2)]
    manager.restore(model)
    for each, value in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(np.array(each), value, err_msg=each.path)
    assert [float(model.train_on_batch(X, Y)) for _ in range(2)] == after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"slot_dtype": "int8"}, {"slot_dtype": None}),
        ({"slot_dtype": None}, {"slot_dtype": "int8"}),
        ({"slot_dtype": "int8"}, {"slot_dtype": "int8", "mesh": {"batch": 2}, "analyzer": ANALYZERS["groups"]}),
        ({"slot_dtype": "int8", "stage": 0}, {"slot_dtype": "int8", "stage": 1}),
        ({"slot_dtype": "bfloat16"}, {"slot_dtype": "int8"}),
        ({"slot_dtype": "int8"}, {"slot_dtype": "bfloat16"}),
    ],
    ids=lambda options: "-".join(map(str, options.values())).replace(" ", ""),
)
def test_a_checkpoint_restores_under_another_dtype_and_mesh(source, target, tmp_path):
    model, _, _ = train(optimizer=OPTIMIZERS["adam"], steps=4, **source)
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, 1)
    saved = {each.path: np.array(each) for each in model.optimizer.variables}
    weights = [np.array(each) for each in model.trainable_variables]
    after = float(model.train_on_batch(X, Y))
    other, _, _ = train(optimizer=OPTIMIZERS["adam"], steps=1, **target)
    manager.restore(other)
    for each, value in zip(other.trainable_variables, weights, strict=True):
        np.testing.assert_array_equal(np.array(each), value, err_msg=each.path)
    for each in other.optimizer.variables:
        found, value = np.array(each), saved[each.path]
        if not is_narrow(each, target["slot_dtype"]):
            np.testing.assert_array_equal(found, value, err_msg=each.path)
        elif len(value.shape):
            # Rounded again, in blocks that may have other elements.
            error = np.linalg.norm(found - value) / np.linalg.norm(value)
            assert error < 0.02, each.path
    assert float(other.train_on_batch(X, Y)) == pytest.approx(after, rel=1e-5)


def test_patterns_choose():
    slot_dtype = {".*hidden_66/.*": "float32", ".*/kernel": "int8", ".*": "bfloat16"}
    model, strategy, _ = train(slot_dtype, OPTIMIZERS["adam"], steps=2, analyzer=ANALYZERS["groups"])
    found = {
        each.path.removeprefix("adam/net_").removesuffix("_momentum"): each.value.buffer.dtype
        for each in model.optimizer.variables
        if each.path.endswith("momentum")
    }
    assert found == {
        "hidden_66_kernel": tf.float32, "hidden_66_bias": tf.float32, "hidden_64_kernel": tf.uint8,
        "hidden_64_bias": tf.bfloat16, "hidden_65_kernel": tf.uint8, "hidden_65_bias": tf.bfloat16,
        "head_kernel": tf.float32, "head_bias": tf.bfloat16,
    }  # fmt: skip
    held = strategy.report(model).bytes_per_device("slot")
    assert strategy.plan(model).bytes_per_device("slot") == pytest.approx(held, abs=64)
    assert not strategy.report(model).misplaced
    alone = tfshard.plan(model, {"batch": 4}, optimizer="adam", slot_dtype=slot_dtype)
    assert alone.bytes_per_device("slot") == pytest.approx(held, abs=64)


@pytest.mark.parametrize("wrong", ["int4", "float16", 3, {".*": "int4"}, {".*": None}])
def test_another_dtype_is_refused(wrong):
    with pytest.raises(tfshard.errors.StrategyError, match="slot_dtype must be None, or one of 'float32', .* 'int8'"):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), slot_dtype=wrong)


def test_what_is_no_pattern_is_refused():
    with pytest.raises(tfshard.errors.StrategyError, match="not a regular expression: .*Received: slot_dtype="):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), slot_dtype={"*": "int8"})
