"""Slices and slice updates in steps and eager steps. DTensor alone expands them to wrong numbers or not at all."""

import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from sweeps import SWEEP
from tfshard.devices import transfer

SHAPE = (4, 2, 6, 4)
SLICES = {
    "t[1]": lambda t: t[1],
    "t[1, ...]": lambda t: t[1, ...],
    "t[:, 1]": lambda t: t[:, 1],
    "t[:, 1, ...]": lambda t: t[:, 1, ...],
    "t[:, :, 2]": lambda t: t[:, :, 2],
    "t[:, 1, 2]": lambda t: t[:, 1, 2],
    "t[:, -1, 2:]": lambda t: t[:, -1, 2:],
    "t[..., 1]": lambda t: t[..., 1],
    "t[..., 1, :]": lambda t: t[..., 1, :],
    "t[:, 0, ..., 1]": lambda t: t[:, 0, ..., 1],
    "t[:, :, 1:5:2]": lambda t: t[:, :, 1:5:2],
    "t[:, None]": lambda t: t[:, None],
    "t[None]": lambda t: t[None],
    "t[:, 1, None]": lambda t: t[:, 1, None],
    "t[..., None]": lambda t: t[..., None],
    "t[:, None, 1, ..., None]": lambda t: t[:, None, 1, ..., None],
    "t[:, 1, :, :]": lambda t: t[:, 1, :, :],
    "t[::-1]": lambda t: t[::-1],
    "t[:, 0, ::-1]": lambda t: t[:, 0, ::-1],
    "t[..., -2::-2]": lambda t: t[..., -2::-2],
    "t[2:0:-1, None, ..., ::-1]": lambda t: t[2:0:-1, None, ..., ::-1],
}
# The slices that an ordinary run also takes in eager steps.
EAGER = ("t[1]", "t[:, -1, 2:]", "t[..., 1]", "t[:, None]", "t[:, None, 1, ..., None]", "t[2:0:-1, None, ..., ::-1]")
LAYOUTS = [(None, None, None, None), ("batch", None, None, None), ("batch", None, None, "model"),
           ("batch", None, "model", None), (None, None, "model", None), ("model", None, None, "batch")]  # fmt: skip


def strategy() -> tfshard.ShardedStrategy:
    chosen = tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), zero_stage=0)
    assert chosen.mesh.size == 4
    return chosen


def run(chosen: tfshard.ShardedStrategy, step: object, *args: object) -> list[np.ndarray]:
    with chosen.extended.results_stay_sharded():
        return [transfer.to_host(result) for result in tf.nest.flatten(chosen.run(step, args=args))]


def value(shape: tuple = SHAPE, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).normal(size=shape).astype("float32")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SLICES)
def test_a_slice_and_its_gradient_are_those_of_one_device(name: str):
    function, chosen = SLICES[name], strategy()
    weight = value(function(np.zeros(SHAPE)).shape, seed=1)

    def slice_and_gradient(t):
        with tf.GradientTape() as tape:
            tape.watch(t)
            sliced = function(t)
            loss = tf.reduce_sum(tf.square(sliced) * weight)
        return sliced, tape.gradient(loss, t)

    expected = slice_and_gradient(tf.constant(value()))
    for layout in LAYOUTS:
        sharded = transfer.host_to_mesh(value(), layout, chosen.mesh)
        for step in [tf.function(slice_and_gradient)] + [slice_and_gradient] * (SWEEP or name in EAGER):
            for ours, theirs in zip(run(chosen, step, sharded), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=f"{name} of {layout}, {step}")


def test_a_slice_at_an_index_that_is_a_tensor_is_that_of_one_device():
    chosen = strategy()
    eager = lambda t, i: (t[:, i], t[i, ..., i][:, :2])  # noqa: E731
    compiled = tf.function(eager)
    layouts = [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3]]
    for index, layout, step in itertools.product((0, 1), layouts, (compiled, eager)):
        sharded = transfer.host_to_mesh(value(), layout, chosen.mesh)
        first, second = run(chosen, step, sharded, np.int32(index))
        np.testing.assert_array_equal(first, value()[:, index])
        np.testing.assert_array_equal(second, value()[index, ..., index][:, :2])


RANGES = {
    "t[i, ..., :2]": lambda t, i: t[i, ..., :2],
    "t[:, i, 1:3, :]": lambda t, i: t[:, i, 1:3, :],
    "t[1:, i, None, 4:1:-2]": lambda t, i: t[1:, i, None, 4:1:-2],
    "t[:2, ..., None, 1:, i]": lambda t, i: t[:2, ..., None, 1:, i],
}
# Ranges of a known size that start at a tensor, as in a random crop.
CROPS = {
    "t[:, :, i : i + 2]": lambda t, i: t[:, :, i : i + 2],
    "t[i : 1 + i, :, 1:3]": lambda t, i: t[i : 1 + i, :, 1:3],
    "t[..., i : i + 3]": lambda t, i: t[..., i : i + 3],
    "t[:, i, i : i + 3, None, ::2]": lambda t, i: t[:, i, i : i + 3, None, ::2],
    "t[:, 0, i : i + 2, i]": lambda t, i: t[:, 0, i : i + 2, i],
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", [*RANGES, *CROPS])
def test_a_range_at_or_next_to_an_index_that_is_a_tensor_is_that_of_one_device(name):
    function, chosen = (RANGES | CROPS)[name], strategy()

    def slice_and_gradient(t, i):
        with tf.GradientTape() as tape:
            tape.watch(t)
            sliced = function(t, i)
            loss = tf.reduce_sum(tf.square(sliced))
        return sliced, tape.gradient(loss, t)

    for index, layout in itertools.product((0, 1 if name in CROPS else -1), LAYOUTS):
        sharded = transfer.host_to_mesh(value(), layout, chosen.mesh)
        expected = slice_and_gradient(tf.constant(value()), index)
        for ours, theirs in zip(
            run(chosen, tf.function(slice_and_gradient), sharded, np.int32(index)), expected, strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=f"{name} of {layout}")


def test_a_range_that_ends_at_a_shape_has_a_known_size():
    chosen = strategy()
    sharded = transfer.host_to_mesh(value(), LAYOUTS[1], chosen.mesh)
    (sliced,) = run(chosen, tf.function(lambda t: t[:, : tf.shape(t)[3] // 2]), sharded)
    np.testing.assert_array_equal(sliced, value()[:, :2])


@pytest.mark.sweep(9)
@pytest.mark.parametrize("start", [0, 1, 4, 5, 9, -3])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_slice_update_is_that_of_one_device_also_where_it_would_not_fit(start: int, count: int):
    chosen = strategy()
    updates = value((4, 2, count, 4), seed=1)
    step = tf.function(lambda t, u, i: keras.ops.slice_update(t, [0, 0, i, 0], u))
    expected = keras.ops.slice_update(tf.constant(value()), [0, 0, start, 0], tf.constant(updates))
    for layout in LAYOUTS[:3]:
        arguments = (transfer.host_to_mesh(v, layout, chosen.mesh) for v in (value(), updates))
        (updated,) = run(chosen, step, *arguments, np.int32(start))
        np.testing.assert_array_equal(updated, expected)


def test_a_slice_update_in_an_eager_step_is_that_of_one_device():
    chosen = strategy()
    updates = value((4, 2, 2, 4), seed=1)
    expected = keras.ops.slice_update(tf.constant(value()), [0, 0, 3, 0], tf.constant(updates))
    arguments = (transfer.host_to_mesh(v, LAYOUTS[2], chosen.mesh) for v in (value(), updates))
    (updated,) = run(chosen, lambda t, u, i: keras.ops.slice_update(t, [0, 0, i, 0], u), *arguments, np.int32(3))
    np.testing.assert_array_equal(updated, expected)


def test_other_threads_and_what_comes_after_an_eager_step_are_left_alone():
    chosen, seen = strategy(), []
    before = tf.raw_ops.StridedSlice, tf.config.functions_run_eagerly()

    def step(t):
        thread = threading.Thread(target=lambda: seen.append(tf.constant(value())[:, 1].numpy()))
        thread.start()
        thread.join()
        assert tf.config.functions_run_eagerly()
        # A function that was traced before would contain no rewritten operations.
        return traced(t)

    traced = tf.function(lambda t: t[:, 1])
    np.testing.assert_array_equal(traced(tf.constant(value())), value()[:, 1])
    (sliced,) = run(chosen, step, transfer.host_to_mesh(value(), LAYOUTS[3], chosen.mesh))
    np.testing.assert_array_equal(sliced, value()[:, 1])
    np.testing.assert_array_equal(seen, [value()[:, 1]])
    assert (tf.raw_ops.StridedSlice, tf.config.functions_run_eagerly()) == before
    with pytest.raises(ZeroDivisionError):
        chosen.run(lambda t: 1 / 0, args=(transfer.host_to_mesh(value(), LAYOUTS[3], chosen.mesh),))
    assert not tf.config.functions_run_eagerly()


def test_an_eager_step_trains_with_the_numbers_of_one_device_with_dropout_of_equal_masks():
    """Every device has the full value of tensors from outside the mesh, such as constants."""

    def build():
        inputs = keras.Input((6, 4))
        x = keras.layers.Dense(8, activation="tanh", name="up")(inputs)
        x = keras.layers.Lambda(lambda t: t[:, ::-1][:, 1:, None] * np.linspace(0, 1, 8, dtype="float32"))(x)
        x = keras.layers.Dropout(0.5, seed=1)(x)
        return keras.Model(inputs, keras.layers.Dense(3, name="down")(x[:, -1, 0]))

    x, y = value((4, 6, 4)), value((4, 3))
    losses = []
    for options in ({}, {"layout_map": {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}}):
        keras.utils.set_random_seed(0)
        model = build()
        if options:
            mesh = tfshard.create_mesh(batch=2, model=2)
            sharded = tfshard.ShardedStrategy(mesh, zero_stage=2, layout_map=tfshard.LayoutMap(options["layout_map"]))
            tfshard.as_distributed(model).compile(keras.optimizers.SGD(0.1), "mse", strategy=sharded, run_eagerly=True)
        else:
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        losses.append([float(model.train_on_batch(x, y)) for _ in range(2)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_dtensor_by_itself_slices_before_a_sharded_dim_without_its_all_to_all():
    """DTensor takes the axis for another dim's, and moves it. Its all-to-all, which is off, gave wrong numbers."""
    mesh = strategy().mesh
    sharded = transfer.host_to_mesh(value(), ("batch", None, "model", None), mesh)
    sliced = tf.function(lambda t: t[:, 1])(sharded)
    assert tuple(sliced.shape) == (4, 6, 4)
    np.testing.assert_array_equal(transfer.to_host(sliced), value()[:, 1])


def test_a_random_crop_is_a_crop_and_another_one_each_time():
    """keras.layers.RandomCrop takes a range that starts at a tensor."""
    chosen, images = strategy(), value((4, 8, 8, 3))
    layer = keras.layers.RandomCrop(5, 6, seed=3)
    with chosen.scope():
        model = keras.Sequential([keras.Input((8, 8, 3)), layer])
    tfshard.as_distributed(model).compile("sgd", "mse", strategy=chosen)
    step = tf.function(lambda t: layer(t, training=True))
    sharded = transfer.host_to_mesh(images, LAYOUTS[1], chosen.mesh)
    places = set()
    for _ in range(4):
        (crop,) = run(chosen, step, sharded)
        (place,) = [(h, w) for h in range(4) for w in range(3) if np.array_equal(crop, images[:, h : h + 5, w : w + 6])]
        places.add(place)
    assert len(places) > 1
