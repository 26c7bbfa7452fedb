"""Models created under the scope are sharded: the host holds one variable at a time, and values match one device."""

import contextlib
import weakref

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard import _private
from tfshard.devices import host_memory
from tfshard.operations import layer_patch
from tfshard.storage.initial_values import InitialValue
from tfshard.storage.storage import Storage
from tfshard.training import attached_model

WAYS = {"batch4": ({"batch": 4}, None), "auto": ({"batch": 2, "model": 2}, "auto")}
MIB = 1 << 20


def strategy(way: str, **options) -> tfshard.ShardedStrategy:
    axes, layout_map = WAYS[way]
    return tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map, **options)


def mlp() -> keras.Model:
    """Return variables of 2, 3, 1.5, 1.5 and 1.5 MiB, and small ones."""
    keras.utils.set_random_seed(0)
    units = (1024, 768, 512, 768, 512)
    layers = [keras.layers.Dense(number, activation="relu", name=f"dense_{i}") for i, number in enumerate(units)]
    return keras.Sequential([keras.Input((512,)), *layers])


def gpt2() -> keras.Model:
    """Return a GPT-2 with a table of 2 MiB and small variables."""
    keras.utils.set_random_seed(0)
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=4096, num_layers=2, num_heads=4, hidden_dim=128, intermediate_dim=512, max_sequence_length=16,
        dropout=0.0,
    )  # fmt: skip


BUILDERS = {"mlp": mlp, "gpt2": gpt2}


def largest_two(model: keras.Model) -> int:
    return sum(sorted(4 * int(np.prod(v.shape)) for v in model.variables)[-2:])


@contextlib.contextmanager
def watched():
    """Record the bytes of full values on the host: values that were drawn and are still alive, and waiting values.

    Yields:
        The maximum of both, `"drawn"` and `"waiting"`, and the number of drawn values, `"draws"`.
    """
    found = {"drawn": 0, "waiting": 0, "draws": 0}
    live = {"drawn": 0}
    storages: weakref.WeakSet[Storage] = weakref.WeakSet()
    draw, fill = InitialValue.draw, Storage.fill

    def drawing(self):
        value = draw(self)
        size = value.nbytes if all(value.strides) else 0  # A stride of 0 means one number for all elements.
        found["draws"] += 1
        live["drawn"] += size
        found["drawn"] = max(found["drawn"], live["drawn"])
        weakref.finalize(value, lambda: live.update(drawn=live["drawn"] - size))
        return value

    def filling(self, member, value):
        fill(self, member, value)
        storages.add(self)
        waiting = [value for each in storages for value in each._host.values() if isinstance(value, np.ndarray)]
        found["waiting"] = max(found["waiting"], sum(value.nbytes for value in waiting))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InitialValue, "draw", drawing)
        patch.setattr(Storage, "fill", filling)
        yield found


@pytest.mark.sweep(4)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BUILDERS)
def test_values_are_drawn_once_in_their_place_and_are_those_of_one_device(name, way, stage):
    expected = [np.array(v) for v in BUILDERS[name]().variables]
    chosen = strategy(way, zero_stage=stage)
    with watched() as found, chosen.scope():
        model = BUILDERS[name]()
        if way == "auto":
            assert found["draws"] == 0, "nothing is there before the layouts are known"
    total = sum(4 * int(np.prod(v.shape)) for v in model.variables)
    assert total > 3 * largest_two(model) / 2, "else one at a time is no promise"
    assert found["draws"] == len(model.variables)
    assert 0 < found["drawn"] <= largest_two(model)
    assert found["waiting"] <= largest_two(model)
    for ours, theirs in zip(model.variables, expected, strict=True):
        assert ours.value.mesh == chosen.mesh
        assert np.array(ours).tobytes() == theirs.tobytes()
    if way == "auto":
        assert any("model" in v.value.layout.storage for v in model.trainable_variables)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BUILDERS)
def test_a_file_of_weights_goes_to_the_devices_one_variable_after_the_other(name, way, tmp_path):
    plain = BUILDERS[name]()
    plain.set_weights([np.random.RandomState(1).normal(size=v.shape).astype("float32") for v in plain.variables])
    plain.save_weights(tmp_path / "file.weights.h5")
    with watched() as found, strategy(way).scope():
        model = BUILDERS[name]()
        model.load_weights(tmp_path / "file.weights.h5")
        groups = {v.value.storage for v in model.variables if v.value.storage.is_group}
    # A group is packed once all its members are there.
    members = [sum(4 * int(np.prod(v.shape)) for v in group.members.values()) for group in groups]
    assert found["waiting"] <= largest_two(model) + max(members)
    for ours, theirs in zip(model.variables, plain.variables, strict=True):
        assert not ours.value.storage.waits
        assert np.array(ours).tobytes() == np.array(theirs).tobytes()


def test_a_preset_is_born_sharded(tmp_path):
    plain = gpt2()
    plain.save_to_preset(str(tmp_path))
    with watched() as found, strategy("auto").scope():
        model = keras_hub.models.GPT2Backbone.from_preset(str(tmp_path))
    assert found["waiting"] <= 2 * largest_two(model)
    for ours, theirs in zip(model.variables, plain.variables, strict=True):
        assert np.array(ours).tobytes() == np.array(theirs).tobytes()
    assert any("model" in v.value.layout.storage for v in model.trainable_variables)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_saved_model_is_born_sharded_with_its_slots(way, tmp_path):
    plain = mlp()
    plain.compile("adam", "mse")
    plain.train_on_batch(np.ones((8, 512)), np.ones((8, 512)))
    plain.save(tmp_path / "file.keras")
    with watched() as found, strategy(way).scope():
        model = keras.models.load_model(tmp_path / "file.keras")
    assert found["waiting"] <= largest_two(model)
    pairs = [*zip(model.variables, plain.variables, strict=True)]
    pairs += zip(model.optimizer.variables, plain.optimizer.variables, strict=True)
    for ours, theirs in pairs:
        assert isinstance(ours.value, tfshard.storage.ShardedVariable)
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()


def test_slots_are_born_without_their_zeros():
    chosen = strategy("batch4")
    with watched() as found, chosen.scope():
        model = mlp()
        drawn = found["drawn"]
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    assert len(model.optimizer.variables) == 2 + 2 * len(model.trainable_variables)
    assert found["drawn"] == drawn
    for slot in model.optimizer.variables[2:]:
        assert not slot.value.storage.waits
        assert not np.any(np.array(slot))


def test_a_large_variable_takes_an_array_as_it_is():
    with strategy("batch4").scope():
        model = mlp()
    kernel = model.layers[0].kernel
    assert {patch.change for patch in layer_patch.patches_of(model)} == {layer_patch.ASSIGNED_ARRAY}
    assert not layer_patch.patches_on(model.layers[0].bias)
    value = np.random.RandomState(0).normal(size=kernel.shape).astype("float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(kernel), "_convert_to_tensor", lambda *_, **__: pytest.fail("Keras makes a tensor of it"))
        returned = kernel.assign(value)
    assert np.array(returned).tobytes() == np.array(kernel).tobytes() == value.tobytes()
    value[:] = 0
    assert np.array(kernel).any(), "the array stays the user's"
    kernel.assign(np.ones(kernel.shape))
    assert (np.array(kernel) == 1).all() and kernel.dtype == "float32"
    with pytest.raises(ValueError, match="shape"):
        kernel.assign(np.ones((3, 3), np.float32))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_piece_is_gone_before_the_one_that_takes_its_place_is_made(monkeypatch, stage):
    with strategy("batch4", zero_stage=stage).scope():
        model = mlp()
    kernel = model.layers[0].kernel
    handles = [handle for _, handle in kernel.value.storage.handles]
    make, left = host_memory.tensor_of, []

    def making(value):
        with tf.device(handles[len(left)].device):
            left.append(tf.raw_ops.ReadVariableOp(resource=handles[len(left)], dtype=tf.float32).shape.num_elements())
        return make(value)

    monkeypatch.setattr(host_memory, "tensor_of", making)
    kernel.assign(np.ones(kernel.shape, np.float32))
    assert left == [0, 0, 0, 0]
    assert (np.array(kernel) == 1).all()


def test_offloaded_slots_are_refused_or_do_nothing_and_say_so():
    with pytest.warns(UserWarning, match="offload='slots' has no effect here") as warned:
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), offload="slots")
    assert len(warned) == 1 and warned[0].filename == __file__
    with pytest.raises(tfshard.errors.StrategyError, match="offload must be None or 'slots'"):
        tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), offload="parameters")


@pytest.mark.parametrize(
    ("kind", "axes", "stage", "message"),
    [
        ("TPU", "batch=2", 3, "needs GPUs.*Devices of the mesh: TPU"),
        ("GPU", "batch=2", 0, "Received: zero_stage=0"),
        ("GPU", "model=2", 3, "Use zero_stage=1 or more on a mesh whose batch axis has several"),
    ],
)
def test_slots_that_cannot_go_to_the_host_are_refused_before_any_device_is_touched(kind, axes, stage, message):
    device = f"/job:localhost/replica:0/task:0/device:{kind}:"
    mesh = dtensor.Mesh.from_string(f"|{axes}|0,1|0,1|{device}0,{device}1")
    assert mesh.device_type().upper() == kind
    with pytest.raises(tfshard.errors.StrategyError, match=message):
        tfshard.ShardedStrategy(mesh, zero_stage=stage, offload="slots")


def test_a_value_that_is_set_while_it_waits_is_not_the_users_array():
    with strategy("auto").scope():
        model = mlp()
        bias, value = model.layers[1].bias, np.full((768,), 0.25, np.float32)
        bias.assign(value)
        value[:] = 0
    assert (np.array(bias) == 0.25).all()


def test_models_with_their_own_equality_are_told_apart():
    """The hash of these models fails while Keras's constructor runs."""

    class Tagged(keras.Model):
        def __init__(self, tag):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.tag = tag

        def call(self, x):
            return self.dense(x)

        def __hash__(self):
            return hash(self.tag)

        def __eq__(self, other):
            return isinstance(other, Tagged)

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    x = np.ones((8, 4), "float32")
    with strategy.scope():
        models = [Tagged("one"), Tagged("one")]
        for model in models:
            model(x)
    found = _private.models_under(strategy)
    assert len(found) == 2
    assert {id(model) for model in found} == {id(model) for model in models}
    assert len({id(attached_model.attached(model, strategy)) for model in models}) == 2
