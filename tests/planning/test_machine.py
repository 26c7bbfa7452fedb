"""The time of a step's work on a machine, computed by hand; and the files that describe a machine."""

import dataclasses
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

import tfshard
from tfshard.errors import StrategyError
from tfshard.graph import model_specs
from tfshard.layouts.config import GroupPolicy, ShardingConfig, ZeroStage
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.placement import ModelPlacement
from tfshard.measure import step_profile, timeline
from tfshard.planning import Link, Machine
from tfshard.planning.machine import KINDS_OF_WORK, Work
from tfshard.planning.step_times import TracedStep, updated_bytes_of

DESCRIBED = {
    "name": "a rack",
    "product_flops": "1e12",
    "bandwidth": 1e10,
    "devices_per_host": 4,
    "inside": {"latency": 1e-4, "bandwidth": "1e9"},
    "between": {"latency": 1e-3, "bandwidth": 1e8, "hop": 1e-5},
}
WIDTH, ROWS = 256, 64


def machine(**more) -> Machine:
    return Machine.from_dict(DESCRIBED | more)


def placed(specs, mesh: dict[str, int], stage: int, layout_map=None, groups: GroupPolicy | None = None):
    config = ShardingConfig(
        layout_map=LayoutMap.from_any(layout_map), zero_stage=ZeroStage.from_number(stage), analyzer=groups
    )
    return ModelPlacement.of(specs, config, mesh_shape=mesh).check()


def traced(mesh: dict[str, int], *, stage: int = 3, layout_map=None, rows: int = ROWS, count: int = 2, dtype=None):
    """Trace a step of Dense layers without biases. Returns the step and the bytes that its update writes."""
    names = ["first", *(f"layer_{i}" for i in range(count - 2)), "last"]
    hidden = [keras.layers.Dense(WIDTH, use_bias=False, name=name, dtype=dtype) for name in names]
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden])
    specs = model_specs.specs_of(model)
    placement = placed(specs, mesh, stage, layout_map)
    slots = model_specs.slots_of("adam", specs)
    step = TracedStep.of(model, placement, inputs=np.zeros((rows, WIDTH), "float32"))
    return step, updated_bytes_of(placement, slots)


def test_the_work_of_a_step_is_what_its_layers_multiply():
    step, updated = traced({"batch": 4})
    # On a device: two products in the forward pass, and three in the backward pass, since the input needs no gradient.
    one = 2 * (ROWS // 4) * WIDTH * WIDTH
    assert step.total.product_flops == 5 * one
    assert step.total.convolution_flops == 0
    kernels, activations = 5 * WIDTH * WIDTH, 10 * (ROWS // 4) * WIDTH
    # The two operands and the result of each product.
    assert step.total.product_bytes == pytest.approx(4 * (kernels + activations), rel=0.01)
    # Adam's shard of a kernel, and its two slots.
    assert updated == 3 * 2 * 4 * WIDTH * WIDTH / 4


def test_a_model_axis_shares_the_work_out():
    columns = {".*first/kernel": (None, "model"), ".*last/kernel": ("model", None)}
    step, updated = traced({"batch": 2, "model": 2}, layout_map=columns)
    alone, _ = traced({"batch": 2})
    assert step.total.product_flops == alone.total.product_flops / 2
    assert updated == 3 * 2 * 4 * WIDTH * WIDTH / 4
    assert [each.kind for each in step.sent] == ["all-reduce"]
    alone, updated = traced({"batch": 1, "model": 2}, layout_map=columns, stage=0)
    time = alone.on(machine(), {"batch": 1, "model": 2}, updated_bytes=updated)
    assert time.collective_seconds == machine().links.seconds(alone.sent[0], {"batch": 1, "model": 2}) > 1e-4
    assert time.seconds == pytest.approx(time.compute_seconds + time.collective_seconds), "it is waited for"


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_axis_shares_products_out_in_any_dtype(stage, dtype):
    """Bfloat16 tensors are gathered as bits of float16."""
    columns = {".*first/kernel": (None, "model"), ".*last/kernel": ("model", None)}
    step, _ = traced({"batch": 2, "model": 2}, layout_map=columns, stage=stage, dtype=dtype)
    alone, _ = traced({"batch": 2}, stage=stage, dtype=dtype)
    assert step.total.product_flops == alone.total.product_flops / 2 > 0


def step_of(
    layers: list[keras.layers.Layer], shape: tuple[int, ...], groups: GroupPolicy | None = None, *,
    mesh: dict[str, int] | None = None, layout_map=None, stage: int = 3
) -> Work:  # fmt: skip
    """Return the work of a step of two samples on one device."""
    model = keras.Sequential([keras.Input(shape), *layers])
    placement = placed(model_specs.specs_of(model), mesh or {"batch": 2}, stage, layout_map, groups)
    return TracedStep.of(
        model, placement, inputs=np.zeros((4, *shape), "float32")
    ).total  # fmt: skip


def test_loops_are_worth_all_their_turns():
    short, long = (step_of([keras.layers.LSTM(16)], (length, 8), stage=0) for length in (10, 20))
    assert long.turned_operations == 2 * short.turned_operations > 500
    assert long.product_flops == pytest.approx(2 * short.product_flops, rel=0.05)
    assert long.product_bytes == short.product_bytes  # Small tensors are in the cache since the previous iteration.
    short, long = (step_of([keras.layers.LSTM(600)], (length, 8), stage=0) for length in (10, 20))
    kernel = 4 * 600 * 4 * 600
    # Both passes read the recurrent kernel, and its gradient is written.
    assert (long.product_bytes - short.product_bytes) / 10 == pytest.approx(3 * kernel, rel=0.05)


def test_a_weight_that_is_cut_out_of_its_group_is_not_the_group():
    """Otherwise the bytes of a step would grow with the square of its depth."""

    def bytes_of(count: int) -> float:
        return step_of([keras.layers.Dense(32, "relu") for _ in range(count)], (32,), GroupPolicy()).bytes

    two, four, eight = bytes_of(2), bytes_of(4), bytes_of(8)
    assert eight - four == pytest.approx(2 * (four - two), rel=0.05)
    # Each weight is read and written once per copy, and the activations are small.
    assert 2 * 4 * 32 * 33 <= (four - two) / 2 < 20 * 4 * 32 * 33


def test_a_weight_of_a_group_that_is_gathered_again_is_sharded_as_before():
    def work_of(stage: int) -> Work:
        names = ["up_0", "down_0", "up_1", "down_1", "up_2", "down_2"]
        layers = [keras.layers.Dense(64 if "up" in name else 32, "gelu", name=name) for name in names]
        columns = {".*up_./kernel": (None, "model"), ".*up_./bias": ("model",), ".*down_./kernel": ("model", None)}
        return step_of(layers, (32,), GroupPolicy(), mesh={"batch": 2, "model": 2}, layout_map=columns, stage=stage)

    stored, gathered = work_of(0), work_of(3)
    assert gathered.product_flops == stored.product_flops
    assert gathered.transcendentals == stored.transcendentals > 0


def test_exponentials_and_depthwise_convolutions_are_work_of_their_own():
    plain = step_of([keras.layers.LayerNormalization(), keras.layers.ReLU()], (8, 16))
    softmax = step_of([keras.layers.LayerNormalization(), keras.layers.Softmax()], (8, 16))
    assert plain.transcendentals == 0
    assert softmax.transcendentals == 2 * 8 * 16
    depthwise = step_of([keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False)], (8, 8, 4))
    assert depthwise.convolution_flops == 0
    # The forward pass, and the gradient of the kernel.
    assert depthwise.depthwise_flops == 2 * (2 * 8 * 8 * 4 * 9 * 2)
    assert depthwise.depthwise_weights == 0
    large = step_of([keras.layers.DepthwiseConv2D(5, padding="same", use_bias=False)], (8, 8, 4))
    assert large.depthwise_weights == 5 * 5 * 4
    slow = {"depthwise_weight_seconds": 1e-3}
    assert machine(**slow).seconds(large) == pytest.approx(machine().seconds(large) + 0.1)
    assert machine(**slow).seconds(depthwise) == machine().seconds(depthwise)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("layer", [keras.layers.BatchNormalization, keras.layers.LayerNormalization])
def test_a_layer_executes_as_many_operations_as_predicted(layer):
    """Counts operations in traces of steps of two and six layers. TensorFlow removes a few, and adds reductions."""

    def counted(count: int) -> tuple[float, float]:
        model = tfshard.Sequential(
            [keras.Input((4, 4, 3)), *[layer() for _ in range(count)], keras.layers.Flatten(), keras.layers.Dense(3)]
        )
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
        model.compile("adam", "mse", strategy=strategy, jit_compile=False)
        x, y = np.ones((8, 4, 4, 3), "float32"), np.zeros((8, 3), "float32")
        model.fit(x, y, batch_size=8, verbose=0)
        with step_profile.traced() as trace:
            model.fit(x, y, batch_size=8, verbose=0)
        executed = sum(timeline.is_operation(event) for event in trace.events()) / 4
        placement = strategy.placement_of(model)
        step = TracedStep.of(model, placement, inputs=x)
        return executed, Work.total([step.total, step.synchronizing(strategy.mesh_shape)]).operations

    (executed_of_two, two), (executed_of_six, six) = counted(2), counted(6)
    assert (six - two) / 4 == pytest.approx((executed_of_six - executed_of_two) / 4, rel=0.1)


def test_what_computes_hides_what_is_sent_and_cores_that_are_shared_hide_nothing():
    step, updated = traced({"batch": 4}, count=6, rows=512)
    one = machine(product_flops=1e11)
    time = step.on(one, {"batch": 4}, updated_bytes=updated)
    assert time.collective_seconds > 1e-3 and time.compute_seconds > 1e-3, "premise"
    assert max(time.compute_seconds, time.collective_seconds) <= time.seconds
    assert time.seconds < 0.95 * (time.compute_seconds + time.collective_seconds)
    shared = step.on(dataclasses.replace(one, cores=2), {"batch": 4}, updated_bytes=updated)
    assert shared.seconds == pytest.approx(shared.compute_seconds + shared.collective_seconds)
    # Four devices on two cores.
    assert shared.compute_seconds == pytest.approx(2 * time.compute_seconds)


def test_one_device_alone_computes_on_all_cores_what_is_large():
    work = Work(product_flops=1e12, bytes=1e10, operations=100)
    one = machine(cores=2, operation_seconds=1e-2)
    assert one.seconds(one.in_turns(work, 1)) == pytest.approx(0.5 + 0.5 + 1.0)
    assert one.seconds(one.in_turns(work, 4)) == pytest.approx(2.0 + 2.0 + 2.0)
    assert machine().in_turns(work, 4) == work


def test_at_another_pace_all_that_a_host_does_takes_so_many_times_as_long():
    step, updated = traced({"batch": 4}, count=2, rows=64)
    one = machine(cores=2, operation_seconds=1e-5, step_seconds=1e-3, transcendental_seconds=1e-9)
    before = step.on(one, {"batch": 4}, updated_bytes=updated)
    after = step.on(one.at_pace(1.5), {"batch": 4}, updated_bytes=updated)
    assert before.collective_seconds > 0, "premise"
    assert after.seconds == pytest.approx(1.5 * before.seconds)
    work = Work(**{name: 1.0 for name in KINDS_OF_WORK})
    assert one.at_pace(1.5).seconds(work) == pytest.approx(1.5 * one.seconds(work))
    with pytest.raises(StrategyError, match="pace=0"):
        one.at_pace(0)


def test_links_between_hosts_keep_their_pace():
    links, slow = machine().links, machine().at_pace(2).links
    assert links.between and (slow.between, slow.across) == (links.between, links.across)
    assert slow.inside["all-reduce"].bandwidth == links.inside["all-reduce"].bandwidth / 2


def test_parts_take_as_often_as_there_are_parts_and_update_once():
    step, updated = traced({"batch": 4})
    once = step.on(machine(), {"batch": 4}, updated_bytes=updated)
    four = step.on(machine(), {"batch": 4}, updated_bytes=updated, microbatches=4)
    last = updated / 1e10
    assert four.seconds == pytest.approx(4 * (once.seconds - last) + last)


def test_members_of_a_ring_add_hops():
    link = Link(latency=1e-3, bandwidth=1e9, hop=1e-4)
    assert link.seconds(1e6, members=2) == pytest.approx(2e-3)
    assert link.seconds(1e6, members=12) == pytest.approx(3e-3)


# --- Files -----------------------------------------------------------------------------------------------


def test_a_machine_comes_back_from_its_file(tmp_path):
    for one in (machine(), machine(cores=2, memory="80e9", peak_flops=2e12, convolution_flops=5e11)):
        one.save(tmp_path / "machine.yaml")
        assert Machine.load(tmp_path / "machine.yaml") == one


def test_what_is_left_out_is_as_documented():
    one = machine()
    assert (one.convolution_flops, one.depthwise_flops) == (1e12, 1e12)
    assert machine(convolution_flops=5e11).depthwise_flops == 5e11
    assert (one.update_bandwidth, one.product_bandwidth) == (1e10, 1e10)
    assert one.links.across == one.links.between != {}
    assert (one.memory, one.peak_flops, one.cores, one.operation_seconds) == (None, None, None, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"product_flops": None}, "'product_flops' of a machine must be a number"),
        ({"product_flops": 0}, "must be a positive number"),
        ({"bandwith": 1e9}, "unknown ['bandwith']"),
        ({"inside": {"latency": 1}}, "'inside' of a machine needs latency"),
        ({"inside": {"latency": 1, "bandwidth": "fast"}}, "'inside: bandwidth' of a machine must be a number"),
        ({"between": {"latency": 1, "bandwidth": 1, "hop": -1}}, "a hop of 0 s or more"),
        ({"operation_seconds": -1}, "'operation_seconds' of a machine must be 0 or more"),
    ],
)
def test_a_wrong_description_is_told_with_its_name(change, message, tmp_path):
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(DESCRIBED | change))
    with pytest.raises(StrategyError) as raised:
        Machine.load(tmp_path / "wrong.yaml")
    assert message in str(raised.value) and "wrong.yaml" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is not YAML"), ("- 1", "must be a mapping"), (None, "No such file")]
)
def test_a_file_that_is_no_description_is_an_error(text, message, tmp_path):
    if text is not None:
        (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(StrategyError, match=message):
        Machine.load(tmp_path / "other.yaml")


def test_something_else_is_no_machine():
    with pytest.raises(StrategyError, match="the path of a file"):
        Machine.from_any(3)


# --- Calibration -----------------------------------------------------------------------------------------


def test_prices_are_those_with_which_steps_take_what_they_took(monkeypatch):
    """Calibration on step times that follow from a machine finds that machine."""
    from tfshard.contrib.simulate import calibration

    truth = machine(convolution_flops=2e11, update_bandwidth=3e9, product_bandwidth=4e10, operation_seconds=2e-5)
    rs = np.random.RandomState(0)
    rows = []
    for _ in range(20):
        work = Work(
            **dict(
                zip(
                    calibration.KINDS_OF_WORK,
                    10 ** rs.uniform([9, 8, 8, 3, 7, 6, 6, 6, 2, 2, 0], [11, 10, 10, 5, 9, 9, 8, 8, 4, 4, 0]),
                    strict=True,
                )
            )
        )
        rows.append((work, truth.seconds(work) * rs.uniform(0.99, 1.01)))
    found = calibration._prices_of(rows)
    for name, price in {"product_flops": 1e-12, "convolution_flops": 5e-12, "operations": 2e-5}.items():
        assert found[name] == pytest.approx(price, rel=0.2), name


def test_of_two_measurements_of_a_link_the_quicker_is_taken():
    from tfshard.contrib.simulate import calibration
    from tfshard.planning import Links

    quick, slow = Link(latency=2e-4, bandwidth=4e9), Link(latency=1e-4, bandwidth=1e9)
    one = Links(devices_per_host=4, inside={"all-gather": quick, "all-reduce": slow, "all-to-all": slow})
    other = Links(devices_per_host=4, inside={"all-gather": slow, "all-reduce": quick, "all-to-all": slow})
    assert calibration._quicker(one, other).inside == {"all-gather": quick, "all-reduce": quick, "all-to-all": slow}


@pytest.mark.slow
def test_calibration_measures_this_machine(monkeypatch):
    from tfshard.contrib.simulate import calibration

    monkeypatch.setattr(calibration, "_MODELS", calibration._MODELS[3:5])
    monkeypatch.setattr(calibration, "_STEPS", 2)
    found = tfshard.calibrate()
    assert len(tf.config.list_logical_devices("CPU")) >= 4, "premise"
    assert (found.links.devices_per_host, found.links.device_type) == (4, "CPU")
    assert found.cores and found.cores >= 1
    # A CPU does between 1e6 and 1e14 operations per second. Work that no model does costs nothing.
    assert found.product_flops > 1e6 and found.convolution_flops > 1e15
    assert set(found.links.inside) == {"all-gather", "all-reduce", "all-to-all"}


def test_calibration_without_scipy_stops_before_it_measures(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)  # `import` raises ImportError for it.
    lines = []
    with pytest.raises(tfshard.errors.StrategyError, match=r"SciPy, which is not installed .* pip install scipy"):
        tfshard.calibrate(lines.append)
    assert lines == []


def test_a_machine_and_a_recommendation_are_shown_for_people():
    text = str(Machine.load("h100"))
    assert "product flops" in text and "Gflop/s" in text and "Machine(" not in text
    specs = [VariableSpec(path=f"dense_{i}/kernel", shape=(1024, 1024)) for i in range(4)]
    advice = tfshard.advise(specs, devices=4, memory_per_device=60 << 20, batch=32)
    assert repr(advice.recommended).startswith("batch=4 at stage") and "fits in 60.0 MiB" in repr(advice.recommended)
    assert repr(advice) == str(advice)
