"""Hybrid sharding with a replica axis and a batch axis matches one device."""

import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import small_models
import sweeps
import tfshard
from tfshard.devices import replicas, transfer
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes, axis_sizes

HYBRID = {"replica": 2, "batch": 2}
WIDTH = 16
RS = np.random.RandomState(0)
X = RS.normal(size=(16, WIDTH)).astype("float32")
TOKENS = RS.randint(0, 24, (16, 6)).astype("int32")
IMAGES = RS.normal(size=(16, 8, 8, 4)).astype("float32")
CLASSES = (np.arange(16) % 4).astype("int32")


def mlp():
    hidden = [keras.layers.Dense(WIDTH, activation="tanh") for _ in range(4)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(4)])


def tied():
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(24, WIDTH)
    x = table(inputs)
    x = x + keras.layers.Dense(WIDTH, activation="tanh")(x)
    return keras.Model(inputs, keras.ops.max(table(x, reverse=True), axis=1))


def convolutions():
    inputs = keras.Input((8, 8, 4))
    x = keras.layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    x = keras.layers.BatchNormalization(momentum=0.5)(x)
    x = keras.layers.DepthwiseConv2D(3)(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.GlobalAveragePooling2D()(x)))


def recurrent():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.GRU(WIDTH)(keras.layers.Embedding(24, WIDTH)(inputs))
    return keras.Model(inputs, keras.layers.Dense(4)(x))


MODELS = {
    "mlp": (mlp, X), "tied": (tied, TOKENS), "convolutions": (convolutions, IMAGES), "recurrent": (recurrent, TOKENS),
    "attention": (small_models.attention, TOKENS),
}  # fmt: skip


@pytest.fixture(autouse=True)
def every_gradient_by_replicas(monkeypatch):
    """Reduce the gradients of these small models by replicas, too."""
    monkeypatch.setattr(variable_layout, "LEAST_BY_REPLICAS_BYTES", 0)


def adam():
    return keras.optimizers.Adam(1e-2)


def run(name, *, mesh=None, stage=3, optimizer=adam, eager=False, **options):
    build, x = MODELS[name]
    batches = [(x[:8], CLASSES[:8]), (x[8:], CLASSES[8:])]
    strategy = None
    if mesh is not None:
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), zero_stage=stage, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return parity.train(build, batches, optimizer=optimizer, loss=loss, strategy=strategy, steps=4, eager=eager)


@functools.cache
def on_one_device(name, optimizer=adam):
    return run(name, optimizer=optimizer)


def kept_by_a_device(model):
    """Return the bytes of the trained variables and their slots on the fullest device."""
    held = {}
    variables = [*model.trainable_variables, *(v for v in model.optimizer.variables if len(v.shape))]
    for storage in {variable.value.storage for variable in variables}:
        for device, bytes_ in transfer.local_bytes(storage.buffer.value()).items():
            held[device] = held.get(device, 0) + bytes_
    return max(held.values())


@pytest.mark.sweep(1)
@sweeps.table(
    "hybrid sharding",
    ("name", "stage", "grouped"),
    itertools.product(MODELS, range(4), (False, True)),
    always=[
        *((name, 3, False) for name in MODELS),
        ("mlp", 3, True),
        ("mlp", 2, True),
        ("mlp", 1, False),
        ("mlp", 0, False),
    ],
    sample=3,
)
def test_a_model_trains_as_on_one_device(name, stage, grouped):
    options = {} if grouped else {"analyzer": None}
    trained = run(name, mesh=HYBRID, stage=stage, **options)
    parity.assert_same(trained, on_one_device(name), rtol=1e-5, atol=1e-5, slots=False)
    trained.model.distribute_strategy.check_consistency(trained.model)


SETTINGS = {
    "microbatches": (adam, {"microbatches": 2}),
    "reduce_once": (adam, {"microbatches": 2, "reduce_once": True}),
    "accumulated": (lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2, use_ema=True), {}),
    "clipped": (lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1, weight_decay=0.01), {"zero_stage": 1}),
    "loss_scale": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2)), {}),
    "whole gradients": (lambda: keras.optimizers.Lamb(1e-2), {"analyzer": None}),
    "kept": (adam, {"reshard_after_forward": False}),
    "int8 slots": (adam, {"slot_dtype": "int8"}),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_so_it_does_with(name):
    optimizer, options = SETTINGS[name]
    stage = options.get("zero_stage", 3)
    options = {key: value for key, value in options.items() if key != "zero_stage"}
    trained = run("mlp", mesh=HYBRID, stage=stage, optimizer=optimizer, **options)
    tolerance = 1e-4 if name == "int8 slots" else 1e-5
    parity.assert_same(trained, on_one_device("mlp", optimizer), rtol=tolerance, atol=tolerance, slots=False)


def test_eager_steps_train_as_on_one_device():
    parity.assert_same(run("mlp", mesh=HYBRID, eager=True), on_one_device("mlp"), rtol=1e-5, atol=1e-5, slots=False)


def test_a_device_holds_its_share_of_a_replica_and_every_replica_all():
    hybrid = run("mlp", mesh=HYBRID, analyzer=None).model
    size = 12 * hybrid.count_params()
    assert size / 2 <= kept_by_a_device(hybrid) <= 0.55 * size
    assert hybrid.distribute_strategy.mesh_shape == HYBRID
    assert hybrid.distribute_strategy.report(hybrid).mesh == HYBRID


def test_weights_are_read_and_written_as_those_of_one_device():
    model, reference = run("mlp", mesh=HYBRID).model, on_one_device("mlp").model
    doubled = [2 * value for value in reference.get_weights()]
    model.set_weights(doubled)
    for value, expected in zip(model.get_weights(), doubled, strict=True):
        np.testing.assert_array_equal(value, expected)
    kernel = model.trainable_variables[0]
    kernel.assign_add(np.ones(kernel.shape, "float32"))
    np.testing.assert_allclose(kernel.numpy(), doubled[0] + 1, rtol=1e-6)
    model.distribute_strategy.check_consistency(model)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_sends_what_is_planned_and_gathers_in_replicas_only(stage):
    strategy = tfshard.ShardedStrategy(
        tfshard.create_mesh(**HYBRID),
        zero_stage=stage,
        analyzer=tfshard.ParameterAnalyzer(group_threshold_bytes=1 << 16),
    )
    inputs = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(1000, 128)(inputs)
    x = keras.layers.MultiHeadAttention(4, 64)(x, x)
    outputs = keras.layers.Dense(8)(keras.layers.GlobalAveragePooling1D()(x))
    model = tfshard.as_distributed(keras.Model(inputs, outputs))
    model.compile("adam", "sparse_categorical_crossentropy", strategy=strategy)
    plan = strategy.plan(model, inputs=np.zeros((16, 16), "int32"))
    profile = tfshard.profile_step(model, (np.zeros((16, 16), "int32"), np.zeros((16,), "int32")))
    tfshard.measure.assert_matches_plan(profile, plan)
    assert profile.count("all-to-all") == 5 * (stage >= 0), "premise: large gradients go by replicas"
    between = [each for each in profile.collectives if each.group_size == 4]
    assert [each.kind for each in between] == ["all-reduce"], "of what is small, with the loss"
    assert {each.axis for each in plan.collectives} == {"replica", "batch"}


def test_an_own_gradient_is_added_up_over_all_devices():
    """Each device has another local gradient, unknown to DTensor."""
    mesh = tfshard.create_mesh(**HYBRID)
    rows = transfer.host_to_mesh(RS.normal(size=(4, 3)).astype("float32"), ("batch", None), mesh)

    @tf.function
    def step(rows):
        from tfshard.operations import rows as of_devices

        own = tf.reshape(of_devices.to_local(rows, mesh), (3,))
        return replicas.all_reduce(own, mesh)

    expected = transfer.to_host(rows).sum(0)
    for piece in tf.experimental.dtensor.unpack(step(rows)):
        np.testing.assert_allclose(piece, expected, rtol=1e-6)


def test_axes_of_replicas_are_told_and_checked():
    axes = MeshAxes.of({"outer": 2, "dp": 4, "tp": 2}, roles={"outer": "replica", "dp": "data"})
    assert (dict(axes), axes.replicas, axes.shards, axes.data_size) == ({"dp": 8, "tp": 2}, 2, 4, 8)
    assert MeshAxes.of(axes) == axes and MeshAxes.of(axes.given, axes.roles) == axes
    assert MeshAxes.of({"batch": 4}) != MeshAxes.of(HYBRID) == HYBRID
    mesh = tfshard.create_mesh(**HYBRID)
    assert (mesh.shape(), axis_sizes(mesh)) == ([4], HYBRID)
    with pytest.raises(tfshard.errors.MeshError, match="at most one replica axis, together with a data axis"):
        tfshard.create_mesh(replica=2, model=2)


THREE_AXES = """
import json
import numpy as np
import keras
import tfshard

tfshard.initialize(num_devices=8, device_type="CPU")
import parity
from tfshard.layouts import variable_layout

variable_layout.LEAST_BY_REPLICAS_BYTES = 0
rs = np.random.RandomState(0)
x = rs.randint(0, 24, (16, 6)).astype("int32")
y = (np.arange(16) % 4).astype("int32")


def block():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(24, 16)(inputs)
    normed = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(2, 8, use_bias=False)(normed, normed)
    x = x + keras.layers.Dense(16)(keras.layers.Dense(32, activation="gelu")(x))
    return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))


def trained(stage=None):
    strategy = None
    if stage is not None:
        mesh = tfshard.create_mesh(replica=2, batch=2, model=2)
        strategy = tfshard.ShardedStrategy(mesh, "auto", stage, analyzer=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return parity.train(
        block, [(x, y)], optimizer=lambda: keras.optimizers.Adam(1e-2), loss=loss, strategy=strategy, steps=4
    )


reference, by_replicas = trained(), []
for stage in range(4):
    run = trained(stage)
    parity.assert_same(run, reference, rtol=1e-5, atol=1e-5, slots=False)
    strategy = run.model.distribute_strategy
    strategy.check_consistency(run.model)
    kernels = [v for v in run.model.trainable_variables if any(v.value.layout.compute) and len(v.shape) > 1]
    kernels = [v.path for v in kernels if v.path.endswith("kernel")]
    profile = tfshard.profile_step(run.model, (x, y))
    tfshard.measure.assert_matches_plan(profile, strategy.plan(run.model, inputs=x))
    by_replicas.append((profile.count("all-to-all"), len(kernels)))
print(json.dumps(by_replicas))
"""


@pytest.mark.slow
def test_three_axes_train_as_one_device_and_add_up_kernels_by_replicas():
    """Uses eight devices in a separate process. The model axis shards kernels of Dense and EinsumDense."""
    here = pathlib.Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{pathlib.Path(tfshard.__file__).parents[1]}{os.pathsep}{here}"}
    done = subprocess.run(
        [sys.executable, "-c", THREE_AXES], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[7, 7]] * 4, "all-to-alls, and kernels that are sharded"
