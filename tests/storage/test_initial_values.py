"""Initial values that are drawn later equal plain Keras's values bit for bit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfshard.storage.initial_values import InitialValue

SMALL, LARGE = (6, 8), (512, 640)  # Large ones are drawn in a graph.
INITIALIZERS = [
    keras.initializers.Zeros(), keras.initializers.Ones(), keras.initializers.Constant(0.3),
    keras.initializers.RandomNormal(stddev=0.02, seed=1), keras.initializers.RandomNormal(mean=0.5, seed=1),
    keras.initializers.TruncatedNormal(seed=2), keras.initializers.RandomUniform(seed=3),
    keras.initializers.GlorotUniform(seed=4), keras.initializers.GlorotNormal(seed=4),
    keras.initializers.HeNormal(seed=5), keras.initializers.HeUniform(seed=5), keras.initializers.LecunNormal(seed=6),
    keras.initializers.LecunUniform(seed=6), keras.initializers.VarianceScaling(0.5, "fan_out", "untruncated_normal"),
    keras.initializers.Orthogonal(seed=7), keras.initializers.Identity(),
]  # fmt: skip


@pytest.mark.on_cpu("equal bits: plain Keras draws on the GPU")
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda initializer: type(initializer).__name__)
def test_a_value_that_is_drawn_later_has_the_bits_of_plain_keras(initializer, shape, dtype):
    if dtype == "bfloat16" and isinstance(initializer, keras.initializers.Orthogonal):
        pytest.skip("TensorFlow's QR takes no bfloat16.")
    expected = initializer(shape, dtype=dtype).numpy()
    waiting = InitialValue.of(initializer, shape, dtype)
    assert waiting is not None
    for _ in range(2):
        drawn = waiting.draw()
        assert drawn.shape == shape and drawn.dtype == expected.dtype == waiting.dtype
        assert drawn.tobytes() == expected.tobytes()


def test_one_number_takes_no_memory():
    drawn = InitialValue.of(keras.initializers.Zeros(), (1 << 20, 1 << 20), "float32").draw()
    assert drawn.shape == (1 << 20, 1 << 20) and drawn.strides == (0, 0)


class Own(keras.initializers.RandomNormal):
    """A user's initializer, which may do anything."""


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1)),
        Own(seed=1),
        lambda shape, dtype=None: tf.zeros(shape, dtype),
        keras.initializers.Constant(np.ones((6, 8), np.float32)),
    ],
    ids=["generator", "subclass", "function", "array"],
)
def test_what_may_depend_on_when_it_is_called_does_not_wait(initializer):
    assert InitialValue.of(initializer, SMALL, "float32") is None


def test_other_seeds_and_shapes_are_told_apart():
    make = keras.initializers.RandomNormal
    texts = {
        InitialValue.of(initializer, shape, dtype).text
        for initializer, shape, dtype in [
            (make(seed=1), SMALL, "float32"), (make(seed=2), SMALL, "float32"), (make(seed=1), LARGE, "float32"),
            (make(seed=1), SMALL, "bfloat16"), (make(stddev=0.1, seed=1), SMALL, "float32"),
            (keras.initializers.TruncatedNormal(seed=1), SMALL, "float32"),
        ]
    }  # fmt: skip
    assert len(texts) == 6
    assert InitialValue.of(make(seed=1), SMALL, "float32").text in texts
