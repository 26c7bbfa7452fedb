"""A small classifier and its data, on one device and under a strategy, for the tests of Keras's surface."""

import keras
import numpy as np

import parity
import tfshard

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RS = np.random.RandomState(0)
X = RS.randn(26, 6).astype("float32")
Y = RS.randint(0, 3, 26)


def strategy(stage: int = 3, **axes: int) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(**(axes or {"batch": 4})), zero_stage=stage)


def build(cls=keras.Sequential) -> keras.Model:
    return cls(
        [
            keras.Input((6,)),
            keras.layers.Dense(12, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )


def compiled(distribute: bool, optimizer=keras.optimizers.Adam, **kwargs) -> keras.Model:
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    if distribute:
        kwargs["strategy"] = strategy()
        tfshard.as_distributed(model)
    else:
        kwargs["jit_compile"] = False  # XLA takes longer to compile than these models to train.
    kwargs = {"metrics": ["accuracy"], **kwargs}
    model.compile(optimizer(1e-2), LOSS, **kwargs)
    return model


def both(fn, **kwargs):
    """Return the results of `fn(model)` under a strategy and on one device, and compare the models' weights."""
    reference, model = compiled(False, **kwargs), compiled(True, **kwargs)
    expected, result = fn(reference), fn(model)
    assert parity.shard_axes(model) == {"batch"}
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    return result, expected


def assert_same_history(result, expected, what=""):
    assert result.history.keys() == expected.history.keys()
    for key, values in expected.history.items():
        np.testing.assert_allclose(result.history[key], values, atol=2e-5, err_msg=f"{what} {key}")
