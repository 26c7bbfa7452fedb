"""Code of `keras.distribution`, as users of Keras on JAX write it, on TensorFlow: no `strategy=` anywhere."""

import functools
import json
import pathlib
import subprocess
import sys

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from keras import distribution as kd
from keras import layers
from tensorflow.experimental import dtensor

import launched
import launched_distribution
import tfshard
from tfshard import _private
from tfshard.storage import ShardedVariable

# Layouts that Keras on JAX takes may send more than others would.
pytestmark = pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")

DEVICES = [f"cpu:{number}" for number in range(4)]
ROWS, WIDTH = 16, 12


@pytest.fixture(autouse=True)
def no_distribution_is_left():
    yield
    kd.set_distribution(None)


def mesh_2d(shape=(2, 2), names=("data", "model")) -> kd.DeviceMesh:
    return kd.DeviceMesh(shape, names, DEVICES)


def data() -> tuple:
    rs = np.random.RandomState(0)
    return rs.normal(size=(ROWS, WIDTH)).astype("float32"), rs.normal(size=(ROWS, 4)).astype("float32")


def mlp(rate=0.1) -> keras.Model:
    """A functional model, with a layer whose dims no axis of two divides."""
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(8, activation="gelu", name="up")(inputs)
    x = layers.Dropout(rate, seed=3, name="drop")(x)
    x = layers.Dense(7, name="odd")(x)
    return keras.Model(inputs, layers.Dense(4, name="down")(x))


def train(build, *, x_y=None, optimizer=None, loss="mse", epochs=2):
    """Build, compile and train a model, in the scope of the caller."""
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss)
    x, y = x_y or data()
    history = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model, history.history["loss"], model.evaluate(x, y, batch_size=8, verbose=0), model.predict(x, verbose=0)


def assert_same(run, reference, tolerance=1e-5):
    model, losses, evaluated, predicted = run
    expected, *numbers = reference
    for ours, theirs in zip((losses, evaluated, predicted), numbers, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=10 * tolerance)


def layouts(model: keras.Model) -> dict:
    return {variable.path: variable.value.layout for variable in model.weights}


def model_parallel(rules, *, mesh=None, batch="data", **options) -> kd.ModelParallel:
    layout_map = kd.LayoutMap(mesh or mesh_2d())
    for pattern, axes in rules.items():
        layout_map[pattern] = axes
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name=batch, **options)


@pytest.fixture(scope="module")
def reference():
    return train(mlp)


# --- Training ------------------------------------------------------------------------------------------


def test_data_parallel_trains_as_on_one_device_with_replicated_weights(reference):
    distribution = kd.DataParallel(devices=DEVICES)
    kd.set_distribution(distribution)
    run = train(mlp)
    found = layouts(run[0])
    assert all(isinstance(v.value, ShardedVariable) and v.value.mesh.num_local_devices() == 4 for v in run[0].weights)
    assert not any(any(layout.compute) or layout.store_sharded for layout in found.values())
    assert_same(run, reference)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_option_of_the_distribution_shards_the_optimizer_and_the_weights(reference, stage):
    distribution = tfshard.keras_distribution(kd.DataParallel(devices=DEVICES), zero_stage=stage, analyzer=None)
    with distribution.scope():
        run = train(mlp)
    assert layouts(run[0])["up/kernel"].storage == (("batch", None) if stage == 3 else (None, None))
    slot = next(v for v in run[0].optimizer.variables if v.path.endswith("up_kernel_momentum"))
    assert slot.value.layout.storage == ("batch", None)
    assert_same(run, reference)


RULES = {
    "over the model axis": {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": (None, "model")},
    "over both axes": {"up/kernel": ("data", "model"), "down/kernel": (None, "model"), "odd/kernel": ("data",)},
    "over the data axis": {"up/kernel": ("data", None), "odd/kernel": ("data", None), "odd/bias": ("data",)},
    "with the outputs of layers": {"up/kernel": (None, "model"), "up/output": ("data", None), "odd/output": ("data",)},
    "with outputs over both axes": {"up/output": ("data", "model"), "down/output": ("data", "model")},
}  # fmt: skip


@pytest.mark.parametrize("rules", RULES)
def test_model_parallel_trains_as_on_one_device(reference, rules):
    kd.set_distribution(model_parallel(RULES[rules]))
    run = train(mlp)
    found = layouts(run[0])
    for path, layout in found.items():
        given = kd.distribution().get_variable_layout(next(v for v in run[0].weights if v.path == path)).axes
        given += (None,) * (len(layout.spec.shape) - len(given))
        assert layout.compute == tuple(axis if axis == "model" else None for axis in given), path
        assert layout.store_sharded == ("data" in given), path
        if layout.flat is None:
            assert layout.storage == given, path
    if rules.startswith("over"):
        assert any(any(layout.compute) or layout.store_sharded for layout in found.values())
    for variable in run[0].optimizer.variables[2:]:
        owner = next(path for path in found if variable.path.partition("/")[2].startswith(path.replace("/", "_")))
        assert variable.value.layout.storage == found[owner].storage
    assert_same(run, reference)


def test_the_batch_axis_may_be_the_last_of_the_mesh(reference):
    mesh = mesh_2d(names=("tensor", "samples"))
    with model_parallel({"up/kernel": ("samples", "tensor")}, mesh=mesh, batch="samples").scope():
        run = train(mlp)
        assert tfshard.strategy_of().mesh_shape.data == "samples"
    assert layouts(run[0])["up/kernel"].storage == ("samples", "tensor")
    assert_same(run, reference)


def convolutions() -> keras.Model:
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="first")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Flatten()(x)))


def test_kernels_of_convolutions_are_sharded():
    rs = np.random.RandomState(0)
    x_y = rs.normal(size=(ROWS, 6, 6, 2)).astype("float32"), rs.normal(size=(ROWS, 4)).astype("float32")
    reference = train(convolutions, x_y=x_y)
    rules = {
        "first/kernel": (None, None, None, "model"),
        "first/bias": ("model",),
        "first/output": ("data", None, None, "model"),
    }
    kd.set_distribution(model_parallel(rules))
    run = train(convolutions, x_y=x_y)
    assert layouts(run[0])["first/kernel"].compute == rules["first/kernel"]
    assert_same(run, reference, 1e-4)


VOCABULARY, STEPS = 32, 6


def gemma() -> keras.Model:
    body = keras_hub.models.GemmaBackbone(
        vocabulary_size=VOCABULARY, num_layers=1, num_query_heads=4, num_key_value_heads=4, hidden_dim=16,
        intermediate_dim=64, head_dim=8,
    )  # fmt: skip
    return keras.Model(body.input, body.token_embedding(body.output, reverse=True))


@pytest.mark.slow
def test_a_backbone_trains_under_its_own_layout_map():
    rs = np.random.RandomState(0)
    tokens = rs.randint(0, VOCABULARY, (ROWS, STEPS))
    x_y = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, np.roll(tokens, -1, 1)
    options = {"x_y": x_y, "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    reference = train(gemma, **options)
    mesh = mesh_2d(names=("batch", "model"))
    layout_map = keras_hub.models.GemmaBackbone.get_layout_map(mesh)
    kd.set_distribution(kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch"))
    run = train(gemma, **options)
    assert layouts(run[0])["token_embedding/embeddings"].storage == ("model", "batch")
    assert_same(run, reference, 1e-4)


def test_a_model_predicts_and_is_saved_without_compile(reference, tmp_path):
    x, _ = data()
    path = tmp_path / "model.keras"
    kd.set_distribution(model_parallel(RULES["over both axes"]))
    keras.utils.set_random_seed(0)
    model = mlp()
    expected = model.predict(x, verbose=0)
    model.save(path)
    kd.set_distribution(None)
    plain = keras.saving.load_model(path)
    assert not isinstance(plain.weights[0].value, ShardedVariable)
    np.testing.assert_allclose(plain.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_is_saved_and_loaded_under_a_distribution(tmp_path):
    x, y = data()
    kd.set_distribution(model_parallel(RULES["over both axes"]))
    model, *_ = train(functools.partial(mlp, rate=0.0))  # Keras does not save seeds.
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert layouts(loaded)["up/kernel"].storage == ("data", "model")
    again = mlp(rate=0.0)
    again.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)
    losses = [each.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"] for each in (model, loaded)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    model.export(tmp_path / "exported", verbose=False)
    served = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(served.serve(x), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


def test_a_model_that_was_built_before_goes_to_the_distribution_when_it_is_compiled(reference):
    keras.utils.set_random_seed(0)
    model = mlp()
    assert not isinstance(model.weights[0].value, ShardedVariable)
    kd.set_distribution(model_parallel(RULES["over the model axis"]))
    run = train(lambda: model)
    assert layouts(run[0])["up/kernel"].compute == (None, "model")
    assert_same(run, reference)


def test_a_subclassed_model_is_sharded_when_it_is_built():
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [
                layers.Dense(8, activation="gelu", name="up"), layers.Dropout(0.1, seed=3),
                layers.Dense(7, name="odd"), layers.Dense(4, name="down"),
            ]  # fmt: skip

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    reference = train(Late)
    kd.set_distribution(model_parallel({".*up/kernel": ("data", "model")}))
    run = train(Late)
    assert run[0].parts[0].kernel.value.layout.storage == ("data", "model")
    assert_same(run, reference)


def test_a_dataset_and_a_custom_loop_run_under_the_distribution(reference):
    x, y = data()
    kd.set_distribution(kd.DataParallel(devices=DEVICES))
    keras.utils.set_random_seed(0)
    model = mlp()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    assert kd.distribution().distribute_dataset(dataset) is dataset
    losses = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(losses, reference[1], rtol=1e-5)

    def step(batch):
        return keras.ops.mean(keras.ops.square(model(batch[0], training=False) - batch[1]))

    loss = tfshard.strategy_of().run(step, args=((x, y),))
    np.testing.assert_allclose(float(loss), reference[2], rtol=1e-5)


# --- What is active ------------------------------------------------------------------------------------


def test_leaving_a_distribution_restores_plain_keras(reference):
    outer, inner = kd.DataParallel(devices=DEVICES), model_parallel(RULES["over the model axis"])
    with outer.scope():
        with inner.scope():
            assert kd.distribution() is inner
            sharded = mlp()
        assert tfshard.strategy_of() is tfshard.strategy_of(outer)
    assert kd.distribution() is None
    assert layouts(sharded)["up/kernel"].compute == (None, "model")
    kernel = sharded.get_layer("up").kernel
    kernel.assign(np.ones(kernel.shape))  # A variable keeps its layout, as on JAX.
    assert kernel.value.layout.compute == (None, "model")
    plain = train(mlp)
    assert not any(isinstance(v.value, ShardedVariable) for v in plain[0].variables)
    assert type(plain[0]) is type(keras.Model(layer := keras.Input((1,)), layer))
    assert_same(plain, reference, 1e-7)


def test_an_explicit_strategy_and_its_scope_take_precedence():
    kd.set_distribution(kd.DataParallel(devices=DEVICES))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    model = mlp()
    model.compile("sgd", "mse", strategy=strategy)
    assert model.distribute_strategy is strategy
    with strategy.scope():
        assert mlp().weights[0].value.mesh == strategy.mesh


def test_a_layout_given_to_a_variable_takes_precedence():
    class Scaled(layers.Layer):
        def build(self, shape):
            layout = kd.TensorLayout(("model", "data"), kd.distribution().device_mesh)
            self.scale = keras.Variable(np.ones((WIDTH, 8), "float32"), name="scale", layout=layout)

        def call(self, x):
            return x @ self.scale

    distribution = model_parallel({".*scale": (None, "model")})
    with distribution.scope():
        inputs = keras.Input((WIDTH,))
        model = keras.Model(inputs, Scaled(name="scaled")(inputs))
        model.compile("sgd", "mse")
        model.fit(np.ones((8, WIDTH)), np.ones((8, 8)), verbose=0)
    assert layouts(model)["scaled/scale"].storage == ("model", "data")


def test_a_rule_that_is_added_later_holds_for_later_variables():
    distribution = model_parallel({"up/kernel": (None, "model")})
    kd.set_distribution(distribution)
    assert tfshard.strategy_of().layout_map  # The strategy has its copy.
    distribution._layout_map["down/kernel"] = (None, "model")
    model = mlp()
    model.compile("sgd", "mse")
    assert layouts(model)["down/kernel"].compute == (None, "model")


def test_large_variables_are_never_whole_on_a_device():
    """A variable that is too large for a group goes to its shards when it is made."""
    kd.set_distribution(model_parallel({"wide/kernel": ("data", "model")}))
    layer = layers.Dense(1024, name="wide")
    layer.build((None, 1024))
    buffers = dtensor.unpack(layer.kernel.value.storage.buffer.read_value())
    assert [tuple(each.shape) for each in buffers] == [(512, 512)] * 4


# --- The other objects ---------------------------------------------------------------------------------


def test_devices_are_those_that_tfshard_started():
    assert kd.list_devices() == kd.list_devices("CPU") == DEVICES
    assert kd.get_device_count() == 4 and kd.list_devices("gpu") == []
    with pytest.raises(tfshard.errors.InitializationError, match="Unknown device type.*'npu'"):
        kd.list_devices("npu")
    kd.initialize()
    kd.initialize("localhost:1", 1, 0)


def test_meshes_and_layouts_are_dtensors():
    mesh = mesh_2d()
    assert mesh.backend_mesh.dim_names == ["data", "model"] and mesh.backend_mesh.shape() == [2, 2]
    layout = kd.TensorLayout(("model", None), mesh).backend_layout
    assert (layout.sharding_specs, layout.mesh) == (["model", dtensor.UNSHARDED], mesh.backend_mesh)
    with pytest.raises(tfshard.errors.LayoutError, match="device mesh is not set"):
        _ = kd.TensorLayout(("model", None)).backend_layout
    with pytest.raises(tfshard.errors.MeshError, match="devices that do not exist.*num_devices=8"):
        _ = kd.DeviceMesh((8,), ["data"], [f"cpu:{i}" for i in range(8)]).backend_mesh
    with pytest.raises(tfshard.errors.MeshError, match="each once"):
        _ = kd.DeviceMesh((2,), ["data"], ["cpu:0", "cpu:0"]).backend_mesh
    with pytest.raises(
        tfshard.errors.MeshError, match=r"batch_dim_name must be an axis.*Received: batch_dim_name='rows'"
    ):
        kd.set_distribution(kd.ModelParallel(layout_map=kd.LayoutMap(mesh_2d()), batch_dim_name="rows"))
        keras.layers.Dense(1).build((None, 1))
    some = kd.DeviceMesh((2,), ["data"], DEVICES[2:]).backend_mesh
    assert [device.rpartition(":")[2] for device in some.local_devices()] == ["2", "3"]


def test_a_part_of_the_devices_trains(reference):
    kd.set_distribution(kd.DataParallel(devices=DEVICES[2:]))
    assert_same(train(mlp), reference)


def test_distribute_tensor_moves_eager_tensors_to_the_mesh():
    layout = kd.TensorLayout(("data", "model"), mesh_2d())
    value = np.arange(24.0).reshape(4, 6)
    found = kd.distribute_tensor(value, layout)
    assert [tuple(each.shape) for each in dtensor.unpack(found.on_mesh)] == [(2, 3)] * 4
    assert found.layout == layout.backend_layout
    np.testing.assert_array_equal(found + 0.0, value)
    again = kd.distribute_tensor(found, kd.TensorLayout((None, "data"), layout.device_mesh))
    np.testing.assert_array_equal(again, value)
    batch = _private.keras_backend.distribution_lib.distribute_data_input(value, layout, "data")
    np.testing.assert_array_equal(batch, value)
    with pytest.raises(tfshard.errors.LayoutError, match="does not divide dim 1"):
        kd.distribute_tensor(np.ones((4, 5)), layout)
    with pytest.raises(tfshard.errors.LayoutError, match="does not fit a tensor"):
        kd.distribute_tensor(np.ones(4), layout)
    symbolic = keras.KerasTensor((2, 2))
    assert kd.distribute_tensor(symbolic, layout) is symbolic


def test_distribute_tensor_in_a_step_gives_the_layout_and_keeps_values_and_gradients():
    kd.set_distribution(model_parallel({}))
    mesh, strategy, seen = kd.distribution().device_mesh, tfshard.strategy_of(), {}
    x = np.random.RandomState(0).normal(size=(4, 6)).astype("float32")

    def step(batch):
        found = []
        for axes in (("data", None), ("data", "model"), ("model", None), (None, "data"), (None, None)):
            with tf.GradientTape() as tape:
                tape.watch(batch)
                made = kd.distribute_tensor(batch * 2.0, kd.TensorLayout(axes, mesh))
                loss = tf.reduce_sum(made**3)
            if not tf.executing_eagerly():
                seen[axes] = made
            found += [made + 0.0, tape.gradient(loss, batch)]
            if tf.executing_eagerly():
                assert tuple(dtensor.fetch_layout(made).sharding_specs) == tuple(
                    dtensor.UNSHARDED if axis is None else axis for axis in axes
                )
        return found

    for run in (strategy.run, lambda fn, args: strategy.run(tf.function(fn), args=args)):
        for number, each in enumerate(run(step, args=(x,))):
            np.testing.assert_allclose(each, 24 * x**2 if number % 2 else 2 * x, rtol=1e-5, atol=1e-5)
    assert seen, "premise: the step was traced"
    plain = tf.function(lambda t: kd.distribute_tensor(t, kd.TensorLayout(("data", None), mesh)))
    np.testing.assert_array_equal(plain(x), x)


# --- Mistakes ------------------------------------------------------------------------------------------


def test_mistakes_are_named_before_a_step():
    with pytest.raises(tfshard.errors.StrategyError, match="No Keras distribution is active"):
        tfshard.strategy_of()
    with pytest.raises(tfshard.errors.StrategyError, match="takes a keras.distribution.DataParallel"):
        tfshard.keras_distribution(3)
    distribution = kd.DataParallel(devices=DEVICES)
    with pytest.raises(tfshard.errors.StrategyError, match="Unknown options.*'mesh'.*zero_stage"):
        tfshard.keras_distribution(distribution, mesh=3)
    tfshard.keras_distribution(distribution, zero_stage=1)
    with pytest.raises(tfshard.errors.StrategyError, match="in use already"):
        tfshard.keras_distribution(distribution, zero_stage=2)
    with (
        model_parallel({"odd/kernel": (None, "model")}).scope(),
        pytest.raises(tfshard.errors.LayoutError, match="'model' of size 2 does not divide dim 1 of 'odd/kernel'"),
    ):
        mlp()
    with (
        model_parallel({"up/bias": (None, "model")}).scope(),
        pytest.raises(tfshard.errors.LayoutError, match="'up/bias' must be.*at most 1 axes"),
    ):
        mlp()


def test_several_processes_need_the_launcher():
    with pytest.raises(ValueError, match="has 2 jobs, but num_processes is 3"):
        kd.initialize("10.0.0.1:1234,10.0.0.2:2345", 3, 0)
    with pytest.raises(tfshard.errors.InitializationError, match="tfshard launch --hosts=10.0.0.1,10.0.0.2"):
        kd.initialize("10.0.0.1:1234,10.0.0.2:2345", 2, 0)
    with pytest.raises(tfshard.errors.InitializationError, match="tfshard launch --num_processes=2"):
        kd.initialize("10.0.0.1:1234", 2, 0)


def test_clients_of_a_launched_run_train_on_their_parts_of_a_dataset():
    script = pathlib.Path(__file__).parents[1] / "launched_distribution.py"
    done = launched.launch("--num_processes=2", "--devices_per_process=2", str(script))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    expected = launched_distribution.train()
    for client in range(2):
        (line,) = launched.said(done, f"[client {client}] FOUND ")
        found = json.loads(line)
        assert (found["devices"], found["clients"]) == (DEVICES, [2, client])
        assert (found["rows"], found["shard"]) == ([4, 4], client)
        assert "started this process as client" in found["refused"]
        np.testing.assert_allclose(found["losses"], expected, rtol=1e-5)


_FRESH = {
    "list_devices starts the devices": """
devices = keras.distribution.list_devices()
assert len(devices) == os.cpu_count(), devices
keras.distribution.set_distribution(keras.distribution.DataParallel())
expect("keras.distribution.list_devices.. has started the devices.*Call tfshard.initialize.. before it")
""",
    "a mesh starts its devices": """
mesh = keras.distribution.DeviceMesh((8,), ["data"], [f"cpu:{i}" for i in range(8)])
keras.distribution.set_distribution(keras.distribution.DataParallel(mesh))
keras.layers.Dense(2).build((None, 2))
assert keras.distribution.get_device_count() == 8
expect("DeviceMesh has started the devices")
""",
    "a tensor fixes the devices, and undo restores Keras": """
tf.zeros(1)
assert keras.distribution.list_devices() == ["cpu:0"]
expect("TensorFlow has already fixed its devices")
_private.remove_distribution_backend()
assert dict(vars(distribution_lib)) == before[0]
assert (core.Variable._initialize, keras.Model.save) == before[1:]
""",
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", _FRESH)
def test_devices_start_when_they_are_first_asked_for(case):
    script = f"""
import os, re
import keras
import tensorflow as tf
from keras.src.backend.tensorflow import core, distribution_lib
before = dict(vars(distribution_lib)), core.Variable._initialize, keras.Model.save
import tfshard
from tfshard import _private
assert distribution_lib.list_devices is not before[0]["list_devices"]
def expect(text):
    try:
        tfshard.initialize(num_devices=3, device_type="CPU")
    except tfshard.errors.InitializationError as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError("no error")
{_FRESH[case]}
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
