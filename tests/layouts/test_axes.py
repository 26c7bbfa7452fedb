"""The role of a mesh axis does not depend on its name."""

import copy
import json
import os
import pathlib
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import launched_roles
import parity
import tfshard
from sweeps import table
from tfshard.errors import MeshError
from tfshard.layouts.axes import MeshAxes, Role, axis_sizes

ROLES = {"outer": "data", "inner": "tensor"}
NAMES = {"batch": "outer", "model": "inner"}


# --- MeshAxes ------------------------------------------------------------------------------------------


def test_a_role_follows_from_the_name_where_none_is_given():
    axes = MeshAxes.of({"model": 4, "batch": 2, "other": 3})
    assert list(axes.items()) == [("model", 4), ("batch", 2), ("other", 3)]
    assert (axes.data, axes.data_size, axes.tensor) == ("batch", 2, ("model", "other"))
    assert axes.roles == {"model": "tensor", "batch": "data", "other": "tensor"}


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("data", "model"), ("data", "tensor")),
        (("dp", "tp"), ("data", "tensor")),
        (("fsdp", "tensor"), ("data", "tensor")),
        (("FSDP", "TP"), ("data", "tensor")),
        (("data_parallel", "model_parallel"), ("data", "tensor")),
        (("dp_replicate", "dp_shard", "tp"), ("replica", "data", "tensor")),
        (("pp", "dp"), ("pipeline", "data")),
        (("x", "y"), ("tensor", "tensor")),
    ],
)
def test_names_of_other_libraries_say_their_roles(names, roles):
    axes = MeshAxes.of(dict.fromkeys(names, 2))
    assert tuple(axes.roles.values()) == roles
    assert axes.has_default_roles


def test_roles_that_are_given_go_before_names():
    axes = MeshAxes.of({"dp": 2, "tp": 4, "batch": 3}, {"dp": "data", "batch": Role.TENSOR})
    assert (axes.data, axes.data_size, axes.tensor) == ("dp", 2, ("tp", "batch"))
    assert MeshAxes.of(axes) is axes
    assert MeshAxes.of(axes, {"dp": "tensor"}).data is None


def test_without_a_data_axis_its_size_is_one():
    axes = MeshAxes.of({"model": 4})
    assert (axes.data, axes.data_size, axes.tensor) == (None, 1, ("model",))


def test_axes_are_a_mapping_that_equals_one_with_the_same_roles():
    by_name, given = MeshAxes.of({"batch": 2, "model": 4}), MeshAxes.of({"outer": 2, "inner": 4}, ROLES)
    assert by_name == {"batch": 2, "model": 4} == by_name
    assert repr(by_name) == "{'batch': 2, 'model': 4}"
    assert given != {"outer": 2, "inner": 4}
    assert given == MeshAxes.of({"outer": 2, "inner": 4}, ROLES) != MeshAxes.of({"outer": 2, "inner": 4})
    assert hash(given) == hash(MeshAxes.of({"outer": 2, "inner": 4}, ROLES))
    assert given == pickle.loads(pickle.dumps(given)) == copy.deepcopy(given)
    assert given == eval(repr(given))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            {"dp": "sequence"},
            r"Unknown role of mesh axis 'dp'. Roles: \['data', 'replica', 'tensor', 'pipeline', 'context'\].*'seq",
        ),
        ({"dp": None}, "Unknown role"),
        ({"pd": "data"}, r"roles names axis 'pd', which is not in the mesh. Mesh axes: \('dp', 'tp'\)"),
        ({"dp": "data", "tp": "data"}, r"one axis .* can have the role 'data', but \('dp', 'tp'\) have it.*Received"),
        (2, "roles must be a mapping from the name of an axis to its role.*Received: roles=2"),
    ],
)
def test_wrong_roles_are_refused(roles, message):
    for make in (lambda: MeshAxes.of({"dp": 2, "tp": 2}, roles), lambda: tfshard.create_mesh(dp=2, tp=2, roles=roles)):
        with pytest.raises(tfshard.errors.MeshError, match=message):
            make()


def test_an_axis_called_batch_is_a_second_data_axis():
    with pytest.raises(
        tfshard.errors.MeshError,
        match=r"\('dp', 'batch'\) have it, by their names or roles. Give one of them .* roles={'dp': 'replica'}",
    ):
        tfshard.create_mesh(dp=2, batch=2)


# --- Meshes --------------------------------------------------------------------------------------------


def test_roles_stay_with_a_mesh_wherever_dtensor_takes_it():
    mesh = tfshard.create_mesh(outer=2, inner=-1, roles=ROLES)
    axes = MeshAxes.of({"outer": 2, "inner": 2}, ROLES)
    assert axis_sizes(mesh) == axes
    layout = dtensor.Layout(["outer", dtensor.UNSHARDED], mesh)
    tensor = dtensor.call_with_layout(tf.ones, layout, (4, 4))
    computed = tf.function(tf.matmul)(tensor, tensor)
    for each in (
        layout.mesh, pickle.loads(pickle.dumps(layout)).mesh, pickle.loads(pickle.dumps(mesh)), copy.copy(mesh),
        dtensor.fetch_layout(tensor).mesh, dtensor.fetch_layout(computed).mesh,
    ):  # fmt: skip
        assert each == mesh and hash(each) == hash(mesh) and axis_sizes(each) == axes


def test_meshes_with_other_roles_differ_and_those_that_the_names_say_are_the_usual_ones():
    mesh = tfshard.create_mesh(outer=2, inner=2, roles=ROLES)
    assert mesh != tfshard.create_mesh(outer=2, inner=2)
    assert mesh == tfshard.create_mesh(outer=2, inner=2, roles={"outer": "data"})
    usual = tfshard.create_mesh(batch=2, model=2)
    assert usual == tfshard.create_mesh(batch=2, model=2, roles={"batch": "data", "model": "tensor"})
    devices = [f"CPU:{i}" for i in range(4)]
    assert usual == dtensor.create_mesh([("batch", 2), ("model", 2)], devices=devices, device_type="CPU")


def test_a_mesh_made_with_dtensor_has_the_roles_of_its_names():
    devices = [f"CPU:{i}" for i in range(4)]
    given = [("batch", 2), ("model", 2)]
    mesh = dtensor.create_mesh(given, mesh_name="mine", devices=devices, device_type="CPU")
    assert axis_sizes(mesh) == {"batch": 2, "model": 2}
    assert tfshard.ShardedStrategy(mesh).mesh_shape.data == "batch"


# --- Training ------------------------------------------------------------------------------------------


def build() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(16, 8, name="table")(inputs)
    hidden = keras.layers.Dense(12, activation="relu", name="up")(keras.layers.LayerNormalization(name="norm")(x))
    x = x + keras.layers.Dropout(0.0)(keras.layers.Dense(8, name="down")(hidden))
    return keras.Model(inputs, keras.layers.Dense(5, name="head")(keras.layers.GlobalAveragePooling1D()(x)))


def batches() -> list:
    rs = np.random.RandomState(0)
    # The data axis does not divide the last size.
    return [(rs.randint(0, 16, (size, 6)), rs.randint(0, 5, size)) for size in (8, 8, 5)]


def strategy(stage: int, *, renamed: bool, layout_map="explicit", **options) -> tfshard.ShardedStrategy:
    data, tensor = ("outer", "inner") if renamed else ("batch", "model")
    if layout_map == "explicit":
        layout_map = tfshard.LayoutMap({"table/embeddings": (tensor, data), "norm/.*|head/.*": ()})
        layout_map.column("up", axis=tensor)
        layout_map.row("down", axis=tensor)
    roles = ROLES if renamed else None
    mesh = tfshard.create_mesh(**{data: 2, tensor: 2}, roles=roles)
    return tfshard.ShardedStrategy(mesh, layout_map, zero_stage=stage, **options)


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def renamed(axes: tuple) -> tuple:
    return tuple(NAMES.get(axis, axis) for axis in axes)


OPTIONS = {"layout map": {}, "sequence": {"sequence_parallel": True}, "auto": {"layout_map": "auto"}}


@pytest.mark.slow
@table(
    "axes of other names", ("stage", "option"),
    [(0, "layout map"), (3, "layout map"), (3, "sequence"), (3, "auto")],
    always=[(0, "layout map"), (3, "sequence")],
)  # fmt: skip
def test_a_model_trains_on_axes_of_other_names_as_on_one_device(stage: int, option: str):
    options = OPTIONS[option]
    reference = parity.train(build, batches(), optimizer=keras.optimizers.Adam, loss=loss(), steps=6)
    usual = parity.train(
        build, batches(), optimizer=keras.optimizers.Adam, loss=loss(), steps=6,
        strategy=strategy(stage, renamed=False, **options),
    )  # fmt: skip
    chosen = strategy(stage, renamed=True, **options)
    run = parity.train(build, batches(), optimizer=keras.optimizers.Adam, loss=loss(), steps=6, strategy=chosen)
    assert parity.shard_axes(run.model) == ({"outer", "inner"} if stage == 3 else {"inner"})
    layouts = {v.path: v.value.layout for v in run.model.trainable_variables}
    assert any(layout.grouped for layout in layouts.values())
    gradients = {row.path: row.gradient_layout for row in chosen.report(run.model).variables if row.kind == "parameter"}
    for variable in usual.model.trainable_variables:
        expected, found = variable.value.layout, layouts[variable.path]
        assert renamed(expected.storage) == found.storage and renamed(expected.compute) == found.compute
        assert renamed(variable.value.gradient_layout) == gradients[variable.path]
    parity.assert_same(run, reference, rtol=1e-4, atol=1e-5)
    # The same step with other names is bit-identical.
    assert run.losses == usual.losses
    for path, value in usual.weights.items():
        np.testing.assert_array_equal(run.weights[path], value, err_msg=path)
    if not chosen.config.sequence_parallel:
        batch = batches()[0]
        tfshard.measure.assert_matches_plan(
            tfshard.profile_step(run.model, batch), chosen.plan(run.model, inputs=batch[0])
        )
    chosen.check_consistency(run.model)


def test_a_plan_on_axes_of_other_names_is_the_plan_under_other_names():
    model = build()
    plans = []
    for chosen in (strategy(3, renamed=False), strategy(3, renamed=True)):
        plans.append(chosen.plan(model, "adam", inputs=batches()[0][0]).to_json())
    usual, other = plans
    for name, ours in NAMES.items():
        usual = usual.replace(f'"{name}"', f'"{ours}"').replace(f"over {name}", f"over {ours}")
    assert usual == other


def test_plans_and_layouts_for_axes_without_devices():
    model, axes = build(), MeshAxes.of({"outer": 64, "inner": 2}, ROLES)
    assert list(tfshard.auto_layout_map(model, axes)) == list(tfshard.auto_layout_map(model, {"model": 2, "batch": 64}))
    plan = tfshard.plan(model, axes, "auto", optimizer="adam")
    assert plan.mesh == axes and plan.to_dict()["mesh"] == {"outer": 64, "inner": 2}
    assert {collective.axis for collective in plan.collectives} == {"outer", "inner"}
    assert not tfshard.lint(model, axes, "auto")
    keras_map = plan.to_keras_layout_map()
    assert keras_map.device_mesh.axis_names == ("outer", "inner")


def test_verify_and_a_loop_of_ones_own_find_the_data_axis():
    model = tfshard.as_distributed(build())
    chosen = strategy(3, renamed=True)
    model.compile("adam", loss(), strategy=chosen)
    assert tfshard.verify(model, batches()[0]).ok
    assert (chosen.input_shard.index, chosen.input_shard.count) == (0, 1)
    seen = []
    chosen.run(lambda batch: seen.append(batch), args=(np.zeros((4, 3), np.float32),))
    assert dtensor.fetch_layout(seen[0]).sharding_specs == ["outer", dtensor.UNSHARDED]


def test_a_keras_layout_map_is_taken_on_a_mesh_whose_data_axis_has_another_name():
    devices = keras.distribution.DeviceMesh((2, 2), ("outer", "inner"), [f"cpu:{i}" for i in range(4)])
    given = keras.distribution.LayoutMap(devices)
    given["table/embeddings"] = ("inner", "outer")
    parallel = keras.distribution.ModelParallel(layout_map=given, batch_dim_name="outer")
    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(outer=2, inner=2, roles=ROLES), parallel)
    assert chosen.layout_map["table/embeddings"].axes == ("inner", "outer")


@pytest.mark.parametrize("sizes", [{"replica": 2, "batch": 2}, {"batch": 2, "context": 2}])
def test_a_mesh_of_dtensor_with_a_replica_or_context_axis_is_refused(sizes):
    tfshard.create_mesh(batch=4)  # starts DTensor
    mesh = dtensor.create_mesh(list(sizes.items()), devices=[f"CPU:{i}" for i in range(4)], device_type="CPU")
    with pytest.raises(MeshError, match=r"no replica axis and no context axis: .* tfshard.create_mesh\("):
        tfshard.ShardedStrategy(mesh)


@pytest.mark.slow
def test_clients_agree_on_roles_and_train_on_axes_of_other_names():
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tfshard", "launch", "--num_processes=2", "--devices_per_process=2",
         str(root / "tests" / "launched_roles.py")],
        capture_output=True, text=True, timeout=600, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("FOUND ")[2]) for line in done.stdout.splitlines() if "FOUND " in line]
    assert len(found) == 2
    for client in found:
        assert "the mesh" in client["refused"] and "roles" in client["refused"]
        np.testing.assert_allclose(client["losses"], launched_roles.train(devices=4), rtol=1e-5)
