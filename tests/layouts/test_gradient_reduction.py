"""An extension can reduce gradients in place of DTensor, without any change in core."""

import dataclasses

import keras
import numpy as np
import pytest

import parity
import tfshard
from tfshard.devices import local_shards, replicas, transfer
from tfshard.errors import StrategyError
from tfshard.layouts import gradient_reduction
from tfshard.layouts.gradient_reduction import GradientReduction, ReductionOptions, SentGradient
from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.variable_layout import plan_variable

RS = np.random.RandomState(0)
X, CLASSES = RS.normal(size=(16, 8)).astype("float32"), (np.arange(16) % 4).astype("int32")


@dataclasses.dataclass(frozen=True)
class ExactSum(GradientReduction):
    """Reduces each kernel by an all-reduce of its own, and counts the reductions."""

    option: str = "exact"

    def check_mesh(self, axes):
        if axes.data is None:
            raise StrategyError("no batch axis")

    def choose(self, layout, axes):
        return dataclasses.replace(layout, reduction=self) if len(layout.spec.shape) == 2 else layout

    def state(self, layout, axes):
        spec = VariableSpec(path=f"{layout.spec.path}_count", shape=(), dtype="float32", trainable=False)
        return {"count": plan_variable(spec, tfshard.layouts.ShardingConfig(), mesh_shape=axes)}

    def first_value(self, name, layout, axes):
        return np.float32(10)

    def restored(self, layout, axes, stored):
        return {"count": stored.get("count", np.float32(10))}

    def sends(self, layout, axes):
        size = 4 * int(np.prod(layout.spec.shape))
        return [SentGradient(kind="all-reduce", between_replicas=False, bytes=size, what="gradient")]

    def encoded_bytes(self, layout, axes):
        return 0

    @property
    def encoding(self):
        return "exact", 1.0

    def encoder(self, devices):
        raise NotImplementedError

    def gain_text(self, *, link_seconds, encode_seconds):
        return f"{link_seconds} {encode_seconds}"

    def meet(self, mesh):
        replicas.meet_to_exchange(mesh)

    def reduce_local(self, local, variable):
        mesh = variable.mesh
        count = variable.kept["count"]
        count.assign(count.storage.update_value() + 1.0)
        with local_shards.scope():
            total = replicas.sum_over_devices(local_shards.varying(local, mesh), mesh)
            return transfer.relayout(total, (None,) * total.shape.rank, mesh)


@pytest.fixture(autouse=True)
def extension(monkeypatch):
    options = ReductionOptions(choices="'exact'", make=lambda option: ExactSum() if option == "exact" else None)
    monkeypatch.setattr(gradient_reduction, "OPTIONS", [*gradient_reduction.OPTIONS, options])


def mlp():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(12, "tanh"), keras.layers.Dense(4)])


def train(strategy=None, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return parity.train(
        mlp, [(X, CLASSES)], optimizer=keras.optimizers.Adam, loss=loss, strategy=strategy, steps=3, **options
    )


def strategy(**options):
    options = {"zero_stage": 0, "analyzer": None, "compression": "exact", **options}
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "reduce_once": True}], ids=["step", "reduce_once"])
def test_steps_plans_and_checkpoints_use_the_reduction(tmp_path, options):
    trained = train(strategy(**options))
    model = trained.model
    parity.assert_same(trained, train(), rtol=1e-5, atol=1e-5)
    kernels = [each.value for each in model.trainable_variables if len(each.shape) == 2]
    assert [float(each.kept["count"].numpy()) for each in kernels] == [13.0, 13.0]
    plan = model.distribute_strategy.plan(model, inputs=X)
    assert [each.bytes for each in plan.collectives if each.what.endswith("kernel")] == [4 * 8 * 12, 4 * 12 * 4]
    tfshard.measure.assert_matches_plan(tfshard.profile_step(model, (X, CLASSES)), plan)
    manager = tfshard.CheckpointManager(tmp_path)
    manager.save(model, step=3)
    again = train(strategy()).model
    manager.restore(again)
    for ours, theirs in zip(again.trainable_variables, model.trainable_variables, strict=True):
        assert {name: float(each.numpy()) for name, each in ours.value.kept.items()} == {
            name: float(each.numpy()) for name, each in theirs.value.kept.items()
        }


def test_clients_compare_the_option_under_its_name_for_users():
    assert strategy().config.as_dict()["compression"] == "exact"
    assert strategy(compression=None).config.as_dict()["compression"] is None
    assert "reduction" not in strategy().config.as_dict()


def test_an_unknown_option_is_refused_with_the_options_of_all_extensions():
    with pytest.raises(StrategyError, match="compression must be None, 'bfloat16'.*, 'exact'. Received: .*'zip'"):
        strategy(compression="zip")


def test_the_reduction_can_refuse_a_mesh():
    with pytest.raises(StrategyError, match="no batch axis"):
        tfshard.plan(mlp(), {"model": 4}, compression="exact")
