"""`training_flops` matches the formulas of layers."""

import keras
import numpy as np
import pytest

import tfshard
from tfshard.planning import training_flops

L = keras.layers
B = 8


def chain(shape, *layers, dtype=None) -> keras.Model:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def attention() -> keras.Model:
    inputs = keras.Input((5, 8))
    return keras.Model(inputs, L.MultiHeadAttention(2, 4)(inputs, inputs))


# The first layer has two products (its input needs no gradient), the others have three.
CASES = {
    "dense": (lambda: chain((4,), L.Dense(6), L.Dense(2)), 2 * B * (2 * 4 * 6 + 3 * 6 * 2)),
    "convolutions": (
        lambda: chain((8, 8, 4), L.Conv2D(6, 3, padding="same"), L.Conv2D(5, 3, strides=2, padding="same")),
        2 * B * (2 * 64 * 6 * 9 * 4 + 3 * 16 * 5 * 9 * 6),
    ),
    "depthwise": (
        lambda: chain((8, 8, 4), L.Conv2D(6, 1), L.DepthwiseConv2D(3, padding="same")),
        2 * B * 64 * (2 * 6 * 4 + 3 * 6 * 9),
    ),
    "volumes": (lambda: chain((4, 4, 4, 2), L.Conv3D(6, 3, padding="same")), 2 * B * 2 * 64 * 6 * 27 * 2),
    "transposed": (
        lambda: chain((8, 8, 4), L.Conv2DTranspose(6, 3, strides=2, padding="same")), 2 * B * 2 * 64 * 4 * 9 * 6,
    ),
    "attention": (attention, 2 * B * (5 * 8 * 8 * (3 * 2 + 3) + 3 * 2 * (2 * 5 * 5 * 4))),
    "a loop": (lambda: chain((7, 3), L.LSTM(4)), 2 * B * 7 * 16 * (2 * 3 + 3 * 4)),
    "a lookup": (lambda: chain((7,), L.Embedding(10, 4), L.Flatten(), L.Dense(3), dtype="int32"), 2 * B * 3 * 28 * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_products_of_its_layers(name):
    build, expected = CASES[name]
    model = build()
    assert training_flops(model, np.ones((B, *model.input_shape[1:]), model.inputs[0].dtype)) == expected


def test_what_is_computed_again_and_what_is_sharded_is_counted_once():
    model = chain((8,), L.Dense(8, name="block_1"), L.Dense(8, name="block_2"))
    expected = training_flops(model, np.ones((B, 8)))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), microbatches=2)
    tfshard.as_distributed(model).compile("adam", "mse", strategy=strategy)
    assert strategy.recompute(model, ".*")
    assert training_flops(model, np.ones((B, 8))) == expected


def test_a_loop_of_unknown_length_is_not_told():
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, L.LSTM(4)(inputs))
    assert training_flops(model, keras.KerasTensor((B, None, 3))) is None
