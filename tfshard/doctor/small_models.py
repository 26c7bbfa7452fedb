"""Three small models, each with a batch for some devices."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import keras
import numpy as np

# Samples of a step on each device.
SAMPLES = 8
_CLASSES = 16
_WORDS, _LENGTH, _WIDTH = 256, 32, 64

Batch: TypeAlias = tuple[np.ndarray, np.ndarray]
Builder: TypeAlias = Callable[[int], tuple[keras.Model, Batch]]


def dense(devices: int) -> tuple[keras.Model, Batch]:
    """Return a perceptron."""
    hidden = [keras.layers.Dense(512, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(_CLASSES)], name="dense")
    return model, (_values(devices, 256), _labels(devices))


def convolutional(devices: int) -> tuple[keras.Model, Batch]:
    """Return a convolutional network with batch normalization."""
    layers: list[keras.layers.Layer] = [keras.Input((16, 16, 3))]
    for filters in (16, 32):
        layers += [
            keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(_CLASSES)]
    return keras.Sequential(layers, name="convolutional"), (_values(devices, 16, 16, 3), _labels(devices))


def transformer(devices: int) -> tuple[keras.Model, Batch]:
    """Return a causal language model of two layers."""
    inputs = keras.Input((_LENGTH,), dtype="int32")
    x = keras.layers.Embedding(_WORDS, _WIDTH)(inputs)
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, _WIDTH // 4)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(_WIDTH)(keras.layers.Dense(4 * _WIDTH, "gelu")(y))
    model = keras.Model(inputs, keras.layers.Dense(_WORDS)(x), name="transformer")
    ids = np.random.default_rng(0).integers(0, _WORDS, (SAMPLES * devices, _LENGTH), np.int32)
    return model, (ids, np.roll(ids, -1, axis=1))


MODELS: Mapping[str, Builder] = {"dense": dense, "convolutional": convolutional, "transformer": transformer}


def _values(devices: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(SAMPLES * devices, *shape)).astype("float32")


def _labels(devices: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, _CLASSES, SAMPLES * devices).astype("int32")
