"""8-bit codes: the map of the paper, and the properties that optimizers need."""

import numpy as np
import pytest
import tensorflow as tf

from tfshard.storage import eight_bits

RS = np.random.RandomState(0)
BLOCKS = {
    "first moments": RS.normal(size=(40, 256)),
    "second moments": RS.normal(size=(40, 256)) ** 2,
    "wide": RS.choice([-1, 1], size=(40, 256)) * 10 ** RS.uniform(-30, 5, size=(40, 256)),
    "wide, not negative": 10 ** RS.uniform(-30, 5, size=(40, 256)),
    "with zeros": RS.normal(size=(40, 256)) * (RS.uniform(size=(40, 256)) < 0.5),
    "one tiny negative": np.where(np.arange(256) == 7, -1e-12, np.abs(RS.normal(size=(40, 256)))),
    "zeros": np.zeros((2, 256)),
}
BLOCKS = {name: values.astype(np.float32) for name, values in BLOCKS.items()}


def dynamic_map(signed: bool) -> np.ndarray:
    """Compute the map as create_dynamic_map of bitsandbytes does: the midpoints of the intervals of seven decades."""
    found = [0.0]
    for decade in range(7):
        bounds = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = 10.0 ** (decade - 6) * (bounds[:-1] + bounds[1:]) / 2
        found += [*middles, *(-middles if signed else [])]
    return np.sort([*found, 1.0]).astype(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    return eight_bits.decode(eight_bits.encode(tf.constant(values))).numpy()


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_the_paper_with_an_exact_largest(signed):
    scale = np.full((256, 4), 0)
    scale[:] = np.frombuffer(np.float32(1 if signed else -1).tobytes(), np.uint8)
    stored = np.concatenate([np.arange(256)[None].repeat(256, 0), scale], -1).astype(np.uint8)
    found = np.unique(eight_bits.decode(tf.constant(stored)).numpy())
    paper = dynamic_map(signed)
    # The outermost code stands for the end of its interval, 1. The paper has the midpoint and 1.
    ends = [-1.0, 1.0] if signed else [1.0]
    middles = paper[(np.abs(paper) < 0.98) if signed else (paper < 0.996)]
    np.testing.assert_allclose(found, np.unique([*middles, *ends]), rtol=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_an_element_becomes_one_near_it(name):
    values = BLOCKS[name]
    largest = np.abs(values).max(-1, keepdims=True)
    signed = values.min(-1, keepdims=True) < 0
    # Half an interval of its decade; at the upper end, and below the lowest decade, a full interval.
    share = np.abs(values) / np.maximum(largest, 1e-30)
    decade = np.clip(np.floor(np.log10(np.maximum(share, 1e-30)) + 1e-4) + 7, 0, 6)
    place = 0.9 / 2 ** (decade + ~signed) * 10 ** (decade - 6)
    bound = np.where((share > 1 - place) | (share < 1e-6), place, place / 2) * largest
    assert (np.abs(rounded(values) - values) <= 1.001 * bound).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_signs_and_zeros_and_the_largest_stay(name):
    values = BLOCKS[name]
    found = rounded(values)
    np.testing.assert_array_equal(np.sign(found), np.sign(values))
    largest = np.abs(values).argmax(-1)[:, None]
    np.testing.assert_array_equal(np.take_along_axis(found, largest, -1), np.take_along_axis(values, largest, -1))


@pytest.mark.parametrize("name", BLOCKS)
def test_what_was_decoded_has_the_same_codes(name):
    stored = eight_bits.encode(tf.constant(BLOCKS[name]))
    np.testing.assert_array_equal(eight_bits.encode(eight_bits.decode(stored)), stored)


def test_a_number_that_is_not_finite_is_seen():
    values = BLOCKS["first moments"][:4].copy()
    values[0, 3], values[1, 4], values[2, 5] = np.nan, np.inf, -np.inf
    found = rounded(values)
    assert not np.isfinite(found[:3]).any() and np.isfinite(found[3]).all()
