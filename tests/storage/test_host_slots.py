"""Slots are stored on another mesh than the steps', as on the host of GPUs. Here it has other CPU devices."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import parity
import tfshard
from resuming import assert_same_bits, values, without_metrics
from tfshard.devices import host_meshes, transfer
from tfshard.storage import traced_steps
from tfshard.storage.graph_edits import ancestors

RS = np.random.RandomState(0)
X = RS.normal(size=(16, 16)).astype("float32")
CLASSES = (np.arange(16) % 4).astype("int32")
pytestmark = pytest.mark.on_cpu("two meshes of them")

DEVICES, HOST = ["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]


def mlp():
    hidden = [keras.layers.Dense(16, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dense(4)])


@pytest.fixture(autouse=True, scope="module")
def another_mesh():
    """Use another mesh first, as in a process with several strategies."""
    transfer.host_to_mesh(np.zeros(4, "float32"), ("batch",), tfshard.create_mesh(batch=4))


@contextlib.contextmanager
def offloading(**options):
    """A strategy on two devices, with slots stored on two other devices."""
    mesh = tfshard.create_mesh(batch=2)
    host = dtensor.create_mesh([("batch", 2)], devices=HOST, device_type="CPU")
    with host_meshes.replaced(mesh, host):
        yield tfshard.ShardedStrategy(mesh, offload="slots", **options)


def trained(strategy, optimizer=keras.optimizers.Adam, steps=4, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return parity.train(mlp, [(X, CLASSES)], optimizer=optimizer, loss=loss, strategy=strategy, steps=steps, **options)


def devices_of(variable):
    return [handle.device.partition("device:")[2] for _, handle in variable.value.storage.handles]


def adam(**options):
    return lambda: keras.optimizers.Adam(0.01, **options)


CASES = {
    "alone": (adam(), {"analyzer": None}),
    "groups": (adam(), {"zero_stage": 1}),
    "accumulated": (adam(gradient_accumulation_steps=2), {"zero_stage": 2}),
    "microbatches": (adam(), {"microbatches": 2}),
    "clipped": (adam(global_clipnorm=0.1, use_ema=True, weight_decay=0.1), {"analyzer": None, "zero_stage": 1}),
    "loss_scale": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), {"zero_stage": 2}),
    "gathered": (lambda: keras.optimizers.Muon(0.01), {"analyzer": None, "zero_stage": 2}),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CASES)
def test_slots_on_the_host_train_as_on_one_device(name):
    optimizer, options = CASES[name]
    reference = trained(None, optimizer, eager=True)
    with offloading(**options) as strategy:
        run = trained(strategy, optimizer)
        moments = [v for v in run.model.optimizer.variables if v.value.layout.on_host]
        assert len(moments) >= 6
        assert all(devices_of(variable) == HOST for variable in moments), "premise: they rest on the host"
        assert all(devices_of(variable) == DEVICES for variable in run.model.trainable_variables)
        others = [v for v in run.model.optimizer.variables if not v.value.layout.on_host]
        assert all(devices_of(variable) == DEVICES for variable in others)
        assert not any(variable.path.endswith(("gradient_accumulator", "_average")) for variable in moments)
        parity.assert_same(run, reference, rtol=1e-4, atol=1e-5)


def test_report_and_plan_count_them_as_bytes_of_the_host():
    here = trained(tfshard.ShardedStrategy(tfshard.create_mesh(batch=2)), steps=1)
    with offloading() as strategy:
        report = strategy.report(trained(strategy, steps=1).model)
    plans = [tfshard.plan(here.model, {"batch": 2}, optimizer="adam", offload=offload) for offload in (None, "slots")]
    slots = plans[0].bytes_per_device("slot")
    assert plans[0].host_bytes_per_device() == 0
    for each in (report, plans[1]):
        moments = each.host_bytes_per_device()
        assert 0 < each.bytes_per_device("slot") < 64, "premise: only numbers stay"
        assert each.bytes_per_device("slot") + moments == slots
        assert "slots on the host" in str(each)
    with pytest.raises(tfshard.errors.StrategyError, match="offload must be None or 'slots'"):
        tfshard.plan(here.model, {"batch": 2}, offload="parameters")


def test_eager_steps_bring_them_too():
    reference = trained(None, adam(), eager=True)
    with offloading() as strategy:
        parity.assert_same(trained(strategy, adam(), eager=True), reference, rtol=1e-4, atol=1e-5)


def test_codes_of_8_bits_have_the_bits_of_those_on_the_devices():
    def wide(strategy):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(512), keras.layers.Dense(4)]
        model = tfshard.as_distributed(keras.Sequential(layers))
        model.compile("adam", "sparse_categorical_crossentropy", strategy=strategy)
        model.fit(X, CLASSES, batch_size=8, verbose=0)
        return model

    here = values(wide(tfshard.ShardedStrategy(tfshard.create_mesh(batch=2), slot_dtype="int8")))
    with offloading(slot_dtype="int8") as strategy:
        model = wide(strategy)
        stored = [v.value.storage.buffer for v in model.optimizer.variables if v.value.layout.on_host]
        assert tf.uint8 in {buffer.dtype for buffer in stored}, "premise: there are codes on the host"
        assert_same_bits(values(model), here)


def is_on_host(operation):
    return HOST[0].encode() in operation.get_attr("layout")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{"analyzer": None}, {"microbatches": 2, "analyzer": None}], ids=str)
def test_a_slot_comes_once_and_not_before_the_gradient(options):
    before = set(traced_steps.traced)
    with offloading(**options) as strategy:
        run = trained(strategy, steps=1)
        (graph,) = [graph for graph in traced_steps.traced if graph not in before]
        slots = sum(variable.value.layout.on_host for variable in run.model.optimizer.variables)
    relayouts = [each for each in graph.get_operations() if each.type == "Relayout"]
    chained = [each for each in relayouts if each.inputs[0].op.type == "Relayout"]
    copies = [each for each in chained if is_on_host(each) is not is_on_host(each.inputs[0].op)]
    to_host = [each for each in copies if is_on_host(each)]
    to_devices = [each for each in copies if each not in to_host]
    numbers = [each for each in to_host if each.inputs[0].shape == (2,)]
    # Each slot is copied back, and a waiting slot has a barrier token that was sent for it.
    assert slots == 12 and len(to_devices) == slots
    assert len(to_host) == slots + len(run.model.trainable_variables)
    backward = {"microbatches": "While"}.get(next(iter(options)), "MatMul")
    for copy in to_devices:
        waits_for = [each for each in ancestors([copy.inputs[0]]) if each in numbers]
        assert waits_for and all(
            any(each.type.endswith(backward) for each in ancestors([number.inputs[0]])) for number in waits_for
        )


def test_a_checkpoint_has_them_and_brings_them_back_to_any_mesh(tmp_path):
    with offloading() as strategy:
        run = trained(strategy)
        expected = without_metrics(values(run.model))
        manager = tfshard.CheckpointManager(tmp_path)
        manager.save(run.model, 4)
        other = trained(strategy, steps=1).model
        assert any((without_metrics(values(other))[key] != value).any() for key, value in expected.items())
        manager.restore(other)
        assert_same_bits(without_metrics(values(other)), expected)
        assert {device for v in other.optimizer.variables if v.value.layout.on_host for device in devices_of(v)} == {
            *HOST
        }
        after = float(other.train_on_batch(X, CLASSES))
    elsewhere = trained(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)), steps=1).model
    manager.restore(elsewhere)
    assert_same_bits(without_metrics(values(elsewhere)), expected)
    np.testing.assert_allclose(float(elsewhere.train_on_batch(X, CLASSES)), after, rtol=1e-5)


def test_the_first_numbers_are_those_of_each_devices_piece():
    mesh = tfshard.create_mesh(batch=2, model=2)
    value = np.arange(48, dtype=np.float32).reshape(4, 2, 6)
    for axes in [("batch", None, "model"), ("model", "batch", None), (None, None, "batch")]:
        tensor = transfer.host_to_mesh(value, axes, mesh)
        found = tf.function(host_meshes.first_numbers)(tensor, axes, mesh)
        for piece, number in zip(dtensor.unpack(tensor), dtensor.unpack(found), strict=True):
            assert number.numpy().item() == piece.numpy().flat[0]


def test_gpus_have_a_host_mesh_of_the_same_axes_and_others_none():
    gpus = "/job:localhost/replica:0/task:0/device:GPU:"
    mesh = dtensor.Mesh.from_string(f"|batch=2|0,1|0,1|{gpus}0,{gpus}1")
    host = host_meshes.of(mesh)
    assert host is not None and host.device_type().upper() == "CPU"
    assert (host.dim_names, host.shape(), host.local_device_ids()) == (["batch"], [2], mesh.local_device_ids())
    assert host_meshes.of(tfshard.create_mesh(batch=4)) is None


def test_dtensor_copies_no_shards_between_cpu_meshes():
    """If this fails, DTensor has learned it: `host_meshes.copied` and docs/limits.md can go further."""
    mesh = tfshard.create_mesh(batch=2)
    host = dtensor.create_mesh([("batch", 2)], devices=HOST, device_type="CPU")
    sharded = transfer.host_to_mesh(X, ("batch", None), mesh)
    copy = tf.function(lambda x: dtensor.copy_to_mesh(2.0 * x, transfer.layout(("batch", None), host)))
    with pytest.raises(tf.errors.UnknownError, match="inconsistent with the provided layout"):
        copy(sharded)
    np.testing.assert_array_equal(transfer.to_host(tf.function(lambda x: 2.0 * x)(sharded)), 2 * X)
