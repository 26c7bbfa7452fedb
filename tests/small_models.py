"""Models that tests of several subpackages train."""

import keras


def attention() -> keras.Model:
    """Return a model with two transformer layers over six tokens of 24, and four classes."""
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(24, 16)(inputs)
    for _ in range(2):
        x = x + keras.layers.MultiHeadAttention(2, 8)(keras.layers.LayerNormalization()(x), x)
        x = x + keras.layers.Dense(16)(keras.layers.Dense(32, activation="gelu")(x))
    return keras.Model(inputs, keras.layers.Dense(4)(x[:, 0]))


def reshaped() -> keras.Model:
    """Return a model that attends to two positions, which a reshape makes of six features. Equal at each call."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    rows = keras.layers.Reshape((2, 3))(keras.layers.Dense(6, "tanh")(inputs))
    attended = keras.layers.MultiHeadAttention(1, 4)(rows, rows)
    return keras.Model(inputs, keras.layers.Dense(6)(keras.layers.Flatten()(attended)))
