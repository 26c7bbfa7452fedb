"""Embedding tables sharded by rows are looked up and updated by rows, with the numbers of one device."""

import dataclasses
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard.contrib.embedding_tables import sparse_optimizers
from tfshard.contrib.embedding_tables.table_kind import TableKind
from tfshard.devices.uneven_exchanges import capacities
from tfshard.errors import LayoutError, StrategyError
from tfshard.layouts import ModelPlacement, VariableSpec
from tfshard.layouts.config import GroupPolicy, ShardingConfig, ZeroStage
from tfshard.measure import assert_matches_plan, step_profile

ROWS, WIDTH = 33, 4
TABLE = ".*items/embeddings"
opt = keras.optimizers


def strategy(mesh=None, sparse="keras", **options):
    tables = tfshard.EmbeddingTables(TABLE, sparse=sparse)
    return tfshard.ShardedStrategy(tfshard.create_mesh(**(mesh or {"batch": 4})), tables=tables, **options)


def model(rows=ROWS, width=WIDTH, **options):
    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(rows, width, name="items", **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(keras.layers.Flatten()(x)))


def batches(rows=ROWS):
    """Return ids that differ; of which one repeats often; of one device only; and rows that four does not divide."""
    rs = np.random.RandomState(0)
    ids = [
        rs.permutation(rows)[:24].reshape(8, 3),
        np.where(rs.uniform(size=(8, 3)) < 0.7, 5, rs.randint(0, rows, (8, 3))),
        rs.randint(0, 5, (8, 3)),
        rs.randint(0, rows, (6, 3)),
        rs.randint(0, rows, (1, 3)),
        np.full((8, 3), rows - 1),
    ]
    return [(each.astype("int32"), rs.normal(size=(len(each), 1)).astype("float32")) for each in ids]


def trained(build, optimizer, strategy=None, *, data=None, seed=0):
    """Return a model after a step with each batch, and the losses.

    Without a strategy, the model is plain Keras, with sparse gradients.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    made = build()
    if strategy is None:
        made.compile(optimizer(), "mse", jit_compile=False)
    else:
        tfshard.as_distributed(made).compile(optimizer(), "mse", strategy=strategy)
    return made, [float(made.train_on_batch(*batch)) for batch in data or batches()]


def assert_same(ours, theirs, *, rtol=1e-5, atol=2e-6):
    np.testing.assert_allclose(ours[1], theirs[1], rtol=rtol, atol=atol)
    assert len(ours[0].variables) == len(theirs[0].variables)
    for mine, other in zip(ours[0].variables, theirs[0].variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=rtol, atol=atol, err_msg=other.path)
    for mine, other in zip(ours[0].optimizer.variables, theirs[0].optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=rtol, atol=atol, err_msg=other.path)


def assert_is_table(made, rows=ROWS, devices=4):
    """Premise: the table and its slots have equally many rows on each device."""
    table = made.get_layer("items").embeddings.value
    slots = list(table.slots.values())
    for each in (table, *slots):
        pieces = [piece.shape for _, piece in each.storage.local_tensors()]
        assert len(pieces) == 4 and set(pieces) == {(-(-rows // devices), table.shape[1])}
    assert {each.layout.storage for each in (table, *slots)} == {("batch" if devices > 1 else None, None)}


OPTIMIZERS = {
    "SGD": lambda: opt.SGD(0.1),
    "momentum": lambda: opt.SGD(0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda: opt.Adagrad(0.1),
    "Adam": lambda: opt.Adam(0.02, amsgrad=True),
    "AdamW": lambda: opt.AdamW(0.02, weight_decay=0.1),
    "decayed SGD": lambda: opt.SGD(0.1, weight_decay=0.1),
    "RMSprop": lambda: opt.RMSprop(0.01, momentum=0.5, centered=True),
    "Nadam": lambda: opt.Nadam(0.02),
    "clipped": lambda: opt.Adagrad(0.1, clipnorm=0.5),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_has_the_numbers_of_plain_keras_on_one_device(name):
    theirs = trained(model, OPTIMIZERS[name])
    ours = trained(model, OPTIMIZERS[name], strategy())
    assert_is_table(ours[0])
    keras.utils.set_random_seed(0)
    before = model().get_layer("items").embeddings.numpy()
    assert np.abs(theirs[0].get_layer("items").embeddings.numpy() - before).max() > 1e-2
    # In RMSprop, the square root of a small number amplifies the last bit.
    assert_same(ours, theirs, atol=2e-5 if name == "RMSprop" else 2e-6)


@pytest.mark.slow
def test_squares_are_those_of_each_place_in_which_a_row_was_looked_up(monkeypatch):
    """Keras squares a sparse gradient per occurrence. Premise: summing before squaring would give other numbers."""
    theirs = trained(model, OPTIMIZERS["Adagrad"])
    monkeypatch.setattr(sparse_optimizers, "squares", lambda optimizer: False)
    monkeypatch.setattr(sparse_optimizers, "is_known_sparse", lambda optimizer: True)
    summed = trained(model, OPTIMIZERS["Adagrad"], strategy())
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same(summed, theirs, atol=1e-3)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_table_is_sharded_at_every_stage(stage):
    theirs = trained(model, OPTIMIZERS["Adam"])
    ours = trained(model, OPTIMIZERS["Adam"], strategy(zero_stage=stage))
    assert_is_table(ours[0])
    assert_same(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("layout_map", ["auto", "by hand"])
@pytest.mark.parametrize("mesh", [{"batch": 2, "model": 2}, {"batch": 1, "model": 4}], ids=str)
def test_a_table_on_a_mesh_with_a_model_axis(mesh, layout_map):
    rows = 36  # A size that "auto" would shard over the model axis.
    if layout_map == "by hand":
        layout_map = {".*hidden/kernel": (None, "model"), ".*hidden/bias": ("model",), ".*out/kernel": ("model", None)}

    def build():
        inputs = keras.Input((3,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(rows, WIDTH, name="items")(inputs))
        x = keras.layers.Dense(8, activation="tanh", name="hidden")(x)
        return keras.Model(inputs, keras.layers.Dense(1, name="out")(x))

    theirs = trained(build, OPTIMIZERS["Adagrad"])
    ours = trained(build, OPTIMIZERS["Adagrad"], strategy(mesh, layout_map=layout_map))
    assert_is_table(ours[0], rows, devices=mesh["batch"])
    plan = tfshard.plan(build(), mesh, layout_map, tables=TABLE, optimizer="adagrad")
    assert plan.bytes_per_device("parameter") == ours[0].distribute_strategy.report(ours[0]).bytes_per_device(
        "parameter"
    )
    assert "model" in parity.shard_axes(ours[0]), "premise: the other axis is used"
    assert_same(ours, theirs)
    tfshard.ShardedStrategy.check_consistency(ours[0].distribute_strategy, ours[0])


def several_lookups(dtype="int64"):
    """Return a table that is looked up with ids of two shapes, negative ids, equal ids for all samples, and a mask."""
    inputs = keras.Input((3,), dtype=dtype)
    one = keras.layers.Lambda(lambda x: x[:, 0] - 2)(inputs)
    table = keras.layers.Embedding(ROWS, WIDTH, name="items", mask_zero=True)

    class AllAlike(keras.layers.Layer):
        def call(self, x):
            return x + keras.ops.take(table.embeddings, keras.ops.arange(WIDTH) * 5, axis=0)

        def compute_mask(self, x, mask=None):
            return mask

    x = AllAlike()(keras.ops.pad(table(inputs), [[0, 0], [0, 1], [0, 0]]))
    x = keras.layers.GlobalAveragePooling1D()(x)
    x = x * table(one) + keras.layers.GlobalAveragePooling1D()(table(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(x))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("sparse", ["keras", "lazy"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_several_lookups_of_one_table_in_a_step(dtype, sparse):
    made = several_lookups(dtype)
    assert np.shape(made(batches()[0][0])) == (8, 1), "premise: it runs"
    optimizer = OPTIMIZERS["Adagrad" if sparse == "keras" else "SGD"]
    theirs = trained(lambda: several_lookups(dtype), optimizer)
    ours = trained(lambda: several_lookups(dtype), optimizer, strategy(sparse=sparse))
    assert_is_table(ours[0])
    assert_same(ours, theirs)


@pytest.mark.slow
def test_two_tables_and_one_that_is_frozen():
    def build():
        inputs = keras.Input((3,), dtype="int32")
        tables = [keras.layers.Embedding(ROWS, WIDTH, name=name) for name in ("items", "other_items", "frozen_items")]
        tables[2].trainable = False
        x = keras.ops.concatenate([table(inputs) for table in tables], axis=-1)
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))

    theirs = trained(build, OPTIMIZERS["Adam"])
    ours = trained(build, OPTIMIZERS["Adam"], strategy())
    assert_is_table(ours[0])
    assert sum(isinstance(variable.value.layout.kind, TableKind) for variable in ours[0].variables) == 3
    assert_same(ours, theirs)


def test_mixed_precision():
    theirs = trained(lambda: model(dtype="mixed_bfloat16"), OPTIMIZERS["SGD"])
    ours = trained(lambda: model(dtype="mixed_bfloat16"), OPTIMIZERS["SGD"], strategy())
    assert ours[0].get_layer("items").compute_dtype == "bfloat16"
    assert_is_table(ours[0])
    assert_same(ours, theirs, rtol=2e-2, atol=1e-2)


# --- Only the looked-up rows -----------------------------------------------------------------------------


def lazy_adam(table, gradient_of, steps, rate=0.02, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    """Run Adam (Kingma and Ba 2015) in float64 on the rows that a step looks up, with each row's gradients summed."""
    m, v = np.zeros_like(table), np.zeros_like(table)
    for step, ids in enumerate(steps, start=1):
        rows, gradient = np.unique(ids), np.zeros_like(table)
        np.add.at(gradient, ids.reshape(-1), gradient_of(table, ids).reshape(-1, table.shape[1]))
        m[rows] += (gradient[rows] - m[rows]) * (1 - beta_1)
        v[rows] += (gradient[rows] ** 2 - v[rows]) * (1 - beta_2)
        alpha = rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
        table[rows] -= m[rows] * alpha / (np.sqrt(v[rows]) + epsilon)
    return table, m, v


def summing(rows=ROWS):
    """Return a model with half the squared length of the looked-up rows as its loss, so the gradient is known."""
    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(rows, WIDTH, name="items")(inputs)
    return keras.Model(inputs, keras.ops.sum(x**2, axis=(1, 2))[:, None] / 2)


def test_lazy_adam_is_that_of_a_reference():
    data = [(ids, np.zeros((len(ids), 1), "float32")) for ids, _ in batches()]
    keras.utils.set_random_seed(0)
    table = summing().get_layer("items").embeddings.numpy().astype("float64")
    made = tfshard.as_distributed(summing())
    made.compile(opt.Adam(0.02), lambda y, x: keras.ops.mean(x), strategy=strategy(sparse="lazy"))
    made.get_layer("items").embeddings.assign(table)
    for batch in data:
        made.train_on_batch(*batch)
    assert_is_table(made)
    expected = lazy_adam(table, lambda table, ids: table[ids] / len(ids), [ids for ids, _ in data])
    found = [made.get_layer("items").embeddings, *made.optimizer.variables[2:]]
    for mine, reference in zip(found, expected, strict=True):
        assert np.abs(reference).max() > 1e-6
        np.testing.assert_allclose(mine.numpy(), reference, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "Adam", "RMSprop", "Adagrad"])
def test_a_lazy_update_changes_rows_that_were_looked_up_and_no_bit_of_others(name):
    made, _ = trained(model, OPTIMIZERS[name], strategy(sparse="lazy"))
    table = made.get_layer("items").embeddings.value
    family = [table, *table.slots.values()]
    assert len(family) > 1 and any(np.abs(slot.numpy()).min(axis=1).any() for slot in family[1:])
    before = [each.numpy().copy() for each in family]
    ids = np.array([[0, 8, 9]] * 8, "int32")
    made.train_on_batch(ids, np.ones((8, 1), "float32"))
    for each, old in zip(family, before, strict=True):
        changed = np.flatnonzero((each.numpy() != old).any(axis=1))
        assert changed.tolist() == [0, 8, 9]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_kerass_meaning_touches_no_more_where_one_device_does_not(name):
    made, _ = trained(model, OPTIMIZERS[name], strategy())
    table = made.get_layer("items").embeddings.value
    family = [table, *table.slots.values()]
    before = [each.numpy().copy() for each in family]
    made.train_on_batch(np.array([[0, 8, 9]] * 8, "int32"), np.ones((8, 1), "float32"))
    for each, old in zip(family, before, strict=True):
        assert np.flatnonzero((each.numpy() != old).any(axis=1)).tolist() == [0, 8, 9]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "sparse"), [("SGD", "keras"), ("Adagrad", "keras"), ("Adam", "lazy")])
def test_a_step_allocates_nothing_that_grows_with_the_table(name, sparse):
    """On CPU, the trace reports allocations above 256 KiB."""
    rows = 400_000
    made, _ = trained(lambda: model(rows), OPTIMIZERS[name], strategy(sparse=sparse), data=batches(rows)[:1])
    piece = rows * WIDTH
    assert piece > step_profile.SMALL_BYTES
    assert not [each for each in allocated(made, batches(rows)[1]) if each >= piece / 2]
    whole, _ = trained(lambda: model(rows), OPTIMIZERS["Adam"], strategy(), data=batches(rows)[:1])
    assert [each for each in allocated(whole, batches(rows)[1]) if each >= piece], "premise: else it does"


def allocated(made, batch):
    """Return the bytes of each allocation in the second step with a batch."""
    made.train_on_batch(*batch)
    with step_profile.traced() as trace:
        made.train_on_batch(*batch)
    return [event.stats["requested_bytes"] for event in trace.events() if event.name == "MemoryAllocation"]


# --- Communication ---------------------------------------------------------------------------------------


def looking_up(rows, width):
    inputs = keras.Input((1,), dtype="int32")
    x = keras.layers.Embedding(rows, width, name="items", embeddings_initializer="ones")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))


BATCH = 1024


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "sparse"), [("SGD", "keras"), ("Adagrad", "keras"), ("Adam", "lazy")])
def test_a_step_sends_at_most_a_hundredth_of_a_dense_gradient(name, sparse):
    """The trace reports only collectives above 256 KiB, so rows are wide here. Their number does not matter."""
    width = 512
    rows = BATCH * 20
    rs = np.random.RandomState(0)
    x, y = rs.randint(0, rows, (BATCH, 1)).astype("int32"), np.ones((BATCH, 1), "float32")
    made, _ = trained(lambda: looking_up(rows, width), OPTIMIZERS[name], strategy(sparse=sparse), data=[(x, y)])
    assert_is_table(made, rows)
    plan = made.distribute_strategy.plan(made, inputs=x)
    most = max(each.bytes for each in plan.collectives if each.kind == "all-to-all")
    planned = sum(each.bytes * each.count for each in plan.collectives if each.kind == "all-to-all")
    assert most in (4 * BATCH * width, 8 * BATCH * width)
    assert planned <= 1_000_000 * width * 4 / 100
    for ids, is_most in ((x, False), (np.arange(BATCH, dtype="int32")[:, None], True)):
        profile = tfshard.profile_step(made, (ids, y))
        assert_matches_plan(profile, plan)
        told = [each.bytes for each in profile.collectives if each.kind == "all-to-all" and each.bytes]
        assert len(told) == 2, "premise: rows and their gradients are told, ids are too few"
        if is_most:
            # All ids are in the rows of one device, and all are different.
            assert sum(told) == planned - 2 * 4 * BATCH
        else:
            # Evenly spread ids: each list has about a quarter of the maximum length.
            assert sum(told) < planned / 2
    same = tfshard.profile_step(made, (np.full_like(x, 7), y))
    assert not same.bytes("all-to-all"), "what is looked up often is sent once"


def test_a_plan_of_a_million_rows():
    made = looking_up(1_000_000, 8)
    x = np.zeros((BATCH, 1), "int32")
    plan = tfshard.plan(made, {"batch": 4}, tables=TABLE, optimizer="adagrad", inputs=x)
    sent = {(each.kind, each.bytes) for each in plan.collectives if each.what == "items/embeddings"}
    ids, row = 4 * BATCH, 4 * 8 * BATCH
    assert sent == {("all-reduce", 4), ("all-to-all", ids), ("all-to-all", row), ("all-to-all", 2 * row)}
    assert sum(each.bytes for each in plan.collectives if each.kind == "all-to-all") <= 4 * 8 * 1_000_000 / 100
    assert plan.bytes_per_device("parameter") - 4 * 8 * 250_000 < 100


def test_a_plan_of_tables_tells_bytes_at_rest_and_sent():
    made, _ = trained(model, OPTIMIZERS["Adam"], strategy(), data=batches()[:1])
    x = batches()[0][0]
    plan = made.distribute_strategy.plan(made, inputs=x)
    assert plan.collectives == tfshard.plan(made, {"batch": 4}, tables=TABLE, inputs=x).collectives
    report = made.distribute_strategy.report(made)
    assert not report.misplaced
    for kind in ("parameter", "slot"):
        assert plan.bytes_per_device(kind) == report.bytes_per_device(kind) > 0
    assert "at most" in str(plan) and "the peak of a step with embedding tables" in str(plan)
    unknown = made.distribute_strategy.plan(made)
    assert {each.bytes for each in unknown.collectives if each.kind == "all-to-all"} == {None}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_table_changes_no_group_of_others(stage):
    """Includes untrained variables that together are worth a gather only at stage 3."""
    others = [VariableSpec(path=f"mean_{i}", shape=(100_000,), trainable=False) for i in range(4)]
    others.append(VariableSpec(path="kernel", shape=(1024, 1024)))
    table = VariableSpec(path="items/embeddings", shape=(ROWS, WIDTH))
    config = ShardingConfig(zero_stage=ZeroStage.from_number(stage), analyzer=GroupPolicy())
    with_tables = dataclasses.replace(config, kinds=(TableKind(tfshard.EmbeddingTables(TABLE)),))
    without = ModelPlacement.of(others, config, mesh_shape={"batch": 4})
    placed = ModelPlacement.of([table, *others], with_tables, mesh_shape={"batch": 4})
    assert bool(without.groups()) == (stage == 3)
    assert isinstance(placed.variables[0].kind, TableKind) and placed.variables[0].group is None
    assert placed.groups().keys() == without.groups().keys()


def test_capacities_grow_by_an_eighth_and_end_with_all():
    for ids in (1, 2, 7, 8, 9, 256, 1000, 12345):
        found = capacities(ids)
        assert found[0] == 1 and found[-1] == ids
        assert all(a < b <= max(a + 1, a * 9 // 8) for a, b in zip(found, found[1:], strict=False))
        assert len(found) < 9 + 8 * np.log2(ids + 1)


# --- Other parts of the model ----------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluate_predict_and_a_file_that_plain_keras_loads(tmp_path):
    theirs = trained(model, OPTIMIZERS["Adam"])[0]
    ours = trained(model, OPTIMIZERS["Adam"], strategy())[0]
    x, y = np.concatenate([x for x, _ in batches()]), np.concatenate([y for _, y in batches()])
    np.testing.assert_allclose(ours.predict(x, verbose=0), theirs.predict(x, verbose=0), rtol=1e-5, atol=1e-5)
    assert ours.evaluate(x, y, verbose=0) == pytest.approx(theirs.evaluate(x, y, verbose=0), rel=1e-5)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    ours.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for mine, other in zip(loaded.variables, ours.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())


@pytest.mark.slow
def test_a_model_that_is_born_in_a_scope():
    keras.utils.set_random_seed(0)
    with strategy().scope():
        made = model()
    made.compile(OPTIMIZERS["Adagrad"](), "mse")
    losses = [float(made.train_on_batch(*batch)) for batch in batches()]
    assert_is_table(made)
    assert_same((made, losses), trained(model, OPTIMIZERS["Adagrad"]))


OTHERS = {
    "batch 2": lambda: strategy({"batch": 2}),
    "batch 3": lambda: strategy({"batch": 3}),
    "batch 1": lambda: strategy({"batch": 1}),
    "model": lambda: strategy({"batch": 2, "model": 2}, layout_map={".*": ()}),
    "replicas, without": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(replica=2, batch=2)),
    "lazy": lambda: strategy(sparse="lazy"),
    "without": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)),
    "without, stage 0": lambda: tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("direction", ["to", "from"])
def test_checkpoints_go_to_other_meshes_and_to_strategies_without_tables(name, direction, tmp_path):
    chosen = [strategy(), OTHERS[name]()]
    source, target = chosen if direction == "to" else chosen[::-1]
    saved = trained(model, OPTIMIZERS["Adam"], source)[0]
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(saved, step=1)
    manager.wait()
    restored = trained(model, OPTIMIZERS["Adam"], target, data=batches()[:1], seed=1)[0]
    old = restored.get_layer("items").embeddings.numpy()
    assert np.abs(old - saved.get_layer("items").embeddings.numpy()).max() > 1e-2, "premise: other values"
    manager.restore(restored, step=1)
    pairs = zip(
        restored.variables + restored.optimizer.variables, saved.variables + saved.optimizer.variables, strict=True
    )
    for mine, other in pairs:
        np.testing.assert_array_equal(mine.numpy(), other.numpy())
    if name != "lazy":
        again = [float(each.train_on_batch(*batches()[0])) for each in (restored, saved) for _ in range(2)]
        np.testing.assert_allclose(again[:2], again[2:], rtol=1e-5)


# --- Refusals --------------------------------------------------------------------------------------------


def test_ids_that_are_none_are_the_error_of_one_device_and_change_nothing():
    made, _ = trained(model, OPTIMIZERS["SGD"], strategy())
    before = [variable.numpy().copy() for variable in made.variables + made.optimizer.variables]
    for wrong in (ROWS, ROWS + 2, 10**6, -ROWS - 1):
        ids = batches()[0][0].copy()
        ids[5, 1] = wrong
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=rf"= \[{wrong if wrong > 0 else '[0-9]+'}\] does not index"
        ):
            made.train_on_batch(ids, batches()[0][1])
        for variable, old in zip(made.variables + made.optimizer.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), old)
    assert np.isfinite(made.train_on_batch(*batches()[0])), "and the process goes on"


def test_a_failing_step_of_a_model_of_tables_only_counts_on_no_device():
    """Nothing else in the step depends on an operation that could fail."""

    def build():
        inputs = keras.Input((2,), dtype="int32")
        x = keras.layers.Embedding(ROWS, WIDTH, name="items")(inputs)
        return keras.Model(inputs, keras.ops.sum(x[:, 0] * x[:, 1], axis=-1, keepdims=True))

    rs = np.random.RandomState(0)
    ids, y = rs.randint(0, ROWS, (8, 2)).astype("int32"), np.ones((8, 1), "float32")
    made, _ = trained(build, OPTIMIZERS["Adagrad"], strategy(), data=[(ids, y)] * 2)
    before = [variable.numpy().copy() for variable in made.variables + made.optimizer.variables]
    for place in range(8):
        wrong = ids.copy()
        wrong[place, 0] = ROWS
        with pytest.raises(tf.errors.InvalidArgumentError, match="does not index"):
            made.train_on_batch(wrong, y)
        made.distribute_strategy.check_consistency(made)
        for variable, old in zip(made.variables + made.optimizer.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), old, err_msg=variable.path)
    assert np.isfinite(made.train_on_batch(ids, y))


def tied():
    inputs = keras.Input((3,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(ROWS, WIDTH, name="items")
    return keras.Model(inputs, keras.ops.max(table(table(inputs), reverse=True), axis=(1, 2))[:, None])


REFUSED_STEPS = {
    "tied": (tied, OPTIMIZERS["SGD"], {}, "used in full in a step"),
    "constraint": (
        lambda: model(embeddings_constraint="unit_norm"),
        OPTIMIZERS["SGD"],
        {},
        "assigned in a step|used in full",
    ),
    "regularizer": (lambda: model(embeddings_regularizer="l2"), OPTIMIZERS["SGD"], {}, "used in full"),
    "microbatches": (model, OPTIMIZERS["SGD"], {"microbatches": 2}, "microbatches"),
}


@pytest.mark.parametrize("name", REFUSED_STEPS)
def test_a_step_that_would_take_all_of_a_table_is_refused(name):
    build, optimizer, options, message = REFUSED_STEPS[name]
    with pytest.raises(StrategyError, match=message):
        trained(build, optimizer, strategy(**options), data=batches()[:1])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_kernel_that_is_no_table_is_refused_with_the_pattern_as_the_likely_cause():
    made = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="dense")], name="mlp")
    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), tables="mlp/dense/kernel")
    made.compile("sgd", "mse", strategy=chosen)
    expected = "'mlp/dense/kernel' is not looked up with keras.layers.Embedding: correct the patterns of tables="
    with pytest.raises(StrategyError, match=expected):
        made.train_on_batch(np.ones((8, 8)), np.ones((8, 4)))


REFUSED_OPTIMIZERS = {
    "accumulation": (lambda: opt.SGD(gradient_accumulation_steps=2), "keras", "gradient_accumulation_steps"),
    "average": (lambda: opt.SGD(use_ema=True), "keras", "use_ema"),
    "by value": (lambda: opt.SGD(clipvalue=1.0), "keras", "clips gradients"),
    "by norm": (lambda: opt.SGD(global_clipnorm=1.0), "keras", "clips gradients"),
    "not by elements": (opt.Lamb, "lazy", "element by element"),
    "not known": (opt.Lion, "keras", "sparse='lazy'"),
    "lazy decay": (opt.AdamW, "lazy", "exclude_from_weight_decay"),
    "scaled": (lambda: opt.LossScaleOptimizer(opt.SGD()), "keras", "element by element"),
}


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_an_optimizer_that_cannot_update_rows_is_refused_at_compile(name):
    optimizer, sparse, message = REFUSED_OPTIMIZERS[name]
    made = tfshard.as_distributed(model())
    with pytest.raises(StrategyError, match=re.escape(message)):
        made.compile(optimizer(), "mse", strategy=strategy(sparse=sparse))


def test_a_table_that_is_excluded_from_weight_decay_can_be_lazy():
    made = tfshard.as_distributed(model())
    optimizer = opt.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["items"])
    made.compile(optimizer, "mse", strategy=strategy(sparse="lazy"))
    assert np.isfinite(made.train_on_batch(*batches()[0]))


def test_eager_steps_are_refused():
    made = tfshard.as_distributed(model())
    made.compile("sgd", "mse", strategy=strategy(), run_eagerly=True)
    with pytest.raises(StrategyError, match="run_eagerly"):
        made.train_on_batch(*batches()[0])


MISTAKES = {
    "no pattern": (lambda: tfshard.EmbeddingTables([]), StrategyError, "needs a pattern"),
    "no expression": (lambda: tfshard.EmbeddingTables("*items"), StrategyError, "not a regular expression"),
    "unknown meaning": (lambda: tfshard.EmbeddingTables("x", sparse="eager"), StrategyError, "'keras' or 'lazy'"),
    "another type": (lambda: tfshard.ShardedStrategy(tables=3), StrategyError, "tfshard.EmbeddingTables"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_what_is_asked_for(name):
    act, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        act()


STRATEGIES = {
    "no match": ({"tables": "nothing"}, "match no variable"),
    "no matrix": ({"tables": ".*bias"}, "must be a float32 matrix"),
    "replicas": ({"mesh": {"replica": 2, "batch": 2}, "tables": TABLE}, "replicas"),
    "no batch axis": ({"mesh": {"model": 4}, "tables": TABLE}, "batch axis"),
    "narrow slots": ({"slot_dtype": "bfloat16", "tables": TABLE}, "float32"),
    "layout": (
        {"mesh": {"batch": 2, "model": 2}, "layout_map": {TABLE: ("model", None)}, "tables": TABLE},
        "layout map",
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_cannot_be_a_table_is_refused_at_compile(name):
    options, message = STRATEGIES[name]
    options = {**options, "mesh": tfshard.create_mesh(**options.get("mesh", {"batch": 4}))}
    made = tfshard.as_distributed(model())
    with pytest.raises((StrategyError, LayoutError), match=message):
        made.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(**options))
    assert isinstance(made.get_layer("items").embeddings.value, tf.Variable)


def test_verify_agrees():
    made = tfshard.as_distributed(model())
    made.compile(opt.Adagrad(0.1), "mse", strategy=strategy())
    verdict = tfshard.verify(made, batches()[1])
    assert verdict.ok, str(verdict)


def test_what_a_step_reads_is_from_before_its_update_also_what_the_update_does_not_depend_on():
    """DTensor merges reductions next to the read, and then orders operations only by their operands."""
    made = tfshard.as_distributed(model())
    chosen = strategy(zero_stage=0, analyzer=None)
    optimizer = opt.Adagrad(1.0)
    made.compile(optimizer, "mse", strategy=chosen)
    embeddings = made.get_layer("items").embeddings
    rs = np.random.RandomState(0)

    @tf.function
    def step(x, ids, others):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(keras.ops.take(embeddings, ids, axis=0) ** 2) + tf.reduce_mean(made(x) ** 2)
        before = [keras.ops.take(embeddings, each, axis=0) for each in (ids, others)]
        optimizer.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)
        return before

    for _ in range(5):
        ids, others = rs.randint(0, ROWS, (2, 8)).astype("int32")
        table = embeddings.numpy().copy()
        found = chosen.run(step, args=(batches()[0][0], ids, others))
        for each, expected in zip(found, (table[ids], table[others]), strict=True):
            np.testing.assert_array_equal(each.numpy(), expected)
        assert (embeddings.numpy()[ids] != table[ids]).all(), "premise: they are updated"


class Block(keras.layers.Layer):
    """A lookup and a layer that are recomputed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = keras.layers.Embedding(ROWS, WIDTH, name="items")
        self.dense = keras.layers.Dense(WIDTH, activation="tanh")

    def build(self, shape):
        self.table.build()
        self.dense.build((*shape, WIDTH))

    def call(self, ids):
        return self.dense(self.table(ids))


@pytest.mark.slow
def test_a_block_with_a_lookup_is_computed_again_without_it():
    def build():
        inputs = keras.Input((3,), dtype="int32")
        x = keras.layers.Flatten()(Block(name="block")(inputs))
        return keras.Model(inputs, keras.layers.Dense(1)(x))

    theirs = trained(build, OPTIMIZERS["Adagrad"])
    keras.utils.set_random_seed(0)
    made, chosen = tfshard.as_distributed(build()), strategy()
    made.compile(OPTIMIZERS["Adagrad"](), "mse", strategy=chosen)
    assert chosen.recompute(made, ".*block") == ["block"]
    assert_same((made, [float(made.train_on_batch(*batch)) for batch in batches()]), theirs)


def test_several_steps_in_one_execution():
    def fitted(strategy):
        keras.utils.set_random_seed(0)
        made = model()
        if strategy is None:
            made.compile(OPTIMIZERS["Adagrad"](), "mse", jit_compile=False)
        else:
            made = tfshard.as_distributed(made)
            made.compile(OPTIMIZERS["Adagrad"](), "mse", strategy=strategy, steps_per_execution=2)
        x, y = (np.concatenate(each) for each in zip(*(batches()[i] for i in (0, 1, 2, 5)), strict=True))
        return made, made.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    assert_same(fitted(strategy()), fitted(None))
