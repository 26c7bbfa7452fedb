"""Elements decode to the nearest numbers of the codes."""

import numpy as np
import pytest
import tensorflow as tf

from tfshard.devices import block_codes
from tfshard.layouts.variable_layout import BLOCK_BYTES, BLOCK_ELEMENTS

RS = np.random.RandomState(0)
LARGEST = {"int8": 127, "float8_e4m3fn": 448}
FLOAT8 = tf.dtypes.experimental.float8_e4m3fn.as_numpy_dtype


def there_and_back(lines: np.ndarray, dtype: str) -> np.ndarray:
    encoded = block_codes.encode(tf.constant(lines), dtype)
    blocks = -(-lines.shape[1] // BLOCK_ELEMENTS)
    assert encoded.shape == (len(lines), blocks * BLOCK_BYTES // 4), "the planned words"
    return block_codes.decode(encoded, dtype, lines.shape[1]).numpy()


@pytest.mark.parametrize("dtype", LARGEST)
def test_elements_become_the_nearest_code(dtype):
    lines = (RS.normal(size=(3, 1000)) * np.exp(3 * RS.normal(size=(3, 1000)))).astype("float32")
    lines[1, 256:512] = 0
    blocks = np.pad(lines, ((0, 0), (0, 24))).reshape(3, 4, 256)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(LARGEST[dtype])
    multiples = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    if dtype == "int8":
        multiples = np.round(multiples)
    else:
        multiples = np.clip(multiples, -448, 448).astype(FLOAT8).astype("float32")
    expected = (multiples * scale).reshape(3, -1)[:, :1000]
    np.testing.assert_array_equal(there_and_back(lines, dtype), expected)


@pytest.mark.parametrize("dtype", LARGEST)
def test_every_number_of_a_code_is_exact(dtype):
    """A number in the middle of two codes becomes the even code."""
    if dtype == "int8":
        numbers = np.arange(-127, 128).astype("float32")
    else:
        numbers = np.arange(256).astype("uint8").view(FLOAT8).astype("float32")
        numbers = numbers[np.isfinite(numbers)]
    line = np.concatenate([numbers, np.zeros(256 - numbers.size, "float32")])[np.newaxis]
    np.testing.assert_array_equal(there_and_back(line, dtype), line)
    halves = np.sort(numbers)
    halves = ((halves[1:] + halves[:-1]) / 2).astype("float32")[-255:]
    halves = np.append(halves, np.float32(LARGEST[dtype]))[np.newaxis]
    expected = np.round(halves) if dtype == "int8" else halves.astype(FLOAT8).astype("float32")
    np.testing.assert_array_equal(there_and_back(halves, dtype), expected)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_decodes_to_nan(dtype, wrong):
    line = RS.normal(size=(1, 512)).astype("float32")
    line[0, 300] = wrong
    found = there_and_back(line, dtype)
    assert np.isnan(found[0, 256:]).all()
    assert np.isfinite(found[0, :256]).all()
