"""Every optimizer matches plain Keras on one device, on every mesh, at every stage, with and without groups."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import sweeps
import tfshard
from tfshard.storage import update_order
from tfshard.storage.formats import Unpacked

MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}, "model4": {"model": 4}}
STAGES = (0, 1, 2, 3)
# The analyzers decide which variables are in groups. Mixed: only the kernel of more than a kibibyte stands alone.
ANALYZERS = {
    "grouped": tfshard.ParameterAnalyzer(),
    "alone": None,
    "mixed": tfshard.ParameterAnalyzer(group_threshold_bytes=1024),
}
KERNEL = "up/kernel"
opt = keras.optimizers
# With these rates each variable moves far in few steps.
OPTIMIZERS = {
    "sgd": lambda: opt.SGD(0.1),
    "sgd_momentum": lambda: opt.SGD(0.1, momentum=0.9, nesterov=True),
    "sgd_weight_decay": lambda: opt.SGD(0.1, weight_decay=0.1),
    "adam": lambda: opt.Adam(0.01),
    "adam_amsgrad_ema": lambda: opt.Adam(0.01, amsgrad=True, use_ema=True, ema_momentum=0.5),
    "adamw": lambda: opt.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: opt.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: opt.Adagrad(0.1),
    "adamax": lambda: opt.Adamax(0.01),
    "nadam": lambda: opt.Nadam(0.01),
    "adadelta": lambda: opt.Adadelta(10.0),
    "lion": lambda: opt.Lion(0.01),
    "ftrl": lambda: opt.Ftrl(0.1),
    "lamb": lambda: opt.Lamb(0.01),
    "adafactor": lambda: opt.Adafactor(1.0),
    "muon": lambda: opt.Muon(0.01),
    "adam_ema_overwrite": lambda: opt.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "adam_clipnorm": lambda: opt.Adam(0.01, clipnorm=0.01),
    "adam_clipvalue": lambda: opt.Adam(0.01, clipvalue=0.001),
    "adam_global_clipnorm": lambda: opt.Adam(0.01, global_clipnorm=0.01),
    "adam_accumulation": lambda: opt.Adam(0.01, gradient_accumulation_steps=2),
    "adam_accumulation_ema": lambda: opt.Adam(0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5),
    "adam_loss_scale": lambda: opt.LossScaleOptimizer(opt.Adam(0.01), initial_scale=4.0),
}
WITHOUT_SLOTS = ("sgd", "sgd_weight_decay")
# Two updates from accumulated gradients, two overwritten averages, and one more step.
STEPS = 5
# The tolerance of a weight: rounding of float32, which Newton-Schulz iterations (Muon) and normed updates (Adafactor)
# amplify.
TOLERANCE = 5e-6
# Relative to a slot's largest element, because many slots are smaller than the tolerance of a weight.
SLOT_TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def small_updates_are_in_order(monkeypatch):
    """Order small updates like large ones."""
    monkeypatch.setattr(update_order, "LEAST_BYTES", 0)


def build() -> keras.Model:
    """Return a matrix, a kernel and a vector that 4 does not divide, and a column and row pair."""
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 6, name="embed")(tokens)
    x = keras.layers.Dense(12, activation="tanh", name="up")(keras.layers.Flatten()(x))
    return keras.Model(tokens, keras.layers.Dense(3, name="down")(x))


def batches() -> list:
    rs = np.random.RandomState(0)
    return [(rs.randint(0, 7, (8, 5)), rs.randint(0, 3, (8,))) for _ in range(3)]


def train(name: str, strategy: tfshard.ShardedStrategy | None = None, *, steps: int = STEPS) -> parity.Run:
    return parity.train(
        build,
        batches(),
        optimizer=OPTIMIZERS[name],
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy=strategy,
        steps=steps,
        eager=strategy is None,
    )


@functools.cache
def reference(name: str) -> parity.Run:
    return train(name)


@functools.cache
def initial() -> dict[str, np.ndarray]:
    return train("sgd", steps=0).weights


def strategy(mesh: str, stage: int, grouping: str, **options) -> tfshard.ShardedStrategy:
    layout_map = tfshard.LayoutMap()
    if "model" in MESHES[mesh]:
        layout_map.column("up")
        layout_map.row("down")
        layout_map.replicated("embed.*")
    return tfshard.ShardedStrategy(
        tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=stage, analyzer=ANALYZERS[grouping], **options
    )


def chosen_cases():
    """Yield the cells that each run takes: few cells that cover all pairs of optimizer, mesh, stage and grouping.

    The stages differ only on meshes with a batch axis. An optimizer therefore meets stages 1, 2 and 3 there, each with
    another grouping, and model4 at stage 0. Adam, Muon and Lamb also meet stage 0 with a batch axis, and another stage
    on model4. `test_the_chosen_cases_cover_all_pairs` checks the pairs.
    """
    groupings = list(ANALYZERS)
    for number, name in enumerate(OPTIMIZERS):
        for stage in (1, 2, 3):
            yield name, list(MESHES)[(number + stage) % 2], stage, groupings[(number // 2 + stage + 2) % 3]
        yield name, "model4", 0, groupings[number % 3]
    for number, name in enumerate(("adam", "muon", "lamb")):
        yield name, list(MESHES)[number % 2], 0, groupings[number]
        yield name, "model4", 1 + number, groupings[(number + 1) % 3]
    # An update needs the full table, which is sharded in its second dim: it is gathered in another order.
    yield "muon", "batch2_model2", 3, "alone"


CASES = list(itertools.product(OPTIMIZERS, MESHES, STAGES, ANALYZERS))
CHOSEN = list(chosen_cases())


def test_the_chosen_cases_cover_all_pairs():
    arguments = [OPTIMIZERS, MESHES, STAGES, ANALYZERS]
    for i, j in itertools.combinations(range(4), 2):
        assert {(case[i], case[j]) for case in CHOSEN} == set(itertools.product(arguments[i], arguments[j]))
    # The cases with a batch axis.
    sharded = [case for case in CHOSEN if case[1] != "model4"]
    assert {case[:1] + case[2:3] for case in sharded} >= set(itertools.product(OPTIMIZERS, (1, 2, 3)))
    assert {case[:1] + case[3:] for case in sharded} == set(itertools.product(OPTIMIZERS, ANALYZERS))
    assert {case[1:] for case in sharded} >= set(itertools.product(["batch4", "batch2_model2"], (1, 2, 3), ANALYZERS))
    for name in ("adam", "muon", "lamb"):
        assert {case[2] for case in sharded if case[0] == name} == set(STAGES)
    assert len(CHOSEN) == len(set(CHOSEN)) < len(CASES) / 8


def moved(name: str) -> dict[str, float]:
    """Return the largest movement of a weight for each variable."""
    return {path: np.abs(value - initial()[path]).max() for path, value in reference(name).weights.items()}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_variable_moves_by_a_hundred_times_the_tolerance(name):
    assert len(moved(name)) == 5
    assert min(moved(name).values()) > 100 * TOLERANCE


def axes_of(variable: keras.Variable) -> set:
    """Return the mesh axes that shard a variable's storage."""
    return {axis for axis in variable.value.buffer.layout.sharding_specs if axis in ("batch", "model")}


def check_placement(model: keras.Model, name: str, mesh: str, stage: int, grouping: str) -> None:
    """Check that variables are in groups or alone, and that they and their slots are sharded as the stage says."""
    expected = {"model"} if "model" in MESHES[mesh] else set()
    if stage == 3 and "batch" in MESHES[mesh]:
        expected.add("batch")
    assert parity.shard_axes(model) == expected
    variables = {variable.path: variable for variable in model.trainable_variables}
    groups = {path for path, variable in variables.items() if variable.value.storage.is_group}
    alone = {"grouped": set(), "mixed": {KERNEL}, "alone": variables.keys()}[grouping]
    assert groups == variables.keys() - alone
    assert axes_of(variables[KERNEL]) == expected
    assert (type(variables[KERNEL].value.storage.format) is Unpacked) == (KERNEL not in groups)
    batch = {"batch"} & MESHES[mesh].keys()
    assert all(axes_of(variable) & {"batch"} == (batch if stage == 3 else set()) for variable in variables.values())
    slots = [variable for variable in model.optimizer.variables if np.prod(variable.shape) > 1]
    assert bool(slots) == (name not in WITHOUT_SLOTS)
    assert all(axes_of(variable) & {"batch"} == (batch if stage else set()) for variable in slots)
    in_groups = {variable.path for variable in slots if variable.value.storage.is_group}
    assert bool(in_groups) == bool(groups and slots)


@pytest.mark.sweep(1)
@sweeps.table("optimizers", ("name", "mesh", "stage", "grouping"), CASES, always=CHOSEN, sample=2)
def test_training_matches_one_device(name, mesh, stage, grouping):
    assert len(tf.config.list_logical_devices("CPU")) >= 4
    run, expected = train(name, strategy(mesh, stage, grouping)), reference(name)
    check_placement(run.model, name, mesh, stage, grouping)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=2e-6)
    weights = expected.weights
    for path, value in run.weights.items():
        np.testing.assert_allclose(value, weights[path], rtol=0, atol=TOLERANCE, err_msg=path)
    for ours, theirs in zip(run.slots, expected.slots, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=SLOT_TOLERANCE * np.abs(theirs).max(), err_msg="slots")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_variables_that_stand_alone_are_updated_in_pieces(stage):
    """Each variable is gathered once, before its use or after its update. Slots are never gathered."""
    keras.backend.clear_session()
    model = tfshard.as_distributed(build())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, strategy=strategy("batch4", stage, "alone", reshard_after_forward=False))
    profile = tfshard.profile_step(model, batches()[0])
    check_placement(model, "adam", "batch4", stage, "alone")
    assert profile.count("all-gather") == len(model.trainable_variables) == 5


def test_averages_of_weights_are_made_of_shards():
    """Ungrouped variables are not gathered for averages: the number of gathers stays the same."""
    counts = []
    for use_ema in (False, True):
        keras.backend.clear_session()
        layers = [keras.layers.Dense(16, use_bias=False) for _ in range(3)]
        model = tfshard.as_distributed(keras.Sequential([keras.Input((16,)), *layers]))
        model.compile(keras.optimizers.Adam(use_ema=use_ema), "mse", strategy=strategy("batch4", 3, "alone"))
        profile = tfshard.profile_step(model, (np.ones((8, 16)), np.ones((8, 16))))
        counts.append(profile.count("all-gather"))
    assert counts[0] == counts[1] >= 3
