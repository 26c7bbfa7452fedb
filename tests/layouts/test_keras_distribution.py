"""keras.distribution objects: KerasHub's layout maps are accepted, and a plan exports a layout map for Keras on JAX."""

import itertools
import pickle
from collections.abc import Callable

import keras
import keras_hub
import numpy as np
import pytest

import parity
import tfshard
from sweeps import each_value, table
from tfshard import LayoutMap

# KerasHub's maps shard query kernels along the model's width rather than along heads: test_linter.py.
pytestmark = pytest.mark.filterwarnings("ignore::tfshard.errors.LayoutWarning")

VOCABULARY, STEPS = 32, 6


def llama(**options) -> keras.Model:
    return keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY, num_layers=1, num_query_heads=4, num_key_value_heads=4, hidden_dim=16,
        intermediate_dim=32, **options,
    )  # fmt: skip


def qwen() -> keras.Model:
    return keras_hub.models.QwenBackbone(
        vocabulary_size=VOCABULARY, num_layers=1, num_query_heads=4, num_key_value_heads=4, hidden_dim=16,
        intermediate_dim=32,
    )  # fmt: skip


def gemma() -> keras.Model:
    return keras_hub.models.GemmaBackbone(
        vocabulary_size=VOCABULARY, num_layers=1, num_query_heads=4, num_key_value_heads=4, hidden_dim=16,
        intermediate_dim=64, head_dim=8,
    )  # fmt: skip


FAMILIES = {"llama": (llama, "LlamaBackbone"), "qwen": (qwen, "QwenBackbone"), "gemma": (gemma, "GemmaBackbone")}


def batches() -> list:
    rs = np.random.RandomState(0)
    found = []
    for _ in range(2):
        tokens = rs.randint(0, VOCABULARY, (8, STEPS))
        found.append(({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, np.roll(tokens, -1, 1)))
    return found


def language_model(backbone: Callable) -> Callable:
    def build() -> keras.Model:
        body = backbone()
        return keras.Model(body.input, body.token_embedding(body.output, reverse=True))

    return build


def own_map(family: str, shape=(2, 2), names=("batch", "model")) -> keras.distribution.LayoutMap:
    mesh = keras.distribution.DeviceMesh(shape, names, [f"cpu:{i}" for i in range(4)])
    backbone = getattr(keras_hub.models, FAMILIES[family][1])
    model = next(name for name in names if name not in ("batch", "data"))
    data = next(name for name in names if name != model)
    return backbone.get_layout_map(mesh, model_parallel_dim_name=model, data_parallel_dim_name=data)


# --- Accepted as they are ------------------------------------------------------------------------------


@pytest.mark.sweep(1)
@table(
    "layout maps of backbones", ("family", "stage"),
    itertools.product(FAMILIES, (0, 3)),
    always=each_value(FAMILIES, (0, 3)),
)  # fmt: skip
def test_a_backbone_trains_under_its_own_layout_map_as_on_one_device(family: str, stage: int):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    build = language_model(FAMILIES[family][0])
    reference = parity.train(build, batches(), optimizer=keras.optimizers.Adam, loss=loss, steps=3)
    # The layout map has the mesh.
    strategy = tfshard.ShardedStrategy(layout_map=own_map(family), zero_stage=stage)
    assert strategy.mesh_shape == {"batch": 2, "model": 2}
    run = parity.train(build, batches(), optimizer=keras.optimizers.Adam, loss=loss, steps=3, strategy=strategy)
    assert "model" in parity.shard_axes(run.model)
    parity.assert_same(run, reference, rtol=1e-4, atol=1e-5)


def test_model_parallel_is_accepted_whatever_its_axes_are_called():
    """The axis that shards data becomes our batch axis. The other axes keep their names and order."""
    given = keras.distribution.ModelParallel(
        layout_map=own_map("gemma", names=("tensor", "data")), batch_dim_name="data"
    )
    strategy = tfshard.ShardedStrategy(layout_map=given, zero_stage=3, analyzer=None)
    assert strategy.mesh_shape == {"tensor": 2, "batch": 2}
    assert strategy.layout_map["token_embedding/embeddings"].axes == ("tensor", "batch")
    model = tfshard.as_distributed(language_model(gemma)())
    model.compile("sgd", "mse", strategy=strategy)
    embeddings = model.get_layer("token_embedding").embeddings.value.layout
    assert (embeddings.compute, embeddings.storage) == (("tensor", None), ("tensor", "batch"))


def test_a_layout_map_of_a_mesh_without_a_batch_axis_shards_data_over_its_first_axis_as_in_keras():
    given = own_map("llama", names=("data", "model"))
    assert LayoutMap.mesh_axes_of(given) == {"batch": 2, "model": 2}
    assert LayoutMap.from_any(given)["token_embedding/embeddings"].axes == ("model", "batch")


def test_a_mesh_given_with_a_keras_layout_map_decides():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=1, model=4), own_map("llama"))
    assert strategy.mesh_shape == {"batch": 1, "model": 4}
    with pytest.raises(tfshard.errors.LayoutError, match="Axis 'model' is not in the mesh. Mesh axes: \\('batch',\\)"):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), own_map("llama"))


def test_an_axis_called_batch_that_does_not_shard_the_data_is_refused():
    mesh = keras.distribution.DeviceMesh((2, 2), ("data", "batch"), [f"cpu:{i}" for i in range(4)])
    given = keras.distribution.ModelParallel(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="data")
    with pytest.raises(
        tfshard.errors.LayoutError, match="has another axis of that name. Rename that axis.*batch_dim_name='data'"
    ):
        tfshard.ShardedStrategy(layout_map=given)


# --- A plan for Keras on JAX ---------------------------------------------------------------------------


def test_a_plan_becomes_a_layout_map_with_the_compute_layout_of_each_path():
    model = language_model(gemma)()
    plan = tfshard.plan(model, {"batch": 2, "model": 2}, own_map("gemma"), zero_stage=3)
    sharded = {v.path: v.compute_layout for v in plan.variables if any(v.compute_layout)}
    assert "decoder_block_0/attention/query/kernel" in sharded and len(sharded) < len(plan.variables)
    layout_map = pickle.loads(pickle.dumps(plan.to_keras_layout_map()))
    for variable in plan.variables:
        found = layout_map[variable.path]  # As Keras looks it up: exact, else re.fullmatch.
        assert (found and found.axes) == sharded.get(variable.path), variable.path
    assert layout_map.device_mesh.axis_names == ("batch", "model")
    assert layout_map.device_mesh.devices.tolist() == [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]


def test_paths_are_not_patterns():
    specs = [
        tfshard.layouts.layout_map.VariableSpec(path="dense.1/kernel", shape=(4, 4)),
        tfshard.layouts.layout_map.VariableSpec(path="dense_1/kernel", shape=(4, 4)),
    ]
    plan = tfshard.plan(specs, {"model": 2}, {"dense\\.1/kernel": (None, "model")}, zero_stage=0)
    layout_map = plan.to_keras_layout_map()
    assert layout_map["dense.1/kernel"].axes == (None, "model")
    assert layout_map["dense_1/kernel"] is None


def test_a_plan_without_a_batch_axis_gets_one_of_size_one_so_that_data_is_not_sharded_over_the_model_axis():
    model = language_model(gemma)()
    plan = tfshard.plan(model, {"model": 4}, {"token_embedding/embeddings": ("model", None)}, zero_stage=0)
    distribution = keras.distribution.ModelParallel(layout_map=plan.to_keras_layout_map())
    assert distribution.batch_dim_name == "batch"
    assert distribution.device_mesh.shape == (1, 4)


def test_a_device_mesh_without_the_axis_is_refused():
    plan = tfshard.plan(language_model(gemma)(), {"model": 4}, {"token_embedding/embeddings": ("model", None)})
    mesh = keras.distribution.DeviceMesh((4,), ("data",), [f"cpu:{i}" for i in range(4)])
    with pytest.raises(tfshard.errors.LayoutError, match="over axis 'model', which is not in the DeviceMesh"):
        plan.to_keras_layout_map(mesh)
    with pytest.raises(tfshard.errors.LayoutError, match="must be a keras.distribution.DeviceMesh"):
        plan.to_keras_layout_map({"model": 4})


def test_a_layout_map_is_made_of_the_mesh_as_keras_distributions_is():
    mesh = tfshard.create_mesh(batch=2, model=2)
    devices = keras.distribution.DeviceMesh((2, 2), ("data", "model"), devices=[f"cpu:{i}" for i in range(4)])
    for given in (mesh, devices):
        layout_map = tfshard.LayoutMap(given)
        layout_map[".*up/kernel"] = (None, "model")
        layout_map.row(".*down")
        strategy = tfshard.ShardedStrategy(layout_map=layout_map)
        assert strategy.mesh_shape == {"batch": 2, "model": 2}
        model = tfshard.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(4, name="down")]
        )
        model.compile("sgd", "mse", strategy=strategy)
        assert [v.value.layout.compute for v in model.variables[::2]] == [(None, "model"), ("model", None)]
        with pytest.raises(tfshard.errors.LayoutError, match=r"Axis 'modle' is not in the mesh.*\('batch', 'model'\)"):
            layout_map.column(".*other", axis="modle")
    renamed = tfshard.LayoutMap(devices)
    renamed["up/kernel"] = ("data", "model")
    assert renamed["up/kernel"].axes == ("batch", "model")  # The axis that shards the data, by its name here.
    with pytest.raises(tfshard.errors.LayoutError, match="Received: 3"):
        tfshard.LayoutMap(3)
