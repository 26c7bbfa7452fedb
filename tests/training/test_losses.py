"""Keras's losses in steps: two steps give the losses and weights of plain Keras."""

import keras
import numpy as np
import pytest

import parity
import tfshard

RS = np.random.RandomState(0)
INPUTS = RS.normal(size=(8, 5)).astype("float32")
CLASSES = RS.randint(0, 3, 8)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
YES_OR_NO = RS.randint(0, 2, (8, 3)).astype("float32")
NUMBERS = RS.uniform(0.1, 1.0, (8, 3)).astype("float32")
L = keras.losses

# The loss, what the model ends in, and labels.
LOSSES = {
    "BinaryCrossentropy": (L.BinaryCrossentropy, "sigmoid", YES_OR_NO),
    "BinaryFocalCrossentropy": (L.BinaryFocalCrossentropy, "sigmoid", YES_OR_NO),
    "CategoricalCrossentropy": (L.CategoricalCrossentropy, "softmax", ONE_HOT),
    "CategoricalFocalCrossentropy": (L.CategoricalFocalCrossentropy, "softmax", ONE_HOT),
    "CategoricalGeneralizedCrossEntropy": (L.CategoricalGeneralizedCrossEntropy, "softmax", CLASSES),
    "CategoricalHinge": (L.CategoricalHinge, "softmax", ONE_HOT),
    "Circle": (L.Circle, "normalized", CLASSES),
    "CosineSimilarity": (L.CosineSimilarity, None, NUMBERS),
    "CTC": (L.CTC, "timesteps", RS.randint(1, 3, (8, 2))),
    "Dice": (L.Dice, "sigmoid", YES_OR_NO),
    "Hinge": (L.Hinge, "tanh", YES_OR_NO),
    "Huber": (L.Huber, None, NUMBERS),
    "KLDivergence": (L.KLDivergence, "softmax", NUMBERS),
    "LogCosh": (L.LogCosh, None, NUMBERS),
    "MeanAbsoluteError": (L.MeanAbsoluteError, None, NUMBERS),
    "MeanAbsolutePercentageError": (L.MeanAbsolutePercentageError, None, NUMBERS),
    "MeanSquaredError": (L.MeanSquaredError, None, NUMBERS),
    "MeanSquaredLogarithmicError": (L.MeanSquaredLogarithmicError, "sigmoid", NUMBERS),
    "Poisson": (L.Poisson, "sigmoid", NUMBERS),
    "SparseCategoricalCrossentropy": (L.SparseCategoricalCrossentropy, "softmax", CLASSES),
    "SquaredHinge": (L.SquaredHinge, "tanh", YES_OR_NO),
    "Tversky": (L.Tversky, "sigmoid", YES_OR_NO),
}
REFUSED = {"CTC": "needs operands whose shapes are known"}


def build(ending: str | None) -> keras.Model:
    inputs = keras.Input((5,))
    x = keras.layers.Dense(4, activation="tanh")(inputs)
    if ending == "timesteps":
        return keras.Model(inputs, keras.layers.Reshape((5, 3))(keras.layers.Dense(15)(x)))
    if ending == "normalized":
        return keras.Model(inputs, keras.layers.UnitNormalization()(keras.layers.Dense(3)(x)))
    return keras.Model(inputs, keras.layers.Dense(3, activation=ending)(x))


def train(name: str, strategy: tfshard.ShardedStrategy | None) -> parity.Run:
    loss, ending, labels = LOSSES[name]
    return parity.train(
        lambda: build(ending), [(INPUTS, labels)], optimizer=lambda: keras.optimizers.SGD(0.1), loss=loss(), steps=2,
        strategy=strategy,
    )  # fmt: skip


def strategy() -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)


def test_every_loss_of_keras_is_tried():
    classes = {name for name, value in vars(keras.losses).items() if isinstance(value, type)}
    assert classes - {"Loss"} == set(LOSSES)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in REFUSED])
def test_a_loss_trains_as_on_one_device(name):
    run = train(name, strategy())
    assert "batch" in parity.shard_axes(run.model)
    reference = train(name, None)
    assert abs(reference.losses[1] - reference.losses[0]) > 1e-5, "premise: it trains"
    # Gradients of some are in the hundreds.
    parity.assert_same(run, reference, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_refused_says_why(name):
    with pytest.raises(tfshard.errors.UnsupportedOperationError, match=REFUSED[name]):
        train(name, strategy())
