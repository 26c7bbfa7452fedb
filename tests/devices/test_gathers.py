"""Gathers over one axis or several axes of a mesh give full values, for any sharded dims."""

import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import small_models
import tfshard
from tfshard import collectives
from tfshard.devices import gathers, replicas, startup, transfer
from tfshard.errors import InitializationError
from tfshard.layouts import boxes
from tfshard.layouts.axes import axis_sizes

SHAPES = [(8, 6), (4, 8, 6), (1, 8, 6), (8, 2, 6), (8, 6, 1)]


def layouts(shape: tuple[int, ...]) -> list[tuple[str | None, ...]]:
    names = ["batch", "model", *[None] * (len(shape) - 2)]
    found = sorted(set(itertools.permutations(names)), key=str)
    return [axes for axes in found if all(axis is None or size > 1 for axis, size in zip(axes, shape, strict=True))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_two_axes_shard_is_whole_after_one_gather(shape):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), zero_stage=0)
    value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    for axes in layouts(shape):
        sharded = transfer.host_to_mesh(value, axes, strategy.mesh)
        assert transfer.axes_of(dtensor.fetch_layout(sharded)) == axes

        @tf.function
        def gathered(tensor):
            return transfer.relayout(tensor, (None,) * tensor.shape.rank, strategy.mesh)

        for piece in pieces(gathered(sharded)):
            np.testing.assert_array_equal(piece, value, err_msg=str(axes))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 2)], ids=str)
@pytest.mark.parametrize("over", ["batch", "model"])
def test_an_axis_is_gathered_by_one_collective_beside_another(over, shape, dtype):
    """The two axes may shard any dims. The other axis stays sharded, and nothing is added up."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), zero_stage=0)
    mesh = strategy.mesh
    value = tf.cast(np.arange(np.prod(shape)).reshape(shape), dtype).numpy()
    alone = [tuple(over if dim == at else None for dim in range(len(shape))) for at in range(len(shape))]
    for axes in layouts(shape) + [axes for axes in alone if shape[axes.index(over)] > 1]:
        target = tuple(None if axis == over else axis for axis in axes)
        sharded = transfer.host_to_mesh(value, axes, mesh)
        traced = tf.function(lambda tensor, axes=axes, target=target: replicas.gathered(tensor, axes, target, mesh))
        types = [each.type for each in traced.get_concrete_function(sharded).graph.get_operations()]
        assert types.count(replicas.GATHER) == 1, axes
        for result in (traced(sharded), replicas.gathered(sharded, axes, target, mesh)):
            assert transfer.axes_of(dtensor.fetch_layout(result)) == target
            np.testing.assert_array_equal(transfer.to_host(result), value, err_msg=str(axes))
            for location, piece in zip(mesh.local_device_locations(), pieces(result), strict=True):
                box = boxes.shard_box(shape, target, axis_sizes(mesh), location)
                np.testing.assert_array_equal(piece, value[box.slices], err_msg=str(axes))


def test_bfloat16_is_gathered_in_two_bytes_on_a_mesh_of_one_axis():
    """DTensor would all-reduce float32, with zeros for the other shards."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    value = tf.cast(np.arange(32).reshape(8, 4), tf.bfloat16).numpy()
    sharded = transfer.host_to_mesh(value, ("batch", None), strategy.mesh)
    traced = tf.function(lambda tensor: replicas.gathered(tensor, ("batch", None), (None, None), strategy.mesh))
    types = [each.type for each in traced.get_concrete_function(sharded).graph.get_operations()]
    assert types.count(replicas.GATHER) == 1
    for piece in pieces(traced(sharded)):
        np.testing.assert_array_equal(piece, value)


def pieces(tensor) -> list[np.ndarray]:
    """Return the local shard of each device."""
    found = [piece.numpy() for piece in dtensor.unpack(tensor)]
    assert len(found) == 4
    return found


def test_a_mesh_of_one_axis_gathers_by_gathers_and_others_by_reductions():
    for sizes, switch in (({"batch": 4}, "1"), ({"batch": 2, "model": 2}, None), ({"batch": 4, "model": 1}, "1")):
        mesh = tfshard.create_mesh(**sizes)
        tfshard.ShardedStrategy(mesh, zero_stage=0)
        assert os.environ.get(gathers.SWITCH) == switch, sizes


def test_steps_of_strategies_on_both_kinds_of_mesh_take_turns():
    value = np.arange(48, dtype="float32").reshape(8, 6)
    strategies = [
        tfshard.ShardedStrategy(tfshard.create_mesh(**sizes), zero_stage=0)
        for sizes in ({"batch": 4}, {"batch": 2, "model": 2})
    ]
    for strategy in strategies * 2:
        axes = ("batch", None) if strategy.mesh.dim_size("batch") == 4 else ("model", "batch")
        sharded = transfer.host_to_mesh(value, axes, strategy.mesh)
        for function in (lambda t: tf.expand_dims(t, 0), lambda t: tf.transpose(t)[None] * 2.0):
            ours = strategy.run(tf.function(function), args=(sharded,))
            np.testing.assert_array_equal(transfer.to_host(ours), function(tf.constant(value)))


def test_collectives_gather_by_gathers_and_leave_the_switch_as_it_was(monkeypatch):
    over = tfshard.create_mesh(**{collectives.AXIS: 4})
    rows = np.arange(12, dtype="int32").reshape(4, 3)
    seen = []

    def noted(*args):
        seen.append(os.environ.get(gathers.SWITCH))
        return relayout(*args)

    relayout = transfer.relayout
    monkeypatch.setattr(transfer, "relayout", noted)
    for sizes, switch in (({"batch": 2, "model": 2}, None), ({"batch": 4}, "1")):
        gathers.choose(tfshard.create_mesh(**sizes))
        assert os.environ.get(gathers.SWITCH) == switch
        for piece in pieces(collectives.gather([tf.constant(row[np.newaxis]) for row in rows], over)):
            np.testing.assert_array_equal(piece, rows)
        assert os.environ.get(gathers.SWITCH) == switch
    assert seen == ["1", "1"]


@pytest.mark.parametrize("sizes", [{"batch": 4}, {"batch": 2, "model": 2}], ids=str)
def test_an_axis_moves_from_one_dim_to_another(sizes):
    """DTensor's all-to-all gives wrong values between two dims of which neither is the first."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**sizes), zero_stage=0)
    axis, count = list(sizes.items())[-1]
    value = np.arange(4 * 4 * 8 * 12, dtype="float32").reshape(4, 4, 8, 12)
    for before, after in itertools.permutations(range(4), 2):
        first, second = (tuple(axis if dim == at else None for dim in range(4)) for at in (before, after))
        sharded = transfer.host_to_mesh(value, first, strategy.mesh)

        @tf.function
        def moved(tensor, second=second):
            return transfer.relayout(tensor, second, strategy.mesh)

        result = moved(sharded)
        assert transfer.axes_of(dtensor.fetch_layout(result)) == second, "premise"
        np.testing.assert_array_equal(transfer.to_host(result), value, err_msg=f"{before} to {after}")


def test_the_switch_of_the_all_to_all_must_be_off(monkeypatch):
    monkeypatch.setenv("DTENSOR_USE_ALL_TO_ALL_RELAYOUT", "1")
    with pytest.raises(InitializationError, match="must be 0 or not set"):
        startup._check_switches()


def test_attention_over_positions_that_a_model_axis_shards_matches_one_device():
    """A column kernel and a reshape shard the positions. Layouts of the backward pass then reach the scores."""
    x, y = np.random.RandomState(0).normal(size=(2, 8, 6)).astype("float32")

    plain, model = small_models.reshaped(), tfshard.as_distributed(small_models.reshaped())
    plain.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), "auto", zero_stage=3)
    model.compile(keras.optimizers.SGD(0.1), "mse", strategy=strategy)
    for _ in range(3):
        np.testing.assert_allclose(model.train_on_batch(x, y), plain.train_on_batch(x, y), rtol=1e-6)
