"""The strategy stores what `strategy.plan` says, for all settings."""

import contextlib
import inspect

import keras
import pytest
from tensorflow.experimental import dtensor

import tfshard
from tfshard.devices import host_meshes

# For each setting of a strategy, a value other than the default, and further settings that make it visible.
MODEL_AXIS = {"hidden/kernel": (None, "model"), "out/kernel": ("model", None), ".*": ()}
SETTINGS = {
    "layout_map": (MODEL_AXIS, {}),
    "zero_stage": (1, {}),
    "analyzer": (None, {}),
    "sequence_parallel": (True, {"layout_map": MODEL_AXIS}),
    "already_sharded": (True, {}),
    "reshard_after_forward": (False, {}),
    "prefetch": (2, {}),
    "reduce_dtype": ("bfloat16", {}),
    "slot_dtype": ("int8", {}),
    "microbatches": (2, {}),
    "reduce_once": (True, {"microbatches": 2}),
    "offload": ("slots", {}),
    "compression": ("int8", {}),
    "tables": ("table/embeddings", {}),
    "experts": (True, {}),
    "attention": ("flash", {}),
    "context_attention": ("gather", {}),
    "chunked_cross_entropy": ("auto", {}),
    "gather_dtype": ("int8", {}),
}
pytestmark = pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")


def build() -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(512, 32, name="table")(inputs))
    x = keras.layers.Dense(256, "tanh", name="hidden")(x)
    x = keras.layers.BatchNormalization()(x)
    x = tfshard.layers.MixtureOfExperts(4, 8, name="mixture")(x)
    return keras.Model(inputs, keras.layers.Dense(5, name="out")(x))


@contextlib.contextmanager
def strategy_with(setting: str):
    value, others = SETTINGS[setting]
    options = {setting: value, **others}
    if setting != "offload":
        axes = {"batch": 2, "model": 2} if "layout_map" in options else {"batch": 4}
        yield tfshard.ShardedStrategy(tfshard.create_mesh(**axes), **options)
        return
    host = dtensor.create_mesh([("batch", 2)], devices=["CPU:2", "CPU:3"], device_type="CPU")
    mesh = tfshard.create_mesh(batch=2)
    with host_meshes.replaced(mesh, host):
        yield tfshard.ShardedStrategy(mesh, **options)


def told(plan: tfshard.planning.ShardingPlan) -> dict:
    kinds = {kind: plan.bytes_per_device(kind) for kind in ("parameter", "state", "slot")}
    rows = {v.path: (v.storage_layout, v.storage_shape, v.compute_layout, v.group) for v in plan.variables}
    return {**kinds, "host": plan.host_bytes_per_device(), **rows}


def stored(report: tfshard.measure.Report, paths: list[str]) -> dict:
    kinds = {kind: report.bytes_per_device(kind) for kind in ("parameter", "state", "slot")}
    rows = {
        v.path: (v.storage_layout, v.storage_shape, v.compute_layout, v.group)
        for v in report.variables
        if v.path in paths
    }
    return {**kinds, "host": report.host_bytes_per_device(), **rows}


def test_each_setting_of_a_strategy_is_in_the_table():
    given = set(inspect.signature(tfshard.ShardedStrategy.__init__).parameters) - {"self", "mesh"}
    assert given == set(SETTINGS)
    defaults = inspect.signature(tfshard.ShardedStrategy.__init__).parameters
    assert not [name for name, (value, _) in SETTINGS.items() if value == defaults[name].default], "premise"


@pytest.mark.sweep(1)
@pytest.mark.on_cpu("logical devices")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_strategy_stores_what_it_planned(setting):
    """Plans before and after the model is compiled, and as if compiled again after a layer was frozen."""
    with strategy_with(setting) as strategy:
        model, optimizer = tfshard.as_distributed(build()), keras.optimizers.Adam()
        before = strategy.plan(model, "adam")
        model.compile(optimizer, "mse", strategy=strategy, metrics=[])
        optimizer.build(model.trainable_variables)
        report = strategy.report(model)
        held = stored(report, [v.path for v in before.variables])
        assert held["slot"] > 0 and (held["host"] > 0) == (setting == "offload"), "premise"
        for planned in (before, strategy.plan(model)):
            found = told(planned)
            # A step counts its steps; a loss and metrics have their state.
            for kind in ("slot", "state"):
                assert found.pop(kind) == pytest.approx(held[kind], abs=64), kind
            assert found == {name: value for name, value in held.items() if name not in ("slot", "state")}
        # Another model with the same variables, frozen, under the same strategy.
        model.get_layer("out").trainable = False
        again = strategy.plan(model, "adam")
        other = tfshard.as_distributed(build())
        other.get_layer("out").trainable = False
        other.compile(keras.optimizers.Adam(), "mse", strategy=strategy)
        other.optimizer.build(other.trainable_variables)
        report = strategy.report(other)
        assert again.host_bytes_per_device() == report.host_bytes_per_device()
        assert again.bytes_per_device("slot") == pytest.approx(report.bytes_per_device("slot"), abs=64)
        assert again.bytes_per_device("parameter") == report.bytes_per_device("parameter")
