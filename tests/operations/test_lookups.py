"""Lookups of integers in steps match the layer's table."""

import keras
import numpy as np
import pytest

import tfshard

RS = np.random.RandomState(0)
VOCABULARIES = {
    "three": {"vocabulary": [5, 1, 9]},
    "one": {"vocabulary": [7]},
    "many": {"vocabulary": list(RS.permutation(1000)[:333])},
    "several out of it": {"vocabulary": [5, 1, 9], "num_oov_indices": 3},
    "none out of it": {"vocabulary": list(range(12)), "num_oov_indices": 0},
    "a mask": {"vocabulary": [5, 1, 9], "mask_token": 0},
    "multi-hot": {"vocabulary": [5, 1, 9], "output_mode": "multi_hot"},
    "count": {"vocabulary": [5, 1, 9], "output_mode": "count"},
    "backwards": {"vocabulary": [5, 1, 9], "invert": True},
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_step_looks_up_what_the_table_has(name):
    options = VOCABULARIES[name]
    high = {"many": 1000, "backwards": 4}.get(name, 12)
    tokens = RS.randint(0, high, (8, 4))
    inputs = keras.Input((4,), dtype="int64")
    model = keras.Model(inputs, keras.layers.IntegerLookup(**options)(inputs))
    expected = np.array(model(tokens))
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    tfshard.as_distributed(model).compile("sgd", "mse", strategy=strategy)
    found = model.predict(tokens, batch_size=8, verbose=0)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.array(model(tokens)), expected)  # Also outside a step.
