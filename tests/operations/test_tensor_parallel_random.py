"""Under tensor parallelism, initial values match one device, and dropout masks are independent or equal as needed."""

import functools
import itertools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import parity
import sweeps
import tfshard
from tfshard.devices import transfer

BATCH, STEPS, WIDTH, HEADS = 8, 16, 16, 4
RATE = 0.3


def megatron() -> tfshard.LayoutMap:
    layout_map = tfshard.LayoutMap()
    layout_map["block/embedding/embeddings"] = ("model", None)
    layout_map.column("block/attention/(query|key|value)")
    layout_map.row("block/attention/attention_output")
    layout_map.column("block/(up|expand)")
    layout_map.row("block/down")
    layout_map.replicated(".*", optional=True)
    return layout_map


def strategy_of(mesh: dict, stage: int = 0) -> tfshard.ShardedStrategy:
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), megatron(), zero_stage=stage)
    assert strategy.mesh.size == 4
    return strategy


class Block(keras.Model):
    """Embedding, attention, a pair of Dense layers, an EinsumDense. Built by its first call, or by `build`."""

    def __init__(self, dropout: float = 0.0):
        super().__init__(name="block")
        self.embedding = keras.layers.Embedding(32, WIDTH, name="embedding")
        self.attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=dropout, name="attention")
        # DTensor expands operations in the order of their names. These names follow "attention" and "hidden", which
        # both axes shard: in this order DTensor would reuse their seeds.
        self.residual_attention = keras.layers.Dropout(dropout, name="residual_attention")
        self.up = keras.layers.Dense(4 * WIDTH, bias_initializer="normal", name="up")
        self.hidden = keras.layers.Dropout(dropout, name="hidden")
        self.down = keras.layers.Dense(WIDTH, kernel_initializer="he_normal", name="down")
        self.residual_down = keras.layers.Dropout(dropout, name="residual_down")
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.expand = keras.layers.EinsumDense(
            "abc,cde->abde", (None, HEADS, 6), bias_axes="de", kernel_initializer="orthogonal", name="expand"
        )

    def build(self, input_shape):
        self.call(keras.KerasTensor(input_shape, "int32"))
        self.built = True

    def call(self, tokens, training=None):
        x = self.embedding(tokens) + 1.0
        x = x + self.residual_attention(self.attention(x, x, training=training), training=training)
        x = x + self.residual_down(self.down(self.hidden(self.up(x), training=training)), training=training)
        return self.expand(self.norm(x))


def batch() -> tuple[np.ndarray, np.ndarray]:
    rs = np.random.RandomState(0)
    return rs.randint(0, 32, (BATCH, STEPS)), rs.normal(size=(BATCH, STEPS, HEADS, 6)).astype("float32")


# --- Initial values ------------------------------------------------------------------------------------


def weights_by_path(model: keras.Model) -> dict[str, np.ndarray]:
    return {v.path: np.array(keras.ops.convert_to_numpy(v)) for v in model.variables}


@functools.cache
def unsharded(seed: int) -> dict[str, np.ndarray]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = Block(RATE)
    model.build((None, STEPS))
    return weights_by_path(model)


def under_scope(strategy: tfshard.ShardedStrategy) -> keras.Model:
    with strategy.scope():
        model = Block(RATE)
        model.build((None, STEPS))
    return model


def compiled_after_build(strategy: tfshard.ShardedStrategy) -> keras.Model:
    model = tfshard.as_distributed(Block(RATE))
    model.build((None, STEPS))
    model.compile("sgd", "mse", strategy=strategy)
    return model


def built_by_the_first_step(strategy: tfshard.ShardedStrategy) -> keras.Model:
    model = tfshard.as_distributed(Block(RATE))
    model.compile(keras.optimizers.SGD(0.0), "mse", strategy=strategy)
    assert not model.built
    model.fit(*batch(), batch_size=BATCH, verbose=0)
    return model


MESHES = {"model": {"model": 4}, "batch x model": {"batch": 2, "model": 2}}
INITIAL = list(itertools.product((under_scope, compiled_after_build, built_by_the_first_step), MESHES))


@pytest.mark.sweep(2)
@sweeps.table("initial values", ("make", "axes"), INITIAL, always=[INITIAL[1], INITIAL[2], INITIAL[5]], sample=1)
def test_initial_values_are_those_of_the_unsharded_model(make: Callable, axes: str):
    mesh, expected = MESHES[axes], unsharded(seed=7)
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    model = make(strategy_of(mesh, stage=3))
    assert "model" in parity.shard_axes(model)
    sharded = {v.path for v in model.trainable_variables if "model" in v.value.layout.compute}
    for layer in ("embedding", "query", "attention_output", "up", "down", "expand"):
        assert any(f"{layer}/" in path for path in sharded), layer
    actual = weights_by_path(model)
    for path, value in expected.items():
        # A step that changes no weight still advances the seeds.
        if "seed_generator_state" not in path or make is not built_by_the_first_step:
            np.testing.assert_array_equal(actual[path], value, err_msg=path)


# --- Dropout -------------------------------------------------------------------------------------------


def dropout_masks(model: keras.Model, strategy: tfshard.ShardedStrategy) -> dict[str, tuple[tuple, list[np.ndarray]]]:
    """Return the dropout masks of one training step, by layer: the layout, and the local shard of each device."""
    kept = {}

    def recording(layer):
        call = layer.call

        def recorded(inputs, training=False):
            outputs = call(inputs, training=training)
            # A zero before dropout would count as dropped.
            kept[layer.name] = tf.cast(outputs / inputs, tf.float32)
            return outputs

        layer.call = recorded

    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            recording(layer)

    @tf.function
    def step(tokens):
        kept.clear()
        model(tokens, training=True)
        return list(kept.values())

    with strategy.extended.results_stay_sharded():
        masks = strategy.run(step, args=(batch()[0],))
    found = {}
    for name, mask in zip(kept, masks, strict=True):
        values = [np.asarray(piece) for piece in dtensor.unpack(mask)]
        assert all(np.isfinite(value).all() for value in values), name
        found[name] = tuple(dtensor.fetch_layout(mask).sharding_specs), [value > 0.5 for value in values]
    return found


def assert_independent(one: np.ndarray, other: np.ndarray) -> None:
    """Assert that two masks agree as often as by chance, within five standard deviations."""
    agree, expected = np.mean(one == other), RATE**2 + (1 - RATE) ** 2
    assert abs(agree - expected) < 5 * np.sqrt(expected * (1 - expected) / one.size), agree


def assert_keep_rate(pieces: list[np.ndarray]) -> None:
    size = sum(piece.size for piece in pieces)
    rate = np.mean([piece.mean() for piece in pieces])
    assert abs(rate - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / size), rate


def block_masks(mesh: dict):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    strategy = strategy_of(mesh)
    with strategy.scope():
        model = Block(RATE)
        model.build((None, STEPS))
    masks = dropout_masks(model, strategy)
    assert masks.keys() == {"dropout", "residual_attention", "hidden", "residual_down"}  # "dropout": in attention.
    return strategy, masks


def test_dropout_on_a_model_axis_is_independent_on_shards_and_equal_on_replicas():
    _, masks = block_masks({"model": 4})
    unsharded = dtensor.UNSHARDED
    # Attention scores (batch, heads, queries, keys) have sharded heads.
    assert masks["dropout"][0] == (unsharded, "model", unsharded, unsharded)
    assert masks["hidden"][0] == (unsharded, unsharded, "model")
    for name in ("dropout", "hidden"):
        _, pieces = masks[name]
        for one, other in itertools.combinations(pieces, 2):
            assert_independent(one, other)
        assert_keep_rate(pieces)
    for name in ("residual_attention", "residual_down"):
        layout, pieces = masks[name]
        assert layout == (unsharded,) * 3
        for piece in pieces[1:]:
            np.testing.assert_array_equal(piece, pieces[0], err_msg=name)
        assert_keep_rate(pieces[:1])
    assert_independent(masks["residual_attention"][1][0], masks["residual_down"][1][0])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "mesh", [{"batch": 2, "model": 2}, {"model": 2, "batch": 2}], ids=["batch, model", "model, batch"]
)
def test_dropout_on_a_mesh_of_two_axes_is_independent_on_shards_and_equal_on_replicas(mesh: dict):
    strategy, masks = block_masks(mesh)
    locations = strategy.mesh.local_device_locations()
    unsharded = dtensor.UNSHARDED
    assert masks["dropout"][0] == ("batch", "model", unsharded, unsharded)
    assert masks["hidden"][0] == ("batch", unsharded, "model")
    for name in ("residual_attention", "residual_down"):
        assert masks[name][0] == ("batch", unsharded, unsharded), name
    for name, (layout, pieces) in masks.items():
        assert_keep_rate(pieces)
        for (here, one), (there, other) in itertools.combinations(zip(locations, pieces, strict=True), 2):
            if all(here[axis] == there[axis] for axis in layout if axis != unsharded):
                np.testing.assert_array_equal(one, other, err_msg=f"{name} on {here} and {there}")
            else:
                assert_independent(one, other)


@pytest.mark.slow
@pytest.mark.on_cpu("equal bits: GPUs add in any order")
@pytest.mark.parametrize("stage", [0, 3])
def test_devices_agree_after_training_with_dropout_on_a_mesh_of_two_axes(stage: int):
    keras.utils.set_random_seed(3)
    strategy = strategy_of({"batch": 2, "model": 2}, stage)
    model = tfshard.as_distributed(Block(RATE))
    model.compile("adam", "mse", strategy=strategy)
    losses = [float(model.train_on_batch(*batch())) for _ in range(3)]
    assert np.isfinite(losses).all() and "model" in parity.shard_axes(model)
    strategy.check_consistency(model)
    # The model was built by its first step. Its slots are stored like its parameters.
    slots = {slot.path: slot.value.layout.storage for slot in model.optimizer.variables}
    momentum = next(storage for path, storage in slots.items() if path.endswith("block_up_kernel_momentum"))
    assert "model" in momentum


def test_dtensor_by_itself_gives_replicas_different_masks():
    """The reason for operations/draws.py. If this test fails, TensorFlow has fixed it."""
    strategy = strategy_of({"batch": 2, "model": 2})
    ones = np.ones((BATCH, STEPS, WIDTH), "float32")
    both, batch_only = ("batch", None, "model"), ("batch", None, None)

    @tf.function
    def drop_both(hidden, residual, seed):
        first = tf.nn.experimental.stateless_dropout(hidden, RATE, seed=seed)
        second = tf.nn.experimental.stateless_dropout(residual, RATE, seed=seed + 1)
        return transfer.relayout(first, both, strategy.mesh), transfer.relayout(second, batch_only, strategy.mesh)

    _, dropped = drop_both(
        transfer.host_to_mesh(ones, both, strategy.mesh),
        transfer.host_to_mesh(ones, batch_only, strategy.mesh),
        transfer.host_to_mesh(np.array([1, 2], "int32"), (None,), strategy.mesh),
    )
    assert dtensor.fetch_layout(dropped).sharding_specs[1:] == [dtensor.UNSHARDED] * 2
    pieces = [np.asarray(piece) for piece in dtensor.unpack(dropped)]
    assert not np.array_equal(pieces[0], pieces[1])


@pytest.mark.slow
def test_the_same_seed_gives_the_same_masks_and_the_next_step_others():
    def run(seed: int) -> list[list[float]]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(seed)
        model = tfshard.as_distributed(Block(RATE))
        model.compile(keras.optimizers.SGD(0.0), "mse", strategy=strategy_of({"batch": 2, "model": 2}))
        return [float(model.train_on_batch(*batch())) for _ in range(3)]

    first = run(3)
    assert run(3) == first
    # The weights do not change, so only the masks change the losses.
    assert len(set(first)) == 3
    assert run(4) != first
