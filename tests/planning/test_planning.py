"""Plans count exactly, and allocate nothing."""

import collections
import itertools
import json
import pathlib
import subprocess
import sys

import keras
import keras_hub
import numpy as np
import pytest
from tensorflow.experimental import dtensor

import parity
import tfshard
from sweeps import each_value, table
from tfshard import _private
from tfshard.graph import model_specs
from tfshard.layouts.layout_map import VariableSpec

MEBI = 1 << 20


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            keras.layers.Conv2D(6, 3, name="conv"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(600, name="up"),
            keras.layers.Dense(10, name="down"),
        ],
        name="net",
    )


def kernels(count: int, **kwargs) -> list[VariableSpec]:
    """Return kernels of 4 MiB in float32."""
    return [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, 1024), **kwargs) for i in range(count)]


def biases(count: int, **kwargs) -> list[VariableSpec]:
    return [VariableSpec(path=f"dense_{i}/bias", shape=(100,), **kwargs) for i in range(count)]


# --- models without values ---------------------------------------------------------------------------


def test_an_abstract_model_has_the_variables_of_a_real_one_and_no_values():
    keras.backend.clear_session()
    abstract = tfshard.abstract_model(build)
    keras.backend.clear_session()
    real = build()
    expected = [(v.path, tuple(v.shape), v.dtype, v.trainable) for v in real.variables]
    found = [(spec.path, spec.shape, spec.dtype, spec.trainable) for spec in model_specs.specs_of(abstract)]
    # In the order of the layers, while Keras lists trained variables first. The seed generator is the dropout's.
    assert sorted(found) == sorted(expected) and len(found) == 11
    assert all(_private.backend_variable(variable) is None for variable in abstract.variables)


def test_reading_calling_and_training_an_abstract_model_are_errors():
    model = tfshard.abstract_model(build)
    with pytest.raises(
        tfshard.errors.StrategyError, match="Variable 'net/conv/kernel' has no value.*Received: a read of"
    ):
        np.array(model.layers[0].kernel)
    with pytest.raises(tfshard.errors.StrategyError, match="has no value"):
        model(np.zeros((1, 12, 12, 3)))
    model.compile("sgd", "mse")
    # Keras wraps the error, but keeps the message.
    with pytest.raises(ValueError, match="has no value"):
        model.fit(np.zeros((2, 12, 12, 3)), np.zeros((2, 10)), verbose=0)


class Scaled(keras.layers.Layer):
    """Has a variable that is made from a value."""

    def build(self, shape):
        self.scale = keras.Variable(np.ones(shape[-1]), name="scale")

    def call(self, x):
        return x * self.scale


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_an_abstract_model_may_be_compiled_and_is_planned_with_its_optimizer(policy):
    def build():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype=policy), Scaled()])
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5))
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, "mse", metrics=["mae"])
        return model

    model = tfshard.abstract_model(build)
    assert "has no value" in str(pytest.raises(tfshard.errors.StrategyError, np.array, model.layers[0].kernel).value)
    np.testing.assert_array_equal(model.layers[1].scale, np.ones(2))
    assert int(model.optimizer.iterations) == 0
    sizes = [tfshard.plan(each, {"batch": 2}).bytes_per_device("slot") for each in (model, build())]
    assert sizes[0] == sizes[1] > 0
    # Afterwards, variables have values again.
    assert keras.Variable("zeros", shape=(2,)).numpy().tolist() == [0, 0]


def test_a_task_of_keras_hub_that_compiles_itself_is_planned():
    def build():
        backbone = keras_hub.models.GPT2Backbone(50, 1, 2, 8, 16, max_sequence_length=8)
        return keras_hub.models.GPT2CausalLM(backbone)

    model = tfshard.abstract_model(build)
    assert model.compiled, "premise: it compiles itself"
    assert tfshard.plan(model, {"batch": 2}).bytes_per_device("slot") > 0


def test_training_an_abstract_model_under_a_strategy_is_an_error():
    model = tfshard.as_distributed(tfshard.abstract_model(build))
    model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    with pytest.raises(ValueError, match="has no value"):
        model.train_on_batch(np.zeros((4, 12, 12, 3)), np.zeros((4, 10)))


def test_a_plan_is_made_under_an_open_strategy_scope_too():
    with tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)).scope():
        plan = tfshard.plan(kernels(1) + biases(3), {"batch": 4}, optimizer="adam")
    # Members of 100 elements begin at 0, 112 and 224: four rows of 81.
    assert plan.bytes_per_device("parameter") == MEBI + 4 * 81
    assert plan.bytes_per_device("slot") == 2 * (MEBI + 4 * 81) + 12


def test_later_scopes_do_not_allocate_an_abstract_model():
    model = tfshard.abstract_model(build)
    with keras.StatelessScope():
        later = keras.layers.Dense(3)
        later.build((None, 2))
    assert _private.backend_variable(later.kernel) is not None
    assert all(_private.backend_variable(variable) is None for variable in model.variables)
    with pytest.raises(ZeroDivisionError):
        tfshard.abstract_model(lambda: 1 // 0)
    assert _private.backend_variable(keras.Variable(1.0)) is not None


def test_models_that_cannot_be_planned_are_refused():
    real = build()
    with pytest.raises(
        tfshard.errors.StrategyError, match="Variables of model 'net' that were allocated.*Received: build="
    ):
        tfshard.abstract_model(lambda: real)
    with pytest.raises(tfshard.errors.StrategyError, match="is not built.*model.build"):
        tfshard.plan(keras.Sequential([keras.layers.Dense(3)]), {"batch": 2})
    with pytest.raises(tfshard.errors.StrategyError, match="keras.Model or a list of VariableSpec. Received: 'net'"):
        tfshard.plan("net", {"batch": 2})


LLAMA = """
import pathlib
import keras_hub, tfshard

# The shape of Llama 2 13B.
model = tfshard.abstract_model(lambda: keras_hub.models.LlamaBackbone(
    vocabulary_size=32000, num_layers=40, num_query_heads=40, num_key_value_heads=40, hidden_dim=5120,
    intermediate_dim=13824))
plan = tfshard.plan(model, mesh_shape={"batch": 64, "model": 8}, optimizer="adam")
print(plan)
# Not ru_maxrss, which begins with the memory of the process that started this one.
(peak,) = [line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
print(plan.bytes_on_one_device("parameter"), len(plan.groups), int(peak.split()[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="Resident memory is read from Linux's /proc."
)
def test_a_llama_of_13_billion_parameters_is_planned_within_2_gb():
    done = subprocess.run([sys.executable, "-c", LLAMA], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    parameter_bytes, groups, resident = map(int, done.stdout.splitlines()[-1].split())
    assert parameter_bytes > 4 * 13e9
    assert groups == 1
    assert resident < 2e9


def test_variables_are_planned_in_the_order_of_the_layers():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="block")
            self.first, self.second = keras.layers.Dense(4, name="first"), keras.layers.Dense(4, name="second")

        def build(self, input_shape):
            self.first.build(input_shape)
            self.second.build(input_shape)

        def call(self, x):
            return self.second(self.first(x))

    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(4, name="head")(Block()(inputs)))
    (group,) = tfshard.plan(model, {"batch": 2}).groups
    assert [member.path.split("/")[-2] for member in group.members] == ["first"] * 2 + ["second"] * 2 + ["head"] * 2


# --- slots -------------------------------------------------------------------------------------------

OPTIMIZERS = [
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "Nadam", "Adadelta", "Lion", "Ftrl"),
    *("Adafactor", "Lamb", "Muon"),
]
# Keras numbers unnamed variables, such as Nadam's and Adafactor's, through the process.
SCALARS = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


def assert_slots_are_those_of(optimizer: keras.optimizers.Optimizer) -> tuple[model_specs.SlotSpec, ...]:
    model = build()
    slots = model_specs.slots_of(optimizer, model_specs.specs_of(model))
    assert not optimizer.built
    optimizer.build(model.trainable_variables)
    real = [v for part in _private.optimizer_chain(optimizer) for v in _private.variables_of_optimizer(part)]
    names = [v.name if v.name.startswith("net_") or v.name in SCALARS else "unnamed" for v in real]
    assert [(v.shape, v.dtype) for v in real] == [(slot.spec.shape, slot.spec.dtype) for slot in slots]
    assert all(name in ("unnamed", slot.spec.path) for name, slot in zip(names, slots, strict=True))
    return slots


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_are_those_of_the_real_optimizer(name):
    assert_slots_are_those_of(getattr(keras.optimizers, name)())


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(momentum=0.9, use_ema=True),
        lambda: keras.optimizers.Adam(amsgrad=True, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam()),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    ],
)
def test_slots_follow_the_options_of_the_optimizer(make):
    assert_slots_are_those_of(make())


def test_a_slot_of_its_parameters_shape_knows_its_parameter():
    slots = assert_slots_are_those_of(keras.optimizers.Adam())
    found = {slot.spec.path: (slot.reference, slot.name) for slot in slots}
    assert found["net_conv_kernel_momentum"] == ("net/conv/kernel", "momentum")
    assert found["iteration"] == (None, "iteration")


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(tfshard.errors.StrategyError, match="name of one such as 'adam'.*Received: optimizer='adamm'"):
        tfshard.plan(biases(2), {"batch": 2}, optimizer="adamm")


# --- bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "axes"), [(0, {"batch": 4}), (1, {"batch": 4}), (3, {"batch": 4}), (3, {"batch": 2, "model": 2})]
)
def test_without_groups_the_plan_is_what_the_devices_hold(stage, axes):
    pair = {"net/up/kernel": (None, "model"), "net/up/bias": ("model",), "net/down/kernel": ("model", None)}
    layout_map = pair if "model" in axes else None
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map, zero_stage=stage, analyzer=None)
    model = tfshard.as_distributed(build())
    plan = tfshard.plan(model, axes, layout_map, stage, analyzer=None, optimizer=keras.optimizers.Adam())
    model.compile("adam", "mse", strategy=strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    held = {v.path: v for v in model.variables}
    assert {variable.path for variable in plan.variables} == held.keys()
    for variable in plan.variables:
        buffer = held[variable.path].value.buffer.value()
        specs = tuple(
            None if axis == dtensor.UNSHARDED else axis for axis in dtensor.fetch_layout(buffer).sharding_specs
        )
        assert (variable.storage_layout, variable.storage_shape) == (specs, tuple(buffer.shape)), variable.path
        assert variable.bytes_per_device == parity.held_bytes([held[variable.path]]), variable.path
        assert (variable.kind == "parameter") == held[variable.path].trainable
    slots = model.optimizer.variables
    assert plan.bytes_per_device("parameter") == parity.held_bytes(model.trainable_variables)
    assert plan.bytes_per_device("slot") == parity.held_bytes(slots)
    assert plan.bytes_on_one_device("slot") == sum(np.array(v.numpy()).nbytes for v in slots)
    # The report has the same numbers.
    report = strategy.report(model)
    assert report.world_size == 4 and not report.misplaced
    assert report.bytes_per_device("parameter") == parity.held_bytes(model.trainable_variables)
    assert report.bytes_per_device("slot") == parity.held_bytes(slots)


@pytest.mark.parametrize(
    ("stage", "parameter", "gradient", "slot"),
    [(0, 8 * MEBI, 8 * MEBI, 16 * MEBI), (1, 8 * MEBI, 8 * MEBI, 4 * MEBI),
     (2, 8 * MEBI, 2 * MEBI, 4 * MEBI), (3, 2 * MEBI, 2 * MEBI, 4 * MEBI)],
)  # fmt: skip
def test_bytes_of_large_variables_follow_the_stage(stage, parameter, gradient, slot):
    plan = tfshard.plan(kernels(2), {"batch": 4}, zero_stage=stage, optimizer="adam")
    scalars = 8 + 4  # The step counter (int64) and the learning rate.
    assert not plan.groups
    assert plan.bytes_per_device("parameter") == parameter
    assert plan.bytes_per_device("gradient") == gradient
    assert plan.bytes_per_device("slot") == slot + scalars
    assert plan.bytes_per_device() == parameter + gradient + slot + scalars
    assert plan.bytes_on_one_device() == (8 + 8 + 16) * MEBI + scalars


@pytest.mark.parametrize(
    ("stage", "parameter", "gradient", "slot"),
    [(0, 1744, 1744, 3488), (1, 1744, 1744, 872), (2, 1744, 436, 872), (3, 436, 436, 872)],
)
def test_bytes_of_a_group_are_those_of_its_buffer(stage, parameter, gradient, slot):
    plan = tfshard.plan(biases(4), {"batch": 4}, zero_stage=stage, optimizer="adam")
    (group,) = plan.groups
    # Members of 100 elements begin at multiples of 16 elements (64 bytes): 0, 112, 224, 336; four rows.
    assert [member.offset for member in group.members] == [0, 112, 224, 336]
    assert (group.storage_shape, group.padding, group.bytes_gathered) == ((4, 109), 36, 4 * 109 * 4)
    assert group.slots == ("momentum", "velocity")
    assert [variable.bytes_per_device for variable in plan.variables] == [None] * 4
    assert plan.bytes_per_device("parameter") == parameter
    assert plan.bytes_per_device("gradient") == gradient
    assert plan.bytes_per_device("slot") == slot + 12
    assert plan.bytes_on_one_device("parameter") == 1600


def test_a_plan_is_plain_data():
    plan = tfshard.plan(kernels(1) + biases(3), {"batch": 64, "model": 8}, optimizer="adam")
    data = json.loads(plan.to_json())
    assert data["world_size"] == 512
    # The kernel with its gradient and two slots over 64 devices; four buffers of 64 rows for 324 elements; scalars.
    assert data["totals"]["all"]["bytes_per_device"] == 4 * (4 * MEBI // 64) + 4 * 6 * 4 + 12
    assert [member["path"] for member in data["groups"][0]["members"]] == [f"dense_{i}/bias" for i in range(3)]
    assert data["collectives"][0] == {
        "kind": "all-gather",
        "what": "dense_0/kernel",
        "axis": "batch",
        "count": 1,
        "bytes": 4 * MEBI,
        "formula": "bytes(variable) over batch, before its use",
        "merges": False,
        "at_most": False,
    }


def test_a_printed_plan_shows_groups_totals_and_collectives():
    text = str(tfshard.plan(kernels(1) + biases(3), {"batch": 64, "model": 8}, optimizer="adam"))
    for part in ("Plan for 512 devices (batch=64 x model=8), ZeRO stage 3", "group 0: 3 variables", "dense_0/kernel",
                 "total optimizer slots", "all-gather", "reduce-scatter", "all-reduce"):  # fmt: skip
        assert part in text


def test_a_compiled_models_own_optimizer_is_planned():
    model = build()
    model.compile("adam", "mse")
    plan = tfshard.plan(model, {"batch": 4})
    model.optimizer.build(model.trainable_variables)
    assert [v.path for v in plan.slots] == [v.name for v in model.optimizer.variables]
    assert plan.bytes_on_one_device("slot") == sum(np.array(v).nbytes for v in model.optimizer.variables)


def test_wrong_meshes_stages_patterns_and_analyzers_are_refused():
    with pytest.raises(tfshard.errors.MeshError, match=r"positive integer such as.*Received: mesh=\{'batch': 0\}"):
        tfshard.plan(biases(2), {"batch": 0})
    with pytest.raises(tfshard.errors.StrategyError, match="Unknown ZeRO stage.*Received: zero_stage=4"):
        tfshard.plan(biases(2), {"batch": 2}, zero_stage=4)
    with pytest.raises(tfshard.errors.LayoutError, match="match no variable: .'kernel'.*First variable paths"):
        tfshard.plan(biases(2), {"batch": 2, "model": 2}, layout_map={"kernel": ("model",)})
    with pytest.raises(tfshard.errors.StrategyError, match="None for no groups. Received: analyzer=False"):
        tfshard.plan(biases(2), {"batch": 2}, analyzer=False)
    with pytest.raises(tfshard.errors.StrategyError, match="Kinds: .*Received: kind='slots'"):
        tfshard.plan(biases(2), {"batch": 2}).bytes_per_device("slots")


# --- collectives -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, [("all-reduce", "float32 gradients", 8 * MEBI + 1600)]),
        (1, [("all-gather", "dense_0/kernel", 4 * MEBI), ("all-gather", "dense_1/kernel", 4 * MEBI),
             ("all-gather", "group 0", 1744), ("reduce-scatter", "dense_0/kernel", 4 * MEBI),
             ("reduce-scatter", "dense_1/kernel", 4 * MEBI), ("all-reduce", "float32 gradients", 1600)]),
        (2, [("all-gather", "dense_0/kernel", 4 * MEBI), ("all-gather", "dense_1/kernel", 4 * MEBI),
             ("all-gather", "group 0", 1744), ("reduce-scatter", "dense_0/kernel", 4 * MEBI),
             ("reduce-scatter", "dense_1/kernel", 4 * MEBI), ("all-reduce", "float32 gradients", 1600)]),
        (3, [("all-gather", "dense_0/kernel", 4 * MEBI), ("all-gather", "dense_1/kernel", 4 * MEBI),
             ("all-gather", "group 0", 1744), ("reduce-scatter", "dense_0/kernel", 4 * MEBI),
             ("reduce-scatter", "dense_1/kernel", 4 * MEBI), ("all-reduce", "float32 gradients", 1600)]),
    ],
)  # fmt: skip
def test_each_large_variable_and_each_group_is_predicted(stage, expected):
    plan = tfshard.plan(kernels(2) + biases(4), {"batch": 4}, zero_stage=stage)
    assert [(each.kind, each.what, each.bytes) for each in plan.collectives] == expected
    # The first kernel is gathered again for the backward pass, which begins with the second. Small variables stay.
    again = ["dense_0/kernel"] if stage == 3 else []
    assert [each.what for each in plan.collectives for _ in range(each.count - 1)] == again
    assert plan.collective_count() == len(expected) + len(again)


def test_frozen_variables_are_gathered_at_stage_3_only_and_never_reduced():
    frozen = kernels(1, trainable=False)
    for stage, gathers in ((1, 0), (2, 0), (3, 1)):
        plan = tfshard.plan(frozen, {"batch": 4}, zero_stage=stage)
        assert [each.kind for each in plan.collectives] == ["all-gather"] * gathers + ["all-reduce"]
        assert plan.collectives[-1].bytes == 0


def test_nothing_is_sent_over_a_batch_axis_of_one():
    assert tfshard.plan(kernels(1) + biases(2), {"batch": 1, "model": 4}).collectives == ()


# --- communication of a step ------------------------------------------------------------------------

PLANNED = {
    "batch4": ({"batch": 4}, None),
    "batch2_model2": ({"batch": 2, "model": 2}, "pair"),
    "model4": ({"model": 4}, "pair"),
}


def wide(width: int = 160, outputs: int = 3200) -> keras.Model:
    """Return groups that are large enough for a trace, an ungrouped variable, and a column and row pair."""
    x = inputs = keras.Input((width,))
    for i in range(12):
        x = keras.layers.Dense(width, activation="tanh", name=f"narrow_{i}")(x)
    x = keras.layers.Dense(640, activation="relu", name="up")(x)
    x = keras.layers.Dense(width, name="down")(x)
    return keras.Model(inputs, keras.layers.Dense(outputs, name="alone")(x))


def planned_strategy(mesh, stage):
    axes, pair = PLANNED[mesh]
    layout_map = tfshard.LayoutMap()
    if pair:
        layout_map.column("up")
        layout_map.row("down")
    layout_map.replicated(".*", optional=True)
    return tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map, zero_stage=stage)


@pytest.mark.sweep(1)
@table(
    "collectives that were planned", ("mesh", "stage"),
    itertools.product(PLANNED, (0, 1, 2, 3)),
    always=each_value(PLANNED, (3, 2, 1, 0)),
)  # fmt: skip
def test_a_step_sends_what_was_planned(mesh, stage):
    strategy = planned_strategy(mesh, stage)
    model = tfshard.as_distributed(wide())
    plan = strategy.plan(model, "adam")
    assert plan.groups and any(v.group is None for v in plan.variables)
    model.compile("adam", "mse", metrics=["mae"], strategy=strategy)
    batch = np.ones((8, 160)), np.ones((8, 3200))
    profile = tfshard.profile_step(model, batch)
    tfshard.measure.assert_matches_plan(profile, plan)
    # The trace reports all bytes.
    gathered = [c.bytes for c in profile.collectives if c.kind == "all-gather"]
    assert None not in gathered
    assert profile.variable_bytes["CPU:0"] == pytest.approx(
        plan.bytes_per_device("parameter") + plan.bytes_per_device("slot"), abs=64
    )
    assert plan.bytes_per_device("parameter") == parity.held_bytes(model.trainable_variables)
    assert plan.bytes_per_device("slot") == parity.held_bytes(model.optimizer.variables)


def test_a_model_with_large_recurrent_kernels_is_planned():
    """A loop reads them."""
    inputs = keras.Input((5, 256))
    x = keras.layers.LSTM(256, return_sequences=True)(inputs)
    model = keras.Model(inputs, keras.layers.GRU(256)(x))
    plan = tfshard.plan(model, {"batch": 4}, zero_stage=3, inputs=np.ones((8, 5, 256), "float32"))
    alone = [each for each in plan.variables if each.group is None]
    assert len(alone) >= 4, "premise"
    assert plan.peak.peak_bytes > plan.bytes_per_device() + 4 * 256 * 4 * 256


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_a_step_sends_of_recurrent_kernels_what_is_planned(stage):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage, analyzer=None)
    inputs = keras.Input((3, 32))
    x = keras.layers.LSTM(32, return_sequences=True)(inputs)
    model = keras.Model(inputs, keras.layers.GRU(32)(keras.layers.Dense(32)(x)))
    model.compile(keras.optimizers.SGD(0.1), "mse", strategy=strategy)
    batch = np.ones((8, 3, 32), "float32"), np.ones((8, 32), "float32")
    plan = strategy.plan(model, inputs=batch[0])
    scattered = [each.what for each in plan.collectives if each.kind == "reduce-scatter"]
    assert any("recurrent_kernel" in each for each in scattered) == (stage > 1), "premise"
    assert all(each.count == 1 for each in plan.collectives if "lstm" in each.what)
    tfshard.measure.assert_matches_plan(tfshard.profile_step(model, batch), plan)


NORMALIZING = ("first", "second", "beside")


def normalized(**options):
    """Return two layers that normalize by the batch in sequence, and one in parallel."""
    inputs = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(8, 3, padding="same")(inputs)
    x = keras.layers.Activation("relu")(keras.layers.BatchNormalization(name="first", **options)(x))
    y = keras.layers.BatchNormalization(name="second", **options)(keras.layers.Conv2D(8, 3, padding="same")(x))
    z = keras.layers.BatchNormalization(name="beside", **options)(keras.layers.Conv2D(8, 1)(x))
    return keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(y + z))


@pytest.mark.sweep(1)
@table(
    "batch statistics that were planned", ("mesh", "stage", "options"),
    itertools.product(["batch4", "replica2_batch2"], (0, 2, 3), ["", "scale", "trainable"]),
    always=[("batch4", 3, ""), ("replica2_batch2", 0, "scale"), ("batch4", 2, "trainable")],
)  # fmt: skip
def test_a_step_sends_of_batch_statistics_what_is_planned(mesh, stage, options):
    """Each layer gathers and reduces once to compute the gradients of scale and offset. A frozen layer does neither."""
    mesh_shape = {"batch": 4} if mesh == "batch4" else {"replica": 2, "batch": 2}
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh_shape), zero_stage=stage)
    keras.backend.clear_session()
    model = normalized(**({options: False} if options else {}))
    batch = np.ones((8, 8, 8, 4), "float32"), np.ones((8, 8), "float32")
    plan = strategy.plan(model, "sgd", inputs=batch[0])
    model.compile("sgd", "mse", strategy=strategy)
    found = collections.Counter((each.kind, each.what) for each in plan.collectives if each.what in NORMALIZING)
    assert len(found) == (0 if options == "trainable" else 6) and set(found.values()) <= {1}, "premise"
    others = [each for each in model.trainable_variables if each.path.split("/")[0] not in NORMALIZING]
    (reduced,) = (each.bytes for each in plan.collectives if each.what == "float32 gradients")
    assert reduced == 4 * sum(int(np.prod(each.shape)) for each in others)
    tfshard.measure.assert_matches_plan(tfshard.profile_step(model, batch), plan)


def test_beside_model_axes_what_batch_statistics_send_is_unknown():
    plan = tfshard.plan(normalized(), {"batch": 2, "model": 2}, layout_map="auto")
    assert "'first' computes batch statistics on a mesh with a model axis" in plan.unknown


@pytest.fixture
def mixed():
    """Set a dtype policy for a test."""
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(("policy", "size"), [("float32", 4), ("mixed_bfloat16", 4), ("float64", 8)])
def test_batch_statistics_are_planned_in_the_dtype_in_which_they_are_taken(policy, size, mixed):
    mixed(policy)
    model = normalized()
    plan = tfshard.plan(model, {"batch": 4})
    (gather,) = [each for each in plan.collectives if (each.kind, each.what) == ("all-gather", "first")]
    assert gather.bytes == 4 * 2 * 8 * size


# The dtype in which gradients are reduced, by policy; bfloat16 in float32.
ADDED_BYTES = {"mixed_bfloat16": 4, "mixed_float16": 2}


@pytest.mark.sweep(1)
@table(
    "reductions that were planned", ("policy", "mesh", "stage"),
    itertools.product(ADDED_BYTES, PLANNED, (0, 1, 2, 3)),
    always=[*itertools.product(ADDED_BYTES, ["batch4"], (0, 1, 3)), ("mixed_float16", "batch2_model2", 2),
            ("mixed_bfloat16", "batch2_model2", 0), ("mixed_float16", "model4", 3)],
)  # fmt: skip
def test_a_step_under_mixed_precision_reduces_what_was_planned(policy, mesh, stage, mixed):
    """Under float16 with a loss scale, the step has a branch: on several axes, no reductions are merged."""
    strategy = planned_strategy(mesh, stage)
    keras.backend.clear_session()
    mixed(policy)
    # Wide enough for the trace to report the bytes of a half-precision tensor.
    model = tfshard.as_distributed(wide(width=200, outputs=4000))
    plan = strategy.plan(model, "adam")
    model.compile("adam", "mse", strategy=strategy)
    scales = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scales == (policy == "mixed_float16") and model.layers[1].compute_dtype == policy[6:], "premise"
    profile = tfshard.profile_step(model, (np.ones((8, 200)), np.ones((8, 4000))))
    tfshard.measure.assert_matches_plan(profile, plan)
    tfshard.measure.assert_matches_plan(profile, strategy.plan(model))
    if mesh == "batch4":
        elements = sum(int(np.prod(each.shape)) for each in model.trainable_variables)
        reduced = [each for each in plan.collectives if each.kind in ("all-reduce", "reduce-scatter")]
        assert sum(each.bytes for each in reduced) == pytest.approx(ADDED_BYTES[policy] * elements, abs=64)
        assert profile.bytes("all-reduce") == pytest.approx(ADDED_BYTES[policy] * elements, abs=4096)


def test_what_is_reduced_alone_leaves_nothing_to_be_merged(mixed):
    mixed("mixed_float16")
    layers = [keras.layers.Dense(2048, use_bias=False, name="full"), keras.layers.Dense(64, dtype="float32")]
    model = keras.Sequential([keras.Input((1024,)), *layers], name="net")
    plan = tfshard.plan(model, {"batch": 2}, zero_stage=2, optimizer="adam")
    assert any(each.kind == "reduce-scatter" and each.what == "net/full/kernel" for each in plan.collectives), "premise"
    assert not any(each.what == "float16 gradients" for each in plan.collectives)


def test_gradients_of_layers_that_compute_in_float32_are_reduced_in_it(mixed):
    mixed("mixed_float16")
    layers = [
        keras.layers.Dense(64, name="half"), keras.layers.LayerNormalization(name="norm"),
        keras.layers.Dense(64, name="full", dtype="float32"),
    ]  # fmt: skip
    model = keras.Sequential([keras.Input((64,)), *layers], name="net")
    plan = tfshard.plan(model, {"batch": 4}, zero_stage=0, optimizer="adam")
    found = {each.what: each.bytes for each in plan.collectives}
    # LayerNormalization converts its scale and offset from float16 to float32.
    assert found == {
        "float32 gradients": 4 * (64 + 64 + 64 * 64 + 64), "float16 gradients": 2 * (64 * 64 + 64)
    }  # fmt: skip


@pytest.mark.slow
def test_a_step_that_is_not_as_planned_is_an_error_with_both_sides():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = tfshard.as_distributed(wide())
    model.compile("adam", "mse", strategy=strategy)
    profile = tfshard.profile_step(model, (np.ones((8, 160)), np.ones((8, 3200))))
    other = tfshard.plan(model, {"batch": 4}, analyzer=None)
    with pytest.raises(tfshard.errors.PlanMismatchError, match=r"all-gather: planned 43 .*\. Received: 3 of"):
        tfshard.measure.assert_matches_plan(profile, other)


def test_a_profile_is_a_table_data_and_a_picture(tmp_path):
    model = tfshard.as_distributed(wide())
    model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    profile = tfshard.profile_step(model, (np.ones((8, 160)), np.ones((8, 3200))))
    assert "all-gather" in str(profile)
    assert profile.to_dict()["mesh"] == {"batch": 4}
    assert profile.seconds > 0 and profile.collective_seconds() > 0
    profile.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_profile_step_wants_a_model_under_a_strategy():
    with pytest.raises(tfshard.errors.StrategyError, match="compiled under a ShardedStrategy"):
        tfshard.profile_step(wide(), np.ones((8, 160)))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_of_a_gpt2_with_tied_embeddings_sends_what_was_planned(stage):
    # Query, key and value kernels stand alone: EinsumDense reshapes their gradients after the reduction.
    analyzer = tfshard.ParameterAnalyzer(group_threshold_bytes=100_000)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage, analyzer=analyzer)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=800, num_layers=1, num_heads=4, hidden_dim=256, intermediate_dim=512, max_sequence_length=16,
        dropout=0.0,
    )  # fmt: skip
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = tfshard.as_distributed(keras.Model(backbone.input, logits))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), strategy=strategy)
    plan = strategy.plan(model)
    assert any(v.path.endswith("query/kernel") and v.group is None for v in plan.variables)
    tokens = np.random.RandomState(0).randint(0, 800, (8, 16))
    profile = tfshard.profile_step(model, ({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, tokens))
    tfshard.measure.assert_matches_plan(profile, plan)


def test_a_layer_of_an_unknown_type_that_is_sharded_by_axes_is_planned():
    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

        def call(self, x):
            return keras.ops.matmul(x, self.kernel)

    model = keras.Sequential([keras.Input((8,)), Scale(name="scale")], name="net")
    plan = tfshard.plan(model, {"batch": 2, "model": 2}, {"net/scale/kernel": (None, "model")})
    assert plan.variables[0].compute_layout == (None, "model")
