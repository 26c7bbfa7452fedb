"""A model's placement is made once, and plan, lint, report and the strategy share it."""

import collections

import keras
import numpy as np
import pytest

import tfshard
from tfshard import _private
from tfshard.devices import transfer
from tfshard.errors import StrategyError
from tfshard.layouts import placement, variable_layout
from tfshard.layouts.config import ShardingConfig, ZeroStage
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.storage.variables import ShardedVariable
from tfshard.training.attached_model import attached

RS = np.random.RandomState(0)
X, Y = RS.normal(size=(8, 16)).astype("float32"), RS.normal(size=(8, 3)).astype("float32")


def build() -> keras.Model:
    """Return a model with small variables, which are grouped, and a variable of a MiB, which is not."""
    inputs = keras.Input((16,))
    x = keras.layers.Dense(1 << 14, activation="relu", name="large")(inputs)
    x = keras.layers.Dense(8, name="small")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(x))


def strategy(**options) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options)


class Counts:
    """Count how often variables were planned, by path, and how often values were split for the mesh, by shape."""

    def __init__(self, monkeypatch):
        self.planned: collections.Counter = collections.Counter()
        self.cut: collections.Counter = collections.Counter()
        plan_variable, host_shards = variable_layout.plan_variable, transfer.host_shards

        def counted_plan(spec, *args, **options):
            self.planned[spec.path] += 1
            return plan_variable(spec, *args, **options)

        def counted_cut(value, axes, mesh):
            self.cut[value.shape] += 1
            return host_shards(value, axes, mesh)

        monkeypatch.setattr(variable_layout, "plan_variable", counted_plan)
        monkeypatch.setattr(transfer, "host_shards", counted_cut)


def storages(model: keras.Model) -> dict:
    return {id(v.value.storage): v.value.storage for v in model.trainable_variables}


@pytest.mark.parametrize("way", ["as_distributed", "scope"])
def test_compile_plans_each_variable_once_and_moves_it_once(way, monkeypatch):
    chosen = strategy()
    counts, moved = Counts(monkeypatch), []
    move = ShardedVariable.move
    monkeypatch.setattr(ShardedVariable, "move", lambda self, *args: (moved.append(self.path), move(self, *args)))
    if way == "scope":
        with chosen.scope():
            model = build()
    else:
        model = tfshard.as_distributed(build())
    model.compile("sgd", "mse", strategy=chosen)
    paths = [variable.path for variable in model.trainable_variables]
    assert len(paths) == 6 and len(storages(model)) == 2
    # A variable created under the scope is planned before its model is known.
    assert {path: counts.planned[path] for path in paths} == dict.fromkeys(paths, 2 if way == "scope" else 1)
    for storage in storages(model).values():
        assert counts.cut[tuple(storage.format.shape)] == 1
    assert sum(counts.cut[tuple(v.shape)] for v in model.trainable_variables) == 1  # The large variable.
    # Values go from the host to their group, and none comes back from the mesh.
    assert sorted(moved) == (sorted(set(paths) - {"large/kernel"}) if way == "scope" else [])
    before = counts.planned.copy()
    chosen.plan(model), chosen.report(model), model.compile("sgd", "mse", strategy=chosen)
    assert {path: counts.planned[path] - before[path] for path in paths} == dict.fromkeys(paths, 0)
    model.train_on_batch(X, Y)
    assert chosen.report(model).misplaced == ()


def test_plan_report_and_devices_hold_what_the_placement_says():
    chosen = strategy()
    model = tfshard.as_distributed(build())
    model.compile("adam", "mse", strategy=chosen)
    model.train_on_batch(X, Y)
    placed, plan, report = chosen.placement_of(model), chosen.plan(model), chosen.report(model)
    assert [v.path for v in plan.variables] == [layout.spec.path for layout in placed.variables]
    held = {row.path: row for row in report.variables}
    for layout, planned in zip(placed.variables, plan.variables, strict=True):
        row, path = held[layout.spec.path], layout.spec.path
        expected = (layout.storage, layout.storage_shape, layout.group)
        assert (planned.storage_layout, planned.storage_shape, planned.group) == expected, path
        assert (row.storage_layout, row.storage_shape, row.group) == expected, path
    for slot in (row for row in report.variables if row.kind == "slot"):
        planned = next(each for each in plan.slots if slot.path.endswith(each.path))
        assert (slot.storage_layout, slot.storage_shape) == (planned.storage_layout, planned.storage_shape), slot.path
    assert report.misplaced == ()


def test_a_report_names_a_variable_that_is_elsewhere():
    chosen = strategy()
    model = tfshard.as_distributed(build())
    model.compile("sgd", "mse", strategy=chosen)
    current = model.get_layer("last").bias.value
    current.move(chosen.plan_variable(current.layout.spec))
    assert chosen.report(model).misplaced == ("last/bias",)
    attached(model, chosen).group_variables()
    assert chosen.report(model).misplaced == ()


def test_accumulated_gradients_of_a_group_are_in_a_group_by_the_one_rule_for_slots():
    specs = [VariableSpec(path=f"d/{name}", shape=(8, 4)) for name in ("a", "b")]
    placed = ModelPlacement.of(specs, ShardingConfig(analyzer=tfshard.ParameterAnalyzer()), mesh_shape={"batch": 4})
    momentum = placed.slot(VariableSpec(path="d_a_momentum", shape=(8, 4), trainable=False), "d/a")
    assert (momentum.group, momentum.member, momentum.flat) == (0, 0, placed.variables[0].flat)
    accumulator = placed.slot(VariableSpec(path="d_a_gradient_accumulator", shape=(8, 4), trainable=False), "d/a")
    assert (accumulator.group, accumulator.member, accumulator.flat) == (0, 0, placed.variables[0].flat)
    other = VariableSpec(path="d_a_row", shape=(8,), trainable=False)
    assert not placement.follows(other, placed.variables[0])


def test_faults_are_kept_for_lint_and_raised_for_a_plan():
    layout_map = LayoutMap({"odd": (None, "model"), "even": (None, "model")})
    specs = [VariableSpec(path="odd", shape=(8, 3)), VariableSpec(path="even", shape=(8, 4))]
    config = ShardingConfig(layout_map=layout_map, zero_stage=ZeroStage.from_number(0))
    placed = ModelPlacement.of(specs, config, mesh_shape={"batch": 2, "model": 2})
    assert list(placed.faults) == [0] and placed.variables[1].compute == (None, "model")
    with pytest.raises(tfshard.errors.LayoutError, match="does not divide dim 1 of 'odd'"):
        placed.check()


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_failure_halfway_leaves_the_model_as_it_was(failing, monkeypatch):
    model = tfshard.as_distributed(build())
    before, plain = model.get_weights(), [_private.backend_variable(v) for v in model.variables]
    chosen, init, made = strategy(), ShardedVariable.__init__, []

    def refuse(self, *args, **kwargs):
        if len(made) == failing:
            raise MemoryError("no room")
        made.append(self)
        init(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(ShardedVariable, "__init__", refuse)
        with pytest.raises(MemoryError, match="no room"):
            model.compile("sgd", "mse", strategy=chosen)
    assert len(made) == failing
    assert all(_private.backend_variable(v) is old for v, old in zip(model.variables, plain, strict=True))
    for ours, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, expected)
    model.compile("sgd", "mse", strategy=chosen)
    for ours, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_nothing_waits_on_the_host_after_the_scope():
    with strategy().scope():
        model = build()
        assert model.get_layer("small").bias.value.storage._host
    assert not any(storage._host for storage in storages(model).values())


def test_each_zero_stage_that_shards_gradients_or_parameters_shards_slots():
    assert len(ZeroStage) > 1, "premise"
    for stage in ZeroStage:
        assert stage.shard_slots or not (stage.shard_grads or stage.shard_params), stage
        assert ZeroStage.from_number(int(stage)) is stage


@pytest.mark.parametrize("number", [-1, 4, True, "3", None, 1.5])
def test_an_unknown_zero_stage_names_the_stages(number):
    with pytest.raises(StrategyError, match=r"0 \(nothing .*3 \(and parameters\)"):
        ZeroStage.from_number(number)
